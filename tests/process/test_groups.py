"""A group on a real server with two workers: created, changed with qimctl, left, and read by interval."""

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from qim.client.probe import Probe, expect
from qim.errors import ExitCode
from qim.ids import ClientMessageId
from qim.records import Kind, MessageType
from qim.wire import bodies
from qim.wire.layout import Op
from tests.process.service import REPOSITORY
from tests.services.dev_server import DevServer, User
from tests.waiting import eventually_async

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    with DevServer(tmp_path_factory.mktemp("d"), workers=2) as dev:
        yield dev


def membership(dev: DevServer, *arguments: str, code: int = ExitCode.OK) -> dict[str, Any]:
    program = "from qim.ctl.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", program, "membership", *arguments, "--data-dir", str(dev.folder), "--json"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == code, result.stdout + result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def probe(dev: DevServer, user: User) -> Probe:
    return Probe("127.0.0.1", dev.port, dev.certificate, token=user.token)


async def say(client: Probe, group: bytes, number: int) -> int:
    target = bodies.Target(Kind.GROUP, group)
    cmid = ClientMessageId(number.to_bytes(16, "big"))
    body = bodies.SendMessage(target, cmid, MessageType.TEXT, "", b"hello")
    return expect(bodies.SendAck, await client.ask(Op.SEND_MESSAGE, body)).conversation_seq


async def delivered(client: Probe) -> list[int]:
    return sorted(entry.conversation_seq for _seq, entry in await client.drain_mailbox())


@pytest.mark.shows("G2", "G3", "G5", "G6", "G7", "G11", "X11")
async def test_each_gets_what_was_said_while_a_member_and_the_own_events(dev: DevServer) -> None:
    alice, bob, carol = (dev.new_user() for _ in range(3))
    async with probe(dev, alice) as a, probe(dev, bob) as b, probe(dev, carol) as c:
        wish = bodies.CreateGroup(b"r" * 16, "readers", [bob.user])
        group = expect(bodies.GroupCreated, await a.ask(Op.CREATE_GROUP, wish)).group_id
        assert await say(a, group, 1) == 1
        added = membership(dev, "add", group.hex(), carol.user.hex(), "--request-id", "11" * 16)
        assert (added["event_seq"], added["member_count"]) == (2, 3)
        assert await say(b, group, 2) == 3
        left = await b.ask(Op.LEAVE_GROUP, bodies.LeaveGroup(group))
        assert expect(bodies.MemberListBatch, left).total == 2
        assert await say(a, group, 3) == 5
        again = membership(dev, "add", group.hex(), carol.user.hex(), "--request-id", "11" * 16)
        assert again == added
        listed = membership(dev, "list", group.hex())
        assert {row["user"]: row["joined_at"] for row in listed["members"]} == {
            alice.user.hex(): 0, carol.user.hex(): 1,
        }  # fmt: skip
        for client, seqs in ((a, [1, 2, 3, 4, 5]), (b, [1, 2, 3, 4]), (c, [2, 3, 4, 5])):
            await eventually_async(partial(_has, client, seqs), what=f"{seqs}")
        page = await b.ask(Op.PULL_HISTORY, bodies.PullHistory(bodies.Target(Kind.GROUP, group)))
        assert expect(bodies.HistoryBatch, page).head_seq == 3
    audit = dev.tool("audit", "--json")
    assert audit.returncode == ExitCode.OK, audit.stdout + audit.stderr
    assert json.loads(audit.stdout)["walked"]["outbox_records"] == 5


async def _has(client: Probe, seqs: list[int]) -> bool:
    return await delivered(client) == seqs


def test_a_command_for_no_group_is_refused(dev: DevServer) -> None:
    assert membership(dev, "list", "00" * 16, code=ExitCode.NO)["error"] == "there is no such group"
    assert membership(dev, "add", "short", "11" * 16, code=ExitCode.USAGE)["code"] == ExitCode.USAGE

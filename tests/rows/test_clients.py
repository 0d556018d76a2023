"""Clients that are killed, copied and doubled: F-37, F-38 and F-39, with the SDK against a whole service."""

import asyncio
import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from qim.client import AsyncClient, AuthError, Message, MessageRejected, MessageState
from qim.errors import Conflict, Replaced
from qim.ids import Seq
from tests.faults.proxy import Faults, Proxy
from tests.field.figures import Figures
from tests.process.load import Account
from tests.process.service import REPOSITORY
from tests.rows.sdk_process import KILLED
from tests.rows.world import new_account, probe_of
from tests.services.dev_server import DevServer
from tests.waiting import eventually_async, happens

pytestmark = pytest.mark.timeout(240)
STEPS = ("before_pending", "before_frame", "before_ack", "inside_page", "before_tell")
RANDOM_KILLS = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    with DevServer(tmp_path_factory.mktemp("d")) as server:
        yield server


@pytest.fixture
def pair(server: DevServer) -> tuple[Account, Account]:
    return new_account(server), new_account(server)


def client_of(server: DevServer, account: Account, folder: Path, *, port: int = 0) -> AsyncClient:
    endpoint = f"127.0.0.1:{port or server.port}"
    return AsyncClient(endpoint, account.token, ca=server.certificate, data_dir=folder)


async def texts(client: AsyncClient, peer: Account) -> list[str]:
    return [message.text for message in await client.messages(peer.user, limit=100_000)]


# --- F-37 ---------------------------------------------------------------------------------------------


class Victim:
    """The process that is killed, its files, and what must be true of them after each death."""

    def __init__(self, server: DevServer, account: Account, peer: Account, folder: Path) -> None:
        self.server, self.account, self.peer, self.folder = server, account, peer, folder
        self.runs = 0
        folder.mkdir(exist_ok=True)

    def start(self, *, step: str = "", hit: int = 0) -> "subprocess.Popen[bytes]":
        self.runs += 1
        (self.folder / "struck").unlink(missing_ok=True)
        spec = {
            "endpoint": f"127.0.0.1:{self.server.port}", "token": self.account.token,
            "ca": str(self.server.certificate), "folder": str(self.folder), "peer": self.peer.user.hex(),
            "step": step, "hit": hit, "run": f"run {self.runs}",
        }  # fmt: skip
        path = self.folder / "spec.json"
        path.write_text(json.dumps(spec))
        return subprocess.Popen([sys.executable, "-m", "tests.rows.sdk_process", str(path)], cwd=REPOSITORY)

    def lines(self, name: str) -> list[tuple[str, str]]:
        path = self.folder / name
        found = path.read_text().splitlines() if path.exists() else []
        return [(first, rest) for first, _, rest in (line.partition(" ") for line in found)]

    @property
    def database(self) -> Path:
        (path,) = (self.folder / "data").rglob("*.db")
        return path

    async def check_cursor(self) -> None:
        """Everything at or below the stored cursor is in the store."""
        with closing(sqlite3.connect(self.database)) as connection:
            (cursor,) = connection.execute("SELECT value FROM meta WHERE key = 'cursor'").fetchone()
            stored = {seq for (seq,) in connection.execute("SELECT conversation_seq FROM message")}
            assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        async with probe_of(self.server, self.account) as probe:
            entries = await probe.drain_mailbox()
        covered = {entry.conversation_seq for seq, entry in entries if seq <= cursor}
        assert covered <= stored, "the cursor ran ahead of the messages"


async def feed(server: DevServer, sender: Account, receiver: Account, *, count: int) -> None:
    """Messages that arrive at the victim meanwhile."""
    async with probe_of(server, sender) as probe:
        for number in range(count):
            await probe.send(receiver.user, f"fed {number}")


@pytest.mark.long
@pytest.mark.shows("F-37", "K1", "K2", "K4", "K6")
async def test_a_client_killed_at_any_step_shows_nothing_twice_and_loses_nothing_it_queued(
    server: DevServer, pair: tuple[Account, Account], tmp_path: Path, figures: Figures
) -> None:
    account, peer = pair
    victim = Victim(server, account, peer, tmp_path / "victim")
    for step in STEPS:
        for hit in (1, 3):
            process = victim.start(step=step, hit=hit)
            await feed(server, peer, account, count=10)
            code = await asyncio.to_thread(process.wait, 30)
            assert code == KILLED, f"{step} did not strike"
            assert (victim.folder / "struck").exists()
            await victim.check_cursor()
    chance = random.Random(37)
    for _ in range(RANDOM_KILLS):
        before = len(victim.lines("queued"))
        wanted = before + chance.randint(1, 60)
        process = victim.start()
        await feed(server, peer, account, count=10)
        await happens(lambda n=wanted: len(victim.lines("queued")) >= n, what="progress", timeout_seconds=30)  # type: ignore[misc]  # bound in this turn of the loop
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait, 10)
        await victim.check_cursor()
    await settle(victim)
    figures.note("kills at named steps", len(STEPS) * 2)
    figures.note("kills at random moments", RANDOM_KILLS)
    figures.note("messages queued", len(victim.lines("queued")))
    figures.note("messages told to the application", len(victim.lines("told")))


async def settle(victim: Victim) -> None:
    """The last start is left alive: then store, history and the promises are compared."""
    server, account, peer = victim.server, victim.account, victim.peer
    promised = dict(victim.lines("queued"))
    async with client_of(server, account, victim.folder / "data") as client:

        async def is_empty() -> bool:
            shown = await client.messages(peer.user, limit=100_000)
            return all(message.state is MessageState.STORED for message in shown)

        await eventually_async(is_empty, what="everything queued is acknowledged", timeout_seconds=30)
        async with probe_of(server, account) as probe:
            history = await probe.history(peer.user)

        async def is_equal() -> bool:
            shown = await client.messages(peer.user, limit=100_000)
            return [m.conversation_seq for m in shown] == [e.conversation_seq for e in history]

        await eventually_async(is_equal, what="the store equals history")
    assert [entry.conversation_seq for entry in history] == list(range(1, len(history) + 1))
    own = [entry.record for entry in history if entry.record.sender == account.user]
    by_id = {record.client_message_id.hex(): record.body.decode() for record in own}
    assert len(by_id) == len(own) == len(set(by_id.values())), "an identity or a text was used twice"
    assert promised.items() <= by_id.items(), "a queued message is missing or has another identity"
    told = Counter(seq for seq, _ in victim.lines("told"))
    assert not told or max(told.values()) == 1, "the application was told of a message twice"


# --- F-38 ---------------------------------------------------------------------------------------------


@pytest.mark.shows("F-38", "C5", "K6")
async def test_two_copies_of_one_store_lose_nothing_silently(
    server: DevServer, pair: tuple[Account, Account], tmp_path: Path
) -> None:
    account, peer = pair
    with Proxy(("127.0.0.1", server.port)) as proxy:
        async with client_of(server, account, tmp_path / "one", port=proxy.port) as one:
            await one.send(peer.user, "before")
        proxy.set(Faults(refuse=True))
        async with client_of(server, account, tmp_path / "one", port=proxy.port) as one:
            await one.queue(peer.user, "queued before the copy")
        assert proxy.counters.refused
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        proxy.heal()
        async with client_of(server, account, tmp_path / "one", port=proxy.port) as one:
            await one.send(peer.user, "from the original")
            async with client_of(server, account, tmp_path / "two", port=proxy.port) as two:
                with pytest.raises(AuthError) as replaced:
                    await until_ended(one)
                assert replaced.value.code == Replaced.code
                with pytest.raises(MessageRejected) as refused:
                    await two.send(peer.user, "from the copy")
                assert refused.value.code == Conflict.code
                await two.send(peer.user, "after the copy")
                proxy.reset()
                async with client_of(server, account, tmp_path / "one", port=proxy.port) as again:
                    # Two devices now: neither ends the other, and both go on under identities of their own.
                    await again.send(peer.user, "the original again")
                    await two.send(peer.user, "the copy again")
                    wanted = [
                        "before", "queued before the copy", "from the original", "after the copy",
                        "the original again", "the copy again",
                    ]  # fmt: skip
                    await until_shown(again, peer, wanted)
                    await until_shown(two, peer, [*wanted, "from the copy"])
                    failed = [m for m in await two.messages(peer.user) if m.state is MessageState.FAILED]
                    assert [message.text for message in failed] == ["from the copy"]
    async with probe_of(server, account) as probe:
        history = await probe.history(peer.user)
    assert sorted(entry.record.body.decode() for entry in history) == sorted(wanted)


async def until_ended(client: AsyncClient) -> None:
    async for _ in client.events():
        pass


async def until_shown(client: AsyncClient, peer: Account, wanted: list[str]) -> None:
    async def is_complete() -> bool:
        return sorted(await texts(client, peer)) == sorted(wanted)

    await eventually_async(is_complete, what=f"{len(wanted)} messages are shown")


# --- F-39 ---------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.shows("F-39", "K2", "K3")
async def test_two_devices_and_one_from_an_old_backup_all_end_complete(
    server: DevServer, pair: tuple[Account, Account], tmp_path: Path, figures: Figures
) -> None:
    account, peer = pair
    async with client_of(server, account, tmp_path / "tablet") as tablet:
        async with client_of(server, account, tmp_path / "phone") as phone:
            await talk(server, account, peer, phone, tablet, texts_each=60, name="first")
        shutil.copytree(tmp_path / "phone", tmp_path / "backup")
        async with client_of(server, account, tmp_path / "phone") as phone:
            await talk(server, account, peer, phone, tablet, texts_each=60, name="second")
            wanted = await complete(tablet, peer, 240)
            assert await complete(phone, peer, 240) == wanted
        # The backup logs in as the phone that it was: its cursor is old and is served from there.
        async with client_of(server, account, tmp_path / "backup") as backup:
            assert await complete(backup, peer, 240) == wanted
        future = shutil.copytree(tmp_path / "phone", tmp_path / "future")
        (database,) = future.rglob("*.db")
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("UPDATE meta SET value = value + 1000000 WHERE key = 'cursor'")
            connection.execute("DELETE FROM message WHERE conversation_seq > 200")
            connection.commit()
        async with client_of(server, account, tmp_path / "future") as ahead:
            assert await complete(ahead, peer, 240) == wanted, "a cursor above W was believed"
    figures.note("devices of one user", 4)
    figures.note("messages on each", len(wanted))


async def talk(
    server: DevServer, account: Account, peer: Account, phone: AsyncClient, tablet: AsyncClient, *,
    texts_each: int, name: str,
) -> None:  # fmt: skip
    """Both devices and the peer at the same time; half of the messages are the peer's."""

    async def of_device(device: AsyncClient, label: str) -> None:
        for number in range(texts_each // 2):
            await device.send(peer.user, f"{name} {label} {number}")

    async def of_peer() -> None:
        async with probe_of(server, peer) as probe:
            for number in range(texts_each):
                await probe.send(account.user, f"{name} peer {number}")

    await asyncio.gather(of_device(phone, "phone"), of_device(tablet, "tablet"), of_peer())


async def complete(client: AsyncClient, peer: Account, count: int) -> list[tuple[Seq, str]]:
    async def read() -> list[Message]:
        shown = await client.messages(peer.user, limit=1_000)
        return shown if len(shown) >= count else []

    shown = await eventually_async(read, what=f"{count} messages are here", timeout_seconds=20)
    found = [(message.conversation_seq, message.text) for message in shown]
    assert [seq for seq, _ in found] == list(range(1, count + 1))
    return found

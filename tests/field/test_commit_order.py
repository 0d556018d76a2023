"""O05: a later message is committed before an earlier one, whose writer hangs or is dead.

A second hand reserves sequence n under the owner's own epoch and never goes on, as a writer that stands still
between its two steps. What comes behind it is acknowledged at once; nothing may pass it.
"""

import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from qim.adapters.commits_redis import RedisCommitStore
from qim.adapters.lua_scripts import LuaScripts
from qim.adapters.redis_keys import OWNER
from qim.adapters.redis_pipe import RedisPipe
from qim.client import AsyncClient
from qim.client.probe import Probe, expect
from qim.clock import SystemClock
from qim.domain.placement import slot_of_bucket
from qim.domain.writer import plan_send
from qim.ids import BootId, DeviceId, SlotId, UserId
from qim.limits import RECOVER_AGE_MS, RECOVER_INTERVAL_MS
from qim.ports import MessageKey, Reservation, Reserved, SlotClaim
from qim.records import Entry, Kind, MessageType, entry_coordinates
from qim.wire import bodies
from tests.field.figures import Figures
from tests.process.load import Account
from tests.rows.world import TENANT, new_account, probe_of, redis_of
from tests.services.dev_server import DevServer
from tests.waiting import eventually_async, happens

pytestmark = pytest.mark.timeout(120)
HELD_TEXT = "n"
STATED_SECONDS = (RECOVER_AGE_MS + RECOVER_INTERVAL_MS) / 1000
"""A hole is closed when its message is two seconds old, at the next look, which comes every second."""
SLACK_SECONDS = 2.0
RESTART_SECONDS = 5.0


def claim_in(owner: bytes, slot: SlotId) -> SlotClaim:
    """epoch 8, boot 16, supervisor 16, placement 16 and more."""
    boot, supervisor, placement = (owner[at : at + 16] for at in (8, 24, 40))
    return SlotClaim((slot,), BootId(boot), supervisor, "a second hand", placement)


class Held(NamedTuple):
    cmid: bytes
    seq: int


async def reserve(server: DevServer, sender: Account, peer: Account) -> Held:
    """Takes the next sequence and stops there: the message is RECORDED and in nobody's flight."""
    with redis_of(server) as store:
        path = store.connection_pool.connection_kwargs["path"]
        owners: dict[bytes, bytes] = store.hgetall(OWNER)
    cmid, clock = os.urandom(16), SystemClock()
    plan = plan_send(
        tenant=TENANT, sender=UserId(sender.user), device=DeviceId(sender.device),
        target_kind=Kind.DIRECT, target=peer.user, client_message_id=cmid, message_type=MessageType.TEXT,
        custom_type="", body=HELD_TEXT.encode(), retention_class=0, now_ms=clock.now_ms(),
    )  # fmt: skip
    record = plan.record
    key = MessageKey(
        plan.route.bucket, TENANT, plan.route.conversation, record.sender, record.client_message_id
    )
    pipe = RedisPipe(f"unix://{path}", clock=clock, scripts=LuaScripts.load())
    await pipe.connect()
    try:
        commits = RedisCommitStore(pipe, clock)
        # The claim of the owner itself, once more: it keeps the epoch, so that the script takes us for it.
        slot = slot_of_bucket(plan.route.bucket)
        claim = claim_in(owners[b"%d" % slot], slot)
        epoch = struct.unpack_from(">Q", owners[b"%d" % slot])[0]
        assert (await commits.claim(claim)).epochs == {slot: epoch}
        reservation = Reservation(key, plan.identity, plan.record_bytes, record.reserved_at, plan.expires_at)
        (result,) = await commits.reserve([reservation])
    finally:
        await pipe.close()
    assert result.outcome is Reserved.NEW
    return Held(cmid, int(result.seq))


class Poller:
    """C: asks for what is new every 200 ms and remembers in which order it came."""

    def __init__(self, probe: Probe) -> None:
        self._probe, self._cursor = probe, 0
        self.seen: list[tuple[int, int]] = []

    async def poll(self) -> None:
        for mailbox_seq, entry in await self._probe.drain_mailbox(after=self._cursor):
            self.seen.append((mailbox_seq, int(entry.conversation_seq)))
            self._cursor = mailbox_seq

    @property
    def order(self) -> list[int]:
        return [seq for _, seq in self.seen]


@pytest.mark.shows("O05", "X5", "X6", "F-04")
@pytest.mark.parametrize("is_killed", [False, True], ids=["stalled", "killed"])
async def test_what_is_committed_behind_a_hole_waits_in_history_and_passes_nobodys_cursor(
    is_killed: bool, tmp_path: Path, figures: Figures
) -> None:
    with DevServer(tmp_path) as server:
        sender, receiver = new_account(server), new_account(server)
        sdk = AsyncClient(
            f"127.0.0.1:{server.port}", receiver.token, ca=server.certificate, data_dir=tmp_path / "sdk"
        )
        async with sdk as device:
            async with probe_of(server, sender) as probe:
                await probe.send(receiver.user, "before")
            began = time.monotonic()
            held = await reserve(server, sender, receiver)
            assert held.seq == 2
            first = await watch_hole(server, sender, receiver, is_killed=is_killed)
            seconds = time.monotonic() - began
            async with probe_of(server, sender) as probe:
                again = expect(bodies.SendAck, await probe.send(receiver.user, HELD_TEXT, cmid=held.cmid))
                assert (int(again.conversation_seq), again.duplicate) == (held.seq, True)
                assert [entry.record.body for entry in await probe.history(receiver.user)] == [
                    b"before", b"n", b"n + 1", b"n + 2",
                ]  # fmt: skip

            async def shown() -> bool:
                return [m.text for m in await device.messages(sender.user)] == [
                    "before",
                    "n",
                    "n + 1",
                    "n + 2",
                ]

            await eventually_async(shown, what="the device shows all of them, by sequence")
    limit = STATED_SECONDS + SLACK_SECONDS + (RESTART_SECONDS if is_killed else 0)
    assert seconds < limit, "the hole was closed too late"
    figures.note("the writer is", "killed" if is_killed else "stalled")
    figures.note("acknowledged behind the hole within seconds", first)
    figures.note("the hole was closed after seconds", seconds)
    figures.note("at most, as stated", limit)


async def watch_hole(server: DevServer, sender: Account, receiver: Account, *, is_killed: bool) -> float:
    """Sends behind the hole, and follows history, pushes and a polling device until it is closed."""
    async with probe_of(server, receiver) as pushed, probe_of(server, receiver) as polled:
        poller = Poller(polled)
        async with probe_of(server, sender) as probe:
            began = time.monotonic()
            for text in ("n + 1", "n + 2"):
                expect(bodies.SendAck, await probe.send(receiver.user, text))
            first = time.monotonic() - began
            assert first < RECOVER_AGE_MS / 1000, "a hole held up what came behind it"
        await poller.poll()
        assert visible(await pushed.history(sender.user)) == [1]
        if not is_killed:
            await happens(lambda: {3, 4} <= told(pushed), what="both are pushed over the hole")
            return await until_closed(pushed, poller, sender, first)
        (victim,) = server.worker_pids()
        server.kill(victim)
    await happens(
        lambda: victim not in (server.worker_pids() if server.status() else [victim]), what="another"
    )
    server.until_ready()
    async with probe_of(server, receiver) as pushed, probe_of(server, receiver) as polled:
        poller._probe = polled
        return await until_closed(pushed, poller, sender, first)


def told(probe: Probe) -> set[int]:
    """Sequences that were pushed; on a busy machine the message before the hole is among them."""
    return {int(entry_coordinates(raw)[0]) for _, _, raw in probe.pushed}


def visible(history: list[Entry]) -> list[int]:
    return [int(entry.conversation_seq) for entry in history]


async def until_closed(probe: Probe, poller: Poller, sender: Account, first: float) -> float:
    async def is_closed() -> bool:
        await poller.poll()
        found = visible(await probe.history(sender.user))
        assert found in ([1], [1, 2, 3, 4]), "history showed something over a hole"
        return len(found) == 4 and len(poller.order) == 4

    await eventually_async(is_closed, what="the hole is closed")
    assert sorted(poller.order) == [1, 2, 3, 4]
    assert poller.order[-1] == 2, "n has to come behind what a cursor has passed"
    return first

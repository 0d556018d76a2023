"""A device returns after 8 and after 40 days: it is told to rebuild, or it is given everything. Never a hole.

The clocks of the store and of the service really move (`tests/faults/shifted_clock.py`), on a shard that was
busy every day and on one where nothing happened. First every cursor on the real scripts, then a whole
service with the SDK: after its rebuild a device that was away holds what one holds that was never away.
"""

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from qim.adapters.mailbox_redis import RedisMailboxStore
from qim.adapters.redis_pipe import RedisPipe
from qim.client import AsyncClient, Message
from qim.client.probe import Probe, expect
from qim.clock import SystemClock
from qim.domain.placement import shard_of_user
from qim.ids import MailboxSeq, UserId
from qim.limits import DAY_MS, MAILBOX_DAYS, PAGE_ENTRIES_MAX
from qim.ports import Materialised
from qim.records import decode_entry
from qim.wire import bodies
from qim.wire.layout import Op
from tests.faults.shifted_clock import ShiftedClock
from tests.faults.wrapped import write_wrapper
from tests.field.figures import Figures
from tests.lua.mailbox_case import ANN, BEN, SLOT, open_store, query_of, write_of
from tests.process.load import Account
from tests.rows.world import TENANT, new_account, probe_of, redis_of
from tests.services import StoreServer
from tests.services.dev_server import DevServer
from tests.waiting import eventually_async, happens

DAY_SECONDS = DAY_MS // 1000
AWAY = (8, 40)


# --- every cursor, on the scripts ---------------------------------------------------------------------


class Shard:
    """One shard on a store whose clock is ours, and everything that was ever delivered to ANN."""

    def __init__(self, pipe: RedisPipe, store: RedisMailboxStore, clock: ShiftedClock) -> None:
        self.pipe, self.store, self._clock = pipe, store, clock
        self.seq = 0
        self.delivered: list[int] = []
        self.day_of: dict[int, int] = {0: -1}
        """The day at whose end a cursor stood; 0 is the cursor of a new device."""
        self.day = 0

    async def pass_days(self, days: int) -> None:
        self.day += days
        self._clock.shift(seconds=self.day * DAY_SECONDS)
        wanted = SystemClock().now_ms() // 1000 + self.day * DAY_SECONDS

        async def has_moved() -> bool:
            seconds, _ = await self.pipe.command("TIME")
            return abs(int(seconds) - wanted) < DAY_SECONDS // 2

        # A store looks at its clock some times a second, not for every command.
        await eventually_async(has_moved, what="the store has seen its clock move")

    async def deliver(self, *, to_ann: bool) -> None:
        expected, self.seq = self.seq, self.seq + 1
        write = write_of(self.seq, users=(ANN if to_ann else BEN,), name=b"%d" % self.seq)
        (answer,) = await self.store.materialise({SLOT: MailboxSeq(expected)}, [write])
        assert answer is Materialised.DONE
        self.day_of[self.seq] = self.day
        if to_ann:
            self.delivered.append(self.seq)

    async def rebuilt(self) -> set[int]:
        """Cursors that must rebuild; every other one gets all that is above it, and nothing else."""
        told = set()
        for cursor in range(self.seq + 1):
            (page,) = await self.store.read_mailbox([query_of(ANN, after=cursor)])
            if page.rebuild:
                told.add(cursor)
                assert page.covered_through == self.seq
            else:
                assert [seq for seq, _ in page.entries] == [n for n in self.delivered if n > cursor]
        return told


@pytest.fixture
def clock(tmp_path: Path) -> ShiftedClock:
    return ShiftedClock(tmp_path)


@pytest.fixture
async def shard(valkey_binary: str, tmp_path: Path, clock: ShiftedClock) -> AsyncIterator[Shard]:
    wrapper = write_wrapper(tmp_path / "shifted", valkey_binary, environment=clock.environment)
    server = StoreServer(str(wrapper), tmp_path / "store")
    server.start()
    try:
        pipe, store = await open_store(server, slots=(SLOT,))
        yield Shard(pipe, store, clock)
        await pipe.close()
    finally:
        server.close()


@pytest.mark.shows("M9")
@pytest.mark.parametrize("days", AWAY)
async def test_on_a_quiet_shard_every_older_cursor_must_rebuild(shard: Shard, days: int) -> None:
    for number in range(20):
        await shard.deliver(to_ann=number % 3 != 0)
    assert await shard.rebuilt() == set()
    await shard.pass_days(days)
    assert await shard.rebuilt() == set(range(20)), "only the cursor at W has missed nothing"
    await shard.deliver(to_ann=True)
    assert await shard.rebuilt() == set(range(20))


@pytest.mark.shows("M9")
@pytest.mark.parametrize("days", AWAY)
async def test_on_a_busy_shard_every_cursor_of_a_day_that_is_gone_must_rebuild(
    shard: Shard, days: int
) -> None:
    for number in range(10):
        await shard.deliver(to_ann=number % 2 == 0)
    for _ in range(days):
        await shard.pass_days(1)
        await shard.deliver(to_ann=False)
        await shard.deliver(to_ann=True)
    told = await shard.rebuilt()
    last_of_gone = max(seq for seq, day in shard.day_of.items() if shard.day - day > MAILBOX_DAYS)
    assert told == set(range(last_of_gone)), "a cursor of a kept day, or at its edge, has lost nothing"
    assert set(range(10)) <= told


@pytest.mark.shows("M9")
@pytest.mark.parametrize("seed", range(4))
async def test_at_random_days_no_cursor_ever_meets_a_hole(shard: Shard, seed: int) -> None:
    chance = random.Random(seed)
    told: set[int] = set()
    while shard.day < 60:
        for _ in range(chance.randint(0, 4)):
            await shard.deliver(to_ann=chance.random() < 0.5)
        now = await shard.rebuilt()
        assert told <= now, "a cursor that had to rebuild was taken back later"
        told = now
        # Back as well: the day of a shard never goes back, and what was kept stays readable.
        if chance.random() < 0.2 and shard.day:
            await shard.pass_days(-1)
            await shard.deliver(to_ann=True)
            told &= await shard.rebuilt()
        await shard.pass_days(chance.choice([1, 1, 2, 3, 9]))


# --- a whole service and the SDK ----------------------------------------------------------------------


class Cast(NamedTuple):
    """Who takes part: `away` returns, `peer` writes, two neighbours keep the shard busy."""

    away: Account
    peer: Account
    neighbours: tuple[Account, Account]


def cast(server: DevServer) -> Cast:
    away, peer = new_account(server), new_account(server)
    home = shard_of_user(TENANT, UserId(away.user))
    while True:
        neighbour = new_account(server)
        if shard_of_user(TENANT, UserId(neighbour.user)) == home:
            return Cast(away, peer, (neighbour, peer))


def device(server: DevServer, account: Account, folder: Path) -> AsyncClient:
    return AsyncClient(f"127.0.0.1:{server.port}", account.token, ca=server.certificate, data_dir=folder)


async def say(server: DevServer, sender: Account, receiver: Account, *texts: str) -> None:
    async with probe_of(server, sender) as probe:
        for text in texts:
            answer = await probe.send(receiver.user, text)
            assert isinstance(answer, bodies.SendAck), answer


async def mailbox(server: DevServer, account: Account, wanted: int) -> list[tuple[int, bytes]]:
    """What a probe finds from the start; asked until it is so many, because delivery follows the ACK."""

    async def complete() -> list[tuple[int, bytes]]:
        async with probe_of(server, account) as probe:
            entries = [(seq, bytes(entry.record.body)) for seq, entry in await probe.drain_mailbox()]
        return entries if len(entries) >= wanted else []

    return await eventually_async(complete, what="delivered")


async def ask(probe: Probe, cursor: int) -> bodies.MailboxBatch:
    pull = bodies.PullMailbox(MailboxSeq(cursor), PAGE_ENTRIES_MAX)
    return expect(bodies.MailboxBatch, await probe.ask(Op.PULL_MAILBOX, pull))


async def shown(client: AsyncClient, peer: Account) -> list[tuple[int, str]]:
    """The whole conversation, opened page by page as a person scrolls."""
    found: list[Message] = []
    while True:
        before = found[0].conversation_seq if found else 0
        page = await client.messages(peer.user, before=before, limit=100)
        if not page:
            return [(message.conversation_seq, message.text) for message in found]
        found = page + found


async def catch_up(client: AsyncClient, peer: Account, newest: str) -> None:
    async def has_newest() -> bool:
        return newest in {text for _, text in await shown(client, peer)}

    await eventually_async(has_newest, what=f"the device shows {newest!r}", timeout_seconds=20)


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.shows("M9", "K2")
@pytest.mark.parametrize("is_busy", [False, True], ids=["quiet", "busy"])
@pytest.mark.parametrize("days", AWAY)
async def test_a_device_that_was_away_ends_like_one_that_never_was(
    days: int, is_busy: bool, tmp_path: Path, clock: ShiftedClock, figures: Figures
) -> None:
    with DevServer(tmp_path, environment=clock.environment) as server:
        away, peer, (neighbour, _) = cast(server)
        async with device(server, away, tmp_path / "never") as never:
            async with device(server, away, tmp_path / "away") as old:
                await say(server, peer, away, *(f"before {n}" for n in range(30)))
                await catch_up(old, peer, "before 29")
            delivered = dict(await mailbox(server, away, 30))
            cursors = [0, *delivered]
            for day in range(1, days + 1):
                await pass_day(server, clock, day)
                if is_busy:
                    await say(server, peer, neighbour, f"neighbour {day}")
                    await say(server, peer, away, f"day {day}")
                    async with probe_of(server, away) as probe:
                        await happens_delivered(probe, f"day {day}", delivered)
            rebuilds = 0
            async with probe_of(server, away) as probe:
                for cursor in cursors:
                    page = await ask(probe, cursor)
                    rebuilds += page.rebuild
                    assert page.rebuild or cursor == max(cursors), f"cursor {cursor} is old and was served"
                    if not page.rebuild:
                        assert {seq for seq, _ in page.entries} == {n for n in delivered if n > cursor}
            await say(server, peer, away, "back")
            async with device(server, away, tmp_path / "away") as old:
                await catch_up(old, peer, "back")
                await catch_up(never, peer, "back")
                expected = await shown(never, peer)

                async def is_whole(
                    device: AsyncClient = old, wanted: list[tuple[int, str]] = expected
                ) -> bool:
                    return await shown(device, peer) == wanted

                # A push may show the newest before the first page has told the device that it must rebuild.
                await eventually_async(is_whole, what="both show the same", timeout_seconds=20)
                texts = [text for _, text in await shown(old, peer)]
        assert len(texts) == len(set(texts)) == 31 + (days if is_busy else 0)
        figures.note("days away", days)
        figures.note("cursors asked", len(cursors))
        figures.note("of them told to rebuild", rebuilds)
        figures.note("messages shown afterwards", len(texts))


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.shows("M9")
async def test_a_conversation_that_began_meanwhile_is_whole_from_its_next_message_on(
    tmp_path: Path, clock: ShiftedClock
) -> None:
    """Until there is a session list, nobody can name it before; then nothing of it may be missing."""
    with DevServer(tmp_path, environment=clock.environment) as server:
        away, peer, _ = cast(server)
        stranger = new_account(server)
        async with device(server, away, tmp_path / "never") as never:
            async with device(server, away, tmp_path / "away") as old:
                await say(server, peer, away, "before")
                await catch_up(old, peer, "before")
            await say(server, stranger, away, *(f"new {n}" for n in range(5)))
            await catch_up(never, stranger, "new 4")
            await pass_day(server, clock, MAILBOX_DAYS + 1)
            async with device(server, away, tmp_path / "away") as old:
                await say(server, stranger, away, "again")
                await catch_up(old, stranger, "again")
                await catch_up(never, stranger, "again")
                assert await shown(old, stranger) == await shown(never, stranger)


async def pass_day(server: DevServer, clock: ShiftedClock, day: int) -> None:
    wanted = SystemClock().now_ms() // 1000 + day * DAY_SECONDS
    clock.shift(seconds=day * DAY_SECONDS)
    with redis_of(server) as store:
        await happens(
            lambda: abs(store.time()[0] - wanted) < DAY_SECONDS // 2, what="the store has seen its clock move"
        )


async def happens_delivered(probe: Probe, text: str, delivered: dict[int, bytes]) -> None:
    """Notes what has come since; from the newest known entry, which is never old."""

    async def arrived() -> bool:
        page = await ask(probe, max(delivered))
        delivered.update({seq: bytes(decode_entry(bytes(raw)).record.body) for seq, raw in page.entries})
        return text.encode() in delivered.values()

    await eventually_async(arrived, what=f"{text!r} is delivered")

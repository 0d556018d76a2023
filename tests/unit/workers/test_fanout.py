"""The fan-out on memory logs: positions behind durable dispatches only, partitions that stop alone."""

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from structlog.testing import capture_logs

from qim.errors import (
    FailedPrecondition,
    StaleOwner,
    StoreBroken,
    StoreError,
    StoreRefused,
    StoreUnknown,
)
from qim.ids import Offset, SlotId, UserId
from qim.limits import FANOUT_POSITION_INTERVAL_MS
from tests.unit.workers.rig import ALICE, ALL_SLOTS, BOB, Faulty, Rig, build_outbox, shard_of
from tests.waiting import happens, stays
from workers.failpoints import Action
from workers.fanout import Fanout

HOME = SlotId(0)
OTHER = SlotId(5)
LONG_ENOUGH_SECONDS = 2.5 * FANOUT_POSITION_INTERVAL_MS / 1000
"""A position that could be stored would have been by then."""


@pytest.fixture
async def rig() -> Rig:
    return await Rig().prepare()


@pytest.fixture
def fanout(rig: Rig) -> Fanout:
    return rig.roles().fanout


async def _feed(rig: Rig, *sequences: int, slot: SlotId = HOME) -> None:
    await rig.outbox.append([(slot, build_outbox(seq=seq)) for seq in sequences])


async def _dispatched(rig: Rig) -> list[tuple[SlotId, bytes]]:
    found = []
    marks = await rig.dispatch.watermarks(ALL_SLOTS)
    for slot, mark in marks.items():
        if mark.high:
            records = await rig.dispatch.read(slot, Offset(0), records_max=1_000)
            found += [(slot, record.data) for record in records]
    return found


def _stored(rig: Rig) -> dict[SlotId, Offset]:
    return rig.commit_state.positions.get("fanout", {})


def _stands_at(rig: Rig, slot: SlotId, offset: int) -> bool:
    return _stored(rig).get(slot) == offset


@pytest.mark.shows("F2")
async def test_a_message_reaches_the_shards_of_sender_and_recipient(rig: Rig, fanout: Fanout) -> None:
    await _feed(rig, 1, 2)
    async with rig.running(fanout):
        await happens(lambda: _stored(rig) == {HOME: 1}, what="the position")
    counts = Counter(slot for slot, _record in await _dispatched(rig))
    assert counts == {shard_of(ALICE): 2, shard_of(BOB): 2}
    assert rig.metrics.fanout_dispatches == 4


@pytest.mark.shows("F3")
async def test_the_position_waits_until_every_dispatch_is_durable(rig: Rig, fanout: Fanout) -> None:
    await _feed(rig, 1)
    durable = rig.dispatch.hold("append")
    async with rig.running(fanout):
        await happens(lambda: "append" in rig.dispatch.calls, what="the append")
        await stays(lambda: not _stored(rig), what="no position", period_seconds=LONG_ENOUGH_SECONDS)
        durable.set()
        await happens(lambda: _stored(rig) == {HOME: 0}, what="the position")


@pytest.mark.shows("F3", "F4")
@pytest.mark.parametrize("applied", [False, True])
async def test_an_unknown_append_is_repeated_with_the_same_bytes(
    rig: Rig, fanout: Fanout, applied: bool
) -> None:
    await _feed(rig, 1)
    rig.dispatch.fail("append", StoreUnknown(), times=2, applied=applied)
    async with rig.running(fanout):
        await happens(lambda: _stored(rig) == {HOME: 0}, what="the position")
    dispatched = await _dispatched(rig)
    assert len(dispatched) == (6 if applied else 2)
    assert len(set(dispatched)) == 2


async def test_a_position_that_was_not_stored_is_stored_again(rig: Rig, fanout: Fanout) -> None:
    await _feed(rig, 1)
    rig.commits.fail("store_positions", StoreUnknown(), times=2)
    async with rig.running(fanout):
        await happens(lambda: _stored(rig) == {HOME: 0}, what="the position")
    assert len(await _dispatched(rig)) == 2


@pytest.mark.shows("F4", "F-01")
@pytest.mark.parametrize("point", ["fanout.planned", "fanout.appended", "fanout.stored"])
async def test_a_kill_replays_at_most_the_last_batch(rig: Rig, point: str) -> None:
    await _feed(rig, 1, 2)
    await rig.run_until_killed(rig.roles(failpoints={point: Action("raise")}).fanout)
    fanout = rig.roles().fanout
    await _feed(rig, 3)
    async with rig.running(fanout):
        await happens(lambda: _stored(rig) == {HOME: 2}, what="the position")
    dispatched = await _dispatched(rig)
    assert len(set(dispatched)) == 6
    assert len(dispatched) == (10 if point == "fanout.appended" else 6)


async def test_several_partitions_are_read_by_one_loop(rig: Rig, fanout: Fanout) -> None:
    await _feed(rig, 1, 2)
    await _feed(rig, 3, slot=OTHER)
    async with rig.running(fanout):
        await happens(lambda: _stored(rig) == {HOME: 1, OTHER: 0}, what="both positions")


@pytest.mark.shows("X9")
async def test_a_poison_record_stops_its_partition_only_and_keeps_its_place(rig: Rig, fanout: Fanout) -> None:
    await _feed(rig, 1)
    await rig.outbox.append([(HOME, b"garbage")])
    await _feed(rig, 2)
    await _feed(rig, 3, slot=OTHER)
    async with rig.running(fanout):
        await happens(lambda: _stored(rig) == {HOME: 0, OTHER: 0}, what="what can go on")
        assert fanout.stopped[HOME].offset == 1
        assert rig.metrics.slot_stopped[HOME] == 1
        with pytest.raises(FailedPrecondition):
            await fanout.skip(HOME, Offset(2))
        with pytest.raises(FailedPrecondition):
            fanout.retry(OTHER)
        fanout.retry(HOME)
        await happens(lambda: HOME in fanout.stopped, what="the same record again")
        assert _stored(rig)[HOME] == 0
        await fanout.skip(HOME, Offset(1))
        await happens(lambda: _stored(rig)[HOME] == 2, what="what was behind it")
    assert not fanout.stopped
    assert rig.metrics.slot_stopped[HOME] == 0


async def test_a_position_outside_the_log_stops_the_partition_at_the_start(rig: Rig, fanout: Fanout) -> None:
    await _feed(rig, 1, 2)
    await _feed(rig, 3, slot=OTHER)
    await rig.commits.store_positions("fanout", {HOME: Offset(7)})
    async with rig.running(fanout):
        await happens(lambda: _stored(rig).get(OTHER) == 0, what="the other partition")
        assert "wanted is 8" in fanout.stopped[HOME].reason
        with pytest.raises(FailedPrecondition):
            fanout.retry(HOME)


async def test_without_a_position_only_a_whole_log_is_read(rig: Rig, fanout: Fanout) -> None:
    await _feed(rig, 1, 2, 3)
    await rig.outbox.trim({HOME: Offset(2)})
    async with rig.running(fanout):
        await happens(lambda: HOME in fanout.stopped, what="the refusal")
    assert "begins at 2" in fanout.stopped[HOME].reason
    assert not await _dispatched(rig)


async def test_a_drain_ends_with_nothing_left_in_the_own_partitions(rig: Rig, fanout: Fanout) -> None:
    async with rig.running(fanout):
        await happens(lambda: len(fanout.positions) == len(ALL_SLOTS), what="the start")
        await _feed(rig, *range(1, 1_200))
        await fanout.drain(rig.clock.monotonic() + 5)
    assert _stored(rig) == {HOME: 1_198}


@pytest.mark.shows("X9", "F-20")
async def test_a_partition_that_jumps_stops_alone(rig: Rig, fanout: Fanout) -> None:
    async with rig.running(fanout):
        await happens(lambda: len(fanout.positions) == len(ALL_SLOTS), what="the start")
        rig.outbox.inner.partition(OTHER).low = Offset(5)
        await _feed(rig, 1, slot=OTHER)
        await _feed(rig, 2)
        await happens(lambda: _stored(rig) == {HOME: 0}, what="the other partition")
        assert fanout.stopped[OTHER].offset == 0
        assert list(fanout.stopped) == [OTHER]


@pytest.mark.shows("F3", "X9")
async def test_a_broken_dispatch_partition_holds_the_position_and_doubles_nothing_elsewhere(
    rig: Rig, fanout: Fanout
) -> None:
    def broken(records: list[tuple[SlotId, bytes]]) -> StoreError | None:
        return StoreBroken("counter") if any(slot == shard_of(ALICE) for slot, _data in records) else None

    rig.dispatch.before["append"] = broken
    await _feed(rig, 1)
    async with rig.running(fanout):
        await happens(lambda: rig.dispatch.calls.count("append") >= 6, what="some attempts")
        assert not _stored(rig)
        del rig.dispatch.before["append"]
        await happens(lambda: _stored(rig) == {HOME: 0}, what="the position")
    assert Counter(slot for slot, _record in await _dispatched(rig)) == {shard_of(ALICE): 1, shard_of(BOB): 1}


CAROL = UserId(b"carol-0123456789")
DAVE = UserId(b"dave-0123456789a")


@pytest.fixture
def mend(rig: Rig) -> Callable[[], None]:
    """The shard of Alice takes nothing until this is called."""

    def broken(records: list[tuple[SlotId, bytes]]) -> StoreError | None:
        return StoreBroken("counter") if any(slot == shard_of(ALICE) for slot, _data in records) else None

    rig.dispatch.before["append"] = broken
    clear: Callable[[], None] = rig.dispatch.before.clear
    return clear


@pytest.mark.shows("F3", "X9", "F-34")
async def test_a_broken_dispatch_partition_stops_nobody_else_and_gets_everything_when_it_is_whole(
    rig: Rig, fanout: Fanout, mend: Callable[[], None]
) -> None:
    assert shard_of(ALICE) not in {shard_of(CAROL), shard_of(DAVE)}
    async with rig.running(fanout):
        await happens(lambda: len(fanout.positions) == len(ALL_SLOTS), what="the start")
        for seq in range(1, 21):
            await _feed(rig, seq)
            others = build_outbox(seq=seq, sender=CAROL, target=DAVE)
            await rig.outbox.append([(HOME, others), (OTHER, others)])
            await happens(partial(_stands_at, rig, OTHER, seq - 1), what="the other partition")
        assert rig.metrics.slot_stopped[shard_of(ALICE)] == 1
        assert list(fanout.broken) == [shard_of(ALICE)]
        assert _stored(rig).get(HOME, -1) == -1
        assert Counter(slot for slot, _ in await _dispatched(rig))[shard_of(BOB)] == 20
        mend()
        await happens(lambda: _stored(rig).get(HOME) == 39, what="the position")
        await _feed(rig, 21)
        await happens(lambda: _stored(rig)[HOME] == 40, what="the next record")
    counts = Counter(slot for slot, _ in await _dispatched(rig))
    assert counts[shard_of(ALICE)] == 21
    assert counts[shard_of(BOB)] == 21
    assert not fanout.broken
    assert not any(rig.metrics.slot_stopped)


@pytest.mark.shows("F4", "F-01", "X9")
async def test_a_kill_while_a_dispatch_partition_is_broken_loses_nothing(
    rig: Rig, fanout: Fanout, mend: Callable[[], None]
) -> None:
    await _feed(rig, 1, 2)
    async with rig.running(fanout):
        await happens(lambda: bool(fanout.broken), what="the partition is left out")
    mend()
    async with rig.running(rig.roles().fanout):
        await happens(lambda: _stored(rig) == {HOME: 1}, what="the position")
    assert Counter(slot for slot, _ in await _dispatched(rig)) == {shard_of(ALICE): 2, shard_of(BOB): 4}


async def test_a_drain_does_not_wait_for_a_broken_dispatch_partition(
    rig: Rig, fanout: Fanout, mend: Callable[[], None]
) -> None:
    await _feed(rig, 1)
    async with rig.running(fanout):
        await happens(lambda: bool(fanout.broken), what="the partition is left out")
        await asyncio.wait_for(fanout.drain(rig.clock.monotonic() + 1_000), 5)
    assert not _stored(rig)


async def test_a_log_that_cannot_be_read_is_read_again(rig: Rig, fanout: Fanout) -> None:
    await fanout.open()
    reader = fanout._reader
    assert reader is not None
    failing = Faulty(reader)
    failing.fail("next_batch", StoreBroken("entry"))
    rig.outbox.inner.open_reader = lambda _positions: failing
    await _feed(rig, 1)
    async with rig.running(fanout):
        await happens(lambda: _stored(rig) == {HOME: 0}, what="the position")
    assert failing.calls.count("next_batch") >= 2


@pytest.mark.shows("F-36")
async def test_a_log_that_cannot_be_read_for_long_is_told_of_ever_more_seldom(
    rig: Rig, fanout: Fanout
) -> None:
    await fanout.open()
    reader = fanout._reader
    assert reader is not None
    failing = Faulty(reader)
    failing.fail("next_batch", StoreUnknown("away"), times=9)
    rig.outbox.inner.open_reader = lambda _positions: failing
    await _feed(rig, 1)
    with capture_logs() as logs:
        async with rig.running(fanout):
            await happens(lambda: _stored(rig) == {HOME: 0}, what="the position")
    assert [line["attempts"] for line in logs if line["event"] == "log_read_failed"] == [1, 2, 4, 8]


@pytest.mark.parametrize("error", [StoreUnknown("lost"), StoreRefused("away")])
@pytest.mark.parametrize("part", ["positions", "log"])
async def test_a_start_whose_questions_are_not_answered_asks_again_and_loses_nothing(
    rig: Rig, fanout: Fanout, part: str, error: StoreError
) -> None:
    await _feed(rig, 1)
    async with rig.running(fanout):
        await happens(lambda: _stored(rig) == {HOME: 0}, what="the position")
    await rig.claim()
    await _feed(rig, 2)
    faulty, method = (rig.commits, "load_positions") if part == "positions" else (rig.outbox, "watermarks")
    faulty.fail(method, error, times=3)
    with capture_logs() as logs:
        async with rig.running(rig.roles().fanout):
            await happens(lambda: _stored(rig) == {HOME: 1}, what="the next position")
    told = [line["attempts"] for line in logs if line["event"] == "role_not_opened"]
    assert told == [1, 2], "ever more seldom"


async def test_a_start_ends_at_what_contradicts_itself_and_at_a_newer_owner(rig: Rig, fanout: Fanout) -> None:
    for error in (StoreBroken("wrong type"), StaleOwner("taken over")):
        rig.commits.fail("load_positions", error)
        with pytest.raises(type(error)):
            await fanout.run()

"""What a skip of the fan-out may store, and core instances that do not hold up each other's positions.

A position behind a skipped record says of everything before it that it is durable in the dispatch log. So the
tests kill the fan-out after a skip and look for messages that were acknowledged and reach nobody.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count

import pytest
from structlog.testing import capture_logs

from qim.errors import FailedPrecondition, StoreBroken, StoreError, StoreRefused, StoreUnknown
from qim.ids import Offset, SlotId
from tests.unit.workers.rig import ALICE, ALL_SLOTS, BOB, Rig, build_outbox, shard_of
from tests.waiting import happens, stays
from workers import fanout as module
from workers.fanout import Fanout

HOME = SlotId(0)
FAR = SlotId(63)
"""On the second of two core instances."""
POISON = Offset(1)
FOREVER = 1_000_000


@pytest.fixture
async def rig() -> Rig:
    """One record, one that cannot be planned, one more."""
    rig = await Rig().prepare()
    await _feed(rig, 1)
    await rig.outbox.append([(HOME, b"garbage")])
    await _feed(rig, 2)
    return rig


@pytest.fixture
def fanout(rig: Rig) -> Fanout:
    return rig.roles().fanout


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SKIP_POLLS_MAX", 2)


async def _feed(rig: Rig, *sequences: int, slot: SlotId = HOME) -> None:
    await rig.outbox.append([(slot, build_outbox(seq=seq)) for seq in sequences])


async def _dispatched(rig: Rig) -> Counter[SlotId]:
    """How many different records each shard got."""
    found: Counter[SlotId] = Counter()
    for slot, mark in (await rig.dispatch.watermarks(ALL_SLOTS)).items():
        if mark.high:
            records = await rig.dispatch.read(slot, Offset(0), records_max=1_000)
            found[slot] = len({record.data for record in records})
    return found


def _stored(rig: Rig, instance: int = 0) -> dict[SlotId, Offset]:
    return rig.commit_states[instance].positions.get("fanout", {})


def _stands_at(fanout: Fanout, offset: Offset) -> bool:
    return HOME in fanout.stopped and fanout.stopped[HOME].offset == offset


async def _stops(fanout: Fanout) -> None:
    await happens(lambda: HOME in fanout.stopped, what="the stop")


@pytest.mark.shows("F3", "X9", "F-01")
@pytest.mark.parametrize("error", [StoreRefused("away"), StoreUnknown("lost")])
@pytest.mark.usefixtures("short_wait")
async def test_a_skip_waits_for_the_records_before_it_or_is_refused(
    rig: Rig, fanout: Fanout, error: StoreError
) -> None:
    rig.dispatch.fail("append", error, times=FOREVER)
    async with rig.running(fanout):
        await _stops(fanout)
        with pytest.raises(FailedPrecondition, match="still on their way; try again"):
            await fanout.skip(HOME, POISON)
        assert fanout.stopped[HOME].offset == POISON
    assert not _stored(rig)
    rig.dispatch.before.clear()
    again = rig.roles().fanout
    async with rig.running(again):
        await _stops(again)
        assert await again.skip(HOME, POISON)
        await happens(lambda: _stored(rig) == {HOME: 2}, what="the end of the partition")
    assert await _dispatched(rig) == {shard_of(ALICE): 2, shard_of(BOB): 2}


@pytest.mark.shows("F3", "X9")
async def test_a_skip_is_taken_as_soon_as_the_records_before_it_are_durable(rig: Rig, fanout: Fanout) -> None:
    rig.dispatch.fail("append", StoreUnknown("lost"), times=2)
    async with rig.running(fanout):
        await _stops(fanout)
        assert await fanout.skip(HOME, POISON)
        assert _stored(rig)[HOME] >= POISON
        await happens(lambda: _stored(rig) == {HOME: 2}, what="what was behind it")
    assert await _dispatched(rig) == {shard_of(ALICE): 2, shard_of(BOB): 2}


@pytest.mark.shows("X9")
async def test_a_skip_that_may_not_be_stored_says_so_and_can_be_repeated(rig: Rig, fanout: Fanout) -> None:
    async with rig.running(fanout):
        await happens(lambda: _stored(rig) == {HOME: 0}, what="what can go on")
        rig.commits.fail("store_positions", StoreUnknown("lost"))
        with capture_logs() as logs, pytest.raises(FailedPrecondition, match="try again: lost"):
            await fanout.skip(HOME, POISON)
        assert [line for line in logs if line["event"] == "record_skipped"] == []
        assert fanout.stopped[HOME].offset == POISON
        assert await fanout.skip(HOME, POISON)
        await happens(lambda: _stored(rig) == {HOME: 2}, what="what was behind it")


@pytest.mark.shows("X9")
async def test_a_skip_that_another_has_taken_meanwhile_is_refused(rig: Rig, fanout: Fanout) -> None:
    async with rig.running(fanout):
        await happens(lambda: _stored(rig) == {HOME: 0}, what="what can go on")
        answer = rig.commits.hold("store_positions")
        first = asyncio.ensure_future(fanout.skip(HOME, POISON))
        second = asyncio.ensure_future(fanout.skip(HOME, POISON))
        await happens(lambda: rig.commits.calls.count("store_positions") >= 3, what="both are on their way")
        answer.set()
        assert await first
        with pytest.raises(FailedPrecondition, match="not stopped"):
            await second
        await happens(lambda: _stored(rig) == {HOME: 2}, what="what was behind it")
    assert rig.metrics.slot_stopped[HOME] == 0


@pytest.mark.shows("F3", "X9", "F-01")
async def test_a_skip_stores_nothing_that_a_broken_dispatch_partition_misses(
    rig: Rig, fanout: Fanout
) -> None:
    def broken(records: list[tuple[SlotId, bytes]]) -> StoreError | None:
        return StoreBroken("counter") if any(slot == shard_of(ALICE) for slot, _data in records) else None

    rig.dispatch.before["append"] = broken
    async with rig.running(fanout):
        await _stops(fanout)
        assert not await fanout.skip(HOME, POISON), "it is not stored, and says so"
        await happens(lambda: fanout._reached.get(HOME) == 2, what="the others go on")
    assert _stored(rig).get(HOME, -1) == -1
    rig.dispatch.before.clear()
    again = rig.roles().fanout
    async with rig.running(again):
        await _stops(again)
        assert await again.skip(HOME, POISON)
        await happens(lambda: _stored(rig) == {HOME: 2}, what="the end of the partition")
    assert await _dispatched(rig) == {shard_of(ALICE): 2, shard_of(BOB): 2}


@pytest.mark.shows("X9")
async def test_what_ends_late_after_a_retry_leads_no_later_skip_astray(rig: Rig, fanout: Fanout) -> None:
    await rig.outbox.append([(HOME, b"more garbage")])
    answer = rig.dispatch.hold("append")
    async with rig.running(fanout):
        await _stops(fanout)
        fanout.retry(HOME)
        await _stops(fanout)
        await happens(lambda: rig.dispatch.calls.count("append") >= 2, what="the same batch twice")
        answer.set()
        for offset in (POISON, Offset(3)):
            await happens(partial(_stands_at, fanout, offset), what="the next stop")
            assert await fanout.skip(HOME, offset)
        assert _stored(rig) == {HOME: 3}
    assert await _dispatched(rig) == {shard_of(ALICE): 2, shard_of(BOB): 2}


@pytest.fixture
async def wide() -> Rig:
    """Two core instances; the second takes no positions."""
    rig = await Rig(instances=2).prepare()
    rig.all_commits[1].fail("store_positions", StoreRefused("away"), times=FOREVER)
    return rig


def _is_through(rig: Rig, instance: int, slot: SlotId, offset: int) -> Callable[[], bool]:
    return lambda: _stored(rig, instance) == {slot: offset}


@pytest.mark.shows("F4")
async def test_a_core_instance_that_is_away_holds_up_no_position_of_another(wide: Rig) -> None:
    fanout = wide.roles().fanout
    await _feed(wide, 1)
    await _feed(wide, 2, slot=FAR)
    async with wide.running(fanout):
        await happens(_is_through(wide, 0, HOME, 0), what="the first position")
        await happens(lambda: "store_positions" in wide.all_commits[1].calls, what="an attempt there")
        await _feed(wide, 3)
        await happens(_is_through(wide, 0, HOME, 1), what="the next position")
        await stays(lambda: not _stored(wide, 1), what="nothing there")
        wide.all_commits[1].before.clear()
        await happens(_is_through(wide, 1, FAR, 0), what="the position of the other instance")


@pytest.mark.shows("F-36")
async def test_positions_that_cannot_be_stored_for_long_are_told_of_ever_more_seldom(wide: Rig) -> None:
    fanout = wide.roles().fanout
    attempts = count()
    wide.all_commits[1].before["store_positions"] = lambda *_args: (
        StoreRefused("away") if next(attempts) < 5 else None
    )
    await _feed(wide, 1, slot=FAR)
    with capture_logs() as logs:
        async with wide.running(fanout):
            await happens(_is_through(wide, 1, FAR, 0), what="the position")
    assert [line["attempts"] for line in logs if line["event"] == "position_not_stored"] == [1, 2, 4]

"""The fan-out with groups: members come before plans; a record without its members stops, never passes."""

from collections.abc import Callable
from functools import partial

import pytest
from structlog.testing import capture_logs

from qim.errors import StoreBroken, StoreError, StoreRefused, StoreUnknown
from qim.ids import Offset, SlotId, UserId
from qim.limits import DISPATCH_BYTES_MAX, FANOUT_POSITION_INTERVAL_MS, SNAPSHOTS_PER_PLAN_MAX
from qim.records import parse_dispatch_record
from tests.unit.workers.group_rig import (
    build_group_outbox,
    create_group,
    forget_members,
    many,
    place_of,
    route_of,
)
from tests.unit.workers.rig import ALICE, ALL_SLOTS, BOB, Rig, build_outbox, shard_of
from tests.waiting import happens, stays
from workers.fanout import Fanout

HOME = SlotId(0)
OTHER = SlotId(5)
MEMBERS = [ALICE, BOB, *many(100)]
SHARDS = {shard_of(user) for user in MEMBERS}
LONG_ENOUGH_SECONDS = 2.5 * FANOUT_POSITION_INTERVAL_MS / 1000
"""A position that could be stored would have been by then."""


@pytest.fixture
async def rig() -> Rig:
    rig = await Rig().prepare()
    await create_group(rig, MEMBERS)
    return rig


@pytest.fixture
def fanout(rig: Rig) -> Fanout:
    return rig.roles().fanout


async def _feed(rig: Rig, *records: bytes, slot: SlotId = HOME) -> None:
    await rig.outbox.append([(slot, record) for record in records])


async def _received(rig: Rig) -> dict[UserId, list[int]]:
    """The sequences that were dispatched to each user, in the order of the log."""
    found: dict[UserId, list[int]] = {}
    for slot, mark in (await rig.dispatch.watermarks(ALL_SLOTS)).items():
        if mark.high:
            for record in await rig.dispatch.read(slot, Offset(0), records_max=1_000):
                dispatch = parse_dispatch_record(record.data)
                for user in dispatch.recipients:
                    found.setdefault(user, []).append(dispatch.header.seq)
    return found


def _stored(rig: Rig) -> dict[SlotId, Offset]:
    return rig.commit_state.positions.get("fanout", {})


def _stands_at(rig: Rig, offset: int) -> bool:
    return _stored(rig) == {HOME: offset}


async def _stops(fanout: Fanout, slot: SlotId = HOME) -> None:
    await happens(lambda: slot in fanout.stopped, what="the partition stops")


@pytest.mark.shows("F2", "G2")
async def test_a_group_message_reaches_every_member_and_direct_ones_keep_their_places(
    rig: Rig, fanout: Fanout
) -> None:
    await _feed(rig, build_group_outbox(seq=1), build_outbox(seq=2), build_group_outbox(seq=3))
    await _feed(rig, build_group_outbox(seq=4, sender=BOB, listed=[ALICE]))
    async with rig.running(fanout):
        await happens(lambda: _stored(rig) == {HOME: 3}, what="the position")
    received = await _received(rig)
    assert received == {user: [1, 3] for user in MEMBERS} | {ALICE: [1, 2, 3, 4], BOB: [1, 2, 3]}
    assert rig.metrics.fanout_dispatches == 2 * len(SHARDS) + 2 + 1


async def test_a_batch_without_groups_asks_nobody_for_members(rig: Rig, fanout: Fanout) -> None:
    await _feed(rig, *(build_outbox(seq=seq) for seq in range(1, 100)))
    async with rig.running(fanout):
        await happens(lambda: _stored(rig) == {HOME: 98}, what="the position")
    assert rig.memberships.calls == []


async def test_the_members_of_a_version_are_asked_for_once(rig: Rig, fanout: Fanout) -> None:
    async with rig.running(fanout):
        for seq in range(1, 6):
            await _feed(rig, build_group_outbox(seq=seq))
            await happens(partial(_stands_at, rig, seq - 1), what="the position")
    assert rig.memberships.calls == ["load_snapshots"]


@pytest.mark.shows("F2", "F6")
@pytest.mark.parametrize("error", [StoreUnknown("lost"), StoreRefused("away")])
async def test_a_store_of_members_that_is_away_is_waited_for(
    rig: Rig, fanout: Fanout, error: StoreError
) -> None:
    rig.memberships.fail("load_snapshots", error, times=4)
    await _feed(rig, build_group_outbox(seq=1), build_outbox(seq=2))
    with capture_logs() as logs:
        async with rig.running(fanout):
            await happens(lambda: _stored(rig) == {HOME: 1}, what="the position")
    assert (await _received(rig)).keys() == set(MEMBERS)
    told = [line["attempts"] for line in logs if line["event"] == "members_not_loaded"]
    assert told == [1, 2, 4], "ever more seldom"
    assert not fanout.stopped


@pytest.mark.shows("F6", "X9")
async def test_members_that_are_gone_stop_the_partition_only_and_never_become_nobody(
    rig: Rig, fanout: Fanout
) -> None:
    await create_group(rig, MEMBERS, route=route_of(2))
    find_again = forget_members(rig, route=route_of(2))
    lost = build_group_outbox(seq=2, route=route_of(2))
    await _feed(rig, build_group_outbox(seq=1), lost, build_group_outbox(seq=3))
    await _feed(rig, build_group_outbox(seq=4), slot=OTHER)
    async with rig.running(fanout):
        await happens(lambda: _stored(rig) == {HOME: 0, OTHER: 0}, what="what can go on")
        await _stops(fanout)
        assert fanout.stopped[HOME].offset == 1
        assert "members at version 1" in fanout.stopped[HOME].reason
        assert (await _received(rig))[ALICE] == [1, 4]
        find_again()
        fanout.retry(HOME)
        await happens(lambda: _stored(rig)[HOME] == 2, what="the rest")
    assert (await _received(rig))[ALICE] == [1, 4, 2, 3]
    assert not fanout.stopped


@pytest.mark.shows("X9")
async def test_a_record_whose_members_are_gone_is_passed_over_on_an_operators_word_only(
    rig: Rig, fanout: Fanout
) -> None:
    forget_members(rig)
    await _feed(rig, build_group_outbox(seq=1), build_outbox(seq=2))
    async with rig.running(fanout):
        await _stops(fanout)
        await stays(lambda: not _stored(rig), what="no position", period_seconds=LONG_ENOUGH_SECONDS)
        assert await fanout.skip(HOME, Offset(0))
        await happens(lambda: _stored(rig) == {HOME: 1}, what="what was behind it")
    assert await _received(rig) == {ALICE: [2], BOB: [2]}


@pytest.mark.shows("F3", "X9")
async def test_a_partition_that_is_resumed_while_members_are_awaited_loses_nothing(
    rig: Rig, fanout: Fanout
) -> None:
    """Its records behind the one that stopped it are still in the batch, and must not be planned there."""
    count = SNAPSHOTS_PER_PLAN_MAX + 1
    for number in range(2, count + 1):
        await create_group(rig, MEMBERS, route=route_of(number))
    find_again = forget_members(rig)
    gates = []

    def hold_the_last(wanted: list[object]) -> None:
        if wanted == [(place_of(route_of(count)), 1)]:
            gates.append(rig.memberships.hold("load_snapshots"))

    rig.memberships.after["load_snapshots"] = hold_the_last
    await _feed(rig, *(build_group_outbox(seq=at, route=route_of(at)) for at in range(1, count + 1)))
    async with rig.running(fanout):
        await happens(lambda: bool(gates), what="the members of the last group are asked for")
        assert fanout.stopped[HOME].offset == 0
        fanout.retry(HOME)
        rig.memberships.after.clear()
        rig.memberships.held.clear()
        gates[0].set()
        await _stops(fanout)
        await stays(lambda: not _stored(rig), what="no position", period_seconds=LONG_ENOUGH_SECONDS)
        find_again()
        fanout.retry(HOME)
        await happens(lambda: _stored(rig) == {HOME: count - 1}, what="all of them")
    assert sorted({*(await _received(rig))[ALICE]}) == list(range(1, count + 1))


async def test_a_batch_of_large_group_messages_is_appended_in_pieces(rig: Rig, fanout: Fanout) -> None:
    sizes: list[int] = []

    def note(records: list[tuple[SlotId, bytes]]) -> None:
        sizes.append(sum(len(data) for _slot, data in records))

    rig.dispatch.before["append"] = note
    body = b"x" * 60_000
    await _feed(rig, *(build_group_outbox(seq=seq, body=body) for seq in range(1, 21)))
    async with rig.running(fanout):
        await happens(lambda: _stored(rig) == {HOME: 19}, what="the position")
    assert max(sizes) <= DISPATCH_BYTES_MAX
    assert sum(sizes) > 3 * DISPATCH_BYTES_MAX
    assert set(map(tuple, (await _received(rig)).values())) == {tuple(range(1, 21))}


# --- a broken dispatch partition ---

BROKEN = shard_of(ALICE)


@pytest.fixture
def mend(rig: Rig) -> Callable[[], None]:
    """The shard of Alice takes nothing until this is called."""

    def broken(records: list[tuple[SlotId, bytes]]) -> StoreError | None:
        return StoreBroken("counter") if any(slot == BROKEN for slot, _data in records) else None

    rig.dispatch.before["append"] = broken
    clear: Callable[[], None] = rig.dispatch.before.clear
    return clear


def _forget_what_was_read(fanout: Fanout) -> None:
    """As if so many other groups had been active since."""
    fanout._audiences._known.clear()
    fanout._audiences._users = 0


@pytest.mark.shows("F3", "F-34")
async def test_a_broken_dispatch_partition_gets_its_group_messages_when_it_is_whole(
    rig: Rig, fanout: Fanout, mend: Callable[[], None]
) -> None:
    async with rig.running(fanout):
        for seq in range(1, 6):
            await _feed(rig, build_group_outbox(seq=seq), build_outbox(seq=seq, sender=MEMBERS[5]))
            await happens(lambda: bool(fanout.broken), what="the partition is left out")
        others = [user for user in MEMBERS if shard_of(user) != BROKEN]
        await happens(lambda: fanout._reached.get(HOME) == 9, what="the others")
        assert not _stored(rig)
        assert (await _received(rig)).keys() == set(others)
        mend()
        _forget_what_was_read(fanout)
        await happens(lambda: _stored(rig) == {HOME: 9}, what="the position")
    received = await _received(rig)
    assert {user: seqs for user, seqs in received.items() if shard_of(user) == BROKEN} == {
        user: [1, 2, 3, 4, 5] for user in MEMBERS if shard_of(user) == BROKEN
    }
    assert not fanout.broken


@pytest.mark.shows("F6", "X9")
async def test_a_broken_dispatch_partition_whose_members_are_gone_since_is_not_called_whole(
    rig: Rig, fanout: Fanout, mend: Callable[[], None]
) -> None:
    await _feed(rig, build_group_outbox(seq=1))
    async with rig.running(fanout):
        await happens(lambda: bool(fanout.broken), what="the partition is left out")
        find_again = forget_members(rig)
        _forget_what_was_read(fanout)
        before = rig.memberships.calls.count("load_snapshots")
        mend()
        await happens(
            lambda: rig.memberships.calls.count("load_snapshots") >= before + 2, what="two attempts to mend"
        )
        assert fanout.broken
        assert not _stored(rig)
        find_again()
        await happens(lambda: _stored(rig) == {HOME: 0}, what="the position")
    assert (await _received(rig)).keys() == set(MEMBERS)


@pytest.mark.shows("X9")
async def test_a_broken_dispatch_partition_does_not_wait_for_what_an_operator_gave_up(
    rig: Rig, fanout: Fanout, mend: Callable[[], None]
) -> None:
    await create_group(rig, MEMBERS, route=route_of(2))
    forget_members(rig, route=route_of(2))
    lost = build_group_outbox(seq=2, route=route_of(2))
    await _feed(rig, lost, build_group_outbox(seq=3))
    await _feed(rig, build_group_outbox(seq=1), slot=OTHER)
    async with rig.running(fanout):
        await happens(lambda: bool(fanout.broken), what="the partition is left out")
        await _stops(fanout)
        await fanout.skip(HOME, Offset(0))
        await happens(lambda: fanout._reached.get(HOME) == 1, what="what was behind it")
        mend()
        await happens(lambda: not fanout.broken, what="the partition is whole")
        await happens(lambda: _stored(rig) == {HOME: 1, OTHER: 0}, what="the positions")
    received = await _received(rig)
    assert {user: sorted(seqs) for user, seqs in received.items()} == {user: [1, 3] for user in MEMBERS}

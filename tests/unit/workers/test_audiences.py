"""Members at versions: read once, remembered up to a bound, never taken for nobody."""

import pytest

from qim.domain.fanout import SnapshotId, snapshot_of
from qim.errors import StoreBroken, StoreError, StoreRefused, StoreUnknown
from qim.limits import SNAPSHOT_USERS_REMEMBERED_MAX
from tests.unit.workers.group_rig import (
    ROUTE,
    build_group_outbox,
    create_group,
    forget_members,
    instance_of,
    many,
    route_of,
)
from tests.unit.workers.rig import ALICE, TENANT, Rig, build_outbox
from workers.audiences import Audiences


@pytest.fixture
async def rig() -> Rig:
    return await Rig(instances=2).prepare()


@pytest.fixture
def audiences(rig: Rig) -> Audiences:
    return Audiences(placement=rig.placement, memberships=rig.all_memberships)


def name_of(number: int = 1, *, version: int = 1) -> SnapshotId:
    route = route_of(number)
    return SnapshotId(route.bucket, TENANT, route.conversation, version)


def message(number: int = 1, *, version: int = 1) -> bytes:
    record = build_group_outbox(seq=1, version=version, route=route_of(number))
    assert snapshot_of(record) == name_of(number, version=version)
    return record


def calls(rig: Rig) -> list[int]:
    return [store.calls.count("load_snapshots") for store in rig.all_memberships]


async def groups_on_both(rig: Rig, count: int = 6) -> dict[int, int]:
    """So many groups on two core instances: their numbers, and where each lives."""
    for number in range(1, count + 1):
        await create_group(rig, [ALICE, *many(number)], route=route_of(number))
    places = {number: instance_of(rig.placement, route_of(number)) for number in range(1, count + 1)}
    assert set(places.values()) == {0, 1}
    return places


async def test_each_core_instance_is_asked_once_for_all_its_groups_and_never_again(
    rig: Rig, audiences: Audiences
) -> None:
    numbers = await groups_on_both(rig)
    batch = [message(number) for number in numbers] * 2
    found = await audiences.load([*batch, build_outbox(seq=1), build_group_outbox(seq=1, listed=[ALICE])])
    assert {name: sum(map(len, shards.values())) for name, shards in found.items()} == {
        name_of(number): number + 1 for number in numbers
    }
    assert calls(rig) == [1, 1]
    assert await audiences.load(batch) == found
    assert calls(rig) == [1, 1]


async def test_a_batch_that_needs_no_members_asks_nobody(rig: Rig, audiences: Audiences) -> None:
    records = [build_outbox(seq=1), build_group_outbox(seq=1, listed=[ALICE]), b"\x02\x02", b""]
    assert await audiences.load(records) == {}
    assert calls(rig) == [0, 0]


@pytest.mark.shows("F6")
async def test_members_that_are_not_there_are_left_out_alone(rig: Rig, audiences: Audiences) -> None:
    numbers = await groups_on_both(rig)
    forget_members(rig, route=route_of(2))
    batch = [message(number) for number in numbers]
    found = await audiences.load([*batch, message(3, version=9)])
    assert found.keys() == {name_of(number) for number in numbers if number != 2}
    again = await audiences.load(batch)
    assert again.keys() == found.keys(), "what was missing is asked for again"


@pytest.mark.shows("F6")
@pytest.mark.parametrize("error", [StoreUnknown(), StoreRefused()])
async def test_a_store_that_does_not_answer_is_no_store_without_members(
    rig: Rig, audiences: Audiences, error: StoreError
) -> None:
    numbers = await groups_on_both(rig)
    rig.all_memberships[0].fail("load_snapshots", error)
    batch = [message(number) for number in numbers]
    with pytest.raises(type(error)):
        await audiences.load(batch)
    assert len(await audiences.load(batch)) == len(numbers)
    assert calls(rig) == [2, 1], "the one that had answered is not asked again"


async def test_a_store_that_goes_away_between_two_answers_raises(rig: Rig, audiences: Audiences) -> None:
    numbers = await groups_on_both(rig)
    errors = iter([StoreBroken("one of them is missing"), StoreUnknown()])
    rig.all_memberships[0].before["load_snapshots"] = lambda *_: next(errors, None)
    with pytest.raises(StoreUnknown):
        await audiences.load([message(number) for number in numbers])


async def test_members_are_remembered_up_to_the_bound_and_asked_for_again(
    rig: Rig, audiences: Audiences
) -> None:
    """One group of nearly the bound, then small ones that push it out; what is asked for is given whole."""
    await groups_on_both(rig)
    large = [ALICE, *many(SNAPSHOT_USERS_REMEMBERED_MAX - 3)]
    await create_group(rig, large, route=route_of(7))
    assert sum(map(len, (await audiences.load([message(7)]))[name_of(7)].values())) == len(large)
    await audiences.load([message(1)])
    before = calls(rig)
    await audiences.load([message(7), message(1)])
    assert calls(rig) == before, "one more pair than fits would push out the first"
    await audiences.load([message(2)])
    assert audiences._known.keys() == {name_of(1), name_of(2)}
    assert audiences._users == 2 + 3
    await audiences.load([message(7)])
    assert sum(calls(rig)) == sum(before) + 2


async def test_members_above_the_bound_are_given_but_not_remembered(rig: Rig, audiences: Audiences) -> None:
    large = [ALICE, *many(SNAPSHOT_USERS_REMEMBERED_MAX)]
    await create_group(rig, large, route=ROUTE)
    found = await audiences.load([message()])
    assert sum(map(len, found[name_of()].values())) == len(large)
    assert (len(audiences._known), audiences._users) == (0, 0)

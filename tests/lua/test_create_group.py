"""`create_group` on real servers: one step, safe to repeat, refusals that write nothing."""

import struct

import pytest

from qim.adapters import redis_keys as keys
from qim.domain.groups import GroupRoute
from qim.domain.placement import shard_of_user
from qim.errors import StoreBroken
from qim.ids import BucketId, ConversationId, GroupId, Seq, UserId
from qim.limits import SLOTS
from qim.memberships import Created, Group, GroupPlace, Interval, MemberQuery, MemberRow, MemberState
from tests.lua.commit_calls import (
    ALICE,
    BOB,
    BUCKET,
    CONVERSATION,
    SLOT,
    TENANT,
    opened_other,
    picture,
    plant,
)
from tests.lua.group_calls import (
    CAROL,
    GROUP,
    JOIN,
    PLACE,
    SUFFIX,
    change_one,
    creation_of,
    opened_groups,
    plan,
)
from tests.services import StoreServer

KEYS_OF_A_GROUP = {
    b"grp:" + SUFFIX, b"grpmember:" + SUFFIX, b"grpsnap:" + SUFFIX, b"grpannounce:{b041}",
}  # fmt: skip


@pytest.mark.shows("G4", "G15", "C8")
async def test_a_group_is_written_by_one_call_under_the_tag_of_its_conversation(
    store_server: StoreServer,
) -> None:
    async with opened_groups(store_server, ()) as (groups, _, pipe):
        assert await groups.create_groups([creation_of([BOB, ALICE])]) == [Created.CREATED]
        found = await picture(pipe)
        assert set(found) == {keys.OWNER, *KEYS_OF_A_GROUP}
        assert all(b"{b041}" in key for key in KEYS_OF_A_GROUP)
        rows = {BOB: struct.pack(">BQQ", 1, 0, 0), ALICE: struct.pack(">BQQ", 1, 0, 0)}
        assert found[b"grpmember:" + SUFFIX] == (rows, -1)
        assert found[b"grpannounce:{b041}"] == ([SUFFIX[7:] + b"1"], -1)
        index = [0] * SLOTS
        for user in (ALICE, BOB):
            index[shard_of_user(TENANT, user)] = 1
        assert found[b"grpsnap:" + SUFFIX][0][b"1"] == struct.pack(f">{SLOTS}Q", *index)


@pytest.mark.shows("G4")
async def test_the_first_members_see_everything_and_no_event_tells_of_them(store_server: StoreServer) -> None:
    async with opened_groups(store_server, ()) as (groups, store, _):
        await groups.create_groups([creation_of([BOB, ALICE], name="Tëa\r\n")])
        assert await groups.load_groups([PLACE]) == [Group(GROUP, "Tëa\r\n", BOB, 1, 2)]
        first = Interval(MemberState.MEMBER, Seq(0), Seq(0))
        assert await groups.load_intervals([(PLACE, ALICE), (PLACE, CAROL)]) == [first, None]
        (page,) = await groups.load_members([MemberQuery(PLACE, UserId(b""), 10)])
        assert page is not None
        assert page.rows == tuple(MemberRow(user, Seq(0)) for user in sorted([ALICE, BOB]))
        assert await store.load_last_seq([PLACE]) == [0]


async def test_a_page_of_members_goes_on_behind_the_last_one(store_server: StoreServer) -> None:
    members = [UserId(b"%016d" % number) for number in range(5)]
    async with opened_groups(store_server, members) as (groups, _, _):
        (first,) = await groups.load_members([MemberQuery(PLACE, UserId(b""), 3)])
        assert first is not None
        assert [row.user for row in first.rows] == members[:3]
        assert first.more
        (last,) = await groups.load_members([MemberQuery(PLACE, members[2], 3)])
        assert last is not None
        assert [row.user for row in last.rows] == members[3:]
        assert not last.more


async def test_a_group_that_does_not_exist_is_none_everywhere_and_its_snapshot_an_error(
    store_server: StoreServer,
) -> None:
    async with opened_groups(store_server, ()) as (groups, _, _):
        assert await groups.load_groups([PLACE]) == [None]
        assert await groups.load_intervals([(PLACE, ALICE)]) == [None]
        assert await groups.load_members([MemberQuery(PLACE, UserId(b""), 3)]) == [None]
        with pytest.raises(StoreBroken):
            await groups.load_snapshots([(PLACE, 1)])


@pytest.mark.shows("F6")
@pytest.mark.parametrize("field", [b"1", b"%d:1" % shard_of_user(TENANT, ALICE)], ids=["index", "part"])
async def test_a_torn_snapshot_is_an_error_and_never_a_smaller_audience(
    store_server: StoreServer, field: bytes
) -> None:
    async with opened_groups(store_server) as (groups, _, pipe):
        await pipe.command("HDEL", b"grpsnap:" + SUFFIX, field)
        with pytest.raises(StoreBroken):
            await groups.load_snapshots([(PLACE, 1)])


@pytest.mark.shows("C4")
async def test_a_repeat_is_told_so_and_writes_nothing_whatever_happened_since(
    store_server: StoreServer,
) -> None:
    async with opened_groups(store_server) as (groups, _, pipe):
        await change_one(groups, await plan(groups, JOIN, [CAROL]))
        before = await picture(pipe)
        assert await groups.create_groups([creation_of(), creation_of()]) == [Created.EXISTS] * 2
        assert await picture(pipe) == before


@pytest.mark.shows("C5")
@pytest.mark.parametrize("other", [creation_of([ALICE, CAROL]), creation_of(name="another")])
async def test_other_content_under_the_same_id_is_a_conflict_and_writes_nothing(
    store_server: StoreServer, other: object
) -> None:
    async with opened_groups(store_server) as (groups, _, pipe):
        before = await picture(pipe)
        assert await groups.create_groups([other]) == [Created.CONFLICT]  # type: ignore[list-item]  # parametrised
        assert await picture(pipe) == before


@pytest.mark.shows("F-05")
async def test_a_stale_owner_makes_no_group(store_server: StoreServer) -> None:
    async with opened_groups(store_server, ()) as (groups, _, pipe):
        async with opened_other(store_server, slots=[SLOT]):
            pass
        before = await picture(pipe)
        there = GroupRoute(GroupId(bytes(16)), ConversationId(bytes(16)), BucketId(200))
        results = await groups.create_groups([creation_of(), creation_of(route=there)])
        assert results == [Created.STALE_OWNER, Created.CREATED]
        left = {key: value for key, value in (await picture(pipe)).items() if b"{b200}" not in key}
        assert left == before


@pytest.mark.parametrize("key", sorted({keys.OWNER, *KEYS_OF_A_GROUP}))
async def test_a_wrong_type_under_any_key_is_refused_before_any_write(
    store_server: StoreServer, key: bytes
) -> None:
    async with opened_groups(store_server, ()) as (groups, _, pipe):
        await plant(pipe, key)
        before = await picture(pipe)
        with pytest.raises(StoreBroken):
            await groups.create_groups([creation_of()])
        assert await picture(pipe) == before


@pytest.mark.shows("F-12")
async def test_a_full_server_makes_no_group(store_server: StoreServer) -> None:
    async with opened_groups(store_server, ()) as (groups, _, pipe):
        before = await picture(pipe)
        await pipe.command("CONFIG", "SET", "maxmemory", "1mb")
        try:
            assert await groups.create_groups([creation_of()]) == [Created.FULL]
        finally:
            await pipe.command("CONFIG", "SET", "maxmemory", "0")
        assert await picture(pipe) == before


async def test_groups_whose_ids_differ_in_one_awkward_byte_do_not_meet(store_server: StoreServer) -> None:
    async with opened_groups(store_server) as (groups, _, _):
        near = GroupRoute(GROUP, ConversationId(CONVERSATION[:-1] + b"\x00"), BUCKET)
        await groups.create_groups([creation_of([CAROL], route=near)])
        there = GroupPlace(BUCKET, TENANT, near.conversation)
        assert [head and head.owner for head in await groups.load_groups([PLACE, there])] == [ALICE, CAROL]


async def test_a_group_of_five_hundred_and_one_is_made_in_one_call(store_server: StoreServer) -> None:
    members = [UserId(b"%016d" % number) for number in range(501)]
    async with opened_groups(store_server, members) as (groups, _, _):
        (snapshot,) = await groups.load_snapshots([(PLACE, 1)])
        assert sorted(user for part in snapshot.shards.values() for user in part) == members

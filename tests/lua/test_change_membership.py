"""`change_membership` on real servers: version, snapshot, intervals, sequence and event move together."""

import struct
from collections.abc import Sequence

import pytest
from msgspec import structs

from qim.adapters import redis_keys as keys
from qim.adapters.redis_pipe import RedisPipe
from qim.domain.groups import EventBody, parse_event_body
from qim.domain.placement import shard_of_user
from qim.errors import StoreBroken
from qim.ids import SEQ_MAX, BucketId, Seq, UserId
from qim.limits import ADMIN_REQUEST_LIFE_MS, CLOCK_SKEW_MS_MAX, GROUP_SNAPSHOT_LIFE_MS
from qim.memberships import (
    Changed,
    Interval,
    MemberQuery,
    MemberRow,
    MembershipChange,
    MemberState,
    PlacedUser,
)
from qim.ports import ReadMark, Reserved
from qim.records import MembershipOp, decode_record
from tests.lua.commit_calls import (
    ALICE,
    BOB,
    BUCKET,
    CLOCK,
    CONVERSATION,
    SLOT,
    TENANT,
    history_of,
    opened_other,
    picture,
    plant,
)
from tests.lua.group_calls import (
    CAROL,
    DAVE,
    JOIN,
    LEAVE,
    PLACE,
    REMOVE,
    SUFFIX,
    change_and_finish,
    change_one,
    finish,
    load_membership,
    opened_groups,
    placed,
    plan,
    request_of,
    send_of,
)
from tests.services import StoreServer

OF_THE_GROUP = {b"grp:" + SUFFIX, b"grpmember:" + SUFFIX, b"grpsnap:" + SUFFIX, b"grpannounce:{b041}"}


def users_many(count: int) -> list[UserId]:
    return [UserId(b"%016d" % number) for number in range(1, count + 1)]


# --- what a change writes ---


@pytest.mark.shows("G3", "G5", "G15", "C3", "C8")
async def test_a_join_writes_everything_in_one_call_under_one_tag(store_server: StoreServer) -> None:
    async with opened_groups(store_server) as (groups, _, pipe):
        item = await plan(groups, JOIN, [CAROL])
        assert item.event is not None
        result = await change_one(groups, item)
        assert result[:4] == (Changed.NEW, 1, 3, 2)
        found = await picture(pipe)
        assert set(found) == {
            keys.OWNER, keys.PENDING, *OF_THE_GROUP, b"conv:" + SUFFIX, b"msgrecord:" + SUFFIX,
            b"convskip:" + SUFFIX, b"grpsnapgc:{b041}",
        }  # fmt: skip
        field = keys.pending_field(item.event.key)
        value = keys.pending_value(item.event.identity, item.event.reserved_at, Seq(1))
        assert found[keys.PENDING] == ({field: value}, -1)
        assert found[b"msgrecord:" + SUFFIX] == ({b"1": item.event.record}, -1)
        assert found[b"conv:" + SUFFIX] == ({b"n": b"1"}, -1)
        assert found[b"convskip:" + SUFFIX] == ([b"1", b"1"], -1)
        assert found[b"grpmember:" + SUFFIX][0][CAROL] == struct.pack(">BQQ", 1, 0, 0)
        head = found[b"grp:" + SUFFIX][0]
        assert (head[b"version"], head[b"count"], head[b"event"], head[b"event_seq"]) == (
            b"2",
            b"3",
            field,
            b"1",
        )


@pytest.mark.shows("G3", "C7")
async def test_an_event_is_left_as_a_reserved_message_is_and_finished_like_one(
    store_server: StoreServer,
) -> None:
    async with opened_groups(store_server) as (groups, store, _):
        result = await change_one(groups, await plan(groups, JOIN, [CAROL]))
        (pending,) = await store.read_pending([BUCKET], older_than_ms=-10_000, entries_max=9)
        assert pending == result.event
        await finish(store, pending)
        assert await store.read_pending([BUCKET], older_than_ms=-10_000, entries_max=9) == []
        (page,) = await store.read_history([history_of()])
        assert page.records == ((1, pending.record),)
        assert decode_record(pending.record).membership_version == 2


@pytest.mark.shows("G5", "G6", "A1", "A2", "A3")
async def test_intervals_follow_join_leave_removal_and_rejoin(store_server: StoreServer) -> None:
    async with opened_groups(store_server) as (groups, store, _):

        async def interval_of(user: UserId) -> Interval | None:
            return (await groups.load_intervals([(PLACE, user)]))[0]

        await store.reserve([send_of(number, 1) for number in range(4)])
        await change_and_finish(groups, store, JOIN, [CAROL])
        assert await interval_of(CAROL) == Interval(MemberState.MEMBER, Seq(4), Seq(0))
        await change_and_finish(groups, store, LEAVE, [CAROL])
        assert await interval_of(CAROL) == Interval(MemberState.LEFT, Seq(4), Seq(6))
        await store.reserve([send_of(9, 3)])
        await change_and_finish(groups, store, JOIN, [CAROL])
        assert await interval_of(CAROL) == Interval(MemberState.MEMBER, Seq(7), Seq(0))
        await change_and_finish(groups, store, REMOVE, [CAROL, BOB])
        assert await interval_of(CAROL) == Interval(MemberState.REMOVED, Seq(7), Seq(9))
        assert await interval_of(BOB) == Interval(MemberState.REMOVED, Seq(0), Seq(9))


@pytest.mark.shows("G2", "F6")
async def test_every_version_keeps_the_members_of_its_moment(store_server: StoreServer) -> None:
    async with opened_groups(store_server) as (groups, store, _):
        await change_and_finish(groups, store, JOIN, [CAROL, DAVE])
        await change_and_finish(groups, store, REMOVE, [ALICE, CAROL])
        await change_and_finish(groups, store, LEAVE, [BOB])
        wanted = [(PLACE, version) for version in range(1, 5)]
        found = [
            {user for part in snapshot.shards.values() for user in part}
            for snapshot in await groups.load_snapshots(wanted)
        ]
        assert found == [{ALICE, BOB}, {ALICE, BOB, CAROL, DAVE}, {BOB, DAVE}, {DAVE}]


@pytest.mark.shows("F6")
async def test_a_change_writes_only_the_shards_that_it_touches_and_marks_what_it_replaces(
    store_server: StoreServer,
) -> None:
    async with opened_groups(store_server, [ALICE, *users_many(40)]) as (groups, store, pipe):
        before = (await picture(pipe))[b"grpsnap:" + SUFFIX][0]
        await change_and_finish(groups, store, JOIN, [CAROL])
        after = (await picture(pipe))[b"grpsnap:" + SUFFIX][0]
        shard = shard_of_user(TENANT, CAROL)
        assert after.keys() - before.keys() == {b"2", b"%d:2" % shard}
        assert {field: after[field] for field in before} == before
        garbage = dict(zip(*[iter((await picture(pipe))[b"grpsnapgc:{b041}"][0])] * 2, strict=True))
        replaced = {b"1", b"%d:1" % shard} & before.keys()
        assert garbage.keys() == {SUFFIX[7:] + field for field in replaced}
        for due in garbage.values():
            assert abs(int(due) - CLOCK.now_ms() - GROUP_SNAPSHOT_LIFE_MS) < 10_000


@pytest.mark.shows("G13")
async def test_the_member_list_has_current_members_with_their_true_joined_at(
    store_server: StoreServer,
) -> None:
    async with opened_groups(store_server) as (groups, store, _):
        await store.reserve([send_of(1, 1)])
        await change_and_finish(groups, store, JOIN, [CAROL])
        await change_and_finish(groups, store, LEAVE, [BOB])
        (page,) = await groups.load_members([MemberQuery(PLACE, UserId(b""), 10)])
        assert page is not None
        assert page.rows == (MemberRow(ALICE, Seq(0)), MemberRow(CAROL, Seq(1)))
        assert (page.group.version, page.group.member_count, page.more) == (3, 2, False)


@pytest.mark.shows("X14", "G9")
async def test_the_owner_who_leaves_is_followed_by_who_joined_first_then_by_the_smallest_id(
    store_server: StoreServer,
) -> None:
    async with opened_groups(store_server, [ALICE, DAVE, BOB]) as (groups, store, _):
        late = UserId(b"\x01" * 16)
        await store.reserve([send_of(1, 1)])  # a join at sequence 1 has joined_at 0, like the first members
        await change_and_finish(groups, store, JOIN, [late])
        left = await change_and_finish(groups, store, LEAVE, [ALICE])
        assert left.event is not None
        assert left.event.key.sender == ALICE
        assert (await load_membership(groups)).owner == min(BOB, DAVE)
        gone = await change_and_finish(groups, store, REMOVE, [BOB, DAVE])
        assert gone.event is not None
        assert gone.event.key.sender == min(BOB, DAVE), "the owner before the change"
        assert (await load_membership(groups)).owner == late


@pytest.mark.shows("X14")
async def test_the_last_one_leaves_and_nobody_may_send(store_server: StoreServer) -> None:
    async with opened_groups(store_server, [ALICE]) as (groups, store, _):
        result = await change_and_finish(groups, store, LEAVE, [ALICE])
        assert (result.outcome, result.member_count) == (Changed.NEW, 0)
        membership = await load_membership(groups)
        assert (membership.owner, membership.members) == (b"", set())
        assert await groups.load_members([MemberQuery(PLACE, UserId(b""), 10)]) is not None
        (sent,) = await store.reserve([send_of(1, 2)])
        assert sent.outcome is Reserved.NOT_MEMBER
        (interval,) = await groups.load_intervals([(PLACE, ALICE)])
        assert interval == Interval(MemberState.LEFT, Seq(0), Seq(1))


@pytest.mark.shows("G8", "X12")
async def test_an_event_never_counts_as_unread_and_marks_nothing_as_read(store_server: StoreServer) -> None:
    async with opened_groups(store_server) as (groups, store, _):
        result = await change_and_finish(groups, store, JOIN, [CAROL])
        assert result.event is not None
        assert parse_event_body(decode_record(result.event.record).body) == EventBody(
            MembershipOp.JOIN, UserId(bytes(16)), (CAROL,)
        )
        marks = [ReadMark(TENANT, CONVERSATION, BUCKET, user, Seq(0)) for user in (ALICE, BOB)]
        assert [(mark.read_seq, mark.unread) for mark in await store.mark_read(marks)] == [(0, 0), (0, 0)]


@pytest.mark.shows("X14")
async def test_five_hundred_users_change_in_one_step(store_server: StoreServer) -> None:
    many = users_many(500)
    async with opened_groups(store_server) as (groups, store, _):
        joined = await change_and_finish(groups, store, JOIN, many)
        assert joined[:4] == (Changed.NEW, 1, 502, 2)
        assert joined.event is not None
        assert decode_record(joined.event.record).audience == tuple(many), "502 are too many to be told"
        removed = await change_and_finish(groups, store, REMOVE, many)
        assert removed[:4] == (Changed.NEW, 2, 2, 3)
        assert (await load_membership(groups)).members == {ALICE, BOB}


# --- repeats ---


@pytest.mark.shows("G10", "C4", "X16")
async def test_a_repeat_continues_the_same_commit_and_writes_nothing(store_server: StoreServer) -> None:
    async with opened_groups(store_server) as (groups, store, pipe):
        item = await plan(groups, JOIN, [CAROL])
        first = await change_one(groups, item)
        before = await picture(pipe)
        assert item.event is not None
        newer = item._replace(event=structs.replace(item.event, record=b"newly built"))
        again = await change_one(groups, newer)
        assert again == first._replace(outcome=Changed.UNFINISHED)
        assert again.event is not None
        assert again.event.record == item.event.record
        assert await picture(pipe) == before
        await finish(store, again.event)
        done = await change_one(groups, newer)
        assert done == first._replace(outcome=Changed.DONE, event=None)
        assert await store.load_last_seq([PLACE]) == [1]


@pytest.mark.shows("G10", "X16")
async def test_what_is_in_effect_makes_no_second_event_and_is_told_when_the_first_is_finished(
    store_server: StoreServer,
) -> None:
    async with opened_groups(store_server) as (groups, store, pipe):
        first = await change_one(groups, await plan(groups, JOIN, [CAROL]))
        before = await picture(pipe)
        empty = await plan(groups, JOIN, [CAROL, BOB])
        assert empty.event is None
        told = await change_one(groups, empty)
        assert (told.outcome, told.event) == (Changed.UNFINISHED, first.event)
        assert await picture(pipe) == before
        await finish(store, told.event)
        done = await change_one(groups, empty)
        assert done[:4] == (Changed.DONE, 0, 3, 2)
        assert await store.load_last_seq([PLACE]) == [1]


@pytest.mark.shows("G10")
async def test_an_older_event_that_is_unfinished_keeps_an_empty_plan_waiting(
    store_server: StoreServer,
) -> None:
    async with opened_groups(store_server) as (groups, store, _):
        first = await change_one(groups, await plan(groups, JOIN, [CAROL]))
        second = await change_one(groups, await plan(groups, JOIN, [DAVE]))
        await finish(store, second.event)
        empty = await plan(groups, JOIN, [CAROL])
        assert (await change_one(groups, empty)).outcome is Changed.WAIT
        await finish(store, first.event)
        assert (await change_one(groups, empty)).outcome is Changed.DONE


@pytest.mark.shows("G13")
async def test_who_left_already_may_leave_again_and_who_was_never_there_is_told_nothing(
    store_server: StoreServer,
) -> None:
    async with opened_groups(store_server) as (groups, store, pipe):
        await change_and_finish(groups, store, LEAVE, [BOB])
        before = await picture(pipe)
        again = await change_one(groups, await plan(groups, LEAVE, [BOB]))
        assert again[:4] == (Changed.DONE, 0, 1, 2)
        stranger = await change_one(groups, await plan(groups, LEAVE, [DAVE]))
        nowhere = (await plan(groups, LEAVE, [DAVE]))._replace(place=PLACE._replace(bucket=BucketId(200)))
        assert stranger == await change_one(groups, nowhere)
        assert stranger.outcome is Changed.NOT_MEMBER
        assert await picture(pipe) == before


@pytest.mark.shows("X11")
async def test_an_operators_request_is_remembered_whatever_its_user_did_since(
    store_server: StoreServer,
) -> None:
    async with opened_groups(store_server) as (groups, store, pipe):
        request = request_of(1, JOIN, [CAROL])
        first = await change_one(groups, await plan(groups, JOIN, [CAROL], request=request))
        unfinished = await change_one(groups, await plan(groups, JOIN, [CAROL], request=request))
        assert unfinished == first._replace(outcome=Changed.UNFINISHED)
        await finish(store, first.event)
        await change_and_finish(groups, store, LEAVE, [CAROL])
        before = await picture(pipe)
        again = await change_one(groups, await plan(groups, JOIN, [CAROL], request=request))
        assert again == first._replace(outcome=Changed.DONE, event=None)
        assert await picture(pipe) == before
        assert CAROL not in (await load_membership(groups)).members


@pytest.mark.shows("X11")
async def test_a_request_is_remembered_for_a_day_also_when_it_had_nothing_to_do(
    store_server: StoreServer,
) -> None:
    async with opened_groups(store_server) as (groups, store, pipe):
        request = request_of(1, JOIN, [BOB])
        empty = await change_one(groups, await plan(groups, JOIN, [BOB], request=request))
        assert empty[:4] == (Changed.DONE, 0, 2, 1)
        key = keys.request_key(SUFFIX, request.request_id)
        left_ms = await pipe.command("PTTL", key)
        assert ADMIN_REQUEST_LIFE_MS - 10_000 < left_ms <= ADMIN_REQUEST_LIFE_MS
        await change_and_finish(groups, store, LEAVE, [BOB])
        again = await change_one(groups, await plan(groups, JOIN, [BOB], request=request))
        assert again == empty
        assert BOB not in (await load_membership(groups)).members


@pytest.mark.shows("X11")
async def test_two_requests_for_one_change_are_both_remembered(store_server: StoreServer) -> None:
    async with opened_groups(store_server) as (groups, store, _):
        item = await plan(groups, JOIN, [CAROL], request=request_of(1, JOIN, [CAROL]))
        twin = item._replace(request=request_of(2, JOIN, [CAROL]))
        first = await change_one(groups, item)
        await finish(store, first.event)
        assert (await change_one(groups, twin)).outcome is Changed.DONE
        await change_and_finish(groups, store, LEAVE, [CAROL])
        late = await plan(groups, JOIN, [CAROL], request=twin.request)
        assert (await change_one(groups, late)).seq == first.seq


@pytest.mark.shows("X11", "C5")
async def test_a_request_id_used_for_something_else_is_a_conflict_and_writes_nothing(
    store_server: StoreServer,
) -> None:
    async with opened_groups(store_server) as (groups, _, pipe):
        await change_one(groups, await plan(groups, JOIN, [CAROL], request=request_of(1, JOIN, [CAROL])))
        before = await picture(pipe)
        for op, users in ((JOIN, [DAVE]), (REMOVE, [CAROL])):
            item = await plan(groups, op, users, request=request_of(1, op, users))
            assert (await change_one(groups, item)).outcome is Changed.CONFLICT
        assert await picture(pipe) == before


# --- refusals ---


@pytest.mark.shows("G1", "X16", "F-49")
async def test_a_plan_of_another_version_changes_nothing_and_consumes_no_sequence(
    store_server: StoreServer,
) -> None:
    async with opened_groups(store_server) as (groups, store, pipe):
        late = await plan(groups, JOIN, [DAVE])
        late_and_empty = await plan(groups, JOIN, [BOB])
        await change_and_finish(groups, store, JOIN, [CAROL])
        before = await picture(pipe)
        for item in (late, late_and_empty):
            assert (await change_one(groups, item)).outcome is Changed.MEMBERSHIP_CHANGED
        assert await picture(pipe) == before
        assert (await change_one(groups, await plan(groups, JOIN, [DAVE]))).seq == 2


def _unfit(item: MembershipChange) -> Sequence[MembershipChange]:
    """Plans that contradict the members of their own version."""
    return [
        item._replace(users=placed([BOB])),
        item._replace(users=placed([CAROL, BOB])),
        item._replace(op=REMOVE),
        item._replace(op=LEAVE),
        item._replace(users=()),
        item._replace(owner_after=UserId(b"")),
        item._replace(owner_after=DAVE),
        item._replace(op=REMOVE, users=placed([BOB]), owner_after=BOB),
        item._replace(op=REMOVE, users=placed([ALICE, BOB]), owner_after=ALICE),
    ]


@pytest.mark.shows("X16")
async def test_a_plan_that_contradicts_the_members_changes_nothing(store_server: StoreServer) -> None:
    async with opened_groups(store_server) as (groups, _, pipe):
        item = await plan(groups, JOIN, [CAROL])
        before = await picture(pipe)
        for at, unfit in enumerate(_unfit(item)):
            assert (await change_one(groups, unfit)).outcome is Changed.MEMBERSHIP_CHANGED, at
        assert await picture(pipe) == before


async def test_a_user_placed_in_the_wrong_shard_is_a_contradiction(store_server: StoreServer) -> None:
    async with opened_groups(store_server) as (groups, _, pipe):
        item = await plan(groups, REMOVE, [BOB])
        wrong = PlacedUser(shard_of_user(TENANT, ALICE), BOB)
        assert wrong != item.users[0]
        before = await picture(pipe)
        with pytest.raises(StoreBroken, match="contradicts"):
            await change_one(groups, item._replace(users=(wrong,)))
        assert await picture(pipe) == before


@pytest.mark.shows("F-05", "X16")
async def test_a_stale_owner_changes_nobody(store_server: StoreServer) -> None:
    async with opened_groups(store_server) as (groups, _, pipe):
        request = request_of(1, JOIN, [CAROL])
        items = [
            await plan(groups, JOIN, [CAROL], request=request),
            await plan(groups, JOIN, [BOB], request=request_of(2, JOIN, [BOB])),
        ]
        async with opened_other(store_server, slots=[SLOT]):
            pass
        before = await picture(pipe)
        results = await groups.change_memberships(items)
        assert [result.outcome for result in results] == [Changed.STALE_OWNER] * 2
        assert await picture(pipe) == before


@pytest.mark.shows("X16")
async def test_a_clock_that_is_off_and_an_exhausted_conversation_change_nobody(
    store_server: StoreServer,
) -> None:
    async with opened_groups(store_server) as (groups, _, pipe):
        before = await picture(pipe)
        for off in (CLOCK_SKEW_MS_MAX + 2_000, -CLOCK_SKEW_MS_MAX - 2_000):
            item = await plan(groups, JOIN, [CAROL], reserved_at=CLOCK.now_ms() + off)
            assert (await change_one(groups, item)).outcome is Changed.CLOCK
        assert await picture(pipe) == before
        await pipe.command("HSET", b"conv:" + SUFFIX, "n", SEQ_MAX)
        before = await picture(pipe)
        assert (await change_one(groups, await plan(groups, JOIN, [CAROL]))).outcome is Changed.EXHAUSTED
        assert await picture(pipe) == before


@pytest.mark.shows("C5", "X16")
async def test_a_message_that_holds_the_id_of_the_event_is_a_conflict(store_server: StoreServer) -> None:
    async with opened_groups(store_server) as (groups, store, pipe):
        item = await plan(groups, JOIN, [CAROL])
        assert item.event is not None
        await store.reserve([structs.replace(send_of(1, 1), key=item.event.key)])
        before = await picture(pipe)
        assert (await change_one(groups, item)).outcome is Changed.CONFLICT
        assert await picture(pipe) == before


async def _assert_refused_as_broken(pipe: RedisPipe, groups: object, item: MembershipChange) -> None:
    before = await picture(pipe)
    with pytest.raises(StoreBroken):
        await groups.change_memberships([item])  # type: ignore[attr-defined]  # the adapter under test
    assert await picture(pipe) == before


_REQUEST = request_of(1, JOIN, [CAROL])
WRITTEN_KEYS = (
    keys.OWNER, keys.PENDING, b"conv:" + SUFFIX, b"msgrecord:" + SUFFIX, b"convskip:" + SUFFIX,
    b"grp:" + SUFFIX, b"grpmember:" + SUFFIX, b"grpsnap:" + SUFFIX, b"grpsnapgc:{b041}",
    keys.request_key(SUFFIX, _REQUEST.request_id),
)  # fmt: skip


@pytest.mark.shows("C3", "X16")
@pytest.mark.parametrize("key", [*WRITTEN_KEYS, b"event"])
async def test_a_wrong_type_under_any_key_is_refused_before_any_write(
    store_server: StoreServer, key: bytes
) -> None:
    async with opened_groups(store_server) as (groups, _, pipe):
        item = await plan(groups, JOIN, [CAROL], request=_REQUEST)
        assert item.event is not None
        await plant(pipe, keys.committed_key(item.event.key) if key == b"event" else key)
        await _assert_refused_as_broken(pipe, groups, item)


@pytest.mark.shows("F6")
@pytest.mark.parametrize("field", [b"1", b"%d:1" % shard_of_user(TENANT, BOB)])
async def test_a_torn_snapshot_is_never_built_upon(store_server: StoreServer, field: bytes) -> None:
    async with opened_groups(store_server) as (groups, _, pipe):
        item = await plan(groups, REMOVE, [BOB])
        await pipe.command("HDEL", b"grpsnap:" + SUFFIX, field)
        await _assert_refused_as_broken(pipe, groups, item)


@pytest.mark.shows("F-12", "X16")
async def test_a_full_server_changes_nobody_and_still_finishes_events(store_server: StoreServer) -> None:
    async with opened_groups(store_server) as (groups, store, pipe):
        first = await change_one(groups, await plan(groups, JOIN, [CAROL]))
        second = await plan(groups, JOIN, [DAVE])
        before = await picture(pipe)
        await pipe.command("CONFIG", "SET", "maxmemory", "1mb")
        try:
            assert (await change_one(groups, second)).outcome is Changed.FULL
            assert await picture(pipe) == before
            await finish(store, first.event)
        finally:
            await pipe.command("CONFIG", "SET", "maxmemory", "0")
        (page,) = await store.read_history([history_of()])
        assert page.head_seq == 1

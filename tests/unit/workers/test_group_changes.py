"""Creating a group, leaving, adding and removing: what is changed, told and recorded; what a crash leaves."""

from collections.abc import Sequence
from typing import Any

import pytest

from qim.adapters.commits_memory import MemoryCommitStore
from qim.domain.groups import EventBody, parse_event_body
from qim.domain.placement import slot_of_bucket
from qim.errors import (
    ClientError,
    Conflict,
    PermissionDenied,
    StoreBroken,
    StoreError,
    StoreRefused,
    StoreUnknown,
)
from qim.ids import BootId, GroupId, RequestId, UserId
from qim.limits import GROUP_REQUESTS_WAITING_MAX
from qim.memberships import Changed, ChangeResult
from qim.ports import SlotClaim
from qim.records import LISTED_IN_RECORD, MembershipOp, decode_entry
from qim.wire.bodies import CreateGroup, GroupCreated, LeaveGroup, MemberListBatch, encode_body
from qim.wire.layout import Op
from tests.unit.workers.group_calls import (
    CAROL,
    DAVE,
    GROUP,
    JOIN,
    LEAVE,
    NO_GROUP,
    PLACE,
    REMOVE,
    change,
    create_group,
    last_and_head,
    members_of,
    outbox_of,
    send_to_group,
)
from tests.unit.workers.rig import ALICE, ALL_SLOTS, BOB, TENANT, Client, Rig
from tests.waiting import happens
from workers.failpoints import Action
from workers.group_changes import operator_order
from workers.writer import Writer

DENIED, INVALID, CONFLICT, UNAVAILABLE, EXHAUSTED = 1002, 1003, 1004, 2001, 2002
UNKNOWN, MEMBERSHIP_CHANGED = 2003, 2004
NOBODY = UserId(bytes(16))


@pytest.fixture
async def rig() -> Rig:
    rig = await Rig().prepare()
    await create_group(rig, (ALICE, BOB, CAROL))
    return rig


@pytest.fixture(params=[False, True], ids=["two_steps", "one_step"])
def writer(rig: Rig, request: pytest.FixtureRequest) -> Writer:
    return rig.roles(one_step=request.param).writer


async def answered(client: Client, count: int) -> Any:
    await happens(lambda: len(client.answers) >= count, what=f"{count} answers")
    return client.answers[-1][1]


def create(
    rig: Rig, writer: Writer, *, request: int = 1, name: str = "g", members: Sequence[UserId] = (BOB,)
) -> None:
    body = CreateGroup(request.to_bytes(16, "big"), name, list(members))
    writer.submit(rig.alice.request(Op.CREATE_GROUP, encode_body(body)))


def leave(client: Client, writer: Writer, group: GroupId = GROUP) -> None:
    writer.submit(client.request(Op.LEAVE_GROUP, encode_body(LeaveGroup(group))))


async def order(
    writer: Writer, op: MembershipOp, *users: UserId, request: int = 1, group: GroupId = GROUP
) -> ChangeResult:
    request_id = RequestId(request.to_bytes(16, "big"))
    return await writer.change_members(
        operator_order(tenant=TENANT, group=group, op=op, users=users, request_id=request_id)
    )


async def current(rig: Rig) -> tuple[int, UserId, set[UserId]]:
    """Version, owner and members."""
    (head,) = await rig.memberships.load_groups([PLACE])
    (snapshot,) = await rig.memberships.load_snapshots([(PLACE, head.version)])
    return head.version, head.owner, members_of(snapshot)


async def events(rig: Rig) -> list[tuple[int, EventBody, set[bytes], UserId]]:
    """Sequence, body, audience and sender of each control message in the Outbox."""
    found: list[tuple[int, EventBody, set[bytes], UserId]] = []
    for header, entry in await outbox_of(rig):
        record = decode_entry(entry).record
        if record.message_type == 9:
            assert header.group.audience == LISTED_IN_RECORD
            assert record.audience is not None
            found.append((header.seq, parse_event_body(record.body), {*record.audience}, record.sender))
    return found


# --- creation ----------------------------------------------------------------------------------------


@pytest.mark.shows("G4")
async def test_a_created_group_takes_messages_and_a_repeat_names_the_same_one(
    rig: Rig, writer: Writer
) -> None:
    async with rig.running(writer):
        create(rig, writer)
        told = await answered(rig.alice, 1)
        assert isinstance(told, GroupCreated)
        assert told.membership_version == 1
        create(rig, writer)
        assert await answered(rig.alice, 2) == told
        group = GroupId(told.group_id)
        send_to_group(rig, writer, 1, client=rig.bob, group=group)
        await answered(rig.bob, 1)
        assert [ack.conversation_seq for ack in rig.bob.acks] == [1], "a control message came before"
        leave(rig.bob, writer, group)
        await answered(rig.bob, 2)
        create(rig, writer)
        again = await answered(rig.alice, 3)
    assert (again.group_id, again.membership_version) == (told.group_id, 2)


async def test_the_same_request_for_another_group_is_a_conflict(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        create(rig, writer)
        create(rig, writer, name="another")
        create(rig, writer, members=[BOB, CAROL])
        await answered(rig.alice, 3)
    assert rig.alice.errors == [CONFLICT] * 2


async def test_a_group_of_too_many_or_of_nobody_at_all_is_refused_untouched(rig: Rig, writer: Writer) -> None:
    many = [UserId(number.to_bytes(16, "big")) for number in range(1, 502)]
    before = dict(rig.commit_state.groups)
    async with rig.running(writer):
        create(rig, writer, members=many)
        create(rig, writer, members=[NOBODY])
        create(rig, writer, name="x" * 257)
        await answered(rig.alice, 3)
    assert rig.alice.errors == [INVALID] * 3
    assert rig.commit_state.groups == before


# --- leaving -----------------------------------------------------------------------------------------


@pytest.mark.shows("G3", "G6", "G7", "G9", "G13", "T8", "C2")
async def test_who_leaves_is_told_the_count_and_an_event_in_the_outbox_says_so(
    rig: Rig, writer: Writer
) -> None:
    async with rig.running(writer):
        send_to_group(rig, writer, 1)
        await answered(rig.alice, 1)
        leave(rig.bob, writer)
        told = await answered(rig.bob, 1)
        send_to_group(rig, writer, 2)
        await answered(rig.alice, 2)
    assert told == MemberListBatch(GROUP, 2, [], b"", 2)
    assert await current(rig) == (2, ALICE, {ALICE, CAROL})
    assert await events(rig) == [(2, EventBody(LEAVE, BOB, (BOB,)), {ALICE, BOB, CAROL}, BOB)]
    assert last_and_head(rig) == (3, 3)
    assert rig.metrics.writer_membership_events == 1
    assert rig.metrics.writer_membership_retries == 0, "the version of the change was not noted"
    assert (await outbox_of(rig))[-1][0].group.version == 2


@pytest.mark.shows("G10")
async def test_who_left_already_is_told_the_count_and_nothing_happens_again(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        leave(rig.bob, writer)
        first = await answered(rig.bob, 1)
        leave(rig.bob, writer)
        assert await answered(rig.bob, 2) == first
    assert len(await events(rig)) == 1
    assert last_and_head(rig) == (1, 1)


@pytest.mark.shows("F-48", "G12")
async def test_a_stranger_leaves_a_group_as_one_that_does_not_exist(rig: Rig, writer: Writer) -> None:
    dave = Client(rig.clock, user=DAVE)
    async with rig.running(writer):
        leave(dave, writer)
        leave(dave, writer, NO_GROUP)
        send_to_group(rig, writer, 1, client=dave)
        await answered(dave, 3)
    assert dave.errors == [DENIED] * 3
    assert len({repr(body) for _id, body in dave.answers}) == 1, "the three can be told apart"
    assert last_and_head(rig) == (0, 0)


@pytest.mark.shows("X14")
async def test_the_owner_leaves_and_the_member_of_longest_standing_takes_over(
    rig: Rig, writer: Writer
) -> None:
    async with rig.running(writer):
        for client in (rig.alice, rig.bob, Client(rig.clock, user=CAROL)):
            leave(client, writer)
            await answered(client, 1)
            _version, owner, members = await current(rig)
            assert owner == min(members, default=b"")
        send_to_group(rig, writer, 1)
        await answered(rig.alice, 2)
    assert rig.alice.errors == [DENIED]
    assert last_and_head(rig) == (3, 3)


@pytest.mark.shows("G1", "F-49")
async def test_many_leave_at_once_and_each_has_an_event_of_its_own(rig: Rig, writer: Writer) -> None:
    users = [UserId(bytes((number,)) * 16) for number in range(1, 41)]
    clients = [Client(rig.clock, user=user) for user in users]
    await change(rig, JOIN, *users)
    async with rig.running(writer):
        for number, client in enumerate(clients):
            leave(client, writer)
            send_to_group(rig, writer, number)
        for client in clients:
            assert isinstance(await answered(client, 1), MemberListBatch)
        await answered(rig.alice, len(clients))
    assert [body.users for _seq, body, _audience, _sender in await events(rig)] == [(user,) for user in users]
    assert await current(rig) == (42, ALICE, {ALICE, BOB, CAROL})
    last, head = last_and_head(rig)
    assert last == head == 1 + len(users) + len(rig.alice.acks)


# --- an operator -------------------------------------------------------------------------------------


@pytest.mark.shows("G3", "G5", "G9", "T15")
async def test_an_operator_adds_and_removes_and_the_owner_is_named_as_sender(
    rig: Rig, writer: Writer
) -> None:
    async with rig.running(writer):
        added = await order(writer, JOIN, DAVE, BOB)
        removed = await order(writer, REMOVE, ALICE, request=2)
    assert (added.outcome, added.seq, added.member_count, added.version) == (Changed.NEW, 1, 4, 2)
    assert (removed.outcome, removed.seq, removed.member_count) == (Changed.NEW, 2, 3)
    assert await events(rig) == [
        (1, EventBody(JOIN, NOBODY, (DAVE,)), {ALICE, BOB, CAROL, DAVE}, ALICE),
        (2, EventBody(REMOVE, NOBODY, (ALICE,)), {ALICE, BOB, CAROL, DAVE}, ALICE),
    ]
    assert await current(rig) == (3, BOB, {BOB, CAROL, DAVE})


@pytest.mark.shows("X11", "G10")
async def test_a_repeated_order_gets_its_first_result_whatever_happened_since(
    rig: Rig, writer: Writer
) -> None:
    dave = Client(rig.clock, user=DAVE)
    async with rig.running(writer):
        first = await order(writer, JOIN, DAVE)
        leave(dave, writer)
        await answered(dave, 1)
        again = await order(writer, JOIN, DAVE)
        with pytest.raises(Conflict):
            await order(writer, JOIN, DAVE, BOB)
    assert (again.seq, again.member_count) == (first.seq, first.member_count)
    assert DAVE not in (await current(rig))[2]


async def test_an_order_for_no_group_is_refused(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        with pytest.raises(PermissionDenied):
            await order(writer, JOIN, DAVE, group=NO_GROUP)


# --- when something fails ----------------------------------------------------------------------------


@pytest.mark.shows("C2", "G10")
@pytest.mark.parametrize("applied", [False, True])
async def test_an_event_that_may_not_lie_in_the_outbox_is_told_as_unknown_and_a_repeat_settles_it(
    rig: Rig, writer: Writer, applied: bool
) -> None:
    rig.outbox.fail("append", StoreUnknown(), applied=applied)
    async with rig.running(writer):
        leave(rig.bob, writer)
        await answered(rig.bob, 1)
        assert rig.bob.errors == [UNKNOWN]
        assert last_and_head(rig) == (1, 0)
        leave(rig.bob, writer)
        told = await answered(rig.bob, 2)
    assert told == MemberListBatch(GROUP, 2, [], b"", 2)
    assert last_and_head(rig) == (1, 1)
    assert {seq for seq, _body, _audience, _sender in await events(rig)} == {1}


@pytest.mark.shows("C11", "G3", "F-02")
async def test_what_a_kill_left_of_a_change_is_finished_without_who_asked_for_it(rig: Rig) -> None:
    writer = rig.roles(failpoints={"writer.changed": Action("raise")}).writer
    leave(rig.bob, writer)
    await rig.run_until_killed(writer)
    assert last_and_head(rig) == (1, 0)
    await rig.claim()
    writer = rig.roles().writer
    rig.clock.advance(milliseconds=1)
    assert await writer.recover_once(older_than_ms=0) == 1
    assert last_and_head(rig) == (1, 1)
    assert await events(rig) == [(1, EventBody(LEAVE, BOB, (BOB,)), {ALICE, BOB, CAROL}, BOB)]


@pytest.mark.parametrize(
    ("method", "error", "applied", "told"),
    [
        ("load_groups", StoreRefused(), False, UNAVAILABLE),
        ("load_snapshots", StoreUnknown(), False, UNKNOWN),
        ("change_memberships", StoreRefused(), False, UNAVAILABLE),
        ("change_memberships", StoreUnknown(), False, UNKNOWN),
        ("change_memberships", StoreUnknown(), True, UNKNOWN),
    ],
)
async def test_a_failed_change_is_settled_by_a_repeat(
    rig: Rig, writer: Writer, method: str, error: StoreError, applied: bool, told: int
) -> None:
    rig.memberships.fail(method, error, applied=applied)
    async with rig.running(writer):
        leave(rig.bob, writer)
        await answered(rig.bob, 1)
        assert rig.bob.errors == [told]
        leave(rig.bob, writer)
        assert isinstance(await answered(rig.bob, 2), MemberListBatch)
    assert [seq for seq, _body, _audience, _sender in await events(rig)] == [1]
    assert last_and_head(rig) == (1, 1)


async def test_a_store_that_contradicts_itself_stops_the_slot_and_an_operator_resumes_it(
    rig: Rig, writer: Writer
) -> None:
    rig.memberships.fail("load_snapshots", StoreBroken("a snapshot is missing"))
    async with rig.running(writer):
        leave(rig.bob, writer)
        await answered(rig.bob, 1)
        leave(rig.bob, writer)
        await answered(rig.bob, 2)
        assert rig.bob.errors == [UNKNOWN, UNAVAILABLE]
        (slot,) = (int(name.split()[1]) for name in writer.stopped)
        assert writer.retry(slot)  # type: ignore[arg-type]  # a plain number stands for a slot
        leave(rig.bob, writer)
        assert isinstance(await answered(rig.bob, 3), MemberListBatch)


@pytest.mark.shows("G1")
async def test_a_plan_that_is_overtaken_is_made_anew(rig: Rig, writer: Writer) -> None:
    inner = rig.memberships.inner
    original = inner.change_memberships
    overtaken: list[int] = []

    async def overtake(items: Any) -> Any:
        if not overtaken:
            overtaken.append(1)
            inner.change_memberships = original
            await change(rig, JOIN, DAVE)
        return await original(items)

    inner.change_memberships = overtake
    async with rig.running(writer):
        leave(rig.bob, writer)
        told = await answered(rig.bob, 1)
    assert told == MemberListBatch(GROUP, 3, [], b"", 3)
    assert rig.metrics.writer_membership_retries == 1


@pytest.mark.shows("F-05")
async def test_a_stale_owner_changes_nothing_and_its_slot_is_given_up(rig: Rig, writer: Writer) -> None:
    newer = MemoryCommitStore(rig.clock, rig.commit_state)
    await newer.claim(SlotClaim(ALL_SLOTS, BootId(b"n" * 16), b"v" * 16, "there", rig.placement.digest()))
    groups = dict(rig.commit_state.groups)
    async with rig.running(writer):
        leave(rig.bob, writer)
        create(rig, writer)
        await answered(rig.bob, 1)
        await answered(rig.alice, 1)
    assert (rig.bob.errors, rig.alice.errors) == ([UNAVAILABLE], [UNAVAILABLE])
    assert slot_of_bucket(PLACE.bucket) in rig.fatal
    assert rig.commit_state.groups == groups
    assert await current(rig) == (1, ALICE, {ALICE, BOB, CAROL})


async def test_too_many_changes_of_a_lane_are_refused_and_the_others_are_done(
    rig: Rig, writer: Writer
) -> None:
    changed = rig.memberships.hold("load_groups")
    async with rig.running(writer):
        leave(rig.bob, writer)
        await happens(lambda: "load_groups" in rig.memberships.calls, what="the first change")
        for _number in range(GROUP_REQUESTS_WAITING_MAX + 1):
            leave(rig.bob, writer)
        await answered(rig.bob, 1)
        assert rig.bob.errors == [EXHAUSTED]
        changed.set()
        await answered(rig.bob, GROUP_REQUESTS_WAITING_MAX + 2)
        leave(rig.alice, writer)
        await answered(rig.alice, 1)
    assert rig.bob.errors == [EXHAUSTED]
    assert rig.metrics.shed_queue == 1


@pytest.mark.shows("F-12")
async def test_a_store_above_four_fifths_of_its_memory_refuses_changes(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        send_to_group(rig, writer, 1)
        await answered(rig.alice, 1)
        rig.commits.inner.limit_bytes = rig.commits.inner.state.record_bytes * 9 // 8
        await happens(lambda: _is_refused(rig, writer), what="the writer has noticed")
        with pytest.raises(ClientError):
            await order(writer, JOIN, DAVE)
        assert DAVE not in (await current(rig))[2]


def _is_refused(rig: Rig, writer: Writer) -> bool:
    before = len(rig.alice.answers)
    create(rig, writer)
    return len(rig.alice.answers) > before and rig.alice.errors[-1:] == [EXHAUSTED]


async def test_a_drain_does_what_was_accepted_and_refuses_the_rest(rig: Rig, writer: Writer) -> None:
    leave(rig.bob, writer)
    async with rig.running(writer):
        await writer.drain(rig.clock.monotonic() + 5)
        assert isinstance(await answered(rig.bob, 1), MemberListBatch)
        leave(rig.alice, writer)
        assert rig.alice.errors == [UNAVAILABLE]
        with pytest.raises(ClientError):
            await order(writer, JOIN, DAVE)

"""What a group decides, without a store: ids, intervals, audiences, plans, the body of an event."""

from collections.abc import Sequence
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from qim.domain.groups import (
    EVENT_TYPE,
    OPERATOR,
    EventBody,
    Membership,
    PlannedChange,
    audience_of_event,
    build_event_body,
    check_change,
    choose_successor,
    does_need_successor,
    earliest_visible,
    event_id_of,
    group_id_of,
    is_visible,
    operator_request_digest,
    parse_event_body,
    plan_change,
    plan_creation,
    route_group,
    upper_visible,
)
from qim.domain.placement import bucket_of_conversation, direct_conversation, group_conversation
from qim.errors import FailedPrecondition, InvalidArgument, RecordCorrupt
from qim.ids import DeviceId, GroupId, Millis, RequestId, Seq, TenantId, UserId
from qim.limits import (
    BROADCAST_MEMBERS_MAX,
    CHANGE_USERS_MAX,
    GROUP_MEMBERS_MAX,
    GROUP_NAME_BYTES_MAX,
    MESSAGE_BODY_BYTES_MAX,
)
from qim.records import (
    LISTED_IN_RECORD,
    MembershipOp,
    MessageType,
    build_outbox_record,
    decode_record,
    encode_record,
    message_id_of,
    parse_header,
)

TENANT = TenantId(7)
GROUP = GroupId(b"g" * 16)
ROUTE = route_group(TENANT, GROUP)
ALICE, BOB, CAROL, DAVE = (UserId(letter * 16) for letter in (b"a", b"b", b"c", b"d"))
JOIN, LEAVE, REMOVE = MembershipOp.JOIN, MembershipOp.LEAVE, MembershipOp.REMOVE
REQUEST = RequestId(b"r" * 16)

users = st.binary(min_size=16, max_size=16).filter(lambda user: user != OPERATOR).map(UserId)
sequences = st.integers(0, 40).map(Seq)


def many(count: int, *, first: int = 1) -> list[UserId]:
    return [UserId(b"%016d" % number) for number in range(first, first + count)]


def planned(
    op: MembershipOp, named: Sequence[bytes], members: Sequence[UserId], **changes: Any
) -> PlannedChange:
    """A change of a group that Alice owns, as the writer would plan it."""
    fields: dict[str, Any] = {
        "tenant": TENANT,
        "route": ROUTE,
        "op": op,
        "actor": named[0] if op is LEAVE else OPERATOR,
        "device": None,
        "users": named,
        "membership": Membership(4, ALICE, frozenset(members)),
        "now_ms": Millis(1_700_000_000_000),
    }
    return plan_change(**(fields | changes))


# --- ids ---


def test_a_group_has_one_conversation_that_is_no_direct_one_and_its_bucket() -> None:
    assert ROUTE.conversation == group_conversation(TENANT, GROUP)
    assert ROUTE.conversation != group_conversation(TenantId(8), GROUP)
    assert ROUTE.conversation != direct_conversation(TENANT, UserId(GROUP), UserId(GROUP))
    assert ROUTE.bucket == bucket_of_conversation(TENANT, ROUTE.conversation)


def test_the_id_of_a_group_comes_from_tenant_creator_and_request() -> None:
    text = b"qim.groupid.v1" + (7).to_bytes(4, "big") + ALICE + REQUEST
    assert group_id_of(TENANT, ALICE, REQUEST) == blake3(text).digest(16)
    others = {group_id_of(TenantId(8), ALICE, REQUEST), group_id_of(TENANT, BOB, REQUEST)}
    assert len({group_id_of(TENANT, ALICE, REQUEST), *others}) == 3


@pytest.mark.shows("G10")
def test_the_id_of_an_event_comes_from_everything_that_makes_it_this_change() -> None:
    fields: dict[str, Any] = {
        "tenant": TENANT, "group": GROUP, "op": JOIN, "actor": OPERATOR, "version": 4, "users": (ALICE, BOB),
    }  # fmt: skip
    text = (
        b"qim.membership-event.v1\0" + (7).to_bytes(4, "big") + GROUP + b"\x01" + bytes(16)
        + (4).to_bytes(8, "big") + ALICE + BOB
    )  # fmt: skip
    assert event_id_of(**fields) == blake3(text).digest(16)
    changes: list[dict[str, Any]] = [
        {"tenant": TenantId(8)}, {"group": GroupId(bytes(16))}, {"op": REMOVE}, {"actor": ALICE},
        {"version": 5}, {"users": (ALICE,)},
    ]  # fmt: skip
    assert len({event_id_of(**fields), *(event_id_of(**(fields | change)) for change in changes)}) == 7


@pytest.mark.shows("X11")
def test_an_operators_request_is_known_by_what_was_asked_for_in_any_order() -> None:
    def digest(op: MembershipOp, *named: UserId) -> bytes:
        return operator_request_digest(tenant=TENANT, group=GROUP, op=op, users=named)

    assert digest(JOIN, ALICE, BOB) == digest(JOIN, BOB, ALICE, BOB)
    assert len({digest(JOIN, ALICE), digest(REMOVE, ALICE), digest(JOIN, ALICE, BOB)}) == 3


# --- who sees what ---


@pytest.mark.shows("G6")
@given(sequences, sequences, sequences)
def test_visible_is_the_open_interval(seq: Seq, joined_at: Seq, left_at: Seq) -> None:
    assert is_visible(seq, joined_at=joined_at, left_at=Seq(0)) == (seq > joined_at)
    if left_at:
        assert is_visible(seq, joined_at=joined_at, left_at=left_at) == (joined_at < seq < left_at)


@pytest.mark.shows("G6", "G11")
@given(sequences, sequences, sequences, st.integers(1, 40).map(Seq))
def test_history_from_earliest_to_upper_is_exactly_what_is_visible_and_kept(
    joined_at: Seq, left_at: Seq, head: Seq, available: Seq
) -> None:
    earliest = earliest_visible(available, joined_at=joined_at)
    upper = upper_visible(head, left_at=left_at)
    kept = range(available, head + 1)
    visible = [seq for seq in kept if is_visible(Seq(seq), joined_at=joined_at, left_at=left_at)]
    assert visible == [*range(earliest, upper + 1)]


@pytest.mark.shows("G5", "A1")
def test_a_joiner_sees_the_join_event_first() -> None:
    joined_at = Seq(10 - 1)
    assert earliest_visible(Seq(1), joined_at=joined_at) == 10
    assert not is_visible(Seq(9), joined_at=joined_at, left_at=Seq(0))


@pytest.mark.shows("G6", "A2")
def test_who_left_sees_neither_the_event_nor_what_follows() -> None:
    assert upper_visible(Seq(20), left_at=Seq(10)) == 9
    assert upper_visible(Seq(5), left_at=Seq(10)) == 5
    assert upper_visible(Seq(20), left_at=Seq(0)) == 20


# --- audience ---


@pytest.mark.shows("G7", "X4")
@pytest.mark.parametrize(("count", "is_told"), [(1, True), (500, True), (501, False), (5_000, False)])
def test_a_group_is_told_up_to_the_bound_and_above_it_only_those_affected(count: int, is_told: bool) -> None:
    after, gone = many(count), many(3, first=count + 1)
    audience = audience_of_event(after, gone, broadcast_members_max=BROADCAST_MEMBERS_MAX)
    assert audience == tuple([*after, *gone] if is_told else gone)


@pytest.mark.shows("G7")
@given(st.sets(users, max_size=9), st.sets(users, min_size=1, max_size=3), st.integers(0, 9))
def test_who_is_affected_is_always_told_and_nobody_twice(
    after: set[UserId], affected: set[UserId], bound: int
) -> None:
    audience = audience_of_event(after, affected, broadcast_members_max=bound)
    assert affected <= set(audience) <= after | affected
    assert list(audience) == sorted(set(audience))


@pytest.mark.shows("G7")
@pytest.mark.parametrize(
    ("op", "before", "count_after"),
    [(JOIN, 499, 500), (JOIN, 500, 501), (REMOVE, 501, 500), (REMOVE, 502, 501)],
)
def test_the_count_after_the_change_decides(op: MembershipOp, before: int, count_after: int) -> None:
    members = [ALICE, *many(before - 1)]
    user = BOB if op is JOIN else members[-1]
    event = planned(op, [user], members).event
    assert event is not None
    after = {*members, user} if op is JOIN else {*members} - {user}
    assert len(after) == count_after
    assert event.record.audience == (tuple(sorted({*after, user})) if count_after <= 500 else (user,))


# --- the event ---


@pytest.mark.shows("G8")
@given(st.sampled_from(MembershipOp), users, st.lists(users, min_size=1, max_size=5))
def test_the_body_of_an_event_survives_and_is_drawn_as_promised(
    op: MembershipOp, actor: UserId, named: list[UserId]
) -> None:
    body = EventBody(op, actor, tuple(named))
    data = build_event_body(body)
    assert parse_event_body(data) == body
    assert data == bytes([op]) + actor + len(named).to_bytes(2, "big") + b"".join(named)


@pytest.mark.shows("G8")
@given(st.binary(max_size=60))
def test_other_bytes_are_no_body_of_an_event(data: bytes) -> None:
    try:
        body = parse_event_body(data)
    except RecordCorrupt:
        return
    assert build_event_body(body) == data


def test_a_torn_or_longer_body_is_corrupt() -> None:
    data = build_event_body(EventBody(JOIN, OPERATOR, (ALICE, BOB)))
    for torn in (data[:-1], data + b"x", data[:18], b"\x04" + data[1:], data[:17] + bytes(2)):
        with pytest.raises(RecordCorrupt):
            parse_event_body(torn)


@pytest.mark.shows("G3", "G8", "G9")
def test_an_event_is_a_control_message_of_the_group_that_every_hop_can_carry() -> None:
    event = planned(JOIN, [CAROL, DAVE], [ALICE, BOB]).event
    assert event is not None
    record = event.record
    assert decode_record(event.record_bytes) == record
    assert encode_record(record) == event.record_bytes
    assert (record.message_type, record.custom_type, record.parties) == (
        MessageType.CONTROL,
        EVENT_TYPE,
        GROUP,
    )
    assert record.sender == ALICE, "the owner stands for an operator"
    assert record.sender_device == DeviceId(ALICE)
    assert record.message_id == message_id_of(event.identity)
    assert (record.membership_version, record.client_message_id) == (5, event.client_message_id)
    assert parse_event_body(record.body) == EventBody(JOIN, OPERATOR, (CAROL, DAVE))
    outbox = build_outbox_record(
        bucket=ROUTE.bucket,
        seq=Seq(9),
        record=record,
        record_bytes=event.record_bytes,
        identity=event.identity,
    )
    header = parse_header(outbox)
    assert (header.conversation, header.seq) == (ROUTE.conversation, 9)
    assert header.group == (GROUP, 5, LISTED_IN_RECORD)


@pytest.mark.shows("G9", "G13", "T8")
def test_who_leaves_is_the_sender_with_the_own_device() -> None:
    event = planned(LEAVE, [BOB], [ALICE, BOB], device=DeviceId(b"D" * 16)).event
    assert event is not None
    assert (event.record.sender, event.record.sender_device) == (BOB, b"D" * 16)
    assert parse_event_body(event.record.body) == EventBody(LEAVE, BOB, (BOB,))


@pytest.mark.shows("X14")
def test_the_largest_change_fits_into_a_message() -> None:
    event = planned(JOIN, many(CHANGE_USERS_MAX), [ALICE]).event
    assert event is not None
    assert len(event.record_bytes) < MESSAGE_BODY_BYTES_MAX


# --- plans ---


@pytest.mark.shows("G10")
def test_what_is_in_effect_already_leaves_nothing_to_plan() -> None:
    for op, named in ((JOIN, [ALICE, BOB]), (REMOVE, [CAROL]), (LEAVE, [CAROL])):
        assert planned(op, named, [ALICE, BOB]) == ((), ALICE, None)


@pytest.mark.shows("X14")
def test_a_group_grows_to_its_bound_and_no_further() -> None:
    members = many(GROUP_MEMBERS_MAX - 1)
    assert len(planned(JOIN, [ALICE], members).users) == 1
    with pytest.raises(FailedPrecondition, match="at most"):
        planned(JOIN, [ALICE, BOB], members)
    full = [ALICE, *members]
    assert planned(REMOVE, [ALICE, BOB], full, successor=members[0]).users == (ALICE,), "it may always shrink"
    assert planned(JOIN, [ALICE, members[0]], full).event is None, "nothing to do is no growth"


@pytest.mark.shows("G10")
def test_only_those_are_changed_for_whom_it_is_news() -> None:
    assert planned(JOIN, [CAROL, BOB, CAROL], [ALICE, BOB]).users == (CAROL,)
    assert planned(REMOVE, [CAROL, BOB], [ALICE, BOB]).users == (BOB,)


@pytest.mark.shows("G10")
@given(st.lists(users, min_size=2, max_size=6, unique=True), st.randoms(use_true_random=False))
def test_the_order_of_the_names_makes_no_other_event(named: list[UserId], random: Any) -> None:
    shuffled = [*named]
    random.shuffle(shuffled)
    assert planned(JOIN, named, [ALICE]) == planned(JOIN, shuffled, [ALICE])


@given(
    st.sampled_from([JOIN, REMOVE]),
    st.sets(st.sampled_from(many(6)), min_size=1),
    st.sets(st.sampled_from(many(6)), min_size=1),
)
@pytest.mark.shows("G2", "G10", "X14")
def test_a_change_and_its_repeat_leave_the_members_that_were_asked_for(
    op: MembershipOp, named: set[UserId], members: set[UserId]
) -> None:
    membership = Membership(4, min(members), members)
    rows = [(user, Seq(0)) for user in members]
    successor = choose_successor(rows, named) if does_need_successor(membership, op, named) else None
    change = planned(op, sorted(named), [], membership=membership, successor=successor)
    after = members | named if op is JOIN else members - named
    assert set(change.users) == after ^ members
    assert (change.event is None) == (after == members)
    assert change.owner_after in (after or {UserId(b"")})
    if after:
        again = Membership(5, change.owner_after, after)
        assert planned(op, sorted(named), [], membership=again).event is None


@pytest.mark.shows("X14")
def test_the_owner_is_followed_by_who_joined_first_then_by_the_smallest_id() -> None:
    rows = [(DAVE, Seq(0)), (BOB, Seq(7)), (CAROL, Seq(0)), (ALICE, Seq(0))]
    assert choose_successor(rows, {ALICE}) == CAROL
    assert choose_successor(rows, {ALICE, CAROL, DAVE}) == BOB
    assert choose_successor(rows, {ALICE, BOB, CAROL, DAVE}) == b""


@pytest.mark.shows("X14")
def test_a_successor_is_needed_where_the_owner_goes_and_somebody_stays() -> None:
    membership = Membership(4, ALICE, {ALICE, BOB})
    assert does_need_successor(membership, LEAVE, [ALICE])
    assert does_need_successor(membership, REMOVE, [ALICE, CAROL])
    assert not does_need_successor(membership, REMOVE, [BOB])
    assert not does_need_successor(membership, JOIN, [ALICE])
    assert not does_need_successor(membership, REMOVE, [ALICE, BOB])
    assert planned(REMOVE, [ALICE, BOB], [ALICE, BOB]).owner_after == b""
    with pytest.raises(AssertionError):
        planned(LEAVE, [ALICE], [ALICE, BOB])
    with pytest.raises(AssertionError):
        planned(LEAVE, [ALICE], [ALICE, BOB], successor=CAROL)


@pytest.mark.shows("O6")
def test_a_group_that_everybody_has_left_takes_nobody() -> None:
    with pytest.raises(FailedPrecondition):
        planned(JOIN, [BOB], [], membership=Membership(4, UserId(b""), ()))


@pytest.mark.shows("G13", "T8", "X14")
@pytest.mark.parametrize(
    ("op", "actor", "named"),
    [
        (LEAVE, ALICE, [BOB]),
        (LEAVE, ALICE, [ALICE, BOB]),
        (LEAVE, OPERATOR, [OPERATOR]),
        (JOIN, ALICE, [BOB]),
        (REMOVE, ALICE, [BOB]),
        (REMOVE, ALICE, [ALICE]),
        (JOIN, OPERATOR, []),
        (JOIN, OPERATOR, [b"short"]),
        (JOIN, OPERATOR, [OPERATOR]),
        (JOIN, OPERATOR, many(CHANGE_USERS_MAX + 1)),
    ],
)
def test_a_change_that_nobody_may_ask_for_is_refused_whoever_the_members_are(
    op: MembershipOp, actor: UserId, named: list[bytes]
) -> None:
    with pytest.raises(InvalidArgument):
        check_change(op, actor, named)


# --- creation ---


def creation(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "tenant": TENANT, "creator": ALICE, "request_id": REQUEST, "name": "tea", "members": [BOB],
    }  # fmt: skip
    return plan_creation(**(fields | changes))


@pytest.mark.shows("G4")
def test_the_creator_is_a_member_and_the_order_of_the_others_does_not_matter() -> None:
    one, other = creation(members=[CAROL, BOB, CAROL]), creation(members=[BOB, ALICE, CAROL])
    assert one == other
    assert one.members == (ALICE, BOB, CAROL)
    assert one.owner == ALICE
    assert one.route == route_group(TENANT, group_id_of(TENANT, ALICE, REQUEST))
    assert creation(members=[]).members == (ALICE,)


@pytest.mark.shows("C5")
def test_other_members_or_another_name_under_one_request_have_another_digest() -> None:
    plans = [creation(), creation(name="coffee"), creation(members=[CAROL]), creation(members=[BOB, CAROL])]
    assert len({plan.route for plan in plans}) == 1
    assert len({plan.digest for plan in plans}) == len(plans)


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": b"short"},
        {"name": "n" * (GROUP_NAME_BYTES_MAX + 1)},
        {"name": "é" * (GROUP_NAME_BYTES_MAX // 2 + 1)},
        {"members": [b"short"]},
        {"members": [OPERATOR]},
        {"members": many(CHANGE_USERS_MAX + 1)},
    ],
)
def test_a_creation_that_breaks_a_bound_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        creation(**change)


@pytest.mark.shows("X14")
def test_the_largest_creation_is_taken() -> None:
    plan = creation(members=many(CHANGE_USERS_MAX), name="n" * GROUP_NAME_BYTES_MAX)
    assert len(plan.members) == CHANGE_USERS_MAX + 1

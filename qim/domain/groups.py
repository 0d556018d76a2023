"""What a group decides: its ids, who may see which sequence, what a change of members becomes.

Pure: members and times come in. A change is planned with the members of one version; the store does it only
at that version, so a plan is never applied to other members than it was made of.

Visible to a user is the open interval (joined_at, left_at). The first members have joined_at 0. A join at
sequence J has joined_at J − 1, so the joiner sees the event; leaving or removal at J has left_at J, so nobody
who left sees it in history, although it lies in the mailbox. A rejoin replaces the interval: what lay before
is hidden.

Every change is a control message, and its body is (big-endian)

     0      1                17       19
     +------+----------------+--------+----------------
     | op   | actor          | n      | n × user 16 B
     | u8   | 16 B, 0 = admin| u16    |
     +------+----------------+--------+----------------

Its audience is listed in the record: the members after the change and those affected, or only the latter in a
group that is too large to be told. Its client_message_id comes from the change itself, so a repeat continues
the same commit. What is in effect already leaves nothing to plan: `PlannedChange.event` is None then.
"""

import struct
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from blake3 import blake3

from qim.domain.placement import bucket_of_conversation, group_conversation
from qim.errors import FailedPrecondition, InvalidArgument, RecordCorrupt
from qim.ids import (
    ID_BYTES,
    BucketId,
    ClientMessageId,
    ConversationId,
    DeviceId,
    GroupId,
    Millis,
    RequestId,
    Seq,
    TenantId,
    UserId,
)
from qim.limits import BROADCAST_MEMBERS_MAX, CHANGE_USERS_MAX, GROUP_MEMBERS_MAX, GROUP_NAME_BYTES_MAX
from qim.records import (
    RECORD_VERSION,
    Kind,
    MembershipOp,
    MessageRecord,
    MessageType,
    RetentionClass,
    build_outbox_frame,
    encode_record,
    identity_digest,
    message_id_of,
)

EVENT_TYPE: Final = "qim.membership.v1"
FIRST_VERSION: Final = 1
OPERATOR: Final = UserId(bytes(ID_BYTES))
"""The actor of an administrative change; no user has this id."""

_EVENT_HEAD: Final = struct.Struct(">B16sH")
_TENANT: Final = struct.Struct(">I")
_GROUP_ID_DOMAIN: Final = b"qim.groupid.v1"
_CREATION_DOMAIN: Final = b"qim.groupcreation.v1"
_EVENT_ID_DOMAIN: Final = b"qim.membership-event.v1\0"
_REQUEST_DOMAIN: Final = b"qim.adminreq.v1"
_EVENT_ID_FIELDS: Final = struct.Struct(">I16sB16sQ")


class GroupRoute(NamedTuple):
    """Where the conversation of a group lives."""

    group: GroupId
    conversation: ConversationId
    bucket: BucketId


class PlannedCreation(NamedTuple):
    route: GroupRoute
    name: str
    owner: UserId
    members: tuple[UserId, ...]
    """The creator among them, sorted."""
    digest: bytes


class EventBody(NamedTuple):
    """The body of a membership event, decoded."""

    op: MembershipOp
    actor: UserId
    users: tuple[UserId, ...]


class Membership(NamedTuple):
    """A group at one version, as plans need it."""

    version: int
    owner: UserId
    members: Collection[UserId]


class PlannedEvent(NamedTuple):
    """The control message of a change, ready to be reserved by it."""

    client_message_id: ClientMessageId
    identity: bytes
    record: MessageRecord
    record_bytes: bytes
    outbox_frame: bytes


class PlannedChange(NamedTuple):
    users: tuple[UserId, ...]
    """Whom it changes, sorted."""
    owner_after: UserId
    """Empty bytes when nobody is left."""
    event: PlannedEvent | None
    """None: all that was asked for is in effect already."""


# --- ids ---------------------------------------------------------------------------------------------


def route_group(tenant: TenantId, group: GroupId) -> GroupRoute:
    """The conversation of a group and its bucket."""
    conversation = group_conversation(tenant, group)
    return GroupRoute(group, conversation, bucket_of_conversation(tenant, conversation))


def group_id_of(tenant: TenantId, creator: UserId, request_id: RequestId) -> GroupId:
    """A repeated CREATE_GROUP names the same group."""
    return GroupId(blake3(_GROUP_ID_DOMAIN + _TENANT.pack(tenant) + creator + request_id).digest(ID_BYTES))


def event_id_of(
    *,
    tenant: TenantId,
    group: GroupId,
    op: MembershipOp,
    actor: UserId,
    version: int,
    users: Iterable[UserId],
) -> ClientMessageId:
    """The client_message_id of an event: the same change of the same version is the same message."""
    fields = _EVENT_ID_FIELDS.pack(tenant, group, op, actor, version)
    return ClientMessageId(blake3(_EVENT_ID_DOMAIN + fields + b"".join(users)).digest(ID_BYTES))


def operator_request_digest(
    *, tenant: TenantId, group: GroupId, op: MembershipOp, users: Iterable[UserId]
) -> bytes:
    """What an operator asked for, whatever a plan makes of it; 32 bytes."""
    fields = _EVENT_ID_FIELDS.pack(tenant, group, op, OPERATOR, 0)
    return blake3(_REQUEST_DOMAIN + fields + b"".join(sorted(set(users)))).digest()


# --- who sees what -----------------------------------------------------------------------------------


def is_visible(seq: Seq, *, joined_at: Seq, left_at: Seq) -> bool:
    """Whether the interval holds the sequence; left_at is 0 for a member."""
    return joined_at < seq and (left_at == 0 or seq < left_at)


def earliest_visible(available: Seq, *, joined_at: Seq) -> Seq:
    """The first sequence that history may show; `available` is the first that is kept at all."""
    return max(available, Seq(joined_at + 1))


def upper_visible(head: Seq, *, left_at: Seq) -> Seq:
    """The last sequence that history and list may show: the visible head, or the one before leaving."""
    return min(head, Seq(left_at - 1)) if left_at else head


def clip_page(*, before_seq: Seq, after_seq: Seq, joined_at: Seq, left_at: Seq) -> tuple[Seq, Seq]:
    """What a history page asks the store for: its bounds, exclusive, 0 = none, within the interval.

    A walk upwards begins behind `joined_at`. One downwards has no lower bound in the store: see `cut_page`.
    """
    before = min(before_seq, left_at) if before_seq and left_at else before_seq or left_at
    if after_seq:
        return before, max(after_seq, joined_at)
    # Below the interval there is nothing to be read, however long it would take.
    return Seq(1) if 0 < before <= joined_at else before, after_seq


def cut_page(
    records: Sequence[tuple[Seq, bytes]], more: bool, *, joined_at: Seq, upwards: bool
) -> tuple[Sequence[tuple[Seq, bytes]], bool]:
    """A page, newest first, without what lies before the interval; whether more of the interval follows."""
    if upwards or not records:
        return records, more
    visible = [item for item in records if item[0] > joined_at]
    return visible, more and records[-1][0] > joined_at + 1


def mark_within(read_seq: Seq, *, joined_at: Seq) -> Seq:
    """A read mark lies in the interval: what is before it is not there to be read."""
    return max(read_seq, joined_at)


# --- creation ----------------------------------------------------------------------------------------


def plan_creation(
    *, tenant: TenantId, creator: UserId, request_id: bytes, name: str, members: Iterable[bytes]
) -> PlannedCreation:
    """A group of the creator and those named. Raises the ClientError that is the answer."""
    if len(request_id) != ID_BYTES:
        raise InvalidArgument("request_id is 16 bytes")
    if len(name.encode()) > GROUP_NAME_BYTES_MAX:
        raise InvalidArgument(f"the name of a group is at most {GROUP_NAME_BYTES_MAX} bytes")
    named = _checked_users(members, users_min=0)
    everybody = tuple(sorted({creator, *named}))
    group = group_id_of(tenant, creator, RequestId(request_id))
    text = b"".join((_CREATION_DOMAIN, group, *everybody, name.encode()))
    digest = blake3(len(everybody).to_bytes(2, "big") + text).digest()
    return PlannedCreation(route_group(tenant, group), name, creator, everybody, digest)


# --- change ------------------------------------------------------------------------------------------


def check_change(op: MembershipOp, actor: UserId, users: Iterable[bytes]) -> tuple[UserId, ...]:
    """The users of a change, sorted. Raises InvalidArgument, whoever the members are."""
    named = _checked_users(users, users_min=1)
    if op is MembershipOp.LEAVE and named != (actor,):
        raise InvalidArgument("a user leaves for nobody else")
    if op is not MembershipOp.LEAVE and actor != OPERATOR:
        raise InvalidArgument("others are added and removed by an operator only")
    return named


def users_to_change(op: MembershipOp, users: Iterable[UserId], members: Collection[UserId]) -> list[UserId]:
    """Those for whom the change is not in effect already."""
    return [user for user in users if (user in members) == (op is not MembershipOp.JOIN)]


def does_need_successor(membership: Membership, op: MembershipOp, users: Collection[UserId]) -> bool:
    """Whether the change takes the owner away and leaves somebody: then `plan_change` needs a successor."""
    if op is MembershipOp.JOIN or membership.owner not in users:
        return False
    return len(membership.members) > len(users_to_change(op, users, membership.members))


def choose_successor(rows: Iterable[tuple[UserId, Seq]], leaving: Collection[UserId]) -> UserId:
    """Of the members with their joined_at: who has been there for longest, then the smallest id.

    Empty bytes when nobody stays.
    """
    staying = ((joined_at, user) for user, joined_at in rows if user not in leaving)
    return min(staying, default=(Seq(0), UserId(b"")))[1]


def audience_of_event(
    members_after: Collection[UserId], affected: Iterable[UserId], *, broadcast_members_max: int
) -> tuple[UserId, ...]:
    """Everybody and those affected, or in a large group the latter only; sorted."""
    if len(members_after) > broadcast_members_max:
        return tuple(sorted(affected))
    return tuple(sorted({*members_after, *affected}))


def plan_change(
    *,
    tenant: TenantId,
    route: GroupRoute,
    op: MembershipOp,
    actor: UserId,
    device: DeviceId | None,
    users: Iterable[bytes],
    membership: Membership,
    successor: UserId | None = None,
    now_ms: Millis,
    broadcast_members_max: int = BROADCAST_MEMBERS_MAX,
) -> PlannedChange:
    """What a change does to the members of one version. Raises the ClientError that is the answer.

    `device` is that of who leaves, None for an operator. `successor` is `choose_successor`, where
    `does_need_successor` asks for it.
    """
    changed = tuple(users_to_change(op, check_change(op, actor, users), membership.members))
    if op is MembershipOp.JOIN and not membership.members:
        raise FailedPrecondition("nobody is left in the group")
    if not changed:
        return PlannedChange((), membership.owner, None)
    after = {*membership.members, *changed} if op is MembershipOp.JOIN else {*membership.members} - {*changed}
    if op is MembershipOp.JOIN and len(after) > GROUP_MEMBERS_MAX:
        raise FailedPrecondition(f"a group has at most {GROUP_MEMBERS_MAX} members")
    owner_after = _owner_after(membership, after, successor)
    sender = actor if op is MembershipOp.LEAVE else membership.owner
    audience = audience_of_event(after, changed, broadcast_members_max=broadcast_members_max)
    event = _build_event(
        tenant=tenant,
        route=route,
        body=EventBody(op, actor, changed),
        sender=sender,
        device=device or DeviceId(sender),
        version=membership.version,
        audience=audience,
        now_ms=now_ms,
    )
    return PlannedChange(changed, owner_after, event)


def _owner_after(membership: Membership, after: Collection[UserId], successor: UserId | None) -> UserId:
    if membership.owner in after:
        return membership.owner
    if not after:
        return UserId(b"")
    assert successor is not None, "the owner leaves and somebody stays: a successor must be named"
    assert successor in after, "only a member who stays can be the successor"
    return successor


def _build_event(
    *,
    tenant: TenantId,
    route: GroupRoute,
    body: EventBody,
    sender: UserId,
    device: DeviceId,
    version: int,
    audience: tuple[UserId, ...],
    now_ms: Millis,
) -> PlannedEvent:
    """The record names the version that the change makes: its event is the first message of that version."""
    text = build_event_body(body)
    event_id = event_id_of(
        tenant=tenant, group=route.group, op=body.op, actor=body.actor, version=version, users=body.users
    )
    identity = identity_digest(
        tenant=tenant,
        conversation=route.conversation,
        sender=sender,
        client_message_id=event_id,
        message_type=MessageType.CONTROL,
        retention_class=RetentionClass.DEFAULT,
        custom_type=EVENT_TYPE,
        body=text,
    )
    record = MessageRecord(
        RECORD_VERSION, tenant, route.conversation, Kind.GROUP, route.group, message_id_of(identity), sender,
        device, event_id, MessageType.CONTROL, EVENT_TYPE, text, RetentionClass.DEFAULT, now_ms, version + 1,
        audience,
    )  # fmt: skip
    record_bytes = encode_record(record)
    frame = build_outbox_frame(
        bucket=route.bucket, record=record, record_bytes=record_bytes, identity=identity
    )
    return PlannedEvent(event_id, identity, record, record_bytes, frame)


# --- the body of an event ----------------------------------------------------------------------------


def build_event_body(body: EventBody) -> bytes:
    return _EVENT_HEAD.pack(body.op, body.actor, len(body.users)) + b"".join(body.users)


def parse_event_body(data: bytes) -> EventBody:
    """Raises RecordCorrupt when the bytes are not the body of an event."""
    try:
        op, actor, count = _EVENT_HEAD.unpack_from(data)
        known = MembershipOp(op)
    except (struct.error, ValueError) as error:
        raise RecordCorrupt(f"membership event of {len(data)} bytes does not decode") from error
    if count == 0 or len(data) != _EVENT_HEAD.size + count * ID_BYTES:
        raise RecordCorrupt(f"membership event of {len(data)} bytes names {count} users")
    starts = range(_EVENT_HEAD.size, len(data), ID_BYTES)
    return EventBody(known, UserId(actor), tuple(UserId(data[at : at + ID_BYTES]) for at in starts))


def _checked_users(users: Iterable[bytes], *, users_min: int) -> tuple[UserId, ...]:
    """Each once, sorted. Raises InvalidArgument."""
    named = sorted({*users})
    if not users_min <= len(named) <= CHANGE_USERS_MAX:
        raise InvalidArgument(f"{users_min} to {CHANGE_USERS_MAX} users are named at once")
    if any(len(user) != ID_BYTES or user == OPERATOR for user in named):
        raise InvalidArgument("a user is 16 bytes, and not all of them zero")
    return tuple(map(UserId, named))

"""What the writer decides: is a SEND valid, which bytes does it become, what does an outcome mean.

Pure: time comes in, nothing is asked of a store. `plan_send` turns a client's wish into the record that every
later hop carries unchanged; it is the only place that encodes a record. A client's request is authorised
before it is validated, and refused before anything reaches a store, so a refusal never consumes a sequence.

The conversation of two users costs three hashes, that of a group two; those seen last are remembered,
bounded, per process.

A message to a group names the version of the members that its writer knows. The store compares it while the
sequence is given, so a version that is out of date costs a refusal and `plan_again`, and never a wrong
audience. A version that is not known is guessed to be the first: a new group has no other.

A page or a read mark needs no more than its conversation: `plan_history` and `route_target`.

What the store says about a reservation sorts every message into one of three:

    answer     it was committed before: its old coordinates are the answer
    append     new, or known and unfinished: its Outbox record must become durable now. An unfinished one goes
               with the **stored** bytes, never with the ones just built
    refuse     no sequence was consumed; the error below is the answer
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
from msgspec import structs

from qim.domain import groups
from qim.domain.placement import bucket_of_conversation, direct_conversation
from qim.errors import (
    ClientError,
    Conflict,
    FailedPrecondition,
    InvalidArgument,
    MembershipChanged,
    PermissionDenied,
    ResourceExhausted,
    TooLarge,
    Unavailable,
    Unsupported,
)
from qim.ids import (
    ID_BYTES,
    BucketId,
    ClientMessageId,
    ConversationId,
    DeviceId,
    GroupId,
    Millis,
    Seq,
    TenantId,
    UserId,
)
from qim.limits import (
    CUSTOM_TYPE_BYTES_MAX,
    EPHEMERAL_LIFE_MS,
    GROUP_CACHE_ENTRIES_MAX,
    MESSAGE_BODY_BYTES_MAX,
    PAIR_CACHE_ENTRIES_MAX,
)
from qim.records import (
    RECORD_VERSION,
    Kind,
    MessageRecord,
    MessageType,
    RetentionClass,
    build_outbox_frame,
    encode_record,
    identity_digest,
    message_id_of,
)

RETRY_AFTER_MS: Final = 500
"""When a store is full or away: long enough to matter, short enough for a person who waits."""

_CLIENT_TYPES: Final = frozenset({MessageType.TEXT, MessageType.CUSTOM, MessageType.MEDIA_REF})
_GROUP: Final = int(Kind.GROUP)
_RETENTION_CLASSES: Final = frozenset(RetentionClass)

REFUSALS: Final[Mapping[str, ClientError]] = {
    "conflict": Conflict("client_message_id was used with other content"),
    "stale_owner": Unavailable("the owner of the conversation is moving", retry_after_ms=RETRY_AFTER_MS),
    "clock": Unavailable("the clock of the server is being set", retry_after_ms=RETRY_AFTER_MS),
    "full": ResourceExhausted("the store is full", retry_after_ms=RETRY_AFTER_MS),
    "exhausted": FailedPrecondition("the conversation has no sequences left"),
    "not_member": PermissionDenied("no such conversation"),
    "membership_changed": MembershipChanged("the members keep changing", retry_after_ms=RETRY_AFTER_MS),
}
"""Outcome of a reservation that consumed nothing → what the client is told."""


class Route(NamedTuple):
    """Where a conversation lives."""

    conversation: ConversationId
    bucket: BucketId
    parties: bytes
    """direct: the smaller and the larger user, 32 B; group: its id, 16 B."""


class PlannedSend(msgspec.Struct, frozen=True, gc=False):
    """A valid SEND, ready to be reserved."""

    route: Route
    identity: bytes
    record: MessageRecord
    record_bytes: bytes
    expires_at: Millis
    outbox_frame: bytes
    """Its Outbox record, without the sequence."""


@lru_cache(maxsize=PAIR_CACHE_ENTRIES_MAX)
def route_direct(tenant: TenantId, one: UserId, other: UserId) -> Route:
    """The conversation of two users and its bucket, the same in either order."""
    conversation = direct_conversation(tenant, one, other)
    parties = one + other if one <= other else other + one
    return Route(conversation, bucket_of_conversation(tenant, conversation), parties)


@lru_cache(maxsize=GROUP_CACHE_ENTRIES_MAX)
def route_group(tenant: TenantId, group: GroupId) -> Route:
    """The conversation of a group; whether there is such a group, the store says."""
    found = groups.route_group(tenant, group)
    return Route(found.conversation, found.bucket, group)


def route_target(*, tenant: TenantId, user: UserId, kind: int, target: bytes) -> Route:
    """The conversation that a user names. A direct one is always theirs; whose a group is, the store says."""
    if kind == Kind.DIRECT and len(target) == ID_BYTES:
        return route_direct(tenant, user, UserId(target))
    if kind == Kind.GROUP and len(target) == ID_BYTES:
        return route_group(tenant, GroupId(target))
    raise InvalidArgument("target is a kind and a 16-byte id")


def plan_send(
    *,
    tenant: TenantId,
    sender: UserId,
    device: DeviceId,
    target_kind: int,
    target: bytes,
    client_message_id: bytes,
    message_type: int,
    custom_type: str,
    body: bytes,
    retention_class: int,
    now_ms: Millis,
    versions: Mapping[ConversationId, int] | None = None,
) -> PlannedSend:
    """Raises the ClientError that is the answer. `versions` are those of groups; None: not offered here."""
    route = route_target(tenant=tenant, user=sender, kind=target_kind, target=target)
    _check_content(client_message_id, message_type, custom_type, body, retention_class)
    identity = identity_digest(
        tenant=tenant,
        conversation=route.conversation,
        sender=sender,
        client_message_id=ClientMessageId(client_message_id),
        message_type=message_type,
        retention_class=retention_class,
        custom_type=custom_type,
        body=body,
    )
    record = MessageRecord(
        RECORD_VERSION, tenant, route.conversation, target_kind, route.parties, message_id_of(identity),
        sender, device, ClientMessageId(client_message_id), message_type, custom_type, body, retention_class,
        now_ms, _version_of(route, versions) if target_kind == _GROUP else 0,
    )  # fmt: skip
    expires_at = Millis(now_ms + EPHEMERAL_LIFE_MS if retention_class == RetentionClass.EPHEMERAL else 0)
    record_bytes = encode_record(record)
    frame = build_outbox_frame(
        bucket=route.bucket, record=record, record_bytes=record_bytes, identity=identity
    )
    return PlannedSend(route, identity, record, record_bytes, expires_at, frame)


def _version_of(route: Route, versions: Mapping[ConversationId, int] | None) -> int:
    if versions is None:
        raise Unsupported("groups are not offered by this server")
    return versions.get(route.conversation, groups.FIRST_VERSION)


def plan_again(planned: PlannedSend, versions: Mapping[ConversationId, int]) -> PlannedSend:
    """The same message to the members of the version that is known now."""
    record = structs.replace(planned.record, membership_version=_version_of(planned.route, versions))
    record_bytes = encode_record(record)
    frame = build_outbox_frame(
        bucket=planned.route.bucket, record=record, record_bytes=record_bytes, identity=planned.identity
    )
    return structs.replace(planned, record=record, record_bytes=record_bytes, outbox_frame=frame)


def _check_content(
    client_message_id: bytes, message_type: int, custom_type: str, body: bytes, retention_class: int
) -> None:
    if len(client_message_id) != ID_BYTES:
        raise InvalidArgument("client_message_id is 16 bytes")
    if message_type not in _CLIENT_TYPES:
        raise InvalidArgument("message_type is 1, 2 or 3; control messages come from the server only")
    if retention_class not in _RETENTION_CLASSES:
        raise InvalidArgument("retention_class is 0 to 3")
    if len(body) > MESSAGE_BODY_BYTES_MAX:
        raise TooLarge(f"a body is at most {MESSAGE_BODY_BYTES_MAX} bytes")
    if custom_type and len(custom_type.encode()) > CUSTOM_TYPE_BYTES_MAX:
        raise TooLarge(f"custom_type is at most {CUSTOM_TYPE_BYTES_MAX} bytes")
    if message_type == MessageType.TEXT:
        _check_text(body)


def _check_text(body: bytes) -> None:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument("the body of a text message is UTF-8") from error


def plan_history(
    *, tenant: TenantId, user: UserId, kind: int, target: bytes, before_seq: Seq, after_seq: Seq
) -> Route:
    """Which conversation a PULL_HISTORY reads. Raises the ClientError that is the answer."""
    route = route_target(tenant=tenant, user=user, kind=kind, target=target)
    if before_seq and after_seq:
        raise InvalidArgument("before_seq and after_seq exclude each other")
    return route

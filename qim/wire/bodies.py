"""A typed body per opcode: MessagePack arrays with positional fields.

Readers ignore extra trailing fields and give missing optional ones their default, so a field is only ever
appended, with a default. Ids are 16 raw bytes and numbers are not negative; the decoder checks both while it
decodes, so no role meets an id of another length. What is too long is TOO_LARGE on that request; everything
else that does not fit is INVALID_ARGUMENT. Texts of errors name the field, never its content.

Encoders and decoders are built once, at import. The batches that carry messages (push, mailbox page, history
page) are not encoded at all: their entries are final bytes since the writer built them, and `build_push`,
`build_mailbox_batch` and `build_history_batch` only put array heads and numbers between them. On the reading
side the entries stay `Raw`, slices of the received body, until somebody wants one message.

    PUSH_EVENTS     [[ [previous, mailbox_seq, entry], … ]]
    MAILBOX_BATCH   [[ [mailbox_seq, entry], … ], covered_through, more, rebuild]
    HISTORY_BATCH   [conversation_id, [ entry, … ], earliest_available_seq, head_seq, more]
    entry           [conversation_seq, MessageRecord], or as echo [conversation_seq, conversation_id]
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from qim.errors import ClientError, InvalidArgument, RemoteProtocolError, TooLarge
from qim.ids import (
    ID_BYTES,
    SEQ_MAX,
    ClientMessageId,
    ConversationId,
    DeviceId,
    MailboxSeq,
    MessageId,
    Millis,
    Seq,
    SessionId,
    UserId,
)
from qim.limits import (
    BATCH_BYTES_MAX,
    CLIENT_NAME_BYTES_MAX,
    CUSTOM_TYPE_BYTES_MAX,
    FRAME_BODY_BYTES_MAX,
    MESSAGE_BODY_BYTES_MAX,
    PAGE_ENTRIES_MAX,
    TOKEN_BYTES_MAX,
)
from qim.records import Entry, build_entry
from qim.wire.frames import build_frame
from qim.wire.layout import Op

_ID: Final = Meta(min_length=ID_BYTES, max_length=ID_BYTES)
DEVICE_TIME_MAX: Final = (1 << 48) - 1
"""A session id has six bytes for it."""
_SEQUENCE: Final = Meta(ge=0, le=SEQ_MAX)

Id: TypeAlias = Annotated[bytes, _ID]
WireUserId: TypeAlias = Annotated[UserId, _ID]
WireDeviceId: TypeAlias = Annotated[DeviceId, _ID]
WireSessionId: TypeAlias = Annotated[SessionId, _ID]
WireConversationId: TypeAlias = Annotated[ConversationId, _ID]
WireMessageId: TypeAlias = Annotated[MessageId, _ID]
WireClientMessageId: TypeAlias = Annotated[ClientMessageId, _ID]
WireSeq: TypeAlias = Annotated[Seq, _SEQUENCE]
WireMailboxSeq: TypeAlias = Annotated[MailboxSeq, _SEQUENCE]
WireMillis: TypeAlias = Annotated[Millis, _SEQUENCE]
Count: TypeAlias = Annotated[int, _SEQUENCE]
SmallNumber: TypeAlias = Annotated[int, Meta(ge=0, le=255)]


class Target(Struct, array_like=True, frozen=True, gc=False):
    """How a client names a conversation: kind 1 = the other user, kind 2 = the group."""

    kind: SmallNumber
    id: Id


# --- the connection ----------------------------------------------------------------------------------


class Auth(Struct, array_like=True, frozen=True, gc=False):
    token: str
    device_id: WireDeviceId
    client_name: str = ""
    client_version: str = ""
    device_time: Annotated[Millis, Meta(ge=0, le=DEVICE_TIME_MAX)] = Millis(0)
    """By the clock of the device, and above that of every earlier log-in of it; 0: not told."""

    def __repr__(self) -> str:
        """Without the token: a body that is printed by accident gives nothing away."""
        return f"Auth(token=***, client_name={len(self.client_name)} characters)"


class AuthAck(Struct, array_like=True, frozen=True, gc=False):
    user_id: WireUserId
    session_id: WireSessionId
    server_time: WireMillis
    heartbeat_ms: Count
    limits: dict[str, int]
    newest_mailbox_seq: WireMailboxSeq
    """A hint to pull, never a cursor."""


class Ping(Struct, array_like=True, frozen=True, gc=False):
    time: WireMillis = Millis(0)


class Pong(Struct, array_like=True, frozen=True, gc=False):
    time: WireMillis = Millis(0)
    newest_mailbox_seq: WireMailboxSeq = MailboxSeq(0)


class GoAway(Struct, array_like=True, frozen=True, gc=False):
    code: Count
    reconnect_after_ms: Count
    text: str = ""


class Error(Struct, array_like=True, frozen=True, gc=False):
    code: Count
    retry_after_ms: Count
    text: str = ""


# --- messages ----------------------------------------------------------------------------------------


class SendMessage(Struct, array_like=True, frozen=True, gc=False):
    target: Target
    client_message_id: WireClientMessageId
    message_type: SmallNumber
    custom_type: str
    body: bytes
    retention_class: SmallNumber = 0

    def __repr__(self) -> str:
        """Lengths only: content never reaches a log."""
        return f"SendMessage(message_type={self.message_type}, body={len(self.body)} bytes)"


class SendAck(Struct, array_like=True, frozen=True, gc=False):
    client_message_id: WireClientMessageId
    conversation_id: WireConversationId
    conversation_seq: WireSeq
    message_id: WireMessageId
    reserved_at: WireMillis
    """The message's server time, the same in every repeat."""
    duplicate: bool


class PullMailbox(Struct, array_like=True, frozen=True, gc=False):
    after_mailbox_seq: WireMailboxSeq
    limit: Count
    held_through: WireMailboxSeq = MailboxSeq(0)
    held_count: Count = 0


class MailboxBatch(Struct, array_like=True, frozen=True, gc=False):
    entries: list[tuple[WireMailboxSeq, Raw]]
    covered_through: WireMailboxSeq
    more: bool
    rebuild: bool


class PushEvents(Struct, array_like=True, frozen=True, gc=False):
    events: list[tuple[WireMailboxSeq, WireMailboxSeq, Raw]]
    """(previous_mailbox_seq, mailbox_seq, entry or echo)."""


class Echo(Struct, array_like=True, frozen=True, gc=False):
    """What the sending session gets instead of its own message."""

    conversation_seq: WireSeq
    conversation_id: WireConversationId


class ReadState(Struct, array_like=True, frozen=True, gc=False):
    conversation_id: WireConversationId
    read_seq: WireSeq
    unread: Count


class StateEvents(Struct, array_like=True, frozen=True, gc=False):
    read_marks: list[ReadState]
    appeared: list[Target] = []


class PullHistory(Struct, array_like=True, frozen=True, gc=False):
    """One of before_seq and after_seq, both exclusive; both 0 = the newest page."""

    target: Target
    before_seq: WireSeq = Seq(0)
    after_seq: WireSeq = Seq(0)
    limit: Count = 50


class HistoryBatch(Struct, array_like=True, frozen=True, gc=False):
    conversation_id: WireConversationId
    records: list[Raw]
    """Entries, newest first."""
    earliest_available_seq: WireSeq
    head_seq: WireSeq
    more: bool


# --- conversations and groups ------------------------------------------------------------------------


class SessionListReq(Struct, array_like=True, frozen=True, gc=False):
    cursor: bytes = b""
    limit: Count = 50


class SessionItem(Struct, array_like=True, frozen=True, gc=False):
    conversation_id: WireConversationId
    target: Target
    head_record: Raw
    """The head's record, its body cut to the preview; nil where it is not visible."""
    head_seq: WireSeq
    read_seq: WireSeq
    unread: Count
    joined_at: WireSeq
    left_at: WireSeq
    state: SmallNumber
    last_activity: WireMillis


class SessionList(Struct, array_like=True, frozen=True, gc=False):
    items: list[SessionItem]
    next_cursor: bytes = b""


class MarkRead(Struct, array_like=True, frozen=True, gc=False):
    target: Target
    read_seq: WireSeq


class MarkReadAck(Struct, array_like=True, frozen=True, gc=False):
    conversation_id: WireConversationId
    read_seq: WireSeq
    unread: Count


class CreateGroup(Struct, array_like=True, frozen=True, gc=False):
    request_id16: Id
    name: str
    members: list[WireUserId]


class GroupCreated(Struct, array_like=True, frozen=True, gc=False):
    group_id: Id
    conversation_id: WireConversationId
    membership_version: Count


class PullMembers(Struct, array_like=True, frozen=True, gc=False):
    group: Id
    after_user: bytes = b""
    limit: Count = 50


class Member(Struct, array_like=True, frozen=True, gc=False):
    user: WireUserId
    joined_at_conversation_seq: WireSeq
    role: SmallNumber


class MemberListBatch(Struct, array_like=True, frozen=True, gc=False):
    group: Id
    membership_version: Count
    members: list[Member]
    next: bytes
    total: Count


class LeaveGroup(Struct, array_like=True, frozen=True, gc=False):
    group: Id


BODIES: Final[dict[int, type[Struct]]] = {
    Op.AUTH: Auth,
    Op.AUTH_ACK: AuthAck,
    Op.PING: Ping,
    Op.PONG: Pong,
    Op.GOAWAY: GoAway,
    Op.ERROR: Error,
    Op.SEND_MESSAGE: SendMessage,
    Op.SEND_ACK: SendAck,
    Op.PULL_MAILBOX: PullMailbox,
    Op.MAILBOX_BATCH: MailboxBatch,
    Op.PUSH_EVENTS: PushEvents,
    Op.STATE_EVENTS: StateEvents,
    Op.PULL_HISTORY: PullHistory,
    Op.HISTORY_BATCH: HistoryBatch,
    Op.SESSION_LIST_REQ: SessionListReq,
    Op.SESSION_LIST: SessionList,
    Op.MARK_READ: MarkRead,
    Op.MARK_READ_ACK: MarkReadAck,
    Op.CREATE_GROUP: CreateGroup,
    Op.PULL_MEMBERS: PullMembers,
    Op.MEMBER_LIST_BATCH: MemberListBatch,
    Op.LEAVE_GROUP: LeaveGroup,
    Op.GROUP_CREATED: GroupCreated,
}
assert set(BODIES) == set(Op)

_encoder: Final = msgspec.msgpack.Encoder()
_encode: Final = _encoder.encode
_decode_by_op: Final[dict[int, Callable[[bytes], Any]]] = {
    op: msgspec.msgpack.Decoder(body).decode for op, body in BODIES.items()
}
# Plain numbers: an attribute of an enum class costs more than the comparison it is for.
_AUTH: Final = int(Op.AUTH)
_SEND_MESSAGE: Final = int(Op.SEND_MESSAGE)
_PUSH_EVENTS: Final = int(Op.PUSH_EVENTS)
_decode_send: Final = msgspec.msgpack.Decoder(SendMessage).decode
_entry_decoder: Final = msgspec.msgpack.Decoder(Entry)
_echo_decoder: Final = msgspec.msgpack.Decoder(Echo)

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All that a decoder raises for foreign bytes: wrong shape, broken UTF-8, arrays nested without end."""


def encode_body(body: Struct) -> bytes:
    return _encode(body)


def decode_body(op: int, data: bytes) -> Any:  # noqa: ANN401 - the type is the one that BODIES names for the opcode
    """The typed body of an opcode. Raises InvalidArgument, or TooLarge for a field above its limit."""
    decode = _decode_by_op.get(op)
    if decode is None:
        raise RemoteProtocolError(f"unknown opcode {op:#06x}")
    try:
        body = decode(data)
    except UNREADABLE as error:
        raise _unreadable(op, error) from error
    if op == _AUTH:
        _check_auth(body)
    elif op == _SEND_MESSAGE:
        _check_send(body)
    return body


def decode_send(data: bytes) -> SendMessage:
    """`decode_body` of the one body that the hot path decodes, without the table."""
    try:
        body = _decode_send(data)
    except UNREADABLE as error:
        raise _unreadable(Op.SEND_MESSAGE, error) from error
    _check_send(body)
    return body


def decode_pushed(entry: bytes | Raw) -> Entry | Echo:
    """One entry of a push or a page. Raises RemoteProtocolError: only a server builds them."""
    try:
        if len(memoryview(entry)) <= ECHO_BYTES_MAX:
            return _echo_decoder.decode(entry)
        return _entry_decoder.decode(entry)
    except UNREADABLE as error:
        raise RemoteProtocolError("an entry that does not decode") from error


def clamp_page(limit: int) -> int:
    """How many entries a page may hold for the wish of a client; 0 leaves it to the server."""
    return min(limit, PAGE_ENTRIES_MAX) if limit else PAGE_ENTRIES_MAX


def _unreadable(op: int, error: Exception) -> InvalidArgument:
    # The decoder's text names path and expected type. It quotes nothing of the input, except in the text of a
    # broken UTF-8 sequence, which is therefore replaced.
    reason = str(error) if isinstance(error, msgspec.MsgspecError) else type(error).__name__
    return InvalidArgument(f"body of {Op(op).name}: {reason}")


def _check_auth(body: Auth) -> None:
    if len(body.token) > TOKEN_BYTES_MAX:
        raise TooLarge(f"token: more than {TOKEN_BYTES_MAX} bytes")
    if max(len(body.client_name), len(body.client_version)) > CLIENT_NAME_BYTES_MAX:
        raise TooLarge(f"client_name or client_version: more than {CLIENT_NAME_BYTES_MAX} bytes")


def _check_send(body: SendMessage) -> None:
    if len(body.body) > MESSAGE_BODY_BYTES_MAX:
        raise TooLarge(f"body: more than {MESSAGE_BODY_BYTES_MAX} bytes")
    if body.custom_type and len(body.custom_type.encode()) > CUSTOM_TYPE_BYTES_MAX:
        raise TooLarge(f"custom_type: more than {CUSTOM_TYPE_BYTES_MAX} bytes")


# --- frames ------------------------------------------------------------------------------------------


def build_message(op: int, request_id: int, body: Struct) -> bytes:
    """One complete frame."""
    return build_frame(op, request_id, _encode(body))


def build_error(request_id: int, error: ClientError) -> bytes:
    return build_message(Op.ERROR, request_id, Error(error.code, error.retry_after_ms, error.text))


def build_goaway(error: ClientError, *, reconnect_after_ms: int = 0) -> bytes:
    return build_message(Op.GOAWAY, 0, GoAway(error.code, reconnect_after_ms, error.text))


_ARRAY_1: Final = b"\x91"
_ARRAY_2: Final = b"\x92"
_ARRAY_3: Final = b"\x93"
_ARRAY_4: Final = b"\x94"
_ARRAY_5: Final = b"\x95"
_SHORT_HEADS: Final = tuple(bytes((0x90 | count,)) for count in range(16))
"""Of arrays of up to 15 items, which is nearly every push."""
_BIN_16: Final = b"\xc4\x10"
_BOOLEAN: Final = (b"\xc2", b"\xc3")
ECHO_BYTES_MAX: Final = 28
"""Array head, the longest number and an id; every entry with a record is longer, its ids alone are."""


def _array_head(count: int) -> bytes:
    if count < 16:
        return _SHORT_HEADS[count]
    assert count < 65_536
    return b"\xdc" + count.to_bytes(2, "big")


def build_echo_entry(conversation_seq: Seq, conversation_id: ConversationId) -> bytes:
    return b"".join((_ARRAY_2, _encode(conversation_seq), _BIN_16, conversation_id))


def build_push(events: Sequence[tuple[int, int, bytes]]) -> list[bytes]:
    """PUSH_EVENTS frames for (previous, mailbox_seq, entry), cut so that none passes the batch limit."""
    items = [b"".join((_ARRAY_3, _encode(prev), _encode(seq), entry)) for prev, seq, entry in events]
    frames: list[bytes] = []
    first = 0
    size = 0
    for index, item in enumerate(items):
        if size + len(item) > _BATCH_ITEMS_BYTES_MAX and index > first:
            frames.append(_push_frame(items[first:index]))
            first, size = index, 0
        size += len(item)
    if items:
        frames.append(_push_frame(items[first:]))
    return frames


_BATCH_ITEMS_BYTES_MAX: Final = BATCH_BYTES_MAX - 16
"""What the items of a push may sum to; the rest is for the frame header and the array heads."""


def _push_frame(items: Sequence[bytes]) -> bytes:
    return build_frame(_PUSH_EVENTS, 0, b"".join((_ARRAY_1, _array_head(len(items)), *items)))


def build_mailbox_batch(
    request_id: int,
    *,
    entries: Sequence[tuple[MailboxSeq, bytes]],
    covered_through: MailboxSeq,
    more: bool,
    rebuild: bool,
) -> bytes:
    """MAILBOX_BATCH around final entry bytes; the store kept the page within its limits."""
    parts: list[bytes] = [_ARRAY_4, _array_head(len(entries))]
    for mailbox_seq, entry in entries:
        parts += (_ARRAY_2, _encode(mailbox_seq), entry)
    parts += (_encode(covered_through), _BOOLEAN[more], _BOOLEAN[rebuild])
    return _batch_frame(Op.MAILBOX_BATCH, request_id, parts)


def build_history_batch(
    request_id: int,
    *,
    conversation_id: ConversationId,
    records: Sequence[tuple[Seq, bytes]],
    earliest_available_seq: Seq,
    head_seq: Seq,
    more: bool,
) -> bytes:
    """HISTORY_BATCH around stored record bytes, newest first, as the page gives them."""
    parts: list[bytes] = [_ARRAY_5, _BIN_16, conversation_id, _array_head(len(records))]
    parts += (build_entry(seq, record) for seq, record in records)
    parts += (_encode(earliest_available_seq), _encode(head_seq), _BOOLEAN[more])
    return _batch_frame(Op.HISTORY_BATCH, request_id, parts)


def _batch_frame(op: int, request_id: int, parts: Iterable[bytes]) -> bytes:
    body = b"".join(parts)
    assert len(body) <= FRAME_BODY_BYTES_MAX
    return build_frame(op, request_id, body)

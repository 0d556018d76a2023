"""MessageRecord, Entry, Outbox and dispatch records, and the routing header before them.

One message has one byte string for ever: the writer encodes the record once, every later hop only
prefixes it. A retry of a half-finished message uses the stored bytes, never newly built ones.

    MessageRecord   MessagePack array, immutable; the sequence is not inside, it is the key
    Entry           MessagePack [conversation_seq, MessageRecord]; the slice that Outbox, dispatch,
                    mailbox member and push share
    OutboxRecord    routing header ‖ Entry
    DispatchRecord  routing header ‖ recipients ‖ Entry

The routing header (big-endian, 148 bytes). fanout, mailbox and session read it and never open the record:

     0       1       2         4          8         16             24              40
     +-------+-------+---------+----------+---------+--------------+---------------+----------------
     | ver=2 | kind  | bucket  | tenant   | seq     | reserved_at  | conversation  | dispatch digest
     | u8    | u8    | u16     | u32      | u64     | u64 ms       | 16 B          | 8 B
     +-------+-------+---------+----------+---------+--------------+---------------+----------------
     48                84       100             116                               148
     +-----------------+--------+---------------+---------------------------------+
     | identity digest | sender | sender device | two users, or group ‖ version … |
     | 36 B            | 16 B   | 16 B          | 2 × 16 B  or 16 B ‖ u64 ‖ u64   |
     +-----------------+--------+---------------+---------------------------------+

The last number of a group says who gets the message: 0 = the members at that version, 1 = those that the
record lists. So only what lists its audience has to be opened on the way.

`kind` carries the conversation's kind in its low bits and EPHEMERAL_FLAG in its highest, so that the
mailbox knows without opening the record how long the entry may live.

The recipients of a dispatch record: shard u8 ‖ part u8 ‖ count u16 ‖ count × user 16 B.

`dispatch_id` = 14 bytes of BLAKE3(conversation, seq) ‖ shard ‖ part: it comes from what must be unique. The
digest comes from what must be equal (message id, audience, record). Two bodies under one sequence
therefore meet as one id with two digests, and the shard stops.

Of an OutboxRecord only the sequence is unknown before the message is allocated, and it stands plainly in
two places. So the rest is an *outbox frame*, built beforehand: `build_outbox_frame` and `fill_outbox_frame`,
of which `lua/commit_messages.lua` does the second on the server. A property test holds both to one result.
"""

import struct
from enum import IntEnum
from functools import lru_cache
from typing import Annotated, Final, NamedTuple

import msgspec
from blake3 import blake3

from qim.errors import RecordCorrupt
from qim.ids import (
    ID_BYTES,
    SEQ_MAX,
    BucketId,
    ClientMessageId,
    ConversationId,
    DeviceId,
    DispatchId,
    GroupId,
    MessageId,
    Millis,
    Seq,
    SlotId,
    TenantId,
    UserId,
)
from qim.limits import BUCKETS, HEADERS_REMEMBERED_MAX, SLOTS

RECORD_VERSION: Final = 1
HEADER_VERSION: Final = 2
EPHEMERAL_FLAG: Final = 0x80
IDENTITY_MAGIC: Final = b"QID1"
IDENTITY_BYTES: Final = 36
_IDENTITY_DOMAIN = b"qim.identity.v1"
_DISPATCH_DOMAIN = b"qim.dispatch.v1"

_HEADER = struct.Struct(">BBHIQQ16s8s36s16s16s32s")
HEADER_BYTES: Final = _HEADER.size
assert HEADER_BYTES == 148
_SEQ_AT: Final = 8
OUTBOX_FRAME_BYTES: Final = HEADER_BYTES - 8
_RECIPIENTS = struct.Struct(">BBH")
_RECIPIENTS_AT = HEADER_BYTES + _RECIPIENTS.size
_IDENTITY_FIELDS = struct.Struct(">IBBH")
_SEQ = struct.Struct(">Q")
_GROUP_PARTIES: Final = struct.Struct(">16sQQ")
MEMBERS_AT_VERSION: Final = 0
LISTED_IN_RECORD: Final = 1
_ID: Final = msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)


class Kind(IntEnum):
    """Kind of a conversation; also the first field of a target on the wire."""

    DIRECT = 1
    GROUP = 2


class MessageType(IntEnum):
    TEXT = 1
    CUSTOM = 2
    MEDIA_REF = 3
    CONTROL = 9


class MembershipOp(IntEnum):
    """What a membership event says happened; the first byte of its body."""

    JOIN = 1
    LEAVE = 2
    REMOVE = 3


class RetentionClass(IntEnum):
    DEFAULT = 0
    EPHEMERAL = 1
    COMPLIANCE_HOLD = 2
    TENANT_CUSTOM = 3


class MessageRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A message as it is stored everywhere, without its sequence."""

    version: int
    tenant: TenantId
    conversation_id: Annotated[ConversationId, _ID]
    kind: int
    parties: bytes
    """direct: the smaller and the larger user, 32 B; group: the group id, 16 B."""
    message_id: Annotated[MessageId, _ID]
    sender: Annotated[UserId, _ID]
    sender_device: Annotated[DeviceId, _ID]
    client_message_id: Annotated[ClientMessageId, _ID]
    message_type: int
    custom_type: str
    body: bytes
    retention_class: int
    reserved_at: Millis
    membership_version: int
    audience: tuple[bytes, ...] | None = None


class Entry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A record with its sequence, decoded."""

    conversation_seq: Annotated[Seq, msgspec.Meta(ge=1, le=SEQ_MAX)]
    record: MessageRecord


class GroupParties(NamedTuple):
    """The last 32 bytes of the header of a group message, decoded; nothing is checked."""

    group: GroupId
    version: int
    """Of the members that the message was numbered under; an event has the one that its change made."""
    audience: int
    """MEMBERS_AT_VERSION or LISTED_IN_RECORD."""


class RoutingHeader(NamedTuple):
    """The fixed header, decoded; see the drawing."""

    version: int
    kind: int
    bucket: BucketId
    tenant: TenantId
    seq: Seq
    reserved_at: Millis
    conversation: ConversationId
    dispatch_digest: bytes
    identity: bytes
    sender: UserId
    sender_device: DeviceId
    parties: bytes
    dispatch_base: bytes
    """14 bytes, derived from conversation and sequence."""
    ephemeral: bool = False

    @property
    def users(self) -> tuple[UserId, UserId]:
        """The two users of a direct conversation, smaller first."""
        return UserId(self.parties[:16]), UserId(self.parties[16:])

    @property
    def group(self) -> GroupParties:
        """Of a group message: which one, and who gets it."""
        return GroupParties._make(_GROUP_PARTIES.unpack(self.parties))


class Dispatch(msgspec.Struct, frozen=True, gc=False):
    """A dispatch record, split; `entry` is the slice that becomes the mailbox member."""

    header: RoutingHeader
    shard: SlotId
    part: int
    recipients: tuple[UserId, ...]
    entry: bytes

    @property
    def dispatch_id(self) -> DispatchId:
        return DispatchId(self.header.dispatch_base + bytes((self.shard, self.part)))


_encoder = msgspec.msgpack.Encoder()
_record_decoder = msgspec.msgpack.Decoder(MessageRecord)
_entry_decoder = msgspec.msgpack.Decoder(Entry)
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What the decoder raises for foreign bytes: wrong shape, broken UTF-8, arrays nested without end."""


def identity_digest(
    *,
    tenant: TenantId,
    conversation: ConversationId,
    sender: UserId,
    client_message_id: ClientMessageId,
    message_type: int,
    retention_class: int,
    custom_type: str,
    body: bytes,
) -> bytes:
    """36 bytes over everything that identifies a message and every field the client chose.

    Fixed-width fields stand first and the one length that is needed stands before its text, so that no
    two different messages give the same input.
    """
    custom = custom_type.encode()
    fields = _IDENTITY_FIELDS.pack(tenant, message_type, retention_class, len(custom))
    parts = (_IDENTITY_DOMAIN, fields, conversation, sender, client_message_id, custom, body)
    return IDENTITY_MAGIC + blake3(b"".join(parts)).digest()


def message_id_of(identity: bytes) -> MessageId:
    """The message id is a slice of the identity digest: the same message has the same id everywhere."""
    return MessageId(identity[4:20])


def encode_record(record: MessageRecord) -> bytes:
    return _encoder.encode(record)


def decode_record(data: bytes) -> MessageRecord:
    """Raises RecordCorrupt when the bytes are not a record of a known version."""
    try:
        record = _record_decoder.decode(data)
    except _UNREADABLE as error:
        raise RecordCorrupt(f"message record of {len(data)} bytes does not decode") from error
    if record.version != RECORD_VERSION:
        raise RecordCorrupt(f"message record of version {record.version}")
    return record


def build_entry(seq: Seq, record: bytes) -> bytes:
    """The Entry is an array of two around bytes that exist already; nothing is encoded again."""
    return b"\x92" + _encoder.encode(seq) + record


def decode_entry(data: bytes) -> Entry:
    """Raises RecordCorrupt when the bytes are not an entry."""
    try:
        entry = _entry_decoder.decode(data)
    except _UNREADABLE as error:
        raise RecordCorrupt(f"entry of {len(data)} bytes does not decode") from error
    if entry.record.version != RECORD_VERSION:
        raise RecordCorrupt(f"entry with a record of version {entry.record.version}")
    return entry


class _RecordHead(msgspec.Struct, array_like=True, frozen=True, gc=False):
    version: int
    tenant: TenantId
    conversation_id: ConversationId


class _EntryHead(msgspec.Struct, array_like=True, frozen=True, gc=False):
    conversation_seq: Seq
    record: _RecordHead


_entry_head_decoder = msgspec.msgpack.Decoder(_EntryHead)


def entry_coordinates(data: bytes) -> tuple[Seq, ConversationId]:
    """Where an entry belongs, without copying its body. Raises RecordCorrupt when the bytes are no entry."""
    try:
        head = _entry_head_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise RecordCorrupt(f"entry of {len(data)} bytes does not decode") from error
    return head.conversation_seq, head.record.conversation_id


def build_outbox_frame(
    *, bucket: BucketId, record: MessageRecord, record_bytes: bytes, identity: bytes
) -> bytes:
    """The header of an Outbox record without its sequence, 140 bytes. A pure function of its arguments."""
    if record.kind == Kind.DIRECT:
        parties = record.parties
    else:
        audience = MEMBERS_AT_VERSION if record.audience is None else LISTED_IN_RECORD
        parties = _GROUP_PARTIES.pack(record.parties, record.membership_version, audience)
    digest = blake3(record.message_id + parties + record_bytes).digest(8)
    flag = EPHEMERAL_FLAG if record.retention_class == RetentionClass.EPHEMERAL else 0
    header = _HEADER.pack(
        HEADER_VERSION, record.kind | flag, bucket, record.tenant, 0, record.reserved_at,
        record.conversation_id, digest, identity, record.sender, record.sender_device, parties,
    )  # fmt: skip
    return header[:_SEQ_AT] + header[_SEQ_AT + _SEQ.size :]


def fill_outbox_frame(frame: bytes, *, seq: Seq, record_bytes: bytes) -> bytes:
    """The Outbox record, once the sequence is known. A retry builds the same bytes."""
    return b"".join((frame[:_SEQ_AT], _SEQ.pack(seq), frame[_SEQ_AT:], build_entry(seq, record_bytes)))


def build_outbox_record(
    *, bucket: BucketId, seq: Seq, record: MessageRecord, record_bytes: bytes, identity: bytes
) -> bytes:
    """Header and entry of one message whose sequence is known."""
    frame = build_outbox_frame(bucket=bucket, record=record, record_bytes=record_bytes, identity=identity)
    return fill_outbox_frame(frame, seq=seq, record_bytes=record_bytes)


def parse_header(data: bytes) -> RoutingHeader:
    """Raises RecordCorrupt for a short record or an unknown version."""
    if len(data) < HEADER_BYTES:
        raise RecordCorrupt(f"log record of {len(data)} bytes is shorter than its header")
    return _read_header(data[:HEADER_BYTES])


# Fan-out and the mailboxes of both users read the header of one message within milliseconds of each other.
@lru_cache(maxsize=HEADERS_REMEMBERED_MAX)
def _read_header(data: bytes) -> RoutingHeader:
    fields = _HEADER.unpack(data)
    version, kind, bucket, _tenant, seq, _reserved_at, conversation = fields[:7]
    if version != HEADER_VERSION:
        raise RecordCorrupt(f"log record of version {version}")
    base = blake3(_DISPATCH_DOMAIN + conversation + _SEQ.pack(seq)).digest(14)
    is_ephemeral = bool(kind & EPHEMERAL_FLAG)
    header = RoutingHeader._make((version, kind & ~EPHEMERAL_FLAG, *fields[2:], base, is_ephemeral))
    if bucket >= BUCKETS or not 1 <= header.kind <= 2:
        raise RecordCorrupt(f"log record of kind {header.kind} for bucket {bucket}")
    return header


def check_entry(header: RoutingHeader, entry: bytes) -> None:
    """Raises RecordCorrupt when the entry does not begin as an entry of the header's sequence."""
    if not entry.startswith(b"\x92" + _encoder.encode(header.seq)):
        raise RecordCorrupt(f"entry of {len(entry)} bytes is not of the sequence in its header")


def outbox_entry(data: bytes) -> bytes:
    """The Entry of an Outbox record."""
    return data[HEADER_BYTES:]


def build_dispatch_record(
    outbox_record: bytes, *, shard: SlotId, part: int, recipients: tuple[UserId, ...]
) -> bytes:
    """The dispatch record of one shard; header and entry are the bytes of the Outbox record."""
    audience = _RECIPIENTS.pack(shard, part, len(recipients)) + b"".join(recipients)
    return outbox_record[:HEADER_BYTES] + audience + outbox_record[HEADER_BYTES:]


def parse_dispatch_record(data: bytes) -> Dispatch:
    """Raises RecordCorrupt when the lengths contradict each other."""
    header = parse_header(data)
    start = _RECIPIENTS_AT
    if len(data) < start:
        raise RecordCorrupt("dispatch record without recipients")
    shard, part, count = _RECIPIENTS.unpack_from(data, HEADER_BYTES)
    end = start + 16 * count
    if count == 0 or shard >= SLOTS or len(data) <= end:
        raise RecordCorrupt(
            f"dispatch record of {len(data)} bytes: {count} users of shard {shard} and an entry do not fit"
        )
    if count == 1:
        recipients: tuple[UserId, ...] = (UserId(data[start:end]),)
    else:
        recipients = tuple([UserId(data[at : at + 16]) for at in range(start, end, 16)])
    return Dispatch(header, SlotId(shard), part, recipients, data[end:])

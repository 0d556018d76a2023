"""Redis keys and packed values that several adapters share, and the keys of the core instance.

Ids stand in keys as raw bytes at fixed positions behind the hash tag, so a key is one-to-one with its ids
whatever bytes they contain, and costs half of what hexadecimal would. Tools print hexadecimal.

    owner                                            hash: slot → owner value (drawn below)
    msgpending                                       hash: pending field → pending value
    cmidown:{bNNN}:tenant conversation sender cmid   string: committed value, PXAT committed_at + 2 h
    conv:{bNNN}:tenant conversation                  hash: n last sequence, h visible head, r‖user read
                                                     mark, a "1" while msgahead is not empty
    msgahead:{bNNN}:tenant conversation              zset: sequences committed ahead of an unfinished one
    msgrecord:{bNNN}:tenant conversation             hash: sequence → MessageRecord
    convskip:{bNNN}:tenant conversation              zset: sequences that never count as unread
    msghistory:hour                                  list: index elements in order of TIME
    msghistorygc:{bNNN}                              zset: expires_at → tenant conversation sequence
    msghistfloor:{bNNN}                              hash: tenant conversation → floor
    logpos:group  logseen                            hash: partition → offset
    grp:{bNNN}:tenant conversation                   hash: group_id, name, owner, version, count, created_at,
                                                     digest, event and event_seq of the last change
    grpmember:{bNNN}:tenant conversation             hash: user → state u8 ‖ joined_at u64 ‖ left_at u64
    grpsnap:{bNNN}:tenant conversation               hash: version → 64 × u64, the version of each shard's
                                                     part (0 none); shard:version → users, 16 B each
    grpsnapgc:{bNNN}                                 zset: due → tenant conversation field of grpsnap
    grpannounce:{bNNN}                               list: tenant conversation version of new groups
    adminreq:{bNNN}:tenant conversation request      hash: digest, seq, count, version, event; 24 h

Sequences and offsets are decimal text, so that a script computes with them without unpacking; tenant is u32
big-endian, times are u64 big-endian milliseconds:

    owner value       epoch u64 ‖ boot 16 ‖ supervisor 16 ‖ placement 16 ‖ stamp u64 ‖ released u8 ‖ label
    pending field     the cmidown key of the message: one argument less for each item, and at 67 bytes too
                      long for the compact encoding, whose linear search costs more than a table does
    pending value     identity 36 ‖ reserved_at u64 ‖ sequence (decimal)
    committed value   identity 36 ‖ reserved_at u64 ‖ sequence (decimal) ‖ committed_at u64
    index element     bucket u8 ‖ tenant u32 ‖ conversation 16 ‖ committed_at u64 ‖ sequence (decimal)
"""

import struct
from typing import Final

from qim.ids import BucketId, ConversationId, RequestId, Seq, SlotId, TenantId
from qim.limits import BUCKETS, SLOTS
from qim.ports import MessageKey

OWNER: Final = b"owner"
PENDING: Final = b"msgpending"
LOG_SEEN: Final = b"logseen"
IDENTITY: Final = b"qim:identity"

BUCKET_TAGS: Final = tuple(b"{b%03d}:" % bucket for bucket in range(BUCKETS))
SLOT_TAGS: Final = tuple(b"{s%02d}:" % slot for slot in range(SLOTS))
SLOT_FIELDS: Final = tuple(b"%d" % slot for slot in range(SLOTS))
"""The slot as a field of per-instance hashes (owner, mboxw, logpos, logseen)."""

HOUR_MS: Final = 3_600_000

_TENANT = struct.Struct(">I")
_VALUE_HEAD = struct.Struct(">36sQ")
_EPOCH = struct.Struct(">Q")
PENDING_FIELD_BYTES: Final = 67
VALUE_HEAD_BYTES: Final = _VALUE_HEAD.size
assert VALUE_HEAD_BYTES == 44

pack_tenant = _TENANT.pack
pack_epoch = _EPOCH.pack
"""An epoch as the first eight bytes of the owner value; scripts compare these bytes."""
unpack_value_head = _VALUE_HEAD.unpack_from
"""identity, reserved_at: the head of the pending value and of the committed value."""


def bucket_tag(bucket: BucketId) -> bytes:
    """`{bNNN}:`: everything of one commit bucket may move to another instance together."""
    return BUCKET_TAGS[bucket]


def slot_tag(slot: SlotId) -> bytes:
    """`{sNN}:`: everything of one mailbox shard may move to another instance together."""
    return SLOT_TAGS[slot]


def conversation_suffix(bucket: BucketId, tenant: TenantId, conversation: ConversationId) -> bytes:
    """Tag and ids of a conversation, the common end of all its keys."""
    return BUCKET_TAGS[bucket] + _TENANT.pack(tenant) + conversation


def conversation_key(suffix: bytes) -> bytes:
    return b"conv:" + suffix


def ahead_key(suffix: bytes) -> bytes:
    return b"msgahead:" + suffix


def record_key(suffix: bytes) -> bytes:
    return b"msgrecord:" + suffix


def skip_key(suffix: bytes) -> bytes:
    return b"convskip:" + suffix


def committed_key(key: MessageKey) -> bytes:
    return b"cmidown:%b%b%b%b%b" % (
        BUCKET_TAGS[key.bucket], _TENANT.pack(key.tenant), key.conversation, key.sender,
        key.client_message_id,
    )  # fmt: skip


def group_key(suffix: bytes) -> bytes:
    return b"grp:" + suffix


def member_key(suffix: bytes) -> bytes:
    return b"grpmember:" + suffix


def snapshot_key(suffix: bytes) -> bytes:
    return b"grpsnap:" + suffix


def request_key(suffix: bytes, request_id: RequestId) -> bytes:
    return b"adminreq:" + suffix + request_id


def snapshot_garbage_key(bucket: BucketId) -> bytes:
    return b"grpsnapgc:" + BUCKET_TAGS[bucket][:-1]


def announce_key(bucket: BucketId) -> bytes:
    return b"grpannounce:" + BUCKET_TAGS[bucket][:-1]


def floor_key(bucket: BucketId) -> bytes:
    return b"msghistfloor:" + BUCKET_TAGS[bucket][:-1]


def collect_key(bucket: BucketId) -> bytes:
    return b"msghistorygc:" + BUCKET_TAGS[bucket][:-1]


def hour_key(hour: int) -> bytes:
    """The time index of one hour (milliseconds since 1970 ÷ 3,600,000) of this instance."""
    return b"msghistory:%d" % hour


def position_key(group: str) -> bytes:
    return b"logpos:" + group.encode()


def pending_field(key: MessageKey) -> bytes:
    """The name of a send in the per-instance hash of what is in flight."""
    return committed_key(key)


def parse_pending_field(field: bytes) -> MessageKey:
    """The inverse of `pending_field`; raises ValueError when the bytes are not one."""
    if len(field) != PENDING_FIELD_BYTES:
        raise ValueError(f"pending field of {len(field)} bytes")
    (tenant,) = _TENANT.unpack_from(field, 15)
    return MessageKey._make((int(field[10:13]), tenant, field[19:35], field[35:51], field[51:67]))


def pending_value(identity: bytes, reserved_at: int, seq: Seq) -> bytes:
    """Digest, time and sequence of a RECORDED message; `mark_committed` compares it whole."""
    return _VALUE_HEAD.pack(identity, reserved_at) + b"%d" % seq

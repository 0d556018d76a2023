"""Redis keys and packed values of the mailbox instance.

    owner                            hash: slot → owner value (redis_keys)
    mboxw                            hash: slot → W u64 ‖ base u64 ‖ day u32 ‖ log identity 16 ‖ dispatch 16
    mboxday:{sNN}                    hash: day → last mailbox_seq of that day, written when the day turns
    mbox:{sNN}:tenant user day       zset: mailbox_seq → Entry; tenant u32, user 16 B, day u32
    mboxe:{sNN}:tenant user day      the same for ephemeral messages
    mboxdp:hour                      hash: dispatch id → digest 8 ‖ state 1 ‖ day u32; hour of reserved_at

All integers are big-endian. The dispatch id is missing until the first record is finished. States of a
dispatch: `o` open (the general path has begun), `f` final, `s` skipped by an operator. Days and hours count
from 1970; a shard's day is the day of TIME when it last turned and never goes back.
"""

import struct
from typing import Final

from qim.adapters.redis_keys import HOUR_MS, pack_tenant, slot_tag
from qim.ids import DispatchId, MailboxSeq, Millis, SlotId, TenantId, UserId
from qim.limits import SLOTS
from qim.ports import ShardState

WATERMARKS: Final = b"mboxw"

_STATE = struct.Struct(">QQI16s")
_DAY = struct.Struct(">I")
STATE_BYTES: Final = _STATE.size
assert STATE_BYTES == 36

pack_day = _DAY.pack

_PREFIXES: Final = tuple(b"mbox:" + slot_tag(SlotId(slot)) for slot in range(SLOTS))
_EPHEMERAL_PREFIXES: Final = tuple(b"mboxe:" + slot_tag(SlotId(slot)) for slot in range(SLOTS))
"""Made once: each delivery needs a key."""


def day_hash_key(slot: SlotId) -> bytes:
    return b"mboxday:" + slot_tag(slot)[:-1]


def mailbox_key(slot: SlotId, tenant: TenantId, user: UserId, *, day: int, ephemeral: bool) -> bytes:
    """The sorted set of one user and day."""
    prefixes = _EPHEMERAL_PREFIXES if ephemeral else _PREFIXES
    return prefixes[slot] + pack_tenant(tenant) + user + pack_day(day)


def progress_key(reserved_at: Millis) -> bytes:
    """The DP hash of the hour of a record, so a replay meets the same hash whenever it comes."""
    return b"mboxdp:%d" % (reserved_at // HOUR_MS)


def pack_state(state: ShardState) -> bytes:
    head = _STATE.pack(state.watermark, state.base, state.day, state.log_identity)
    return head + state.dispatch_id


def unpack_state(value: bytes) -> ShardState:
    """Raises ValueError when the bytes are not a shard's state."""
    if len(value) not in {STATE_BYTES, STATE_BYTES + 16}:
        raise ValueError(f"shard state of {len(value)} bytes")
    watermark, base, day, identity = _STATE.unpack_from(value)
    return ShardState(MailboxSeq(watermark), MailboxSeq(base), day, identity, DispatchId(value[STATE_BYTES:]))


def unpack_state_or_none(value: bytes | None) -> ShardState | None:
    """None where there is no state, or none that can be read."""
    try:
        return None if value is None else unpack_state(value)
    except ValueError:
        return None


def final_progress(digest: bytes, day: int) -> bytes:
    """The DP value of a finished dispatch."""
    return digest + b"f" + _DAY.pack(day)

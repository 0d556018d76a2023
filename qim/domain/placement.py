"""Where a user and a conversation live: pure arithmetic on fixed hashes.

    user         → shard  = blake3("qim.shard.v1"  ‖ tenant u32be ‖ user 16 B)[0:8] mod 64
    conversation → bucket = blake3("qim.bucket.v1" ‖ tenant u32be ‖ conversation 16 B)[0:8] mod 256
    bucket       → slot   = bucket // 4
    slot         → worker = the g with 64·g // G ≤ slot < 64·(g+1) // G
    slot         → instance of n = slot · n // 64

Every worker computes the same map from the same configuration; its digest travels in every link
greeting, and two workers with different maps do not talk. `hash()` is never used: it differs per process.
"""

import struct
from typing import NamedTuple

from blake3 import blake3

from qim.ids import BucketId, ConversationId, GroupId, SlotId, TenantId, UserId, WorkerId
from qim.limits import BUCKETS, BUCKETS_PER_SLOT, SLOTS

_TENANT = struct.Struct(">I")
_SHARD_DOMAIN = b"qim.shard.v1"
_BUCKET_DOMAIN = b"qim.bucket.v1"
_DIRECT_DOMAIN = b"qim.direct.v1"
_GROUP_DOMAIN = b"qim.group.v1"


class Placement(NamedTuple):
    """The whole map: worker count over all hosts, core and mailbox instance counts."""

    workers: int
    core_instances: int
    mailbox_instances: int

    def digest(self) -> bytes:
        """16 bytes that two workers must share before they talk."""
        text = f"qim.placement.v1 {self.workers} {self.core_instances} {self.mailbox_instances}"
        return blake3(text.encode()).digest(16)

    def slots_of(self, worker: WorkerId) -> range:
        """The contiguous slots of one worker."""
        return range(SLOTS * worker // self.workers, SLOTS * (worker + 1) // self.workers)

    def worker_of(self, slot: SlotId) -> WorkerId:
        """The owner of a slot: the inverse of `slots_of`."""
        return WorkerId(((slot + 1) * self.workers - 1) // SLOTS)

    def home_partition(self, worker: WorkerId) -> SlotId:
        """Where a worker appends all its Outbox records: its first slot; so fsynced batches stay large."""
        return SlotId(self.slots_of(worker).start)

    def core_instance_of(self, slot: SlotId) -> int:
        return slot * self.core_instances // SLOTS

    def mailbox_instance_of(self, slot: SlotId) -> int:
        return slot * self.mailbox_instances // SLOTS


def shard_of_user(tenant: TenantId, user: UserId) -> SlotId:
    """The mailbox shard of a user."""
    digest = blake3(_SHARD_DOMAIN + _TENANT.pack(tenant) + user).digest(8)
    return SlotId(int.from_bytes(digest, "big") % SLOTS)


def bucket_of_conversation(tenant: TenantId, conversation: ConversationId) -> BucketId:
    """The commit bucket of a conversation."""
    digest = blake3(_BUCKET_DOMAIN + _TENANT.pack(tenant) + conversation).digest(8)
    return BucketId(int.from_bytes(digest, "big") % BUCKETS)


def slot_of_bucket(bucket: BucketId) -> SlotId:
    return SlotId(bucket // BUCKETS_PER_SLOT)


def buckets_of_slot(slot: SlotId) -> range:
    return range(slot * BUCKETS_PER_SLOT, (slot + 1) * BUCKETS_PER_SLOT)


def direct_conversation(tenant: TenantId, one: UserId, other: UserId) -> ConversationId:
    """The conversation of two users; the same whoever asks."""
    low, high = (one, other) if one <= other else (other, one)
    return ConversationId(blake3(_DIRECT_DOMAIN + _TENANT.pack(tenant) + low + high).digest(16))


def group_conversation(tenant: TenantId, group: GroupId) -> ConversationId:
    """The conversation of a group; whether the group exists is for the store to say."""
    return ConversationId(blake3(_GROUP_DOMAIN + _TENANT.pack(tenant) + group).digest(16))

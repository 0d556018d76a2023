"""The map: who owns what is the same everywhere, covers everything, and never moves by accident."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qim.domain.placement import (
    Placement,
    bucket_of_conversation,
    buckets_of_slot,
    direct_conversation,
    shard_of_user,
    slot_of_bucket,
)
from qim.ids import BucketId, ConversationId, SlotId, TenantId, UserId, WorkerId
from qim.limits import BUCKETS, SLOTS

TENANT = TenantId(7)
ids = st.binary(min_size=16, max_size=16)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 7, 8, 16, 63, 64])
def test_every_slot_has_one_owner_and_both_directions_agree(workers: int) -> None:
    placement = Placement(workers, 1, 1)
    owners = [worker for worker in range(workers) for _ in placement.slots_of(WorkerId(worker))]
    assert owners == [placement.worker_of(SlotId(slot)) for slot in range(SLOTS)]
    sizes = Counter(owners).values()
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_home_partition_belongs_to_its_worker(workers: int) -> None:
    placement = Placement(workers, 1, 1)
    for worker in range(workers):
        assert placement.worker_of(placement.home_partition(WorkerId(worker))) == worker


@pytest.mark.parametrize("instances", [1, 2, 3, 64])
def test_instances_own_contiguous_slots(instances: int) -> None:
    placement = Placement(1, instances, instances)
    core = [placement.core_instance_of(SlotId(slot)) for slot in range(SLOTS)]
    assert core == [placement.mailbox_instance_of(SlotId(slot)) for slot in range(SLOTS)]
    assert core == sorted(core)
    assert set(core) == set(range(instances))


def test_digest_tells_every_two_maps_apart() -> None:
    maps = [Placement(w, c, m) for w in (1, 2, 11) for c in (1, 2, 11) for m in (1, 2, 11)]
    assert len({placement.digest() for placement in maps}) == len(maps)
    assert {len(placement.digest()) for placement in maps} == {16}


@pytest.mark.shows("C8")
def test_buckets_and_slots_nest_without_remainder() -> None:
    slots = [slot_of_bucket(BucketId(bucket)) for bucket in range(BUCKETS)]
    assert Counter(slots) == dict.fromkeys(range(SLOTS), BUCKETS // SLOTS)
    for slot in range(SLOTS):
        assert all(slot_of_bucket(BucketId(bucket)) == slot for bucket in buckets_of_slot(SlotId(slot)))


def test_placement_of_known_ids_is_pinned() -> None:
    # Stored data lie where these numbers say; another number here is a lost mailbox.
    assert shard_of_user(TENANT, UserId(bytes(16))) == 41
    assert bucket_of_conversation(TENANT, ConversationId(bytes(16))) == 28
    assert (
        direct_conversation(TENANT, UserId(b"a" * 16), UserId(b"b" * 16)).hex()
        == "7ad03df08328b6f1c0fdca2c58ca42fb"
    )


@given(ids, ids)
def test_direct_conversation_is_the_same_for_both_and_another_elsewhere(one: bytes, other: bytes) -> None:
    conversation = direct_conversation(TENANT, UserId(one), UserId(other))
    assert conversation == direct_conversation(TENANT, UserId(other), UserId(one))
    assert conversation != direct_conversation(TenantId(8), UserId(one), UserId(other))


def test_users_and_conversations_spread_over_all_places() -> None:
    users = Counter(shard_of_user(TENANT, UserId(n.to_bytes(16, "big"))) for n in range(6_400))
    assert len(users) == SLOTS
    assert max(users.values()) < 200
    conversations = (ConversationId(n.to_bytes(16, "big")) for n in range(12_800))
    buckets = Counter(bucket_of_conversation(TENANT, conversation) for conversation in conversations)
    assert len(buckets) == BUCKETS
    assert max(buckets.values()) < 120

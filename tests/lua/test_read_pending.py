"""`read_pending` on real servers: what the recoverer gets, how old, of which buckets."""

import pytest

from qim.adapters import redis_keys as keys
from qim.adapters.commits_redis import PENDING_SCAN_COUNT
from qim.errors import StoreBroken
from qim.ids import BucketId, ConversationId
from tests.lua.commit_calls import (
    BUCKET,
    CLOCK,
    CONVERSATION,
    TENANT,
    commit_of,
    key_of,
    opened_store,
    picture,
    plant,
    reservation,
)
from tests.services import StoreServer

SUFFIX = keys.conversation_suffix(BUCKET, TENANT, CONVERSATION)


@pytest.mark.shows("C3", "C11")
async def test_a_recorded_message_comes_back_with_everything_a_retry_needs(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        items = [reservation(key_of(number), text=b"text %d" % number) for number in range(3)]
        results = await store.reserve(items)
        await store.mark_committed([commit_of(items[1], results[1])])
        before = await picture(pipe)
        found = await store.read_pending([BUCKET], older_than_ms=-1_000, entries_max=10)
        assert sorted(found) == sorted(
            (item.key, item.identity, result.seq, item.reserved_at, item.record)
            for item, result in zip(items, results, strict=True)
            if result.seq != 2
        )
        assert await picture(pipe) == before


@pytest.mark.shows("X9", "C7")
async def test_what_cannot_be_finished_keeps_no_other_from_being_finished(
    store_server: StoreServer,
) -> None:
    async with opened_store(store_server) as (store, pipe):
        elsewhere = ConversationId(b"another conversation"[:16])
        good, lost, foreign = reservation(key_of(1)), reservation(key_of(2)), key_of(3)
        hurt = reservation(key_of(4)._replace(conversation=elsewhere))
        results = await store.reserve([good, lost, hurt])
        await pipe.command("HDEL", keys.record_key(SUFFIX), results[1].seq)
        other = keys.record_key(keys.conversation_suffix(BUCKET, TENANT, elsewhere))
        await pipe.command("DEL", other)
        await pipe.command("SET", other, "no hash")
        fields = (keys.pending_field(foreign), "short", b"x" * 20, b"y" * 60)
        await pipe.command("HSET", keys.PENDING, *fields)
        found = await store.read_pending([BUCKET], older_than_ms=-1_000, entries_max=10)
        records = {item.key: item.record for item in found}
        assert records == {good.key: good.record, lost.key: b"", hurt.key: b"", foreign: b""}


async def test_young_messages_and_other_buckets_are_left_out(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, _):
        now = CLOCK.now_ms()
        old = reservation(key_of(1), reserved_at=now - 5_000)
        young = reservation(key_of(2), reserved_at=now + 5_000)
        elsewhere = reservation(key_of(3, bucket=BucketId(42)), reserved_at=now - 5_000)
        await store.reserve([old, young, elsewhere])
        found = await store.read_pending([BUCKET], older_than_ms=2_000, entries_max=10)
        assert [entry.key for entry in found] == [old.key]


async def test_a_page_ends_and_the_next_call_goes_on_behind_it(store_server: StoreServer) -> None:
    """Entries that nobody can finish fill every page of a reader that always starts at the first one."""
    async with opened_store(store_server) as (store, _):
        count = PENDING_SCAN_COUNT * 3
        items = [reservation(key_of(number)) for number in range(count)]
        await store.reserve(items)
        seen: set[bytes] = set()
        for _round in range(12):
            page = await store.read_pending([BUCKET], older_than_ms=-1_000, entries_max=100)
            seen.update(entry.key.client_message_id for entry in page)
        assert len(seen) == count


async def test_a_wrong_type_under_msgpending_is_refused(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        await plant(pipe, keys.PENDING)
        with pytest.raises(StoreBroken):
            await store.read_pending([BUCKET], older_than_ms=0, entries_max=10)


async def test_a_recorded_message_without_its_record_is_reported_not_passed_over(
    store_server: StoreServer,
) -> None:
    async with opened_store(store_server) as (store, pipe):
        await store.reserve([reservation()])
        await pipe.command("DEL", keys.record_key(SUFFIX))
        (found,) = await store.read_pending([BUCKET], older_than_ms=-1_000, entries_max=10)
        assert (found.key, found.record) == (key_of(), b"")
        with pytest.raises(StoreBroken, match="no record"):
            await store.reserve([reservation()])


async def test_a_value_that_is_not_a_pending_message_is_reported(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        await pipe.command("HSET", keys.PENDING, keys.pending_field(key_of(1)), "short")
        (found,) = await store.read_pending([BUCKET], older_than_ms=0, entries_max=10)
        assert (found.key, found.record) == (key_of(1), b"")

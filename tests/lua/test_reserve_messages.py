"""`reserve_messages` on real servers: sequences without gap, idempotency, refusals that write nothing."""

import pytest
from msgspec import structs

from qim.adapters import redis_keys as keys
from qim.errors import StoreBroken
from qim.ids import SEQ_MAX, BucketId, ConversationId, Millis
from qim.limits import CLOCK_SKEW_MS_MAX
from qim.ports import Reserved
from tests.lua.commit_calls import (
    ALICE,
    BOB,
    BUCKET,
    CLOCK,
    CONVERSATION,
    SLOT,
    TENANT,
    commit_of,
    key_of,
    opened_other,
    opened_store,
    picture,
    plant,
    reservation,
    reserve_one,
)
from tests.services import StoreServer

SUFFIX = keys.conversation_suffix(BUCKET, TENANT, CONVERSATION)
OTHER = ConversationId(b"other-conversatn")


@pytest.mark.shows("C3", "C7")
async def test_a_run_gets_consecutive_sequences_per_conversation(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, _):
        here = [reservation(key_of(number)) for number in range(3)]
        there = [reservation(key_of(number, conversation=OTHER, bucket=BucketId(200))) for number in range(2)]
        results = await store.reserve([here[0], there[0], here[1], there[1], here[2]])
        assert [result.seq for result in results] == [1, 1, 2, 2, 3]
        assert {result.outcome for result in results} == {Reserved.NEW}


@pytest.mark.shows("C3", "C8")
async def test_everything_of_a_message_is_written_by_one_call_under_one_tag(
    store_server: StoreServer,
) -> None:
    async with opened_store(store_server) as (store, pipe):
        item = reservation(expires_at=9_999_999_999_999)
        await store.reserve([item])
        assert set(await picture(pipe)) == {
            keys.OWNER, keys.PENDING, b"conv:" + SUFFIX, b"msgrecord:" + SUFFIX, b"msghistorygc:{b041}",
        }  # fmt: skip
        value = await pipe.command("HGET", keys.PENDING, keys.pending_field(item.key))
        assert value == keys.pending_value(item.identity, item.reserved_at, 1)  # type: ignore[arg-type]  # plain values stand for ids
        assert await pipe.command("HGET", b"msgrecord:" + SUFFIX, "1") == item.record
        assert await pipe.command("ZSCORE", b"msghistorygc:{b041}", SUFFIX[7:] + b"1") == b"9999999999999"


@pytest.mark.shows("C4", "X3", "X16")
async def test_a_repeat_gets_the_coordinates_and_the_stored_bytes_and_writes_nothing(
    store_server: StoreServer,
) -> None:
    async with opened_store(store_server) as (store, pipe):
        item = reservation()
        first = await reserve_one(store, item)
        before = await picture(pipe)
        later = structs.replace(item, record=b"newly built", reserved_at=Millis(item.reserved_at + 5))
        again = await reserve_one(store, later)
        assert (again.outcome, again.seq, again.reserved_at) == (Reserved.RECORDED, 1, item.reserved_at)
        assert first.seq == again.seq
        assert again.record == item.record
        assert await picture(pipe) == before


@pytest.mark.shows("C4", "X3")
async def test_a_recorded_message_is_known_however_old_it_is(store_server: StoreServer) -> None:
    """Three hours in RECORDED: no key of it may expire, and a retry still meets it."""
    async with opened_store(store_server) as (store, pipe):
        item = reservation()
        await store.reserve([item])
        old = keys.pending_value(item.identity, item.reserved_at - 3 * 3_600_000, 1)  # type: ignore[arg-type]  # plain values stand for ids
        await pipe.command("HSET", keys.PENDING, keys.pending_field(item.key), old)
        assert {expiry for _, expiry in (await picture(pipe)).values()} == {-1}
        again = await reserve_one(store, item)
        assert (again.outcome, again.seq) == (Reserved.RECORDED, 1)


@pytest.mark.shows("C4")
async def test_a_repeat_after_the_commit_gets_the_committed_coordinates(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        item = reservation()
        result = await reserve_one(store, item)
        await store.mark_committed([commit_of(item, result)])
        before = await picture(pipe)
        again = await reserve_one(store, item)
        assert (again.outcome, again.seq, again.reserved_at) == (Reserved.COMMITTED, 1, item.reserved_at)
        assert await picture(pipe) == before


@pytest.mark.shows("C5", "X16")
async def test_other_content_under_a_known_key_is_a_conflict_and_writes_nothing(
    store_server: StoreServer,
) -> None:
    async with opened_store(store_server) as (store, pipe):
        item = reservation(text=b"one")
        result = await reserve_one(store, item)
        before = await picture(pipe)
        assert (await reserve_one(store, reservation(text=b"two"))).outcome is Reserved.CONFLICT
        assert await picture(pipe) == before
        await store.mark_committed([commit_of(item, result)])
        before = await picture(pipe)
        assert (await reserve_one(store, reservation(text=b"two"))).outcome is Reserved.CONFLICT
        assert await picture(pipe) == before


@pytest.mark.shows("C4", "C5", "C7")
async def test_the_same_key_twice_in_a_run_meets_its_earlier_twin(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, _):
        one = reservation(key_of(1), text=b"one")
        results = await store.reserve(
            [one, one, reservation(key_of(1), text=b"two"), reservation(key_of(2), text=b"next")]
        )
        outcomes = [result.outcome for result in results]
        assert outcomes == [Reserved.NEW, Reserved.RECORDED, Reserved.CONFLICT, Reserved.NEW]
        assert [result.seq for result in results] == [1, 1, 0, 2]
        assert results[1].record == one.record


@pytest.mark.shows("C7", "X16", "F-05")
async def test_a_stale_owner_is_told_item_by_item_and_consumes_no_sequence(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        async with opened_other(store_server, slots=[SLOT]) as _:
            pass
        before = await picture(pipe)
        assert (await reserve_one(store, reservation())).outcome is Reserved.STALE_OWNER
        assert await picture(pipe) == before
        mine = reservation(key_of(1, conversation=OTHER, bucket=BucketId(200)))
        results = await store.reserve([reservation(), mine])
        assert [result.outcome for result in results] == [Reserved.STALE_OWNER, Reserved.NEW]


@pytest.mark.shows("X16")
async def test_a_worker_clock_that_is_off_is_refused_and_known_messages_are_not(
    store_server: StoreServer,
) -> None:
    async with opened_store(store_server) as (store, pipe):
        await store.reserve([reservation(key_of(1))])
        before = await picture(pipe)
        for off in (CLOCK_SKEW_MS_MAX + 2_000, -CLOCK_SKEW_MS_MAX - 2_000):
            at = CLOCK.now_ms() + off
            known, new = await store.reserve(
                [reservation(key_of(1), reserved_at=at), reservation(key_of(2), reserved_at=at)]
            )
            assert (known.outcome, new.outcome) == (Reserved.RECORDED, Reserved.CLOCK)
        assert await picture(pipe) == before


@pytest.mark.shows("C7", "X16")
async def test_the_last_sequence_is_given_once_and_then_the_conversation_is_exhausted(
    store_server: StoreServer,
) -> None:
    async with opened_store(store_server) as (store, pipe):
        await pipe.command("HSET", b"conv:" + SUFFIX, "n", SEQ_MAX - 1)
        items = [reservation(key_of(number)) for number in range(3)]
        results = await store.reserve(items)
        outcomes = [result.outcome for result in results]
        assert outcomes == [Reserved.NEW, Reserved.EXHAUSTED, Reserved.EXHAUSTED]
        assert results[0].seq == SEQ_MAX
        again = await reserve_one(store, items[0])
        assert (again.outcome, again.seq, again.record) == (Reserved.RECORDED, SEQ_MAX, items[0].record)
        assert await store.load_last_seq([(BUCKET, TENANT, CONVERSATION)]) == [SEQ_MAX]


WRONG_TYPE_KEYS = (
    keys.OWNER,
    keys.PENDING,
    b"conv:" + SUFFIX,
    b"msgrecord:" + SUFFIX,
    keys.committed_key(key_of(2)),
    keys.collect_key(BUCKET),
)


@pytest.mark.shows("C3", "X16")
@pytest.mark.parametrize("key", WRONG_TYPE_KEYS)
async def test_a_wrong_type_under_any_key_is_refused_before_any_write(
    store_server: StoreServer, key: bytes
) -> None:
    async with opened_store(store_server) as (store, pipe):
        await plant(pipe, key)
        before = await picture(pipe)
        other = reservation(key_of(1, conversation=OTHER, bucket=BucketId(200)))
        with pytest.raises(StoreBroken):
            await store.reserve([other, reservation(key_of(2), expires_at=9_999_999_999_999)])
        assert await picture(pipe) == before


@pytest.mark.shows("C3", "X16", "F-12")
async def test_a_full_server_refuses_the_run_whole(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        before = await picture(pipe)
        await pipe.command("CONFIG", "SET", "maxmemory", "1mb")
        try:
            results = await store.reserve([reservation(key_of(number)) for number in range(3)])
            assert [result.outcome for result in results] == [Reserved.FULL] * 3
            assert await store.memory_used_ratio() > 0.8
            assert await picture(pipe) == before
        finally:
            await pipe.command("CONFIG", "SET", "maxmemory", "0")
        assert await store.memory_used_ratio() == 0
        assert (await reserve_one(store, reservation(key_of(1)))).seq == 1


@pytest.mark.shows("C4")
async def test_ids_of_any_bytes_are_told_apart(store_server: StoreServer) -> None:
    """Two senders and two conversations with the same client_message_id are four messages."""
    async with opened_store(store_server) as (store, pipe):
        items = [
            reservation(key_of(1, conversation=conversation, sender=sender))
            for conversation in (CONVERSATION, OTHER)
            for sender in (ALICE, BOB)
        ]
        results = await store.reserve(items)
        assert [(result.outcome, result.seq) for result in results] == [
            (Reserved.NEW, 1), (Reserved.NEW, 2), (Reserved.NEW, 1), (Reserved.NEW, 2),
        ]  # fmt: skip
        assert await pipe.command("HLEN", keys.PENDING) == 4


@pytest.mark.shows("C3")
async def test_a_record_above_the_last_sequence_is_never_overwritten(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        await pipe.command("HSET", b"msgrecord:" + SUFFIX, "1", "somebody's message")
        before = await picture(pipe)
        with pytest.raises(StoreBroken, match="above the last sequence"):
            await store.reserve([reservation()])
        assert await picture(pipe) == before

"""`mark_read` on real servers: marks only rise, end at the last sequence, and the unread count is honest."""

import pytest

from qim.adapters import redis_keys as keys
from qim.adapters.commits_redis import RedisCommitStore
from qim.errors import StoreBroken
from qim.ids import BucketId, ConversationId, Seq
from qim.ports import ReadMark, ReadMarkResult
from tests.lua.commit_calls import (
    ALICE,
    BOB,
    BUCKET,
    CONVERSATION,
    SLOT,
    TENANT,
    key_of,
    opened_other,
    opened_store,
    picture,
    plant,
    reservation,
    send_all,
)
from tests.services import StoreServer

SUFFIX = keys.conversation_suffix(BUCKET, TENANT, CONVERSATION)
OTHER = ConversationId(b"other-conversatn")


def mark_of(seq: int, *, conversation: ConversationId = CONVERSATION, bucket: BucketId = BUCKET) -> ReadMark:
    return ReadMark(TENANT, conversation, bucket, BOB, Seq(seq))


async def marks(store: RedisCommitStore, *seqs: int) -> list[tuple[int, int]]:
    results = await store.mark_read([mark_of(seq) for seq in seqs])
    assert not any(result.stale_owner for result in results)
    return [(result.read_seq, result.unread) for result in results]


async def five_from_alice(store: RedisCommitStore) -> None:
    await send_all(store, [reservation(key_of(number, sender=ALICE)) for number in range(5)])


async def test_a_mark_rises_never_falls_and_ends_at_the_last_sequence(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        await five_from_alice(store)
        assert await marks(store, 2) == [(2, 3)]
        before = await picture(pipe)
        assert await marks(store, 2) == [(2, 3)]
        assert await marks(store, 1) == [(2, 3)]
        assert await picture(pipe) == before
        assert await marks(store, 99) == [(5, 0)]
        assert await marks(store, 4, 5) == [(5, 0), (5, 0)]


async def test_the_same_mark_twice_in_a_run_sees_the_earlier_one(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, _):
        await five_from_alice(store)
        assert await marks(store, 4, 2, 3) == [(4, 1), (4, 1), (4, 1)]
        assert await marks(store, 1) == [(4, 1)]


@pytest.mark.shows("X5")
async def test_unread_counts_up_to_the_visible_head_without_what_never_counts(
    store_server: StoreServer,
) -> None:
    async with opened_store(store_server) as (store, pipe):
        await five_from_alice(store)
        await store.reserve([reservation(key_of(9, sender=ALICE))])
        await pipe.command("ZADD", keys.skip_key(SUFFIX), 1, 1, 3, 3, 6, 6)
        assert await marks(store, 1) == [(1, 3)]
        assert await marks(store, 6) == [(6, 0)]


@pytest.mark.shows("S9", "G6")
async def test_who_left_reads_and_counts_up_to_the_last_visible_sequence(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        await five_from_alice(store)
        await pipe.command("ZADD", keys.skip_key(SUFFIX), 3, 3, 5, 5)
        for wanted, upper, told in ((1, 4, (1, 2)), (9, 4, (4, 0)), (9, 0, (4, 0)), (2, 9, (4, 0))):
            asked = mark_of(wanted)._replace(upper_seq=Seq(upper))
            assert (await store.mark_read([asked]))[0][1:] == told


async def test_an_unknown_conversation_has_nothing_to_read_and_gets_no_key(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        before = await picture(pipe)
        assert await marks(store, 7) == [(0, 0)]
        assert await picture(pipe) == before


async def test_a_stale_owner_is_told_item_by_item_and_raises_nothing(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        await five_from_alice(store)
        async with opened_other(store_server, slots=[SLOT]):
            pass
        before = await picture(pipe)
        results = await store.mark_read([mark_of(3), mark_of(3, conversation=OTHER, bucket=BucketId(200))])
        assert results == [ReadMarkResult(True, Seq(0), 0), ReadMarkResult(False, Seq(0), 0)]
        assert await picture(pipe) == before


@pytest.mark.parametrize("key", [keys.OWNER, keys.conversation_key(SUFFIX), keys.skip_key(SUFFIX)])
async def test_a_wrong_type_under_any_key_is_refused_before_any_write(
    store_server: StoreServer, key: bytes
) -> None:
    async with opened_store(store_server) as (store, pipe):
        await five_from_alice(store)
        await send_all(store, [reservation(key_of(1, conversation=OTHER, bucket=BucketId(200)))])
        await plant(pipe, key)
        before = await picture(pipe)
        with pytest.raises(StoreBroken):
            await store.mark_read([mark_of(1, conversation=OTHER, bucket=BucketId(200)), mark_of(3)])
        assert await picture(pipe) == before


async def test_a_full_server_still_takes_marks(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        await five_from_alice(store)
        await pipe.command("CONFIG", "SET", "maxmemory", "1mb")
        try:
            assert await marks(store, 3) == [(3, 2)]
        finally:
            await pipe.command("CONFIG", "SET", "maxmemory", "0")

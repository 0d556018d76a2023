"""`read_history` on real servers: the visible head, both directions, every limit, the floor and holes."""

import pytest

from qim.adapters import redis_keys as keys
from qim.adapters.commits_redis import RedisCommitStore
from qim.adapters.redis_pipe import RedisPipe
from qim.errors import StoreBroken
from qim.ids import SEQ_MAX
from qim.ports import HistoryPage
from tests.lua.commit_calls import (
    BUCKET,
    CONVERSATION,
    TENANT,
    commit_of,
    history_of,
    key_of,
    opened_store,
    picture,
    plant,
    reservation,
    send_all,
)
from tests.services import StoreServer

SUFFIX = keys.conversation_suffix(BUCKET, TENANT, CONVERSATION)


async def page_of(
    store: RedisCommitStore,
    *,
    before: int = 0,
    after: int = 0,
    entries_max: int = 50,
    bytes_max: int = 100_000,
) -> HistoryPage:
    query = history_of(before=before, after=after, entries_max=entries_max, bytes_max=bytes_max)
    (page,) = await store.read_history([query])
    return page


def seqs_of(page: HistoryPage) -> list[int]:
    return [seq for seq, _ in page.records]


async def ten_messages(store: RedisCommitStore) -> None:
    await send_all(store, [reservation(key_of(number), text=b"text %d" % number) for number in range(1, 11)])


async def set_floor(pipe: RedisPipe, floor: int) -> None:
    await pipe.command("HSET", keys.floor_key(BUCKET), keys.pack_tenant(TENANT) + CONVERSATION, floor)


async def test_an_unknown_conversation_is_an_empty_page(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, _):
        assert await page_of(store) == HistoryPage((), 1, 0, False)  # type: ignore[arg-type]  # plain values stand for ids


async def test_the_newest_page_comes_newest_first_with_the_stored_bytes(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, _):
        await ten_messages(store)
        page = await page_of(store, entries_max=3)
        assert page.records == tuple((seq, b"record\r\n\x00text %d" % seq) for seq in (10, 9, 8))
        assert (page.head_seq, page.earliest_available_seq, page.more) == (10, 1, True)


@pytest.mark.parametrize(
    ("before", "after", "entries_max", "seqs", "more"),
    [
        (4, 0, 50, [3, 2, 1], False),
        (4, 0, 2, [3, 2], True),
        (1, 0, 50, [], False),
        (99, 0, 2, [10, 9], True),
        (0, 7, 50, [10, 9, 8], False),
        (0, 3, 2, [5, 4], True),
        (0, 10, 50, [], False),
        (0, 8, 2, [10, 9], False),
        (6, 3, 50, [5, 4], False),
        (9, 3, 2, [5, 4], True),
        (3, 5, 50, [], False),
    ],
)
async def test_before_and_after_are_exclusive_and_more_tells_the_truth(
    store_server: StoreServer, before: int, after: int, entries_max: int, seqs: list[int], more: bool
) -> None:
    async with opened_store(store_server) as (store, _):
        await ten_messages(store)
        page = await page_of(store, before=before, after=after, entries_max=entries_max)
        assert (seqs_of(page), page.more) == (seqs, more)


async def test_a_page_ends_at_its_bytes_but_always_holds_one_record(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, _):
        await ten_messages(store)
        assert seqs_of(await page_of(store, bytes_max=1)) == [10]
        assert seqs_of(await page_of(store, bytes_max=32 + 31)) == [10, 9]
        assert seqs_of(await page_of(store, bytes_max=32 + 30)) == [10]


@pytest.mark.shows("X5", "F-04")
async def test_nothing_above_the_visible_head_is_shown(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, _):
        items = [reservation(key_of(number)) for number in range(4)]
        results = await store.reserve(items)
        commits = [commit_of(item, result) for item, result in zip(items, results, strict=True)]
        await store.mark_committed([commits[0], commits[2], commits[3]])
        page = await page_of(store)
        assert (seqs_of(page), page.head_seq, page.more) == ([1], 1, False)
        assert seqs_of(await page_of(store, after=1)) == []
        await store.mark_committed([commits[1]])
        assert seqs_of(await page_of(store)) == [4, 3, 2, 1]


async def test_nothing_at_or_below_the_floor_is_shown(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        await ten_messages(store)
        await set_floor(pipe, 6)
        page = await page_of(store)
        assert (seqs_of(page), page.earliest_available_seq, page.more) == ([10, 9, 8, 7], 7, False)
        assert seqs_of(await page_of(store, after=2)) == [10, 9, 8, 7]
        assert seqs_of(await page_of(store, before=7)) == []


async def test_collected_records_are_passed_over_in_both_directions(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        numbers = range(1, 301)
        for at in range(0, 300, 60):
            await send_all(store, [reservation(key_of(number)) for number in numbers[at : at + 60]])
        await pipe.command("HDEL", keys.record_key(SUFFIX), *range(2, 300))
        page = await page_of(store, entries_max=2)
        assert (seqs_of(page), page.more) == ([300, 1], False)
        page = await page_of(store, before=300, entries_max=1)
        assert (seqs_of(page), page.more) == ([1], False)
        assert seqs_of(await page_of(store, after=1, entries_max=5)) == [300]


async def test_a_long_stretch_of_collected_records_hides_nothing_behind_it(store_server: StoreServer) -> None:
    """More of them than one call looks at: the adapter asks again, and no call blocks the server for long."""
    async with opened_store(store_server) as (store, pipe):
        await send_all(store, [reservation()])
        await pipe.command("HSET", keys.conversation_key(SUFFIX), "n", 9_000, "h", 9_000)
        assert (seqs_of(await page_of(store)), (await page_of(store)).more) == ([1], False)
        await pipe.command("HSET", keys.record_key(SUFFIX), 9_000, "last")
        assert seqs_of(await page_of(store, after=1)) == [9_000]
        page = await page_of(store)
        assert (seqs_of(page), page.more) == ([9_000], True)


async def test_pages_work_at_the_largest_sequence(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        await pipe.command("HSET", keys.conversation_key(SUFFIX), "n", SEQ_MAX - 2, "h", SEQ_MAX - 2)
        await set_floor(pipe, SEQ_MAX - 2)
        await send_all(store, [reservation(key_of(number)) for number in range(2)])
        page = await page_of(store)
        assert (seqs_of(page), page.head_seq) == ([SEQ_MAX, SEQ_MAX - 1], SEQ_MAX)
        assert page.earliest_available_seq == SEQ_MAX - 1
        assert seqs_of(await page_of(store, before=SEQ_MAX)) == [SEQ_MAX - 1]


@pytest.mark.parametrize(
    "key", [keys.conversation_key(SUFFIX), keys.record_key(SUFFIX), keys.floor_key(BUCKET)]
)
async def test_a_wrong_type_is_refused_and_a_read_writes_nothing(
    store_server: StoreServer, key: bytes
) -> None:
    async with opened_store(store_server) as (store, pipe):
        await ten_messages(store)
        before = await picture(pipe)
        await page_of(store)
        assert await picture(pipe) == before
        await plant(pipe, key)
        with pytest.raises(StoreBroken):
            await page_of(store)


async def test_a_full_server_still_shows_its_history(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        await ten_messages(store)
        await pipe.command("CONFIG", "SET", "maxmemory", "1mb")
        try:
            assert len((await page_of(store)).records) == 10
        finally:
            await pipe.command("CONFIG", "SET", "maxmemory", "0")

"""`mark_committed` on real servers: first stamp wins, exact expiry, head and read marks, the time index."""

import pytest

from qim.adapters import redis_keys as keys
from qim.adapters.commits_redis import RedisCommitStore
from qim.errors import StoreBroken, StoreRefused
from qim.ids import SEQ_MAX, BucketId, ConversationId, Seq
from qim.limits import IDEMPOTENCY_WINDOW_MS
from qim.ports import Commit, Committed, ReadMark
from tests.lua.commit_calls import (
    ALICE,
    BOB,
    BUCKET,
    CLOCK,
    CONVERSATION,
    SLOT,
    TENANT,
    commit_of,
    history_of,
    key_of,
    opened_other,
    opened_store,
    picture,
    plant,
    reservation,
    reserve_one,
    send_all,
)
from tests.services import StoreServer
from tests.waiting import eventually_async

SUFFIX = keys.conversation_suffix(BUCKET, TENANT, CONVERSATION)
CONV = b"conv:" + SUFFIX
AHEAD = b"msgahead:" + SUFFIX
OTHER = ConversationId(b"other-conversatn")


async def recorded(store: RedisCommitStore, count: int, *, first: int = 1) -> list[Commit]:
    """Messages that wait for their commit, in the order of their sequences."""
    items = [reservation(key_of(number)) for number in range(first, first + count)]
    results = await store.reserve(items)
    return [commit_of(item, result) for item, result in zip(items, results, strict=True)]


async def head_of(store: RedisCommitStore) -> int:
    (page,) = await store.read_history([history_of()])
    return page.head_seq


@pytest.mark.shows("C6", "X3")
async def test_a_commit_moves_the_fact_to_a_key_that_expires_two_hours_after_its_stamp(
    store_server: StoreServer,
) -> None:
    async with opened_store(store_server) as (store, pipe):
        (commit,) = await recorded(store, 1)
        (result,) = await store.mark_committed([commit])
        assert result.outcome is Committed.COMMITTED
        assert abs(result.committed_at - CLOCK.now_ms()) < 5_000
        key = keys.committed_key(commit.key)
        assert await pipe.command("PEXPIRETIME", key) == result.committed_at + IDEMPOTENCY_WINDOW_MS
        assert IDEMPOTENCY_WINDOW_MS == 7_200_000
        value = keys.pending_value(commit.identity, commit.reserved_at, commit.seq)
        assert await pipe.command("GET", key) == value + result.committed_at.to_bytes(8, "big")
        assert await pipe.command("EXISTS", keys.PENDING) == 0


@pytest.mark.shows("C4", "C6")
async def test_a_repeat_keeps_the_first_stamp_and_changes_nothing(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        commits = await recorded(store, 3)
        first = await store.mark_committed(commits)
        before = await picture(pipe)
        again = await store.mark_committed(commits)
        assert [result.outcome for result in again] == [Committed.ALREADY] * 3
        assert [result.committed_at for result in again] == [result.committed_at for result in first]
        assert await picture(pipe) == before


@pytest.mark.shows("C6")
async def test_the_same_key_twice_in_a_run_is_moved_once(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        (commit,) = await recorded(store, 1)
        other = commit._replace(identity=b"another".ljust(36, b"."))
        results = await store.mark_committed([commit, commit, other])
        assert [result.outcome for result in results] == [
            Committed.COMMITTED, Committed.ALREADY, Committed.NOT_PENDING,
        ]  # fmt: skip
        assert results[0].committed_at == results[1].committed_at
        (hour,) = [name for name in await picture(pipe) if name.startswith(b"msghistory:")]
        assert await pipe.command("LLEN", hour) == 1


@pytest.mark.shows("C6")
async def test_what_is_not_pending_or_pending_with_other_content_is_left_alone(
    store_server: StoreServer,
) -> None:
    async with opened_store(store_server) as (store, pipe):
        (commit,) = await recorded(store, 1)
        before = await picture(pipe)
        unknown = commit._replace(key=key_of(99))
        other_seq = commit._replace(seq=Seq(2))
        results = await store.mark_committed([unknown, other_seq])
        assert [result.outcome for result in results] == [Committed.NOT_PENDING] * 2
        assert [result.committed_at for result in results] == [0, 0]
        assert await picture(pipe) == before


@pytest.mark.shows("X5")
async def test_the_head_waits_for_the_lowest_unfinished_sequence(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        commits = await recorded(store, 5)
        await store.mark_committed([commits[3], commits[1]])
        assert await head_of(store) == 0
        assert await pipe.command("ZRANGE", AHEAD, 0, -1) == [b"2", b"4"]
        await store.mark_committed([commits[0]])
        assert await head_of(store) == 2
        await store.mark_committed([commits[4], commits[2]])
        assert await head_of(store) == 5
        assert await pipe.command("EXISTS", AHEAD) == 0
        more = await recorded(store, 1, first=50)
        await store.mark_committed(more)
        assert await head_of(store) == 6


@pytest.mark.shows("X5")
async def test_a_long_queue_behind_one_unfinished_message_drains_to_its_end(
    store_server: StoreServer,
) -> None:
    """600 sequences wait; each call drains 256 of them and the adapter goes on by itself."""
    async with opened_store(store_server) as (store, pipe):
        commits = await recorded(store, 600)
        await store.mark_committed(commits[1:])
        assert await pipe.command("ZCARD", AHEAD) == 599
        await store.mark_committed(commits[:1])

        async def is_drained() -> bool:
            return await head_of(store) == 600

        await eventually_async(is_drained, what="the head reaches the last sequence")
        assert await pipe.command("EXISTS", AHEAD) == 0


@pytest.mark.shows("X5", "C7")
async def test_head_and_ahead_work_at_the_largest_sequence(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        await pipe.command("HSET", CONV, "n", SEQ_MAX - 2, "h", SEQ_MAX - 2)
        floor_field = keys.pack_tenant(TENANT) + CONVERSATION
        await pipe.command("HSET", keys.floor_key(BUCKET), floor_field, SEQ_MAX - 2)
        commits = await recorded(store, 2)
        assert [commit.seq for commit in commits] == [SEQ_MAX - 1, SEQ_MAX]
        await store.mark_committed(commits[1:])
        assert await head_of(store) == SEQ_MAX - 2
        await store.mark_committed(commits[:1])
        assert await head_of(store) == SEQ_MAX
        (mark,) = await store.mark_read([ReadMark(TENANT, CONVERSATION, BUCKET, ALICE, Seq(1))])
        assert mark.read_seq == SEQ_MAX


async def test_a_send_raises_its_senders_read_mark_and_a_control_message_raises_none(
    store_server: StoreServer,
) -> None:
    async with opened_store(store_server) as (store, pipe):
        items = [
            reservation(key_of(number, sender=sender))
            for number, sender in enumerate([ALICE, BOB, ALICE, BOB])
        ]
        results = await store.reserve(items)
        commits = [commit_of(item, result) for item, result in zip(items, results, strict=True)]
        control = commits[3]._replace(control=True)
        await store.mark_committed([commits[2], commits[0], commits[1], control])
        assert await pipe.command("HMGET", CONV, b"r" + ALICE, b"r" + BOB) == [b"3", b"2"]
        assert await pipe.command("HEXISTS", CONV, "") == 0


async def test_a_late_commit_never_lowers_a_read_mark(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        commits = await recorded(store, 2)
        await store.mark_committed(commits[1:])
        await store.mark_committed(commits[:1])
        assert await pipe.command("HGET", CONV, b"r" + ALICE) == b"2"


@pytest.mark.shows("C3")
async def test_the_time_index_names_each_message_once_with_its_stamp(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        commits = await recorded(store, 2)
        results = await store.mark_committed(commits)
        stamp = results[0].committed_at
        index = await pipe.command("LRANGE", keys.hour_key(stamp // keys.HOUR_MS), 0, -1)
        ids = bytes([BUCKET]) + keys.pack_tenant(TENANT) + CONVERSATION
        assert index == [ids + stamp.to_bytes(8, "big") + b"%d" % seq for seq in (1, 2)]


async def test_the_highest_outbox_offset_is_remembered_and_never_falls(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, _):
        commits = await recorded(store, 3)
        await store.mark_committed([commits[0]._replace(offset=7)])  # type: ignore[arg-type]  # plain values stand for ids
        await store.mark_committed([commits[1]._replace(offset=6)])  # type: ignore[arg-type]  # plain values stand for ids
        await store.mark_committed([commits[2]._replace(offset=-1)])  # type: ignore[arg-type]  # plain values stand for ids
        assert await store.load_outbox_seen([commits[0].partition]) == {3: 7}


@pytest.mark.shows("C6", "F-05")
async def test_a_stale_owner_is_told_item_by_item_and_moves_nothing(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        (commit,) = await recorded(store, 1)
        mine_item = reservation(key_of(1, conversation=OTHER, bucket=BucketId(200)))
        mine = commit_of(mine_item, await reserve_one(store, mine_item))
        async with opened_other(store_server, slots=[SLOT]):
            pass
        before = await picture(pipe)
        assert (await store.mark_committed([commit]))[0].outcome is Committed.STALE_OWNER
        assert await picture(pipe) == before
        results = await store.mark_committed([commit, mine])
        assert [result.outcome for result in results] == [Committed.STALE_OWNER, Committed.COMMITTED]


@pytest.mark.shows("C3", "C6")
@pytest.mark.parametrize(
    "key",
    [
        keys.OWNER, keys.PENDING, keys.LOG_SEEN, b"hour", CONV, AHEAD, keys.committed_key(key_of(2)),
    ],
)  # fmt: skip
async def test_a_wrong_type_under_any_key_is_refused_before_any_write(
    store_server: StoreServer, key: bytes
) -> None:
    async with opened_store(store_server) as (store, pipe):
        commits = await recorded(store, 3)
        hour = CLOCK.now_ms() // keys.HOUR_MS
        for name in [keys.hour_key(hour), keys.hour_key(hour + 1)] if key == b"hour" else [key]:
            await plant(pipe, name)
        before = await picture(pipe)
        with pytest.raises(StoreBroken):
            await store.mark_committed([commits[0], commits[2], commits[1]])
        assert await picture(pipe) == before


async def test_a_caller_whose_clock_is_hours_off_is_refused_before_any_write(
    store_server: StoreServer,
) -> None:
    async with opened_store(store_server) as (store, pipe):
        (commit,) = await recorded(store, 1)
        before = await picture(pipe)
        script_keys, arguments = store._mark_call([commit], CLOCK.now_ms() // keys.HOUR_MS - 4)
        with pytest.raises(StoreRefused, match="clocks differ"):
            await pipe.script("mark_committed", script_keys, arguments)
        assert await picture(pipe) == before


@pytest.mark.shows("C6", "F-12")
async def test_a_full_server_still_finishes_what_it_accepted(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        commits = await recorded(store, 4)
        await pipe.command("CONFIG", "SET", "maxmemory", "1mb")
        try:
            results = await store.mark_committed([commits[1], commits[0], commits[3], commits[2]])
        finally:
            await pipe.command("CONFIG", "SET", "maxmemory", "0")
        assert {result.outcome for result in results} == {Committed.COMMITTED}
        assert await head_of(store) == 4


@pytest.mark.shows("C6")
async def test_a_read_after_the_call_sees_the_commit_without_waiting_for_it(
    store_server: StoreServer,
) -> None:
    async with opened_store(store_server) as (store, _):
        commits = await recorded(store, 2)
        marked = store.mark_committed(commits)
        (page,) = await store.read_history([history_of()])
        assert [seq for seq, _ in page.records] == [2, 1]
        assert marked.done()
        await marked


async def test_a_call_of_many_runs_answers_in_the_order_of_its_items(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, _):
        seqs = await send_all(store, [reservation(key_of(number)) for number in range(200)])
        assert seqs == list(range(1, 201))


@pytest.mark.shows("C3")
async def test_a_wrong_type_under_a_queue_to_be_drained_is_refused_before_any_write(
    store_server: StoreServer,
) -> None:
    """Only the mark in the conversation says that there is a queue; the run itself adds nothing to it."""
    async with opened_store(store_server) as (store, pipe):
        commits = await recorded(store, 2)
        await store.mark_committed(commits[1:])
        await plant(pipe, AHEAD)
        before = await picture(pipe)
        with pytest.raises(StoreBroken):
            await store.mark_committed(commits[:1])
        assert await picture(pipe) == before

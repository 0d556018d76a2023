"""trim_log on real servers: never above a consumer, never part of an entry, never the last one."""

from collections.abc import AsyncIterator

import pytest

from qim.adapters.commitlog_redis import LogName, RedisCommitLog
from qim.adapters.mailbox_keys import WATERMARKS, pack_state
from qim.adapters.redis_keys import position_key
from qim.adapters.redis_pipe import RedisPipe
from qim.errors import StoreBroken
from qim.ids import DispatchId, MailboxSeq, Offset, SlotId
from qim.ports import ShardState
from tests.lua.mailbox_case import IDENTITY, contents, open_pipe
from tests.services import StoreServer

A, B = SlotId(3), SlotId(40)


@pytest.fixture
async def pipe(store_server: StoreServer) -> AsyncIterator[RedisPipe]:
    opened = await open_pipe(store_server)
    await opened.command("FLUSHALL")
    yield opened
    await opened.close()


async def log_of(pipe: RedisPipe, name: LogName = "outbox") -> RedisCommitLog:
    """Two partitions with records 0…5, in entries of one, two and three."""
    log = RedisCommitLog(pipe, name)
    for first, count in ((0, 1), (1, 2), (3, 3)):
        await log.append([(slot, b"%d" % at) for slot in (A, B) for at in range(first, first + count)])
    return log


async def lows(log: RedisCommitLog) -> list[int]:
    marks = await log.watermarks([A, B])
    return [marks[A].low, marks[B].low]


async def test_a_consumer_without_a_position_keeps_everything(pipe: RedisPipe) -> None:
    for name in ("outbox", "dispatch"):
        log = await log_of(pipe, name)
        await log.trim({A: Offset(5), B: Offset(5)})
        assert await lows(log) == [0, 0]


async def test_the_bound_is_held_against_the_stored_position(pipe: RedisPipe) -> None:
    log = await log_of(pipe)
    await pipe.command("HSET", position_key("fanout"), int(A), 2, int(B), 5)
    await log.trim({A: Offset(5), B: Offset(1)})
    assert await lows(log) == [1, 1], "record 2 and its neighbour 1 stay; B's own bound is the lower one"
    before = await contents(pipe)
    await log.trim({A: Offset(5), B: Offset(1)})
    assert await contents(pipe) == before


async def test_the_bound_of_dispatch_is_held_against_w(pipe: RedisPipe) -> None:
    log = await log_of(pipe, "dispatch")
    for slot, watermark in ((A, 103), (B, 99)):
        state = ShardState(MailboxSeq(watermark), MailboxSeq(100), 1, IDENTITY, DispatchId(b"d" * 16))
        await pipe.command("HSET", WATERMARKS, int(slot), pack_state(state))
    await log.trim({A: Offset(5), B: Offset(5)})
    assert await lows(log) == [3, 0]


async def test_the_last_entry_stays_whatever_the_caller_says(pipe: RedisPipe) -> None:
    log = RedisCommitLog(pipe, "outbox", consumers_here=False)
    await log_of(pipe)
    await log.trim({A: Offset(10**12), B: Offset(-1)})
    assert await lows(log) == [3, 0]
    assert await log.append([(A, b"6")]) == [6]


async def test_a_partition_without_stream_is_left_alone(pipe: RedisPipe) -> None:
    log = RedisCommitLog(pipe, "outbox", consumers_here=False)
    await log.trim({A: Offset(5)})
    await log.trim({})
    assert await pipe.command("KEYS", "*") == []


@pytest.mark.parametrize("key", [b"logpos:fanout", b"outbox:{b160}"])
async def test_a_wrong_type_is_refused_before_the_first_write(pipe: RedisPipe, key: bytes) -> None:
    log = await log_of(pipe)
    await pipe.command("HSET", position_key("fanout"), int(A), 5, int(B), 5)
    await pipe.command("SET", key, "text")
    before = await contents(pipe)
    with pytest.raises(StoreBroken):
        await log.trim({A: Offset(5), B: Offset(5)})
    assert await contents(pipe) == before


async def test_a_full_server_can_be_trimmed(pipe: RedisPipe) -> None:
    log = RedisCommitLog(pipe, "outbox", consumers_here=False)
    await log_of(pipe)
    await pipe.command("CONFIG", "SET", "maxmemory", "1")
    try:
        await log.trim({A: Offset(5)})
    finally:
        await pipe.command("CONFIG", "SET", "maxmemory", "0")
    assert await lows(log) == [3, 0]

"""The contract of the commit log, over every medium: dense offsets, readers that wake and skip nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from qim.adapters.commitlog_memory import Fault, MemoryCommitLog
from qim.adapters.commitlog_redis import RedisCommitLog, counter_key
from qim.adapters.lua_scripts import LuaScripts
from qim.adapters.redis_pipe import RedisPipe
from qim.clock import ManualClock, SystemClock
from qim.errors import LogIdentityChanged, OffsetOutOfRange, PartitionStopped, StoreBroken, StoreRefused
from qim.ids import Offset, SlotId
from qim.ports import CommitLog, LogReader, LogRecord, Watermarks
from tests.services import StoreServer

A, B, C = SlotId(0), SlotId(17), SlotId(63)
START = Offset(-1)
IDENTITY = b"identity of log."


class Medium:
    """A log, the same log as another process sees it, and the ways to hurt it."""

    def __init__(self, log: CommitLog, stranger: CommitLog, *, lose: Callable[[], Awaitable[object]]) -> None:
        self.log = log
        self.stranger = stranger
        self.lose = lose
        """Empties the log behind everybody's back."""


async def _pipe(server: StoreServer) -> RedisPipe:
    pipe = RedisPipe(server.url, clock=SystemClock(), scripts=LuaScripts.load())
    await pipe.connect()
    return pipe


@pytest.fixture(params=["memory", "valkey", "valkey-shared", "redis", "redis-shared"])
async def medium(request: pytest.FixtureRequest) -> AsyncIterator[Medium]:
    if request.param == "memory":
        memory = MemoryCommitLog(ManualClock(), identity=IDENTITY)

        async def lose() -> None:
            memory._partitions.clear()

        yield Medium(memory, memory, lose=lose)
        return
    name, _, shared = request.param.partition("-")
    server = request.getfixturevalue(f"{name}_server")
    pipes = [await _pipe(server), await _pipe(server)]
    await pipes[0].command("FLUSHALL")
    log, stranger = (
        RedisCommitLog(pipe, "outbox", shared=bool(shared), url=server.url, consumers_here=False)
        for pipe in pipes
    )
    await log.create_identity(IDENTITY)
    yield Medium(log, stranger, lose=lambda: pipes[0].command("FLUSHALL"))
    await log.close()
    for pipe in pipes:
        await pipe.close()


async def take(reader: LogReader, count: int, *, records_max: int = 512) -> list[LogRecord]:
    """Reads until `count` records came; fails instead of waiting for ever."""
    found: list[LogRecord] = []
    async with asyncio.timeout(5):
        while len(found) < count:
            found += await reader.next_batch(records_max=records_max, bytes_max=1_000_000)
    return found


def data_of(records: list[LogRecord], partition: SlotId = A) -> list[bytes]:
    return [record.data for record in records if record.partition == partition]


@pytest.mark.shows("F5")
async def test_offsets_are_dense_per_partition_whoever_appends(medium: Medium) -> None:
    assert await medium.log.append([(A, b"one"), (B, b"two"), (A, b"three")]) == [0, 0, 1]
    assert await medium.stranger.append([(A, b"four"), (A, b"")]) == [2, 3]
    assert await medium.log.append([(A, b"five")]) == [4]
    assert await medium.log.append([]) == []
    assert await medium.log.watermarks([A, B, C]) == {
        A: Watermarks(Offset(0), Offset(5)),
        B: Watermarks(Offset(0), Offset(1)),
        C: Watermarks(Offset(0), Offset(0)),
    }


@pytest.mark.shows("F5")
async def test_records_come_back_as_they_were_in_the_order_of_their_offsets(medium: Medium) -> None:
    bodies = [b"", b"\0\r\n{}:", bytes(range(256)) * 40, b"last"]
    await medium.log.append([(A, body) for body in bodies])
    reader = medium.log.open_reader({A: START})
    records = await take(reader, 4)
    assert [(record.offset, record.data) for record in records] == list(enumerate(bodies))
    assert await medium.log.read(A, Offset(1), records_max=2) == [
        LogRecord(A, Offset(1), bodies[1]),
        LogRecord(A, Offset(2), bodies[2]),
    ]
    assert await medium.log.read(A, Offset(4), records_max=2) == []
    await reader.close()


async def test_calls_take_effect_in_the_order_they_were_made_without_waiting(medium: Medium) -> None:
    answers = [medium.log.append([(A, b"%d" % n)]) for n in range(20)]
    assert [await answer for answer in answers] == [[n] for n in range(20)]
    records = await medium.log.read(A, Offset(0), records_max=20)
    assert data_of(records) == [b"%d" % n for n in range(20)]


async def test_a_waiting_reader_is_woken_by_its_own_process_at_once(medium: Medium) -> None:
    reader = medium.log.open_reader({A: START, B: START})
    waiting = asyncio.ensure_future(take(reader, 1))
    await medium.log.append([(C, b"not read here")])
    assert not waiting.done()
    started = asyncio.get_running_loop().time()
    await medium.log.append([(B, b"wake")])
    assert await waiting == [LogRecord(B, Offset(0), b"wake")]
    assert asyncio.get_running_loop().time() - started < 0.9, "woken by the sweep, not by the append"
    await reader.close()


async def test_a_reader_finds_what_strangers_append(medium: Medium) -> None:
    reader = medium.log.open_reader({A: START})
    await medium.log.append([(A, b"ours")])
    await medium.stranger.append([(A, b"theirs")])
    await medium.log.append([(A, b"ours again")])
    await medium.stranger.append([(A, b"theirs again")])
    assert data_of(await take(reader, 4)) == [b"ours", b"theirs", b"ours again", b"theirs again"]
    await reader.close()


async def test_a_reader_goes_on_behind_its_position_in_the_middle_of_a_call(medium: Medium) -> None:
    await medium.log.append([(A, b"%d" % n) for n in range(10)])
    reader = medium.log.open_reader({A: Offset(6)})
    assert [record.offset for record in await take(reader, 3)] == [7, 8, 9]
    reader.seek(A, Offset(3))
    assert [record.offset for record in await take(reader, 6)] == [4, 5, 6, 7, 8, 9]
    await reader.close()


@pytest.mark.shows("F5")
async def test_a_trimmed_position_is_out_of_range_and_nothing_is_skipped(medium: Medium) -> None:
    for n in range(6):
        await medium.log.append([(A, b"%d" % n)])
    await medium.log.trim({A: Offset(4), B: Offset(9)})
    assert (await medium.log.watermarks([A]))[A] == Watermarks(Offset(4), Offset(6))
    kept = medium.log.open_reader({A: Offset(3)})
    assert [record.offset for record in await take(kept, 2)] == [4, 5]
    lost = medium.log.open_reader({A: Offset(2)})
    for _ in range(2):
        with pytest.raises(OffsetOutOfRange):
            await take(lost, 1)
    await kept.close()
    await lost.close()


async def test_a_position_above_the_end_is_out_of_range(medium: Medium) -> None:
    await medium.log.append([(A, b"only")])
    reader = medium.log.open_reader({A: Offset(5)})
    with pytest.raises(OffsetOutOfRange):
        await take(reader, 1)
    await reader.close()


async def test_a_log_that_is_lost_under_a_reader_is_out_of_range(medium: Medium) -> None:
    await medium.log.append([(A, b"one"), (A, b"two")])
    reader = medium.log.open_reader({A: START})
    await take(reader, 2)
    waiting = asyncio.ensure_future(take(reader, 1))
    await asyncio.sleep(0)
    await medium.lose()
    if isinstance(medium.log, MemoryCommitLog):
        reader.seek(A, Offset(1))
    with pytest.raises(OffsetOutOfRange):
        await waiting
    await reader.close()


async def test_trim_keeps_the_record_at_the_bound_and_the_rest_of_its_call(medium: Medium) -> None:
    await medium.log.append([(A, b"0"), (A, b"1"), (A, b"2")])
    await medium.log.append([(A, b"3")])
    await medium.log.trim({A: Offset(2)})
    low = (await medium.log.watermarks([A]))[A].low
    assert low <= 2, "the record at the bound stays"
    await medium.log.trim({A: Offset(100)})
    assert (await medium.log.watermarks([A]))[A].high == 4
    assert await medium.log.append([(A, b"4")]) == [4]


async def test_a_paused_partition_waits_alone_and_misses_nothing(medium: Medium) -> None:
    reader = medium.log.open_reader({A: START, B: START})
    await medium.log.append([(A, b"a0"), (B, b"b0")])
    await take(reader, 2)
    reader.pause(A)
    reader.pause(A)
    await medium.log.append([(A, b"a1"), (B, b"b1")])
    await medium.stranger.append([(A, b"a2"), (B, b"b2")])
    records = await take(reader, 2)
    assert data_of(records) == []
    assert data_of(records, B) == [b"b1", b"b2"]
    reader.resume(A)
    assert data_of(await take(reader, 2)) == [b"a1", b"a2"]
    await reader.close()


async def test_a_busy_partition_does_not_starve_a_quiet_one(medium: Medium) -> None:
    await medium.log.append([(A, b"%d" % n) for n in range(100)] + [(B, b"quiet"), (C, b"quiet")])
    reader = medium.log.open_reader({A: START, B: START, C: START})
    first = await take(reader, 30, records_max=30)
    assert {record.partition for record in first} == {A, B, C}
    rest = await take(reader, 72, records_max=30)
    assert data_of(first) + data_of(rest) == [b"%d" % n for n in range(100)]
    await reader.close()


async def test_a_batch_ends_at_its_bounds_and_holds_at_least_one_record(medium: Medium) -> None:
    await medium.log.append([(A, b"x" * 1000) for _ in range(5)])
    reader = medium.log.open_reader({A: START})
    sizes = [len(await reader.next_batch(records_max=2, bytes_max=10_000))]
    sizes.append(len(await reader.next_batch(records_max=9, bytes_max=2_500)))
    sizes.append(len(await reader.next_batch(records_max=9, bytes_max=10)))
    assert sizes == [2, 2, 1]
    await reader.close()


async def test_a_closed_reader_gives_an_empty_batch_also_to_who_waits(medium: Medium) -> None:
    reader = medium.log.open_reader({A: START})
    waiting = asyncio.ensure_future(reader.next_batch(records_max=1, bytes_max=1))
    await medium.log.watermarks([A])
    await reader.close()
    async with asyncio.timeout(5):
        assert await waiting == []
    assert await reader.next_batch(records_max=1, bytes_max=1) == []


async def test_two_readers_of_one_process_read_the_same(medium: Medium) -> None:
    readers = [medium.log.open_reader({A: START}) for _ in range(2)]
    await medium.log.append([(A, b"one")])
    await medium.log.append([(A, b"two")])
    for reader in readers:
        assert data_of(await take(reader, 2)) == [b"one", b"two"]
        await reader.close()


async def test_the_identity_is_the_one_given_at_creation(medium: Medium) -> None:
    assert await medium.stranger.identity() == IDENTITY


async def test_a_log_without_identity_is_refused(fresh_valkey: StoreServer) -> None:
    pipe = await _pipe(fresh_valkey)
    with pytest.raises(LogIdentityChanged):
        await RedisCommitLog(pipe, "dispatch").identity()
    await pipe.close()


async def test_the_memory_log_shows_every_outcome_of_an_append() -> None:
    log = MemoryCommitLog(ManualClock())
    log.faults.extend([Fault.REFUSED, Fault.LOST, Fault.UNANSWERED, Fault.DOUBLED])
    with pytest.raises(StoreRefused):
        await log.append([(A, b"refused")])
    assert await log.append([(A, b"lost")]) == [None]
    assert await log.append([(A, b"unanswered")]) == [None]
    assert await log.append([(A, b"doubled")]) == [2]
    assert await log.append([(A, b"fine")]) == [3]
    assert data_of(await log.read(A, Offset(0), records_max=9)) == [
        b"unanswered", b"doubled", b"doubled", b"fine",
    ]  # fmt: skip
    assert len(log.struck) == 4


async def test_a_tail_that_is_too_small_is_fetched_from_the_server(valkey_server: StoreServer) -> None:
    pipe = await _pipe(valkey_server)
    await pipe.command("FLUSHALL")
    log = RedisCommitLog(pipe, "outbox", tail_bytes_max=1000, consumers_here=False)
    reader = log.open_reader({A: START})
    first = asyncio.ensure_future(take(reader, 1))
    await log.append([(A, b"first")])
    await first
    for n in range(40):
        await log.append([(A, b"%d" % n + b"x" * 300)])
    assert [record.offset for record in await take(reader, 40)] == list(range(1, 41))
    await reader.close()
    await pipe.close()


async def test_a_tail_keeps_nothing_that_was_read_or_that_nobody_reads(valkey_server: StoreServer) -> None:
    pipe = await _pipe(valkey_server)
    await pipe.command("FLUSHALL")
    log = RedisCommitLog(pipe, "outbox", consumers_here=False)
    reader = log.open_reader({A: START})
    await log.append([(A, b"read"), (B, b"unread")])
    await take(reader, 1)
    await log.append([(A, b"read")])
    await take(reader, 1)
    assert log.tail._bytes <= len(b"read")
    await reader.close()
    assert log.tail._bytes == 0
    await pipe.close()


async def test_an_unknown_append_answers_none_and_a_stopped_server_refuses(fresh_valkey: StoreServer) -> None:
    pipe = RedisPipe(fresh_valkey.url, clock=SystemClock(), scripts=LuaScripts.load(), timeout_ms=300)
    await pipe.connect()
    log = RedisCommitLog(pipe, "outbox")
    await pipe.command("CLIENT", "PAUSE", "1000")
    assert await log.append([(A, b"unknown"), (B, b"unknown")]) == [None, None]
    with pytest.raises(StoreRefused):
        await log.append([(A, b"refused")])
    await pipe.close()


async def test_a_counter_that_contradicts_its_stream_breaks_its_partition_alone(
    store_server: StoreServer,
) -> None:
    pipe = await _pipe(store_server)
    await pipe.command("FLUSHALL")
    log = RedisCommitLog(pipe, "outbox")
    await log.append([(A, b"one"), (B, b"one")])
    await pipe.command("DEL", log.keys[A])
    with pytest.raises(StoreBroken):
        await log.append([(A, b"two"), (B, b"two")])
    assert await pipe.command("EXISTS", log.keys[A]) == 0
    assert data_of(await log.read(B, Offset(0), records_max=9), B) == [b"one", b"two"]
    await pipe.command("HDEL", counter_key("outbox"), int(A), int(B))
    assert await log.append([(B, b"three")]) == [2]
    await pipe.close()


async def _hurt_a_key(pipe: RedisPipe, key: bytes) -> None:
    await pipe.command("DEL", key)
    await pipe.command("SET", key, "no stream")


async def _hurt_an_entry(pipe: RedisPipe, key: bytes) -> None:
    await pipe.command("DEL", key)
    await pipe.command("XADD", key, "1-0", "none of", "ours")


@pytest.mark.shows("F-34", "X9")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("hurt", [_hurt_a_key, _hurt_an_entry])
async def test_a_partition_that_cannot_be_read_is_named_and_the_others_are_read_on(
    store_server: StoreServer, hurt: Callable[[RedisPipe, bytes], Awaitable[None]], shared: bool
) -> None:
    pipe = await _pipe(store_server)
    await pipe.command("FLUSHALL")
    other_process = RedisCommitLog(pipe, "outbox")
    log = RedisCommitLog(pipe, "outbox", shared=shared, url=store_server.url)
    await other_process.append([(A, b"one"), (B, b"one"), (C, b"one")])
    await hurt(pipe, log.keys[A])
    assert (await log.watermarks([A, B])).keys() == {B}
    reader = log.open_reader({A: START, B: START, C: START})
    found: list[LogRecord] = []
    stopped: list[int | None] = []
    async with asyncio.timeout(5):
        while len(found) < 4 or not stopped:
            try:
                found += await reader.next_batch(records_max=9, bytes_max=1_000_000)
            except PartitionStopped as error:
                stopped.append(error.partition)
                reader.pause(A)
                await other_process.append([(B, b"two"), (C, b"two")])
    assert stopped == [A]
    assert data_of(found, B) == data_of(found, C) == [b"one", b"two"]
    await reader.close()
    await log.close()
    await pipe.close()


@pytest.mark.shows("F-34", "X9")
async def test_what_stands_in_front_of_a_bad_entry_is_handed_out_before_it_is_told_of(
    store_server: StoreServer,
) -> None:
    pipe = await _pipe(store_server)
    await pipe.command("FLUSHALL")
    log = RedisCommitLog(pipe, "outbox")
    await RedisCommitLog(pipe, "outbox").append([(A, b"one"), (A, b"two")])
    await pipe.command("XADD", log.keys[A], "3-0", "none of", "ours")
    reader = log.open_reader({A: START})
    assert data_of(await take(reader, 2)) == [b"one", b"two"]
    with pytest.raises(PartitionStopped):
        await take(reader, 1)
    await reader.close()
    await pipe.close()


async def test_a_counter_that_is_no_number_is_read_from_the_stream(store_server: StoreServer) -> None:
    pipe = await _pipe(store_server)
    await pipe.command("FLUSHALL")
    log = RedisCommitLog(pipe, "outbox")
    await log.append([(A, b"one")])
    await pipe.command("HSET", counter_key("outbox"), int(A), "garbage")
    assert await log.load_ends([A]) == {A: 1}
    await pipe.close()

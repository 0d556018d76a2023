"""The queues between a role and its store, filled against a real server that stands still."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from qim.adapters.commitlog_cursor import ReadAhead
from qim.adapters.commitlog_reader import RedisLogReader
from qim.adapters.commitlog_redis import RedisCommitLog
from qim.adapters.lua_scripts import LuaScripts
from qim.adapters.mailbox_redis import RedisMailboxStore
from qim.adapters.redis_pipe import RedisPipe
from qim.clock import SystemClock
from qim.errors import StoreRefused
from qim.ids import Offset, SlotId
from qim.limits import (
    LOG_READ_BYTES_MAX,
    LOG_TAIL_BYTES_MAX,
    MAILBOX_KEYS_REMEMBERED_MAX,
    SLOTS,
    STORE_INFLIGHT_COMMANDS_MAX,
    STORE_UNSENT_BYTES_MAX,
)
from tests.services import StoreServer

MEGABYTE = 1_048_576


@asynccontextmanager
async def connected(server: StoreServer) -> AsyncIterator[RedisPipe]:
    pipe = RedisPipe(server.url, clock=SystemClock(), scripts=LuaScripts.load(), timeout_ms=30_000)
    await pipe.connect()
    try:
        yield pipe
    finally:
        await pipe.close()


@contextmanager
def standing_still(server: StoreServer) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def test_a_pipe_with_too_many_commands_refuses_the_next_and_goes_on(fresh_valkey: StoreServer) -> None:
    async with connected(fresh_valkey) as pipe:
        with standing_still(fresh_valkey):
            taken = [pipe.command("INCR", "count") for _command in range(STORE_INFLIGHT_COMMANDS_MAX)]
            with pytest.raises(StoreRefused, match="too much in flight"):
                await pipe.command("INCR", "count")
        assert await asyncio.gather(*taken) == [*range(1, STORE_INFLIGHT_COMMANDS_MAX + 1)]
        assert await pipe.command("INCR", "count") == STORE_INFLIGHT_COMMANDS_MAX + 1


async def test_a_pipe_with_too_many_bytes_refuses_the_next_and_goes_on(fresh_valkey: StoreServer) -> None:
    key = bytes(MEGABYTE)
    async with connected(fresh_valkey) as pipe:
        with standing_still(fresh_valkey):
            # What the socket and its buffers take first does not count as waiting.
            taken = []
            refused: StoreRefused | None = None
            while refused is None:
                command = pipe.command("EXISTS", key)
                await asyncio.sleep(0)
                if command.done():
                    refused = command.exception()  # type: ignore[assignment]  # nothing else ends it here
                else:
                    taken.append(command)
                assert len(taken) * MEGABYTE < 2 * STORE_UNSENT_BYTES_MAX
            assert isinstance(refused, StoreRefused)
            assert len(taken) * MEGABYTE >= STORE_UNSENT_BYTES_MAX
        assert await asyncio.gather(*taken) == [0] * len(taken)
        assert await pipe.command("EXISTS", key) == 0


async def test_a_reader_behind_a_full_tail_gets_every_record(fresh_valkey: StoreServer) -> None:
    async with connected(fresh_valkey) as pipe:
        log = RedisCommitLog(pipe, "outbox", consumers_here=False)
        slots = [SlotId(0), SlotId(1)]
        reader = log.open_reader(dict.fromkeys(slots, Offset(-1)))
        count = 2 + LOG_TAIL_BYTES_MAX // MEGABYTE
        for number in range(count):
            await log.append([(slot, bytes([number]) * MEGABYTE) for slot in slots])
            assert log.tail._bytes <= LOG_TAIL_BYTES_MAX
        assert len(log.tail._chunks[slots[0]]) < count, "nothing was thrown out"
        found: dict[SlotId, list[int]] = {slot: [] for slot in slots}
        while any(len(numbers) < count for numbers in found.values()):
            async with asyncio.timeout(10):
                for record in await reader.next_batch(records_max=512, bytes_max=4 * MEGABYTE):
                    found[record.partition].append(record.data[0])
        assert found == {slot: [*range(count)] for slot in slots}
        await reader.close()


def _held(reader: RedisLogReader) -> int:
    """Bytes that were fetched and not handed out."""
    return sum(len(one.data) for cursor in reader._cursors.by_partition.values() for one in cursor.buffer)


@pytest.mark.parametrize("shared", [False, True])
async def test_what_a_reader_fetches_ahead_weighs_no_more_than_a_batch(
    fresh_valkey: StoreServer, *, shared: bool
) -> None:
    entry_bytes, entries = 65_536, 8
    slots = [SlotId(slot) for slot in range(SLOTS)]
    async with connected(fresh_valkey) as pipe:
        stranger = RedisCommitLog(pipe, "outbox", consumers_here=False)
        for _ in range(entries):
            await stranger.append([(slot, bytes(entry_bytes)) for slot in slots])
        log = RedisCommitLog(pipe, "outbox", shared=shared, url=fresh_valkey.url, consumers_here=False)
        reader = log.open_reader(dict.fromkeys(slots, Offset(-1)))
        found: Counter[SlotId] = Counter()
        most = 0
        while found.total() < SLOTS * entries:
            async with asyncio.timeout(10):
                batch = await reader.next_batch(records_max=1, bytes_max=MEGABYTE)
            most = max(most, _held(reader) + entry_bytes)
            found.update(record.partition for record in batch)
        assert most <= LOG_READ_BYTES_MAX
        assert most > LOG_READ_BYTES_MAX // 2, "far too few are fetched at once"
        assert set(found.values()) == {entries}
        await reader.close()
        await log.close()


async def test_entries_larger_than_the_bound_are_read_one_by_one_and_no_partition_starves(
    fresh_valkey: StoreServer,
) -> None:
    slots = [SlotId(slot) for slot in range(4)]
    async with connected(fresh_valkey) as pipe:
        stranger = RedisCommitLog(pipe, "outbox", consumers_here=False)
        for _ in range(20):
            await stranger.append([(slot, bytes(1_000)) for slot in slots for _twin in range(2)])
        reader = RedisCommitLog(pipe, "outbox").open_reader(dict.fromkeys(slots, Offset(-1)))
        reader._ahead = ReadAhead(100)
        order: list[SlotId] = []
        while len(order) < 160:
            async with asyncio.timeout(10):
                batch = await reader.next_batch(records_max=1, bytes_max=MEGABYTE)
            order += [record.partition for record in batch]
            assert len(order) <= 16 or _held(reader) <= 1_000, "more than one entry at a time"
        assert all(set(order[at : at + 16]) == set(slots) for at in range(0, 160, 16))
        await reader.close()


async def test_a_paused_partition_holds_nothing_and_goes_on_where_it_stood(fresh_valkey: StoreServer) -> None:
    async with connected(fresh_valkey) as pipe:
        stranger = RedisCommitLog(pipe, "outbox", consumers_here=False)
        await stranger.append([(SlotId(0), b"%d" % number) for number in range(5)])
        reader = RedisCommitLog(pipe, "outbox").open_reader({SlotId(0): Offset(-1)})
        (first,) = await reader.next_batch(records_max=1, bytes_max=MEGABYTE)
        assert _held(reader) == 4
        reader.pause(SlotId(0))
        assert _held(reader) == 0
        reader.resume(SlotId(0))
        rest = await reader.next_batch(records_max=9, bytes_max=MEGABYTE)
        assert [record.data for record in (first, *rest)] == [b"%d" % number for number in range(5)]
        await reader.close()


async def test_mailbox_keys_are_remembered_up_to_the_bound(fresh_valkey: StoreServer) -> None:
    async with connected(fresh_valkey) as pipe:
        store = RedisMailboxStore(pipe, SystemClock())
        for number in range(MAILBOX_KEYS_REMEMBERED_MAX + 100):
            store._remember_keys([b"%d" % number])
            assert len(store._keys_with_expiry) <= MAILBOX_KEYS_REMEMBERED_MAX
        assert b"%d" % (MAILBOX_KEYS_REMEMBERED_MAX + 99) in store._keys_with_expiry

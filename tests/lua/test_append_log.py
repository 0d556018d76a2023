"""append_log on real servers: dense offsets, one entry per partition and call, never a hole."""

from collections.abc import AsyncIterator

import pytest

from qim.adapters.commitlog_redis import RedisCommitLog, counter_key, pack_records
from qim.adapters.redis_pipe import RedisPipe
from qim.errors import StoreBroken
from qim.ids import Offset, SlotId
from tests.lua.mailbox_case import contents, open_pipe
from tests.services import StoreServer

A, B = SlotId(3), SlotId(40)
COUNTERS = counter_key("dispatch")
Opened = tuple[RedisPipe, RedisCommitLog]


@pytest.fixture
async def opened(store_server: StoreServer) -> AsyncIterator[Opened]:
    pipe = await open_pipe(store_server)
    await pipe.command("FLUSHALL")
    yield pipe, RedisCommitLog(pipe, "dispatch")
    await pipe.close()


@pytest.mark.shows("F5")
async def test_a_call_is_one_entry_per_partition_whose_id_is_the_next_offset(opened: Opened) -> None:
    pipe, log = opened
    hostile = b"{s03}:\0\r\n*"
    assert await log.append([(A, b"one"), (B, hostile), (A, b"")]) == [0, 0, 1]
    assert await log.append([(A, b"three")]) == [2]
    assert await pipe.command("XRANGE", b"dispatch:{s03}", "-", "+") == [
        [b"2-0", [b"n", b"2", b"r", pack_records([b"one", b""])]],
        [b"3-0", [b"n", b"1", b"r", pack_records([b"three"])]],
    ]
    assert await pipe.command("HGETALL", COUNTERS) == [b"3", b"3", b"40", b"1"]
    assert [record.data for record in await log.read(B, Offset(0), records_max=9)] == [hostile]


async def test_the_same_record_appended_again_is_a_second_record(opened: Opened) -> None:
    """An unknown outcome is settled by appending again; the readers find both."""
    _, log = opened
    assert await log.append([(A, b"same")]) == [0]
    assert await log.append([(A, b"same")]) == [1]


@pytest.mark.shows("F5")
async def test_a_lost_counter_is_read_back_from_its_stream(opened: Opened) -> None:
    pipe, log = opened
    await log.append([(A, b"one"), (A, b"two"), (B, b"one")])
    await log.append([(A, b"three")])
    await log.append([(A, b"four")])
    await log.trim({A: Offset(3)})
    await pipe.command("DEL", COUNTERS)
    assert await log.append([(A, b"five"), (B, b"two")]) == [4, 1]


@pytest.mark.shows("F5")
async def test_a_stream_that_was_made_anew_refuses_its_partition_and_no_other(opened: Opened) -> None:
    pipe, log = opened
    await log.append([(A, b"one"), (B, b"one")])
    await pipe.command("DEL", b"dispatch:{s03}")
    with pytest.raises(StoreBroken):
        await log.append([(A, b"two"), (B, b"two")])
    assert await pipe.command("HGETALL", COUNTERS) == [b"3", b"1", b"40", b"2"]
    assert await pipe.command("EXISTS", b"dispatch:{s03}") == 0


@pytest.mark.shows("F5")
@pytest.mark.parametrize("records", [1, 4])
async def test_a_counter_that_fell_behind_its_stream_overwrites_nothing(opened: Opened, records: int) -> None:
    """However long the run is: one that reaches beyond the stream's end would be taken by XADD itself."""
    pipe, log = opened
    await log.append([(A, b"one"), (A, b"two"), (A, b"three")])
    await pipe.command("HSET", COUNTERS, int(A), 1)
    before = await contents(pipe)
    with pytest.raises(StoreBroken):
        await log.append([(A, b"again")] * records)
    assert await contents(pipe) == before


@pytest.mark.parametrize("key", [COUNTERS, b"dispatch:{s40}"])
async def test_a_wrong_type_is_refused_before_the_first_write(opened: Opened, key: bytes) -> None:
    pipe, log = opened
    await pipe.command("SET", key, "text")
    with pytest.raises(StoreBroken):
        await log.append([(A, b"one"), (B, b"one")])
    assert await pipe.command("KEYS", "*") == [key]


async def test_a_full_server_still_takes_what_was_accepted(opened: Opened) -> None:
    pipe, log = opened
    await pipe.command("CONFIG", "SET", "maxmemory", "1")
    try:
        assert await log.append([(A, b"one")]) == [0]
    finally:
        await pipe.command("CONFIG", "SET", "maxmemory", "0")


async def test_all_partitions_fit_into_one_call(opened: Opened) -> None:
    _, log = opened
    records = [(SlotId(slot), b"%d" % slot) for _ in range(8) for slot in range(64)]
    offsets = await log.append(records)
    assert offsets == [at for at in range(8) for _ in range(64)]

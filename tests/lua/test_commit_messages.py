"""`commit_messages` on real servers: in one step what takes three scripts elsewhere.

The two ways are compared by the keys that they leave behind. What the script leaves to the long way writes
nothing, and neither does anything that it refuses.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from msgspec import structs

from qim.adapters import redis_keys as keys
from qim.adapters.commitlog_redis import RedisCommitLog
from qim.adapters.commits_one_step_redis import RedisOneStepCommits
from qim.adapters.commits_redis import RedisCommitStore
from qim.adapters.redis_pipe import RedisPipe
from qim.errors import StoreBroken
from qim.ids import SEQ_MAX, BucketId, ConversationId, Offset, Seq, SlotId
from qim.limits import CLOCK_SKEW_MS_MAX, IDEMPOTENCY_WINDOW_MS
from qim.ports import Commit, Reservation, Reserved, ReserveResult
from qim.records import OUTBOX_FRAME_BYTES, fill_outbox_frame
from tests.lua.commit_calls import (
    ALICE,
    BOB,
    BUCKET,
    CLOCK,
    CONVERSATION,
    TENANT,
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
HOME = SlotId(3)
STREAM = b"outbox:{b012}"


class OneServer(NamedTuple):
    store: RedisCommitStore
    outbox: RedisCommitLog
    commits: RedisOneStepCommits
    pipe: RedisPipe


@asynccontextmanager
async def opened(server: StoreServer) -> AsyncIterator[OneServer]:
    """Every slot is owned; the server holds the conversations and the Outbox."""
    async with opened_store(server) as (store, pipe):
        outbox = RedisCommitLog(pipe, "outbox")
        yield OneServer(store, outbox, RedisOneStepCommits(store, outbox, CLOCK), pipe)


def framed(item: Reservation) -> Reservation:
    """With a frame that names its bucket where the script looks for it."""
    return structs.replace(
        item, outbox_frame=b"\x02\x01\x00" + bytes([item.key.bucket]) + b"f" * (OUTBOX_FRAME_BYTES - 4)
    )


def items_of(*numbers: int, **changes: Any) -> list[Reservation]:
    return [framed(reservation(key_of(number), **changes)) for number in numbers]


async def commit(server: OneServer, *items: Reservation) -> list[ReserveResult]:
    return await server.commits.commit(items, HOME)


async def two_steps(server: OneServer, *items: Reservation) -> None:
    """The long way of the same messages."""
    results = await server.store.reserve(items)
    records = [record_of(item, result.seq) for item, result in zip(items, results, strict=True)]
    offsets = await server.outbox.append([(HOME, record) for record in records])
    commits = []
    for item, result, offset in zip(items, results, offsets, strict=True):
        assert offset is not None
        commits.append(
            Commit(item.key, item.identity, result.seq, result.reserved_at, False, HOME, Offset(offset))
        )
    await server.store.mark_committed(commits)


def record_of(item: Reservation, seq: Seq) -> bytes:
    return fill_outbox_frame(item.outbox_frame, seq=seq, record_bytes=item.record)


def without_stamps(found: dict[bytes, tuple[Any, int]]) -> dict[bytes, tuple[Any, int]]:
    """A picture without the times of its commits; an expiry counts as set or not set."""
    plain = {}
    for name, (value, expiry) in found.items():
        if name == b"owner":  # stamped by the claim
            continue
        shown = value
        if name.startswith(b"cmidown:"):
            shown = value[:-8]
        elif name.startswith(b"msghistory:"):
            shown = [element[:21] + element[29:] for element in value]
        plain[name] = (shown, min(expiry, 0))
    return plain


@pytest.mark.shows("C3", "C6", "C7", "C8")
async def test_one_step_leaves_exactly_what_two_steps_leave(store_server: StoreServer) -> None:
    items = [
        *items_of(1, 2),
        framed(reservation(key_of(3, sender=BOB), expires_at=9_999_999_999_999)),
        framed(reservation(key_of(4, conversation=OTHER, bucket=BucketId(200)))),
        *items_of(5),
    ]
    async with opened(store_server) as server:
        await two_steps(server, *items)
        expected = without_stamps(await picture(server.pipe))
    async with opened(store_server) as server:
        results = await commit(server, *items)
        assert [(result.outcome, result.seq) for result in results] == [
            (Reserved.DURABLE, seq) for seq in (1, 2, 3, 1, 4)
        ]
        found = await picture(server.pipe)
        # The one key that only the long way has ever touched is empty by now, so it is in neither picture.
        assert without_stamps(found) == expected
        value, expiry = found[keys.committed_key(items[0].key)]
        assert expiry == int.from_bytes(value[-8:], "big") + IDEMPOTENCY_WINDOW_MS


@pytest.mark.shows("F5")
@pytest.mark.parametrize("last", [0, 126, 127, 255, 65_535, 2**32 - 1, 2**32, SEQ_MAX - 1])
async def test_the_server_builds_the_record_that_the_writer_would_build(
    store_server: StoreServer, last: int
) -> None:
    async with opened(store_server) as server:
        if last:
            await server.pipe.command("HSET", b"conv:" + SUFFIX, "n", str(last), "h", str(last))
        (item,) = items_of(1)
        (result,) = await commit(server, item)
        assert (result.outcome, result.seq) == (Reserved.DURABLE, last + 1)
        (stored,) = await server.outbox.read(HOME, Offset(0), records_max=2)
        assert stored.data == record_of(item, result.seq)


async def test_readers_here_take_from_memory_what_one_step_appended(store_server: StoreServer) -> None:
    async with opened(store_server) as server:
        reader = server.outbox.open_reader({HOME: Offset(-1)})
        items = items_of(1, 2, 3)
        await commit(server, *items)
        batch = await reader.next_batch(records_max=10, bytes_max=1_000_000)
        assert [record.offset for record in batch] == [0, 1, 2]
        assert [record.data for record in batch] == [
            record_of(item, Seq(seq)) for seq, item in enumerate(items, 1)
        ]
        await reader.close()


@pytest.mark.shows("C4", "X16")
async def test_a_repeat_gets_its_coordinates_and_writes_nothing(store_server: StoreServer) -> None:
    async with opened(store_server) as server:
        (item,) = items_of(1)
        await commit(server, item)
        before = await picture(server.pipe)
        later = structs.replace(item, record=b"newly built")
        results = await commit(server, later, item)
        assert [(result.outcome, result.seq) for result in results] == [(Reserved.COMMITTED, 1)] * 2
        assert {result.reserved_at for result in results} == {item.reserved_at}
        assert await picture(server.pipe) == before


@pytest.mark.shows("C4", "C5")
async def test_the_same_key_twice_in_a_run_meets_its_earlier_twin(store_server: StoreServer) -> None:
    async with opened(store_server) as server:
        (first, other) = (*items_of(1, text=b"one"), *items_of(1, text=b"two"))
        results = await commit(server, first, first, other, *items_of(2))
        assert [result.outcome for result in results] == [
            Reserved.DURABLE, Reserved.COMMITTED, Reserved.CONFLICT, Reserved.DURABLE,
        ]  # fmt: skip
        assert [result.seq for result in results] == [1, 1, 0, 2]


@pytest.mark.shows("C5", "X16")
async def test_a_refusal_consumes_no_sequence_and_writes_nothing(store_server: StoreServer) -> None:
    async with opened(store_server) as server:
        await commit(server, *items_of(1, text=b"one"))
        before = await picture(server.pipe)
        off = CLOCK.now_ms() + 2 * CLOCK_SKEW_MS_MAX
        results = await commit(server, *items_of(1, text=b"two"), *items_of(2, reserved_at=off))
        assert [result.outcome for result in results] == [Reserved.CONFLICT, Reserved.CLOCK]
        assert await picture(server.pipe) == before
        await server.pipe.command("HSET", b"conv:" + SUFFIX, "n", str(SEQ_MAX), "h", str(SEQ_MAX))
        before = await picture(server.pipe)
        assert [result.outcome for result in await commit(server, *items_of(3))] == [Reserved.EXHAUSTED]
        assert await picture(server.pipe) == before


@pytest.mark.shows("C7", "X16", "F-05")
async def test_a_stale_owner_is_told_and_writes_nothing(store_server: StoreServer) -> None:
    async with opened(store_server) as server, opened_other(store_server):
        before = await picture(server.pipe)
        results = await commit(server, *items_of(1, 2))
        assert {result.outcome for result in results} == {Reserved.STALE_OWNER}
        assert await picture(server.pipe) == before


@pytest.mark.shows("C7", "X5")
async def test_an_unfinished_message_sends_its_conversation_the_long_way_and_no_other(
    store_server: StoreServer,
) -> None:
    async with opened(store_server) as server:
        (recorded, later) = items_of(1, 2)
        await reserve_one(server.store, recorded)
        elsewhere = framed(reservation(key_of(3, conversation=OTHER, bucket=BucketId(200))))
        results = await commit(server, recorded, later, elsewhere)
        assert [result.outcome for result in results] == [
            Reserved.RECORDED, Reserved.TWO_STEPS, Reserved.DURABLE,
        ]  # fmt: skip
        assert (results[0].seq, results[0].record) == (1, recorded.record)
        assert await server.pipe.command("HGET", b"conv:" + SUFFIX, "n") == b"1"


@pytest.mark.parametrize(
    "broken",
    ["counter without stream", "counter behind", "counter lost", "counter is text", "counters are no hash",
     "stream is text"],
)  # fmt: skip
async def test_an_outbox_that_contradicts_its_counter_is_left_to_the_long_way(
    store_server: StoreServer, broken: str
) -> None:
    async with opened(store_server) as server:
        await commit(server, *items_of(1, 2))
        if broken == "counter without stream":
            await server.pipe.command("DEL", STREAM)
        elif broken == "counter behind":
            await server.pipe.command("HSET", "lognext:outbox", str(HOME), "1")
        elif broken == "counter lost":
            await server.pipe.command("HDEL", "lognext:outbox", str(HOME))
        elif broken == "counter is text":
            await server.pipe.command("HSET", "lognext:outbox", str(HOME), "text")
        else:
            await server.pipe.command(
                "SET", STREAM if broken == "stream is text" else "lognext:outbox", "text"
            )
        before = await picture(server.pipe)
        results = await commit(server, *items_of(3, 4), *items_of(1))
        assert [result.outcome for result in results] == [
            Reserved.TWO_STEPS, Reserved.TWO_STEPS, Reserved.COMMITTED,
        ]  # fmt: skip
        assert await picture(server.pipe) == before


@pytest.mark.shows("C2", "C4")
async def test_a_twin_of_what_the_stream_refused_is_not_taken_for_written(store_server: StoreServer) -> None:
    async with opened(store_server) as server:
        await commit(server, *items_of(1, 2, 3))
        await server.pipe.command("XSETID", STREAM, "9-0")  # its last id is above, and no entry shows it
        before = await picture(server.pipe)
        (item, other) = (*items_of(7, text=b"one"), *items_of(7, text=b"two"))
        results = await commit(server, item, item, other)
        assert [result.outcome for result in results] == [Reserved.TWO_STEPS] * 3
        assert await picture(server.pipe) == before


@pytest.mark.shows("C4")
async def test_what_is_committed_is_known_as_committed_whatever_else_is_left_of_it(
    store_server: StoreServer,
) -> None:
    async with opened(store_server) as server:
        (item,) = items_of(1)
        await commit(server, item)
        left = keys.pending_value(item.identity, item.reserved_at, Seq(1))
        await server.pipe.command("HSET", keys.PENDING, keys.pending_field(item.key), left)
        (result,) = await commit(server, item)
        assert (result.outcome, result.seq) == (Reserved.COMMITTED, 1)


@pytest.mark.shows("C3", "X9", "X16")
@pytest.mark.parametrize(
    "name",
    [
        b"owner", b"msgpending", b"logseen", b"conv:" + SUFFIX,
        b"msgrecord:" + SUFFIX, keys.committed_key(key_of(2)), b"msghistorygc:{b041}", b"hour",
    ],
)  # fmt: skip
async def test_a_wrong_type_under_any_key_is_refused_before_any_write(
    store_server: StoreServer, name: bytes
) -> None:
    async with opened(store_server) as server:
        await commit(server, *items_of(1))
        hours = [CLOCK.now_ms() // keys.HOUR_MS + more for more in (0, 1)]
        for planted in map(keys.hour_key, hours) if name == b"hour" else [name]:
            await plant(server.pipe, planted)
        before = await picture(server.pipe)
        with pytest.raises(StoreBroken):
            await commit(server, *items_of(2, expires_at=9_999_999_999_999), *items_of(3))
        assert await picture(server.pipe) == before


@pytest.mark.shows("F-12", "X16")
async def test_a_full_server_refuses_the_run_whole(store_server: StoreServer) -> None:
    async with opened(store_server) as server:
        await commit(server, *items_of(1))
        before = await picture(server.pipe)
        await server.pipe.command("CONFIG", "SET", "maxmemory", "1")
        try:
            results = await commit(server, *items_of(2, 3))
        finally:
            await server.pipe.command("CONFIG", "SET", "maxmemory", "0")
        assert {result.outcome for result in results} == {Reserved.FULL}
        assert await picture(server.pipe) == before


async def test_read_marks_of_senders_rise_with_their_messages(store_server: StoreServer) -> None:
    async with opened(store_server) as server:
        await commit(server, *items_of(1, 2), framed(reservation(key_of(3, sender=BOB))), *items_of(4))
        conversation = await server.pipe.command("HGETALL", b"conv:" + SUFFIX)
        found = dict(zip(conversation[::2], conversation[1::2], strict=True))
        assert found == {b"n": b"4", b"h": b"4", b"r" + ALICE: b"4", b"r" + BOB: b"3"}

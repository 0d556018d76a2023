"""materialise_dispatches on real servers: once per record, in order, for the owner only, or not at all."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from qim.adapters.mailbox_keys import (
    WATERMARKS,
    day_hash_key,
    mailbox_key,
    pack_state,
    progress_key,
)
from qim.adapters.mailbox_redis import RedisMailboxStore
from qim.adapters.redis_pipe import RedisPipe
from qim.clock import SystemClock
from qim.errors import StoreBroken
from qim.ids import DispatchId, MailboxSeq, Millis
from qim.limits import DAY_MS, DISPATCH_PROGRESS_LIFE_MS, EPHEMERAL_KEY_LIFE_MS, MAILBOX_KEY_LIFE_MS
from qim.ports import Materialised, ShardState
from tests.lua.mailbox_case import (
    ANN,
    BEN,
    HOSTILE_USER,
    IDENTITY,
    OTHER,
    SLOT,
    TENANT,
    claim_of,
    contents,
    ephemeral_entry,
    open_store,
    seqs_of,
    today,
    write_of,
)
from tests.services import StoreServer

DONE, GAP, BEHIND = Materialised.DONE, Materialised.GAP, Materialised.BEHIND
ZERO = {SLOT: MailboxSeq(0), OTHER: MailboxSeq(0)}
Opened = tuple[RedisPipe, RedisMailboxStore]


@pytest.fixture
async def opened(store_server: StoreServer) -> AsyncIterator[Opened]:
    pipe, store = await open_store(store_server)
    yield pipe, store
    await pipe.close()


async def watermark(store: RedisMailboxStore) -> int:
    return (await store.load_shards([SLOT]))[SLOT].watermark


@pytest.mark.shows("M4", "M7")
async def test_a_run_over_two_shards_is_written_once_however_often_it_is_repeated(opened: Opened) -> None:
    pipe, store = opened
    run = [write_of(1, users=(ANN, BEN)), write_of(2), write_of(1, slot=OTHER), write_of(2, slot=OTHER)]
    assert await store.materialise(ZERO, run) == [DONE] * 4
    before = await contents(pipe)
    assert await store.materialise(ZERO, run) == [DONE] * 4
    assert await contents(pipe) == before
    assert await seqs_of(store) == [1, 2]
    assert await seqs_of(store, BEN) == [1]
    state = (await store.load_shards([SLOT]))[SLOT]
    assert state == ShardState(
        MailboxSeq(2), MailboxSeq(1), today(), IDENTITY, DispatchId(b"5-2".ljust(16, b"."))
    )


@pytest.mark.shows("M4")
async def test_a_record_that_does_not_follow_w_is_a_gap_and_what_follows_it_is_behind(opened: Opened) -> None:
    pipe, store = opened
    await store.materialise(ZERO, [write_of(1)])
    before = await contents(pipe)
    assert await store.materialise({SLOT: MailboxSeq(2)}, [write_of(3), write_of(4)]) == [GAP, BEHIND]
    assert await store.materialise({SLOT: MailboxSeq(1)}, [write_of(3)]) == [GAP]
    assert await contents(pipe) == before
    jump = [write_of(2), write_of(4), write_of(5), write_of(1, slot=OTHER)]
    assert await store.materialise({SLOT: MailboxSeq(1), OTHER: MailboxSeq(0)}, jump) == [
        DONE,
        GAP,
        BEHIND,
        DONE,
    ]
    assert await watermark(store) == 2


@pytest.mark.shows("M4")
async def test_a_run_that_overlaps_w_repeats_what_is_done_and_refuses_what_is_not(opened: Opened) -> None:
    _, store = opened
    await store.materialise(ZERO, [write_of(1), write_of(2)])
    assert await store.materialise(ZERO, [write_of(1), write_of(2), write_of(3)]) == [DONE, DONE, GAP]
    assert await seqs_of(store) == [1, 2]


@pytest.mark.shows("M4", "F5")
async def test_the_first_record_of_a_shard_stands_at_its_base(store_server: StoreServer) -> None:
    pipe, store = await open_store(store_server, base=1000)
    assert await store.materialise(ZERO, [write_of(1)]) == [GAP]
    assert await store.materialise(ZERO, [write_of(1000), write_of(1001)]) == [DONE, DONE]
    assert await watermark(store) == 1001
    await pipe.close()


async def test_a_shard_that_was_never_initialised_takes_nothing(opened: Opened) -> None:
    pipe, store = opened
    await pipe.command("HDEL", WATERMARKS, SLOT)
    before = await contents(pipe)
    assert await store.materialise(ZERO, [write_of(1), write_of(2)]) == [GAP, BEHIND]
    assert await contents(pipe) == before


@pytest.mark.shows("M6", "X9")
async def test_the_same_dispatch_with_another_digest_stops_its_shard_and_no_other(opened: Opened) -> None:
    _, store = opened
    await store.materialise(ZERO, [write_of(1, name=b"twice")])
    run = [write_of(2, name=b"twice", digest=b"another8"), write_of(3), write_of(1, slot=OTHER)]
    answers = await store.materialise({SLOT: MailboxSeq(1), OTHER: MailboxSeq(0)}, run)
    assert answers == [Materialised.MISMATCH, BEHIND, DONE]
    assert await seqs_of(store) == [1]
    assert await watermark(store) == 1


@pytest.mark.shows("M6")
async def test_two_digests_under_one_dispatch_inside_one_run_are_a_mismatch(opened: Opened) -> None:
    _, store = opened
    run = [write_of(1, name=b"twice"), write_of(2, name=b"twice", digest=b"another8")]
    assert await store.materialise(ZERO, run) == [DONE, Materialised.MISMATCH]
    assert await watermark(store) == 1


@pytest.mark.shows("M7")
async def test_a_duplicate_dispatch_at_a_later_offset_moves_w_and_adds_no_entry(opened: Opened) -> None:
    _, store = opened
    run = [write_of(1, name=b"twice", entry=b"one"), write_of(2, name=b"twice", entry=b"one")]
    assert await store.materialise(ZERO, run) == [DONE, Materialised.REPEAT]
    again = [write_of(3, name=b"twice", entry=b"one")]
    assert await store.materialise({SLOT: MailboxSeq(2)}, again) == [Materialised.REPEAT]
    assert await seqs_of(store) == [1]
    assert await watermark(store) == 3


@pytest.mark.shows("M7")
async def test_what_is_done_already_still_says_what_is_a_repeat(opened: Opened) -> None:
    pipe, store = opened
    run = [write_of(1, name=b"twice", entry=b"one"), write_of(2), write_of(3, name=b"twice", entry=b"one")]
    answers = [DONE, DONE, Materialised.REPEAT]
    assert await store.materialise(ZERO, run) == answers
    before = await pipe.command("HGETALL", WATERMARKS)
    assert await store.materialise({SLOT: MailboxSeq(3)}, run) == answers
    assert await store.materialise(ZERO, [*run, write_of(4)]) == [*answers, GAP]
    assert await pipe.command("HGETALL", WATERMARKS) == before


@pytest.mark.shows("M7", "M9")
async def test_what_stands_on_another_day_is_left_open_and_nothing_is_written(opened: Opened) -> None:
    pipe, store = opened
    key = mailbox_key(SLOT, TENANT, ANN, day=today(), ephemeral=False)
    run = [write_of(1, name=b"twice", entry=b"one"), write_of(2, name=b"twice", entry=b"one"), write_of(3)]
    assert await store.materialise(ZERO, run[:1]) == [DONE]
    await pipe.command("RENAME", key, mailbox_key(SLOT, TENANT, ANN, day=today() - 1, ephemeral=False))
    assert await store.materialise({SLOT: MailboxSeq(1)}, run[1:]) == [Materialised.REPEAT, DONE]
    before = await contents(pipe)
    answers = [Materialised.PASSED, Materialised.PASSED, DONE]
    assert await store.materialise({SLOT: MailboxSeq(3)}, run) == answers
    assert await store.materialise({SLOT: MailboxSeq(3)}, [*run, write_of(5)]) == [*answers, GAP]
    assert await contents(pipe) == before


async def test_a_dispatch_begun_on_the_general_path_is_left_to_it(opened: Opened) -> None:
    _, store = opened
    assert (await store.begin_dispatch(write_of(1), MailboxSeq(0))).outcome is Materialised.OPEN
    assert await store.materialise(ZERO, [write_of(1), write_of(2)]) == [Materialised.OPEN, BEHIND]
    assert await watermark(store) == 0


@pytest.mark.shows("M4", "F-05")
async def test_a_stale_owner_writes_nothing_and_does_not_fail_the_shards_it_still_owns(
    opened: Opened, store_server: StoreServer
) -> None:
    pipe, store = opened
    newer = RedisMailboxStore(pipe, SystemClock())
    await newer.claim(claim_of(b"newer", (SLOT,)))
    run = [write_of(1), write_of(2), write_of(1, slot=OTHER)]
    stale = Materialised.STALE_OWNER
    assert await store.materialise(ZERO, run) == [stale, stale, DONE]
    assert await seqs_of(store) == []
    assert await newer.materialise(ZERO, [write_of(1)]) == [DONE]


@pytest.mark.parametrize("victim", ["owner", "mboxw", "progress", "mailbox"])
async def test_a_wrong_type_under_any_key_is_refused_before_the_first_write(
    opened: Opened, victim: str
) -> None:
    pipe, store = opened
    await store.materialise(ZERO, [write_of(1)])
    second = write_of(3, users=(BEN, HOSTILE_USER))
    key = {
        "owner": b"owner",
        "mboxw": WATERMARKS,
        "progress": progress_key(second.reserved_at),
        "mailbox": mailbox_key(SLOT, TENANT, HOSTILE_USER, day=today(), ephemeral=False),
    }[victim]
    await pipe.command("SET", key, "not this type")
    before = await contents(pipe)
    with pytest.raises(StoreBroken):
        await store.materialise({SLOT: MailboxSeq(1)}, [write_of(2), second])
    assert await contents(pipe) == before


@pytest.mark.shows("M9")
async def test_the_day_turns_with_time_and_the_calls_in_flight_land_in_order(opened: Opened) -> None:
    pipe, store = opened
    await store.materialise(ZERO, [write_of(1)])
    yesterday = ShardState(MailboxSeq(1), MailboxSeq(1), today() - 1, IDENTITY, DispatchId(b"d" * 16))
    await pipe.command("HSET", WATERMARKS, SLOT, pack_state(yesterday))
    store._days[SLOT] = today() - 1
    in_flight = [store.materialise({SLOT: MailboxSeq(seq - 1)}, [write_of(seq)]) for seq in (2, 3, 4)]
    assert await asyncio.gather(*in_flight) == [[DONE], [DONE], [DONE]]
    assert await pipe.command("HGETALL", day_hash_key(SLOT)) == [b"%d" % (today() - 1), b"1"]
    assert (await store.load_shards([SLOT]))[SLOT].day == today()
    assert await seqs_of(store) == [1, 2, 3, 4]


@pytest.mark.shows("M9")
async def test_a_call_issued_between_a_refusal_and_its_repeat_does_not_see_a_gap(opened: Opened) -> None:
    pipe, store = opened
    await store.materialise(ZERO, [write_of(1)])
    yesterday = ShardState(MailboxSeq(1), MailboxSeq(1), today() - 1, IDENTITY, DispatchId(b"d" * 16))
    await pipe.command("HSET", WATERMARKS, SLOT, pack_state(yesterday))
    store._days[SLOT] = today() - 1
    first = store.materialise({SLOT: MailboxSeq(1)}, [write_of(2)])
    store._days[SLOT] = today()  # as if a neighbour's refusal had taught the day meanwhile
    second = store.materialise({SLOT: MailboxSeq(2)}, [write_of(3)])
    assert (await first, await second) == ([DONE], [DONE])


@pytest.mark.shows("M9")
async def test_a_shards_day_never_goes_back(opened: Opened) -> None:
    pipe, store = opened
    tomorrow = ShardState(MailboxSeq(1), MailboxSeq(1), today() + 1, IDENTITY, DispatchId(b"d" * 16))
    await pipe.command("HSET", WATERMARKS, SLOT, pack_state(tomorrow))
    assert await store.materialise({SLOT: MailboxSeq(1)}, [write_of(2)]) == [DONE]
    key = mailbox_key(SLOT, TENANT, ANN, day=today() + 1, ephemeral=False)
    assert await pipe.command("ZCARD", key) == 1
    assert (await store.load_shards([SLOT]))[SLOT].day == today() + 1


@pytest.mark.shows("M9")
async def test_every_key_gets_its_lifetime_with_its_first_entry(opened: Opened) -> None:
    pipe, store = opened
    entry = ephemeral_entry(reserved_at=SystemClock().now_ms())
    await store.materialise(ZERO, [write_of(1), write_of(2, ephemeral=True, entry=entry)])
    end_of_day = (today() + 1) * DAY_MS
    for ephemeral, life in ((False, MAILBOX_KEY_LIFE_MS), (True, EPHEMERAL_KEY_LIFE_MS)):
        key = mailbox_key(SLOT, TENANT, ANN, day=today(), ephemeral=ephemeral)
        assert await pipe.command("PEXPIRETIME", key) == end_of_day + life
    life = await pipe.command("PTTL", progress_key(SystemClock().now_ms()))
    assert DISPATCH_PROGRESS_LIFE_MS - 60_000 < life <= DISPATCH_PROGRESS_LIFE_MS
    assert await seqs_of(store) == [1, 2]


async def test_a_duplicate_does_not_make_the_store_forget_a_lifetime(opened: Opened) -> None:
    pipe, store = opened
    await store.materialise(ZERO, [write_of(1, name=b"twice")])
    await store.materialise({SLOT: MailboxSeq(1)}, [write_of(2, name=b"twice", users=(BEN,))])
    await store.materialise({SLOT: MailboxSeq(2)}, [write_of(3, users=(BEN,))])
    key = mailbox_key(SLOT, TENANT, BEN, day=today(), ephemeral=False)
    assert await pipe.command("PTTL", key) > 0


async def test_a_run_across_the_hour_keeps_order_and_uses_both_hashes(opened: Opened) -> None:
    pipe, store = opened
    now = SystemClock().now_ms()
    hour = 3_600_000
    run = [
        write_of(1, reserved_at=now - hour),
        write_of(1, slot=OTHER, reserved_at=now),
        write_of(2, reserved_at=now),
        write_of(3, reserved_at=now - hour),
    ]
    assert await store.materialise(ZERO, run) == [DONE] * 4
    assert await pipe.command("HLEN", progress_key(Millis(now))) == 2
    assert await pipe.command("HLEN", progress_key(Millis(now - hour))) == 2
    refused = [write_of(5, reserved_at=now - hour), write_of(6, reserved_at=now)]
    assert await store.materialise({SLOT: MailboxSeq(3)}, refused) == [GAP, BEHIND]


async def test_ids_with_separators_stay_apart(opened: Opened) -> None:
    _, store = opened
    run = [
        write_of(1, name=b"{}:\0\r\n*", users=(HOSTILE_USER,), entry=b"\0{s05}:\r\n"),
        write_of(2, name=b"{}:\0\r\n?", users=(ANN,)),
    ]
    assert await store.materialise(ZERO, run) == [DONE, DONE]
    assert await seqs_of(store, HOSTILE_USER) == [1]
    assert await seqs_of(store) == [2]


async def test_a_full_server_still_takes_what_was_accepted(opened: Opened) -> None:
    pipe, store = opened
    await pipe.command("CONFIG", "SET", "maxmemory", "1")
    try:
        assert await store.materialise(ZERO, [write_of(1)]) == [DONE]
    finally:
        await pipe.command("CONFIG", "SET", "maxmemory", "0")
    assert await seqs_of(store) == [1]


async def test_numbers_up_to_2_48_are_exact(store_server: StoreServer) -> None:
    base = 2**48 - 2
    pipe, store = await open_store(store_server, base=base)
    assert await store.materialise(ZERO, [write_of(base), write_of(base + 1)]) == [DONE, DONE]
    assert await seqs_of(store) == [base, base + 1]
    await pipe.close()

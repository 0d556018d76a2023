"""The contract of the mailbox store, over memory and both servers: once, in order, by the owner only."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from qim.adapters.mailbox_keys import WATERMARKS
from qim.adapters.mailbox_memory import MailboxState, MemoryMailboxStore
from qim.adapters.mailbox_redis import RedisMailboxStore
from qim.adapters.redis_keys import SLOT_FIELDS
from qim.clock import SystemClock
from qim.ids import DispatchId, MailboxSeq, Millis
from qim.limits import DAY_MS, FUSED_RECIPIENTS_MAX
from qim.ports import Begun, MailboxPage, MailboxStore, MailboxWrite, Materialised, ShardState
from tests.lua.mailbox_case import (
    ANN,
    BEN,
    HOSTILE_USER,
    IDENTITY,
    OTHER,
    SLOT,
    TENANT,
    claim_of,
    ephemeral_entry,
    open_pipe,
    open_store,
    query_of,
    seqs_of,
    today,
    write_of,
)
from tests.services import StoreServer

DONE, GAP, OPEN = Materialised.DONE, Materialised.GAP, Materialised.OPEN
STALE, MISMATCH = Materialised.STALE_OWNER, Materialised.MISMATCH
W0 = MailboxSeq(0)


class Medium:
    """A claimed store with two shards, and the store of a process that takes them over."""

    def __init__(self, store: Any, successor: Any) -> None:
        self.store: MailboxStore = store
        self.successor: MailboxStore = successor


@pytest.fixture(params=["memory", "valkey", "redis"])
async def medium(request: pytest.FixtureRequest) -> AsyncIterator[Medium]:
    if request.param == "memory":
        state = MailboxState()
        memory = MemoryMailboxStore(SystemClock(), state)
        await memory.claim(claim_of())
        await memory.initialise_shards({SLOT: MailboxSeq(1), OTHER: MailboxSeq(1)}, IDENTITY)
        yield Medium(memory, MemoryMailboxStore(SystemClock(), state))
        return
    server = request.getfixturevalue(f"{request.param}_server")
    pipe, store = await open_store(server)
    second = await open_pipe(server)
    yield Medium(store, RedisMailboxStore(second, SystemClock()))
    await pipe.close()
    await second.close()


async def put(store: MailboxStore, *writes: MailboxWrite) -> list[Materialised]:
    """Materialises consecutive records of shards that stand where the first of each expects."""
    expected: dict[Any, MailboxSeq] = {}
    for write in writes:
        expected.setdefault(write.slot, MailboxSeq(write.mailbox_seq - 1))
    return await store.materialise(expected, writes)


async def page_of(store: MailboxStore, **query: Any) -> MailboxPage:
    (page,) = await store.read_mailbox([query_of(**query)])
    return page


async def watermark(store: MailboxStore) -> int:
    return (await store.load_shards([SLOT]))[SLOT].watermark


async def test_a_shard_without_state_is_absent_and_initialising_changes_no_existing_one(
    medium: Medium,
) -> None:
    await put(medium.store, write_of(1))
    await medium.store.initialise_shards({SLOT: MailboxSeq(500)}, b"another identity")
    loaded = await medium.store.load_shards([SLOT, OTHER, 7])  # type: ignore[list-item]  # plain values stand for ids
    assert sorted(loaded) == [SLOT, OTHER]
    assert loaded[OTHER] == ShardState(W0, MailboxSeq(1), 0, IDENTITY, DispatchId(b""))
    assert (loaded[SLOT].watermark, loaded[SLOT].base, loaded[SLOT].day) == (1, 1, today())
    assert await medium.store.load_shards([]) == {}


async def test_a_state_that_cannot_be_read_hides_no_other(store_server: StoreServer) -> None:
    pipe = await open_pipe(store_server)
    await pipe.command("FLUSHALL")
    store = RedisMailboxStore(pipe, SystemClock())
    await store.initialise_shards({SLOT: MailboxSeq(1), OTHER: MailboxSeq(1)}, b"i" * 16)
    await pipe.command("HSET", WATERMARKS, SLOT_FIELDS[SLOT], "short")
    assert (await store.load_shards([SLOT, OTHER])).keys() == {OTHER}
    await pipe.close()


@pytest.mark.shows("M4", "M7")
async def test_pipelined_runs_land_in_order_and_behind_a_failed_one_all_refuse(medium: Medium) -> None:
    runs = [put(medium.store, write_of(seq), write_of(seq + 1)) for seq in (1, 3, 7, 9)]
    answers = await asyncio.gather(*runs)
    assert answers == [[DONE, DONE], [DONE, DONE], [GAP, Materialised.BEHIND], [GAP, Materialised.BEHIND]]
    assert await seqs_of(medium.store) == [1, 2, 3, 4]


@pytest.mark.shows("M4", "M7")
async def test_a_run_over_the_end_of_an_hour_lands_in_order_or_not_at_all(medium: Medium) -> None:
    earlier = Millis(SystemClock().now_ms() - 3_600_000)
    first, last = write_of(1, reserved_at=earlier), write_of(3)
    assert await put(medium.store, first, write_of(2), last) == [DONE, DONE, DONE]
    assert await seqs_of(medium.store) == [1, 2, 3]
    refused = await put(medium.store, write_of(5, reserved_at=earlier), write_of(6))
    assert DONE not in refused
    assert await watermark(medium.store) == 3
    assert await seqs_of(medium.store) == [1, 2, 3]


@pytest.mark.shows("M3", "M4", "M5", "M7")
async def test_the_general_path_moves_w_only_with_its_finish(medium: Medium) -> None:
    users = tuple(ANN[:15] + bytes([n]) for n in range(3))
    write = write_of(1, users=users)  # type: ignore[arg-type]  # plain values stand for ids
    begun = await medium.store.begin_dispatch(write, W0)
    assert begun == Begun(OPEN, today())
    assert await medium.store.begin_dispatch(write, W0) == begun
    for user in users:
        assert await medium.store.append_entries(write, begun.day, [user, users[0]]) is DONE  # type: ignore[list-item]  # plain values stand for ids
        assert await watermark(medium.store) == 0
        assert await seqs_of(medium.store, user) == []  # type: ignore[arg-type]  # plain values stand for ids
    assert await medium.store.finish_dispatch(write, W0) is DONE
    assert await medium.store.finish_dispatch(write, W0) is DONE
    assert await watermark(medium.store) == 1
    for user in users:
        assert await seqs_of(medium.store, user) == [1]  # type: ignore[arg-type]  # plain values stand for ids
    assert (await medium.store.begin_dispatch(write, W0)).outcome is DONE
    assert await medium.store.append_entries(write, begun.day, [BEN]) is DONE
    assert await seqs_of(medium.store, BEN) == []


@pytest.mark.shows("M5")
async def test_steps_out_of_order_are_gaps(medium: Medium) -> None:
    write = write_of(1)
    assert await medium.store.append_entries(write, today(), [ANN]) is GAP
    assert await medium.store.finish_dispatch(write, W0) is GAP
    assert (await medium.store.begin_dispatch(write_of(2), W0)).outcome is GAP
    assert (await medium.store.begin_dispatch(write_of(2), MailboxSeq(1))).outcome is GAP
    begun = await medium.store.begin_dispatch(write, W0)
    assert await medium.store.append_entries(write, begun.day - 1, [ANN]) is GAP
    assert await medium.store.finish_dispatch(write, MailboxSeq(1)) is GAP
    assert await watermark(medium.store) == 0


@pytest.mark.shows("M6", "X9")
async def test_another_digest_is_a_mismatch_until_an_operator_skips_it(medium: Medium) -> None:
    await put(medium.store, write_of(1, name=b"twice"))
    other = write_of(2, name=b"twice", digest=b"another8")
    one = MailboxSeq(1)
    assert await put(medium.store, other) == [MISMATCH]
    assert (await medium.store.begin_dispatch(other, one)).outcome is MISMATCH
    assert await medium.store.append_entries(other, today(), [ANN]) is MISMATCH
    assert await medium.store.finish_dispatch(other, one) is MISMATCH
    assert await watermark(medium.store) == 1
    assert await medium.store.finish_dispatch(other, one, skipped=True) is DONE
    assert await watermark(medium.store) == 2
    assert await put(medium.store, write_of(3, name=b"twice")) == [Materialised.REPEAT]
    assert await seqs_of(medium.store) == [1]


@pytest.mark.shows("X9")
async def test_a_skipped_record_never_gets_entries_by_a_replay(medium: Medium) -> None:
    write = write_of(1)
    begun = await medium.store.begin_dispatch(write, W0)
    assert await medium.store.finish_dispatch(write, W0, skipped=True) is DONE
    assert await put(medium.store, write) == [Materialised.PASSED]
    again = write_of(2, name=b"5-1", entry=write.entry)
    assert await put(medium.store, again) == [Materialised.REPEAT]
    assert await medium.store.append_entries(write, begun.day, [ANN]) is DONE
    assert await seqs_of(medium.store) == []
    assert await watermark(medium.store) == 2


@pytest.mark.shows("M9", "X9")
async def test_a_skip_of_the_very_first_record_sends_nobody_into_a_rebuild(medium: Medium) -> None:
    assert await medium.store.finish_dispatch(write_of(1), W0, skipped=True) is DONE
    page = await page_of(medium.store)
    assert (len(page.entries), page.covered_through, page.rebuild) == (0, 1, False)
    assert await put(medium.store, write_of(2)) == [DONE]
    page = await page_of(medium.store)
    assert ([seq for seq, *_ in page.entries], page.covered_through, page.rebuild) == ([2], 2, False)


@pytest.mark.shows("M4")
async def test_every_step_of_a_stale_owner_is_refused(medium: Medium) -> None:
    write = write_of(1)
    begun = await medium.store.begin_dispatch(write, W0)
    await medium.successor.claim(claim_of(b"successor"))
    assert await put(medium.store, write_of(1, slot=OTHER)) == [STALE]
    assert (await medium.store.begin_dispatch(write, W0)).outcome is STALE
    assert await medium.store.append_entries(write, begun.day, [ANN]) is STALE
    assert await medium.store.finish_dispatch(write, W0) is STALE
    assert await medium.store.finish_dispatch(write, W0, skipped=True) is STALE
    assert await watermark(medium.store) == 0
    await medium.successor.append_entries(write, begun.day, [ANN])
    assert await medium.successor.finish_dispatch(write, W0) is DONE
    assert await seqs_of(medium.store) == [1]


async def test_a_late_refresh_of_a_predecessor_leaves_the_shard_to_its_owner(medium: Medium) -> None:
    await medium.successor.claim(claim_of(b"successor"))
    late = await medium.store.claim(claim_of()._replace(is_refresh=True))
    assert {refusal.reason for refusal in late.refusals} == {"lost"}
    assert await put(medium.successor, write_of(1)) == [DONE]
    assert await put(medium.store, write_of(2)) == [STALE]


async def test_the_largest_fused_record_reaches_all_its_recipients(medium: Medium) -> None:
    users = tuple(ANN[:15] + bytes([n]) for n in range(FUSED_RECIPIENTS_MAX))
    assert await put(medium.store, write_of(1, users=users), write_of(2, users=users[:3])) == [DONE, DONE]  # type: ignore[arg-type]  # plain values stand for ids
    pages = await medium.store.read_mailbox([query_of(user) for user in users])  # type: ignore[arg-type]  # plain values stand for ids
    assert [len(page.entries) for page in pages] == [2, 2, 2] + [1] * 13


async def test_pages_end_at_their_bounds_and_chain_by_covered_through(medium: Medium) -> None:
    entries = [b"%02d" % n + b"x" * 98 for n in range(1, 51)]
    for start in range(0, 50, 10):
        run = [
            write_of(n, users=(ANN,) if n % 2 else (BEN,), entry=entries[n - 1])
            for n in range(start + 1, start + 11)
        ]
        await put(medium.store, *run)
    first = await page_of(medium.store, entries_max=10)
    assert first == MailboxPage(
        tuple((MailboxSeq(n), entries[n - 1]) for n in range(1, 20, 2)),
        MailboxSeq(19),
        True,
        False,
        MailboxSeq(49),
    )
    second = await page_of(medium.store, after=19, bytes_max=1_250)
    assert ([seq for seq, _ in second.entries], second.more) == (list(range(21, 44, 2)), True)
    third = await page_of(medium.store, after=second.covered_through)
    assert ([seq for seq, _ in third.entries], third.more) == ([45, 47, 49], False)
    assert third.covered_through == 50, "the watermark, not the last entry"
    empty = await page_of(medium.store, after=50)
    assert empty == MailboxPage((), MailboxSeq(50), False, False, MailboxSeq(49))
    tiny = await page_of(medium.store, bytes_max=1)
    assert [seq for seq, _ in tiny.entries] == [1]
    whole = await page_of(medium.store, entries_max=25)
    assert (len(whole.entries), whole.more, whole.covered_through) == (25, False, 50)


async def test_a_page_shows_nothing_above_w(medium: Medium) -> None:
    await put(medium.store, write_of(1))
    begun = await medium.store.begin_dispatch(write_of(2), MailboxSeq(1))
    await medium.store.append_entries(write_of(2), begun.day, [ANN])
    page = await page_of(medium.store)
    assert ([seq for seq, _ in page.entries], page.covered_through, page.newest) == ([1], 1, 1)


async def test_held_entries_are_confirmed_only_by_their_exact_number(medium: Medium) -> None:
    await put(medium.store, *(write_of(n, users=(ANN,) if n % 2 else (BEN,)) for n in range(1, 9)))
    held = await page_of(medium.store, after=1, held_through=5, held_count=2)
    assert held == MailboxPage((), MailboxSeq(5), True, False, MailboxSeq(7))
    for count in (1, 3):
        plain = await page_of(medium.store, after=1, held_through=5, held_count=count)
        assert [seq for seq, _ in plain.entries] == [3, 5, 7]
    complete = await page_of(medium.store, after=1, held_through=7, held_count=3)
    assert complete == MailboxPage((), MailboxSeq(7), False, False, MailboxSeq(7))
    above = await page_of(medium.store, after=1, held_through=9, held_count=3)
    assert [seq for seq, _ in above.entries] == [3, 5, 7]


@pytest.mark.shows("M9", "F-39")
async def test_a_cursor_above_w_is_told_to_rebuild(medium: Medium) -> None:
    await put(medium.store, write_of(1))
    page = await page_of(medium.store, after=2)
    assert page == MailboxPage((), MailboxSeq(1), False, True, MailboxSeq(1))
    unknown = await page_of(medium.store, slot=9)
    assert unknown == MailboxPage((), W0, False, False, W0)


@pytest.mark.shows("M9")
async def test_ephemeral_entries_lie_in_order_between_the_others_and_end_with_their_day(
    medium: Medium,
) -> None:
    now = SystemClock().now_ms()
    live = ephemeral_entry(reserved_at=now - DAY_MS + 60_000)
    over = ephemeral_entry(reserved_at=now - DAY_MS - 1)
    await put(
        medium.store,
        write_of(1),
        write_of(2, ephemeral=True, entry=live),
        write_of(3, ephemeral=True, entry=over),
        write_of(4),
    )
    page = await page_of(medium.store)
    assert [seq for seq, _ in page.entries] == [1, 2, 4]
    assert page.entries[1][1] == live
    assert page.covered_through == 4


async def test_many_entries_of_both_kinds_merge_in_order(medium: Medium) -> None:
    now = SystemClock().now_ms()
    writes = [
        write_of(n, ephemeral=n % 3 == 0 or n > 40, entry=ephemeral_entry(reserved_at=now, seq=n))
        for n in range(1, 61)
    ]
    for start in range(0, 60, 20):
        await put(medium.store, *writes[start : start + 20])
    assert await seqs_of(medium.store) == list(range(1, 61))
    assert await seqs_of(medium.store, after=17) == list(range(18, 61))


async def test_whether_an_entry_is_held_is_known_per_user(medium: Medium) -> None:
    write = write_of(1, users=(HOSTILE_USER,))
    await put(medium.store, write)
    for user, held in ((HOSTILE_USER, True), (ANN, False)):
        at = Millis(write.reserved_at)
        assert await medium.store.holds_entry(TENANT, user, SLOT, write.entry, at) is held
    assert not await medium.store.holds_entry(TENANT, HOSTILE_USER, SLOT, b"other", Millis(write.reserved_at))

"""The commit store's contract, run by every adapter: memory, and Redis scripts on both servers.

What only a real server can show (expiry, wrong types, memory) stands in `tests/lua`; what only a clock moved
by hand can show stands at the end, for the memory adapter, which the other two are compared with.
"""

from collections.abc import AsyncIterator, Callable

import pytest

from qim.adapters.commits_memory import CommitState, MemoryCommitStore
from qim.adapters.commits_redis import RedisCommitStore
from qim.clock import ManualClock
from qim.errors import StoreRefused, StoreUnknown
from qim.ids import BucketId, ConversationId, Millis, Offset, Seq, SlotId
from qim.limits import IDEMPOTENCY_WINDOW_MS
from qim.ports import ClaimRefusal, CommitStore, Committed, ReadMark, Reserved, ReserveResult
from tests.lua.commit_calls import (
    ALICE,
    BOB,
    BUCKET,
    CLOCK,
    CONVERSATION,
    SLOT,
    TENANT,
    claim_of,
    commit_of,
    history_of,
    key_of,
    opened_pipe,
    reservation,
)
from tests.services import StoreServer

OTHER = ConversationId(b"other-conversatn")
Workers = Callable[[], CommitStore]
"""Gives a further worker at the same instance."""


@pytest.fixture(params=["memory", "valkey", "redis"])
async def workers(request: pytest.FixtureRequest) -> AsyncIterator[Workers]:
    if request.param == "memory":
        state = CommitState()
        yield lambda: MemoryCommitStore(CLOCK, state)
        return
    server = request.getfixturevalue(f"{request.param}_server")
    assert isinstance(server, StoreServer)
    async with opened_pipe(server) as pipe:
        yield lambda: RedisCommitStore(pipe, CLOCK)


@pytest.fixture
async def store(workers: Workers) -> CommitStore:
    store = workers()
    await store.claim(claim_of())
    return store


@pytest.mark.shows("C7", "X16")
async def test_sequences_have_no_gap_whatever_is_refused_between_them(store: CommitStore) -> None:
    items = [reservation(key_of(number)) for number in range(5)]
    refused = [
        reservation(key_of(0), text=b"other content"),
        reservation(key_of(70), reserved_at=CLOCK.now_ms() - 60_000),
    ]
    results = await store.reserve([items[0], *refused, *items[1:]])
    assert [result.seq for result in results] == [1, 0, 0, 2, 3, 4, 5]
    assert [result.outcome for result in results[1:3]] == [Reserved.CONFLICT, Reserved.CLOCK]
    assert await store.load_last_seq([(BUCKET, TENANT, CONVERSATION), (BUCKET, TENANT, OTHER)]) == [5, 0]


@pytest.mark.shows("C4", "C5")
async def test_a_send_has_one_sequence_before_and_after_its_commit(store: CommitStore) -> None:
    item = reservation()
    (first,) = await store.reserve([item])
    (repeat,) = await store.reserve([item])
    assert repeat == ReserveResult(Reserved.RECORDED, Seq(1), item.reserved_at, item.record)
    assert [result.outcome for result in await store.mark_committed([commit_of(item, first)])] == [
        Committed.COMMITTED
    ]
    (after,) = await store.reserve([item])
    assert after == ReserveResult(Reserved.COMMITTED, Seq(1), item.reserved_at, b"")
    (conflict,) = await store.reserve([reservation(text=b"other content")])
    assert conflict == ReserveResult(Reserved.CONFLICT, Seq(0), Millis(0), b"")


@pytest.mark.shows("C6")
async def test_a_commit_is_stamped_once(store: CommitStore) -> None:
    item = reservation()
    (reserved,) = await store.reserve([item])
    commit = commit_of(item, reserved)
    first, twin = await store.mark_committed([commit, commit])
    (again,) = await store.mark_committed([commit])
    assert (first.outcome, twin.outcome, again.outcome) == (
        Committed.COMMITTED, Committed.ALREADY, Committed.ALREADY,
    )  # fmt: skip
    assert first.committed_at == twin.committed_at == again.committed_at
    (unknown,) = await store.mark_committed([commit._replace(key=key_of(9))])
    assert unknown == (Committed.NOT_PENDING, 0)


@pytest.mark.shows("X5")
async def test_history_ends_at_the_head_and_the_head_follows_the_lowest_unfinished(
    store: CommitStore,
) -> None:
    items = [reservation(key_of(number), text=b"%d" % number) for number in range(4)]
    results = await store.reserve(items)
    commits = [commit_of(item, result) for item, result in zip(items, results, strict=True)]
    await store.mark_committed([commits[0], commits[2]])
    (page,) = await store.read_history([history_of()])
    assert ([seq for seq, _ in page.records], page.head_seq) == ([1], 1)
    store_futures = store.mark_committed([commits[1]])
    (page,) = await store.read_history([history_of(after=1, entries_max=1)])
    assert (page.records, page.head_seq, page.more) == (((2, items[1].record),), 3, True)
    await store_futures


async def test_each_query_gets_its_own_page(store: CommitStore) -> None:
    item = reservation()
    (result,) = await store.reserve([item])
    await store.mark_committed([commit_of(item, result)])
    pages = await store.read_history([history_of(), history_of(conversation=OTHER), history_of(before=1)])
    assert [page.head_seq for page in pages] == [1, 0, 1]
    assert [len(page.records) for page in pages] == [1, 0, 0]


@pytest.mark.shows("C3")
async def test_pending_is_what_was_reserved_and_not_committed(store: CommitStore) -> None:
    items = [reservation(key_of(number)) for number in range(3)]
    results = await store.reserve(items)
    await store.mark_committed([commit_of(items[1], results[1])])
    found = await store.read_pending([BUCKET], older_than_ms=-5_000, entries_max=10)
    assert {(entry.key, entry.identity, entry.seq, entry.record) for entry in found} == {
        (items[at].key, items[at].identity, at + 1, items[at].record) for at in (0, 2)
    }
    assert await store.read_pending([BUCKET], older_than_ms=60_000, entries_max=10) == []
    assert await store.read_pending([BucketId(1)], older_than_ms=-5_000, entries_max=10) == []


async def test_read_marks_rise_for_the_sender_and_by_request_only(store: CommitStore) -> None:
    items = [reservation(key_of(number)) for number in range(3)]
    results = await store.reserve(items)
    commits = [commit_of(item, result) for item, result in zip(items, results, strict=True)]
    await store.mark_committed([*commits[:2], commits[2]._replace(control=True)])
    marks = [ReadMark(TENANT, CONVERSATION, BUCKET, user, Seq(1)) for user in (ALICE, BOB)]
    assert await store.mark_read(marks) == [(False, 2, 1), (False, 1, 2)]
    left = marks[1]._replace(upper_seq=Seq(2))
    assert await store.mark_read([left, left._replace(read_seq=Seq(50))]) == [(False, 1, 1), (False, 2, 0)]
    assert await store.mark_read([marks[1]._replace(read_seq=Seq(50))]) == [(False, 3, 0)]
    assert await store.mark_read([marks[1]._replace(read_seq=Seq(0))]) == [(False, 3, 0)]


async def test_a_slot_that_was_taken_over_answers_stale_owner_to_its_former_owner(workers: Workers) -> None:
    old, new = workers(), workers()
    await old.claim(claim_of())
    item = reservation()
    (result,) = await old.reserve([item])
    await new.claim(claim_of(b"c" * 16, slots=[SLOT]))
    mark = ReadMark(TENANT, CONVERSATION, BUCKET, BOB, Seq(1))
    assert (await old.reserve([reservation(key_of(2))]))[0].outcome is Reserved.STALE_OWNER
    assert (await old.mark_committed([commit_of(item, result)]))[0].outcome is Committed.STALE_OWNER
    assert (await old.mark_read([mark]))[0].stale_owner
    assert (await new.reserve([item]))[0].outcome is Reserved.RECORDED
    assert (await new.mark_committed([commit_of(item, result)]))[0].outcome is Committed.COMMITTED
    refused = await old.claim(claim_of(b"d" * 16, supervisor=b"t" * 16))
    assert {refusal.reason for refusal in refused.refusals} == {"fresh"}


async def test_a_late_refresh_of_a_predecessor_takes_nothing_back(workers: Workers) -> None:
    old, new = workers(), workers()
    await old.claim(claim_of(take_over=True))
    assert (await old.claim(claim_of(take_over=True, is_refresh=True))).epochs[SLOT] == 1
    assert (await new.claim(claim_of(b"c" * 16, slots=[SLOT]))).epochs == {SLOT: 2}
    refused = await old.claim(claim_of(take_over=True, is_refresh=True))
    assert refused == ({}, (ClaimRefusal(SLOT, "lost", "host-1"),))
    assert (await new.reserve([reservation()]))[0].outcome is Reserved.NEW
    assert (await old.reserve([reservation(key_of(2))]))[0].outcome is Reserved.STALE_OWNER


async def test_a_refresh_wakes_no_slot_that_was_released_or_never_claimed(workers: Workers) -> None:
    store = workers()
    refresh = claim_of(slots=[SLOT], is_refresh=True)
    assert (await store.claim(refresh)).refusals == (ClaimRefusal(SLOT, "lost", ""),)
    await store.claim(claim_of(slots=[SLOT]))
    await store.release(claim_of(slots=[SLOT]))
    assert (await store.claim(refresh)).refusals == (ClaimRefusal(SLOT, "lost", "host-1"),)
    stranger = claim_of(b"c" * 16, slots=[SLOT], supervisor=b"t" * 16, placement=b"q" * 16)
    assert (await workers().claim(stranger)).epochs == {SLOT: 2}


async def test_a_store_that_claimed_nothing_is_a_stale_owner(workers: Workers) -> None:
    assert (await workers().reserve([reservation()]))[0].outcome is Reserved.STALE_OWNER


async def test_positions_and_the_seen_offset_only_rise(store: CommitStore) -> None:
    one, two = SlotId(1), SlotId(2)
    await store.store_positions("fanout", {one: Offset(5)})
    await store.store_positions("fanout", {one: Offset(4), two: Offset(0)})
    assert await store.load_positions("fanout", [one, two, SlotId(3)]) == {one: 5, two: 0}
    items = [reservation(key_of(number)) for number in range(2)]
    results = await store.reserve(items)
    for item, result, offset in zip(items, results, (9, 8), strict=True):
        await store.mark_committed([commit_of(item, result, offset=offset, partition=1)])
    assert await store.load_outbox_seen([one, two]) == {one: 9}
    assert await store.memory_used_ratio() == 0


async def test_calls_without_items_answer_nothing(store: CommitStore) -> None:
    assert await store.reserve([]) == []
    assert await store.mark_committed([]) == []
    assert await store.read_history([]) == []
    assert await store.mark_read([]) == []
    assert await store.load_positions("fanout", []) == {}


@pytest.mark.shows("C4", "C6")
async def test_the_window_ends_exactly_two_hours_after_the_commit() -> None:
    clock = ManualClock()
    store = MemoryCommitStore(clock)
    await store.claim(claim_of())
    item = reservation(reserved_at=clock.now_ms())
    (result,) = await store.reserve([item])
    clock.advance(milliseconds=3 * 3_600_000)
    assert (await store.reserve([item]))[0].outcome is Reserved.RECORDED
    await store.mark_committed([commit_of(item, result)])
    clock.advance(milliseconds=IDEMPOTENCY_WINDOW_MS)
    assert (await store.reserve([item]))[0].outcome is Reserved.COMMITTED
    clock.advance(milliseconds=1)
    (late,) = await store.reserve([reservation(reserved_at=clock.now_ms())])
    assert (late.outcome, late.seq) == (Reserved.NEW, 2)


async def test_a_memory_store_with_a_limit_is_full() -> None:
    store = MemoryCommitStore(CLOCK, limit_bytes=10)
    await store.claim(claim_of())
    await store.reserve([reservation()])
    assert (await store.reserve([reservation(key_of(2))]))[0].outcome is Reserved.FULL
    assert await store.memory_used_ratio() >= 1


async def test_a_dead_server_is_unknown_for_what_was_sent_and_a_no_afterwards(
    fresh_valkey: StoreServer,
) -> None:
    async with opened_pipe(fresh_valkey) as pipe:
        store = RedisCommitStore(pipe, CLOCK)
        await store.claim(claim_of())
        stopped = store.reserve([reservation(key_of(number)) for number in range(100)])
        pipe.flush()
        fresh_valkey.kill9()
        with pytest.raises(StoreUnknown):
            await stopped
        with pytest.raises(StoreRefused):
            await store.reserve([reservation(key_of(1))])

"""Commits in one step in memory: a memory commit store and a memory log, as one server that holds both.

The reference for `lua/commit_messages.lua`, and what the simulation runs on. A call is applied when the
method is called, wholly or not at all. The faults of the log strike here too: `REFUSED` and `LOST` do
nothing, `UNANSWERED` does everything; the caller of the last two learns that the outcome is unknown.
`DOUBLED` stores each new Outbox record twice, as a retry below us would; the message is committed once, at
the second one. A message that is already RECORDED keeps its conversation on the way of two steps, as on a
server.
"""

import asyncio
from collections.abc import Sequence

from msgspec import structs

from qim.adapters.commitlog_memory import Fault, MemoryCommitLog
from qim.adapters.commits_memory import MemoryCommitStore
from qim.adapters.ownership_memory import done
from qim.errors import StoreRefused, StoreUnknown
from qim.ids import Millis, Seq, SlotId
from qim.ports import Commit, Reservation, Reserved, ReserveResult
from qim.records import fill_outbox_frame


class MemoryOneStepCommits:
    """`OneStepCommits` of the port."""

    def __init__(self, store: MemoryCommitStore, outbox: MemoryCommitLog) -> None:
        self._store = store
        self._outbox = outbox

    def commit(self, items: Sequence[Reservation], partition: SlotId) -> asyncio.Future[list[ReserveResult]]:
        if self._store.is_full:
            return done([ReserveResult(Reserved.FULL, Seq(0), Millis(0), b"")] * len(items))
        fault = self._outbox.next_fault() if items else None
        if fault is Fault.REFUSED:
            return _failed(StoreRefused("the test refused this commit"))
        if fault is Fault.LOST:
            return _failed(StoreUnknown("the test lost this commit"))
        copies = 2 if fault is Fault.DOUBLED else 1
        results = [self._commit_one(item, partition, copies=copies) for item in items]
        self._outbox.wake()
        if fault is Fault.UNANSWERED:
            return _failed(StoreUnknown("the test lost the answer of this commit"))
        return done(results)

    def _commit_one(self, item: Reservation, partition: SlotId, *, copies: int) -> ReserveResult:
        known = self._store.judge(item)
        if known is not None:
            return known
        if self._store.has_unfinished(item.key):
            return ReserveResult(Reserved.TWO_STEPS, Seq(0), Millis(0), b"")
        result = self._store.allocate(item)
        if result.outcome is not Reserved.NEW:
            return result
        record = fill_outbox_frame(item.outbox_frame, seq=result.seq, record_bytes=item.record)
        offset = self._outbox.store([(partition, record)] * copies)[-1]
        commit = Commit(item.key, item.identity, result.seq, item.reserved_at, False, partition, offset)
        self._store.mark_one(commit, self._store.clock.now_ms())
        return structs.replace(result, outcome=Reserved.DURABLE)


def _failed(error: Exception) -> asyncio.Future[list[ReserveResult]]:
    future: asyncio.Future[list[ReserveResult]] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future

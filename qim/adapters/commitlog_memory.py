"""A log in memory: 64 partitions of dense offsets, and readers that are woken; for the simulation and tests.

It keeps the promises of the Redis log, and it can be told what goes wrong with the next appends, each once
and in order: `Fault.REFUSED` raises and stores nothing; `LOST` stores nothing and answers unknown;
`UNANSWERED` stores and answers unknown; `DOUBLED` stores twice, as a retry below us would. So a role is shown
every outcome that an append can have. Readers see what was stored, like any process beside the one that
appended. The object is the log: it outlives the roles that a test kills and starts again.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Final

from qim.adapters.commitlog_cursor import Cursors
from qim.adapters.ownership_memory import done
from qim.clock import Clock
from qim.errors import StoreRefused
from qim.ids import Offset, SlotId
from qim.ports import LogRecord, Watermarks

MEMORY_IDENTITY: Final = b"a log in memory."
assert len(MEMORY_IDENTITY) == 16


class Fault(Enum):
    """What happens to one append."""

    REFUSED = "refused"
    LOST = "lost"
    UNANSWERED = "unanswered"
    DOUBLED = "doubled"


class Partition:
    """Records of one partition; `low` is the offset of the first."""

    def __init__(self) -> None:
        self.low = Offset(0)
        self.records: list[bytes] = []

    @property
    def high(self) -> Offset:
        return Offset(self.low + len(self.records))

    def drop_below(self, bound: Offset) -> None:
        count = min(max(0, bound - self.low), len(self.records))
        del self.records[:count]
        self.low = Offset(self.low + count)


EMPTY: Final = Partition()
"""Stands for every partition that nothing was appended to."""


class MemoryCommitLog:
    """`CommitLog` of the port."""

    def __init__(self, clock: Clock, *, identity: bytes = MEMORY_IDENTITY) -> None:
        self._clock = clock
        self._identity = identity
        self._partitions: dict[SlotId, Partition] = {}
        self._wakers: list[Callable[[], None]] = []
        self.faults: deque[Fault] = deque()
        """What happens to the next appends; empty: they succeed."""
        self.struck: list[Fault] = []
        """Which faults happened, so that a test can prove that its fault did."""

    def append(self, records: Sequence[tuple[SlotId, bytes]]) -> asyncio.Future[list[Offset | None]]:
        fault = self.next_fault() if records else None
        if fault is Fault.REFUSED:
            future: asyncio.Future[list[Offset | None]] = asyncio.get_running_loop().create_future()
            future.set_exception(StoreRefused("the test refused this append"))
            return future
        unknown: list[Offset | None] = [None] * len(records)
        if fault is Fault.LOST:
            return done(unknown)
        offsets = self.store(records)
        if fault is Fault.DOUBLED:
            offsets = self.store(records)
        self.wake()
        return done(unknown if fault is Fault.UNANSWERED else [*offsets])

    def next_fault(self) -> Fault | None:
        """What the test wants to happen to this append."""
        if not self.faults:
            return None
        self.struck.append(self.faults.popleft())
        return self.struck[-1]

    def wake(self) -> None:
        """Tells every reader that there may be more."""
        for wake in tuple(self._wakers):
            wake()

    def store(self, records: Sequence[tuple[SlotId, bytes]]) -> list[Offset]:
        """Appends and wakes nobody; the offset of each record."""
        offsets: list[Offset] = []
        for partition, data in records:
            held = self.partition(partition)
            offsets.append(held.high)
            held.records.append(data)
        return offsets

    def partition(self, partition: SlotId) -> Partition:
        return self._partitions.setdefault(partition, Partition())

    def open_reader(self, positions: Mapping[SlotId, Offset]) -> "MemoryLogReader":
        return MemoryLogReader(self, positions)

    def watermarks(self, partitions: Sequence[SlotId]) -> asyncio.Future[dict[SlotId, Watermarks]]:
        held = self._partitions
        return done({name: _marks(held.get(name, EMPTY)) for name in partitions})

    def read(self, partition: SlotId, offset: Offset, *, records_max: int) -> asyncio.Future[list[LogRecord]]:
        held = self.partition(partition)
        first = max(offset, held.low)
        records = held.records[first - held.low :][:records_max]
        return done([LogRecord(partition, Offset(at), data) for at, data in enumerate(records, first)])

    def identity(self) -> asyncio.Future[bytes]:
        return done(self._identity)

    def trim(self, bounds: Mapping[SlotId, Offset]) -> asyncio.Future[None]:
        for partition, bound in bounds.items():
            held = self.partition(partition)
            held.drop_below(min(bound, Offset(held.high - 1)))
        return done(None)

    def watch(self, wake: Callable[[], None]) -> None:
        self._wakers.append(wake)

    def unwatch(self, wake: Callable[[], None]) -> None:
        if wake in self._wakers:
            self._wakers.remove(wake)


def _marks(partition: Partition) -> Watermarks:
    return Watermarks(partition.low, partition.high)


class MemoryLogReader:
    """`LogReader` of the port."""

    def __init__(self, log: MemoryCommitLog, positions: Mapping[SlotId, Offset]) -> None:
        self._log = log
        self._cursors = Cursors(positions)
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False
        log.watch(self._wake)

    async def next_batch(self, *, records_max: int, bytes_max: int) -> list[LogRecord]:
        """Empty only after `close`. Yields to the loop once, as a real reader would."""
        await asyncio.sleep(0)
        while not self._is_closed:
            self._accept()
            batch = self._cursors.take(records_max=records_max, bytes_max=bytes_max)
            if batch:
                return batch
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return []

    def _accept(self) -> None:
        partitions = self._log._partitions
        for cursor in self._cursors.hungry():
            held = partitions.get(cursor.partition, EMPTY)
            if cursor.fetch_at == held.low + len(held.records):
                continue  # nothing new, as in nearly all partitions at any time
            cursor.check_end(held.high)
            start = max(0, cursor.fetch_at - held.low)
            cursor.accept(Offset(held.low + start), held.records[start:])

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def pause(self, partition: SlotId) -> None:
        self._cursors.by_partition[partition].pause()

    def resume(self, partition: SlotId) -> None:
        self._cursors.by_partition[partition].is_paused = False
        self._wake()

    def seek(self, partition: SlotId, position: Offset) -> None:
        self._cursors.by_partition[partition].seek(position)
        self._wake()

    async def close(self) -> None:
        self._is_closed = True
        self._log.unwatch(self._wake)
        self._wake()

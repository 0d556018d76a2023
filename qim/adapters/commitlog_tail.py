"""The tail of a log: what this process has just appended, kept until its readers have taken it.

It saves the reader a round trip and the server the sending. Only partitions that somebody here reads are
kept. Full (bytes): the oldest goes, and the reader fetches it from the server instead. Losing the whole tail
loses nothing. The appending side adds and wakes, the readers take; all in one event loop. Who is woken is
told which partitions have grown, so that a reader of 64 need not look at those that stand still.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, TypeAlias

from qim.ids import Offset, SlotId

AGES_MIN: Final = 1_024
"""So many are remembered before it is worth a look which of them are still held."""


Wake: TypeAlias = Callable[[Iterable[SlotId]], None]
"""Told which partitions have grown, be they the reader's or not."""


class LogTail:
    """Chunks of appended records per partition, in the order of their offsets."""

    def __init__(self, *, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._chunks: dict[SlotId, deque[tuple[Offset, list[bytes], int]]] = {}
        self._ages: deque[SlotId] = deque()
        """Partition of each chunk, oldest first; the entry of a released chunk stays for a while."""
        self._ages_max = AGES_MIN
        self._watchers: dict[SlotId, list[Wake]] = {}
        self.ends: dict[SlotId, Offset] = {}
        """Offset behind the last record that this process appended."""

    def watch(self, partitions: Iterable[SlotId], wake: Wake) -> None:
        for partition in partitions:
            self._watchers.setdefault(partition, []).append(wake)

    def unwatch(self, partitions: Iterable[SlotId], wake: Wake) -> None:
        for partition in partitions:
            self._watchers[partition].remove(wake)
            if not self._watchers[partition]:
                self._drop(partition)

    def add(self, partition: SlotId, first: Offset, records: list[bytes]) -> None:
        self.ends[partition] = Offset(first + len(records))
        if not self._watchers.get(partition):
            return
        size = sum(map(len, records))
        chunks = self._chunks.get(partition)
        if chunks is None:
            chunks = self._chunks[partition] = deque()
        chunks.append((first, records, size))
        self._ages.append(partition)
        if len(self._ages) > self._ages_max:
            self._forget_released()
        self._bytes += size
        while self._bytes > self._bytes_max and self._ages:
            self._evict(self._ages.popleft())

    def wake(self, partitions: Collection[SlotId]) -> None:
        """Wakes each reader once per call, whatever number of its partitions have grown."""
        watchers = (wake for partition in partitions for wake in self._watchers.get(partition, ()))
        for wake in dict.fromkeys(watchers):
            wake(partitions)

    def chunks_at(self, partition: SlotId, offset: Offset) -> Sequence[tuple[Offset, list[bytes]]]:
        """Unbroken chunks from the one that holds `offset` on; nothing when it is not here.

        With one reader the chunks are released with the call.
        """
        chunks = self._chunks.get(partition)
        if not chunks:
            return ()
        found: list[tuple[Offset, list[bytes]]] = []
        wanted = offset
        for first, records, _ in chunks:
            if first > wanted:
                break
            if first + len(records) > wanted:
                found.append((first, records))
                wanted = Offset(first + len(records))
        if len(self._watchers[partition]) == 1:
            while chunks and chunks[0][0] < wanted:
                self._bytes -= chunks.popleft()[2]
        return found

    def _forget_released(self) -> None:
        """Keeps the ages of the chunks that are held: of each partition, as many of the newest."""
        held = {partition: len(chunks) for partition, chunks in self._chunks.items()}
        kept: deque[SlotId] = deque()
        for partition in reversed(self._ages):
            if held.get(partition, 0):
                held[partition] -= 1
                kept.appendleft(partition)
        self._ages = kept
        self._ages_max = max(AGES_MIN, 2 * len(kept))

    def _evict(self, partition: SlotId) -> None:
        chunks = self._chunks.get(partition)
        if chunks:
            self._bytes -= chunks.popleft()[2]

    def _drop(self, partition: SlotId) -> None:
        for _, _, size in self._chunks.pop(partition, ()):
            self._bytes -= size

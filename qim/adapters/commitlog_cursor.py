"""Where a reader of a log stands in each partition, and what it has fetched but not handed out; no IO.

Both media use it, so both keep the same promises: only the next offset of a partition is accepted, a jump is
OffsetOutOfRange and never skipped; a batch goes round the partitions in turns, so that a busy one does not
starve a quiet one; a paused partition hands out nothing and holds nothing: it is fetched again.

`ReadAhead` bounds in bytes what a reader fetches ahead, although a server counts in entries only.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from qim.errors import OffsetOutOfRange
from qim.ids import Offset, SlotId
from qim.limits import SLOTS
from qim.ports import LogRecord

FETCH_ENTRIES_MAX: Final = 8
"""Stream entries per partition and question; one may hold a whole batch, so few are enough."""


class Cursor:
    """One partition of a reader."""

    def __init__(self, partition: SlotId, position: Offset) -> None:
        self.partition = partition
        self.is_paused = False
        self.buffer: deque[LogRecord] = deque()
        self.fetch_at = Offset(position + 1)
        """Offset behind everything that was fetched."""
        self.turns = 0
        """Rises with each seek: what was asked for before it is not accepted after it."""

    def seek(self, position: Offset) -> None:
        self.buffer.clear()
        self.fetch_at = Offset(position + 1)
        self.turns += 1

    def pause(self) -> None:
        """What was fetched is given back, so that partitions that stand still hold no memory."""
        self.seek(Offset((self.buffer[0].offset if self.buffer else self.fetch_at) - 1))
        self.is_paused = True

    def accept(self, first: Offset, records: Sequence[bytes]) -> None:
        """Takes records that begin at `first`; what is known already is cut off."""
        fetch_at = self.fetch_at
        if first > fetch_at:
            raise OffsetOutOfRange(
                f"partition {self.partition}: the next offset is {fetch_at}, the log goes on at {first}",
                partition=self.partition,
            )
        end = Offset(first + len(records))
        if end > fetch_at:
            partition, append = self.partition, self.buffer.append
            for at in range(fetch_at - first, len(records)):
                append(LogRecord(partition, Offset(first + at), records[at]))
            self.fetch_at = end

    def check_end(self, end: Offset) -> None:
        """`end` is the offset that the log's next record gets."""
        if end < self.fetch_at:
            raise OffsetOutOfRange(
                f"partition {self.partition}: the position is {self.fetch_at - 1}, the log ends at {end - 1}",
                partition=self.partition,
            )

    def check_rest(self, end: Offset) -> None:
        """The log holds nothing from here on, and it ended at `end` before that was known."""
        if end > self.fetch_at:
            raise OffsetOutOfRange(
                f"partition {self.partition}: next is {self.fetch_at}, the log is empty up to {end}",
                partition=self.partition,
            )


class Cursors:
    """All partitions of one reader."""

    def __init__(self, positions: Mapping[SlotId, Offset]) -> None:
        self.by_partition = {
            partition: Cursor(partition, position) for partition, position in positions.items()
        }
        self._order = deque(self.by_partition.values())

    def hungry(self) -> list[Cursor]:
        """Cursors that would hand out records if they had any."""
        return [cursor for cursor in self._order if not (cursor.is_paused or cursor.buffer)]

    def take(self, *, records_max: int, bytes_max: int) -> list[LogRecord]:
        """A batch: equal shares in the first round, the rest to whoever has more. At least one record."""
        ready = [cursor for cursor in self._order if cursor.buffer and not cursor.is_paused]
        if not ready:
            return []
        self._order.rotate(-1)
        batch: list[LogRecord] = []
        bytes_left = bytes_max
        share = max(1, records_max // len(ready))
        while ready and len(batch) < records_max:
            for cursor in ready:
                buffer = cursor.buffer
                for _ in range(min(share, records_max - len(batch), len(buffer))):
                    bytes_left -= len(buffer[0].data)
                    if bytes_left < 0 and batch:
                        return batch
                    batch.append(buffer.popleft())
            ready = [cursor for cursor in ready if cursor.buffer]
        return batch


class ReadAhead:
    """How many stream entries a question may ask for, over all partitions together.

    What entries weigh is known only when they are here. So the first questions ask for few, each following
    one for twice as many at most, and all that is asked for fits into `bytes_max` at the size of the largest
    entry lately seen. At least one entry: the largest that exists is read too.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._largest = 0
        self.entries = FETCH_ENTRIES_MAX

    def per_partition(self, partitions: int) -> int:
        return max(1, min(FETCH_ENTRIES_MAX, self.entries // partitions))

    def note(self, largest: int) -> None:
        """An answer came; `largest` is the size of its largest entry. What was seen before counts half."""
        self._largest = max(1, largest, self._largest // 2)
        fitting = self._bytes_max // self._largest
        self.entries = max(1, min(2 * self.entries, fitting, FETCH_ENTRIES_MAX * SLOTS))

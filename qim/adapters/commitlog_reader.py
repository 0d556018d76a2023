"""A reader of the log on Redis streams: woken by what is appended, never by a timer that polls.

A reader gets its records from three places, in this order:

    tail      what this process appended itself (`commitlog_tail`), without asking the server
    fetch     XREAD without waiting, for partitions that are known to hold more: after opening, a seek, a
              resume, or when the tail lost what is needed
    block     only in a shared log, where other processes append: one blocking XREAD over all partitions, on
              a connection of its own, ended by the server after a second at the latest

Once a second one HMGET compares the counters of all partitions with the positions. It finds what strangers
appended to a log that is not shared, and a log that ends below a position. A partition whose next record is
not the next offset, whose next entry cannot be read, or whose key is no stream raises PartitionStopped; the
reader does not go on behind it, and **goes on in all others**: a reply is taken over as far as it can be, and
a question that the server refuses for one key is asked again key by key. Who paused the partition is not told
again.

Nothing is fetched while there is something to hand out, and a fetch asks for so few entries, of so few
partitions in turn, that its answer weighs no more than a batch (`ReadAhead`). A block asks all partitions,
since each may be the next to grow, for one entry each at least.

A reply is accepted only where the cursor still stands where it stood when the question was asked. When the
server dies, `next_batch` raises the store's error; calling it again goes on at the same place.
"""

import asyncio
import struct
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qim.adapters.commitlog_cursor import Cursor, Cursors, ReadAhead
from qim.errors import EntryUnreadable, LogError, PartitionStopped, StoreBroken, StoreError
from qim.ids import Offset, SlotId
from qim.limits import LOG_READ_BYTES_MAX, LOG_SWEEP_INTERVAL_MS, STORE_TIMEOUT_MS
from qim.ports import LogRecord

if TYPE_CHECKING:
    from qim.adapters.commitlog_redis import RedisCommitLog

assert LOG_SWEEP_INTERVAL_MS * 2 < STORE_TIMEOUT_MS, "a blocking read must end before the pipe gives it up"

_LENGTH = struct.Struct(">I")

Asked = Sequence[tuple[Cursor, int, Offset]]
"""Cursor, its turns and its offset when the question was asked."""


def unpack_entry(entry: Sequence[Any]) -> tuple[Offset, list[bytes]]:
    """First offset and records of one stream entry; raises ValueError when it is not one of ours."""
    identifier, fields = entry
    count, packed = int(fields[1]), fields[3]
    records = []
    at = 0
    for _ in range(count):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(packed, at)[0]
        records.append(packed[start:at])
    if at != len(packed):
        raise ValueError(f"a stream entry of {len(packed)} bytes that ends at {at}")
    return Offset(int(identifier.split(b"-")[0]) - count), records


class RedisLogReader:
    """`LogReader` of the port. One task calls `next_batch`; pause, resume and seek are called beside it."""

    def __init__(self, log: "RedisCommitLog", positions: Mapping[SlotId, Offset]) -> None:
        self._log = log
        self._cursors = Cursors(positions)
        self._ahead = ReadAhead(LOG_READ_BYTES_MAX)
        self._stale: dict[SlotId, None] = {}
        """Partitions that the server knows more of, in the order in which they are asked."""
        self._ends: dict[SlotId, Offset] = {}
        """Where the last sweep saw the ends of those partitions."""
        self._grown: dict[SlotId, None] = dict.fromkeys(positions)
        """Partitions of which the tail may know more than was accepted; no other one is worth a look. May
        name partitions of other readers.
        """
        self._is_sweep_due = True
        self._waiter: asyncio.Future[None] | None = None
        self._blocking = False
        self._error: StoreError | LogError | None = None
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        log.tail.watch(self._cursors.by_partition, self._on_grown)

    # --- the port ---

    async def next_batch(self, *, records_max: int, bytes_max: int) -> list[LogRecord]:
        """Empty only after `close`."""
        while not self._is_closed:
            self._accept_tail()
            batch = self._cursors.take(records_max=records_max, bytes_max=bytes_max)
            if batch:
                return batch
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._is_sweep_due:
                await self._sweep()
            elif self._stale and any(cursor.partition in self._stale for cursor in self._cursors.hungry()):
                await self._fetch()
            else:
                await self._wait()
        return []

    def pause(self, partition: SlotId) -> None:
        self._cursors.by_partition[partition].pause()
        self._grown[partition] = None  # what was fetched was given back

    def resume(self, partition: SlotId) -> None:
        cursor = self._cursors.by_partition[partition]
        if cursor.is_paused:
            cursor.is_paused = False
            self._stale[partition] = None
            self._wake()

    def seek(self, partition: SlotId, position: Offset) -> None:
        self._cursors.by_partition[partition].seek(position)
        self._grown[partition] = None
        self._stale[partition] = None
        self._is_sweep_due = True
        self._wake()

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._log.tail.unwatch(self._cursors.by_partition, self._on_grown)
        self._wake()

    # --- waiting ---

    def _on_grown(self, partitions: Iterable[SlotId]) -> None:
        self._grown.update(dict.fromkeys(partitions))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._timer = loop.call_later(LOG_SWEEP_INTERVAL_MS / 1000, self._on_timer)
        waiter = self._waiter = loop.create_future()
        if self._log.shared and not self._blocking:
            await self._block()
        if not self._is_closed and self._error is None:
            await waiter
        self._waiter = None

    def _on_timer(self) -> None:
        self._timer = None
        self._is_sweep_due = True
        self._wake()

    # --- the three places ---

    def _accept_tail(self) -> None:
        tail = self._log.tail
        cursors = self._cursors.by_partition
        for partition in [*self._grown]:
            cursor = cursors.get(partition)
            if cursor is None:
                del self._grown[partition]
                continue
            if cursor.is_paused or cursor.buffer:
                continue  # stays noted: it is looked at when it would hand out more
            end = tail.ends.get(partition, 0)
            if end > cursor.fetch_at:
                chunks = tail.chunks_at(partition, cursor.fetch_at)
                for first, records in chunks:
                    cursor.accept(first, records)
                if not chunks:
                    self._stale[partition] = None
            if end <= cursor.fetch_at:
                del self._grown[partition]

    async def _fetch(self) -> None:
        hungry = {cursor.partition: cursor for cursor in self._cursors.hungry()}
        turn = [partition for partition in self._stale if partition in hungry][: self._ahead.entries]
        count = self._ahead.per_partition(len(turn))
        asked = [_ask(hungry[partition]) for partition in turn]
        for partition in turn:  # to the end: the next question begins with others
            del self._stale[partition]
            self._stale[partition] = None
        try:
            reply = await self._read(asked, count)
        except StoreBroken as error:
            if len(asked) == 1:
                raise self._unreadable(asked[0][0], error) from error
            await self._fetch_apart(asked, count)
        else:
            self._accept(asked, reply, count)

    async def _fetch_apart(self, asked: Asked, count: int) -> None:
        """The server refuses a question for the fault of one key: asked one by one, only that one fails."""
        stopped: PartitionStopped | None = None
        for one in asked:
            try:
                self._accept([one], await self._read([one], count), count)
            except PartitionStopped as error:
                stopped = stopped or error
            except StoreBroken as error:
                stopped = stopped or self._unreadable(one[0], error)
        if stopped is not None:
            raise stopped

    def _read(self, asked: Asked, count: int) -> Awaitable[Any]:
        return self._log.pipe.command("XREAD", "COUNT", count, "STREAMS", *self._keys_and_ids(asked))

    def _unreadable(self, cursor: Cursor, error: Exception) -> EntryUnreadable:
        partition = cursor.partition
        return EntryUnreadable(
            f"{self._log.name} {partition} at {cursor.fetch_at}: {error}", partition=partition
        )

    async def _block(self) -> None:
        asked = [_ask(cursor) for cursor in self._cursors.hungry()]
        if not asked:
            return
        pipe = await self._log.connect_reader()
        self._blocking = True
        pipe.submit(
            ("XREAD", "COUNT", self._ahead.per_partition(len(asked)), "BLOCK", LOG_SWEEP_INTERVAL_MS,
             "STREAMS", *self._keys_and_ids(asked)),
            lambda reply: self._on_blocked(asked, reply),
        )  # fmt: skip

    def _on_blocked(self, asked: Asked, reply: object) -> None:
        self._blocking = False
        try:
            if isinstance(reply, StoreError):
                raise reply
            self._accept(asked, reply)
        except StoreBroken:
            # One of many keys; the questions that do not wait find out which.
            self._stale.update((cursor.partition, None) for cursor, _, _ in asked)
        except (StoreError, LogError) as error:
            self._error = error
        self._wake()

    def _accept(self, asked: Asked, reply: Any, count: int = 0) -> None:  # noqa: ANN401 - decoded here
        """`count`: so many entries per partition were asked for, fewer are all; 0: the answer of a block."""
        found = dict(reply or ())
        largest = 0
        stopped: PartitionStopped | None = None
        for cursor, turns, offset in asked:
            entries = found.get(self._log.keys[cursor.partition], ())
            if cursor.turns != turns or cursor.fetch_at != offset:
                continue
            if len(entries) < count:
                self._stale.pop(cursor.partition, None)
            try:
                if count and not entries:
                    cursor.check_rest(self._ends.get(cursor.partition, offset))
                for entry in entries:
                    cursor.accept(*unpack_entry(entry))
                    largest = max(largest, len(entry[1][3]))
            except (ValueError, TypeError, IndexError, struct.error) as error:
                stopped = self._refusal(cursor, self._unreadable(cursor, error)) or stopped
            except PartitionStopped as error:
                stopped = self._refusal(cursor, error) or stopped
        if largest:
            self._ahead.note(largest)
        if stopped is not None:
            raise stopped

    def _refusal(self, cursor: Cursor, error: PartitionStopped) -> PartitionStopped | None:
        """What stands in front of the bad place is handed out first: who is told stands right before it."""
        self._stale[cursor.partition] = None
        return None if cursor.buffer else error

    async def _sweep(self) -> None:
        asked = [_ask(cursor) for cursor in self._cursors.by_partition.values()]
        self._is_sweep_due = False
        try:
            ends = await self._log.load_ends([cursor.partition for cursor, _, _ in asked])
        except StoreError:
            self._is_sweep_due = True
            raise
        stopped: PartitionStopped | None = None
        for cursor, turns, offset in asked:
            end = ends.get(cursor.partition)
            if end is None or cursor.turns != turns or cursor.is_paused:
                continue
            if end < offset:  # the offset at the time of the question: a block may have moved it since
                try:
                    cursor.check_end(end)
                except PartitionStopped as error:
                    stopped = stopped or error
            elif end > cursor.fetch_at:
                self._stale[cursor.partition] = None
                self._ends[cursor.partition] = end
        if stopped is not None:
            raise stopped

    def _keys_and_ids(self, asked: Asked) -> Iterable[bytes]:
        """An entry's id is the offset behind its last record: the first id above an offset holds it."""
        yield from (self._log.keys[cursor.partition] for cursor, _, _ in asked)
        yield from (b"%d-0" % offset for _, _, offset in asked)


def _ask(cursor: Cursor) -> tuple[Cursor, int, Offset]:
    return cursor, cursor.turns, cursor.fetch_at

"""One of the two logs on Redis streams: dense offsets, many partitions per append, readers that are woken.

    outbox:{bNNN}, dispatch:{sNN}    stream per partition; bNNN is the first bucket of the slot
    lognext:<name>                   hash: partition → offset that the next record gets
    qim:identity                     hash: field log:<name> → the log's 16 bytes

    stream entry:  id = (offset of its last record + 1)-0,  n <count>,  r <count × (length u32 ‖ record)>

All records of one partition in a call are one stream entry, so a record costs little and offsets stay dense.
The id says where an entry ends, so the stream's own last id is the next offset, and XREAD behind an offset
finds the entry that holds it.

Append: a lost answer is None (unknown: append again), a refusal before anything was sent is raised. A counter
that contradicts its stream raises StoreBroken. `commits_one_step_redis` appends to the same keys by a script
of its own. What was appended here goes to the tail, which serves the readers of this process without a round
trip (`commitlog_tail`, `commitlog_reader`).

Trim drops whole entries below a bound. The script holds the bound against the consumers that it can see
(`logpos:fanout` for the Outbox, `mboxw` for dispatch, when they live on this instance), so a caller's mistake
never drops what a consumer still needs.
"""

import asyncio
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from qim.adapters.commitlog_reader import RedisLogReader, unpack_entry
from qim.adapters.commitlog_tail import LogTail
from qim.adapters.lua_scripts import LuaScripts
from qim.adapters.mailbox_keys import WATERMARKS
from qim.adapters.redis_answers import Answers
from qim.adapters.redis_keys import IDENTITY, SLOT_FIELDS, bucket_tag, position_key, slot_tag
from qim.adapters.redis_pipe import RedisPipe
from qim.clock import Clock, SystemClock
from qim.errors import LogIdentityChanged, StoreBroken, StoreError, StoreUnknown
from qim.ids import BucketId, Offset, SlotId
from qim.limits import BUCKETS_PER_SLOT, LOG_TAIL_BYTES_MAX, SLOTS
from qim.ports import LogRecord, Watermarks

LogName = Literal["outbox", "dispatch"]

_LENGTH = struct.Struct(">I")
CONSUMER_GROUP: Final = "fanout"


def stream_key(name: LogName, partition: SlotId) -> bytes:
    if name == "outbox":
        return b"outbox:" + bucket_tag(BucketId(partition * BUCKETS_PER_SLOT))[:-1]
    return b"dispatch:" + slot_tag(partition)[:-1]


def counter_key(name: LogName) -> bytes:
    return b"lognext:" + name.encode()


def pack_records(records: Sequence[bytes]) -> bytes:
    return b"".join(part for record in records for part in (_LENGTH.pack(len(record)), record))


class RedisCommitLog:
    """`CommitLog` of the port. A shared log needs `url`, for the blocking connection of its readers."""

    def __init__(
        self,
        pipe: RedisPipe,
        name: LogName,
        *,
        shared: bool = False,
        url: str = "",
        clock: Clock | None = None,
        consumers_here: bool = True,
        tail_bytes_max: int = LOG_TAIL_BYTES_MAX,
    ) -> None:
        assert url or not shared, "a shared log is read on a connection of its own"
        self.name: LogName = name
        self.pipe = pipe
        self.shared = shared
        self.keys = tuple(stream_key(name, SlotId(slot)) for slot in range(SLOTS))
        self.tail = LogTail(bytes_max=tail_bytes_max)
        self.counters = counter_key(name)
        self._consumers_here = consumers_here
        self._reader_pipe: RedisPipe | None = None
        self._url = url
        self._clock = clock or SystemClock()

    # --- append ---

    def append(self, records: Sequence[tuple[SlotId, bytes]]) -> asyncio.Future[list[Offset | None]]:
        groups: dict[SlotId, list[int]] = {}
        for index, (partition, _) in enumerate(records):
            groups.setdefault(partition, []).append(index)
        offsets: list[Offset | None] = [None] * len(records)
        answers: Answers[list[Offset | None]] = Answers(1 if records else 0, lambda _: offsets)
        if not records:
            return answers.future
        chunks = {partition: [records[index][1] for index in groups[partition]] for partition in groups}

        def decode(firsts: list[int]) -> bool:
            known = {partition: first for partition, first in zip(groups, firsts, strict=True) if first >= 0}
            for partition, first in known.items():
                for at, index in enumerate(groups[partition], first):
                    offsets[index] = Offset(at)
            self.note_appended({name: (Offset(first), chunks[name]) for name, first in known.items()})
            if len(known) < len(groups):
                raise ValueError("the counter of a partition contradicts its stream")
            return True

        packed = [part for chunk in chunks.values() for part in (b"%d" % len(chunk), pack_records(chunk))]
        self.pipe.submit_script(
            "append_log",
            [self.counters, *(self.keys[partition] for partition in groups)],
            [*(SLOT_FIELDS[partition] for partition in groups), *packed],
            answers.part(0, decode, _unknown_is_an_answer),
        )
        return answers.future

    def note_appended(self, chunks: Mapping[SlotId, tuple[Offset, list[bytes]]]) -> None:
        """Hands to the readers here what this process has appended: per partition, from which offset on."""
        for partition, (first, records) in chunks.items():
            self.tail.add(partition, first, records)
        self.tail.wake(chunks)

    # --- reading ---

    def open_reader(self, positions: Mapping[SlotId, Offset]) -> RedisLogReader:
        return RedisLogReader(self, positions)

    async def connect_reader(self) -> RedisPipe:
        """The connection that blocks: one for all readers of this log here, made when first needed."""
        if self._reader_pipe is None:
            pipe = RedisPipe(self._url, clock=self._clock, scripts=LuaScripts({}))
            await pipe.connect()
            self._reader_pipe = pipe
        return self._reader_pipe

    async def load_ends(self, partitions: Sequence[SlotId]) -> dict[SlotId, Offset]:
        """Offset that the next record of each partition gets; a lost counter is read from its stream."""
        fields = [SLOT_FIELDS[partition] for partition in partitions]
        values = await self.pipe.command("HMGET", self.counters, *fields) if fields else []
        ends = {
            partition: Offset(int(value))
            for partition, value in zip(partitions, values, strict=True)
            if value is not None and value.isdigit()
        }
        lost = [partition for partition in partitions if partition not in ends]
        if lost:
            marks = await self.watermarks(lost)
            ends.update((partition, mark.high) for partition, mark in marks.items())
        return ends

    def watermarks(self, partitions: Sequence[SlotId]) -> asyncio.Future[dict[SlotId, Watermarks]]:
        """Asks the streams themselves, not the counters. A missing stream is an empty log."""

        def combine(marks: list[Watermarks]) -> dict[SlotId, Watermarks]:
            named = zip(partitions, marks, strict=True)
            return {partition: mark for partition, mark in named if mark is not _NO_LOG}

        answers: Answers[dict[SlotId, Watermarks]] = Answers(len(partitions), combine)
        for at, partition in enumerate(partitions):
            on_reply = answers.part(at, _watermarks_of, _marks_of_error)
            self.pipe.submit(("XINFO", "STREAM", self.keys[partition]), on_reply)
        return answers.future

    def read(self, partition: SlotId, offset: Offset, *, records_max: int) -> asyncio.Future[list[LogRecord]]:
        answers: Answers[list[LogRecord]] = Answers(1, lambda parts: list(parts[0]))

        def decode(entries: list[Any]) -> list[LogRecord]:
            found = [
                LogRecord(partition, Offset(at), record)
                for first, records in map(unpack_entry, entries)
                for at, record in enumerate(records, first)
                if at >= offset
            ]
            return found[:records_max]

        start = b"%d" % (max(offset, 0) + 1)
        command = ("XRANGE", self.keys[partition], start, "+", "COUNT", records_max)
        self.pipe.submit(command, answers.part(0, decode))
        return answers.future

    # --- identity and life ---

    def identity(self) -> asyncio.Future[bytes]:
        """Raises LogIdentityChanged when the log was never given one, which is how a lost disk looks."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def on_reply(reply: object) -> None:
            if future.done():
                return
            if isinstance(reply, bytes) and len(reply) == 16:
                future.set_result(reply)
            elif isinstance(reply, StoreError):
                future.set_exception(reply)
            else:
                future.set_exception(LogIdentityChanged(f"the {self.name} log has no identity here"))

        self.pipe.submit(("HGET", IDENTITY, f"log:{self.name}"), on_reply)
        return future

    def create_identity(self, identity: bytes) -> asyncio.Future[int]:
        """For `init` only: 1 when the log had none."""
        assert len(identity) == 16
        return self.pipe.command("HSETNX", IDENTITY, f"log:{self.name}", identity)

    def trim(self, bounds: Mapping[SlotId, Offset]) -> asyncio.Future[None]:
        answers: Answers[None] = Answers(1 if bounds else 0, lambda _: None)
        positions, watermarks = self._consumers()
        arguments: list[bytes | int] = [len(positions), len(watermarks)]
        for partition, bound in bounds.items():
            arguments += (SLOT_FIELDS[partition], bound)
        keys = [*positions, *watermarks, *(self.keys[partition] for partition in bounds)]
        if bounds:
            self.pipe.submit_script("trim_log", keys, arguments, answers.part(0, len))
        return answers.future

    async def close(self) -> None:
        """Ends the connection of the readers; the pipe belongs to the caller."""
        if self._reader_pipe is not None:
            await self._reader_pipe.close()

    def _consumers(self) -> tuple[list[bytes], list[bytes]]:
        if not self._consumers_here:
            return [], []
        return ([position_key(CONSUMER_GROUP)], []) if self.name == "outbox" else ([], [WATERMARKS])


def _unknown_is_an_answer(error: StoreError) -> bool | None:
    """The offsets stay None: append again."""
    return True if isinstance(error, StoreUnknown) else None


_NO_LOG: Final = Watermarks(Offset(-1), Offset(-1))


def _marks_of_error(error: StoreError) -> Watermarks | None:
    if "no such key" in str(error):
        return Watermarks(Offset(0), Offset(0))
    return _NO_LOG if isinstance(error, StoreBroken) else None


def _watermarks_of(reply: list[Any]) -> Watermarks:
    """From XINFO STREAM; an entry's id is the offset behind its last record."""
    info = dict(zip(reply[::2], reply[1::2], strict=True))
    high = Offset(int(info[b"last-generated-id"].split(b"-")[0]))
    first = info[b"first-entry"]
    try:
        return Watermarks(unpack_entry(first)[0] if first else high, high)
    except (ValueError, TypeError, IndexError, struct.error):
        return _NO_LOG

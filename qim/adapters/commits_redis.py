"""The commit store on one core instance of Redis or Valkey, by scripts that take runs.

Keys and packed values are drawn in `redis_keys.py`. A call is cut into runs of at most 64 items, one script
call each; all of them are issued before the method returns, so the order of calls is the order on the server.
Nothing is cached here but the epochs of our slots (`redis_ownership.py`).

A full server refuses `reserve_messages` by itself, before the script starts: the items of that run are FULL.
`mark_committed` drains at most 256 sequences per conversation and call; when the script says that more are
due, the same run is issued again from its own reply, which changes nothing else.
"""

import asyncio
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, Final, TypeVar

from qim.adapters import redis_keys as keys
from qim.adapters.redis_answers import Answers
from qim.adapters.redis_ownership import RedisOwnership
from qim.adapters.redis_pipe import Argument, OnReply, RedisPipe
from qim.clock import Clock
from qim.errors import StoreBroken, StoreError, StoreRefused
from qim.ids import SEQ_MAX, BucketId, ConversationId, Millis, Offset, Seq, SlotId, TenantId
from qim.limits import BUCKETS_PER_SLOT, CLOCK_SKEW_MS_MAX, IDEMPOTENCY_WINDOW_MS, SCRIPT_RUN_ITEMS_MAX
from qim.ports import (
    Commit,
    CommitResult,
    Committed,
    HistoryPage,
    HistoryQuery,
    MessageKey,
    Pending,
    ReadMark,
    ReadMarkResult,
    Reservation,
    Reserved,
    ReserveResult,
)

PENDING_SCAN_COUNT: Final = 256
"""Entries of msgpending that one scan step looks at, about: a tenth of a millisecond of the server."""

_HEAD = struct.Struct(">BBB36sQ")
_MARK_HEAD = struct.Struct(">BBBB")
_U64 = struct.Struct(">Q")
_REFUSALS: Final = {
    -1: Reserved.CONFLICT,
    -2: Reserved.STALE_OWNER,
    -3: Reserved.CLOCK,
    -4: Reserved.EXHAUSTED,
    -5: Reserved.TWO_STEPS,
    -6: Reserved.NOT_MEMBER,
    -7: Reserved.MEMBERSHIP_CHANGED,
}
_NOT_COMMITTED: Final = {-1: Committed.NOT_PENDING, -2: Committed.STALE_OWNER}

T = TypeVar("T")


class ScriptRun:
    """The slots and conversations of one script call, numbered from 1 in the order of their first item."""

    def __init__(self, epochs: Sequence[bytes]) -> None:
        self.slots: dict[int, int] = {}
        self.conversations: dict[bytes, int] = {}
        self._groups: dict[int, None] = {}
        """Those of the conversations that are groups."""
        self._epochs = epochs

    def place(self, key: MessageKey) -> tuple[int, int]:
        suffix = keys.conversation_suffix(key.bucket, key.tenant, key.conversation)
        slots, conversations = self.slots, self.conversations
        slot = slots.setdefault(key.bucket // BUCKETS_PER_SLOT, len(slots) + 1)
        return slot, conversations.setdefault(suffix, len(conversations) + 1)

    def reservation_heads(self, run: Sequence[Reservation]) -> tuple[list[bytes], list[bytes]]:
        """The fixed part of each item, and the keys of what must be collected early."""
        collects: dict[bytes, int] = {}
        heads: list[bytes] = []
        for item in run:
            slot, conversation = self.place(item.key)
            collect, due = 0, b""
            if item.expires_at:
                collect = collects.setdefault(keys.collect_key(item.key.bucket), len(collects) + 1)
                due = b"%d" % item.expires_at
            if item.membership_version:
                self._groups[conversation] = None
                due += _U64.pack(item.membership_version)
            heads.append(_HEAD.pack(slot, conversation, collect, item.identity, item.reserved_at) + due)
        return heads, list(collects)

    def group_keys(self) -> Iterator[bytes]:
        """Head and members of each group among the conversations; nothing where all are direct."""
        suffixes = list(self.conversations) if self._groups else []
        for conversation in self._groups:
            suffix = suffixes[conversation - 1]
            yield keys.group_key(suffix)
            yield keys.member_key(suffix)

    def group_arguments(self) -> list[bytes]:
        return [bytes(self._groups)] if self._groups else []

    def owner_arguments(self) -> Iterator[bytes]:
        """Slot numbers, then the epochs under which we own them."""
        return chain(
            (keys.SLOT_FIELDS[slot] for slot in self.slots), (self._epochs[slot] for slot in self.slots)
        )


class RedisCommitStore(RedisOwnership):
    """`CommitStore` of the port."""

    def __init__(self, pipe: RedisPipe, clock: Clock) -> None:
        super().__init__(pipe)
        self._clock = clock
        self._pending_cursor = b"0"

    # --- the message path ---

    def reserve(self, items: Sequence[Reservation]) -> asyncio.Future[list[ReserveResult]]:
        runs = list(script_runs(items))
        answers = Answers(len(runs), concatenate)
        for at, run in enumerate(runs):
            script_keys, arguments = self._reserve_call(run)
            on_reply = answers.part(at, _reserve_decoder(run), full_decoder(run))
            self.pipe.submit_script("reserve_messages", script_keys, arguments, on_reply)
        return answers.future

    def mark_committed(self, items: Sequence[Commit]) -> asyncio.Future[list[CommitResult]]:
        same_partition = (list(group) for _, group in groupby(items, key=attrgetter("partition")))
        runs = [run for group in same_partition for run in script_runs(group)]
        answers = Answers(len(runs), concatenate)
        hour = self._clock.now_ms() // keys.HOUR_MS - 1
        for at, run in enumerate(runs):
            script_keys, arguments = self._mark_call(run, hour)
            decode = self._mark_decoder(len(run), script_keys, arguments)
            self.pipe.submit_script("mark_committed", script_keys, arguments, answers.part(at, decode))
        return answers.future

    def _reserve_call(self, run: Sequence[Reservation]) -> tuple[list[bytes], list[Argument]]:
        places = ScriptRun(self.epochs)
        heads, collects = places.reservation_heads(run)
        script_keys = [
            keys.OWNER,
            keys.PENDING,
            *map(keys.conversation_key, places.conversations),
            *map(keys.record_key, places.conversations),
            *(keys.committed_key(item.key) for item in run),
            *places.group_keys(),
            *collects,
        ]
        arguments: list[Argument] = [
            len(run), len(places.conversations), len(places.slots), CLOCK_SKEW_MS_MAX, SEQ_MAX,
            *places.owner_arguments(),
            *heads,
            *(item.record for item in run),
            *places.group_arguments(),
        ]  # fmt: skip
        return script_keys, arguments

    def _mark_call(self, run: Sequence[Commit], hour: int) -> tuple[list[bytes], list[Argument]]:
        places = ScriptRun(self.epochs)
        marks: dict[tuple[int, bytes], int] = {}
        heads = []
        for item in run:
            slot, conversation = places.place(item.key)
            user = b"" if item.control else b"r" + item.key.sender
            mark = marks.setdefault((conversation, user), len(marks) + 1)
            heads.append(_MARK_HEAD.pack(slot, conversation, mark, item.key.bucket) + user)
        script_keys = [
            keys.OWNER, keys.PENDING, keys.LOG_SEEN,
            keys.hour_key(hour), keys.hour_key(hour + 1), keys.hour_key(hour + 2),
            *map(keys.conversation_key, places.conversations),
            *map(keys.ahead_key, places.conversations),
            *(keys.committed_key(item.key) for item in run),
        ]  # fmt: skip
        arguments: list[Argument] = [
            len(run), len(places.conversations), len(places.slots), IDEMPOTENCY_WINDOW_MS, hour,
            keys.SLOT_FIELDS[run[0].partition], max(item.offset for item in run),
            *places.owner_arguments(),
            *heads,
            *(keys.pending_value(item.identity, item.reserved_at, item.seq) for item in run),
        ]  # fmt: skip
        return script_keys, arguments

    def _mark_decoder(
        self, count: int, script_keys: list[bytes], arguments: list[Argument]
    ) -> Callable[[Any], list[CommitResult]]:
        def drain_again(reply: object) -> None:
            """An error ends the drain; the next commit in the conversation goes on with it."""
            if isinstance(reply, list) and reply[1] == 1:
                self.pipe.submit_script("mark_committed", script_keys, arguments, drain_again)

        def decode(reply: Any) -> list[CommitResult]:  # noqa: ANN401 - checked by decoding it
            if isinstance(reply, int):
                return [CommitResult(Committed.COMMITTED, Millis(reply))] * count
            drain_again(reply)
            stamp, _, *codes = reply
            return [_commit_result(code, stamp) for code in codes]

        return decode

    # --- recovery ---

    def read_pending(
        self, buckets: Sequence[BucketId], *, older_than_ms: int, entries_max: int
    ) -> asyncio.Future[list[Pending]]:
        first = self._scan_pending(self._pending_cursor, buckets, older_than_ms)
        return asyncio.ensure_future(self._read_pending(first, buckets, older_than_ms, entries_max))

    def _scan_pending(
        self, cursor: bytes, buckets: Sequence[BucketId], older_than_ms: int
    ) -> asyncio.Future[Any]:
        arguments: list[Argument] = [cursor, PENDING_SCAN_COUNT, older_than_ms, bytes(buckets)]
        return self.pipe.script("read_pending", [keys.PENDING], arguments)

    async def _read_pending(
        self,
        step: asyncio.Future[Any],
        buckets: Sequence[BucketId],
        older_than_ms: int,
        entries_max: int,
    ) -> list[Pending]:
        """Goes on where the last call ended, so that entries that cannot be finished hide no others.

        A page may exceed its limit by what the last scan step brought; a shorter one means that all was seen.
        """
        values: dict[bytes, bytes] = {}
        start = self._pending_cursor
        is_wrapped = start == b"0"
        while True:
            self._pending_cursor, *entries = await step
            values.update(zip(entries[::2], entries[1::2], strict=True))
            if len(values) >= entries_max or (self._pending_cursor == b"0" and is_wrapped):
                break
            is_wrapped = is_wrapped or self._pending_cursor == b"0"
            step = self._scan_pending(self._pending_cursor, buckets, older_than_ms)
        return await self._read_records(values)

    async def _read_records(self, values: Mapping[bytes, bytes]) -> list[Pending]:
        """What cannot be read comes with an empty record: it must not keep the others from being finished."""
        parsed = (_parse_pending(field, value) for field, value in values.items())
        found = [item for item in parsed if item is not None]
        answers: Answers[list[bytes | None]] = Answers(len(found), list)
        for at, item in enumerate(found):
            suffix = keys.conversation_suffix(item.key.bucket, item.key.tenant, item.key.conversation)
            command = ("HGET", keys.record_key(suffix), item.seq)
            self.pipe.submit(command, answers.part(at, _same, _broken_is_empty))
        complete = []
        for item, record in zip(found, await answers.future, strict=True):
            if record is not None:
                complete.append(item._replace(record=record))
            elif await self.pipe.command("HEXISTS", keys.PENDING, keys.pending_field(item.key)):
                complete.append(item)
        return complete

    # --- reads and marks ---

    def read_history(self, queries: Sequence[HistoryQuery]) -> asyncio.Future[list[HistoryPage]]:
        answers: Answers[list[HistoryPage]] = Answers(len(queries), list)
        for at, query in enumerate(queries):
            self._ask_history(query, answers.part(at, _history_page))
        return answers.future

    def _ask_history(self, query: HistoryQuery, on_page: OnReply) -> None:
        """One call; when it met nothing but collected sequences, the next goes on behind them."""

        def on_reply(reply: object) -> None:
            if isinstance(reply, list) and len(reply) == 4 and reply[2] == 1:
                direction = {"after_seq": reply[3]} if query.after_seq else {"before_seq": reply[3]}
                self._ask_history(query._replace(**direction), on_page)
            else:
                on_page(reply)

        suffix = keys.conversation_suffix(query.bucket, query.tenant, query.conversation)
        script_keys = [keys.conversation_key(suffix), keys.record_key(suffix), keys.floor_key(query.bucket)]
        arguments: list[Argument] = [
            keys.pack_tenant(query.tenant) + query.conversation,
            query.before_seq, query.after_seq, query.entries_max, query.bytes_max,
        ]  # fmt: skip
        self.pipe.submit_script("read_history", script_keys, arguments, on_reply)

    def mark_read(self, items: Sequence[ReadMark]) -> asyncio.Future[list[ReadMarkResult]]:
        runs = list(script_runs(items))
        answers = Answers(len(runs), concatenate)
        for at, run in enumerate(runs):
            suffixes = [keys.conversation_suffix(item.bucket, item.tenant, item.conversation) for item in run]
            pairs = ((keys.conversation_key(suffix), keys.skip_key(suffix)) for suffix in suffixes)
            arguments: list[Argument] = [len(run)]
            for item in run:
                slot = item.bucket // BUCKETS_PER_SLOT
                upper: Argument = b"" if item.upper_seq is None else item.upper_seq
                arguments += (
                    keys.SLOT_FIELDS[slot], self.epochs[slot], b"r" + item.user, item.read_seq, upper,
                )  # fmt: skip
            script_keys = [keys.OWNER, *chain.from_iterable(pairs)]
            self.pipe.submit_script("mark_read", script_keys, arguments, answers.part(at, _read_marks))
        return answers.future

    # --- positions, guards ---

    def load_positions(
        self, group: str, partitions: Sequence[SlotId]
    ) -> asyncio.Future[dict[SlotId, Offset]]:
        return self._offsets(keys.position_key(group), partitions)

    def load_outbox_seen(self, partitions: Sequence[SlotId]) -> asyncio.Future[dict[SlotId, Offset]]:
        return self._offsets(keys.LOG_SEEN, partitions)

    def store_positions(self, group: str, positions: Mapping[SlotId, Offset]) -> asyncio.Future[None]:
        answers: Answers[None] = Answers(1 if positions else 0, lambda _: None)
        if positions:
            arguments = [*chain.from_iterable((slot, offset) for slot, offset in positions.items())]
            on_reply = answers.part(0, _same)
            self.pipe.submit_script("store_position", [keys.position_key(group)], arguments, on_reply)
        return answers.future

    def load_last_seq(
        self, conversations: Sequence[tuple[BucketId, TenantId, ConversationId]]
    ) -> asyncio.Future[list[Seq]]:
        answers: Answers[list[Seq]] = Answers(len(conversations), list)
        for at, place in enumerate(conversations):
            key = keys.conversation_key(keys.conversation_suffix(*place))
            self.pipe.submit(("HGET", key, "n"), answers.part(at, lambda reply: Seq(int(reply or 0))))
        return answers.future

    def memory_used_ratio(self) -> asyncio.Future[float]:
        answers: Answers[float] = Answers(1, lambda parts: parts[0])
        self.pipe.submit(("INFO", "memory"), answers.part(0, _used_ratio))
        return answers.future

    def _offsets(self, key: bytes, partitions: Sequence[SlotId]) -> asyncio.Future[dict[SlotId, Offset]]:
        answers: Answers[dict[SlotId, Offset]] = Answers(
            1 if partitions else 0, lambda parts: _stored(partitions, parts)
        )
        if partitions:
            self.pipe.submit(("HMGET", key, *partitions), answers.part(0, _same))
        return answers.future


def script_runs(items: Sequence[T]) -> Iterable[Sequence[T]]:
    return (items[at : at + SCRIPT_RUN_ITEMS_MAX] for at in range(0, len(items), SCRIPT_RUN_ITEMS_MAX))


def concatenate(parts: list[list[T]]) -> list[T]:
    return parts[0] if len(parts) == 1 else list(chain.from_iterable(parts))


def _same(reply: T) -> T:
    return reply


def _reserve_decoder(run: Sequence[Reservation]) -> Callable[[list[Any]], list[ReserveResult]]:
    def decode(reply: list[Any]) -> list[ReserveResult]:
        return [reserve_result(answer, item) for answer, item in zip(reply, run, strict=True)]

    return decode


def reserve_result(answer: int | bytes, item: Reservation, new: Reserved = Reserved.NEW) -> ReserveResult:
    """One answer of `reserve_messages` or `commit_messages`; they differ in what a new message is."""
    if isinstance(answer, int):
        if answer > 0:
            return ReserveResult(new, Seq(answer), item.reserved_at, b"")
        return ReserveResult(_REFUSALS[answer], Seq(0), Millis(0), b"")
    reserved_at = Millis(_U64.unpack_from(answer, 1)[0])
    if answer[:1] == b"C":
        return ReserveResult(Reserved.COMMITTED, Seq(int(answer[9:])), reserved_at, b"")
    end = answer.index(b":", 9)
    return ReserveResult(Reserved.RECORDED, Seq(int(answer[9:end])), reserved_at, answer[end + 1 :])


def full_decoder(run: Sequence[Reservation]) -> Callable[[StoreError], list[ReserveResult] | None]:
    def decode(error: StoreError) -> list[ReserveResult] | None:
        if isinstance(error, StoreRefused) and str(error).startswith("OOM"):
            return [ReserveResult(Reserved.FULL, Seq(0), Millis(0), b"")] * len(run)
        return None

    return decode


def _commit_result(code: int, stamp: int) -> CommitResult:
    if code == 0:
        return CommitResult(Committed.COMMITTED, Millis(stamp))
    if code > 0:
        return CommitResult(Committed.ALREADY, Millis(code))
    return CommitResult(_NOT_COMMITTED[code], Millis(0))


def _broken_is_empty(error: StoreError) -> bytes | None:
    return b"" if isinstance(error, StoreBroken) else None


def _parse_pending(field: bytes, value: bytes) -> Pending | None:
    """None: the field names no message, so nobody can wait for it; the audit finds it."""
    try:
        key = keys.parse_pending_field(field)
    except (ValueError, struct.error):
        return None
    try:
        identity, reserved_at = keys.unpack_value_head(value)
        return Pending(key, identity, Seq(int(value[keys.VALUE_HEAD_BYTES :])), Millis(reserved_at), b"")
    except (ValueError, struct.error):
        return Pending(key, b"", Seq(0), Millis(0), b"")


def _history_page(reply: list[Any]) -> HistoryPage:
    head, floor, more, _, *pairs = reply
    records = tuple((Seq(int(seq)), record) for seq, record in zip(pairs[::2], pairs[1::2], strict=True))
    return HistoryPage(records, Seq(floor + 1), Seq(head), bool(more))


def _read_marks(reply: list[int]) -> list[ReadMarkResult]:
    pairs = zip(reply[::2], reply[1::2], strict=True)
    return [ReadMarkResult(mark == -2, Seq(max(mark, 0)), unread) for mark, unread in pairs]


def _stored(partitions: Sequence[SlotId], parts: list[list[bytes | None]]) -> dict[SlotId, Offset]:
    texts = parts[0] if parts else []
    known = zip(partitions, texts, strict=False)
    return {
        slot: Offset(int(text)) for slot, text in known if text is not None and text.lstrip(b"-").isdigit()
    }


def _used_ratio(info: bytes) -> float:
    lines = dict(line.split(b":", 1) for line in info.split(b"\r\n") if b":" in line)
    limit = int(lines[b"maxmemory"])
    return int(lines[b"used_memory"]) / limit if limit else 0.0

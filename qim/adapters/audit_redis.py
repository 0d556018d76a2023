"""The orphan audit on Redis: reads only, in pages, and says what contradicts what.

The audit walks raw keys on purpose. A check that went through the scripts it checks would share their
mistakes. What it looks for (invariant C11, and C7 on the way):

    pending          a RECORDED message that nobody finishes
    gap              a sequence between floor and last without a record
    head_behind      sequences that are allocated but not visible
    index_orphan     an element of the time index whose record is gone
    fact_missing     an Outbox record inside the idempotency window without its commit fact
    fact_differs     its commit fact names another sequence or another content
    record_missing   an Outbox record above the floor whose canonical record is gone
    record_differs   … or has other bytes
    dispatch_open    a dispatch that its shard has passed without finishing it
    entry_missing    a finished dispatch whose entry is not in a recipient's mailbox
    entry_doubled    … or is there under two days

Questions go out in pipelines of at most PAGE commands and ASKED_BYTES_MAX bytes, one after the other: an
audit of a busy server delays nobody for longer than a batch of messages does, and large entries never fill
the pipe. Where an answer is a whole record the caller bounds the page in bytes. Whether a record exists is
asked without fetching it.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from qim.adapters import mailbox_keys
from qim.adapters import redis_keys as keys
from qim.adapters.redis_pipe import Argument, RedisPipe
from qim.ids import BucketId, ConversationId, Seq, TenantId
from qim.limits import IDEMPOTENCY_WINDOW_MS
from qim.ports import MessageKey
from qim.records import Dispatch, RoutingHeader, decode_entry, encode_record

PAGE: Final = 256
ASKED_BYTES_MAX: Final = 2_097_152
"""On the way to the server at once; one question more, where that one alone is larger."""
_CONVERSATION_PREFIX: Final = b"conv:{b"
_SUFFIX_AT: Final = len(b"conv:")
_TAG_BYTES: Final = len(b"{b000}:")


class Finding(NamedTuple):
    """One contradiction; the ids are printed as hexadecimal."""

    kind: str
    where: str


class OutboxRecord(NamedTuple):
    """What the Outbox holds, split by the caller."""

    header: RoutingHeader
    entry: bytes


class RedisCommitAudit:
    """Reads one core instance."""

    def __init__(self, pipe: RedisPipe, *, now_ms: int) -> None:
        self._pipe = pipe
        self._now_ms = now_ms

    async def key_count(self) -> int:
        """How many keys the instance holds: the length of the walk, for the progress bar."""
        return int(await self._pipe.command("DBSIZE"))

    async def pending(self, *, older_than_ms: int) -> AsyncIterator[list[Finding]]:
        """RECORDED messages that are older than a message in flight can be."""
        cursor: bytes | str = "0"
        while True:
            cursor, pairs = await self._pipe.command("HSCAN", keys.PENDING, cursor, "COUNT", PAGE)
            found = (self._check_pending(field, value, older_than_ms) for field, value in _pairs(pairs))
            yield [finding for finding in found if finding is not None]
            if int(cursor) == 0:
                return

    def _check_pending(self, field: bytes, value: bytes, older_than_ms: int) -> Finding | None:
        try:
            message = _message(keys.parse_pending_field(field))
            _, reserved_at = keys.unpack_value_head(value)
        except (ValueError, struct.error):
            return Finding("unreadable", f"field {field.hex()} of {keys.PENDING.decode()}")
        return Finding("pending", message) if reserved_at < self._now_ms - older_than_ms else None

    async def conversations(self) -> AsyncIterator[tuple[int, list[Finding]]]:
        """Walks all keys; yields how many were seen and what is wrong with the conversations among them."""
        cursor: bytes | str = "0"
        while True:
            cursor, found = await self._pipe.command("SCAN", cursor, "COUNT", PAGE)
            suffixes = [key[_SUFFIX_AT:] for key in found if key.startswith(_CONVERSATION_PREFIX)]
            yield len(found), await self._check_conversations(suffixes)
            if int(cursor) == 0:
                return

    async def index(self) -> AsyncIterator[list[Finding]]:
        """Every element of every hour list has its record, or lies at or below the floor."""
        cursor: bytes | str = "0"
        while True:
            cursor, hours = await self._pipe.command(
                "SCAN", cursor, "MATCH", "msghistory:*", "COUNT", 4 * PAGE
            )
            for hour in hours:
                start = 0
                while page := await self._pipe.command("LRANGE", hour, start, start + PAGE - 1):
                    yield await self._check_index(page)
                    start += PAGE
            if int(cursor) == 0:
                return

    async def facts(self, records: Sequence[OutboxRecord]) -> list[Finding]:
        """Commit fact and canonical record of each Outbox record of a page; answers as large as the page."""
        entries = [decode_entry(record.entry) for record in records]
        message_keys = [
            MessageKey(r.header.bucket, r.header.tenant, e.record.conversation_id, e.record.sender,
                       e.record.client_message_id)
            for r, e in zip(records, entries, strict=True)
        ]  # fmt: skip
        suffixes = [
            keys.conversation_suffix(key.bucket, key.tenant, key.conversation) for key in message_keys
        ]
        facts = await _ask(self._pipe, (("GET", keys.committed_key(key)) for key in message_keys))
        stored_records = await _ask(
            self._pipe,
            (
                ("HGET", keys.record_key(suffix), b"%d" % entry.conversation_seq)
                for suffix, entry in zip(suffixes, entries, strict=True)
            ),
        )
        floors = await self._floors(suffixes)
        findings: list[Finding] = []
        for record, key, entry, fact, stored, floor in zip(
            records, message_keys, entries, facts, stored_records, floors, strict=True
        ):
            where = f"{_message(key)} seq {entry.conversation_seq}"
            expires_at = entry.record.reserved_at + IDEMPOTENCY_WINDOW_MS
            if fact is None and expires_at > self._now_ms:
                findings.append(Finding("fact_missing", where))
            elif fact is not None and not _is_fact_of(fact, record.header):
                findings.append(Finding("fact_differs", where))
            if stored is None and entry.conversation_seq > floor:
                findings.append(Finding("record_missing", where))
            elif stored is not None and stored != encode_record(entry.record):
                findings.append(Finding("record_differs", where))
        return findings

    async def _check_conversations(self, suffixes: Sequence[bytes]) -> list[Finding]:
        counters = await _ask(
            self._pipe, (("HMGET", keys.conversation_key(suffix), "n", "h") for suffix in suffixes)
        )
        lengths = await _ask(self._pipe, (("HLEN", keys.record_key(suffix)) for suffix in suffixes))
        floors = await self._floors(suffixes)
        findings: list[Finding] = []
        for suffix, (last, head), stored, floor in zip(suffixes, counters, lengths, floors, strict=True):
            name = suffix[_TAG_BYTES:].hex()
            if int(head or 0) != int(last or 0):
                findings.append(Finding("head_behind", f"{name} head {int(head or 0)} last {int(last or 0)}"))
            if int(stored) != int(last or 0) - floor:
                findings.extend(await self._missing(suffix, first=floor + 1, last=int(last or 0)))
        return findings

    async def _floors(self, suffixes: Sequence[bytes]) -> list[int]:
        """Of each conversation; 0 where nothing was cut."""
        asked = (("HGET", keys.floor_key(_bucket(suffix)), suffix[_TAG_BYTES:]) for suffix in suffixes)
        return [int(floor or 0) for floor in await _ask(self._pipe, asked)]

    async def _missing(self, suffix: bytes, *, first: int, last: int) -> list[Finding]:
        """Names the sequences without a record, page by page."""
        findings: list[Finding] = []
        for start in range(first, last + 1, PAGE):
            wanted = range(start, min(start + PAGE, last + 1))
            present = await _ask(
                self._pipe, (("HEXISTS", keys.record_key(suffix), b"%d" % seq) for seq in wanted)
            )
            findings.extend(
                Finding("gap", f"{suffix[_TAG_BYTES:].hex()} seq {seq}")
                for seq, exists in zip(wanted, present, strict=True)
                if not exists
            )
        return findings

    async def _check_index(self, page: Sequence[bytes]) -> list[Finding]:
        elements = [_parse_index(element) for element in page]
        present = await _ask(
            self._pipe, (("HEXISTS", keys.record_key(suffix), b"%d" % seq) for suffix, seq in elements)
        )
        floors = await self._floors([suffix for suffix, _ in elements])
        findings: list[Finding] = []
        for (suffix, seq), exists, floor in zip(elements, present, floors, strict=True):
            if not exists and seq > floor:
                findings.append(Finding("index_orphan", f"{suffix[_TAG_BYTES:].hex()} seq {seq}"))
        return findings


class RedisMailboxAudit:
    """Reads one mailbox instance."""

    def __init__(self, pipe: RedisPipe) -> None:
        self._pipe = pipe

    async def entries(self, dispatches: Sequence[Dispatch]) -> list[Finding]:
        """Each dispatch is finished, and each of its recipients holds the entry under one day."""
        states = await _ask(
            self._pipe,
            (("HGET", mailbox_keys.progress_key(d.header.reserved_at), d.dispatch_id) for d in dispatches),
        )
        findings: list[Finding] = []
        finished: list[tuple[Dispatch, int]] = []
        for dispatch, state in zip(dispatches, states, strict=True):
            if state is None or state[8:9] == b"o":
                findings.append(Finding("dispatch_open", _place(dispatch)))
            elif state[8:9] == b"f":
                finished.append((dispatch, int.from_bytes(state[9:13], "big")))
        scores = await _ask(self._pipe, _entry_questions(finished))
        places = (
            f"{_place(dispatch)} user {user.hex()}"
            for dispatch, _ in finished
            for user in dispatch.recipients
        )
        for where, *days in zip(places, scores[::3], scores[1::3], scores[2::3], strict=True):
            held = sum(score is not None for score in days)
            if held != 1:
                findings.append(Finding("entry_missing" if held == 0 else "entry_doubled", where))
        return findings


def _entry_questions(finished: Sequence[tuple[Dispatch, int]]) -> Iterator[tuple[Argument, ...]]:
    """Per recipient three: the score of the entry under its day and under the days beside it."""
    for dispatch, day in finished:
        header = dispatch.header
        for user in dispatch.recipients:
            for near in (day - 1, day, day + 1):
                key = mailbox_keys.mailbox_key(
                    dispatch.shard, header.tenant, user, day=near, ephemeral=header.ephemeral
                )
                yield "ZSCORE", key, dispatch.entry


async def _ask(pipe: RedisPipe, questions: Iterable[tuple[Argument, ...]]) -> list[Any]:
    """The answers in the order of the questions; raises the first StoreError, and leaves no answer unread."""
    answers: list[Any] = []
    for pipeline in _pipelines(questions):
        answers += await asyncio.gather(*(pipe.command(*question) for question in pipeline))
    return answers


def _pipelines(questions: Iterable[tuple[Argument, ...]]) -> Iterator[list[tuple[Argument, ...]]]:
    held: list[tuple[Argument, ...]] = []
    held_bytes = 0
    for question in questions:
        size = sum(len(argument) for argument in question if not isinstance(argument, int))
        if held and (len(held) == PAGE or held_bytes + size > ASKED_BYTES_MAX):
            yield held
            held, held_bytes = [], 0
        held.append(question)
        held_bytes += size
    if held:
        yield held


def _place(dispatch: Dispatch) -> str:
    return f"shard {dispatch.shard} dispatch {dispatch.dispatch_id.hex()} seq {dispatch.header.seq}"


def _pairs(flat: Any) -> list[tuple[bytes, bytes]]:  # noqa: ANN401 - RESP2 answers flat, RESP3 a map
    return list(flat.items()) if isinstance(flat, dict) else list(zip(flat[::2], flat[1::2], strict=True))


def _message(key: MessageKey) -> str:
    return f"{key.conversation.hex()} sender {key.sender.hex()} id {key.client_message_id.hex()}"


def _bucket(suffix: bytes) -> BucketId:
    return BucketId(int(suffix[2:5]))


def _parse_index(element: bytes) -> tuple[bytes, Seq]:
    """Index element (drawn in redis_keys) → conversation suffix, sequence."""
    tenant, conversation = TenantId(int.from_bytes(element[1:5], "big")), ConversationId(element[5:21])
    return keys.conversation_suffix(BucketId(element[0]), tenant, conversation), Seq(int(element[29:]))


def _is_fact_of(fact: bytes, header: RoutingHeader) -> bool:
    identity, reserved_at = keys.unpack_value_head(fact)
    seq = int(fact[keys.VALUE_HEAD_BYTES : -8])
    return bool(identity == header.identity and reserved_at == header.reserved_at and seq == header.seq)

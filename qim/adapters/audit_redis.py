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

Every page is one pipeline of at most PAGE commands, so that an audit of a busy server delays nobody for
longer than a batch of messages does.
"""

import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NamedTuple

from qim.adapters import mailbox_keys
from qim.adapters import redis_keys as keys
from qim.adapters.redis_pipe import RedisPipe
from qim.ids import BucketId, ConversationId, Seq, TenantId
from qim.limits import IDEMPOTENCY_WINDOW_MS
from qim.ports import MessageKey
from qim.records import Dispatch, RoutingHeader, decode_entry, encode_record

PAGE: Final = 256
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
        """Commit fact and canonical record of each Outbox record of a page."""
        entries = [decode_entry(record.entry) for record in records]
        message_keys = [
            MessageKey(r.header.bucket, r.header.tenant, e.record.conversation_id, e.record.sender,
                       e.record.client_message_id)
            for r, e in zip(records, entries, strict=True)
        ]  # fmt: skip
        waiting: list[tuple[Any, Any, Any]] = []
        for key, entry in zip(message_keys, entries, strict=True):
            suffix = keys.conversation_suffix(key.bucket, key.tenant, key.conversation)
            waiting.append((
                self._pipe.command("GET", keys.committed_key(key)),
                self._pipe.command("HGET", keys.record_key(suffix), b"%d" % entry.conversation_seq),
                self._pipe.command("HGET", keys.floor_key(key.bucket), suffix[_TAG_BYTES:]),
            ))  # fmt: skip
        findings: list[Finding] = []
        for record, key, entry, replies in zip(records, message_keys, entries, waiting, strict=True):
            fact, stored, floor = [await reply for reply in replies]
            where = f"{_message(key)} seq {entry.conversation_seq}"
            expires_at = entry.record.reserved_at + IDEMPOTENCY_WINDOW_MS
            if fact is None and expires_at > self._now_ms:
                findings.append(Finding("fact_missing", where))
            elif fact is not None and not _is_fact_of(fact, record.header):
                findings.append(Finding("fact_differs", where))
            if stored is None and entry.conversation_seq > int(floor or 0):
                findings.append(Finding("record_missing", where))
            elif stored is not None and stored != encode_record(entry.record):
                findings.append(Finding("record_differs", where))
        return findings

    async def _check_conversations(self, suffixes: Sequence[bytes]) -> list[Finding]:
        asked = [
            (
                self._pipe.command("HMGET", keys.conversation_key(suffix), "n", "h"),
                self._pipe.command("HLEN", keys.record_key(suffix)),
                self._pipe.command("HGET", keys.floor_key(_bucket(suffix)), suffix[_TAG_BYTES:]),
            )
            for suffix in suffixes
        ]
        findings: list[Finding] = []
        for suffix, replies in zip(suffixes, asked, strict=True):
            (last, head), stored, floor = [await reply for reply in replies]
            name = suffix[_TAG_BYTES:].hex()
            if int(head or 0) != int(last or 0):
                findings.append(Finding("head_behind", f"{name} head {int(head or 0)} last {int(last or 0)}"))
            if int(stored) != int(last or 0) - int(floor or 0):
                findings.extend(await self._missing(suffix, first=int(floor or 0) + 1, last=int(last or 0)))
        return findings

    async def _missing(self, suffix: bytes, *, first: int, last: int) -> list[Finding]:
        """Names the sequences without a record, page by page."""
        findings: list[Finding] = []
        for start in range(first, last + 1, PAGE):
            wanted = range(start, min(start + PAGE, last + 1))
            present = await self._pipe.command(
                "HMGET", keys.record_key(suffix), *(b"%d" % seq for seq in wanted)
            )
            findings.extend(
                Finding("gap", f"{suffix[_TAG_BYTES:].hex()} seq {seq}")
                for seq, record in zip(wanted, present, strict=True)
                if record is None
            )
        return findings

    async def _check_index(self, page: Sequence[bytes]) -> list[Finding]:
        elements = [_parse_index(element) for element in page]
        asked = [
            (
                self._pipe.command("HEXISTS", keys.record_key(suffix), b"%d" % seq),
                self._pipe.command("HGET", keys.floor_key(_bucket(suffix)), suffix[_TAG_BYTES:]),
            )
            for suffix, seq in elements
        ]
        findings: list[Finding] = []
        for (suffix, seq), replies in zip(elements, asked, strict=True):
            exists, floor = [await reply for reply in replies]
            if not exists and seq > int(floor or 0):
                findings.append(Finding("index_orphan", f"{suffix[_TAG_BYTES:].hex()} seq {seq}"))
        return findings


class RedisMailboxAudit:
    """Reads one mailbox instance."""

    def __init__(self, pipe: RedisPipe) -> None:
        self._pipe = pipe

    async def entries(self, dispatches: Sequence[Dispatch]) -> list[Finding]:
        """Each dispatch is finished, and each of its recipients holds the entry under one day."""
        states = [
            self._pipe.command("HGET", mailbox_keys.progress_key(d.header.reserved_at), d.dispatch_id)
            for d in dispatches
        ]
        findings: list[Finding] = []
        asked: list[tuple[str, list[Any]]] = []
        for dispatch, waiting in zip(dispatches, states, strict=True):
            state = await waiting
            where = f"shard {dispatch.shard} dispatch {dispatch.dispatch_id.hex()} seq {dispatch.header.seq}"
            if state is None or state[8:9] == b"o":
                findings.append(Finding("dispatch_open", where))
            elif state[8:9] == b"f":
                asked.extend(self._ask_entries(dispatch, int.from_bytes(state[9:13], "big"), where))
        for where, days in asked:
            held = sum([await score is not None for score in days])
            if held != 1:
                findings.append(Finding("entry_missing" if held == 0 else "entry_doubled", where))
        return findings

    def _ask_entries(self, dispatch: Dispatch, day: int, where: str) -> list[tuple[str, list[Any]]]:
        """Per recipient: the score of the entry under its day and under the days beside it."""
        header = dispatch.header
        return [
            (
                f"{where} user {user.hex()}",
                [
                    self._pipe.command(
                        "ZSCORE",
                        mailbox_keys.mailbox_key(
                            dispatch.shard, header.tenant, user, day=near, ephemeral=header.ephemeral
                        ),
                        dispatch.entry,
                    )
                    for near in (day - 1, day, day + 1)
                ],
            )
            for user in dispatch.recipients
        ]


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

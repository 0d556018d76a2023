"""The reads of a live server's stores: samples while it runs, and everything at its end.

Raw keys and log records, not the scripts of the path: a dump must not share the mistakes of what it judges.
Which key holds what is listed in `qim/adapters/redis_keys.py` and `mailbox_keys.py`. All reads go through one
connection that reconnects by itself; a store that is away just now gives no sample.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from qim.adapters import mailbox_keys, redis_keys
from qim.clock import SystemClock
from qim.config import Config, load_config
from qim.config_checks import read_secret
from qim.errors import StoreError
from qim.ids import Offset, SlotId
from qim.limits import SLOTS
from qim.ports import CommitLog, LogRecord, MessageKey
from qim.records import (
    decode_entry,
    message_id_of,
    outbox_entry,
    parse_dispatch_record,
    parse_header,
)
from tests.checker.history import (
    Dispatch,
    Fact,
    Mailbox,
    Outbox,
    Progress,
    Recorder,
    Sample,
    Shard,
    Shown,
    digest_of,
)
from workers.wiring import wire_audit

SAMPLE_SECONDS: Final = 0.1
PAGE: Final = 500
ALL_SLOTS: Final = [SlotId(slot) for slot in range(SLOTS)]

T = TypeVar("T")


class LiveStores:
    """Both logs and the keys of the one server of a development folder."""

    def __init__(self, folder: Path, recorder: Recorder) -> None:
        self._config: Config = load_config(folder / "qim.toml")
        self._recorder = recorder
        self.samples = 0

    async def __aenter__(self) -> Self:
        password = read_secret(self._config.redis.password, environ=os.environ)
        self.clock = SystemClock()
        self._stores, self.audited = wire_audit(self._config, clock=self.clock, password=password)
        await self._stores.connect()
        self._pipe = self._stores.instances[0].pipe
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stores.close()

    # --- while it runs ---

    async def sample_until(self, stop: asyncio.Event) -> None:
        """W and the ends of the Outbox, again and again; a store that does not answer is asked later."""
        while not stop.is_set():
            with contextlib.suppress(StoreError):
                await self._sample()
            self._recorder.flush()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), SAMPLE_SECONDS)

    async def _sample(self) -> None:
        asked_at = time.monotonic_ns()
        states, ends = await asyncio.gather(
            self._pipe.command("HGETALL", mailbox_keys.WATERMARKS), self.audited.outbox.watermarks(ALL_SLOTS)
        )
        marks = [(shard, state.watermark) for shard, state in _shards(states)]
        pairs = [(int(partition), int(mark.high)) for partition, mark in ends.items()]
        self._recorder.note(Sample(asked_at, "sampler", marks, pairs))
        self.samples += 1

    # --- at the end ---

    async def dump(self) -> None:
        async for record in _records(self.audited.outbox):
            self._recorder.note(_outbox(record))
        async for record in _records(self.audited.dispatch):
            self._recorder.note(_dispatch(record))
        for shard, state in _shards(await self._pipe.command("HGETALL", mailbox_keys.WATERMARKS)):
            self._recorder.note(Shard(shard, state.base, state.watermark))
        mailboxes: dict[str, list[Shown]] = {}
        async for found in self._keys():
            await self._dump_keys(found, mailboxes)
        await self._dump_pending()
        for user, entries in mailboxes.items():
            self._recorder.note(Mailbox(user, sorted(entries)))

    async def _keys(self) -> AsyncIterator[list[bytes]]:
        """SCAN may name a key twice; each is given once."""
        cursor: Any = "0"
        seen: set[bytes] = set()
        while True:
            cursor, found = await self._pipe.command("SCAN", cursor, "COUNT", PAGE)
            yield [key for key in dict.fromkeys(found) if key not in seen]
            seen.update(found)
            if int(cursor) == 0:
                return

    async def _dump_keys(self, found: Sequence[bytes], mailboxes: dict[str, list[Shown]]) -> None:
        facts = [key for key in found if key.startswith(b"cmidown:")]
        for key, value in await self._ask(facts, "GET"):
            self._recorder.note(_fact("committed", redis_keys.parse_pending_field(key), value, tail=8))
        for _, fields in await self._ask([key for key in found if key.startswith(b"mboxdp:")], "HGETALL"):
            for dispatch_id, value in _pairs(fields):
                self._recorder.note(Progress(dispatch_id.hex(), value[8:9].decode()))  # type: ignore[arg-type]  # judged by the decoder
        keys = [key for key in found if key.startswith((b"mbox:", b"mboxe:"))]
        for key, flat in await self._ask(keys, "ZRANGE", "0", "-1", "WITHSCORES"):
            entries = zip(flat[::2], flat[1::2], strict=True)
            shown = [_shown(int(float(score)), entry) for entry, score in entries]
            mailboxes.setdefault(key[-20:-4].hex(), []).extend(shown)

    async def _ask(self, keys: Sequence[bytes], command: str, *rest: str) -> list[tuple[bytes, Any]]:
        answers = await asyncio.gather(*(self._pipe.command(command, key, *rest) for key in keys))
        return list(zip(keys, answers, strict=True))

    async def _dump_pending(self) -> None:
        for field, value in _pairs(await self._pipe.command("HGETALL", redis_keys.PENDING)):
            self._recorder.note(_fact("pending", redis_keys.parse_pending_field(field), value, tail=0))


async def _records(log: CommitLog) -> AsyncIterator[LogRecord]:
    for slot, mark in (await log.watermarks(ALL_SLOTS)).items():
        assert mark.low == 0, f"partition {slot} was trimmed up to {mark.low}: the run was too long"
        offset = Offset(0)
        while offset < mark.high:
            page = await log.read(slot, offset, records_max=PAGE)
            assert page, f"partition {slot} cannot be read at {offset}"
            for record in page:
                yield record
            offset = Offset(page[-1].offset + 1)


def _outbox(record: LogRecord) -> Outbox:
    header, raw = parse_header(record.data), outbox_entry(record.data)
    message = decode_entry(raw).record
    one, other = header.users
    return Outbox(
        partition=record.partition, offset=record.offset, conversation=message.conversation_id.hex(),
        seq=header.seq, parties=(one.hex(), other.hex()), sender=message.sender.hex(),
        client_message_id=message.client_message_id.hex(), message_id=message.message_id.hex(),
        body=digest_of(message.body), entry=digest_of(raw), reserved_at=message.reserved_at,
    )  # fmt: skip


def _dispatch(record: LogRecord) -> Dispatch:
    dispatch = parse_dispatch_record(record.data)
    entry = decode_entry(dispatch.entry)
    recipients = tuple(user.hex() for user in dispatch.recipients)
    return Dispatch(
        record.partition, record.offset, dispatch.dispatch_id.hex(), entry.record.conversation_id.hex(),
        entry.conversation_seq, recipients, digest_of(dispatch.entry),
    )  # fmt: skip


def _shown(mailbox_seq: int, raw: bytes) -> Shown:
    entry = decode_entry(raw)
    return Shown(mailbox_seq, entry.record.conversation_id.hex(), entry.conversation_seq, digest_of(raw))


def _fact(state: Any, key: MessageKey, value: bytes, *, tail: int) -> Fact:
    identity, _ = redis_keys.unpack_value_head(value)
    seq = int(value[redis_keys.VALUE_HEAD_BYTES : len(value) - tail])
    return Fact(
        state, key.conversation.hex(), key.sender.hex(), key.client_message_id.hex(),
        message_id_of(identity).hex(), seq,
    )  # fmt: skip


def _shards(states: Any) -> Iterator[tuple[int, Any]]:
    for slot, value in _pairs(states):
        yield int(slot), mailbox_keys.unpack_state(value)


def _pairs(flat: Any) -> list[tuple[bytes, bytes]]:
    return list(flat.items()) if isinstance(flat, dict) else list(zip(flat[::2], flat[1::2], strict=True))

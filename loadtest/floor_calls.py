"""The store calls of messages, without a server around them: what `floor.py` lets a private store do.

The calls go through the real adapters, so their keys, arguments and sizes are those of the server. A round is
a few runs of messages; every stage of all its runs is issued at once and awaited once. Pairs rotate, so a run
touches as many conversations, buckets and shards as a run of the server does.
"""

import asyncio
from itertools import chain
from typing import Final, NamedTuple

from loadtest.server import TENANT
from loadtest.user import NUMBER, Account, build_body, make_account
from qim.adapters.commitlog_redis import RedisCommitLog
from qim.adapters.commits_redis import RedisCommitStore
from qim.adapters.mailbox_redis import RedisMailboxStore
from qim.adapters.redis_pipe import RedisPipe
from qim.clock import SystemClock
from qim.domain.fanout import PlannedDispatch, plan_dispatches
from qim.domain.placement import bucket_of_conversation, direct_conversation
from qim.ids import BootId, ClientMessageId, MailboxSeq, Millis, Offset, Seq, SlotId
from qim.limits import SLOTS
from qim.ports import Commit, MailboxWrite, Materialised, MessageKey, Reservation, SlotClaim
from qim.records import (
    RECORD_VERSION,
    Kind,
    MessageRecord,
    MessageType,
    RetentionClass,
    build_outbox_record,
    encode_record,
    identity_digest,
    message_id_of,
    parse_dispatch_record,
)

PAIRS: Final = 256
RUN: Final = 1
HOME: Final = SlotId(0)
BASE: Final = MailboxSeq(1)


class _Message(NamedTuple):
    reservation: Reservation
    record: MessageRecord


class FloorCalls:
    """State of the private store: the next message, and W of each shard."""

    def __init__(self, pipe: RedisPipe, *, url: str, body_bytes: int) -> None:
        self._clock = SystemClock()
        self._commits = RedisCommitStore(pipe, self._clock)
        self._mailboxes = RedisMailboxStore(pipe, self._clock)
        self._outbox = RedisCommitLog(pipe, name="outbox", shared=False, url=url)
        self._dispatch = RedisCommitLog(pipe, name="dispatch", shared=False, url=url)
        self._body_bytes = body_bytes
        self._next = 0
        self._watermarks: dict[SlotId, MailboxSeq] = {}
        self._accounts = [make_account(RUN, number) for number in range(2 * PAIRS)]

    async def prepare(self) -> None:
        """Owners and shards, as `qim init` and a worker's start would leave them."""
        slots = tuple(SlotId(slot) for slot in range(SLOTS))
        claim = SlotClaim(slots, BootId(bytes(16)), bytes(16), "floor", bytes(16))
        await self._commits.claim(claim)
        await self._mailboxes.claim(claim)
        await self._mailboxes.initialise_shards(dict.fromkeys(slots, BASE), bytes(16))
        self._watermarks = dict.fromkeys(slots, MailboxSeq(0))

    async def run(self, *, runs: int, messages: int) -> None:
        """All stages of some runs; asserts that each did what a server would need."""
        now = self._clock.now_ms()
        batches = [[self._message(now) for _ in range(messages)] for _ in range(runs)]
        reserved = await asyncio.gather(
            *(self._commits.reserve([message.reservation for message in batch]) for batch in batches)
        )
        outbox = [
            [self._outbox_record(message, result.seq) for message, result in zip(batch, results, strict=True)]
            for batch, results in zip(batches, reserved, strict=True)
        ]
        offsets = await asyncio.gather(
            *(self._outbox.append([(HOME, data) for data in batch]) for batch in outbox)
        )
        await asyncio.gather(
            *(
                self._commits.mark_committed(
                    [
                        self._commit(message, result.seq, offset)
                        for message, result, offset in zip(batch, results, at, strict=True)
                    ]
                )
                for batch, results, at in zip(batches, reserved, offsets, strict=True)
            )
        )
        await self._deliver([[*chain.from_iterable(map(plan_dispatches, batch))] for batch in outbox])

    async def _deliver(self, batches: list[list[PlannedDispatch]]) -> None:
        offsets = await asyncio.gather(*(self._dispatch.append(batch) for batch in batches))
        calls = []
        for batch, at in zip(batches, offsets, strict=True):
            writes = sorted(
                (self._write(data, offset) for (_, data), offset in zip(batch, at, strict=True)),
                key=lambda write: (write.slot, write.mailbox_seq),
            )
            expected = {write.slot: self._watermarks[write.slot] for write in writes}
            calls.append(self._mailboxes.materialise(expected, writes))
            self._watermarks |= {write.slot: write.mailbox_seq for write in writes}
        answers = set(chain.from_iterable(await asyncio.gather(*calls)))
        assert answers == {Materialised.DONE}

    def _message(self, now: Millis) -> _Message:
        number = self._next
        self._next += 1
        sender, recipient = self._pair(number)
        conversation = direct_conversation(TENANT, sender.user, recipient.user)
        message_id = ClientMessageId(NUMBER.pack(RUN, number))
        body = build_body(RUN, number, self._body_bytes)
        identity = identity_digest(
            tenant=TENANT,
            conversation=conversation,
            sender=sender.user,
            client_message_id=message_id,
            message_type=MessageType.CUSTOM,
            retention_class=RetentionClass.DEFAULT,
            custom_type="",
            body=body,
        )
        record = MessageRecord(
            version=RECORD_VERSION,
            tenant=TENANT,
            conversation_id=conversation,
            kind=Kind.DIRECT,
            parties=b"".join(sorted((sender.user, recipient.user))),
            message_id=message_id_of(identity),
            sender=sender.user,
            sender_device=sender.device,
            client_message_id=message_id,
            message_type=MessageType.CUSTOM,
            custom_type="",
            body=body,
            retention_class=RetentionClass.DEFAULT,
            reserved_at=now,
            membership_version=0,
        )
        bucket = bucket_of_conversation(TENANT, conversation)
        key = MessageKey(bucket, TENANT, conversation, sender.user, message_id)
        return _Message(Reservation(key, identity, encode_record(record), now, Millis(0)), record)

    def _pair(self, number: int) -> tuple[Account, Account]:
        first = 2 * (number % PAIRS)
        return self._accounts[first], self._accounts[first + 1]

    def _outbox_record(self, message: _Message, seq: Seq) -> bytes:
        assert seq > 0
        reservation, record = message
        return build_outbox_record(
            bucket=reservation.key.bucket,
            seq=seq,
            record=record,
            record_bytes=reservation.record,
            identity=reservation.identity,
        )

    def _commit(self, message: _Message, seq: Seq, offset: Offset | None) -> Commit:
        assert offset is not None
        reservation = message.reservation
        return Commit(
            reservation.key, reservation.identity, seq, reservation.reserved_at, False, HOME, offset
        )

    def _write(self, data: bytes, offset: Offset | None) -> MailboxWrite:
        assert offset is not None
        dispatch = parse_dispatch_record(data)
        return MailboxWrite(
            slot=dispatch.shard,
            mailbox_seq=MailboxSeq(BASE + offset),
            dispatch_id=dispatch.dispatch_id,
            digest=dispatch.header.dispatch_digest,
            reserved_at=dispatch.header.reserved_at,
            tenant=dispatch.header.tenant,
            recipients=dispatch.recipients,
            entry=dispatch.entry,
            ephemeral=False,
        )

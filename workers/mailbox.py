"""The mailbox role: dispatch records into mailboxes, watermarks forward, pushes out, pulls answered.

Per mailbox instance it runs the loops of `workers/shards.py` (fused runs) and `workers/pauses.py` (back-off),
the lanes of `workers/serial.py` (general path, one record at a time) and of `workers/pulls.py`
(PULL_MAILBOX). Instances share nothing, so a slow one delays only its own shards.

A shard that does not fit its log is refused at the start; one that meets a record it must not finish stops
alone and stays stopped. The operator's three words are here. `retry` reads the record again. `skip` gives up
one named record by a fenced finish and is logged; its users do not get it. `redeliver` brings a skipped one
back as a new dispatch, under today's day, for those recipients only who do not hold it. Nothing else ever
passes a record over.

Drain: the reader goes on until the own partitions are empty or the deadline has come. What is unfinished then
is read again from W at the next start.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from structlog import get_logger

from qim.clock import Clock
from qim.domain import mailbox as rules
from qim.domain.fanout import shard_of
from qim.domain.placement import Placement
from qim.errors import FailedPrecondition, RecordCorrupt, StoreError
from qim.ids import MailboxSeq, Millis, Offset, SlotId, TenantId
from qim.limits import GROUP_SHARD_PARTS_MAX
from qim.metrics import Metrics
from qim.ports import CommitLog, LogRecord, MailboxStore, MailboxWrite, Materialised
from qim.records import HEADER_BYTES, build_dispatch_record, parse_dispatch_record
from workers.commits import NOTHING_WRITTEN, OnFatal, reply_error
from workers.company import Company
from workers.failpoints import Failpoints
from workers.opening import until_answered
from workers.pulls import Pulls
from workers.request import Request
from workers.serial import LANES, Serial
from workers.shard_state import PresenceView, Pusher, Shard, StoppedShard, build_delivery
from workers.shards import Shards

log = get_logger()

DRAIN_POLL_SECONDS: Final = 0.02
REDELIVERED_PART: Final = 0x80
"""Marks the part of a redelivered dispatch: it needs an id of its own beside the skipped one."""
assert GROUP_SHARD_PARTS_MAX <= REDELIVERED_PART


class _Instance:
    """Everything that runs on one mailbox instance."""

    def __init__(self, *, store: MailboxStore, shards: Shards, serial: Serial, pulls: Pulls) -> None:
        self.store = store
        self.shards = shards
        self.serial = serial
        self.pulls = pulls


class Mailbox:
    """Owns the mailbox shards of one worker."""

    def __init__(
        self,
        *,
        slots: Sequence[SlotId],
        placement: Placement,
        stores: Sequence[MailboxStore],
        dispatch: CommitLog,
        presence: PresenceView,
        pusher: Pusher,
        clock: Clock,
        metrics: Metrics,
        failpoints: Failpoints,
        on_fatal: OnFatal,
        company: Company | None = None,
    ) -> None:
        self._placement = placement
        self._dispatch = dispatch
        self._clock = clock
        self._on_fatal = on_fatal
        self._instances: dict[int, _Instance] = {}
        self._loops: list[asyncio.Task[None]] = []
        by_instance: dict[int, list[SlotId]] = {}
        for slot in slots:
            by_instance.setdefault(placement.mailbox_instance_of(slot), []).append(slot)
        for number, mine in by_instance.items():
            store = stores[number]
            shards = Shards(
                slots=mine,
                store=store,
                dispatch=dispatch,
                presence=presence,
                pusher=pusher,
                clock=clock,
                metrics=metrics,
                failpoints=failpoints,
                on_fatal=on_fatal,
                company=company or Company(clock),
            )
            self._instances[number] = _Instance(
                store=store,
                shards=shards,
                serial=Serial(
                    shards=shards,
                    pauses=shards.pauses,
                    pushes=shards.pushes,
                    store=store,
                    failpoints=failpoints,
                ),
                pulls=Pulls(store=store, clock=clock, metrics=metrics),
            )

    @property
    def stopped(self) -> dict[SlotId, StoppedShard]:
        """Shards that stand still until an operator decides."""
        found: dict[SlotId, StoppedShard] = {}
        for instance in self._instances.values():
            found |= instance.shards.unopened
            for slot, shard in instance.shards.shards.items():
                if shard.stopped is not None:
                    found[slot] = shard.stopped
        return found

    @property
    def positions(self) -> dict[SlotId, Offset]:
        """Last finished offset of every open shard; the trimmer stays below it."""
        return {
            slot: shard.position
            for instance in self._instances.values()
            for slot, shard in instance.shards.shards.items()
        }

    @property
    def queued(self) -> int:
        """Records that wait for a serial lane."""
        return sum(
            len(shard.queue)
            for instance in self._instances.values()
            for shard in instance.shards.shards.values()
        )

    @property
    def watermarks(self) -> dict[SlotId, MailboxSeq]:
        return {
            slot: shard.watermark
            for instance in self._instances.values()
            for slot, shard in instance.shards.shards.items()
        }

    def submit(self, request: Request) -> None:
        """PULL_MAILBOX of a user of an own shard; called in a callback."""
        slot = shard_of(request.tenant, request.user)
        instance = self._instances.get(self._placement.mailbox_instance_of(slot))
        if instance is None:
            reply_error(request, NOTHING_WRITTEN)
        else:
            instance.pulls.submit(request)

    async def open(self) -> None:
        """Checks the shards against the log; `run` begins with it."""
        for instance in self._instances.values():
            await until_answered("mailbox", instance.shards.open)

    async def run(self) -> None:
        """Until drained. Raises what no batch can handle; the worker then ends."""
        async with asyncio.TaskGroup() as tasks:
            for instance in self._instances.values():
                tasks.create_task(instance.pulls.run())
            await self.open()
            for instance in self._instances.values():
                loops = [
                    instance.shards.run_reader(),
                    instance.shards.run_finisher(),
                    instance.shards.pauses.run_resumer(),
                    *(instance.serial.run_lane() for _lane in range(LANES)),
                ]
                self._loops += [tasks.create_task(loop) for loop in loops]

    async def drain(self, deadline: float) -> None:
        """Goes on until the own partitions are empty or the deadline (monotonic seconds) has come."""
        while self._clock.monotonic() < deadline and await self._is_behind():
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        for loop in self._loops:
            loop.cancel()
        for instance in self._instances.values():
            instance.pulls.close()
            await instance.shards.close()

    async def _is_behind(self) -> bool:
        positions = {slot: at for slot, at in self.positions.items() if slot not in self.stopped}
        try:
            marks = await self._dispatch.watermarks(tuple(positions))
        except StoreError:
            return True
        return any(mark.behind(positions[slot]) > 0 for slot, mark in marks.items())

    # --- the operator --------------------------------------------------------------------------------

    async def retry(self, slot: SlotId) -> None:
        """Reads the record that the shard stands at again."""
        instance, shard, stopped = self._stopped_at(slot)
        log.warning("shard_retried", slot=slot, offset=stopped.offset)
        await instance.shards.pauses.release(shard)

    async def skip(self, slot: SlotId, offset: Offset) -> None:
        """Finishes the one record that the shard stands at without delivering it."""
        instance, shard, stopped = self._stopped_at(slot)
        if stopped.offset != offset or offset != shard.position + 1:
            raise FailedPrecondition(f"slot {slot} stands at {shard.position + 1}, not at {offset}")
        record = await self._record_at(instance, slot, offset)
        outcome = await instance.serial.skip(shard, _named_write(shard, record, now_ms=self._clock.now_ms()))
        if outcome is Materialised.STALE_OWNER:
            self._on_fatal(slot)
        if outcome is not Materialised.DONE:
            raise FailedPrecondition(f"slot {slot} cannot skip {offset}: {outcome.value}")
        log.warning("record_skipped", role="mailbox", slot=slot, offset=offset, reason=stopped.reason)
        await instance.shards.pauses.release(shard)

    async def redeliver(self, slot: SlotId, offset: Offset) -> int:
        """Dispatches a record again for the recipients who do not hold it; how many they are."""
        instance, shard = self._shard(slot)
        record = await self._record_at(instance, slot, offset)
        if offset > shard.position:
            raise FailedPrecondition(f"slot {slot} has not passed {offset} yet")
        try:
            write = build_delivery(shard, offset, record.data).write
        except RecordCorrupt as error:
            raise FailedPrecondition(f"the record at {offset} cannot be read: {error}") from error
        missing = [
            user
            for user in write.recipients
            if not await instance.store.holds_entry(write.tenant, user, slot, write.entry, write.reserved_at)
        ]
        if missing:
            part = parse_dispatch_record(record.data).part | REDELIVERED_PART
            again = build_dispatch_record(
                record.data[:HEADER_BYTES] + write.entry, shard=slot, part=part, recipients=tuple(missing)
            )
            (at,) = await self._dispatch.append([(slot, again)])
            if at is None:
                raise FailedPrecondition("whether the record was appended is not known; try again")
        log.warning("record_redelivered", slot=slot, offset=offset, recipients=len(missing))
        return len(missing)

    @staticmethod
    async def _record_at(instance: _Instance, slot: SlotId, offset: Offset) -> LogRecord:
        data = await instance.shards.read_record(slot, offset)
        if data is None:
            raise FailedPrecondition(f"the log does not hold record {offset} of slot {slot}")
        return LogRecord(slot, offset, data)

    def _shard(self, slot: SlotId) -> tuple[_Instance, Shard]:
        instance = self._instances.get(self._placement.mailbox_instance_of(slot))
        shard = instance.shards.shards.get(slot) if instance is not None else None
        if instance is None or shard is None:
            raise FailedPrecondition(f"slot {slot} is not open here")
        return instance, shard

    def _stopped_at(self, slot: SlotId) -> tuple[_Instance, Shard, StoppedShard]:
        instance, shard = self._shard(slot)
        if shard.stopped is None:
            raise FailedPrecondition(f"slot {slot} is not stopped")
        if shard.in_flight or shard.serving:
            raise FailedPrecondition(f"slot {slot} still has calls in flight; try again")
        return instance, shard, shard.stopped


def _named_write(shard: Shard, record: LogRecord, *, now_ms: int) -> MailboxWrite:
    """What a skip finishes: the record itself, or where it cannot be read a name made from its bytes."""
    try:
        return build_delivery(shard, record.offset, record.data).write
    except RecordCorrupt:
        dispatch_id, digest = rules.identify(record.data)
        mailbox_seq = rules.mailbox_seq_of(base=shard.base, offset=record.offset)
        return MailboxWrite(
            shard.slot, mailbox_seq, dispatch_id, digest, Millis(now_ms), TenantId(0), (), b"", False
        )

"""Which shards of one mailbox instance do not go on, and when each goes on again.

    overflowed   its queue for the serial path is full; it goes on behind what the lanes have finished
    held         something failed; its partition is paused, and what was read of it is forgotten
    stopped      held until an operator decides; the others go on

A held shard waits until nothing of it is in flight any more; then the reader goes back to W. Refused or
unknown: after a back-off, for ever. Not where it was believed: W is read from the store first. Another digest
under a known dispatch id, an unreadable record, a store that contradicts itself: the shard stops, alone.

Reader, finisher and serial lanes say here what they met; the resumer, the one loop of this module, opens the
shards again whose back-off is over. The state is in the shards (`workers/shard_state.py`). Owned here are the
back-offs that are waited for, and `serial`: the shards whose queue a lane must work on, each at most once.

Full: a shard queues 128 records, then its partition is paused. A store that is away holds all its shards. A
process that dies loses every pause: the next one opens its shards at W and meets again what is still there.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from structlog import get_logger

from qim.clock import Clock
from qim.domain import mailbox as rules
from qim.errors import PartitionStopped, StoreBroken, StoreError
from qim.ids import DispatchId, Offset, SlotId
from qim.limits import MAILBOX_QUEUE_RECORDS_MAX
from qim.metrics import Metrics
from qim.ports import LogReader, MailboxStore, MailboxWrite, Materialised
from workers.inbox import Inbox
from workers.request import OnFatal
from workers.shard_state import Delivery, Shard, StoppedShard

log = get_logger()

RESUME_POLL_SECONDS: Final = 0.02
"""Only while a shard waits for its back-off to end."""


class Pauses:
    """Holds, stops and resumes the shards of one mailbox instance."""

    def __init__(
        self,
        *,
        slots: Sequence[SlotId],
        shards: Mapping[SlotId, Shard],
        store: MailboxStore,
        clock: Clock,
        metrics: Metrics,
        on_fatal: OnFatal,
    ) -> None:
        """`shards` are those that are open; their owner adds to it."""
        self._shards = shards
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._on_fatal = on_fatal
        self._reader: LogReader | None = None
        self._waiting: set[SlotId] = set()
        self._someone_waits = asyncio.Event()
        self.serial: Inbox[Shard] = Inbox(items_max=len(slots), bytes_max=0)
        """Shards whose queue a serial lane must work on."""

    def attach(self, reader: LogReader) -> None:
        """The reader whose partitions are paused from now on."""
        self._reader = reader

    # --- the queue of the serial path ----------------------------------------------------------------

    def enqueue(self, shard: Shard, delivery: Delivery) -> None:
        """A record for the serial path, directly behind those that wait there already."""
        if len(shard.queue) >= MAILBOX_QUEUE_RECORDS_MAX:
            self.overflow(shard)
            return
        shard.queue.append(delivery)
        self._serve_if_idle(shard)

    def overflow(self, shard: Shard) -> None:
        """No more of this partition until its queue is empty; what is dropped here is read again."""
        shard.overflowed = True
        self._pause(shard.slot)

    def _serve_if_idle(self, shard: Shard) -> None:
        if shard.queue and not shard.serving and not shard.held and not shard.in_flight:
            shard.serving = True
            offered = self.serial.offer(shard)
            assert offered

    # --- trouble -------------------------------------------------------------------------------------

    def note_refused(self, shard: Shard, delivery: Delivery, outcome: Materialised) -> None:
        """The store did not take the record; decides what becomes of the shard."""
        write = delivery.write
        match outcome:
            case Materialised.STALE_OWNER:
                self._on_fatal(shard.slot)
                self._stop_at(shard, write, "another process owns the shard")
            case Materialised.MISMATCH:
                self._stop_at(shard, write, "the dispatch id is known with another digest")
            case Materialised.OPEN:
                shard.alone = True
                self.fail(shard, "the general path has begun it", at_once=True)
            case _:
                shard.reload = shard.reload or not shard.held
                self.fail(shard, "the watermark is not where it was")

    def fail_run(self, deliveries: Sequence[Delivery], error: StoreError) -> None:
        """What of these records was carried out is not known."""
        for delivery in deliveries:
            self._shards[delivery.write.slot].doubtful.append(delivery)
        for slot in {delivery.write.slot for delivery in deliveries}:
            shard = self._shards[slot]
            # A run names many shards, the error none. Where it is one shard's fault, or fails again, each
            # tries its next record alone, so that no shard suffers for long from another one.
            shard.alone = shard.alone or shard.attempts > 0 or isinstance(error, StoreBroken)
            self.fail(shard, str(error))

    def fail(self, shard: Shard, reason: str, *, at_once: bool = False) -> None:
        """Holds the shard; when nothing of it is in flight it goes back to W, after a back-off or at once."""
        if shard.held:
            return
        if not at_once:
            self._note_attempt(shard, reason)
        shard.held = True
        shard.queue.clear()
        self._pause(shard.slot)

    def _note_attempt(self, shard: Shard, reason: str) -> None:
        shard.attempts += 1
        if rules.is_news(shard.attempts):
            log.warning("shard_held", slot=shard.slot, attempts=shard.attempts, reason=reason)

    def stop(self, shard: Shard, offset: Offset, dispatch_id: DispatchId, reason: str) -> None:
        """The shard stands still until an operator decides; the others go on."""
        if shard.stopped is None:
            shard.stopped = StoppedShard(offset, dispatch_id, reason)
            self._metrics.slot_stopped[shard.slot] += 1
            log.error("slot_stopped", role="mailbox", slot=shard.slot, offset=offset, reason=reason)
        shard.held = True
        shard.queue.clear()
        # A back-off that is waited for ends with it: the shard must not go on by itself.
        self._waiting.discard(shard.slot)
        self._pause(shard.slot)

    def _stop_at(self, shard: Shard, write: MailboxWrite, reason: str) -> None:
        self.stop(shard, shard.offset_of(write.mailbox_seq), write.dispatch_id, reason)

    def stop_reading(self, error: PartitionStopped) -> None:
        """The log does not go on behind what was read: of one partition, or where it names none, of all."""
        slots = tuple(self._shards) if error.partition is None else (SlotId(error.partition),)
        for slot in slots:
            shard = self._shards.get(slot)
            if shard is not None:
                read = rules.position_of(base=shard.base, watermark=shard.sent) + len(shard.queue)
                self.stop(shard, Offset(read + 1), DispatchId(b""), str(error))

    # --- going on ------------------------------------------------------------------------------------

    def served(self, shard: Shard) -> None:
        """A serial lane is through with the queue of the shard, or the shard is held."""
        shard.serving = False
        if shard.held:
            self.settle(shard)
        elif shard.overflowed:
            shard.overflowed = False
            self._go_back(shard)

    def settle(self, shard: Shard) -> None:
        """Nothing of the shard is in flight: what comes next?"""
        if shard.in_flight or shard.serving:
            return
        if shard.stopped is not None and shard.stopped.offset > shard.position + 1:
            # It was read before a record in front of it failed; first things first, it will be met again.
            self._unstop(shard)
        if not shard.held:
            self._serve_if_idle(shard)
        elif shard.stopped is None:
            shard.retry_at = self._clock.monotonic() + rules.backoff_ms(shard.attempts) / 1000
            self._waiting.add(shard.slot)
            self._someone_waits.set()

    async def run_resumer(self) -> None:
        """Until cancelled."""
        while True:
            await self._someone_waits.wait()
            await self.resume_due()
            if self._waiting:
                await asyncio.sleep(RESUME_POLL_SECONDS)
            else:
                self._someone_waits.clear()

    async def resume_due(self) -> None:
        """Opens the shards again whose back-off is over."""
        now = self._clock.monotonic()
        for slot in sorted(self._waiting):
            shard = self._shards[slot]
            if shard.retry_at <= now:
                self._waiting.discard(slot)
                await self.reopen(shard)

    async def reopen(self, shard: Shard) -> None:
        """Goes back to W and reads on. After a surprise W is read from the store; it must not have fallen.

        Where it has risen, its records are read again all the same: the store answers that they are done, and
        nobody has been told of them yet.
        """
        if shard.reload and not await self._reload(shard):
            return
        shard.held = False
        shard.overflowed = False
        self._go_back(shard)

    async def release(self, shard: Shard) -> None:
        """An operator has decided: the shard goes on behind W."""
        self._unstop(shard)
        shard.attempts = 0
        shard.reload = True
        await self.reopen(shard)

    def _unstop(self, shard: Shard) -> None:
        shard.stopped = None
        self._metrics.slot_stopped[shard.slot] -= 1

    async def _reload(self, shard: Shard) -> bool:
        try:
            state = (await self._store.load_shards([shard.slot])).get(shard.slot)
        except StoreError as error:
            self._note_attempt(shard, str(error))
            self.settle(shard)
            return False
        if state is None or state.watermark < shard.watermark or state.base != shard.base:
            self.stop(shard, Offset(shard.position + 1), DispatchId(b""), "the store has lost the watermark")
            return False
        shard.reload = False
        return True

    def _go_back(self, shard: Shard) -> None:
        shard.sent = shard.watermark
        shard.doubtful.clear()
        self.seek(shard, shard.position)

    def seek(self, shard: Shard, position: Offset) -> None:
        """Reads on behind this position, paused or not."""
        assert self._reader is not None
        self._reader.seek(shard.slot, position)
        self._reader.resume(shard.slot)

    def _pause(self, slot: SlotId) -> None:
        assert self._reader is not None
        self._reader.pause(slot)

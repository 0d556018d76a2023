"""Materialises the dispatch partitions of one mailbox instance, in runs over many shards.

    reader     takes a batch, cuts it into runs, issues them at once; four batches are in flight at most
    finisher   takes the answers in order: W has moved → push; anything else → the shard goes back to W

A call says which W it expects. So calls may be pipelined: after a failed one the store refuses all later
ones of the shard, and nothing is written behind a gap. **W moves only in the store**, in one step with the
entries; a push (`workers/pushes.py`) starts only after the store has said so. A run of unknown outcome is
`doubtful`: a later call of its shard that was carried out shows that it was too, and it is told first.

A shard that does not fit its log is refused at the start and stays closed, alone. One in trouble is held, and
goes back to W or stops (`workers/pauses.py`); the others go on. Records that no fused call may carry go
through `workers/serial.py`. The table of open shards is owned here.

Full: the reader waits for the finisher; nothing is queued here but what is in flight. A store that is away
holds its shards. A process that dies has told nobody of what W has not passed; the next one reads on at W.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import NamedTuple

from structlog import get_logger

from qim.clock import Clock
from qim.domain import mailbox as rules
from qim.errors import PartitionStopped, RecordCorrupt, StoreBroken, StoreError
from qim.ids import DispatchId, MailboxSeq, Offset, SlotId
from qim.limits import (
    BATCHES_IN_FLIGHT_MAX,
    LOG_READ_BYTES_MAX,
    MAILBOX_BATCH_RECORDS_MAX,
    SCRIPT_RUN_ITEMS_MAX,
)
from qim.metrics import Metrics
from qim.ports import CommitLog, LogReader, LogRecord, MailboxStore, Materialised, ShardState
from workers.company import Company
from workers.failpoints import Failpoints
from workers.pauses import Pauses
from workers.pushes import Pushes
from workers.request import OnFatal
from workers.shard_state import Delivery, PresenceView, Pusher, Shard, StoppedShard, build_delivery

log = get_logger()


class Run(NamedTuple):
    """One fused call on its way."""

    deliveries: list[Delivery]
    call: Awaitable[list[Materialised]]


class Shards:
    """Reader and finisher over the shards of one mailbox instance."""

    def __init__(
        self,
        *,
        slots: Sequence[SlotId],
        store: MailboxStore,
        dispatch: CommitLog,
        presence: PresenceView,
        pusher: Pusher,
        clock: Clock,
        metrics: Metrics,
        failpoints: Failpoints,
        on_fatal: OnFatal,
        company: Company,
    ) -> None:
        self._slots = tuple(slots)
        self._store = store
        self._dispatch = dispatch
        self._clock = clock
        self._metrics = metrics
        self._failpoints = failpoints
        self._company = company
        self._reader: LogReader | None = None
        self._issued: asyncio.Queue[list[Run]] = asyncio.Queue()
        self._room = asyncio.Semaphore(BATCHES_IN_FLIGHT_MAX)
        self.shards: dict[SlotId, Shard] = {}
        self.unopened: dict[SlotId, StoppedShard] = {}
        """Slots whose state and log do not belong together; a restart asks again."""
        self.pauses = Pauses(
            slots=slots,
            shards=self.shards,
            store=store,
            clock=clock,
            metrics=metrics,
            on_fatal=on_fatal,
        )
        self.pushes = Pushes(store=store, presence=presence, pusher=pusher, clock=clock, metrics=metrics)

    # --- start ---------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Checks every shard against the log and opens the reader; a shard that fails stays closed, alone.

        Repeated after an error it goes on with the shards that were not decided yet.
        """
        states = await self._store.load_shards(self._slots)
        marks = await self._dispatch.watermarks(self._slots)
        identity = await self._dispatch.identity()
        for slot in self._slots:
            if slot in self.shards or slot in self.unopened:
                continue
            state = states.get(slot)
            if state is None or state.base < 1:
                self._refuse(
                    slot, "the shard has no readable state: never initialised, or its store was lost"
                )
                continue
            if slot not in marks:
                self._refuse(slot, "what the store holds under the key of its log is no log")
                continue
            reason = await self._check(slot, state, marks[slot].low, marks[slot].high, identity)
            if reason:
                self._refuse(slot, reason)
                continue
            self.shards[slot] = Shard(slot, base=state.base, watermark=state.watermark)
            self._metrics.watermark[slot] = state.watermark
        self._reader = self._dispatch.open_reader(
            {slot: shard.position for slot, shard in self.shards.items()}
        )
        self.pauses.attach(self._reader)

    async def _check(
        self, slot: SlotId, state: ShardState, low: Offset, high: Offset, identity: bytes
    ) -> str:
        position = rules.position_of(base=state.base, watermark=state.watermark)
        found = await self.read_record(slot, position) if low <= position < high else None
        return rules.check_start(
            position=position,
            low=low,
            high=high,
            stored_log=state.log_identity,
            log=identity,
            stored_dispatch=state.dispatch_id,
            found=found,
        )

    async def read_record(self, slot: SlotId, offset: Offset) -> bytes | None:
        """The record at a place; empty where one stands that cannot be read, None where none does."""
        try:
            records = await self._dispatch.read(slot, offset, records_max=1)
        except StoreBroken:
            return b""
        return records[0].data if records and records[0].offset == offset else None

    def _refuse(self, slot: SlotId, reason: str) -> None:
        self.unopened[slot] = StoppedShard(rules.NOTHING_FINISHED, DispatchId(b""), reason)
        self._metrics.slot_stopped[slot] += 1
        log.error("slot_stopped", role="mailbox", slot=slot, reason=reason)

    async def close(self) -> None:
        if self._reader is not None:
            await self._reader.close()

    # --- reader --------------------------------------------------------------------------------------

    async def run_reader(self) -> None:
        """Until cancelled."""
        reader = self._reader
        assert reader is not None
        failed = 0
        while True:
            await self._room.acquire()
            runs: list[Run] = []
            while not runs:
                try:
                    batch = await reader.next_batch(
                        records_max=MAILBOX_BATCH_RECORDS_MAX, bytes_max=LOG_READ_BYTES_MAX
                    )
                except PartitionStopped as error:
                    self.pauses.stop_reading(error)
                except StoreError as error:
                    failed += 1
                    if rules.is_news(failed):
                        log.warning("log_read_failed", role="mailbox", attempts=failed, reason=str(error))
                    await asyncio.sleep(rules.READ_AGAIN_MS / 1000)
                else:
                    failed = 0
                    if not batch:
                        return
                    if len(batch) < SCRIPT_RUN_ITEMS_MAX:
                        await self._company.join()
                    runs = self._issue(batch)
            self._issued.put_nowait(runs)

    def _issue(self, batch: Sequence[LogRecord]) -> list[Run]:
        """Cuts a batch into runs and issues them; what the reader was sent back from since is left out."""
        started = self._clock.monotonic()
        fused: list[Delivery] = []
        for record in batch:
            shard = self.shards.get(record.partition)
            if shard is None or shard.held:
                continue
            delivery = self._accept(shard, record.offset, record.data)
            if delivery is not None:
                fused.append(delivery)
        self._failpoints.hit("mailbox.taken")
        runs = [self._call(run) for run in rules.cut_runs(fused)]
        metrics = self._metrics
        metrics.mailbox_batches += 1
        metrics.mailbox_batch_messages += len(batch)
        metrics.mailbox_pass.observe(self._clock.monotonic() - started)
        return runs

    def _accept(self, shard: Shard, offset: Offset, data: bytes) -> Delivery | None:
        """The record as a delivery for a fused run; None when it goes another way."""
        if shard.overflowed:
            return None
        wanted = rules.next_seq(base=shard.base, watermark=shard.sent)
        if len(shard.queue):
            wanted = MailboxSeq(shard.queue[-1].write.mailbox_seq + 1)
        mailbox_seq = MailboxSeq(shard.base + offset)
        if mailbox_seq < wanted:
            return None
        if mailbox_seq > wanted:
            # Read before the reader was sent back: it will come again in its turn.
            self.pauses.seek(shard, shard.offset_of(MailboxSeq(wanted - 1)))
            return None
        try:
            delivery = build_delivery(shard, offset, data)
        except RecordCorrupt as error:
            if shard.queue:
                self.pauses.overflow(shard)
            else:
                self.pauses.stop(shard, offset, rules.identify(data)[0], str(error))
            return None
        if len(shard.queue) or shard.alone or not rules.is_fusable(delivery):
            self.pauses.enqueue(shard, delivery)
            return None
        shard.sent = mailbox_seq
        return delivery

    def _call(self, deliveries: list[Delivery]) -> Run:
        expected: dict[SlotId, MailboxSeq] = {}
        writes = []
        for delivery in deliveries:
            write = delivery.write
            writes.append(write)
            shard = self.shards[write.slot]
            shard.in_flight += 1
            if write.slot not in expected:
                offset = write.mailbox_seq - shard.base
                expected[write.slot] = MailboxSeq(write.mailbox_seq - 1 if offset else 0)
        return Run(deliveries, self._store.materialise(expected, writes))

    # --- finisher ------------------------------------------------------------------------------------

    async def run_finisher(self) -> None:
        """Until cancelled."""
        while True:
            runs = await self._issued.get()
            for run in runs:
                await self._finish(run)
            self._room.release()

    async def _finish(self, run: Run) -> None:
        done = run.deliveries
        unusual: Sequence[Materialised] = ()
        try:
            outcomes = await run.call
        except StoreError as error:
            done = []
            self.pauses.fail_run(run.deliveries, error)
        else:
            if any(outcome is not Materialised.DONE for outcome in outcomes):
                done, unusual = self._sort_out(run, outcomes)
            if any(self.shards[delivery.write.slot].doubtful for delivery in done):
                await self._tell_doubtful(done)
        self.note_passed(done)
        self._failpoints.hit("mailbox.finished")
        if unusual:
            await self.pushes.tell(done, unusual)
        else:
            self.pushes.push(done)
        self._failpoints.hit("mailbox.pushed")
        shards = self.shards
        settle = self.pauses.settle
        for delivery in run.deliveries:
            shard = shards[delivery.write.slot]
            shard.in_flight -= 1
            if not shard.in_flight:
                settle(shard)

    def _sort_out(
        self, run: Run, outcomes: Sequence[Materialised]
    ) -> tuple[list[Delivery], list[Materialised]]:
        """What W has passed, and how."""
        done, passed = [], []
        for delivery, outcome in zip(run.deliveries, outcomes, strict=True):
            if outcome.is_passed:
                done.append(delivery)
                passed.append(outcome)
            else:
                self.pauses.note_refused(self.shards[delivery.write.slot], delivery, outcome)
        return done, passed

    async def _tell_doubtful(self, done: Sequence[Delivery]) -> None:
        """A call behind one of unknown outcome was carried out: so that one was too, and is told first.

        Otherwise its entries would be passed over in silence, and the next push would name the wrong entry
        before it. The store is asked once more what is a repeat.
        """
        for slot in dict.fromkeys(delivery.write.slot for delivery in done):
            shard = self.shards[slot]
            doubtful, shard.doubtful = shard.doubtful, []
            self.note_passed(doubtful)
            for part in rules.cut_runs(doubtful):
                outcomes = await self._ask_again(shard, part)
                if outcomes and all(outcome.is_passed for outcome in outcomes):
                    await self.pushes.tell(part, outcomes)
                else:
                    self.pushes.note_untold(part)

    async def _ask_again(self, shard: Shard, part: Sequence[Delivery]) -> Sequence[Materialised]:
        """Of records that W has passed; nothing is written. Empty: the store does not say."""
        writes = [delivery.write for delivery in part]
        try:
            return await self._store.materialise({shard.slot: shard.watermark}, writes)
        except StoreError:
            return ()

    def note_passed(self, deliveries: Sequence[Delivery]) -> None:
        """W of their shards is at these records now; one reading of the clock for all of them."""
        shards = self.shards
        metrics = self._metrics
        now_ms = self._clock.now_ms()
        for delivery in deliveries:
            write = delivery.write
            slot = write.slot
            shard = shards[slot]
            shard.watermark = metrics.watermark[slot] = write.mailbox_seq
            shard.attempts = 0
            metrics.watermark_moved_ms[slot] = now_ms

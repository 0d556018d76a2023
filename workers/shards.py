"""Materialises the dispatch partitions of one mailbox instance, in runs over many shards.

    reader     takes a batch, cuts it into runs, issues them at once; four batches are in flight at most
    finisher   takes the answers in order: W has moved → push; anything else → the shard goes back to W
    resumer    opens shards again whose back-off is over

A call says which W it expects. So calls may be pipelined: after a failed one the store refuses all later
ones of the shard, and nothing is written behind a gap. **W moves only in the store**, in one step with the
entries; a push starts only after the store has said so, and whatever happens to it delays nothing. A repeat
moves W and leaves no entry: it is neither told nor counted. Where the answer leaves open whether an entry
stands, the mailbox is looked into before anybody is told. A run of unknown outcome is `doubtful`: a later
call of its shard that was carried out shows that it was too, and it is told first.

A shard in trouble is *held*: its partition is paused, what was read of it is forgotten, and when nothing of
it is in flight any more the reader goes back to W. Refused or unknown: after a back-off, for ever. Another
digest under a known dispatch id, an unreadable record, a store that contradicts itself: the shard stops,
alone, until an operator decides. Records that no fused call may carry go through `workers/serial.py`.

Full: the reader waits for the finisher; nothing is queued here but what is in flight.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Final, NamedTuple

from structlog import get_logger

from qim.clock import Clock
from qim.domain import mailbox as rules
from qim.errors import PartitionStopped, RecordCorrupt, StoreBroken, StoreError
from qim.ids import DispatchId, MailboxSeq, Offset, SlotId, WorkerId
from qim.limits import (
    BATCHES_IN_FLIGHT_MAX,
    LOG_READ_BYTES_MAX,
    MAILBOX_BATCH_RECORDS_MAX,
    MAILBOX_QUEUE_RECORDS_MAX,
    SCRIPT_RUN_ITEMS_MAX,
)
from qim.metrics import Metrics
from qim.ports import CommitLog, LogReader, LogRecord, MailboxStore, MailboxWrite, Materialised, ShardState
from workers.commits import OnFatal
from workers.company import Company
from workers.failpoints import Failpoints
from workers.inbox import Inbox
from workers.shard_state import (
    Delivery,
    PresenceView,
    Pusher,
    Shard,
    StoppedShard,
    build_delivery,
    outcome_of_place,
    query_of_place,
)

log = get_logger()

RESUME_POLL_SECONDS: Final = 0.02
"""Only while a shard waits for its back-off to end."""


class Run(NamedTuple):
    """One fused call on its way."""

    deliveries: list[Delivery]
    call: Awaitable[list[Materialised]]


class Shards:
    """Reader, finisher and resumer over the shards of one mailbox instance."""

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
        self._presence = presence
        self._pusher = pusher
        self._clock = clock
        self._metrics = metrics
        self._failpoints = failpoints
        self._on_fatal = on_fatal
        self._company = company
        self._reader: LogReader | None = None
        self._issued: asyncio.Queue[list[Run]] = asyncio.Queue()
        self._room = asyncio.Semaphore(BATCHES_IN_FLIGHT_MAX)
        self._waiting: set[SlotId] = set()
        self._someone_waits = asyncio.Event()
        self.shards: dict[SlotId, Shard] = {}
        self.unopened: dict[SlotId, StoppedShard] = {}
        """Slots whose state and log do not belong together; a restart asks again."""
        self.serial: Inbox[Shard] = Inbox(items_max=len(self._slots), bytes_max=0)
        """Shards whose queue a serial lane must work on."""

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
                    self._stop_reading(error)
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
        for partition, offset, data in batch:
            shard = self.shards.get(partition)
            if shard is None or shard.held:
                continue
            delivery = self._accept(shard, offset, data)
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
            self._seek(shard, shard.offset_of(MailboxSeq(wanted - 1)))
            return None
        try:
            delivery = build_delivery(shard, offset, data)
        except RecordCorrupt as error:
            if shard.queue:
                self._overflow(shard)
            else:
                self.stop(shard, offset, rules.identify(data)[0], str(error))
            return None
        if len(shard.queue) or shard.alone or not rules.is_fusable(delivery):
            self._enqueue(shard, delivery)
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

    def _enqueue(self, shard: Shard, delivery: Delivery) -> None:
        if len(shard.queue) >= MAILBOX_QUEUE_RECORDS_MAX:
            self._overflow(shard)
            return
        shard.queue.append(delivery)
        self._serve_if_idle(shard)

    def _overflow(self, shard: Shard) -> None:
        """No more of this partition until its queue is empty; what is dropped here is read again."""
        shard.overflowed = True
        self._pause(shard.slot)

    def _serve_if_idle(self, shard: Shard) -> None:
        if shard.queue and not shard.serving and not shard.held and not shard.in_flight:
            shard.serving = True
            offered = self.serial.offer(shard)
            assert offered

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
            self._fail_run(run, error)
        else:
            if any(outcome is not Materialised.DONE for outcome in outcomes):
                done, unusual = self._sort_out(run, outcomes)
            if any(self.shards[delivery.write.slot].doubtful for delivery in done):
                await self._tell_doubtful(done)
        self.note_passed(done)
        self._failpoints.hit("mailbox.finished")
        if unusual:
            await self.tell(done, unusual)
        else:
            self.push(done)
        self._failpoints.hit("mailbox.pushed")
        shards = self.shards
        for delivery in run.deliveries:
            shard = shards[delivery.write.slot]
            shard.in_flight -= 1
            if not shard.in_flight:
                self._settle(shard)

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
                self.note_refused(self.shards[delivery.write.slot], delivery, outcome)
        return done, passed

    async def tell(self, deliveries: Sequence[Delivery], outcomes: Sequence[Materialised]) -> None:
        """Pushes what stands where it says, of records that W has passed.

        A device that is told of a place without an entry counts one too many. Where the store does not say,
        nobody is told, but the next push names that place, which the device does not know: so it pulls.
        """
        outcomes = await self._look_up(deliveries, outcomes)
        for delivery, outcome in zip(deliveries, outcomes, strict=True):
            if outcome is Materialised.DONE:
                self.push([delivery])
            elif outcome is Materialised.PASSED:
                self._note_untold([delivery])

    async def _look_up(
        self, deliveries: Sequence[Delivery], outcomes: Sequence[Materialised]
    ) -> Sequence[Materialised]:
        """PASSED becomes DONE or REPEAT by what the mailbox shows; it stays where the store does not say."""
        named = zip(deliveries, outcomes, strict=True)
        writes = [delivery.write for delivery, outcome in named if outcome is Materialised.PASSED]
        if not writes:
            return outcomes
        try:
            pages = await self._store.read_mailbox([query_of_place(write) for write in writes])
        except StoreError:
            return outcomes
        found = map(outcome_of_place, writes, pages)
        return [next(found) if outcome is Materialised.PASSED else outcome for outcome in outcomes]

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
                    await self.tell(part, outcomes)
                else:
                    self._note_untold(part)

    def _note_untold(self, part: Sequence[Delivery]) -> None:
        for write, _sender, _device in part:
            for user in write.recipients:
                self._presence.advance(write.tenant, user, write.mailbox_seq)

    async def _ask_again(self, shard: Shard, part: Sequence[Delivery]) -> Sequence[Materialised]:
        """Of records that W has passed; nothing is written. Empty: the store does not say."""
        writes = [delivery.write for delivery in part]
        try:
            return await self._store.materialise({shard.slot: shard.watermark}, writes)
        except StoreError:
            return ()

    def _fail_run(self, run: Run, error: StoreError) -> None:
        for delivery in run.deliveries:
            self.shards[delivery.write.slot].doubtful.append(delivery)
        for slot in {delivery.write.slot for delivery in run.deliveries}:
            shard = self.shards[slot]
            # A run names many shards, the error none. Where it is one shard's fault, or fails again, each
            # tries its next record alone, so that no shard suffers for long from another one.
            shard.alone = shard.alone or shard.attempts > 0 or isinstance(error, StoreBroken)
            self.fail(shard, str(error))

    def note_passed(self, deliveries: Sequence[Delivery]) -> None:
        """W of their shards is at these records now; one reading of the clock for all of them."""
        shards = self.shards
        metrics = self._metrics
        now_ms = self._clock.now_ms()
        for write, _sender, _device in deliveries:
            slot = write.slot
            shard = shards[slot]
            shard.watermark = metrics.watermark[slot] = write.mailbox_seq
            shard.attempts = 0
            metrics.watermark_moved_ms[slot] = now_ms

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

    def push(self, deliveries: Sequence[Delivery]) -> None:
        """Counts entries that are news and tells the sessions that are online.

        The sending device gets the echo: it has the body already.
        """
        metrics = self._metrics
        observe = metrics.message_delivery.observe
        now_ms = self._clock.now_ms()
        sessions_of = self._presence.sessions_of
        advance = self._presence.advance
        for write, sender, device in deliveries:
            targets: dict[WorkerId, list[tuple[int, int, int, int, bool]]] = {}
            mailbox_seq = write.mailbox_seq
            metrics.mailbox_entries += len(write.recipients)
            age_ms = now_ms - write.reserved_at
            observe(age_ms / 1000 if age_ms > 0 else 0.0)
            for user in write.recipients:
                sessions = sessions_of(write.tenant, user)
                if not sessions:
                    continue
                previous = advance(write.tenant, user, mailbox_seq)
                for session in sessions:
                    echo = user == sender and session.device == device
                    target = (session.handle, session.generation, previous, mailbox_seq, echo)
                    targets.setdefault(session.worker, []).append(target)
            for worker, named in targets.items():
                metrics.pushes += len(named)
                self._pusher.push(worker, named, write.entry)

    # --- trouble -------------------------------------------------------------------------------------

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
        self._pause(shard.slot)

    def _stop_at(self, shard: Shard, write: MailboxWrite, reason: str) -> None:
        self.stop(shard, shard.offset_of(write.mailbox_seq), write.dispatch_id, reason)

    def _stop_reading(self, error: PartitionStopped) -> None:
        slots = tuple(self.shards) if error.partition is None else (SlotId(error.partition),)
        for slot in slots:
            shard = self.shards.get(slot)
            if shard is not None:
                read = rules.position_of(base=shard.base, watermark=shard.sent) + len(shard.queue)
                self.stop(shard, Offset(read + 1), DispatchId(b""), str(error))

    def served(self, shard: Shard) -> None:
        """A serial lane is through with the queue of the shard, or the shard is held."""
        shard.serving = False
        if shard.held:
            self._settle(shard)
        elif shard.overflowed:
            shard.overflowed = False
            self._go_back(shard)

    def _settle(self, shard: Shard) -> None:
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
            shard = self.shards[slot]
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
            self._settle(shard)
            return False
        if state is None or state.watermark < shard.watermark or state.base != shard.base:
            self.stop(shard, Offset(shard.position + 1), DispatchId(b""), "the store has lost the watermark")
            return False
        shard.reload = False
        return True

    def _go_back(self, shard: Shard) -> None:
        shard.sent = shard.watermark
        shard.doubtful.clear()
        self._seek(shard, shard.position)

    def _seek(self, shard: Shard, position: Offset) -> None:
        assert self._reader is not None
        self._reader.seek(shard.slot, position)
        self._reader.resume(shard.slot)

    def _pause(self, slot: SlotId) -> None:
        assert self._reader is not None
        self._reader.pause(slot)

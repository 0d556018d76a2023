"""The fan-out: turns records of the own Outbox partitions into records of the dispatch log.

Four loops. The planner takes a batch, plans every record (pure) and issues one append for all of it, grouped
by shard. The finisher takes the batches in order and notes, **only when all records of a batch are durable**,
how far each partition is; the keeper stores that every `FANOUT_POSITION_INTERVAL_MS`; the mender serves what
a broken partition missed. Whatever fails is appended again, and the positions of that batch and of all behind
it wait until it has succeeded: the dispatch id, a function of the record, makes repeats converge in the
mailboxes. The positions live on the core instance of their slot and only rise; a crash before they are stored
repeats the batches at the next start.

After a small batch the planner lets some milliseconds of records come together, and the next one waits for a
pass of the writer (`workers/company.py`): what follows here, up to the push, costs almost as much for one
record as for ten, and nobody waits for it as for an acknowledgement.
Several batches are in flight because the writer has several too: with one at a time a busy store served four
passes of the writer for each batch here, and deliveries fell behind acknowledgements without end.

Owned state: the position of each partition (last finished offset). A partition stops alone, loudly, and keeps
its place when a record cannot be planned or its position lies outside the log; `stopped` names the place. An
operator answers with `retry` or, for one named record, with `skip`. Nothing is ever skipped by itself, and no
skip is taken while records before it are still on their way.

Members of a group are asked for before its records are planned (`workers/audiences.py`); a batch without
groups waits for nobody. A batch with groups goes out in pieces, because one of its records may become 64
times as large. While the store with the members is away, the planner waits; members that are not there stop
the partition like any record that cannot be planned.

A dispatch partition that takes nothing is left out and noted in `workers/missed.py`; the others go on, and
the positions behind which it misses something wait for it.

Full: with `BATCHES_IN_FLIGHT_MAX` appends under way no further batch is read; the log waits. A core instance
that does not take its positions gets them with a later pass of the keeper; those of the others go on rising.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from structlog import get_logger

from qim.clock import Clock
from qim.domain.fanout import (
    NO_SNAPSHOTS,
    PlannedDispatch,
    Snapshots,
    cut_by_bytes,
    cut_by_snapshots,
    is_of_group,
    plan_dispatches,
)
from qim.domain.mailbox import READ_AGAIN_MS, backoff_ms, is_news
from qim.domain.placement import Placement
from qim.errors import (
    FailedPrecondition,
    PartitionStopped,
    RecordCorrupt,
    StoreBroken,
    StoreError,
    StoreRefused,
    StoreUnknown,
)
from qim.ids import Offset, SlotId
from qim.limits import (
    BATCHES_IN_FLIGHT_MAX,
    FANOUT_BATCH_RECORDS_MAX,
    FANOUT_PASS_INTERVAL_MS,
    FANOUT_POSITION_INTERVAL_MS,
    LOG_READ_BYTES_MAX,
    SCRIPT_RUN_ITEMS_MAX,
)
from qim.memberships import Memberships
from qim.metrics import Metrics
from qim.ports import CommitLog, CommitStore, LogReader, LogRecord
from workers.audiences import Audiences
from workers.commits import OnFatal
from workers.company import Company
from workers.failpoints import Failpoints
from workers.missed import Missed
from workers.opening import until_answered

log = get_logger()

GROUP: Final = "fanout"
NOTHING_FINISHED: Final = Offset(-1)
DRAIN_POLL_SECONDS: Final = 0.02
SKIP_POLL_SECONDS: Final = 0.02
SKIP_POLLS_MAX: Final = 50
"""So often a skip looks whether the records before it are durable, before it is refused."""


class Stopped(NamedTuple):
    """Where a partition stands still and why."""

    offset: Offset
    """Of the record that cannot be finished; -1: the partition could not be opened."""
    reason: str


class Issued(NamedTuple):
    """One batch whose append is on its way."""

    dispatches: list[PlannedDispatch]
    reached: dict[SlotId, Offset]
    """Per partition: the offset that is finished when all dispatches are durable."""
    append: Awaitable[list[Offset | None]]
    batch: Sequence[LogRecord]
    started: float


class Fanout:
    """Reads the Outbox partitions of one worker's slots."""

    def __init__(
        self,
        *,
        slots: Sequence[SlotId],
        placement: Placement,
        stores: Sequence[CommitStore],
        memberships: Sequence[Memberships],
        outbox: CommitLog,
        dispatch: CommitLog,
        clock: Clock,
        metrics: Metrics,
        failpoints: Failpoints,
        on_fatal: OnFatal,
        company: Company | None = None,
    ) -> None:
        self._slots = tuple(slots)
        self._placement = placement
        self._stores = stores
        self._outbox = outbox
        self._dispatch = dispatch
        self._clock = clock
        self._metrics = metrics
        self._failpoints = failpoints
        self._on_fatal = on_fatal
        self._company = company or Company(clock)
        self._reader: LogReader | None = None
        self._issued: asyncio.Queue[Issued] = asyncio.Queue()
        self._room = asyncio.Semaphore(BATCHES_IN_FLIGHT_MAX)
        self._tasks: list[asyncio.Task[None]] = []
        self._planned: dict[SlotId, Offset] = {}
        self._reached: dict[SlotId, Offset] = {}
        """Last offset of every partition whose dispatches are durable, or missed by a broken partition."""
        self._audiences = Audiences(placement=placement, memberships=memberships)
        self._missed = Missed(
            outbox=outbox,
            dispatch=dispatch,
            audiences=self._audiences,
            planned=self._planned,
            metrics=metrics,
        )
        self.positions: dict[SlotId, Offset] = {}
        """Last finished offset of every partition that could be opened."""
        self.stopped: dict[SlotId, Stopped] = {}

    async def run(self) -> None:
        """Until drained. Raises what no batch can handle; the worker then ends."""
        await until_answered("fanout", self.open)
        async with asyncio.TaskGroup() as tasks:
            loops = (self._run_planner(), self._run_finisher(), self._run_keeper(), self._run_mender())
            self._tasks = [tasks.create_task(loop) for loop in loops]

    async def drain(self, deadline: float) -> None:
        """Goes on until the own partitions are empty or the deadline (monotonic seconds) has come."""
        while self._clock.monotonic() < deadline and await self._is_behind():
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        for task in self._tasks:
            task.cancel()
        if self._reader is not None:
            await self._reader.close()

    async def _is_behind(self) -> bool:
        going = [slot for slot in self.positions if slot not in self.stopped and not self._missed.holds(slot)]
        try:
            marks = await self._outbox.watermarks(going)
        except StoreError:
            return True
        return any(mark.behind(self.positions[slot]) > 0 for slot, mark in marks.items())

    @property
    def broken(self) -> dict[SlotId, str]:
        """Dispatch partitions that take nothing, and why; they are tried again until they do."""
        return self._missed.broken

    # --- start ---------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Loads the positions, stops the partitions whose position lies outside the log, opens the reader.

        Nothing is decided before both questions are answered, so it may be repeated after an error.
        """
        stored = await self._load_positions()
        marks = await self._outbox.watermarks(self._slots)
        for slot in self._slots:
            if slot not in marks:
                self._stop(slot, NOTHING_FINISHED, "what the store holds under its key is no log")
                continue
            low, high = marks[slot]
            position = stored.get(slot)
            if position is None and low > 0:
                self._stop(slot, NOTHING_FINISHED, f"no position is stored, and the log begins at {low}")
                continue
            position = NOTHING_FINISHED if position is None else position
            if not low <= position + 1 <= high:
                self._stop(slot, position, f"the log holds {low} to {high - 1}, wanted is {position + 1}")
                continue
            self.positions[slot] = position
        self._reader = self._outbox.open_reader(self.positions)

    async def _load_positions(self) -> dict[SlotId, Offset]:
        stored: dict[SlotId, Offset] = {}
        for instance, slots in self._by_instance(self._slots).items():
            stored |= await self._stores[instance].load_positions(GROUP, slots)
        return stored

    def _by_instance(self, slots: Sequence[SlotId]) -> dict[int, list[SlotId]]:
        grouped: dict[int, list[SlotId]] = {}
        for slot in slots:
            grouped.setdefault(self._placement.core_instance_of(slot), []).append(slot)
        return grouped

    # --- one batch -----------------------------------------------------------------------------------

    async def _run_planner(self) -> None:
        reader = self._reader
        assert reader is not None
        failed = 0
        while True:
            await self._room.acquire()
            batch: list[LogRecord] = []
            while not batch:
                try:
                    batch = await reader.next_batch(
                        records_max=FANOUT_BATCH_RECORDS_MAX, bytes_max=LOG_READ_BYTES_MAX
                    )
                except PartitionStopped as error:
                    self._stop_reading(error)
                except StoreError as error:
                    failed += 1
                    if is_news(failed):
                        log.warning("log_read_failed", role=GROUP, attempts=failed, reason=str(error))
                    await asyncio.sleep(READ_AGAIN_MS / 1000)
                else:
                    failed = 0
                    if not batch:
                        return
            if any(is_of_group(data) for _partition, _offset, data in batch):
                await self._issue_in_pieces(batch)
            else:
                self._issued.put_nowait(self._issue(batch, NO_SNAPSHOTS))
            if len(batch) < SCRIPT_RUN_ITEMS_MAX:
                await asyncio.sleep(FANOUT_PASS_INTERVAL_MS / 1000)
                await self._company.join()

    async def _issue_in_pieces(self, batch: Sequence[LogRecord]) -> None:
        """Waits for members and for room. What a partition holds behind a record that stopped it is left out.

        It may have been resumed meanwhile: then it is read again from that record on.
        """
        stopped: set[SlotId] = set()
        for few_groups in cut_by_snapshots(batch):
            snapshots = await self._load_snapshots(few_groups)
            for piece in cut_by_bytes(few_groups, snapshots):
                left = [record for record in piece if record.partition not in stopped]
                self._issued.put_nowait(self._issue(left, snapshots))
                stopped |= self.stopped.keys()
                await self._room.acquire()
        self._room.release()

    async def _load_snapshots(self, records: Sequence[LogRecord]) -> Snapshots:
        """Until the stores answer: a record is never planned without its members."""
        failed = 0
        while True:
            try:
                return await self._audiences.load(record.data for record in records)
            except StoreError as error:
                failed += 1
                if is_news(failed):
                    log.warning("members_not_loaded", role=GROUP, attempts=failed, reason=str(error))
                await asyncio.sleep(backoff_ms(failed) / 1000)

    def _issue(self, batch: Sequence[LogRecord], snapshots: Snapshots) -> Issued:
        """Plans records and issues their append; nothing is awaited between the two."""
        started = self._clock.monotonic()
        dispatches, reached = self._plan(batch, snapshots)
        self._failpoints.hit("fanout.planned")
        if self._missed.broken:
            dispatches = self._missed.leave_out(dispatches, batch)
        return Issued(dispatches, reached, self._dispatch.append(dispatches), batch, started)

    async def _run_finisher(self) -> None:
        metrics = self._metrics
        while True:
            issued = await self._issued.get()
            await self._await_append(issued)
            self._failpoints.hit("fanout.appended")
            self._room.release()
            for slot, offset in issued.reached.items():
                # After a retry a batch may be on its way twice, and end after what was skipped behind it.
                self._reached[slot] = max(offset, self._reached.get(slot, offset))
            metrics.fanout_batches += 1
            metrics.fanout_batch_messages += len(issued.batch)
            metrics.fanout_dispatches += len(issued.dispatches)
            metrics.fanout_pass.observe(self._clock.monotonic() - issued.started)

    async def _run_keeper(self) -> None:
        failed: Counter[int] = Counter()
        while True:
            await asyncio.sleep(FANOUT_POSITION_INTERVAL_MS / 1000)
            await self._company.join()
            await self._store_reached(failed)

    def _plan(
        self, batch: Sequence[LogRecord], snapshots: Snapshots
    ) -> tuple[list[PlannedDispatch], dict[SlotId, Offset]]:
        dispatches: list[PlannedDispatch] = []
        reached: dict[SlotId, Offset] = {}
        for partition, offset, data in batch:
            if partition in self.stopped:
                continue
            try:
                dispatches += plan_dispatches(data, snapshots)
            except RecordCorrupt as error:
                self._stop(partition, offset, str(error))
            else:
                reached[partition] = offset
        self._planned |= reached
        # Grouped by shard: the log packs the records of one partition together. The sort is stable.
        dispatches.sort(key=_shard_of)
        return dispatches, reached

    async def _await_append(self, issued: Issued) -> None:
        """Returns when every record is durable; what is not, is appended again, the same bytes."""
        wanted: list[PlannedDispatch] = list(issued.dispatches)
        append = issued.append
        attempts = 0
        while wanted:
            try:
                offsets = await append
            except StoreBroken as error:
                log.warning("dispatch_append_unknown", records=len(wanted), reason=str(error))
                wanted = await self._append_apart(wanted, issued.batch)
            except (StoreUnknown, StoreRefused) as error:
                if is_news(attempts + 1):
                    log.warning("dispatch_append_unknown", records=len(wanted), reason=str(error))
            else:
                wanted = [item for item, offset in zip(wanted, offsets, strict=True) if offset is None]
            if wanted:
                attempts += 1
                await asyncio.sleep(backoff_ms(attempts) / 1000)
                append = self._dispatch.append(wanted)

    async def _append_apart(
        self, wanted: Sequence[PlannedDispatch], batch: Sequence[LogRecord]
    ) -> list[PlannedDispatch]:
        """Shard by shard: a broken one is left out from now on; what must be appended again."""
        left: list[PlannedDispatch] = []
        for shard, group in groupby(wanted, key=_shard_of):
            records = list(group)
            try:
                offsets = await self._dispatch.append(records)
            except StoreBroken as error:
                self._missed.note(shard, batch, str(error))
            except StoreError:
                left += records
            else:
                left += [item for item, offset in zip(records, offsets, strict=True) if offset is None]
        return left

    async def _run_mender(self) -> None:
        attempts = 0
        while True:
            attempts = await self._missed.wait_and_mend(attempts)

    async def _store_reached(self, failed: Counter[int]) -> None:
        """Stores how far the partitions are, up to what a broken dispatch partition misses.

        Every core instance is tried once; what it does not take, the next pass brings again. `failed`: how
        often in a row each of them took nothing.
        """
        positions = {slot: self._missed.cap(slot, offset) for slot, offset in self._reached.items()}
        risen = [slot for slot, offset in positions.items() if offset > self.positions[slot]]
        for instance, slots in self._by_instance(risen).items():
            try:
                await self._store_positions(instance, {slot: positions[slot] for slot in slots})
            except StoreError as error:
                failed[instance] += 1
                if is_news(failed[instance]):
                    log.warning(
                        "position_not_stored", role=GROUP, attempts=failed[instance], reason=str(error)
                    )
            else:
                del failed[instance]

    async def _store_positions(self, instance: int, positions: Mapping[SlotId, Offset]) -> None:
        """Raises StoreError when they may not be stored. Repeating is harmless: positions only rise."""
        await self._stores[instance].store_positions(GROUP, positions)
        for slot, offset in positions.items():
            self.positions[slot] = max(offset, self.positions[slot])
        self._failpoints.hit("fanout.stored")

    # --- stopped partitions --------------------------------------------------------------------------

    def _stop(self, slot: SlotId, offset: Offset, reason: str) -> None:
        self.stopped[slot] = Stopped(offset, reason)
        self._metrics.slot_stopped[slot] += 1
        log.error("slot_stopped", role=GROUP, slot=slot, offset=offset, reason=reason)
        if self._reader is not None and slot in self.positions:
            self._reader.pause(slot)

    def _stop_reading(self, error: PartitionStopped) -> None:
        slots = self._slots if error.partition is None else (SlotId(error.partition),)
        for slot in slots:
            if slot in self.positions and slot not in self.stopped:
                read = self._planned.get(slot, self.positions[slot])
                self._stop(slot, Offset(read + 1), str(error))

    def retry(self, slot: SlotId) -> None:
        """Reads the partition again from its position. The operator has mended what was in the way."""
        self._resume(slot, self._stopped_at(slot), self._reached.get(slot, self.positions[slot]))

    async def skip(self, slot: SlotId, offset: Offset) -> bool:
        """Gives up the one record that the partition stands at: it is never dispatched.

        Returns whether that is stored. Where a broken dispatch partition misses something before the record,
        it is not: the partition goes on, but after a restart before the other is whole it stops here again.
        Raises FailedPrecondition, and nothing goes on, while records before this one are not durable (a
        position behind them would lose them with the next restart) and when the store does not answer.
        """
        self._stopped_at_record(slot, offset)
        await self._await_durable_before(slot, offset)
        await self._store_skip(slot, self._missed.cap(slot, offset))
        stopped = self._stopped_at_record(slot, offset)
        log.warning("record_skipped", role=GROUP, slot=slot, offset=offset, reason=stopped.reason)
        self._missed.give_up(slot, offset)
        self._reached[slot] = self._planned[slot] = offset
        self._resume(slot, stopped, offset)
        return self.positions[slot] >= offset

    async def _await_durable_before(self, slot: SlotId, offset: Offset) -> None:
        for _poll in range(SKIP_POLLS_MAX):
            if self._reached.get(slot, self.positions[slot]) >= offset - 1:
                return
            await asyncio.sleep(SKIP_POLL_SECONDS)
        raise FailedPrecondition(f"records of slot {slot} before {offset} are still on their way; try again")

    async def _store_skip(self, slot: SlotId, position: Offset) -> None:
        if position <= self.positions[slot]:
            return
        try:
            await self._store_positions(self._placement.core_instance_of(slot), {slot: position})
        except StoreError as error:
            raise FailedPrecondition(
                f"whether the skip is stored is not known; try again: {error}"
            ) from error

    def _stopped_at_record(self, slot: SlotId, offset: Offset) -> Stopped:
        stopped = self._stopped_at(slot)
        if stopped.offset != offset:
            raise FailedPrecondition(f"slot {slot} stands at {stopped.offset}, not at {offset}")
        return stopped

    def _stopped_at(self, slot: SlotId) -> Stopped:
        stopped = self.stopped.get(slot)
        if stopped is None or slot not in self.positions:
            raise FailedPrecondition(f"slot {slot} is not stopped at a record")
        return stopped

    def _resume(self, slot: SlotId, stopped: Stopped, position: Offset) -> None:
        assert self._reader is not None
        del self.stopped[slot]
        self._metrics.slot_stopped[slot] -= 1
        log.info("slot_resumed", role=GROUP, slot=slot, offset=stopped.offset)
        self._reader.seek(slot, position)
        self._reader.resume(slot)


def _shard_of(dispatch: PlannedDispatch) -> SlotId:
    return dispatch.shard

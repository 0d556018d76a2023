"""What broken dispatch partitions have missed, and how they get it when they are whole again.

One dispatch partition that refuses every append (its counter contradicts its stream, its key holds something
else) must not hold up the other 63. So the fan-out leaves its records out, notes here where the first of them
stands in each Outbox partition, and goes on. **The stored position of such an Outbox partition stays below
that place**, so nothing is ever lost: neither by a restart, which then plans everything behind it again and
converges by dispatch id, nor by the trimmer, which never passes a stored position.

No record is kept in memory, only places: at most one offset per broken partition and Outbox partition. The
mender tries again, with growing pauses and without an operator: it reads the Outbox from the noted place,
plans again what belongs to the broken partition, appends it, and when it has come up with the planner the
partition takes part again. Records that the fan-out could not plan were stopped at, so one that cannot be
planned here was given up by an operator. Not so a group message whose members have gone since: unless it was
given up, the partition stays broken, because nothing else says whom it would pass over.

State: owned by the fan-out's loop, lost with it. When the store dies, an attempt fails and is repeated.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from structlog import get_logger

from qim.domain.fanout import (
    NO_SNAPSHOTS,
    PlannedDispatch,
    Snapshots,
    plan_dispatches,
    snapshot_of,
)
from qim.domain.mailbox import backoff_ms
from qim.errors import RecordCorrupt, StoreBroken, StoreError
from qim.ids import Offset, SlotId
from qim.metrics import Metrics
from qim.ports import CommitLog, LogRecord
from workers.audiences import Audiences

log = get_logger()

READ_RECORDS_MAX: Final = 64


class Missed:
    """Broken dispatch partitions of one fan-out."""

    def __init__(
        self,
        *,
        outbox: CommitLog,
        dispatch: CommitLog,
        audiences: Audiences,
        planned: Mapping[SlotId, Offset],
        metrics: Metrics,
    ) -> None:
        self._outbox = outbox
        self._dispatch = dispatch
        self._audiences = audiences
        self._planned = planned
        """Newest offset of each Outbox partition that the fan-out has planned."""
        self._metrics = metrics
        self._places: dict[SlotId, dict[SlotId, Offset]] = {}
        """Broken dispatch partition → Outbox partition → offset of the first record that it misses."""
        self._given_up: set[tuple[SlotId, Offset]] = set()
        """Records that an operator skipped since all partitions were whole the last time."""
        self._someone_misses = asyncio.Event()
        self.broken: dict[SlotId, str] = {}
        """Why each of them is left out."""

    def note(self, shard: SlotId, batch: Iterable[LogRecord], reason: str) -> None:
        """The partition did not take its records of this batch."""
        if shard not in self.broken:
            self.broken[shard] = reason
            self._places[shard] = {}
            self._metrics.slot_stopped[shard] += 1
            self._someone_misses.set()
            log.error("slot_stopped", role="fanout", dispatch=shard, reason=reason)
        self._note_places(shard, batch)

    def leave_out(
        self, dispatches: list[PlannedDispatch], batch: Iterable[LogRecord]
    ) -> list[PlannedDispatch]:
        """The dispatches that do not go to a broken partition; where the others stand is noted."""
        kept = [item for item in dispatches if item.shard not in self.broken]
        if len(kept) < len(dispatches):
            for shard in {item.shard for item in dispatches if item.shard in self.broken}:
                self._note_places(shard, batch)
        return kept

    def give_up(self, partition: SlotId, offset: Offset) -> None:
        """An operator has skipped the record: nobody misses it."""
        self._given_up.add((partition, offset))

    def _note_places(self, shard: SlotId, batch: Iterable[LogRecord]) -> None:
        places = self._places[shard]
        for partition, offset, data in batch:
            if offset < places.get(partition, Offset(offset + 1)) and _may_dispatch_to(shard, data):
                places[partition] = offset

    def cap(self, partition: SlotId, reached: Offset) -> Offset:
        """The position that may be stored for an Outbox partition."""
        return min([reached, *(Offset(at[partition] - 1) for at in self._places.values() if partition in at)])

    def holds(self, partition: SlotId) -> bool:
        """Whether the position of this Outbox partition waits for a broken partition."""
        return any(partition in places for places in self._places.values())

    async def wait_and_mend(self, attempts: int) -> int:
        """Waits for a broken partition, pauses, tries each once; attempts so far, 0 = all are whole."""
        await self._someone_misses.wait()
        await asyncio.sleep(backoff_ms(attempts + 1) / 1000)
        for shard in tuple(self.broken):
            await self._catch_up(shard)
        if self.broken:
            return attempts + 1
        self._someone_misses.clear()
        return 0

    async def _catch_up(self, shard: SlotId) -> None:
        places = self._places[shard]
        while behind := [slot for slot, first in places.items() if self._is_planned(slot, first)]:
            for partition in behind:
                if not await self._append_some(shard, partition):
                    return
        # Nothing is awaited since the planner was found to be caught up with: it misses nothing any more.
        del self._places[shard], self.broken[shard]
        if not self.broken:
            self._given_up.clear()
        self._metrics.slot_stopped[shard] -= 1
        log.info("slot_resumed", role="fanout", dispatch=shard)

    def _is_planned(self, partition: SlotId, offset: Offset) -> bool:
        """A partition whose first record cannot be planned has none that was."""
        return partition in self._planned and offset <= self._planned[partition]

    async def _append_some(self, shard: SlotId, partition: SlotId) -> bool:
        places = self._places[shard]
        first, last = places[partition], self._planned[partition]
        try:
            found = await self._outbox.read(partition, first, records_max=READ_RECORDS_MAX)
            records = [record for record in found if record.offset <= last]
            if not records or records[0].offset != first:
                return False
            snapshots = await self._audiences.load(record.data for record in records)
            wanted = [item for record in records for item in self._dispatches_to(shard, record, snapshots)]
            if wanted and None in await self._dispatch.append(wanted):
                return False
        except StoreError:
            return False
        if places[partition] == first:  # otherwise a batch in flight has failed in front of it meanwhile
            places[partition] = Offset(records[-1].offset + 1)
        return True

    def _dispatches_to(
        self, shard: SlotId, record: LogRecord, snapshots: Snapshots
    ) -> Iterator[PlannedDispatch]:
        """Raises StoreBroken for a group message that was planned and now lacks its members."""
        snapshot = snapshot_of(record.data)
        if snapshot is not None and snapshot not in snapshots:
            if (record.partition, record.offset) not in self._given_up:
                raise StoreBroken(f"the members at version {snapshot.version} cannot be read any more")
            return
        yield from (item for item in _plan(record.data, snapshots) if item.shard == shard)


def _may_dispatch_to(shard: SlotId, data: bytes) -> bool:
    """Of a group message true: its members are not at hand, and a place too early does no harm."""
    return snapshot_of(data) is not None or any(item.shard == shard for item in _plan(data, NO_SNAPSHOTS))


def _plan(data: bytes, snapshots: Snapshots) -> Iterable[PlannedDispatch]:
    try:
        return plan_dispatches(data, snapshots)
    except RecordCorrupt:
        return ()

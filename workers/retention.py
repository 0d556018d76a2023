"""Trims the two logs of a worker's own partitions: what is old enough and finished by everybody.

Every 30 s the end of each partition is noted with the time. A record is old enough when it lies below an end
that was noted an hour ago; so no record needs a time of its own, and a restart only forgets samples, which
keeps records longer. The bound is the lower of that end and the position of the slowest consumer, and the
record at the bound stays: a start reads it back. A consumer that stands still therefore holds its partition.

Trims are not fenced: they remove only what every consumer has finished. A failure waits for the next round.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from structlog import get_logger

from qim.clock import Clock
from qim.errors import StoreError
from qim.ids import Offset, SlotId
from qim.limits import LOG_RETENTION_MS, LOG_TRIM_INTERVAL_MS
from qim.ports import CommitLog

log = get_logger()

SAMPLES_MAX = LOG_RETENTION_MS // LOG_TRIM_INTERVAL_MS + 2


class Sample(NamedTuple):
    """Where the partitions ended at a time."""

    noted: float
    """Monotonic seconds: a step of the wall clock must not shorten the retention."""
    ends: dict[SlotId, Offset]


class Retention:
    """Trims one log. `positions` gives the last finished offset of its slowest consumer per partition."""

    def __init__(
        self,
        *,
        name: str,
        slots: Sequence[SlotId],
        commit_log: CommitLog,
        positions: Callable[[], Mapping[SlotId, Offset]],
        clock: Clock,
        retention_ms: int = LOG_RETENTION_MS,
    ) -> None:
        self._name = name
        self._slots = tuple(slots)
        self._log = commit_log
        self._positions = positions
        self._clock = clock
        self._retention_seconds = retention_ms / 1000
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.trim_once()
            await asyncio.sleep(LOG_TRIM_INTERVAL_MS / 1000)

    async def trim_once(self) -> dict[SlotId, Offset]:
        """Notes the ends and trims; the bounds that were asked for."""
        now = self._clock.monotonic()
        try:
            marks = await self._log.watermarks(self._slots)
            self._samples.append(Sample(now, {slot: mark.high for slot, mark in marks.items()}))
            old = self._old_ends(now)
            positions = self._positions()
            bounds = {
                slot: Offset(min(end, positions[slot]))
                for slot, end in old.items()
                if slot in positions and slot in marks and min(end, positions[slot]) > marks[slot].low
            }
            if bounds:
                await self._log.trim(bounds)
        except StoreError as error:
            log.warning("log_not_trimmed", log=self._name, reason=str(error))
            return {}
        return bounds

    def _old_ends(self, now: float) -> Mapping[SlotId, Offset]:
        """The newest sample that is old enough; the ones before it are dropped."""
        ends: Mapping[SlotId, Offset] = {}
        while self._samples and now - self._samples[0].noted >= self._retention_seconds:
            ends = self._samples[0].ends
            if len(self._samples) < 2 or now - self._samples[1].noted < self._retention_seconds:
                break
            self._samples.popleft()
        return ends

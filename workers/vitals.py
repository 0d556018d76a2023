"""What a process measures of itself: its beat, the lateness of its loop, memory, processor time, pauses.

One timer of the event loop does all of it: every 250 ms the heartbeat record is stamped, and every fourth
time the counters are published into the shared page. Nothing here is a thread; when the loop is stuck the
stamp gets old, and that is the point. The collector's pauses are timed by its own callbacks.
"""

import asyncio
import gc
import os
import resource
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from qim.clock import Clock
from qim.limits import HEARTBEAT_INTERVAL_MS
from qim.metrics import Metrics
from workers.heartbeat import HeartbeatRecord

PUBLISH_EVERY_BEATS: Final = 1000 // HEARTBEAT_INTERVAL_MS
RECENT_BEATS: Final = 60_000 // HEARTBEAT_INTERVAL_MS
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Vitals:
    """The beat of one child; begins with `start` and ends with the loop."""

    def __init__(
        self,
        *,
        record: HeartbeatRecord,
        metrics: Metrics,
        clock: Clock,
        on_beat: Callable[[], None],
        before_publish: Callable[[], None],
    ) -> None:
        self._record = record
        self._metrics = metrics
        self._clock = clock
        self._on_beat = on_beat
        self._before_publish = before_publish
        self._due = 0.0
        self._beats = 0
        self._late_seconds: deque[float] = deque(maxlen=RECENT_BEATS)
        self._collection_began = 0.0

    def start(self) -> None:
        """First beat now."""
        gc.callbacks.append(self._on_collection)
        self._due = self._clock.monotonic()
        self._beat()

    def now_ns(self) -> int:
        return int(self._clock.monotonic() * 1_000_000_000)

    @property
    def loop_lag_ms(self) -> float:
        """How late the latest of the last minute's beats was: what a message had to wait at worst."""
        return max(self._late_seconds, default=0.0) * 1000

    def _beat(self) -> None:
        now = self._clock.monotonic()
        late = max(0.0, now - self._due)
        self._metrics.loop_lag.observe(late)
        self._late_seconds.append(late)
        self._record.stamp(int(now * 1_000_000_000))
        self._beats += 1
        if self._beats % PUBLISH_EVERY_BEATS == 0:
            self._publish()
        self._on_beat()
        self._due = now + HEARTBEAT_INTERVAL_MS / 1000
        asyncio.get_running_loop().call_later(HEARTBEAT_INTERVAL_MS / 1000, self._beat)

    def _publish(self) -> None:
        self._metrics.rss_bytes = resident_bytes()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self._metrics.cpu_seconds = usage.ru_utime + usage.ru_stime
        self._before_publish()
        self._record.write_snapshot(self._metrics.snapshot(sequence=self._beats))

    def _on_collection(self, phase: str, _info: dict[str, Any]) -> None:
        if phase == "start":
            self._collection_began = self._clock.monotonic()
        else:
            self._metrics.gc_pause.observe(self._clock.monotonic() - self._collection_began)


def resident_bytes() -> int:
    """Memory of this process that is really there; shared pages of the parent included."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES

"""What a run may claim: percentiles, correctness counters, and the rules that take a number away again.

    coordinated omission   a latency counts from the time at which the message was due, not from the time at
                           which the generator got round to sending it; a stalled server or generator shows
    void                   the generator used more than 70 % of one core: it measured itself
    noisy                  other processes, or the hypervisor, took more than 5 % of one core
    sustained              everything offered was accepted and delivered once, nothing is unanswered, and the
                           end-to-end P99 is below one second

Pure arithmetic: times come in as seconds, the counts of processor time as differences. `as_json` gives the
one object that tools read; its names are an interface, so they are only ever added to.
"""

from array import array
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Any, Final

GENERATOR_CORE_SHARE_MAX: Final = 0.70
NOISE_CORE_SHARE_MAX: Final = 0.05
SUSTAINED_END_TO_END_P99_MS: Final = 1_000.0


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed; 0 where there are none."""
    if not ordered:
        return 0.0
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """One kind of latency, in milliseconds."""

    p50: float
    p99: float
    p999: float
    max: float


class Latencies:
    """Durations of one kind. All are kept: a minute at ten thousand a second is five megabytes."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds = array("d")

    def __len__(self) -> int:
        return len(self._seconds)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def summary(self) -> Percentiles:
        ordered = sorted(self._seconds)
        p50, p99, p999 = (round(percentile(ordered, share) * 1000, 3) for share in (0.5, 0.99, 0.999))
        return Percentiles(p50, p99, p999, round(ordered[-1] * 1000, 3) if ordered else 0.0)


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Seconds of processor time used inside the measured window, by whom."""

    window_seconds: float
    workers: float
    redis: float
    generator: float
    others: float
    """Busy time of the machine that belongs to none of the three."""
    stolen: float
    """Time the hypervisor gave to somebody else while we wanted it."""

    @property
    def generator_share(self) -> float:
        return self.generator / self.window_seconds

    @property
    def noise_share(self) -> float:
        return (max(self.others, 0.0) + self.stolen) / self.window_seconds

    def per_message_us(self, accepted: int) -> dict[str, float]:
        """Microseconds per accepted message; all 0 when nothing was accepted."""
        scale = 1_000_000 / accepted if accepted else 0.0
        parts = {"workers": self.workers, "redis": self.redis, "generator": self.generator}
        return {name: round(seconds * scale, 1) for name, seconds in parts.items()}


@dataclass(frozen=True, slots=True)
class Counts:
    """Messages of a run: each is in exactly one of accepted, refused and unanswered."""

    offered: int
    accepted: int
    refused: int
    unanswered: int
    delivered: int
    """Accepted messages that reached their recipient, by push or by pull."""
    lost: int
    doubled: int
    pulled: int
    """Of the delivered: found by a pull, no push had come."""
    echoed: int


@dataclass(frozen=True, slots=True)
class Run:
    """One measured step."""

    rate: float
    seconds: float
    counts: Counts
    offered_in_window: int
    accepted_in_window: int
    ack: Percentiles
    end_to_end: Percentiles
    echo: Percentiles
    generator_lag: Percentiles
    """How late the generator sent; part of every latency above."""
    processor: ProcessorTime
    worker_lag_p99_ms: float | None = None
    batch: Mapping[str, float | None] = field(default_factory=dict)
    refusals: Mapping[int, int] = field(default_factory=dict)

    @property
    def is_void(self) -> bool:
        return self.processor.generator_share > GENERATOR_CORE_SHARE_MAX

    @property
    def is_noisy(self) -> bool:
        return self.processor.noise_share > NOISE_CORE_SHARE_MAX

    @property
    def is_correct(self) -> bool:
        """Nothing that was accepted is missing or doubled, and every request was answered."""
        counts = self.counts
        return counts.lost == 0 and counts.doubled == 0 and counts.unanswered == 0

    @property
    def is_sustained(self) -> bool:
        return (
            self.is_correct
            and self.counts.accepted == self.counts.offered
            and self.end_to_end.p99 < SUSTAINED_END_TO_END_P99_MS
            and not self.is_void
        )

    @property
    def server_us(self) -> float:
        """Processor time of workers and Redis per accepted message."""
        parts = self.processor.per_message_us(self.accepted_in_window)
        return round(parts["workers"] + parts["redis"], 1)


@dataclass(frozen=True, slots=True)
class Floor:
    """The cheapest a message could be on this machine at this minute; see `loadtest/floor.py`."""

    redis_us: float
    tls_us: float
    """Three frames."""

    @property
    def total_us(self) -> float:
        return round(self.redis_us + self.tls_us, 1)


def mean_floor(floors: Sequence[Floor]) -> Floor | None:
    """Before and after are one calibration: the machine may have changed in between."""
    if not floors:
        return None
    count = len(floors)
    return Floor(
        round(sum(floor.redis_us for floor in floors) / count, 1),
        round(sum(floor.tls_us for floor in floors) / count, 1),
    )


def batch_means(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float | None]:
    """Mean batch per role between two sums of the workers' counters; None where a role made no pass."""
    means: dict[str, float | None] = {}
    for role in ("writer", "fanout", "mailbox"):
        passes = after.get(f"{role}_batches", 0) - before.get(f"{role}_batches", 0)
        items = after.get(f"{role}_batch_messages", 0) - before.get(f"{role}_batch_messages", 0)
        means[role] = round(items / passes, 2) if passes else None
    return means


def as_json(run: Run, *, floors: Sequence[Floor], machine: Mapping[str, Any]) -> dict[str, Any]:
    """The object on standard output."""
    floor = mean_floor(floors)
    return {
        "rate": run.rate,
        "seconds": run.seconds,
        "offered_per_s": round(run.offered_in_window / run.seconds, 1),
        "accepted_per_s": round(run.accepted_in_window / run.seconds, 1),
        **asdict(run.counts),
        "refusals": {str(code): count for code, count in run.refusals.items()},
        "ack_ms": asdict(run.ack),
        "end_to_end_ms": asdict(run.end_to_end),
        "echo_ms": asdict(run.echo),
        "loop_lag_ms": {"generator": asdict(run.generator_lag), "workers_p99": run.worker_lag_p99_ms},
        "cpu_us_per_message": run.processor.per_message_us(run.accepted_in_window),
        "server_us_per_message": run.server_us,
        "floor_us": floor.total_us if floor else None,
        "floor": [{**asdict(part), "total_us": part.total_us} for part in floors],
        "server_to_floor": round(run.server_us / floor.total_us, 2) if floor and floor.total_us else None,
        "batch": {role: run.batch.get(role) for role in ("writer", "fanout", "mailbox")},
        "generator_core_share": round(run.processor.generator_share, 3),
        "noise_core_share": round(run.processor.noise_share, 3),
        "void": run.is_void,
        "noisy": run.is_noisy,
        "sustained": run.is_sustained,
        "machine": dict(machine),
    }


def marks(run: Run) -> str:
    """The words behind a row of the table."""
    words = []
    if run.is_void:
        words.append(f"VOID: generator at {run.processor.generator_share:.0%} of a core")
    if run.is_noisy:
        words.append(f"noisy: others and hypervisor took {run.processor.noise_share:.0%} of a core")
    if not run.is_correct:
        words.append("INCORRECT")
    elif not run.is_sustained and not run.is_void:
        words.append("not sustained")
    return "; ".join(words)


class StepSearch:
    """The highest sustained rate: grow by a factor until a step fails, then halve the distance.

    A step that is void says nothing about the server and ends the search like a failure, because the
    generator has no more to give. `next_rate` is None when two neighbours are closer than the wanted
    precision.
    """

    def __init__(self, start: float, *, factor: float = 1.5, precision: float = 0.06) -> None:
        self._factor = factor
        self._precision = precision
        self._good: list[float] = []
        self._bad: list[float] = []
        self.next_rate: float | None = start

    @property
    def best(self) -> float | None:
        return self._good[-1] if self._good else None

    def report(self, rate: float, *, sustained: bool) -> None:
        insort(self._good if sustained else self._bad, rate)
        low = self._good[-1] if self._good else 0.0
        above = [bad for bad in self._bad if bad > low]
        if not above:
            self.next_rate = rate * self._factor if sustained else rate / self._factor
        elif (above[0] - low) / above[0] <= self._precision:
            self.next_rate = None
        else:
            self.next_rate = (low + above[0]) / 2 if low else above[0] / self._factor
        if self.next_rate is not None and self.next_rate < 10:
            self.next_rate = None

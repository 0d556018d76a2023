"""What the load of a live run came to: offered and accepted, and the time in which nobody was served.

Offered is what was wanted: the rate for the whole time of the load, outages included. Accepted is what the
clients were told, each message once, by the moment of its first acknowledgement. A run whose server or whose
clients could not carry the load judges less than it says, so below `CARRIED_MIN` it does not pass.

Pure: moments and the numbers of the plan go in.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

CARRIED_MIN: Final = 0.9
"""Part of the offered messages; the rest is what an outage just before the end held back."""
SILENCE_NS: Final = 500_000_000
SECOND_NS: Final = 1_000_000_000


class Repair(NamedTuple):
    """One fault, from its strike to its healing."""

    what: str
    seconds: float


class Load(NamedTuple):
    """Of the time in which the clients were to send."""

    seconds: float
    offered_per_second: float
    accepted: int
    accepted_per_second: float
    carried: float
    """Accepted of offered."""
    silent_seconds: float
    """Together, the gaps of more than half a second in which nobody was acknowledged."""
    silent_seconds_max: float
    seconds_below_half: int
    """Whole seconds with less than half of the offered rate."""
    repair_seconds: dict[str, list[float]]
    """Kind of a fault → from each strike to its healing, in the order of time."""
    client_cpu_us_per_message: float
    """Of the client processes."""
    server_cpu_us_per_message: float
    """Of launcher, store, supervisor, admin process and workers."""
    other_cpu_seconds: float
    """Of everybody else on the machine: whoever measures wants to be alone."""

    @property
    def is_carried(self) -> bool:
        return self.carried >= CARRIED_MIN

    def as_result(self) -> dict[str, Any]:
        rounded = {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in self._asdict().items()
        }
        repairs = {what: [round(one, 2) for one in seconds] for what, seconds in self.repair_seconds.items()}
        return {**rounded, "repair_seconds": repairs, "is_carried": self.is_carried}


def weigh(
    accepted_at: Sequence[int],
    *,
    began_ns: int,
    ended_ns: int,
    rate: float,
    repairs: Sequence[Repair] = (),
    client_cpu_seconds: float = 0.0,
    server_cpu_seconds: float = 0.0,
    machine_cpu_seconds: float = 0.0,
) -> Load:
    """`accepted_at` in the order of time."""
    inside = accepted_at[bisect_left(accepted_at, began_ns) : bisect_right(accepted_at, ended_ns)]
    seconds = (ended_ns - began_ns) / SECOND_NS
    gaps = [later - earlier for earlier, later in pairwise([began_ns, *inside, ended_ns])]
    silences = [gap / SECOND_NS for gap in gaps if gap > SILENCE_NS]
    by_kind: dict[str, list[float]] = {}
    for what, took in repairs:
        by_kind.setdefault(what, []).append(took)
    return Load(
        seconds, rate, len(inside), len(inside) / seconds, len(inside) / (rate * seconds),
        sum(silences), max(silences, default=0.0), _seconds_below(inside, began_ns, int(seconds), rate / 2),
        by_kind, client_cpu_seconds * 1e6 / max(1, len(inside)),
        server_cpu_seconds * 1e6 / max(1, len(inside)),
        max(0.0, machine_cpu_seconds - client_cpu_seconds - server_cpu_seconds),
    )  # fmt: skip


def _seconds_below(moments: Sequence[int], began_ns: int, seconds: int, least: float) -> int:
    counts = [0] * seconds
    for moment in moments:
        second = (moment - began_ns) // SECOND_NS
        if second < seconds:
            counts[second] += 1
    return sum(count < least for count in counts)


def lines_of(load: Load) -> list[str]:
    """For people."""
    verdict = "carried" if load.is_carried else f"NOT CARRIED, at least {CARRIED_MIN:.0%} are wanted"
    repairs = "; ".join(
        f"{what} {len(took)}×, {sum(took):.1f} s, longest {max(took):.1f} s"
        for what, took in sorted(load.repair_seconds.items())
    )
    offered = f"{load.offered_per_second:,.0f} messages a second offered for {load.seconds:.0f} s"
    accepted = f"{load.accepted_per_second:,.0f} accepted ({load.accepted:,} messages, {load.carried:.1%})"
    silent = f"{load.silent_seconds:.1f} s in all, {load.silent_seconds_max:.1f} s at once"
    return [
        f"load: {offered}, {accepted}: {verdict}",
        f"nobody acknowledged for {silent}; {load.seconds_below_half} seconds below half of the rate",
        f"from strike to healing: {repairs or '-'}",
        (
            f"processor time per message: server {load.server_cpu_us_per_message:.0f} µs, clients "
            f"{load.client_cpu_us_per_message:.0f} µs; everybody else took {load.other_cpu_seconds:.0f} s"
        ),
    ]

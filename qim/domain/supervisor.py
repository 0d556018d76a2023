"""What the supervisor decides: when a dead child comes back, whom to kill, how far a stop has come.

Pure rules; the process that forks and signals is `workers/supervisor.py`. All times are milliseconds of one
monotonic clock, randomness is an argument, so every rule can be tested by moving a number.

Restart   0, 0.5, 1, 2 … 30 s with ±20 % jitter, back to 0 after a minute of `ready`. A fenced child (75)
          comes back only at the cap: two owners must not fight over a slot. A foreign store (65) or a bad
          configuration (78) never comes back: the whole service drains and ends with that code.
Silence   a child whose event loop has not stamped its record for 1 s is slow, for 5 s it gets SIGABRT (its
          stack is written), for 7 s SIGKILL, the only signal that ends a stopped process.
Drain     five stages in one direction. A stage ends when every child reports it done or its budget is spent;
          what does not fit in the last one is killed by name. A second signal jumps to the last stage.

Invariants: a child's attempt never rises while it lives; a drain never goes back a stage.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final

from qim import limits
from qim.errors import ExitCode


class ChildState(IntEnum):
    """What a child says of itself in its heartbeat record."""

    STARTING = 0
    WAITING = 1
    """A store is down; the child waits with back-off and beats."""
    READY = 2
    DRAINING = 3
    ENDED = 4
    """Written by the supervisor when it has reaped the child."""


class Stage(IntEnum):
    """Of a drain. The number a child is told, and the number it reports as done."""

    NONE = 0
    NOTICE = 1
    DOOR = 2
    GOODBYE = 3
    ROLES = 4
    CLOSE = 5


STAGE_SHARES: Final[dict[Stage, int]] = {
    Stage.NOTICE: 4, Stage.DOOR: 0, Stage.GOODBYE: 8, Stage.ROLES: 8, Stage.CLOSE: 5,
}  # fmt: skip
"""Parts of the whole drain time; with the default of 25 s they are seconds."""
assert sum(STAGE_SHARES.values()) * 1000 == limits.DRAIN_DEADLINE_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """Every time the supervisor goes by. Tests pass shorter ones."""

    slow_ms: int = limits.HEARTBEAT_SLOW_MS
    abort_ms: int = limits.HEARTBEAT_ABORT_MS
    kill_ms: int = limits.HEARTBEAT_KILL_MS
    repair_ms: int = 30_000
    """A silent or dead child may take so long to come back before the service itself counts as stuck."""
    late_ms: int = 1_000
    """The supervisor woke so much too late: the whole host was paused, nobody is judged in this round."""
    tick_ms: int = limits.HEARTBEAT_INTERVAL_MS
    drain_ms: int = limits.DRAIN_DEADLINE_MS
    backoff_ms: tuple[int, ...] = tuple(int(seconds * 1000) for seconds in limits.RESTART_BACKOFF_SECONDS)
    calm_ms: int = limits.RESTART_CALM_MS
    flapping_deaths: int = limits.FLAPPING_DEATHS
    flapping_window_ms: int = limits.FLAPPING_WINDOW_MS
    listener_backoff_ms: int = 2_000
    """A child in a longer back-off loses its listener, so that new connections go to the others."""


class Silence(Enum):
    """What to do about a child that has not stamped its record."""

    FINE = "fine"
    SLOW = "slow"
    ABORT = "abort"
    KILL = "kill"


def judge_silence(silent_ms: int, watch: WatchLimits) -> Silence:
    """The strongest measure that the silence deserves; the caller applies each measure once."""
    if silent_ms >= watch.kill_ms:
        return Silence.KILL
    if silent_ms >= watch.abort_ms:
        return Silence.ABORT
    if silent_ms >= watch.slow_ms:
        return Silence.SLOW
    return Silence.FINE


class Fate(Enum):
    """What follows from the end of a child that nobody asked to end."""

    RESTART = "restart"
    FENCED = "fenced"
    HALT = "halt"


def judge_exit(exit_code: int) -> Fate:
    """`exit_code` is negative for a signal, as `waitstatus_to_exitcode` gives it."""
    if exit_code in {ExitCode.FOREIGN_STORE, ExitCode.CONFIG}:
        return Fate.HALT
    if exit_code == ExitCode.FENCED:
        return Fate.FENCED
    return Fate.RESTART


class RestartPolicy:
    """The deaths of one child, and when it may come back."""

    def __init__(self, watch: WatchLimits) -> None:
        self._watch = watch
        self._attempt = 0
        self._deaths: deque[int] = deque(maxlen=watch.flapping_deaths)

    def on_death(self, *, now_ms: int, ready_for_ms: int, fate: Fate, jitter: float) -> int:
        """Milliseconds until the re-fork. `jitter` lies in 0…1; `ready_for_ms` is 0 if it was never ready."""
        assert 0.0 <= jitter <= 1.0
        self._deaths.append(now_ms)
        if ready_for_ms >= self._watch.calm_ms:
            self._attempt = 0
        last = len(self._watch.backoff_ms) - 1
        step = last if fate is Fate.FENCED else min(self._attempt, last)
        self._attempt += 1
        spread = 1.0 + limits.RESTART_JITTER * (2.0 * jitter - 1.0)
        return round(self._watch.backoff_ms[step] * spread)

    def is_flapping(self, now_ms: int) -> bool:
        """Whether the last deaths all lie within the window."""
        full = len(self._deaths) == self._watch.flapping_deaths
        return full and now_ms - self._deaths[0] <= self._watch.flapping_window_ms


def may_ping_watchdog(overdue_ms: list[int], watch: WatchLimits) -> bool:
    """Whether the service manager may hear that all is well.

    One number per child: how long it has been silent or dead, 0 for a child that beats. A child in repair
    does not hold the ping back; one that cannot be repaired does, and then the whole service starts anew.
    """
    return all(overdue <= watch.repair_ms for overdue in overdue_ms)


def stage_budget_ms(stage: Stage, whole_ms: int) -> int:
    """A stage's part of the whole drain time, the same for the supervisor and for its children."""
    return round(STAGE_SHARES[stage] * whole_ms / sum(STAGE_SHARES.values()))


class Drain:
    """The progress of one staged stop."""

    def __init__(self, *, now_ms: int, budget_ms: int, first: Stage = Stage.NOTICE) -> None:
        self._budget_ms = budget_ms
        self.stage = first
        self._ends_ms = now_ms + stage_budget_ms(first, budget_ms)

    def advance(self, *, now_ms: int, slowest: Stage) -> bool:
        """Moves on when the stage is over; True when it did. `slowest`: what all children have done.

        The notice has no work that could be done sooner: it lasts its whole budget, so that balancers see it.
        """
        if self.stage is Stage.CLOSE:
            return False
        done = self.stage is not Stage.NOTICE and slowest >= self.stage
        if not done and now_ms < self._ends_ms:
            return False
        self._enter(Stage(self.stage + 1), now_ms)
        return True

    def hurry(self, *, now_ms: int) -> bool:
        """The second signal: straight to the last stage; True when that is news."""
        if self.stage is Stage.CLOSE:
            return False
        self._enter(Stage.CLOSE, now_ms)
        return True

    def is_overdue(self, now_ms: int) -> bool:
        """Whether what still runs must be killed."""
        return self.stage is Stage.CLOSE and now_ms >= self._ends_ms

    def _enter(self, stage: Stage, now_ms: int) -> None:
        assert stage > self.stage
        self.stage = stage
        self._ends_ms = now_ms + stage_budget_ms(stage, self._budget_ms)

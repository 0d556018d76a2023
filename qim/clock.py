"""The clock: passed in, never reached for.

Two readings with two purposes. Wall time stamps messages and expires keys; it may step. Monotonic
time measures time-outs and latencies; it never steps. A role reads the clock once per pass. Tests and
the simulation pass a clock that they move by hand. Nothing else in `qim` and `workers` reads the time.
"""

import time
from typing import Protocol

from qim.ids import Millis


class Clock(Protocol):
    """What a role knows of time."""

    def now_ms(self) -> Millis:
        """Wall clock, milliseconds since 1970."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never falls."""
        ...


class SystemClock:
    """The clock of the host."""

    def now_ms(self) -> Millis:
        return Millis(time.time_ns() // 1_000_000)

    def monotonic(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told; for tests and the simulation."""

    def __init__(self, *, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic = 0.0

    def now_ms(self) -> Millis:
        return Millis(self._now_ms)

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, *, milliseconds: int) -> None:
        """Moves both readings forward."""
        self._now_ms += milliseconds
        self._monotonic += milliseconds / 1000

    def step_wall(self, *, milliseconds: int) -> None:
        """Steps the wall clock alone, as an administrator or NTP would."""
        self._now_ms += milliseconds

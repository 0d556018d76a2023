"""Calls to the store that nobody waits for travel with those of the writer.

What the store does for a call is cheap, what it does for a wake-up is not: a flush of its file, a write to
the disk, a few switches between processes, here and there with cold caches. So fan-out and mailbox, which
follow the writer at a distance anyway, issue the calls of a small batch when the writer issues its next pass:
all of them leave in one write to the store, are made durable by one flush and come back in one read.

The writer announces each pass (`depart`). The others `join` it, with patience: when the writer has nothing to
do, nobody waits. Large batches never wait, they are worth a journey of their own. Owned state: who waits, one
per loop of a role, so a handful. If the writer dies, the worker dies.
"""

import asyncio
from typing import Final

from qim.clock import Clock
from qim.limits import COMPANY_WAIT_MS

_LONG_AGO: Final = float("-inf")
_EXPECTED_SECONDS: Final = 2 * COMPANY_WAIT_MS / 1000
"""Behind a departure. The writer keeps its passes one wait apart, so after two it has nothing to do."""


class Company:
    """One per worker; without a writer that departs, joining costs nothing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._departed = _LONG_AGO
        self._waiting: list[asyncio.Future[None]] = []

    def depart(self) -> None:
        """The caller issues calls in this very step of the loop; who waits follows in the next."""
        self._departed = self._clock.monotonic()
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            _release(waiter)

    async def join(self) -> None:
        """Returns with the next departure, after `COMPANY_WAIT_MS`, or at once when none is expected."""
        if self._clock.monotonic() - self._departed > _EXPECTED_SECONDS:
            return
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiting.append(waiter)
        timer = loop.call_later(COMPANY_WAIT_MS / 1000, _release, waiter)
        try:
            await waiter
        finally:
            timer.cancel()


def _release(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)

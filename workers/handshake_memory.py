"""What many handshakes leave behind in the allocator, given back some seconds later.

A handshake takes some 50 KiB in many pieces, also one that a stranger never finishes. They are freed, but
between pieces that live, so the next flood takes fresh memory beside them: after seven times 2,000 stalled
handshakes a worker had grown by 430 MB. The last look comes when what was begun before has ended.

Owned state: a count and a time, per gateway, which calls at every accept and every sweep.
"""

import ctypes
from collections.abc import Callable
from typing import Final

from qim.limits import TLS_HANDSHAKE_TIMEOUT_MS

HANDSHAKE_MEMORY_INTERVAL_MS: Final = 10_000
"""Longer than a handshake may take: what was begun before one look has ended before the next."""
HANDSHAKE_MEMORY_BEGUN: Final = 256
"""Handshakes within it that are worth a look: some 12 MiB."""
assert HANDSHAKE_MEMORY_INTERVAL_MS > TLS_HANDSHAKE_TIMEOUT_MS


def give_back_memory() -> None:
    """Returns free pages of the allocator to the kernel, where the C library can; some milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class HandshakeMemory:
    """Counts handshakes of one gateway and knows when a look is worth it."""

    def __init__(self, give_back: Callable[[], None] = give_back_memory) -> None:
        self.begun = 0
        """Since the last time that memory was given back."""
        self._give_back = give_back
        self._look_at = 0.0
        self._is_due = False

    def look(self, now: float) -> None:
        """Called with every sweep; acts once per interval, and only after many handshakes."""
        if now < self._look_at:
            return
        self._look_at = now + HANDSHAKE_MEMORY_INTERVAL_MS / 1000
        was_due, self._is_due = self._is_due, self.begun >= HANDSHAKE_MEMORY_BEGUN
        if was_due or self._is_due:
            self.begun = 0
            self._give_back()

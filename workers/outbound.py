"""One write per peer and pass of the event loop.

Whoever has something for a peer appends it to that peer's own list and marks the peer here. The first mark of
a pass asks the loop for one call; that call flushes every marked peer. So an acknowledgement, an echo and a
push that become ready in one pass leave in one write, and a batch of a role costs one system call per peer
instead of one per answer. A write is by far the dearest thing the gateway does for a message.

An echo tells a device what it can do without for a while, the place of its own message in the mailbox, so it
waits for company: for the next acknowledgement or push to the same peer, or for `ECHO_WAIT_MS`, when all that
still wait leave in one burst.

The lists belong to the peers, this module owns only who is marked. Nothing is bounded here: each peer counts
its own bytes when something is appended. A peer that went away before the flush notices by itself.
"""

import asyncio
from typing import Protocol

from qim.limits import ECHO_WAIT_MS


class Peer(Protocol):
    """What collects bytes during a pass."""

    def flush(self) -> None:
        """Writes what was collected. Never raises: a peer that has gone away is a normal event."""
        ...


class PatientPeer(Peer, Protocol):
    """A peer that may have collected something without being marked."""

    def mark(self) -> None:
        """Marks itself for this pass, unless it is marked already."""
        ...


class Outbound:
    """The peers that have something to write at the end of this pass."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._marked: list[Peer] = []
        self._patient: dict[PatientPeer, None] = {}
        """In the order in which they were marked."""
        self._patient_until = 0.0

    def mark(self, peer: Peer) -> None:
        """Called by a peer when its list stops being empty."""
        if not self._marked:
            self._loop.call_soon(self.flush)
        self._marked.append(peer)

    def mark_later(self, peer: PatientPeer) -> None:
        """The peer has something that may wait; whatever makes it write takes that along."""
        self._patient[peer] = None

    def sweep(self, now: float) -> None:
        """Marks those who have waited; to be called several times per `ECHO_WAIT_MS` (monotonic seconds)."""
        if now >= self._patient_until:
            waiting, self._patient = self._patient, {}
            self._patient_until = now + ECHO_WAIT_MS / 1000
            for peer in waiting:
                peer.mark()

    def flush(self) -> None:
        """Everything for everybody, now; a peer may be marked again while this runs."""
        marked, self._marked = self._marked, []
        for peer in marked:
            peer.flush()

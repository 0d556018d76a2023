"""One write per peer and pass of the event loop.

Whoever has something for a peer appends it to that peer's own list and marks the peer here. The first mark of
a pass asks the loop for one call; that call flushes every marked peer. So an acknowledgement, an echo and a
push that become ready in one pass leave in one write, and a batch of a role costs one system call per peer
instead of one per answer. A write is by far the dearest thing the gateway does for a message.

The lists belong to the peers, this module owns only who is marked. Nothing is bounded here: each peer counts
its own bytes when something is appended. A peer that went away before the flush notices by itself.
"""

import asyncio
from typing import Protocol


class Peer(Protocol):
    """What collects bytes during a pass."""

    def flush(self) -> None:
        """Writes what was collected. Never raises: a peer that has gone away is a normal event."""
        ...


class Outbound:
    """The peers that have something to write at the end of this pass."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._marked: list[Peer] = []

    def mark(self, peer: Peer) -> None:
        """Called by a peer when its list stops being empty."""
        if not self._marked:
            self._loop.call_soon(self.flush)
        self._marked.append(peer)

    def flush(self) -> None:
        """Everything for everybody, now; a peer may be marked again while this runs."""
        marked, self._marked = self._marked, []
        for peer in marked:
            peer.flush()

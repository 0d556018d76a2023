"""The connections of one worker: their names, what each is answered, and how each one ends.

A connection is named by (handle, generation): a handle is reused, a generation is not, so a late answer never
reaches a stranger.

Whatever ends a connection, it ends here, once, in this order: out of the table, its session withdrawn by name
at the owner of its user, then the last bytes. So no late answer finds it, and no session outlives it.

All deadlines (AUTH, silence, a trickled frame, the end of a token) hang on one heap that one timer sweeps. A
connection has one valid reminder. When it comes, the times of the connection are looked at: so a deadline
that moves away costs nothing, and only one that comes nearer is noted anew.

Owned here: the table and the heap. The facts are in the connections (`workers/client_socket.py`), the rules
in `qim/domain/gateway.py`; who may come in is decided by `workers/gateway.py`.

Full: more than 1 MiB unread or 1,024 requests unanswered → SLOW_CONSUMER, and a pull brings what was not
pushed. A client dies: its silence is noticed. The owner dies: the withdrawal is lost with it, and so is all
that it knew of the session.
"""

from collections.abc import Iterator
from typing import Final, Protocol

from structlog import get_logger

from qim.clock import Clock
from qim.domain.gateway import NEVER, Deadlines, GatewayLimits, next_deadline, slow_consumer
from qim.errors import AuthRequired, ClientError
from qim.ids import SessionId, TenantId, UserId, WorkerId
from qim.logsetup import Repeats
from qim.metrics import Metrics
from qim.wire.bodies import build_goaway
from workers.client_socket import ClientSocket

_GENERATIONS: Final = 2**32

log = get_logger()


class Withdrawals(Protocol):
    """The way to the owners of users whose connection has ended."""

    def withdraw(self, owner: WorkerId, tenant: TenantId, user: UserId, session: SessionId) -> None: ...


class Connections:
    """Every admitted connection of one worker, until it ends."""

    def __init__(self, *, owners: Withdrawals, clock: Clock, bounds: GatewayLimits, metrics: Metrics) -> None:
        self.table = ConnectionTable()
        self._owners = owners
        self._clock = clock
        self._bounds = bounds
        self._metrics = metrics
        self._deadlines = Deadlines()
        self._slow = Repeats()

    def add(self, sock: ClientSocket) -> None:
        """Names an admitted connection and begins to watch it."""
        self.table.add(sock)
        self._metrics.connections = len(self.table)
        self.look_again(sock)

    # --- what a connection is told -------------------------------------------------------------------

    def answer(self, sock: ClientSocket, frame: bytes) -> None:
        """The one answer to one of its requests."""
        sock.unanswered -= 1
        self.collect(sock, frame)

    def collect(self, sock: ClientSocket, frame: bytes) -> None:
        """A frame that nobody has asked for; it leaves at the end of the pass."""
        if sock.collect(frame) > self._bounds.unsent_bytes_max:
            self.end_slow(sock, sock.unsent_bytes)

    # --- the end of a connection ---------------------------------------------------------------------

    def end(self, sock: ClientSocket, error: ClientError) -> None:
        """Tells the reason, behind all that it was already answered."""
        if not sock.ended:
            self._forget(sock)
            sock.finish(build_goaway(error, reconnect_after_ms=error.retry_after_ms), with_collected=True)

    def end_slow(self, sock: ClientSocket, unsent_bytes: int) -> None:
        """It does not read as fast as it is told."""
        if sock.ended:
            return
        self._metrics.slow_disconnects += 1
        if count := self._slow.count(now_ms=self._clock.now_ms()):
            log.warning("connection_slow", count=count)
        self._forget(sock)
        error = slow_consumer(unsent_bytes=unsent_bytes, unanswered=sock.unanswered)
        # What it has not read would only stand before the reason; a pull brings it again.
        sock.finish(build_goaway(error), with_collected=False)

    def part(self, sock: ClientSocket) -> None:
        """Ends a connection that has got its reason as an answer."""
        if not sock.ended:
            self._forget(sock)
            sock.finish(b"", with_collected=True)

    def lose(self, sock: ClientSocket) -> None:
        """Its transport is gone: nothing can be told any more."""
        if not sock.ended:
            self._forget(sock)
            sock.finish(b"", with_collected=False)

    def _forget(self, sock: ClientSocket) -> None:
        self.table.remove(sock)
        self._metrics.connections = len(self.table)
        if sock.session:
            self._owners.withdraw(sock.owner, sock.tenant, sock.user, sock.session)

    # --- deadlines -----------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Ends every connection whose time is over."""
        for at, handle, generation in self._deadlines.due(now):
            sock = self.table.find(handle, generation)
            if sock is None or sock.remind_at != at:
                continue
            over_at, error, reason = next_deadline(self._bounds, sock.times)
            if over_at > now:
                self._remind(sock, over_at)
                continue
            self._metrics.auth_late += error is AuthRequired
            self.end(sock, error(reason))

    def watch_frame(self, sock: ClientSocket, now: float, *, progressed: bool) -> None:
        """Behind each read: a frame that has begun must end in time."""
        if not sock.wire.buffered:
            sock.frame_begun_at = NEVER
        elif progressed or sock.frame_begun_at == NEVER:
            sock.frame_begun_at = now
            self.look_again(sock)

    def look_again(self, sock: ClientSocket) -> None:
        """A deadline may have come nearer; a reminder that is early enough already stays the only one."""
        at, _, _ = next_deadline(self._bounds, sock.times)
        if at < sock.remind_at:
            self._remind(sock, at)

    def _remind(self, sock: ClientSocket, at: float) -> None:
        sock.remind_at = at
        self._deadlines.remind(at, sock.handle, sock.generation)


class ConnectionTable:
    """The connections of one worker by handle."""

    def __init__(self) -> None:
        self._sockets: list[ClientSocket | None] = []
        self._free: list[int] = []
        self._generation = 0

    def __len__(self) -> int:
        return len(self._sockets) - len(self._free)

    def __iter__(self) -> Iterator[ClientSocket]:
        return (sock for sock in self._sockets if sock is not None)

    def add(self, sock: ClientSocket) -> None:
        """Gives the connection its name."""
        self._generation = (self._generation + 1) % _GENERATIONS
        sock.generation = self._generation
        if self._free:
            sock.handle = self._free.pop()
            self._sockets[sock.handle] = sock
        else:
            sock.handle = len(self._sockets)
            self._sockets.append(sock)

    def find(self, handle: int, generation: int) -> ClientSocket | None:
        """The connection of that name; None when it has ended."""
        if handle >= len(self._sockets):
            return None
        sock = self._sockets[handle]
        return sock if sock is not None and sock.generation == generation else None

    def remove(self, sock: ClientSocket) -> None:
        self._sockets[sock.handle] = None
        self._free.append(sock.handle)

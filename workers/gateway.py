"""The gateway of one worker: sockets in, requests out; answers and pushes in, one write per connection.

A read is parsed where it lands, in the one buffer that all sockets share. Its frames become requests and go
to the router at once; their bodies are not opened here. What comes back is collected per connection and
leaves at the end of the pass; an echo waits a little for company. AUTH and PING go to `workers/login.py`,
the end of a connection and its deadlines to `workers/connections.py`.

The gateway owns the listener and who may come in: how many sockets are open, in all and per address, and how
fast each user, address and tenant may send. Nothing of it is durable: whatever it loses, a client repeats or
pulls.

Full: too many connections → GOAWAY with a time to come back. Too many sends → RESOURCE_EXHAUSTED each. More
than 1,024 unanswered requests or 1 MiB unread → SLOW_CONSUMER, and a pull brings what was not pushed.
The owner of a request dies: the router answers UNAVAILABLE or DEADLINE_EXCEEDED, the connections stay.
A client dies: its silence is noticed, its session is withdrawn by name.
"""

import asyncio
import socket
import ssl
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from structlog import get_logger

from qim import limits
from qim.clock import Clock
from qim.domain.gateway import (
    DESTINATIONS,
    Destination,
    GatewayLimits,
    SendQuotas,
    TokenBucket,
    address_key,
    grant,
    is_slow,
    may_connect,
    reconnect_after_ms,
    retry_after_ms,
)
from qim.errors import (
    ClientError,
    GoingAway,
    RemoteProtocolError,
    ResourceExhausted,
    Unavailable,
    Unsupported,
    VersionUnsupported,
)
from qim.logsetup import Repeats
from qim.metrics import Metrics
from qim.records import entry_coordinates
from qim.tokens import TokenVerifier
from qim.wire.bodies import build_echo_entry, build_error, build_goaway
from qim.wire.connection import State
from qim.wire.frames import Frame
from qim.wire.layout import CLIENT_OPS, Op
from qim.wire.link import PushedTo
from workers.client_socket import ClientSocket
from workers.connections import Connections, Withdrawals
from workers.handshake_memory import HandshakeMemory
from workers.login import Logins, Owners
from workers.outbound import Outbound
from workers.request import Request

DESTINATION_OF: Final = {int(op): DESTINATIONS[op.name] for op in CLIENT_OPS}
_SEND: Final = int(Op.SEND_MESSAGE)
_CONVERSATION: Final = Destination.CONVERSATION
_USER: Final = Destination.USER
_READY: Final = State.READY

log = get_logger()


class GatewayRouter(Owners, Withdrawals, Protocol):
    """The way to the owners, local or not (`workers/router.py`)."""

    def route(self, request: Request, destination: Destination) -> None:
        """Hands over one request; whatever happens, `request.origin` gets exactly one answer."""
        ...


class Gateway:
    """All client connections of one worker. The origin of their requests."""

    def __init__(
        self,
        *,
        router: GatewayRouter,
        tokens: TokenVerifier,
        clock: Clock,
        outbound: Outbound,
        bounds: GatewayLimits,
        metrics: Metrics,
        tls: ssl.SSLContext | None,
    ) -> None:
        """`tls` None speaks plain TCP: for the simulation only."""
        self.read_buffer = memoryview(bytearray(limits.READ_BUFFER_BYTES))
        self.outbound = outbound
        self.congested: set[ClientSocket] = set()
        """Connections whose transport holds back bytes; they note themselves."""
        self._router = router
        self._clock = clock
        self._bounds = bounds
        self._metrics = metrics
        self._tls = tls
        self._connections = Connections(owners=router, clock=clock, bounds=bounds, metrics=metrics)
        self._table = self._connections.table
        self.logins = Logins(
            connections=self._connections,
            owners=router,
            tokens=tokens,
            clock=clock,
            bounds=bounds,
            metrics=metrics,
        )
        self._handshakes = HandshakeMemory()
        self._open = 0
        self._of_address: dict[bytes, int] = {}
        self._quotas = SendQuotas(bounds)
        self._server: asyncio.Server | None = None
        self._broken = Repeats()
        self._draining = False
        self._stopped = asyncio.Event()

    # --- life ----------------------------------------------------------------------------------------

    async def listen(
        self,
        listener: socket.socket,
        *,
        backlog: int = 4096,
        handshake_timeout_ms: int = limits.TLS_HANDSHAKE_TIMEOUT_MS,
    ) -> None:
        """Accepts on a bound socket from now on."""
        loop = asyncio.get_running_loop()
        if self._tls is None:
            self._server = await loop.create_server(self.new_socket, sock=listener, backlog=backlog)
            return
        self._server = await loop.create_server(
            self.new_socket,
            sock=listener,
            backlog=backlog,
            ssl=self._tls,
            ssl_handshake_timeout=handshake_timeout_ms / 1000,
            ssl_shutdown_timeout=limits.TLS_SHUTDOWN_TIMEOUT_MS / 1000,
        )

    def new_socket(self) -> ClientSocket:
        """Called at the accept, before the TLS handshake."""
        self._handshakes.begun += 1
        sock = ClientSocket(self)
        sock.connected_at = self._clock.monotonic()
        return sock

    async def run(self) -> None:
        """Sweeps the deadlines until drained."""
        while not self._stopped.is_set():
            self.sweep()
            await asyncio.sleep(limits.SWEEP_INTERVAL_MS / 1000)

    async def drain(self, deadline: float) -> None:
        """Accepts no more, says goodbye, waits for the answers that are still owed, closes everything.

        `deadline` is monotonic seconds of the clock; what is unanswered then, the client repeats elsewhere.
        """
        self._draining = True
        if self._server is not None:
            self._server.close()
        connected = list(self._table)
        for index, sock in enumerate(connected):
            after = reconnect_after_ms(index, len(connected))
            self._connections.collect(
                sock, build_goaway(GoingAway("the server is going down"), reconnect_after_ms=after)
            )
        while any(sock.unanswered for sock in self._table) and self._clock.monotonic() < deadline:
            await asyncio.sleep(limits.SWEEP_INTERVAL_MS / 1000)
        for sock in connected:
            self._connections.part(sock)
        self._stopped.set()

    def sweep(self) -> None:
        """Ends every connection whose time is over; called every 100 ms."""
        now = self._clock.monotonic()
        self._handshakes.look(now)
        self.outbound.sweep(now)
        self._metrics.send_queue_bytes = sum(sock.unsent_bytes for sock in self.congested)
        self._connections.sweep(now)

    @property
    def open_sockets(self) -> int:
        """Connections whose socket is still open, those that have ended and say goodbye included."""
        return self._open

    # --- called by the sockets -----------------------------------------------------------------------

    def on_connected(self, sock: ClientSocket, transport: asyncio.Transport) -> None:
        peer = transport.get_extra_info("peername")
        sock.address = address_key(peer[0]) if isinstance(peer, tuple) else b""
        of_address = self._of_address.get(sock.address, 0)
        admitted = may_connect(self._bounds, open_connections=self._open, of_address=of_address)
        self._open += 1
        self._of_address[sock.address] = of_address + 1
        self._metrics.accepts += 1
        if not admitted or self._draining:
            self._metrics.shed_connections += 1
            after = limits.RECONNECT_SPREAD_MS_MAX
            sock.finish(build_goaway(GoingAway("no room"), reconnect_after_ms=after), with_collected=False)
            return
        _set_options(transport.get_extra_info("socket"))
        now = self._clock.monotonic()
        self._metrics.handshake.observe(now - sock.connected_at)
        sock.connected_at = sock.heard_at = now
        self._connections.add(sock)

    def on_bytes(self, sock: ClientSocket, count: int) -> None:
        """One read: `count` bytes of the shared buffer belong to this connection."""
        if sock.ended:
            return
        now = self._clock.monotonic()
        was_ready = sock.wire.state is _READY
        try:
            frames = sock.wire.receive(self.read_buffer[:count])
        except ClientError as error:
            if isinstance(error, RemoteProtocolError | VersionUnsupported):
                self._note_broken(error)
            self._connections.end(sock, error)
            return
        metrics = self._metrics
        metrics.bytes_in += count
        metrics.frames_in += len(frames)
        sock.heard_at = now
        self._connections.watch_frame(sock, now, progressed=bool(frames))
        if not frames:
            return
        if was_ready:
            self._on_requests(sock, frames, now)
        else:
            sock.unanswered += 1
            self.logins.on_auth(sock, frames[0], now)

    def on_lost(self, sock: ClientSocket) -> None:
        self._open -= 1
        left = self._of_address[sock.address] - 1
        if left:
            self._of_address[sock.address] = left
        else:
            del self._of_address[sock.address]
        self._connections.lose(sock)

    def admits_write(self, sock: ClientSocket, unread: int, frames: int, size: int) -> bool:
        """Asked once per connection and pass, before its write."""
        if is_slow(self._bounds, unsent_bytes=unread + size, unanswered=0):
            self._connections.end_slow(sock, unread + size)
            return False
        self._metrics.frames_out += frames
        self._metrics.bytes_out += size
        return True

    # --- requests ------------------------------------------------------------------------------------

    def _on_requests(self, sock: ClientSocket, frames: Sequence[Frame], now: float) -> None:
        sock.unanswered += len(frames)
        if is_slow(self._bounds, unsent_bytes=0, unanswered=sock.unanswered):
            self._connections.end_slow(sock, sock.unsent_bytes)
            return
        if self._draining:
            self._refuse_all(sock, frames)
            return
        granted = self._grant_sends(sock, frames, now)
        for frame in frames:
            opcode, request_id = frame.opcode, frame.request_id
            if opcode == _SEND:
                granted -= 1
                if granted < 0:
                    self._refuse_for_rate(sock, request_id, now)
                    continue
            destination = DESTINATION_OF[opcode]
            if destination is _CONVERSATION or destination is _USER:
                request = Request(
                    origin=self, handle=sock.handle, generation=sock.generation, request_id=request_id,
                    opcode=opcode, tenant=sock.tenant, user=sock.user, device=sock.device,
                    session=sock.session, body=frame.body, arrived=now,
                )  # fmt: skip
                self._router.route(request, destination)
            else:
                self._answer_here(sock, frame, now)
            if sock.ended:
                return

    def _refuse_all(self, sock: ClientSocket, frames: Sequence[Frame]) -> None:
        """After the goodbye nothing new is begun, so that a busy client cannot hold up the drain."""
        error = Unavailable("going down, reconnect", retry_after_ms=limits.SWEEP_INTERVAL_MS)
        for frame in frames:
            if frame.opcode == Op.PONG:
                sock.unanswered -= 1
            else:
                self._connections.answer(sock, build_error(frame.request_id, error))

    def _grant_sends(self, sock: ClientSocket, frames: Sequence[Frame], now: float) -> int:
        sends = 0
        for frame in frames:
            sends += frame.opcode == _SEND
        return grant(self._buckets_of(sock, now), sends, now) if sends else 0

    def _buckets_of(self, sock: ClientSocket, now: float) -> tuple[TokenBucket, ...]:
        if sock.buckets is None:
            sock.buckets = self._quotas.buckets(sock.tenant, sock.user, sock.address, now)
        return sock.buckets

    def _refuse_for_rate(self, sock: ClientSocket, request_id: int, now: float) -> None:
        self._metrics.shed_rate += 1
        after = retry_after_ms(self._buckets_of(sock, now), now)
        self._connections.answer(
            sock, build_error(request_id, ResourceExhausted("too many requests", retry_after_ms=after))
        )

    def _answer_here(self, sock: ClientSocket, frame: Frame, now: float) -> None:
        opcode, request_id = frame.opcode, frame.request_id
        match opcode:
            case Op.PING:
                self.logins.on_ping(sock, frame)
            case Op.AUTH:
                # A signature costs as much as a message, so renewals are charged like one.
                if grant(self._buckets_of(sock, now), 1, now):
                    self.logins.on_auth(sock, frame, now)
                else:
                    self._refuse_for_rate(sock, request_id, now)
            case Op.PONG:
                sock.unanswered -= 1
            case _:
                error = Unsupported(f"{Op(opcode).name} is not served yet")
                self._connections.answer(sock, build_error(request_id, error))

    # --- called by the router ------------------------------------------------------------------------

    def reply(self, request: Request, frame: bytes) -> None:
        """Origin of the local requests."""
        self.deliver_reply(request.handle, request.generation, frame)

    def deliver_reply(self, handle: int, generation: int, frame: bytes) -> None:
        sock = self._table.find(handle, generation)
        if sock is not None:
            self._connections.answer(sock, frame)

    def deliver(self, targets: Iterable[PushedTo], entry: bytes) -> None:
        """Pushes one entry to connections of this worker; those that have gone are left out."""
        echo = b""
        for handle, generation, previous, mailbox_seq, is_echo in targets:
            sock = self._table.find(handle, generation)
            if sock is None or sock.wire.state is not _READY:
                continue
            if is_echo and not echo:
                echo = build_echo_entry(*entry_coordinates(entry))
            if is_echo:
                self.outbound.mark_later(sock)
                unsent_bytes = sock.push_later(previous, mailbox_seq, echo)
            else:
                unsent_bytes = sock.push(previous, mailbox_seq, entry)
            if unsent_bytes > self._bounds.unsent_bytes_max:
                self._connections.end_slow(sock, sock.unsent_bytes)

    def _note_broken(self, error: ClientError) -> None:
        """A stranger can break frames all day long: counted each time, logged once per interval."""
        self._metrics.protocol_errors += 1
        if count := self._broken.count(now_ms=self._clock.now_ms()):
            log.warning("frame_refused", count=count, error=type(error).__name__, code=error.code)


def _set_options(connection: socket.socket | None) -> None:
    if connection is None or connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A peer that acknowledges nothing for this long is gone, even if it never says so.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limits.CONNECTION_SILENCE_MS_MAX)

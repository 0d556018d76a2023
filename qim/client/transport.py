"""The asyncio shell around `wire.ClientConnection`: one TLS 1.3 socket, bytes in, frames noted, bytes out.

The event callback only notes what came: frames go into `arrived` and one wake-up is set; the owner takes
everything at once and decides. Writes are gathered and go out once per pass of the loop, because a TLS write
costs more than the frame in it.

- Full: above `ARRIVED_BYTES_MAX` of frames that nobody took, reading pauses, and the server's limit for slow
  readers applies; what it drops, a pull recovers.
- A connection that brought no byte for `SILENCE_SECONDS_MAX` is dead (half-open): the owner asks
  `is_silent` with its clock and aborts. A ping goes out every 25 s, so a living server always answers before.
- When the peer goes, `failure` says why, once, and the owner is woken. A GOAWAY is looked at when it arrives,
  because the owner may be at its disk then: who is not told that it was replaced comes back and replaces.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from qim.client.account import Endpoint
from qim.client.errors import Disconnected, error_name
from qim.clock import Clock
from qim.errors import ClientError
from qim.limits import CONNECTION_SILENCE_MS_MAX, PING_INTERVAL_MS, TLS_HANDSHAKE_TIMEOUT_MS
from qim.wire.bodies import GoAway, decode_body
from qim.wire.connection import ClientConnection, State
from qim.wire.frames import Frame
from qim.wire.layout import ALPN, Op

ARRIVED_BYTES_MAX: Final = 4_194_304
CONNECT_SECONDS_MAX: Final = 10.0
TLS_SECONDS_MAX: Final = TLS_HANDSHAKE_TIMEOUT_MS / 1000
SILENCE_SECONDS_MAX: Final = CONNECTION_SILENCE_MS_MAX / 1000
PING_SECONDS: Final = PING_INTERVAL_MS / 1000


class ConnectionEnded(Disconnected):
    """This connection is over; `code` is the server's or 0."""

    def __init__(self, text: str, *, code: int = 0, reconnect_after_ms: int = 0) -> None:
        super().__init__(text)
        self.code = code
        self.reconnect_after_ms = reconnect_after_ms


def read_goodbye(body: GoAway) -> ConnectionEnded:
    text = f"{error_name(body.code)}: {body.text}"
    return ConnectionEnded(text, code=body.code, reconnect_after_ms=body.reconnect_after_ms)


def build_tls_context(ca: str | Path | None) -> ssl.SSLContext:
    """TLS 1.3 only, the server's name checked. `ca` is a PEM file; without it the system's list counts."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"certificate authority file {ca}: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    return context


class Transport(asyncio.Protocol):
    """One connection from its handshake to its end."""

    def __init__(self, *, clock: Clock, wake: asyncio.Event) -> None:
        self.connection = ClientConnection()
        self.arrived: deque[Frame] = deque()
        self.failure: ConnectionEnded | None = None
        self.goodbye: ConnectionEnded | None = None
        """What the server's GOAWAY said, from its arrival on: whatever ends the connection, this is why."""
        self._clock = clock
        self._wake = wake
        self._arrived_bytes = 0
        self._is_paused = False
        self._heard_at = clock.monotonic()
        self._out: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._socket: asyncio.Transport | None = None
        self._lost = self._loop.create_future()

    @classmethod
    async def connect(
        cls,
        endpoint: Endpoint,
        *,
        server_name: str | None,
        tls: ssl.SSLContext,
        clock: Clock,
        wake: asyncio.Event,
    ) -> "Transport":
        """Raises ConnectionEnded with a reason for people."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS_MAX):
                _, transport = await loop.create_connection(
                    lambda: cls(clock=clock, wake=wake), endpoint.host, endpoint.port,
                    ssl=tls, server_hostname=server_name or endpoint.host,
                    ssl_handshake_timeout=TLS_SECONDS_MAX,
                )  # fmt: skip
        except TimeoutError as error:
            raise ConnectionEnded(f"{endpoint.canonical()} did not answer in time") from error
        except ssl.SSLError as error:
            raise ConnectionEnded(f"{endpoint.canonical()}: TLS failed: {error.reason or error}") from error
        except OSError as error:
            raise ConnectionEnded(f"{endpoint.canonical()}: {error.strerror or error}") from error
        return transport

    # --- callbacks of the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._socket = transport
        tls = transport.get_extra_info("ssl_object")
        if tls is None or tls.selected_alpn_protocol() != ALPN:
            self._end(ConnectionEnded(f"the server does not speak {ALPN}"))

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._clock.monotonic()
        try:
            frames = self.connection.receive(data)
        except ClientError as error:
            self._end(ConnectionEnded(f"{error_name(error.code)}: {error.text}", code=error.code))
            return
        self._look_for_goodbye(frames)
        self.arrived.extend(frames)
        self._arrived_bytes += len(data)
        if self._arrived_bytes > ARRIVED_BYTES_MAX and self._socket and not self._is_paused:
            self._socket.pause_reading()
            self._is_paused = True
        self._wake.set()

    def _look_for_goodbye(self, frames: Iterable[Frame]) -> None:
        for frame in frames:
            if frame.opcode == Op.GOAWAY:
                with suppress(ClientError):  # what cannot be read is judged with the other frames
                    self.goodbye = read_goodbye(decode_body(Op.GOAWAY, frame.body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._socket = None  # Python 3.11.2 raises when a transport that has ended is aborted
        reason = str(exc) if exc else "the server closed the connection"
        self._end(ConnectionEnded(reason))
        if not self._lost.done():
            self._lost.set_result(None)

    # --- the owner

    def take(self) -> list[Frame]:
        """Everything that arrived since the last call."""
        frames = list(self.arrived)
        self.arrived.clear()
        self._arrived_bytes = 0
        if self._is_paused and self._socket and self.failure is None:
            self._socket.resume_reading()
            self._is_paused = False
            # Bytes that waited in the kernel count as heard: the silence was ours.
            self._heard_at = self._clock.monotonic()
        return frames

    def request(self, op: int, body: Struct) -> int:
        """Writes a request at the end of this pass of the loop; returns its id."""
        request_id, frame = self.connection.request(op, body)
        self.write(frame)
        return request_id

    def write(self, frame: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame)

    @property
    def is_ready(self) -> bool:
        """A request may be written: logged in, and no end has been seen."""
        return self.failure is None and self.connection.state is State.READY

    def is_silent(self, now: float) -> bool:
        """Nothing came for so long that the other side is gone, whatever the kernel believes."""
        return not self._is_paused and now - self._heard_at >= SILENCE_SECONDS_MAX

    def silence_deadline(self) -> float:
        return self._heard_at + SILENCE_SECONDS_MAX

    def abort(self, reason: str) -> None:
        """Ends at once, without waiting for a peer that may be gone."""
        self._end(ConnectionEnded(reason))

    async def close(self) -> None:
        """Ends politely, but does not wait for a peer that does not answer."""
        self._flush()
        if self._socket is None:
            return
        if not self._socket.is_closing():
            self._socket.close()
        try:
            async with asyncio.timeout(1.0):
                await asyncio.shield(self._lost)
        except TimeoutError:
            self._abort_socket()

    def _abort_socket(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.abort()

    def _flush(self) -> None:
        if self._out and self._socket and self.failure is None:
            self._socket.writelines(self._out)
        self._out.clear()

    def _end(self, failure: ConnectionEnded) -> None:
        if self.failure is None:
            self.failure = self.goodbye or failure
            self.connection.close()
            self._abort_socket()
        self._wake.set()

"""One client connection: its protocol object, what it is about to be sent, and its facts.

There is one object per connection, and it is everything the worker holds for it besides the TLS state: no
buffer of its own (reads land in the gateway's shared buffer and are parsed before the next one begins), no
task, no timer, no list before it is needed. With tens of thousands of idle connections each of these counts.

This module moves bytes and keeps facts. What is done with them is decided by the gateway; under which name a
connection is found, and when it ends, by `workers/connections.py`.
Order of a connection: `connection_made` after the TLS handshake, `buffer_updated` per read, `collect` and
`push` during a pass, `flush` at its end, `finish` once, `connection_lost` at last.
Full: more than the allowed bytes unread make the gateway end the connection (SLOW_CONSUMER). While the peer
does not take what it was sent, nothing more is read from it. A peer that dies is noticed by its silence.
"""

import asyncio
from typing import TYPE_CHECKING, cast

from qim.domain.gateway import NEVER, ConnectionTimes, TokenBucket
from qim.ids import DeviceId, SessionId, TenantId, UserId, WorkerId
from qim.wire.bodies import build_push
from qim.wire.connection import ServerConnection

if TYPE_CHECKING:
    from workers.gateway import Gateway

NO_USER = UserId(b"")
NO_DEVICE = DeviceId(b"")
NO_SESSION = SessionId(b"")


class Waiting:
    """A request that the owner's ANNOUNCED will answer: AUTH or PING."""

    __slots__ = ("opcode", "request_id", "time")

    def __init__(self, opcode: int, request_id: int, time: int = 0) -> None:
        self.opcode = opcode
        self.request_id = request_id
        self.time = time


class ClientSocket(asyncio.BufferedProtocol):
    """The gateway's end of one connection."""

    __slots__ = (
        "_frames", "_gateway", "_is_marked", "_pushes", "_transport", "_unsent", "address", "buckets",
        "connected_at", "device", "ended", "frame_begun_at", "generation", "handle", "heard_at", "owner",
        "remind_at", "session", "tenant", "token_ends_at", "unanswered", "user", "waiting", "wire",
    )  # fmt: skip

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway
        self._transport: asyncio.Transport | None = None
        self._frames: list[bytes] | None = None
        self._pushes: list[tuple[int, int, bytes]] | None = None
        self._unsent = 0
        self._is_marked = False
        self.wire = ServerConnection()
        self.handle = -1
        self.generation = 0
        self.address = b""
        self.tenant = TenantId(0)
        self.user = NO_USER
        self.device = NO_DEVICE
        self.session = NO_SESSION
        self.owner = WorkerId(0)
        """Of the user's shard."""
        self.connected_at = self.heard_at = 0.0
        self.frame_begun_at = self.token_ends_at = self.remind_at = NEVER
        self.unanswered = 0
        self.waiting: list[Waiting] | None = None
        self.buckets: tuple[TokenBucket, ...] | None = None
        self.ended = False

    # --- called by the transport ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an assertion: the transports of uvloop are no subclasses of this one.
        transport = cast("asyncio.Transport", transport)
        self._transport = transport
        self._gateway.on_connected(self, transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the shared buffer has one size
        # A memoryview and not a bytearray: with the latter an open CPython fault loses TLS data.
        return self._gateway.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._gateway.on_bytes(self, nbytes)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        if self._transport is not None and not self.ended:
            self._gateway.congested.add(self)
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._gateway.congested.discard(self)
        if self._transport is not None and not self.ended:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - gone is gone
        self._gateway.on_lost(self)
        self._transport = None

    # --- called by the gateway -----------------------------------------------------------------------

    @property
    def times(self) -> ConnectionTimes:
        return ConnectionTimes(self.connected_at, self.heard_at, self.frame_begun_at, self.token_ends_at)

    @property
    def unsent_bytes(self) -> int:
        """Collected and not yet written, or written and not yet taken by the peer's kernel."""
        return self._unsent + (self._transport.get_write_buffer_size() if self._transport else 0)

    def collect(self, frame: bytes) -> int:
        """One more frame for the end of the pass; gives the bytes collected so far."""
        if self._frames is None:
            self._frames = []
        self.mark()
        self._frames.append(frame)
        self._unsent += len(frame)
        return self._unsent

    def push(self, previous: int, mailbox_seq: int, entry: bytes) -> int:
        """The same for an entry; the entries of one pass become one frame."""
        self.mark()
        return self.push_later(previous, mailbox_seq, entry)

    def push_later(self, previous: int, mailbox_seq: int, entry: bytes) -> int:
        """An entry that leaves with whatever leaves next, or when somebody calls `mark`."""
        if self._pushes is None:
            self._pushes = []
        self._pushes.append((previous, mailbox_seq, entry))
        self._unsent += len(entry)
        return self._unsent

    def mark(self) -> None:
        """What is collected leaves at the end of this pass."""
        if not self._is_marked:
            self._is_marked = True
            self._gateway.outbound.mark(self)

    def flush(self) -> None:
        self._is_marked = False
        frames = self._take()
        if not frames or self._transport is None or self.ended:
            return
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        if self._gateway.admits_write(self, self._transport.get_write_buffer_size(), len(frames), len(data)):
            self._transport.write(data)

    def _take(self) -> list[bytes]:
        frames, pushes = self._frames or [], self._pushes
        if pushes:
            frames += build_push(pushes)
        self._frames = self._pushes = None
        self._unsent = 0
        return frames

    def finish(self, farewell: bytes, *, with_collected: bool) -> None:
        """Writes the last bytes and closes; the transport cuts a peer that does not take them in time."""
        self.ended = True
        self.wire.close()
        self._gateway.congested.discard(self)
        frames = self._take() if with_collected else []
        self._frames = self._pushes = self.waiting = self.buckets = None
        if self._transport is not None and not self._transport.is_closing():
            data = b"".join((*frames, farewell))
            if data:
                self._transport.write(data)
            self._transport.close()

"""The two ends of a client connection: bytes in, frames out, and the state that decides what is allowed.

    server   WAITING ──AUTH──▶ AUTHENTICATING ──authenticated()──▶ READY ──close(), refusal──▶ CLOSED
    client   WAITING ──AUTH sent──▶ AUTHENTICATING ──AUTH_ACK──▶ READY ──GOAWAY──▶ GOING_AWAY ──▶ CLOSED

What may arrive at the server, by state; everything else ends the connection with the named code:

    WAITING          AUTH as the very first frame                    AUTH_REQUIRED
    AUTHENTICATING   nothing: the client waits for AUTH_ACK          AUTH_REQUIRED
    READY            what `CLIENT_OPS` lists, AUTH for renewal too   PROTOCOL_ERROR
    CLOSED           anything, and it is ignored

The owner of the socket calls `receive` with what it read, writes what it wants to answer, and calls `close`
when the socket is gone. Bodies are not decoded here: a body that does not decode is an error of one request,
a frame in the wrong state is an error of the connection. Memory is bounded by the splitter (one partial
frame) and by the caller (its write queue; at the client also `open_requests`, for the server cuts a peer that
asks on and on). When the other side dies nothing happens here: deadlines belong to the caller's clock.
"""

from enum import Enum
from typing import Final

from msgspec import Struct

from qim.errors import AuthRequired, ClientError, RemoteProtocolError
from qim.wire.bodies import build_message
from qim.wire.frames import Frame, FrameSplitter
from qim.wire.layout import CLIENT_OPS, Op


class State(Enum):
    """See the drawing; GOING_AWAY exists at the client only."""

    WAITING = "waiting"
    AUTHENTICATING = "authenticating"
    READY = "ready"
    GOING_AWAY = "going_away"
    CLOSED = "closed"


REPLY_OF: Final[dict[int, int]] = {
    Op.AUTH: int(Op.AUTH_ACK),
    Op.PING: int(Op.PONG),
    Op.SEND_MESSAGE: int(Op.SEND_ACK),
    Op.PULL_MAILBOX: int(Op.MAILBOX_BATCH),
    Op.PULL_HISTORY: int(Op.HISTORY_BATCH),
    Op.SESSION_LIST_REQ: int(Op.SESSION_LIST),
    Op.MARK_READ: int(Op.MARK_READ_ACK),
    Op.CREATE_GROUP: int(Op.GROUP_CREATED),
    Op.PULL_MEMBERS: int(Op.MEMBER_LIST_BATCH),
    Op.LEAVE_GROUP: int(Op.MEMBER_LIST_BATCH),
}
"""What answers a request; ERROR may always answer instead."""

PUSHED_OPS: Final = frozenset({Op.PUSH_EVENTS, Op.STATE_EVENTS, Op.GOAWAY, Op.ERROR, Op.PING, Op.PONG})
_ANY_REPLY: Final = -1
# Plain numbers: an attribute of an enum class costs more than the comparison it is for.
_AUTH_ACK: Final = int(Op.AUTH_ACK)
_PING: Final = int(Op.PING)
_GOAWAY: Final = int(Op.GOAWAY)
_ERROR: Final = int(Op.ERROR)
_REQUEST_ID_MAX: Final = 2**32 - 1


class ServerConnection:
    """The server's end of one client connection."""

    __slots__ = ("_splitter", "state")

    def __init__(self) -> None:
        self._splitter = FrameSplitter()
        self.state = State.WAITING

    @property
    def buffered(self) -> int:
        """Bytes of an incomplete frame; a connection that trickles one is told by its deadline."""
        return self._splitter.buffered

    def receive(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Frames that the state allows. Raises the ClientError that ends the connection."""
        if self.state is State.CLOSED:
            return []
        try:
            frames = self._splitter.feed(data)
            if self.state is State.READY:
                for frame in frames:
                    if frame.opcode not in CLIENT_OPS:
                        raise RemoteProtocolError(f"opcode {frame.opcode:#06x} is not for clients")
            elif frames:
                self._admit_first(frames)
        except ClientError:
            self.state = State.CLOSED
            raise
        return frames

    def _admit_first(self, frames: list[Frame]) -> None:
        if self.state is not State.WAITING or frames[0].opcode != Op.AUTH:
            raise AuthRequired("the first frame must be AUTH")
        if len(frames) > 1:
            raise AuthRequired("AUTH_ACK must be awaited before the next frame")
        self.state = State.AUTHENTICATING

    def authenticated(self) -> None:
        """The token was accepted: AUTH_ACK is the next frame that goes out."""
        assert self.state is State.AUTHENTICATING
        self.state = State.READY

    def close(self) -> None:
        """Ours or the peer's end: nothing that still arrives is looked at."""
        self.state = State.CLOSED


class ClientConnection:
    """The client's end; it knows which requests are open and what may answer them."""

    __slots__ = ("_last_request_id", "_open", "_splitter", "state")

    def __init__(self) -> None:
        self._splitter = FrameSplitter()
        self._last_request_id = 0
        self._open: dict[int, int] = {}
        self.state = State.WAITING

    @property
    def open_requests(self) -> int:
        """Requests without an answer; the server cuts the connection above its limit."""
        return len(self._open)

    def next_request_id(self, op: int | None = None) -> int:
        """Opens a request. Without an opcode any reply is accepted for it."""
        request_id = self._last_request_id % _REQUEST_ID_MAX + 1
        while request_id in self._open:
            request_id = request_id % _REQUEST_ID_MAX + 1
        self._last_request_id = request_id
        self._open[request_id] = _ANY_REPLY if op is None else REPLY_OF[op]
        return request_id

    def request(self, op: int, body: Struct) -> tuple[int, bytes]:
        """Opens a request: its id and the frame to write. AUTH is the first one and may be repeated."""
        if op == Op.AUTH:
            assert self.state in {State.WAITING, State.READY}
            if self.state is State.WAITING:
                self.state = State.AUTHENTICATING
        else:
            assert self.state is State.READY
        request_id = self.next_request_id(op)
        return request_id, build_message(op, request_id, body)

    def forget(self, request_id: int) -> None:
        """Nobody waits any more; a late answer is dropped."""
        self._open.pop(request_id, None)

    def receive(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Known pushes and expected replies; unknown pushes and late replies are left out.

        Raises the ClientError for which the client must leave: the server does not speak this protocol.
        """
        if self.state is State.CLOSED:
            return []
        try:
            return [frame for frame in self._splitter.feed(data) if self._admit(frame)]
        except ClientError:
            self.state = State.CLOSED
            raise

    def _admit(self, frame: Frame) -> bool:
        opcode, request_id = frame.opcode, frame.request_id
        if opcode == _GOAWAY:
            self.state = State.GOING_AWAY
            return True
        if request_id == 0 or opcode == _PING:
            return opcode in PUSHED_OPS
        expected = self._open.pop(request_id, None)
        if expected is None:
            return False
        if opcode not in (expected, _ERROR) and expected != _ANY_REPLY:
            raise RemoteProtocolError(f"opcode {opcode:#06x} does not answer the request it names")
        if opcode == _AUTH_ACK:
            self.state = State.READY
        elif opcode == _ERROR and self.state is State.AUTHENTICATING:
            self.state = State.WAITING
        return True

    def close(self) -> None:
        """The socket is gone; every open request has an unknown outcome."""
        self.state = State.CLOSED

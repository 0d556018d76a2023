"""Links between workers: one stream per pair, everything for one peer in one write per pass.

    LinkStream   one connected stream: frames in, collected frames out, its open requests
    Links        the listening socket, the dialling with back-off, one entry of state per peer

The worker with the lower number dials, the higher one listens on `<runtime_dir>/link-<n>.sock`, mode 0600.
Both greet with HELLO: placement digest, own number, boot id. Another digest, an impossible number or the
worker itself refuses the link; the refusal shows in `health` and is tried again at the slowest pace,
because a rolling change of configuration ends by itself. A second stream of the same peer replaces the
first: the peer was restarted and its old stream just did not know it yet.

A stream owns the requests that were sent over it and not answered. When it ends, each of them is answered
DEADLINE_EXCEEDED: whether the peer did the work is unknown, and a repeat with the same client_message_id
settles it. Answers that a role still owes to a stream that has ended are dropped, they have that answer
already. Full: above `LINK_UNSENT_BYTES_MAX` a request is answered UNAVAILABLE and a push is dropped;
answers and announcements may use twice as much, then the stream is cut. A peer dies: see above, and the
other side dials again.
"""

import asyncio
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Final, Protocol, cast

from structlog import get_logger

from qim import limits
from qim.errors import ClientError, DeadlineExceeded, RemoteProtocolError
from qim.ids import BootId, WorkerId
from qim.wire.bodies import build_error
from qim.wire.frames import Frame
from qim.wire.layout import LinkOp
from qim.wire.link import (
    Hello,
    LinkMessage,
    LinkRequest,
    build_hello,
    build_reply,
    build_request,
    link_splitter,
    parse_link,
    parse_reply,
)
from workers.outbound import Outbound
from workers.request import Request

log = get_logger()
_REPLY: Final = int(LinkOp.REPLY)
_REQUEST_ID: Final = slice(4, 8)
"""Of a client frame, see `wire/layout.py`."""


class LinkState(Enum):
    CONNECTING = "connecting"
    UP = "up"
    REFUSED_PLACEMENT = "refused: another placement"
    REFUSED_WORKER = "refused: wrong worker number"


class LinkUser(Protocol):
    """Who uses the links (`workers/router.py`). Called in callbacks of the loop."""

    def on_link_up(self, peer: WorkerId) -> None: ...

    def on_link_lost(self, peer: WorkerId) -> None: ...

    def on_link_reply(self, handle: int, generation: int, frame: bytes) -> None: ...

    def on_link_message(self, stream: "LinkStream", message: LinkMessage) -> None: ...


class LinkStream(asyncio.BufferedProtocol):
    """One stream to a peer. Also the origin of the requests that came over it."""

    def __init__(self, links: "Links", *, dialled: WorkerId | None) -> None:
        """`dialled` is who must answer; None at the listening side."""
        self.peer = dialled
        self.greeted = False
        self.ended = asyncio.Event()
        self._links = links
        self._dialled = dialled
        self._splitter = link_splitter()
        self._transport: asyncio.Transport | None = None
        self._frames: list[bytes] = []
        self._collected = 0
        self._open: dict[tuple[int, int, int], Request] = {}
        """(handle, generation, request_id) → a request of ours that the peer has not answered."""

    # --- called by the transport ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an assertion: the transports of uvloop are no subclasses of this one.
        transport = cast("asyncio.Transport", transport)
        self._transport = transport
        self.send(build_hello(self._links.hello))

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the shared buffer has one size
        return self._links.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for frame in self._splitter.feed(self._links.read_buffer[:nbytes]):
                self._on_frame(frame)
        except ClientError as error:
            log.warning("link_broken", peer=self.peer, reason=error.text)
            self.abort()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - gone is gone
        self._transport = None
        self.ended.set()
        self._links.on_stream_lost(self)
        unanswered, self._open = self._open, {}
        error = DeadlineExceeded(
            "the owner went away before it answered", retry_after_ms=limits.LINK_RETRY_MS_MAX
        )
        for request in unanswered.values():
            request.origin.reply(request, build_error(request.request_id, error))

    def _on_frame(self, frame: Frame) -> None:
        if not self.greeted:
            if frame.opcode != LinkOp.HELLO:
                raise RemoteProtocolError("the first link frame must be HELLO")
            self._links.on_hello(self, parse_link(frame), self._dialled)
        elif frame.opcode == _REPLY:
            handle, generation, answer = parse_reply(frame)
            request = self._open.pop((handle, generation, int.from_bytes(answer[_REQUEST_ID], "big")), None)
            if request is not None:
                self._links.user.on_link_reply(handle, generation, answer)
        else:
            self._links.user.on_link_message(self, parse_link(frame))

    # --- outgoing ------------------------------------------------------------------------------------

    @property
    def unsent_bytes(self) -> int:
        return self._collected + (self._transport.get_write_buffer_size() if self._transport else 0)

    @property
    def is_full(self) -> bool:
        return self.unsent_bytes > limits.LINK_UNSENT_BYTES_MAX

    def request(self, request: Request) -> bool:
        """Sends a request of a local client; False: full, nothing was sent."""
        if self.is_full:
            return False
        self._open[request.handle, request.generation, request.request_id] = request
        self.send(
            build_request(
                LinkRequest(
                    request.handle, request.generation, request.opcode, request.tenant, request.user,
                    request.device, request.session, request.request_id, request.body,
                )
            )
        )  # fmt: skip
        return True

    def reply(self, request: Request, frame: bytes) -> None:
        """Origin of the peer's requests."""
        self.send(build_reply(request.handle, request.generation, frame))

    def send(self, frame: bytes) -> None:
        """One more frame for the end of the pass; nothing once the stream has ended."""
        if self._transport is None:
            return
        if not self._frames:
            self._links.outbound.mark(self)
        self._frames.append(frame)
        self._collected += len(frame)
        if self._collected > limits.LINK_REPLY_BYTES_MAX:
            self._overrun()

    def flush(self) -> None:
        frames, self._frames, self._collected = self._frames, [], 0
        if self._transport is None or not frames:
            return
        self._transport.write(frames[0] if len(frames) == 1 else b"".join(frames))
        if self._transport.get_write_buffer_size() > limits.LINK_REPLY_BYTES_MAX:
            self._overrun()

    def _overrun(self) -> None:
        log.error("link_overrun", peer=self.peer)
        self.abort()

    def close(self) -> None:
        """Ends the stream behind what was collected: a refused peer still sees our HELLO and knows why."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Ends the stream at once; what was open on it is settled in `connection_lost`."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()


class Links:
    """The streams of one worker to all the others."""

    def __init__(
        self,
        *,
        worker: WorkerId,
        workers: int,
        placement: bytes,
        boot: BootId,
        runtime_dir: Path,
        outbound: Outbound,
        user: LinkUser,
        read_buffer: memoryview | None = None,
    ) -> None:
        self.hello = Hello(placement, worker, boot)
        self.outbound = outbound
        self.user = user
        # A read is parsed before the next one begins, so sockets and links may share one buffer.
        self.read_buffer = read_buffer or memoryview(bytearray(limits.READ_BUFFER_BYTES))
        self._worker = worker
        self._workers = workers
        self._runtime_dir = runtime_dir
        self._streams: dict[WorkerId, LinkStream] = {}
        self._states = {
            peer: LinkState.CONNECTING for peer in map(WorkerId, range(workers)) if peer != worker
        }
        self._server: asyncio.Server | None = None
        self._closing = asyncio.Event()
        self._unnamed: dict[LinkStream, None] = {}

    @property
    def health(self) -> Mapping[WorkerId, LinkState]:
        """State of the link to each peer; anything but UP makes the worker not ready."""
        return dict(self._states)

    def stream(self, peer: WorkerId) -> LinkStream | None:
        """The greeted stream to a peer; None: cannot be reached now."""
        return self._streams.get(peer)

    def _path(self, worker: WorkerId) -> Path:
        return self._runtime_dir / f"link-{worker}.sock"

    async def listen(self) -> None:
        """Opens the socket for the peers with lower numbers; what a predecessor left there is replaced."""
        path = self._path(self._worker)
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._accepted, sock=listener, backlog=limits.SLOTS)

    def _accepted(self) -> LinkStream:
        stream = LinkStream(self, dialled=None)
        self._unnamed[stream] = None
        self._expect_hello(stream)
        return stream

    def _expect_hello(self, stream: LinkStream) -> None:
        timeout_seconds = limits.LINK_HELLO_TIMEOUT_MS / 1000
        asyncio.get_running_loop().call_later(timeout_seconds, _abort_unless_greeted, stream)

    async def run(self) -> None:
        """Dials the peers with higher numbers, again and again, until closed."""
        async with asyncio.TaskGroup() as dialling:
            for peer in range(self._worker + 1, self._workers):
                dialling.create_task(self._keep_dialling(WorkerId(peer)))

    async def _keep_dialling(self, peer: WorkerId) -> None:
        wait_ms = limits.LINK_RETRY_MS_MIN
        while not self._closing.is_set():
            stream = await self._dial(peer)
            if stream is not None:
                await stream.ended.wait()
                # Greeted means it worked: start over quickly. Refused means it will not soon.
                wait_ms = limits.LINK_RETRY_MS_MIN if stream.greeted else limits.LINK_RETRY_MS_MAX
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_ms / 1000):
                    await self._closing.wait()
            wait_ms = min(2 * wait_ms, limits.LINK_RETRY_MS_MAX)

    async def _dial(self, peer: WorkerId) -> LinkStream | None:
        loop = asyncio.get_running_loop()
        stream = LinkStream(self, dialled=peer)
        self._unnamed[stream] = None
        try:
            await loop.create_unix_connection(lambda: stream, str(self._path(peer)))
        except OSError:
            self._unnamed.pop(stream, None)
            return None
        self._expect_hello(stream)
        return stream

    async def close(self) -> None:
        """Ends all streams and removes the socket."""
        self._closing.set()
        self.outbound.flush()
        if self._server is not None:
            self._server.close()
        streams = [*self._unnamed, *self._streams.values()]
        for stream in streams:
            stream.close()
        self._path(self._worker).unlink(missing_ok=True)

    # --- called by the streams -----------------------------------------------------------------------

    def on_hello(self, stream: LinkStream, hello: LinkMessage, dialled: WorkerId | None) -> None:
        """Accepts or refuses a peer."""
        assert isinstance(hello, Hello)
        peer = hello.worker
        expected = peer < self._worker if dialled is None else peer == dialled
        if not expected:
            self._refuse(stream, dialled, LinkState.REFUSED_WORKER)
            return
        if hello.placement != self.hello.placement:
            self._refuse(stream, peer, LinkState.REFUSED_PLACEMENT)
            return
        replaced = self._streams.get(peer)
        if replaced is not None:
            self._lose(replaced)
            replaced.abort()
        stream.peer, stream.greeted = peer, True
        self._unnamed.pop(stream, None)
        self._streams[peer] = stream
        self._states[peer] = LinkState.UP
        log.info("link_up", peer=peer)
        self.user.on_link_up(peer)

    def _refuse(self, stream: LinkStream, peer: WorkerId | None, state: LinkState) -> None:
        if peer is not None and self._states.get(peer) is not LinkState.UP:
            self._states[peer] = state
        log.error("link_refused", peer=peer, reason=state.value)
        stream.close()

    def on_stream_lost(self, stream: LinkStream) -> None:
        self._unnamed.pop(stream, None)
        if stream.peer is not None and self._streams.get(stream.peer) is stream:
            self._lose(stream)

    def _lose(self, stream: LinkStream) -> None:
        assert stream.peer is not None
        del self._streams[stream.peer]
        self._states[stream.peer] = LinkState.CONNECTING
        log.warning("link_lost", peer=stream.peer)
        self.user.on_link_lost(stream.peer)


def _abort_unless_greeted(stream: LinkStream) -> None:
    if not stream.greeted:
        stream.abort()

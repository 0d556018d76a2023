"""One frame to bytes, and a stream of bytes to frames.

The splitter is fed whatever a read gave and answers the frames that are complete. Its own memory is the
residue of at most one frame, and it grows only with bytes that really came: a header that promises 256 KiB
costs twelve bytes until the body arrives. A frame that lies whole inside one piece is copied once, from the
read buffer into its body, because the buffer is shared by all sockets of a worker and is overwritten by the
next read. A frame that spans pieces is copied twice; that is the price of not holding on to foreign buffers.

Everything that can be refused is refused on the header alone, before any allocation: version, flags, length.
A "negative" length is a large unsigned one and meets the same bound. After a refusal the splitter stays
refused: the stream has lost its frame borders and nothing behind them can be trusted. Frames that were
complete in the same piece go down with it, like any request whose connection was cut: the peer repeats them.
"""

from typing import Final

import msgspec

from qim.errors import ClientError, RemoteProtocolError, VersionUnsupported
from qim.limits import FRAME_BODY_BYTES_MAX, FRAME_HEADER_BYTES
from qim.wire.layout import HEADER, PROTOCOL_VERSION

assert HEADER.size == FRAME_HEADER_BYTES
_pack_header: Final = HEADER.pack
_unpack_header: Final = HEADER.unpack_from


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One frame, its body not yet decoded."""

    opcode: int
    request_id: int
    body: bytes


def build_frame(opcode: int, request_id: int, body: bytes) -> bytes:
    """Header and body; the caller kept the body within the limit."""
    return _pack_header(PROTOCOL_VERSION, 0, opcode, request_id, len(body)) + body


class FrameSplitter:
    """Incremental: `feed` it pieces of any size, it gives frames in order."""

    __slots__ = ("_body_bytes_max", "_failure", "_residue", "_wanted")

    def __init__(self, *, body_bytes_max: int = FRAME_BODY_BYTES_MAX) -> None:
        self._body_bytes_max = body_bytes_max
        self._residue = bytearray()
        self._wanted = FRAME_HEADER_BYTES
        self._failure: ClientError | None = None

    @property
    def buffered(self) -> int:
        """Bytes held of a frame that is not complete."""
        return len(self._residue)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """The frames that are complete now. Raises RemoteProtocolError or VersionUnsupported, then always."""
        if self._failure is not None:
            raise self._failure
        view = memoryview(data)
        end = len(view)
        frames: list[Frame] = []
        at = self._fill_residue(view, frames) if self._residue else 0
        while end - at >= FRAME_HEADER_BYTES:
            version, flags, opcode, request_id, length = _unpack_header(view, at)
            if version != PROTOCOL_VERSION or flags or length > self._body_bytes_max:
                raise self._refuse(version, flags, length)
            start = at + FRAME_HEADER_BYTES
            stop = start + length
            if stop > end:
                self._wanted = stop - at
                break
            frames.append(Frame(opcode, request_id, bytes(view[start:stop])))
            at = stop
        if at < end:
            self._residue += view[at:]
        return frames

    def _fill_residue(self, view: memoryview, frames: list[Frame]) -> int:
        """Completes the held frame as far as the piece allows; answers how much of the piece it took."""
        residue = self._residue
        taken = 0
        if len(residue) < FRAME_HEADER_BYTES:
            taken = min(FRAME_HEADER_BYTES - len(residue), len(view))
            residue += view[:taken]
            if len(residue) < FRAME_HEADER_BYTES:
                return taken
            version, flags, _, _, length = _unpack_header(residue)
            if version != PROTOCOL_VERSION or flags or length > self._body_bytes_max:
                raise self._refuse(version, flags, length)
            self._wanted = FRAME_HEADER_BYTES + length
        missing = self._wanted - len(residue)
        piece = view[taken : taken + missing]
        residue += piece
        if len(piece) == missing:
            _, _, opcode, request_id, _ = _unpack_header(residue)
            with memoryview(residue) as held:
                frames.append(Frame(opcode, request_id, bytes(held[FRAME_HEADER_BYTES:])))
            # Not clear(): the memory of a large frame must not stay with a connection that is idle then.
            self._residue = bytearray()
            self._wanted = FRAME_HEADER_BYTES
        return taken + len(piece)

    def _refuse(self, version: int, flags: int, length: int) -> ClientError:
        failure: ClientError
        if version != PROTOCOL_VERSION:
            failure = VersionUnsupported(f"protocol version {version}; this side speaks {PROTOCOL_VERSION}")
        elif flags:
            failure = RemoteProtocolError(f"frame flags {flags:#04x}; version {PROTOCOL_VERSION} knows none")
        else:
            failure = RemoteProtocolError(
                f"frame body of {length} bytes; at most {self._body_bytes_max} are allowed"
            )
        self._failure = failure
        self._residue = bytearray()
        return failure

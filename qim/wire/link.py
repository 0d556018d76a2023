"""Frames between workers: fixed structs, because both ends are the same build and the host is the same.

All numbers are big-endian. The frame header is the client protocol's; only the opcodes differ.

    HELLO      placement digest 16 ‖ worker u16 ‖ boot 16
    REQUEST    handle u32 ‖ generation u32 ‖ opcode u16 ‖ tenant u32 ‖ user 16 ‖ device 16 ‖ session 16
               ‖ the client's body
    REPLY      handle u32 ‖ generation u32 ‖ one client frame, ready to write
    PUSH       count u16 ‖ count × (handle u32 ‖ generation u32 ‖ previous u64 ‖ mailbox_seq u64 ‖ echo u8)
               ‖ Entry, once
    ANNOUNCE   handle u32 ‖ generation u32 ‖ tenant u32 ‖ user 16 ‖ device 16 ‖ session 16 ‖ repeated u8
    ANNOUNCED  handle u32 ‖ generation u32 ‖ newest mailbox_seq u64
    WITHDRAW   tenant u32 ‖ user 16 ‖ session 16
    CLOSE      handle u32 ‖ generation u32 ‖ code u16

The frame's request_id carries the client's in REQUEST and is 0 everywhere else. A frame whose length does not
fit its drawing is RemoteProtocolError: the link is cut and both sides announce again. A body here is as
large as a client frame and a little more (`LINK_BODY_BYTES_MAX`); a push with very many targets becomes
several frames.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from qim.errors import RemoteProtocolError
from qim.ids import BootId, DeviceId, MailboxSeq, SessionId, TenantId, UserId, WorkerId
from qim.limits import FRAME_BODY_BYTES_MAX, FRAME_HEADER_BYTES, LINK_BODY_BYTES_MAX, LINK_PUSH_TARGETS_MAX
from qim.wire.frames import Frame, FrameSplitter, build_frame
from qim.wire.layout import LinkOp

_HELLO: Final = struct.Struct(">16sH16s")
_REQUEST: Final = struct.Struct(">IIHI16s16s16s")
_CONNECTION: Final = struct.Struct(">II")
_COUNT: Final = struct.Struct(">H")
_PUSH_TARGET: Final = struct.Struct(">IIQQB")
_ANNOUNCE: Final = struct.Struct(">III16s16s16sB")
_ANNOUNCED: Final = struct.Struct(">IIQ")
_WITHDRAW: Final = struct.Struct(">I16s16s")
_CLOSE: Final = struct.Struct(">IIH")
assert FRAME_BODY_BYTES_MAX + FRAME_HEADER_BYTES + _REQUEST.size <= LINK_BODY_BYTES_MAX


class Hello(NamedTuple):
    placement: bytes
    worker: WorkerId
    boot: BootId


class LinkRequest(NamedTuple):
    handle: int
    generation: int
    opcode: int
    tenant: TenantId
    user: UserId
    device: DeviceId
    session: SessionId
    request_id: int
    body: bytes


class Reply(NamedTuple):
    handle: int
    generation: int
    frame: bytes


class PushTarget(NamedTuple):
    """One session that gets an entry; `echo` is for the one that sent it."""

    handle: int
    generation: int
    previous: MailboxSeq
    mailbox_seq: MailboxSeq
    echo: bool


PushedTo: TypeAlias = tuple[int, int, int, int, bool]
"""The fields of a `PushTarget` without their names, as whoever pushes builds them, one for each session."""


class Push(NamedTuple):
    targets: list[PushTarget]
    entry: bytes


class Announce(NamedTuple):
    handle: int
    generation: int
    tenant: TenantId
    user: UserId
    device: DeviceId
    session: SessionId
    repeated: bool
    """A ping, or an announcement after the link came back; false for a log-in only."""


class Announced(NamedTuple):
    handle: int
    generation: int
    newest: MailboxSeq


class Withdraw(NamedTuple):
    tenant: TenantId
    user: UserId
    session: SessionId


class Close(NamedTuple):
    handle: int
    generation: int
    code: int


LinkMessage: TypeAlias = Hello | LinkRequest | Reply | Push | Announce | Announced | Withdraw | Close


def link_splitter() -> FrameSplitter:
    """The splitter of a link: the client's, with room for what a link puts around a client frame."""
    return FrameSplitter(body_bytes_max=LINK_BODY_BYTES_MAX)


# --- build -------------------------------------------------------------------------------------------


def build_hello(hello: Hello) -> bytes:
    return build_frame(LinkOp.HELLO, 0, _HELLO.pack(*hello))


def build_request(request: LinkRequest) -> bytes:
    head = _REQUEST.pack(*request[:7])
    return build_frame(LinkOp.REQUEST, request.request_id, head + request.body)


def build_reply(handle: int, generation: int, frame: bytes) -> bytes:
    return build_frame(LinkOp.REPLY, 0, _CONNECTION.pack(handle, generation) + frame)


def build_link_push(targets: Sequence[PushedTo], entry: bytes) -> bytes:
    """One frame, or several back to back when there are more targets than one may carry."""
    if len(targets) > LINK_PUSH_TARGETS_MAX:
        cuts = range(0, len(targets), LINK_PUSH_TARGETS_MAX)
        return b"".join(build_link_push(targets[at : at + LINK_PUSH_TARGETS_MAX], entry) for at in cuts)
    packed = [_PUSH_TARGET.pack(*target) for target in targets]
    return build_frame(LinkOp.PUSH, 0, b"".join((_COUNT.pack(len(packed)), *packed, entry)))


def build_announce(announce: Announce) -> bytes:
    return build_frame(LinkOp.ANNOUNCE, 0, _ANNOUNCE.pack(*announce))


def build_announced(handle: int, generation: int, newest: MailboxSeq) -> bytes:
    return build_frame(LinkOp.ANNOUNCED, 0, _ANNOUNCED.pack(handle, generation, newest))


def build_withdraw(tenant: TenantId, user: UserId, session: SessionId) -> bytes:
    return build_frame(LinkOp.WITHDRAW, 0, _WITHDRAW.pack(tenant, user, session))


def build_close(handle: int, generation: int, code: int) -> bytes:
    return build_frame(LinkOp.CLOSE, 0, _CLOSE.pack(handle, generation, code))


# --- parse -------------------------------------------------------------------------------------------


def parse_link(frame: Frame) -> LinkMessage:
    """Any link frame. Raises RemoteProtocolError for an unknown opcode or a length that does not fit."""
    parse = _PARSERS.get(frame.opcode)
    if parse is None:
        raise RemoteProtocolError(f"link opcode {frame.opcode:#06x}")
    try:
        return parse(frame)
    except struct.error as error:
        raise RemoteProtocolError(
            f"link frame {frame.opcode:#06x} of {len(frame.body)} bytes does not fit its drawing"
        ) from error


def parse_hello(frame: Frame) -> Hello:
    placement, worker, boot = _HELLO.unpack(frame.body)
    return Hello(placement, WorkerId(worker), BootId(boot))


def parse_request(frame: Frame) -> LinkRequest:
    body = frame.body
    head = _REQUEST.unpack_from(body)
    return LinkRequest._make((*head, frame.request_id, body[_REQUEST.size :]))


def parse_reply(frame: Frame) -> Reply:
    handle, generation = _CONNECTION.unpack_from(frame.body)
    return Reply(handle, generation, frame.body[_CONNECTION.size :])


def parse_push(frame: Frame) -> Push:
    body = frame.body
    (count,) = _COUNT.unpack_from(body)
    end = _COUNT.size + count * _PUSH_TARGET.size
    if len(body) <= end:
        raise struct.error
    with memoryview(body) as view:
        packed = _PUSH_TARGET.iter_unpack(view[_COUNT.size : end])
        targets = [PushTarget(h, g, MailboxSeq(p), MailboxSeq(s), echo != 0) for h, g, p, s, echo in packed]
    return Push(targets, body[end:])


def parse_announce(frame: Frame) -> Announce:
    *fields, repeated = _ANNOUNCE.unpack(frame.body)
    return Announce._make((*fields, repeated != 0))


def parse_announced(frame: Frame) -> Announced:
    return Announced._make(_ANNOUNCED.unpack(frame.body))


def parse_withdraw(frame: Frame) -> Withdraw:
    return Withdraw._make(_WITHDRAW.unpack(frame.body))


def parse_close(frame: Frame) -> Close:
    return Close._make(_CLOSE.unpack(frame.body))


_PARSERS: Final[dict[int, Callable[[Frame], LinkMessage]]] = {
    LinkOp.HELLO: parse_hello,
    LinkOp.REQUEST: parse_request,
    LinkOp.REPLY: parse_reply,
    LinkOp.PUSH: parse_push,
    LinkOp.ANNOUNCE: parse_announce,
    LinkOp.ANNOUNCED: parse_announced,
    LinkOp.WITHDRAW: parse_withdraw,
    LinkOp.CLOSE: parse_close,
}

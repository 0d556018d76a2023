"""The frames between workers: what is built is what is parsed, and a wrong length never is."""

import pytest

from qim.errors import RemoteProtocolError
from qim.ids import BootId, DeviceId, MailboxSeq, SessionId, TenantId, UserId, WorkerId
from qim.limits import FRAME_BODY_BYTES_MAX, LINK_PUSH_TARGETS_MAX
from qim.wire.frames import Frame, FrameSplitter, build_frame
from qim.wire.layout import LinkOp, Op
from qim.wire.link import (
    Announce,
    Announced,
    Close,
    Hello,
    LinkMessage,
    LinkRequest,
    Push,
    PushTarget,
    Reply,
    Withdraw,
    build_announce,
    build_announced,
    build_close,
    build_hello,
    build_link_push,
    build_reply,
    build_request,
    build_withdraw,
    link_splitter,
    parse_link,
)

USER, DEVICE, SESSION = UserId(b"u" * 16), DeviceId(b"d" * 16), SessionId(b"s" * 16)
TENANT = TenantId(7)
TARGETS = [
    PushTarget(1, 2, MailboxSeq(0), MailboxSeq(2**48 - 1), False),
    PushTarget(3, 2**32 - 1, MailboxSeq(4), MailboxSeq(5), True),
]

MESSAGES: list[tuple[bytes, LinkMessage]] = [
    (build_hello(hello := Hello(b"p" * 16, WorkerId(3), BootId(b"b" * 16))), hello),
    (
        build_request(request := LinkRequest(1, 2, Op.PING, TENANT, USER, DEVICE, SESSION, 99, b"body")),
        request,
    ),
    (build_reply(1, 2, build_frame(Op.PONG, 99, b"\x90")), Reply(1, 2, build_frame(Op.PONG, 99, b"\x90"))),
    (build_link_push(TARGETS, b"entry"), Push(TARGETS, b"entry")),
    (build_announce(announce := Announce(1, 2, TENANT, USER, DEVICE, SESSION, True)), announce),
    (build_announced(1, 2, MailboxSeq(41)), Announced(1, 2, MailboxSeq(41))),
    (build_withdraw(TENANT, USER, SESSION), Withdraw(TENANT, USER, SESSION)),
    (build_close(1, 2, 4003), Close(1, 2, 4003)),
]


@pytest.mark.parametrize(("data", "message"), MESSAGES, ids=[type(m).__name__ for _, m in MESSAGES])
def test_link_message_survives_the_way(data: bytes, message: LinkMessage) -> None:
    (frame,) = link_splitter().feed(data)
    assert parse_link(frame) == message


@pytest.mark.parametrize("data", [data for data, _ in MESSAGES], ids=[type(m).__name__ for _, m in MESSAGES])
def test_link_message_with_a_missing_head_is_refused(data: bytes) -> None:
    (frame,) = link_splitter().feed(data)
    with pytest.raises(RemoteProtocolError):
        parse_link(Frame(frame.opcode, 0, frame.body[:1]))


def test_push_without_an_entry_is_refused() -> None:
    (frame,) = link_splitter().feed(build_link_push(TARGETS, b""))
    with pytest.raises(RemoteProtocolError):
        parse_link(frame)


def test_client_opcode_on_a_link_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        parse_link(Frame(Op.PING, 1, b"\x90"))


def test_largest_client_frame_fits_into_a_link_frame_and_not_into_a_client_frame() -> None:
    data = build_request(
        LinkRequest(1, 2, Op.SEND_MESSAGE, TENANT, USER, DEVICE, SESSION, 1, bytes(FRAME_BODY_BYTES_MAX))
    )
    assert len(link_splitter().feed(data)) == 1
    with pytest.raises(RemoteProtocolError):
        FrameSplitter().feed(data)


def test_push_to_very_many_sessions_becomes_several_frames() -> None:
    targets = [(n, 1, 0, 1, False) for n in range(LINK_PUSH_TARGETS_MAX + 1)]
    frames = link_splitter().feed(build_link_push(targets, b"entry"))
    pushes = [parse_link(frame) for frame in frames]
    assert [len(push.targets) for push in pushes if isinstance(push, Push)] == [LINK_PUSH_TARGETS_MAX, 1]
    assert {frame.opcode for frame in frames} == {LinkOp.PUSH}

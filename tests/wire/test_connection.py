"""Both ends of a connection, linked by nothing but bytes: what each state lets through and what not."""

import pytest

from qim.errors import AuthRequired, Conflict, RemoteProtocolError
from qim.ids import (
    ClientMessageId,
    ConversationId,
    DeviceId,
    MailboxSeq,
    MessageId,
    Millis,
    Seq,
    SessionId,
    UserId,
)
from qim.wire.bodies import (
    Auth,
    AuthAck,
    Echo,
    Error,
    GoAway,
    Ping,
    Pong,
    SendAck,
    SendMessage,
    Target,
    build_echo_entry,
    build_error,
    build_goaway,
    build_message,
    build_push,
    decode_body,
    decode_pushed,
    decode_send,
)
from qim.wire.connection import ClientConnection, ServerConnection, State
from qim.wire.frames import build_frame
from qim.wire.layout import CLIENT_OPS, Op

AUTH = Auth("token", DeviceId(bytes(16)), "test", "1")
ACK = AuthAck(UserId(bytes(16)), SessionId(bytes(16)), Millis(5), 25_000, {}, MailboxSeq(9))
CONVERSATION = ConversationId(b"c" * 16)
SEND = SendMessage(Target(1, b"u" * 16), ClientMessageId(b"m" * 16), 1, "", b"hello")


def linked() -> tuple[ClientConnection, ServerConnection]:
    """A client and a server that have agreed on a session."""
    client, server = ClientConnection(), ServerConnection()
    request_id, data = client.request(Op.AUTH, AUTH)
    (frame,) = server.receive(data)
    assert decode_body(frame.opcode, frame.body) == AUTH
    server.authenticated()
    (reply,) = client.receive(build_message(Op.AUTH_ACK, frame.request_id, ACK))
    assert (reply.request_id, decode_body(reply.opcode, reply.body)) == (request_id, ACK)
    return client, server


def test_session_begins_with_auth_and_its_ack() -> None:
    client, server = linked()
    assert (client.state, server.state) == (State.READY, State.READY)
    assert client.open_requests == 0


def test_send_travels_over_and_its_ack_finds_the_request() -> None:
    client, server = linked()
    request_id, data = client.request(Op.SEND_MESSAGE, SEND)
    (frame,) = server.receive(memoryview(bytearray(data)))
    assert decode_send(frame.body) == SEND
    ack = SendAck(SEND.client_message_id, CONVERSATION, Seq(1), MessageId(b"i" * 16), Millis(7), False)
    (reply,) = client.receive(build_message(Op.SEND_ACK, frame.request_id, ack))
    assert reply.request_id == request_id
    assert decode_body(reply.opcode, reply.body) == ack


def test_error_answers_any_request() -> None:
    client, server = linked()
    request_id, data = client.request(Op.SEND_MESSAGE, SEND)
    (frame,) = server.receive(data)
    (reply,) = client.receive(build_error(frame.request_id, Conflict("used", retry_after_ms=0)))
    assert reply.request_id == request_id
    assert decode_body(reply.opcode, reply.body) == Error(1004, 0, "used")


def test_reply_of_another_kind_ends_the_connection() -> None:
    client, _ = linked()
    request_id, _ = client.request(Op.SEND_MESSAGE, SEND)
    with pytest.raises(RemoteProtocolError):
        client.receive(build_message(Op.PONG, request_id, Pong(Millis(1))))
    assert client.state is State.CLOSED


def test_late_reply_to_a_forgotten_request_is_dropped() -> None:
    client, _ = linked()
    request_id, _ = client.request(Op.PING, Ping(Millis(1)))
    client.forget(request_id)
    assert client.receive(build_message(Op.PONG, request_id, Pong(Millis(1)))) == []
    assert client.state is State.READY


def test_reply_is_accepted_once() -> None:
    client, _ = linked()
    request_id = client.next_request_id()
    pong = build_message(Op.PONG, request_id, Pong(Millis(1)))
    assert len(client.receive(pong + pong)) == 1


def test_request_ids_skip_zero_and_open_ones_when_they_wrap() -> None:
    client = ClientConnection()
    client._last_request_id = 2**32 - 2
    assert [client.next_request_id() for _ in range(3)] == [2**32 - 1, 1, 2]
    client._last_request_id = 2**32 - 2
    assert client.next_request_id() == 3


def test_client_counts_its_open_requests() -> None:
    client, _ = linked()
    first, _ = client.request(Op.PING, Ping())
    client.request(Op.PING, Ping())
    assert client.open_requests == 2
    client.receive(build_message(Op.PONG, first, Pong()))
    assert client.open_requests == 1


def test_push_and_echo_reach_the_client_in_one_frame() -> None:
    client, _ = linked()
    echo = build_echo_entry(Seq(300), CONVERSATION)
    (data,) = build_push([(0, 1, echo), (1, 2, echo)])
    (frame,) = client.receive(data)
    events = decode_body(frame.opcode, frame.body).events
    assert [(previous, mailbox_seq) for previous, mailbox_seq, _ in events] == [(0, 1), (1, 2)]
    assert decode_pushed(events[0][2]) == Echo(Seq(300), CONVERSATION)


def test_goaway_changes_the_state_but_not_what_is_open() -> None:
    client, _ = linked()
    request_id, _ = client.request(Op.PING, Ping())
    (frame,) = client.receive(build_goaway(AuthRequired("late"), reconnect_after_ms=70))
    assert decode_body(frame.opcode, frame.body) == GoAway(4002, 70, "late")
    assert client.state is State.GOING_AWAY
    assert len(client.receive(build_message(Op.PONG, request_id, Pong()))) == 1


def test_ping_of_the_server_is_answered_whatever_its_number() -> None:
    client, _ = linked()
    (frame,) = client.receive(build_message(Op.PING, 7, Ping(Millis(1))))
    assert frame.opcode == Op.PING


@pytest.mark.parametrize("op", sorted(CLIENT_OPS - {Op.AUTH}))
def test_nothing_but_auth_opens_a_connection(op: Op) -> None:
    server = ServerConnection()
    with pytest.raises(AuthRequired):
        server.receive(build_frame(op, 1, b"\x90"))
    assert server.state is State.CLOSED


def test_frame_behind_auth_must_wait_for_the_ack() -> None:
    auth, ping = build_message(Op.AUTH, 1, AUTH), build_message(Op.PING, 2, Ping())
    with pytest.raises(AuthRequired):
        ServerConnection().receive(auth + ping)
    server = ServerConnection()
    server.receive(auth)
    with pytest.raises(AuthRequired):
        server.receive(ping)


def test_auth_again_on_a_ready_connection_is_passed_on() -> None:
    client, server = linked()
    _, data = client.request(Op.AUTH, AUTH)
    (frame,) = server.receive(data)
    assert frame.opcode == Op.AUTH
    (reply,) = client.receive(build_message(Op.AUTH_ACK, frame.request_id, ACK))
    assert (client.state, reply.opcode) == (State.READY, Op.AUTH_ACK)


def test_refused_login_may_be_tried_again_on_the_client() -> None:
    client = ClientConnection()
    request_id, _ = client.request(Op.AUTH, AUTH)
    client.receive(build_error(request_id, AuthRequired("no")))
    assert client.state is State.WAITING


def test_bytes_after_the_end_are_ignored_on_both_sides() -> None:
    client, server = linked()
    client.close()
    server.close()
    data = build_message(Op.PING, 1, Ping())
    assert client.receive(data) == []
    assert server.receive(data) == []

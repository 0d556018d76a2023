"""Runs qim/wire/vectors in both directions: bytes to values and values to bytes.

The vectors are data for every codec of this protocol, whatever its language. The generic MessagePack codec
stands for the other language here: it reads and writes the same bytes without knowing any of our types.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qim.errors import CLIENT_ERRORS, ClientError
from qim.ids import DeviceId, MailboxSeq, Millis, SessionId, UserId
from qim.wire.bodies import BODIES, Auth, AuthAck, build_message, decode_body, encode_body
from qim.wire.connection import ClientConnection, ServerConnection
from qim.wire.frames import Frame, FrameSplitter, build_frame
from qim.wire.layout import HEADER, Op

VECTORS = Path(__file__).parents[2] / "qim" / "wire" / "vectors"


def load(*names: str) -> list[Any]:
    """The vectors of some files, each with its name as the id of the test."""
    files = [json.loads((VECTORS / f"{name}.json").read_text()) for name in names]
    return [pytest.param(vector, id=vector["name"]) for file in files for vector in file["vectors"]]


def from_json(value: Any) -> Any:
    """The value that a vector spells: bytes and maps have a marker, arrays stay arrays."""
    if isinstance(value, dict):
        if "bin" in value:
            return bytes.fromhex(value["bin"])
        return {key: from_json(item) for key, item in value["map"].items()}
    return [from_json(item) for item in value] if isinstance(value, list) else value


def feed_pieces(splitter: FrameSplitter, data: bytes, size: int) -> None:
    for at in range(0, len(data), size):
        splitter.feed(data[at : at + size])


def one_frame(data: bytes) -> Frame:
    (frame,) = FrameSplitter().feed(data)
    return frame


@pytest.mark.parametrize("vector", load("connection", "messages", "conversations"))
def test_vector_decodes_to_its_body_and_encodes_to_its_bytes(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    frame = one_frame(data)
    assert (frame.opcode, frame.request_id) == (vector["opcode"], vector["request_id"])
    assert msgspec.msgpack.decode(frame.body) == from_json(vector["body"])
    typed = decode_body(frame.opcode, frame.body)
    assert type(typed) is BODIES[frame.opcode]
    assert build_message(frame.opcode, frame.request_id, typed) == data
    generic = msgspec.msgpack.encode(from_json(vector["body"]))
    assert build_frame(vector["opcode"], vector["request_id"], generic) == data


def test_every_opcode_of_the_protocol_has_a_vector() -> None:
    vectors = load("connection", "messages", "conversations")
    assert {param.values[0]["opcode"] for param in vectors} == set(Op)


@pytest.mark.parametrize("vector", load("tolerated"))
def test_reader_accepts_what_a_newer_or_wider_writer_sends(vector: dict[str, Any]) -> None:
    frame = one_frame(bytes.fromhex(vector["hex"]))
    typed = decode_body(frame.opcode, frame.body)
    values = msgspec.msgpack.decode(encode_body(typed))
    wanted = from_json(vector["body"])
    assert values[: len(wanted)] == wanted


@pytest.mark.shows("F-45")
@pytest.mark.parametrize("vector", load("refused_headers"))
def test_header_is_refused_with_its_code_however_it_is_cut(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    for size in (1, 5, 12, len(data)):
        splitter = FrameSplitter()
        with pytest.raises(ClientError) as refusal:
            feed_pieces(splitter, data, size)
        assert refusal.value.code == vector["code"]
        assert splitter.buffered == 0


@pytest.mark.shows("F-45")
def test_refused_splitter_stays_refused() -> None:
    splitter = FrameSplitter()
    for data in (HEADER.pack(1, 0, Op.PING, 1, 2**32 - 1), build_frame(Op.PING, 1, b"\x90")):
        with pytest.raises(ClientError):
            splitter.feed(data)


def ready_server() -> ServerConnection:
    server = ServerConnection()
    server.receive(build_message(Op.AUTH, 1, Auth("token", DeviceId(bytes(16)))))
    server.authenticated()
    return server


def ready_client() -> ClientConnection:
    client = ClientConnection()
    request_id, _ = client.request(Op.AUTH, Auth("token", DeviceId(bytes(16))))
    ack = AuthAck(UserId(bytes(16)), SessionId(bytes(16)), Millis(0), 0, {}, MailboxSeq(0))
    client.receive(build_message(Op.AUTH_ACK, request_id, ack))
    return client


@pytest.mark.shows("F-46")
@pytest.mark.parametrize("vector", load("refused_opcodes"))
def test_opcode_that_the_peer_may_not_send_ends_the_connection_or_is_ignored(vector: dict[str, Any]) -> None:
    side = ready_server() if vector["side"] == "server" else ready_client()
    data = bytes.fromhex(vector["hex"])
    if vector["code"] == 0:
        assert side.receive(data) == []
        return
    with pytest.raises(CLIENT_ERRORS[vector["code"]]):
        side.receive(data)


@pytest.mark.shows("F-46")
@pytest.mark.parametrize("vector", load("refused_bodies"))
def test_body_that_does_not_fit_is_an_error_of_its_request_alone(vector: dict[str, Any]) -> None:
    server = ready_server()
    (frame,) = server.receive(bytes.fromhex(vector["hex"]))
    with pytest.raises(CLIENT_ERRORS[vector["code"]]):
        decode_body(frame.opcode, frame.body)
    assert len(server.receive(build_frame(Op.PING, 2, b"\x90"))) == 1


@pytest.mark.shows("F-45")
@pytest.mark.parametrize("vector", load("split"))
def test_pieces_give_the_frames_of_the_vector(vector: dict[str, Any]) -> None:
    splitter = FrameSplitter()
    frames = [frame for piece in vector["pieces"] for frame in splitter.feed(bytes.fromhex(piece))]
    assert [[frame.opcode, frame.request_id, frame.body.hex()] for frame in frames] == vector["frames"]
    assert splitter.buffered == vector.get("buffered", 0)


def test_an_auth_that_tells_no_time_is_read() -> None:
    without = msgspec.msgpack.encode(["token", bytes(16), "client", "1"])
    assert decode_body(Op.AUTH, without) == Auth("token", DeviceId(bytes(16)), "client", "1", Millis(0))

"""Properties of the codec: what is encoded is decoded, cuts change nothing, and foreign bytes do no harm."""

import itertools
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qim.errors import ClientError, InvalidArgument, RemoteProtocolError, TooLarge, VersionUnsupported
from qim.ids import SEQ_MAX, ConversationId, MailboxSeq, Seq
from qim.limits import BATCH_BYTES_MAX, FRAME_BODY_BYTES_MAX, FRAME_HEADER_BYTES, MESSAGE_BODY_BYTES_MAX
from qim.wire.bodies import (
    BODIES,
    Auth,
    Echo,
    HistoryBatch,
    MailboxBatch,
    SendMessage,
    Target,
    build_echo_entry,
    build_history_batch,
    build_mailbox_batch,
    build_message,
    build_push,
    decode_body,
    decode_pushed,
    decode_send,
    encode_body,
)
from qim.wire.connection import ClientConnection, ServerConnection
from qim.wire.frames import Frame, FrameSplitter, build_frame
from qim.wire.layout import HEADER, Op
from qim.wire.link import parse_link

ids = st.binary(min_size=16, max_size=16)
sequences = st.integers(min_value=0, max_value=SEQ_MAX)
raws = st.lists(st.binary(max_size=40), max_size=3).map(lambda v: msgspec.Raw(msgspec.msgpack.encode(v)))
st.register_type_strategy(msgspec.Raw, raws)


def strategy_of(hint: object) -> st.SearchStrategy[Any]:
    """Values for one field as msgspec sees its type, limits included."""
    match msgspec.inspect.type_info(hint):
        case msgspec.inspect.IntType(ge=low, le=high):
            return st.integers(min_value=low or 0, max_value=high if high is not None else 2**63 - 1)
        case msgspec.inspect.BytesType(min_length=low, max_length=high):
            return st.binary(min_size=low or 0, max_size=high if high is not None else 300)
        case msgspec.inspect.StrType():
            return st.text(max_size=32)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.RawType():
            return raws
        case msgspec.inspect.StructType(cls=cls):
            return bodies_of(cls)
    origin, arguments = hint.__origin__, hint.__args__  # type: ignore[attr-defined] # only generics are left
    parts = [strategy_of(argument) for argument in arguments]
    if origin is list:
        return st.lists(parts[0], max_size=5)
    return st.tuples(*parts) if origin is tuple else st.dictionaries(*parts, max_size=5)


def bodies_of(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    fields = msgspec.structs.fields(cls)
    return st.builds(cls, *(strategy_of(field.type) for field in fields))


def as_values(body: msgspec.Struct) -> object:
    """Comparable values; two Raw slices of equal bytes are not equal objects."""
    return msgspec.msgpack.decode(encode_body(body))


any_message = st.sampled_from(sorted(BODIES)).flatmap(
    lambda op: st.tuples(st.just(op), st.integers(0, 2**32 - 1), bodies_of(BODIES[op]))
)


@given(any_message)
def test_every_body_survives_the_way(message: tuple[int, int, msgspec.Struct]) -> None:
    op, request_id, body = message
    (frame,) = FrameSplitter().feed(build_message(op, request_id, body))
    assert (frame.opcode, frame.request_id) == (op, request_id)
    decoded = decode_body(op, frame.body)
    assert type(decoded) is type(body)
    assert as_values(decoded) == as_values(body)


any_frame = st.builds(Frame, st.integers(0, 0xFFFF), st.integers(0, 2**32 - 1), st.binary(max_size=200))


def cut(data: bytes, at: Sequence[int]) -> list[bytes]:
    """The data in pieces, cut at the given places."""
    borders = [0, *sorted({place % (len(data) + 1) for place in at}), len(data)]
    return [data[start:stop] for start, stop in itertools.pairwise(borders)]


@pytest.mark.shows("F-45")
@given(
    st.lists(any_frame, max_size=8),
    st.lists(st.integers(0, 4000), max_size=12),
    st.sampled_from([bytes, bytearray, lambda piece: memoryview(bytearray(piece))]),
)
def test_cuts_anywhere_give_the_same_frames(
    frames: list[Frame], at: list[int], as_type: Callable[[bytes], bytes | bytearray | memoryview]
) -> None:
    stream = b"".join(build_frame(frame.opcode, frame.request_id, frame.body) for frame in frames)
    splitter = FrameSplitter()
    got = [frame for piece in cut(stream, at) for frame in splitter.feed(as_type(piece))]
    assert got == frames
    assert splitter.buffered == 0


@given(st.binary(min_size=1, max_size=100))
def test_frames_do_not_change_when_the_read_buffer_is_used_again(body: bytes) -> None:
    buffer = bytearray(build_frame(Op.PING, 1, body) + build_frame(Op.PING, 2, body)[:-1])
    splitter = FrameSplitter()
    (frame,) = splitter.feed(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    assert frame.body == body
    assert splitter.feed(body[-1:]) == [Frame(Op.PING, 2, body)]


@pytest.mark.shows("F-45")
@given(any_message, st.data())
def test_truncated_frame_gives_nothing_and_is_held(
    message: tuple[int, int, msgspec.Struct], data: st.DataObject
) -> None:
    whole = build_message(*message)
    length = data.draw(st.integers(0, len(whole) - 1))
    splitter = FrameSplitter()
    assert splitter.feed(whole[:length]) == []
    assert splitter.buffered == length


@pytest.mark.shows("F-45")
@given(st.integers(FRAME_BODY_BYTES_MAX + 1, 2**32 - 1), st.integers(0, 0xFFFF))
@example(2**32 - 1, Op.AUTH)
@example(2**31, Op.AUTH)
def test_length_above_the_limit_is_refused_on_the_header_without_allocation(length: int, op: int) -> None:
    header = HEADER.pack(1, 0, op, 1, length)
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            FrameSplitter().feed(header)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16_384


@pytest.mark.shows("F-45")
def test_header_that_promises_the_largest_body_costs_only_what_arrived() -> None:
    splitter = FrameSplitter()
    tracemalloc.start()
    try:
        splitter.feed(HEADER.pack(1, 0, Op.SEND_MESSAGE, 1, FRAME_BODY_BYTES_MAX))
        assert tracemalloc.get_traced_memory()[1] < 16_384
    finally:
        tracemalloc.stop()
    assert splitter.feed(bytes(FRAME_BODY_BYTES_MAX)) == [
        Frame(Op.SEND_MESSAGE, 1, bytes(FRAME_BODY_BYTES_MAX))
    ]


@given(st.integers(0, 255).filter(lambda version: version != 1))
def test_other_versions_are_refused_on_the_header(version: int) -> None:
    with pytest.raises(VersionUnsupported):
        FrameSplitter().feed(HEADER.pack(version, 0, Op.AUTH, 1, 0))


def feed_until_refused(receive: Callable[[bytes], list[Frame]], pieces: Sequence[bytes]) -> list[Frame]:
    frames: list[Frame] = []
    try:
        for piece in pieces:
            frames += receive(piece)
    except ClientError:
        pass
    return frames


@pytest.mark.shows("F-46")
@given(st.binary(max_size=600), st.lists(st.integers(0, 600), max_size=6))
def test_garbage_gives_frames_or_a_typed_refusal(garbage: bytes, at: list[int]) -> None:
    splitter = FrameSplitter()
    feed_until_refused(splitter.feed, cut(garbage, at))
    assert splitter.buffered <= len(garbage)
    feed_until_refused(ServerConnection().receive, cut(garbage, at))
    feed_until_refused(ClientConnection().receive, cut(garbage, at))


@pytest.mark.shows("F-46")
@given(st.sampled_from(sorted(BODIES)), st.binary(max_size=300))
def test_garbage_body_is_decoded_or_refused(op: int, garbage: bytes) -> None:
    try:
        decode_body(op, garbage)
    except (InvalidArgument, TooLarge):
        return


@pytest.mark.shows("F-46")
@settings(max_examples=300)
@given(any_message, st.integers(0, 4000), st.integers(0, 255), st.integers(0, 4000))
def test_mutated_capture_never_crashes_the_reader(
    message: tuple[int, int, msgspec.Struct], place: int, value: int, length: int
) -> None:
    whole = bytearray(build_message(*message))
    whole[place % len(whole)] = value
    del whole[length % len(whole) + 1 :]
    for frame in feed_until_refused(FrameSplitter().feed, [bytes(whole)]):
        try:
            decode_body(frame.opcode, frame.body)
        except ClientError:
            continue


@pytest.mark.shows("F-46")
@given(st.integers(0xF000, 0xF00A), st.binary(max_size=300))
def test_garbage_on_a_link_is_parsed_or_refused(op: int, garbage: bytes) -> None:
    try:
        parse_link(Frame(op, 0, garbage))
    except RemoteProtocolError:
        return


@pytest.mark.shows("F-46")
@pytest.mark.parametrize("head", [b"\x91\xdd", b"\x92\x92\x01\xc6", b"\x91\xdf", b"\x91\xc9", b"\x91\xdb"])
@pytest.mark.parametrize("op", sorted(BODIES))
def test_announced_sizes_inside_a_body_allocate_nothing(op: int, head: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument):
            decode_body(op, head + b"\xff\xff\xff\xff")
        assert tracemalloc.get_traced_memory()[1] < 65_536
    finally:
        tracemalloc.stop()


@pytest.mark.shows("F-46")
@pytest.mark.parametrize("op", sorted(BODIES))
def test_endless_nesting_is_refused(op: int) -> None:
    with pytest.raises(InvalidArgument):
        decode_body(op, b"\x91" * FRAME_BODY_BYTES_MAX)


@pytest.mark.shows("F-46")
def test_endless_nesting_in_an_ignored_field_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        decode_body(Op.PONG, b"\x93\x01\x02" + b"\x91" * (FRAME_BODY_BYTES_MAX - 3))


SECRET = "canary-7f3a"


@pytest.mark.shows("F-46")
@pytest.mark.parametrize(
    ("op", "values"),
    [
        (Op.AUTH, [SECRET, SECRET.encode(), "name", "1"]),
        (Op.AUTH, [SECRET * 1000, bytes(16)]),
        (Op.SEND_MESSAGE, [[1, SECRET.encode()], bytes(16), 1, "", b"x"]),
        (Op.SEND_MESSAGE, [[1, bytes(16)], bytes(16), 1, SECRET * 40, b"x"]),
        (Op.SEND_MESSAGE, [[1, bytes(16)], bytes(16), SECRET, "", b"x"]),
        (Op.SEND_MESSAGE, [[1, bytes(16)], bytes(16), 1, "", SECRET]),
    ],
)
def test_refusal_of_a_body_does_not_quote_it(op: Op, values: list[Any]) -> None:
    with pytest.raises(ClientError) as refusal:
        decode_body(op, msgspec.msgpack.encode(values))
    assert SECRET not in repr(refusal.value)


def test_printed_bodies_show_neither_token_nor_content() -> None:
    auth = decode_body(Op.AUTH, msgspec.msgpack.encode([SECRET, bytes(16), SECRET]))
    send = decode_send(msgspec.msgpack.encode([[1, bytes(16)], bytes(16), 1, SECRET, SECRET.encode()]))
    assert (type(auth), type(send)) == (Auth, SendMessage)
    assert SECRET not in f"{auth!r} {auth} {send!r} {send}"


@pytest.mark.parametrize("size", [MESSAGE_BODY_BYTES_MAX, MESSAGE_BODY_BYTES_MAX + 1])
def test_message_body_is_too_large_from_its_limit_on(size: int) -> None:
    body = SendMessage(Target(1, bytes(16)), bytes(16), 1, "", bytes(size))  # type: ignore[arg-type]  # plain values stand for ids
    data = encode_body(body)
    if size <= MESSAGE_BODY_BYTES_MAX:
        assert decode_send(data).body == bytes(size)
        return
    with pytest.raises(TooLarge):
        decode_send(data)


@given(st.lists(st.tuples(sequences, sequences, st.integers(0, 70_000)), max_size=20))
def test_push_is_cut_below_the_batch_limit_and_loses_nothing(sizes: list[tuple[int, int, int]]) -> None:
    events = [(prev, seq, msgspec.msgpack.encode([1, bytes(size)])) for prev, seq, size in sizes]
    got = []
    for data in build_push(events):
        assert len(data) <= BATCH_BYTES_MAX + FRAME_HEADER_BYTES
        (frame,) = FrameSplitter().feed(data)
        assert (frame.opcode, frame.request_id) == (Op.PUSH_EVENTS, 0)
        got += [(prev, seq, bytes(raw)) for prev, seq, raw in decode_body(frame.opcode, frame.body).events]
    assert got == events


@given(st.lists(st.tuples(sequences, raws), max_size=40), sequences, st.booleans(), st.booleans())
def test_concatenated_mailbox_page_equals_the_encoded_one(
    page: list[tuple[int, msgspec.Raw]], covered: int, more: bool, rebuild: bool
) -> None:
    built = build_mailbox_batch(
        7,
        entries=[(MailboxSeq(seq), bytes(raw)) for seq, raw in page],
        covered_through=MailboxSeq(covered),
        more=more,
        rebuild=rebuild,
    )
    body = MailboxBatch([(MailboxSeq(s), raw) for s, raw in page], MailboxSeq(covered), more, rebuild)
    assert built == build_message(Op.MAILBOX_BATCH, 7, body)


@given(ids, st.lists(st.tuples(sequences, raws), max_size=40), sequences, sequences, st.booleans())
def test_concatenated_history_page_equals_the_encoded_one(
    conversation: bytes, records: list[tuple[int, msgspec.Raw]], earliest: int, head: int, more: bool
) -> None:
    built = build_history_batch(
        7,
        conversation_id=ConversationId(conversation),
        records=[(Seq(seq), bytes(raw)) for seq, raw in records],
        earliest_available_seq=Seq(earliest),
        head_seq=Seq(head),
        more=more,
    )
    raw_entries = [msgspec.Raw(msgspec.msgpack.encode((seq, raw))) for seq, raw in records]
    body = HistoryBatch(ConversationId(conversation), raw_entries, Seq(earliest), Seq(head), more)
    assert built == build_message(Op.HISTORY_BATCH, 7, body)


@given(sequences, ids)
def test_echo_is_known_from_its_length(seq: int, conversation: bytes) -> None:
    echo = build_echo_entry(Seq(seq), ConversationId(conversation))
    assert decode_pushed(echo) == Echo(Seq(seq), ConversationId(conversation))
    assert decode_pushed(msgspec.Raw(echo)) == Echo(Seq(seq), ConversationId(conversation))


@given(st.binary(max_size=200))
def test_garbage_entry_is_refused(garbage: bytes) -> None:
    try:
        decode_pushed(garbage)
    except RemoteProtocolError:
        return

"""A device of a live run: what it notes, what it repeats, what ends it, and that its history comes first."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qim.errors import (
    AuthRequired,
    ClientError,
    GoingAway,
    Replaced,
    ResourceExhausted,
    SlowConsumer,
    Unauthenticated,
    Unavailable,
)
from qim.ids import ClientMessageId, ConversationId, MailboxSeq, MessageId, Millis, Seq, SessionId, UserId
from qim.wire import bodies
from qim.wire.frames import Frame, FrameSplitter
from qim.wire.layout import Op
from tests.checker.history import Event, FileHistory, History, Pull, Read, Recorder, Send
from tests.checker.live_device import ANSWER_NS_MAX, WINDOW_MAX, WINDOW_MIN, DeviceClient, EndedForGood
from tests.checker.live_memory import ClientOrder, DeviceOrder, Memory

ME, PEER, DEVICE = "0a" * 16, "0b" * 16, "0d" * 16
LATE_NS = 60_000_000_000


class RecordingDesk:
    """Writes events first, as the process does, sees that each frame has its own, and keeps the frames."""

    def __init__(self, folder: Path) -> None:
        device = DeviceOrder(ME, "token", DEVICE, [PEER], sends_per_second=1_000.0)
        self.order = ClientOrder(
            1, "", 1, "client-0.0", str(folder), 7, [device], began_ns=time.monotonic_ns(), curiosity=0.0
        )
        self.path = folder / "client-0.0.jsonl"
        self.recorder = Recorder(self.path)
        self.is_stopping = False
        self.frames: list[Frame] = []
        self.invoked = 0
        """Frames that want an event."""
        self._operations = 0
        self._splitter = FrameSplitter()

    def next_operation(self) -> int:
        self._operations += 1
        return self._operations

    def put(self, device: DeviceClient, frame: bytes) -> None:
        for put in self._splitter.feed(frame):
            if put.opcode != Op.AUTH:
                self._assert_is_noted(put)
            self.frames.append(put)

    def _assert_is_noted(self, frame: Frame) -> None:
        """The last line of the file is the beginning of this very request."""
        self.invoked += 1
        operations = [event for event in self.events() if isinstance(event, Send | Pull | History | Read)]
        assert sum(event.type == "invoke" for event in operations) == self.invoked
        assert operations[-1].type == "invoke"
        assert _of_event(operations[-1]) == _of_frame(frame)

    def take(self) -> list[Frame]:
        taken, self.frames = self.frames, []
        return taken

    def events(self) -> list[Event]:
        self.recorder.flush()
        return list(FileHistory([self.path]).events())

    def sends(self, type_: str) -> list[Send]:
        return [event for event in self.events() if isinstance(event, Send) and event.type == type_]


def _of_event(event: Send | Pull | History | Read) -> tuple[Op, str | int]:
    if isinstance(event, Send):
        return Op.SEND_MESSAGE, event.client_message_id
    if isinstance(event, Pull):
        return Op.PULL_MAILBOX, event.after
    if isinstance(event, History):
        return Op.PULL_HISTORY, event.before
    return Op.MARK_READ, event.wanted


def _of_frame(frame: Frame) -> tuple[Op, str | int]:
    body = bodies.decode_body(frame.opcode, frame.body)
    match body:
        case bodies.SendMessage():
            return Op.SEND_MESSAGE, body.client_message_id.hex()
        case bodies.PullMailbox():
            return Op.PULL_MAILBOX, body.after_mailbox_seq
        case bodies.PullHistory():
            return Op.PULL_HISTORY, body.before_seq
    assert isinstance(body, bodies.MarkRead)
    return Op.MARK_READ, body.read_seq


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[RecordingDesk]:
    desk = RecordingDesk(tmp_path)
    yield desk
    desk.recorder.close()


def _answer(device: DeviceClient, op: Op, frame: Frame, body: object) -> None:
    device.receive(memoryview(bodies.build_message(op, frame.request_id, body)))  # type: ignore[arg-type]  # any body


def _log_in(desk: RecordingDesk, device: DeviceClient) -> None:
    """To the end of the first page."""
    device.log_in()
    ack = bodies.AuthAck(
        UserId(bytes.fromhex(ME)), SessionId(bytes(16)), Millis(0), 25_000, {}, MailboxSeq(0)
    )
    _answer(device, Op.AUTH_ACK, desk.take()[0], ack)
    device.tick(time.monotonic_ns())
    page = bodies.MailboxBatch([], MailboxSeq(7), more=False, rebuild=False)
    _answer(device, Op.MAILBOX_BATCH, desk.take()[0], page)


def _ready(desk: RecordingDesk) -> DeviceClient:
    device = DeviceClient(desk, desk.order.devices[0], Memory())
    _log_in(desk, device)
    return device


def _send_until_full(device: DeviceClient) -> None:
    """All that is due in a minute, as far as the window goes."""
    for _ in range(2 * WINDOW_MAX):
        device.tick(time.monotonic_ns() + ANSWER_NS_MAX // 2)


def _ids(frames: list[Frame]) -> list[bytes]:
    return [bodies.decode_send(frame.body).client_message_id for frame in frames]


def _acknowledge(device: DeviceClient, frame: Frame, seq: int) -> None:
    message = bodies.decode_send(frame.body).client_message_id
    ack = bodies.SendAck(
        ClientMessageId(message), ConversationId(bytes(16)), Seq(seq), MessageId(bytes(16)), Millis(5),
        duplicate=False,
    )  # fmt: skip
    _answer(device, Op.SEND_ACK, frame, ack)


def test_each_frame_has_its_event_before_it_leaves(desk: RecordingDesk) -> None:
    device = _ready(desk)
    _send_until_full(device)
    sent = [bodies.decode_send(frame.body).client_message_id.hex() for frame in desk.take()]
    assert [event.client_message_id for event in desk.sends("invoke")] == sent
    pages = [event for event in desk.events() if isinstance(event, Pull)]
    assert [(page.type, page.covered_through) for page in pages] == [("invoke", 0), ("ok", 7)]
    assert device.memory.cursor == 7
    device.ask_history(PEER, before=3, limit=2)
    device.mark_read(PEER, wanted=5)
    device.pull()
    assert [frame.opcode for frame in desk.take()] == [Op.PULL_HISTORY, Op.MARK_READ, Op.PULL_MAILBOX]
    assert desk.invoked == len(sent) + 4, "what leaves was compared with its event"


def test_the_window_bounds_what_is_on_its_way_and_grows_with_the_answers(desk: RecordingDesk) -> None:
    device = _ready(desk)
    _send_until_full(device)
    first = desk.take()
    assert len(first) == WINDOW_MIN
    for seq, frame in enumerate(first, start=1):
        _acknowledge(device, frame, seq)
    _send_until_full(device)
    assert len(desk.take()) == 2 * WINDOW_MIN


def test_whatever_a_lost_connection_left_open_is_unknown_and_goes_again(desk: RecordingDesk) -> None:
    device = _ready(desk)
    _send_until_full(device)
    first = desk.take()
    _acknowledge(device, first[0], 1)
    device.on_lost()
    assert len(desk.sends("info")) == WINDOW_MIN - 1
    desk.is_stopping = True  # nothing new
    device.begin()
    _log_in(desk, device)
    _send_until_full(device)
    again = desk.take()
    assert _ids(again) == _ids(first[1:])
    bodies_of = [bodies.decode_send(frame.body).body for frame in first[1:]]
    assert [bodies.decode_send(frame.body).body for frame in again] == bodies_of


@pytest.mark.parametrize(("error", "type_"), [(ResourceExhausted, "fail"), (Unavailable, "info")])
def test_a_refused_message_waits_and_goes_again(
    desk: RecordingDesk, error: type[ResourceExhausted | Unavailable], type_: str
) -> None:
    device = _ready(desk)
    _send_until_full(device)
    first = desk.take()
    _answer(device, Op.ERROR, first[0], bodies.Error(error.code, 0, ""))
    assert [event.code for event in desk.sends(type_)] == [error.code]
    device.tick(time.monotonic_ns())
    assert not desk.take()
    _send_until_full(device)
    assert _ids(desk.take()) == _ids(first[:1])


def test_a_message_without_an_answer_is_unknown_and_goes_again_on_the_same_connection(
    desk: RecordingDesk,
) -> None:
    device = _ready(desk)
    _send_until_full(device)
    first = desk.take()
    device.tick(time.monotonic_ns() + LATE_NS)
    assert len(desk.sends("info")) == WINDOW_MIN
    assert _ids(desk.take()) == _ids(first)
    _acknowledge(device, first[0], 1)  # too late: nobody knows this request any more
    assert not desk.sends("ok")


def test_a_successor_owes_what_became_due_while_nobody_was_there(desk: RecordingDesk) -> None:
    desk.order.began_ns -= 10_000_000
    memory = Memory(made=9)
    device = DeviceClient(desk, desk.order.devices[0], memory)
    _log_in(desk, device)
    device.tick(desk.order.began_ns + 8_000_000)
    assert not desk.take(), "the tenth is due after nine milliseconds"
    device.tick(desk.order.began_ns + 9_000_000)
    assert desk.take()


FINAL = [
    (Unauthenticated.code, "Unauthenticated"),
    (AuthRequired.code, "AuthRequired"),
    (Replaced.code, "Replaced"),
    (1999, "code 1999"),
    (4999, "code 4999"),
]
PASSING = [Unavailable, ResourceExhausted, GoingAway, SlowConsumer]


@pytest.mark.parametrize(("code", "name"), FINAL)
def test_a_goodbye_for_ever_ends_the_device_with_its_name(desk: RecordingDesk, code: int, name: str) -> None:
    device = _ready(desk)
    goodbye = bodies.build_message(Op.GOAWAY, 0, bodies.GoAway(code, 0, "so it is"))
    with pytest.raises(EndedForGood, match=rf"{DEVICE} for good: {name} \({code}\) so it is"):
        device.receive(memoryview(goodbye))


@pytest.mark.parametrize("error", PASSING)
def test_after_any_other_goodbye_the_device_comes_again(
    desk: RecordingDesk, error: type[ClientError]
) -> None:
    device = _ready(desk)
    device.receive(memoryview(bodies.build_goaway(error())))
    assert not device.is_ready
    device.on_lost()
    device.begin()
    _log_in(desk, device)
    assert device.is_ready


@pytest.mark.parametrize(("code", "name"), FINAL)
def test_a_log_in_refused_for_ever_ends_the_device_with_its_name(
    desk: RecordingDesk, code: int, name: str
) -> None:
    device = DeviceClient(desk, desk.order.devices[0], Memory())
    device.log_in()
    with pytest.raises(EndedForGood, match=rf"{DEVICE} for good: {name} \({code}\)$"):
        _answer(device, Op.ERROR, desk.take()[0], bodies.Error(code, 0, ""))


@pytest.mark.parametrize("error", PASSING)
def test_a_log_in_refused_for_now_is_tried_again(desk: RecordingDesk, error: type[ClientError]) -> None:
    device = DeviceClient(desk, desk.order.devices[0], Memory())
    device.log_in()
    _answer(device, Op.ERROR, desk.take()[0], bodies.Error(error.code, 0, ""))
    device.tick(time.monotonic_ns())
    assert not desk.take()
    device.on_lost()
    device.begin()
    _log_in(desk, device)
    assert device.is_ready

"""One device of a live run, without a socket: what it asks, what it is told, and the history of both.

The rules of a real client around the real codec, as cheap as they can be, so that load is the server's work:
messages are due by the clock of the run whether or not earlier ones were answered, at most `WINDOW_MAX` are
on their way, and what became late in an outage is caught up. What the server refuses waits, then goes again
in small groups. One message in ten is sent again although it was acknowledged.

Every event is noted before the frame that follows from it can leave: frames and events go to the desk, which
writes the events first. Half of the pulls name the unbroken chain of pushes that the device holds, the others
are sent everything again. When the connection ends, each open request ends with an unknown outcome.

A final code in a GOAWAY or as the answer to AUTH raises: nothing that a run does to its server is a reason
for one. Not even REPLACED, which the server says to the old connection of a device that logs in again: a
process logs a device in when its connection before is gone, and a successor when its predecessor is dead, so
whoever is rightly replaced does not hear it.
"""

import random
import time
from collections import deque
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from qim.client.errors import error_name
from qim.clock import SystemClock
from qim.ids import MailboxSeq, Seq
from qim.limits import PAGE_ENTRIES_MAX
from qim.records import Kind, MessageType, entry_coordinates
from qim.wire import bodies
from qim.wire.connection import ClientConnection, State
from qim.wire.frames import Frame
from qim.wire.layout import Op
from tests.checker.history import History, Pull, Push, Pushed, Read, Recorder, Send, Shown, digest_of
from tests.checker.history import type_of_error as type_of
from tests.checker.live_memory import ClientOrder, DeviceOrder, Memory, conversations_of

ANSWER_NS_MAX: Final = 8_000_000_000
REPEATED: Final = 0.1
"""Part of the choices that repeat an acknowledged message."""
WINDOW_MIN: Final = 8
WINDOW_MAX: Final = 32
HOLD_NS: Final = 500_000_000
"""After a refusal nothing is asked for so long: those who wait do not make an outage longer."""
READ_NS: Final = 1_000_000_000
"""A device that only reads pulls this often."""
LIMITS: Final = (5, 100, PAGE_ENTRIES_MAX)
LIMIT_WEIGHTS: Final = (1, 4, 4)
FINAL_THOUSANDS: Final = (1, 4)
"""1000–1999 and 4000–4999, after the protocol and not after the SDK: its mistake must not be ours."""
_PUSH_EVENTS: Final = int(Op.PUSH_EVENTS)
_GOAWAY: Final = int(Op.GOAWAY)
_TEXT: Final = int(MessageType.TEXT)


class Desk(Protocol):
    """The process around its devices."""

    order: ClientOrder
    recorder: Recorder
    is_stopping: bool

    def next_operation(self) -> int: ...

    def put(self, device: "DeviceClient", frame: bytes) -> None:
        """Leaves after everything that was noted until now is in the history."""
        ...


class EndedForGood(Exception):
    """The server said that this device shall not come back as it is."""


class Asked(NamedTuple):
    """A request on its way."""

    event: Any
    peer: str


class DeviceClient:
    """The state of one device on one connection after the other."""

    def __init__(self, desk: Desk, device: DeviceOrder, memory: Memory) -> None:
        self.desk, self.device, self.memory = desk, device, memory
        order = desk.order
        self.chance = random.Random(f"{order.seed} {order.process} {device.device}")
        self.conversations = conversations_of(order, device)
        self._targets = {peer: bodies.Target(Kind.DIRECT, bytes.fromhex(peer)) for peer in device.peers}
        self._gap_ns = int(1e9 / device.sends_per_second) if device.sends_per_second else 0
        self._due_ns = order.began_ns + memory.made * self._gap_ns
        self._window = WINDOW_MIN
        self._looks_at_ns = 0
        self.begin()

    def begin(self) -> None:
        """A new connection, nothing asked."""
        self.wire = ClientConnection()
        self.is_ready = False
        """Logged in, and a page said that there is no more."""
        self.failure = 0
        """The code of what the server refused; whoever waits for an answer asks."""
        self.history_goes_on = 0
        """Where the next page of the history that was read last begins; 0 at its end."""
        self._log_in_id = 0
        self._open: dict[int, Asked] = {}
        self._in_flight = 0
        self._again = deque(self.memory.unanswered.items())
        self._hold_until_ns = 0
        self._is_pulling = False
        self._wants_pull = False
        self._uncovered: list[int] = []
        self._newest = 0
        self._is_broken = False

    @property
    def is_settled(self) -> bool:
        return not self.memory.unanswered

    @property
    def is_idle(self) -> bool:
        return not self._open

    # --- what goes out ---

    def log_in(self) -> None:
        time_ms = SystemClock().now_ms()  # all processes of a run share the clock of the host
        auth = bodies.Auth(self.device.token, bytes.fromhex(self.device.device), "prover", "", time_ms)  # type: ignore[arg-type]  # ids of the history
        self._log_in_id, frame = self.wire.request(Op.AUTH, auth)
        self.desk.put(self, frame)

    def tick(self, now_ns: int) -> None:
        """What is due by now."""
        if self._open:
            self._give_up(now_ns)
        if now_ns < self._hold_until_ns or self.wire.state is not State.READY:
            return
        if self._wants_pull and not self._is_pulling:
            self.pull()
        if not self.is_ready or self.desk.order.is_final:
            return
        if self._gap_ns:
            self._send_due(now_ns)
        elif now_ns >= self._looks_at_ns and not self._is_pulling:
            self._looks_at_ns = now_ns + READ_NS
            self.pull()

    def _send_due(self, now_ns: int) -> None:
        room = self._window - self._in_flight
        while self._again and room > 0:
            self._send(*self._again.popleft())
            room -= 1
        if self._due_ns > now_ns or room <= 0 or self.desk.is_stopping:
            return
        for _ in range(min(room, self.chance.randint(1, 3))):
            self._send(*self._choose())
        if self.chance.random() < self.desk.order.curiosity:
            self._look_around()

    def _choose(self) -> tuple[str, str]:
        """A new message, or one that was acknowledged and is repeated for nothing."""
        memory, chance = self.memory, self.chance
        if memory.acknowledged and chance.random() < REPEATED:
            return chance.choice(memory.acknowledged)
        message, peer = chance.randbytes(16).hex(), chance.choice(self.device.peers)
        memory.on_made(message, peer)
        self._due_ns += self._gap_ns
        return message, peer

    def _look_around(self) -> None:
        chance = self.chance.random()
        if chance < 0.25:
            if not self._is_pulling:
                self.pull()
            return
        peer = self.chance.choice(self.device.peers)
        last = self.memory.last_seqs.get(self.conversations[peer], 0)
        if chance < 0.32:
            before = self.chance.choice([0, self.chance.randint(0, last + 1)])
            self.ask_history(peer, before=before, limit=self.chance.choice([3, 50]))
        elif chance < 0.39 and last:
            self.mark_read(peer, wanted=self.chance.randint(1, last))

    def _send(self, message: str, peer: str) -> None:
        text = b"message " + message.encode()  # whoever repeats it after a kill knows nothing but the id
        desk = self.desk
        event = Send(
            time.monotonic_ns(), desk.order.process, "invoke", desk.next_operation(), self.device.user,
            self.conversations[peer], message, digest_of(text),
        )  # fmt: skip
        body = bodies.SendMessage(self._targets[peer], bytes.fromhex(message), _TEXT, "", text)  # type: ignore[arg-type]  # an id of the history
        self._in_flight += 1
        self._ask(event, peer, Op.SEND_MESSAGE, body)

    def pull(self) -> None:
        after, limit = self.memory.cursor, self.chance.choices(LIMITS, LIMIT_WEIGHTS)[0]
        is_named = bool(self._uncovered) and not self._is_broken and self.chance.random() < 0.5
        held = (self._newest, len(self._uncovered)) if is_named else (0, 0)
        self._is_broken, self._is_pulling, self._wants_pull = False, True, False
        desk = self.desk
        event = Pull(
            time.monotonic_ns(), desk.order.process, "invoke", desk.next_operation(), self.device.user,
            self.device.device, after, *held,
        )  # fmt: skip
        body = bodies.PullMailbox(MailboxSeq(after), limit, MailboxSeq(held[0]), held[1])
        self._ask(event, "", Op.PULL_MAILBOX, body)

    def ask_history(self, peer: str, *, before: int, limit: int, is_final: bool = False) -> None:
        desk = self.desk
        event = History(
            time.monotonic_ns(), desk.order.process, "invoke", desk.next_operation(), self.device.user,
            self.conversations[peer], before, final=is_final,
        )  # fmt: skip
        body = bodies.PullHistory(target=self._targets[peer], before_seq=Seq(before), limit=limit)
        self._ask(event, peer, Op.PULL_HISTORY, body)

    def mark_read(self, peer: str, *, wanted: int, is_final: bool = False) -> None:
        desk = self.desk
        event = Read(
            time.monotonic_ns(), desk.order.process, "invoke", desk.next_operation(), self.device.user,
            self.conversations[peer], wanted, final=is_final,
        )  # fmt: skip
        body = bodies.MarkRead(target=self._targets[peer], read_seq=Seq(wanted))
        self._ask(event, peer, Op.MARK_READ, body)

    def _ask(self, event: Any, peer: str, op: Op, body: msgspec.Struct) -> None:
        self.desk.recorder.note(event)
        request_id, frame = self.wire.request(op, body)
        self._open[request_id] = Asked(event, peer)
        self.desk.put(self, frame)

    # --- what comes in ---

    def receive(self, data: memoryview) -> None:
        """Raises for whatever no server of this protocol may send."""
        for frame in self.wire.receive(data):
            if frame.opcode == _PUSH_EVENTS:
                self._on_push(frame)
            elif frame.opcode == _GOAWAY:
                self.is_ready = self._wants_pull = False
                self._unless_final(bodies.decode_body(frame.opcode, frame.body))
            elif frame.request_id:
                self._on_answer(frame)

    def on_lost(self) -> None:
        """The connection is gone: whatever is open may have happened."""
        for asked in self._open.values():
            self._note_end(asked.event, "info")
        self.wire.close()
        self._open.clear()
        self.is_ready = self._wants_pull = False

    def _give_up(self, now_ns: int) -> None:
        """Requests stand in the order in which they were asked."""
        for request_id, asked in list(self._open.items()):
            if now_ns - asked.event.t < ANSWER_NS_MAX:
                return
            del self._open[request_id]
            self.wire.forget(request_id)
            self._note_end(asked.event, "info")
            self._on_unanswered(asked, HOLD_NS)

    def _on_answer(self, frame: Frame) -> None:
        body = bodies.decode_body(frame.opcode, frame.body)
        asked = self._open.pop(frame.request_id, None)
        if asked is None:
            if frame.request_id == self._log_in_id:
                self._on_logged_in(body)
            return
        event = asked.event
        if isinstance(body, bodies.Error):
            self._note_end(event, type_of(body.code), code=body.code)
            self.failure = body.code
            self._on_unanswered(asked, max(HOLD_NS, body.retry_after_ms * 1_000_000))
        elif isinstance(event, Send):
            self._on_sent(asked, body)
        elif isinstance(event, Pull):
            self._on_page(event, body)
        elif isinstance(event, History):
            self._on_history(event, body)
        else:
            self._note_end(event, "ok", read_seq=body.read_seq, unread=body.unread)

    def _on_logged_in(self, body: msgspec.Struct) -> None:
        if isinstance(body, bodies.Error):
            self._unless_final(body)
        self._wants_pull = isinstance(body, bodies.AuthAck)

    def _unless_final(self, body: bodies.GoAway | bodies.Error) -> None:
        if body.code // 1000 in FINAL_THOUSANDS:
            why = f"{error_name(body.code)} ({body.code}) {body.text}".rstrip()
            raise EndedForGood(f"the server ended device {self.device.device} for good: {why}")

    def _on_unanswered(self, asked: Asked, hold_ns: int) -> None:
        """A message goes again, a pull too; the rest is not missed."""
        if isinstance(asked.event, Send):
            self._in_flight -= 1
            message = asked.event.client_message_id
            if message in self.memory.unanswered:
                self._again.append((message, asked.peer))
        elif isinstance(asked.event, Pull):
            self._is_pulling, self._wants_pull, self._is_broken = False, True, True
        self._window = WINDOW_MIN
        self._hold_until_ns = time.monotonic_ns() + hold_ns

    def _on_sent(self, asked: Asked, ack: bodies.SendAck) -> None:
        event: Send = asked.event
        self.desk.recorder.note(
            Send(
                time.monotonic_ns(), event.process, "ok", event.operation, event.user, event.conversation,
                event.client_message_id, event.body, ack.message_id.hex(), ack.conversation_seq,
                ack.reserved_at, ack.duplicate,
            )
        )  # fmt: skip
        self._in_flight -= 1
        self._window = min(self._window + 1, WINDOW_MAX)
        self.memory.on_acknowledged(
            event.client_message_id, asked.peer, event.conversation, ack.conversation_seq
        )

    def _on_page(self, event: Pull, page: bodies.MailboxBatch) -> None:
        entries = [_shown(seq, bytes(raw)) for seq, raw in page.entries]
        self._note_end(
            event, "ok", entries=entries, covered_through=page.covered_through, more=page.more,
            rebuild=page.rebuild,
        )  # fmt: skip
        covered = self.memory.cursor = page.covered_through
        for entry in entries:
            self.memory.on_seen(entry.conversation, entry.seq)
        self._uncovered = [seq for seq in self._uncovered if seq > covered]
        self._newest = self._uncovered[-1] if self._uncovered else covered
        self._is_pulling = False
        if page.more and self.wire.state is State.READY:
            self.pull()
        elif not page.more:
            self.is_ready = self.wire.state is State.READY

    def _on_push(self, frame: Frame) -> None:
        events: list[Pushed] = []
        for previous, seq, raw in bodies.decode_body(frame.opcode, frame.body).events:
            self._hold(previous, seq)
            event = _pushed(previous, seq, bytes(raw))
            events.append(event)
            self.memory.on_seen(event.conversation, event.seq)
        self.desk.recorder.note(
            Push(
                time.monotonic_ns(), self.desk.order.process, self.device.user, self.device.device, events
            )
        )  # fmt: skip

    def _hold(self, previous: int, seq: int) -> None:
        """The chain of pushes that the next pull may name."""
        if seq <= self._newest:
            return
        is_next = previous == self._newest if self._uncovered else previous <= self.memory.cursor
        if not is_next or previous == 0:
            self._is_broken = True
        self._newest = seq
        self._uncovered.append(seq)

    def _on_history(self, event: History, page: bodies.HistoryBatch) -> None:
        raws = [bytes(raw) for raw in page.records]
        entries = [(int(entry_coordinates(raw)[0]), digest_of(raw)) for raw in raws]
        self._note_end(
            event, "ok", entries=entries, earliest=page.earliest_available_seq, head=page.head_seq,
            more=page.more,
        )  # fmt: skip
        self.history_goes_on = entries[-1][0] if page.more else 0

    def _note_end(self, event: Any, type_: str, **result: Any) -> None:
        self.desk.recorder.note(msgspec.structs.replace(event, t=time.monotonic_ns(), type=type_, **result))


def _shown(mailbox_seq: int, raw: bytes) -> Shown:
    seq, conversation = entry_coordinates(raw)
    return Shown(mailbox_seq, conversation.hex(), seq, digest_of(raw))


def _pushed(previous: int, mailbox_seq: int, raw: bytes) -> Pushed:
    if len(raw) <= bodies.ECHO_BYTES_MAX:
        echo = bodies.decode_pushed(raw)
        assert isinstance(echo, bodies.Echo)
        return Pushed(previous, mailbox_seq, echo.conversation_id.hex(), echo.conversation_seq, "")
    seq, conversation = entry_coordinates(raw)
    return Pushed(previous, mailbox_seq, conversation.hex(), seq, digest_of(raw))

"""One generated user without IO: log-in, sends, pushes, and the pulls that a real client would make.

Both generators share it: `capacity.py` around an asyncio protocol, `locustfile.py` around a blocking
socket. It uses the real codec and the rules of the real client (a chain of previous_mailbox_seq, a
held-through pull after 64 pushes or 10 s, a plain pull 300 ms after the chain broke), because a generator
that never pulled would flatter the server. What it leaves out is the client's database: messages are
counted, not kept.

A body is 16 bytes of message number and zeros up to the wanted size, so whoever receives it knows its due
time without a table of texts. Time comes in as seconds; nothing here waits. A user whose connection ended
is dead: the run shows it as unanswered messages.
"""

import struct
from dataclasses import dataclass
from typing import Final, Protocol

from blake3 import blake3
from msgspec import Raw

from qim.ids import ClientMessageId, DeviceId, MailboxSeq, Millis, UserId
from qim.limits import PAGE_ENTRIES_MAX
from qim.records import Entry, Kind, MessageType
from qim.wire.bodies import (
    Auth,
    Echo,
    Ping,
    PullMailbox,
    SendAck,
    SendMessage,
    Target,
    decode_body,
    decode_pushed,
)
from qim.wire.connection import ClientConnection, State
from qim.wire.frames import Frame
from qim.wire.layout import Op

NUMBER: Final = struct.Struct(">QQ")
"""Run and message number, the first bytes of a body and the whole client_message_id."""
HELD_PUSHES_MAX: Final = 64
HELD_SECONDS_MAX: Final = 10.0
GAP_SECONDS: Final = 0.3
SILENT_SECONDS_MAX: Final = 20.0
_PUSH_EVENTS: Final = int(Op.PUSH_EVENTS)
_SEND_ACK: Final = int(Op.SEND_ACK)
_SEND_MESSAGE: Final = int(Op.SEND_MESSAGE)
_CUSTOM: Final = int(MessageType.CUSTOM)
_LOG_IN: Final = -1
_PULL: Final = -2
_OTHER: Final = -3


@dataclass(frozen=True, slots=True)
class Account:
    """Who a user is. A run makes its own users, so that its mailboxes start empty."""

    user: UserId
    device: DeviceId


def make_account(run: int, number: int) -> Account:
    digest = blake3(b"qim.loadtest.account" + NUMBER.pack(run, number)).digest()
    return Account(UserId(digest[:16]), DeviceId(digest[16:]))


def build_body(run: int, number: int, size: int) -> bytes:
    return NUMBER.pack(run, number).ljust(size, b"\0")


def parse_body(body: bytes) -> tuple[int, int]:
    """Run and number; (0, 0) for a body that no generator built."""
    return NUMBER.unpack_from(body) if len(body) >= NUMBER.size else (0, 0)


class Sink(Protocol):
    """Where a user reports; called in the order of the frames."""

    def on_ready(self, user: "User") -> None:
        """Logged in, and the first pull is done."""

    def on_accepted(self, user: "User", number: int, ack: SendAck) -> None: ...

    def on_refused(self, user: "User", number: int, code: int) -> None: ...

    def on_entry(self, user: "User", mailbox_seq: int, entry: Entry, *, pushed: bool) -> None: ...

    def on_echo(self, user: "User", seq: int) -> None: ...

    def on_ended(self, user: "User", code: int) -> None:
        """The server sent GOAWAY, or refused the log-in."""


class User:
    """The state of one user on one connection."""

    __slots__ = (
        "_body_size", "_broken_at", "_covered", "_is_broken", "_is_pulling", "_newest", "_pull_after",
        "_requests", "_run", "_uncovered", "_uncovered_at", "_written_at", "account", "connection", "index",
        "is_ready", "partner", "sink",
    )  # fmt: skip

    def __init__(
        self, account: Account, partner: UserId, *, index: int, run: int, sink: Sink, body_size: int
    ) -> None:
        self.account = account
        self.partner = Target(Kind.DIRECT, partner)
        self.index = index
        self.sink = sink
        self.connection = ClientConnection()
        self.is_ready = False
        self._run = run
        self._body_size = body_size
        self._requests: dict[int, int] = {}
        self._covered = 0
        self._newest = 0
        self._uncovered: list[int] = []
        self._uncovered_at = 0.0
        self._is_broken = False
        self._broken_at = 0.0
        self._is_pulling = False
        self._pull_after = 0.0
        self._written_at = 0.0

    # --- what goes out ---

    def log_in(self, token: str) -> bytes:
        """The first frame. The user is ready after the pull that follows by itself."""
        return self._request(Op.AUTH, Auth(token, self.account.device, "qim-loadtest", "1"), _LOG_IN)

    def send(self, number: int, at: float) -> bytes:
        """The frame of one message."""
        data = build_body(self._run, number, self._body_size)
        message_id = ClientMessageId(data[: NUMBER.size])
        self._written_at = at
        return self._request(_SEND_MESSAGE, SendMessage(self.partner, message_id, _CUSTOM, "", data), number)

    def pull(self, at: float) -> bytes:
        """A pull from the cursor; it names the unbroken chain of pushes, so that they are not sent again."""
        self._is_pulling = True
        self._written_at = at
        held = (0, 0) if self._is_broken or not self._uncovered else (self._newest, len(self._uncovered))
        self._is_broken = False
        body = PullMailbox(MailboxSeq(self._covered), PAGE_ENTRIES_MAX, MailboxSeq(held[0]), held[1])
        return self._request(Op.PULL_MAILBOX, body, _PULL)

    def due_frame(self, at: float) -> bytes:
        """What a client's own timers would send now: a pull, a ping, or nothing."""
        if self.connection.state is not State.READY:
            return b""
        if not self._is_pulling and at >= self._pull_after:
            is_full = len(self._uncovered) >= HELD_PUSHES_MAX
            is_old = bool(self._uncovered) and at - self._uncovered_at >= HELD_SECONDS_MAX
            if is_full or is_old or (self._is_broken and at - self._broken_at >= GAP_SECONDS):
                return self.pull(at)
        if at - self._written_at >= SILENT_SECONDS_MAX:
            self._written_at = at
            return self._request(Op.PING, Ping(Millis(0)), _OTHER)
        return b""

    def _request(self, op: int, body: Auth | SendMessage | PullMailbox | Ping, meaning: int) -> bytes:
        request_id, data = self.connection.request(op, body)
        self._requests[request_id] = meaning
        return data

    # --- what comes in ---

    def receive(self, data: bytes | bytearray | memoryview, at: float) -> bytes:
        """Reports everything to the sink; gives what must be written now, which is mostly nothing."""
        answer = b""
        for frame in self.connection.receive(data):
            if frame.opcode == _PUSH_EVENTS:
                self._on_push(frame, at)
            elif frame.request_id:
                answer += self._on_reply(frame, at)
            elif frame.opcode == Op.GOAWAY:
                self.is_ready = False
                self.sink.on_ended(self, decode_body(frame.opcode, frame.body).code)
        return answer

    def _on_reply(self, frame: Frame, at: float) -> bytes:
        meaning = self._requests.pop(frame.request_id, _OTHER)
        body = decode_body(frame.opcode, frame.body)
        if frame.opcode == _SEND_ACK:
            self.sink.on_accepted(self, meaning, body)
        elif frame.opcode == Op.ERROR:
            if meaning >= 0:
                self.sink.on_refused(self, meaning, body.code)
            elif meaning == _LOG_IN:
                self.sink.on_ended(self, body.code)
            elif meaning == _PULL:
                self._is_pulling, self._is_broken, self._broken_at = False, True, at
                self._pull_after = at + GAP_SECONDS
        elif frame.opcode == Op.AUTH_ACK:
            return self.pull(at)
        elif frame.opcode == Op.MAILBOX_BATCH:
            for mailbox_seq, raw in body.entries:
                self._on_entry(mailbox_seq, raw, pushed=False)
            return self._on_covered(body.covered_through, more=body.more, at=at)
        return b""

    def _on_covered(self, covered_through: int, *, more: bool, at: float) -> bytes:
        self._covered = covered_through
        self._uncovered = [seq for seq in self._uncovered if seq > covered_through]
        self._newest = self._uncovered[-1] if self._uncovered else covered_through
        self._uncovered_at = at
        if more:
            return self.pull(at)
        self._is_pulling = False
        if not self.is_ready:
            self.is_ready = True
            self.sink.on_ready(self)
        return b""

    def _on_push(self, frame: Frame, at: float) -> None:
        for previous, mailbox_seq, raw in decode_body(frame.opcode, frame.body).events:
            self._note_push(previous, mailbox_seq, at)
            self._on_entry(mailbox_seq, raw, pushed=True)

    def _note_push(self, previous: int, mailbox_seq: int, at: float) -> None:
        if mailbox_seq <= self._newest:
            return
        is_next = previous == self._newest if self._uncovered else previous <= self._covered
        if not is_next or previous == 0:
            self._is_broken = True
            self._broken_at = at
        if not self._uncovered:
            self._uncovered_at = at
        self._newest = mailbox_seq
        self._uncovered.append(mailbox_seq)

    def _on_entry(self, mailbox_seq: int, raw: Raw, *, pushed: bool) -> None:
        entry = decode_pushed(raw)
        if isinstance(entry, Echo):
            self.sink.on_echo(self, entry.conversation_seq)
        elif entry.record.sender != self.account.user:
            self.sink.on_entry(self, mailbox_seq, entry, pushed=pushed)

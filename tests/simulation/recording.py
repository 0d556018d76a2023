"""What devices saw, in the format of the history checker, read off the wire.

The frames themselves are the witness, not what the SDK makes of them: a request is noted when its bytes
leave the device, its answer when it arrives there. What was under way when a device died or a connection was
cut stays an open request, that is, unknown for ever.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from qim.domain.placement import direct_conversation
from qim.ids import TenantId, UserId
from qim.wire.bodies import (
    Echo,
    HistoryBatch,
    MailboxBatch,
    MarkReadAck,
    PushEvents,
    SendAck,
    decode_body,
    decode_pushed,
    decode_send,
)
from qim.wire.frames import Frame, FrameSplitter
from qim.wire.layout import HEADER, Op
from tests.checker import history
from tests.checker.history import Event, Pushed, Shown, StoreRead, digest_of, type_of_error
from tests.simulation.network import End


class Book:
    """All events of a run, in their order, and a running number for operations."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.events: list[Event | StoreRead] = []
        self.is_final = False
        """Whether what is read now must show everything."""
        self._now = now
        self._operations = 0
        self._digests: dict[bytes, str] = {}

    @property
    def t(self) -> int:
        return round(self._now() * 1e9)

    def operation(self) -> int:
        self._operations += 1
        return self._operations

    def write(self, event: Event | StoreRead) -> None:
        self.events.append(event)

    def fault(self, what: str, target: str, *, heals: bool = False) -> None:
        self.write(history.Fault(self.t, "world", "heal" if heals else "strike", what, target))

    def digest(self, data: bytes) -> str:
        known = self._digests.get(data)
        if known is None:
            known = self._digests[data] = digest_of(data)
        return known


class Asked(NamedTuple):
    """An open request: its invoke, to be repeated with the answer."""

    invoke: Any
    final: bool


class Wire:
    """The observer of one process of a device."""

    def __init__(self, book: Book, process: str, tenant: TenantId, user: UserId, device: str) -> None:
        self._book = book
        self._process = process
        self._tenant = tenant
        self._user = user
        self._name = user.hex()
        self._device = device
        self._splitters: dict[End, FrameSplitter] = {}
        self._open: dict[tuple[End, int], Asked] = {}

    # --- out -----------------------------------------------------------------------------------------

    def sent(self, end: End, data: bytes) -> None:
        """The client writes whole frames."""
        at = 0
        while at < len(data):
            _version, _flags, opcode, request_id, length = HEADER.unpack_from(data, at)
            at += HEADER.size
            self._ask(end, opcode, request_id, data[at : at + length])
            at += length

    def _ask(self, end: End, opcode: int, request_id: int, body: bytes) -> None:
        event = self._invoke(opcode, body)
        if event is not None:
            self._book.write(event)
            self._open[end, request_id] = Asked(event, self._book.is_final)

    def _invoke(self, opcode: int, body: bytes) -> Event | None:
        book = self._book
        invoke: history.Type = "invoke"
        head = (book.t, self._process, invoke, book.operation(), self._name)
        match opcode:
            case Op.SEND_MESSAGE:
                send = decode_send(body)
                return history.Send(
                    *head, self._conversation(send.target.id), send.client_message_id.hex(),
                    book.digest(bytes(send.body)),
                )  # fmt: skip
            case Op.PULL_MAILBOX:
                pull = decode_body(opcode, body)
                return history.Pull(
                    *head, self._device, pull.after_mailbox_seq, pull.held_through, pull.held_count
                )
            case Op.PULL_HISTORY:
                asked = decode_body(opcode, body)
                return history.History(
                    *head, self._conversation(asked.target.id), asked.before_seq, asked.after_seq,
                    final=book.is_final,
                )  # fmt: skip
            case Op.MARK_READ:
                mark = decode_body(opcode, body)
                return history.Read(
                    *head, self._conversation(mark.target.id), mark.read_seq, final=book.is_final
                )
            case _:
                return None

    def _conversation(self, peer: bytes) -> str:
        return direct_conversation(self._tenant, self._user, UserId(peer)).hex()

    # --- in ------------------------------------------------------------------------------------------

    def arrived(self, end: End, data: bytes) -> None:
        splitter = self._splitters.setdefault(end, FrameSplitter())
        for frame in splitter.feed(data):
            if frame.opcode == Op.PUSH_EVENTS:
                self._note_push(decode_body(frame.opcode, frame.body))
            else:
                asked = self._open.pop((end, frame.request_id), None)
                if asked is not None:
                    self._book.write(self._result(asked, frame))

    def _note_push(self, body: PushEvents) -> None:
        events = []
        for previous, mailbox_seq, raw in body.events:
            item = decode_pushed(raw)
            entry = "" if isinstance(item, Echo) else self._book.digest(bytes(raw))
            conversation = item.conversation_id if isinstance(item, Echo) else item.record.conversation_id
            events.append(Pushed(previous, mailbox_seq, conversation.hex(), item.conversation_seq, entry))
        self._book.write(history.Push(self._book.t, self._process, self._name, self._device, events))

    def _result(self, asked: Asked, frame: Frame) -> Event:
        values = {name: getattr(asked.invoke, name) for name in asked.invoke.__struct_fields__}
        values["t"] = self._book.t
        values["type"] = "ok"
        body = decode_body(frame.opcode, frame.body)
        if frame.opcode == Op.ERROR:
            values |= {"type": type_of_error(body.code), "code": body.code}
        else:
            values |= self._seen(body)
        event: Event = type(asked.invoke)(**values)
        return event

    def _seen(self, body: Any) -> dict[str, Any]:
        match body:
            case SendAck():
                return {
                    "message_id": body.message_id.hex(), "seq": body.conversation_seq,
                    "reserved_at": body.reserved_at, "duplicate": body.duplicate,
                }  # fmt: skip
            case MailboxBatch():
                return {
                    "entries": [self._shown(mailbox_seq, bytes(raw)) for mailbox_seq, raw in body.entries],
                    "covered_through": body.covered_through, "more": body.more, "rebuild": body.rebuild,
                }  # fmt: skip
            case HistoryBatch():
                shown = [self._shown(0, bytes(raw)) for raw in body.records]
                return {
                    "entries": [(one.seq, one.entry) for one in shown],
                    "earliest": body.earliest_available_seq, "head": body.head_seq, "more": body.more,
                }  # fmt: skip
            case MarkReadAck():
                return {"read_seq": body.read_seq, "unread": body.unread}
            case _:
                return {}

    def _shown(self, mailbox_seq: int, entry: bytes) -> Shown:
        item = decode_pushed(entry)
        assert not isinstance(item, Echo)
        return Shown(
            mailbox_seq, item.record.conversation_id.hex(), item.conversation_seq, self._book.digest(entry)
        )

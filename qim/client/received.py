"""From frames to what one transaction and one pass need; pure, so it is tested without a network.

`read_frame` sorts one frame into a `Pass`: messages, acknowledgements and echoes go into the transaction,
pushes wait for its commit, answers go to whoever asked. An entry that does not decode is the server's mistake
and raises RemoteProtocolError: skipping it would lose a message silently.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from qim.client.model import Message, Target
from qim.client.recovery import decode_entry
from qim.client.steps import Echo, Incoming
from qim.client.sync import Pushed
from qim.errors import RemoteProtocolError
from qim.ids import ConversationId, MailboxSeq, Seq, UserId
from qim.records import RECORD_VERSION, Entry, Kind
from qim.wire.bodies import (
    GoAway,
    HistoryBatch,
    MailboxBatch,
    PushEvents,
    StateEvents,
    decode_body,
    decode_pushed,
)
from qim.wire.frames import Frame
from qim.wire.layout import Op

NO_SEQ: Final = MailboxSeq(0)


@dataclass
class Pass:
    """Everything that arrived since the last pass, sorted."""

    incoming: Incoming = field(default_factory=Incoming)
    pushes: list[tuple[Pushed, Echo | None]] = field(default_factory=list)
    page: MailboxBatch | None = None
    acks: list[int] = field(default_factory=list)
    """Request ids of the acknowledgements in `incoming`, in order."""
    answers: list[tuple[int, Any]] = field(default_factory=list)
    errors: list[tuple[int, Any]] = field(default_factory=list)
    read_marks: list[tuple[ConversationId, Seq]] = field(default_factory=list)
    newest: MailboxSeq = NO_SEQ
    pings: list[int] = field(default_factory=list)
    goaway: GoAway | None = None


def build_message_of(entry: Entry, me: UserId) -> Message:
    """A message as the application sees it; the target of a direct conversation is the other user."""
    record = entry.record
    if record.version != RECORD_VERSION:
        raise RemoteProtocolError(f"a message record of version {record.version}")
    return Message(
        target=_target_of(record.kind, record.parties, me), conversation_id=record.conversation_id,
        conversation_seq=entry.conversation_seq, message_id=record.message_id, sender=record.sender,
        sender_device=record.sender_device, client_message_id=record.client_message_id,
        message_type=record.message_type, custom_type=record.custom_type, body=record.body,
        retention_class=record.retention_class, reserved_at=record.reserved_at,
    )  # fmt: skip


def read_history(page: HistoryBatch, me: UserId) -> list[Message]:
    """Oldest first."""
    return [build_message_of(decode_entry(raw), me) for raw in reversed(page.records)]


def read_frame(frame: Frame, into: Pass, me: UserId) -> None:
    """Sorts one frame. Raises RemoteProtocolError, or InvalidArgument for a body that does not decode."""
    match frame.opcode:
        case Op.PUSH_EVENTS:
            _read_push(decode_body(frame.opcode, frame.body), into, me)
        case Op.SEND_ACK:
            into.incoming.acks.append(decode_body(frame.opcode, frame.body))
            into.acks.append(frame.request_id)
        case Op.MAILBOX_BATCH:
            _read_page(decode_body(frame.opcode, frame.body), into, me)
            into.answers.append((frame.request_id, into.page))
        case Op.ERROR:
            into.errors.append((frame.request_id, decode_body(frame.opcode, frame.body)))
        case Op.PONG:
            pong = decode_body(frame.opcode, frame.body)
            into.newest = max(into.newest, pong.newest_mailbox_seq)
        case Op.PING:
            into.pings.append(frame.request_id)
        case Op.STATE_EVENTS:
            state: StateEvents = decode_body(frame.opcode, frame.body)
            into.read_marks += [(mark.conversation_id, mark.read_seq) for mark in state.read_marks]
        case Op.GOAWAY:
            into.goaway = decode_body(frame.opcode, frame.body)
        case _:
            into.answers.append((frame.request_id, decode_body(frame.opcode, frame.body)))


def _read_push(body: PushEvents, into: Pass, me: UserId) -> None:
    for previous, mailbox_seq, raw in body.events:
        item = decode_pushed(raw)
        echo: Echo | None = None
        if isinstance(item, Entry):
            into.incoming.messages.append(build_message_of(item, me))
        else:
            echo = Echo(item.conversation_id, item.conversation_seq)
            into.incoming.echoes.append(echo)
        into.pushes.append((Pushed(previous, mailbox_seq), echo))


def _read_page(body: MailboxBatch, into: Pass, me: UserId) -> None:
    into.page = body
    into.incoming.messages += [build_message_of(decode_entry(raw), me) for _, raw in body.entries]
    if not body.rebuild:
        into.incoming.cursor = body.covered_through


def _target_of(kind: int, parties: bytes, me: UserId) -> Target:
    if kind == Kind.GROUP:
        return Target(kind, parties[:16])
    smaller, larger = parties[:16], parties[16:32]
    return Target(kind, larger if smaller == me else smaller)

"""Checks of what senders were told: acknowledgements, refusals, and their order in real time.

One entry per message (conversation, sender, client_message_id) is kept, however often it was repeated: the
moment it was first sent, the moment it was first acknowledged, the coordinates of that acknowledgement, and
for each body the attempts that were not refused for certain. An attempt without an end stays possible for
ever, so it excuses a record in the log and promises none.

Order in real time is one sweep per conversation over two sorted lists: when a message is sent, the highest
sequence that was acknowledged before is a lower bound for its own.
"""

from collections import Counter
from dataclasses import dataclass, field

from tests.checker.history import Send
from tests.checker.truth import MessageKey, Truth
from tests.checker.verdict import Findings


@dataclass(slots=True)
class SentMessage:
    sent_at: int
    acknowledged_at: int = 0
    coordinates: tuple[str, int, int] = ("", 0, 0)
    """message id, sequence, time of the message"""
    body: str = ""
    """The body that was acknowledged."""
    possible: dict[str, int] = field(default_factory=dict)
    """Body → attempts without a proved no."""


class SendChecks:
    """Takes the sends of a history one by one; `finish` judges what needs all of them."""

    def __init__(self, truth: Truth, findings: Findings, ends: Counter[str]) -> None:
        self._truth = truth
        self._findings = findings
        self._ends = ends
        self._messages: dict[MessageKey, SentMessage] = {}
        self.ok_moments: list[int] = []
        self.sent_last_at = 0

    def on_send(self, event: Send) -> None:
        self._ends[event.type] += 1
        key = (event.conversation, event.user, event.client_message_id)
        message = self._messages.get(key)
        if message is None:
            message = self._messages[key] = SentMessage(event.t)
        if event.type == "invoke":
            message.sent_at = min(message.sent_at, event.t)
            message.possible[event.body] = message.possible.get(event.body, 0) + 1
            self.sent_last_at = max(self.sent_last_at, event.t)
        elif event.type == "ok":
            self.ok_moments.append(event.t)
            self._on_acknowledged(event, message)
        elif event.type == "fail":
            message.possible[event.body] -= 1

    def _on_acknowledged(self, event: Send, message: SentMessage) -> None:
        coordinates = (event.message_id, event.seq, event.reserved_at)
        if not message.acknowledged_at:
            message.coordinates, message.body = coordinates, event.body
            message.acknowledged_at = event.t
        elif message.coordinates != coordinates:
            where = _name((event.conversation, event.user, event.client_message_id))
            self._findings.add("unstable-ack", where, f"{message.coordinates}, then {coordinates}")
        message.acknowledged_at = min(message.acknowledged_at, event.t)
        if event.body != message.body:
            where = _name((event.conversation, event.user, event.client_message_id))
            self._findings.add("ack-mismatch", where, "acknowledged with two bodies")

    def finish(self) -> None:
        for key, message in self._messages.items():
            if message.acknowledged_at:
                self._check_acknowledged(key, message)
            for body, attempts in message.possible.items():
                if not attempts and body in self._truth.bodies:
                    self._findings.add(
                        "failed-visible", _name(key), f"its refused body {body} is in the Outbox"
                    )
        self._check_senders()
        self._check_real_time()

    def first_moments(self) -> list[int]:
        """When each acknowledged message was acknowledged first."""
        return sorted(
            message.acknowledged_at for message in self._messages.values() if message.acknowledged_at
        )

    def _check_acknowledged(self, key: MessageKey, message: SentMessage) -> None:
        message_id, seq, reserved_at = message.coordinates
        record = self._truth.messages.get(key)
        where = _name(key)
        if record is None:
            self._findings.add("lost-ack", where, f"acknowledged as sequence {seq}")
            return
        told = (seq, message_id, reserved_at, message.body)
        true = (record.seq, record.message_id, record.reserved_at, record.body)
        if told != true and not self._is_second_commit(key, message):
            self._findings.add("ack-mismatch", where, f"acknowledged as {told}, is {true}")
        if message.acknowledged_at < self._truth.durable_at(record):
            self._findings.add("early-visible", where, "acknowledged before its record was in the Outbox")

    def _is_second_commit(self, key: MessageKey, message: SentMessage) -> bool:
        """A message that was committed twice is reported as that, not as a wrong acknowledgement too."""
        other = self._truth.record_at(key[0], message.coordinates[1])
        if other is None or other is self._truth.messages[key]:
            return False
        return (other.conversation, other.sender, other.client_message_id) == key

    def _check_senders(self) -> None:
        """Every record was sent by somebody, with this body."""
        for key, record in self._truth.messages.items():
            message = self._messages.get(key)
            if message is None or record.body not in message.possible:
                self._findings.add("phantom", f"{record.conversation} seq {record.seq}", "nobody sent this")

    def _check_real_time(self) -> None:
        by_conversation: dict[str, list[tuple[int, int, int]]] = {}
        for key, record in self._truth.messages.items():
            message = self._messages.get(key)
            if message is not None:
                span = (message.sent_at, message.acknowledged_at, record.seq)
                by_conversation.setdefault(key[0], []).append(span)
        for name, spans in by_conversation.items():
            self._sweep(name, spans)

    def _sweep(self, name: str, spans: list[tuple[int, int, int]]) -> None:
        """(sent, acknowledged or 0, sequence) of each message of a conversation."""
        acknowledged = sorted((end, seq) for _, end, seq in spans if end)
        place, highest = 0, 0
        for sent_at, _, seq in sorted(spans):
            while place < len(acknowledged) and acknowledged[place][0] < sent_at:
                highest = max(highest, acknowledged[place][1])
                place += 1
            if seq <= highest:
                self._findings.add("realtime", f"{name} seq {seq}", f"sent after {highest} was acknowledged")


def _name(key: MessageKey) -> str:
    return f"{key[0]} message {key[2]} of {key[1]}"

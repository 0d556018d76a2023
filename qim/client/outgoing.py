"""What the client decides about messages that have no acknowledgement yet; no input, no output, no clock.

    WAITING ──frame──▶ IN_FLIGHT ──SEND_ACK or final error──▶ gone
       ▲                  │ retryable error, time-out, connection lost
       └──────────────────┘
    WAITING ──too old──▶ CHECKING (history) ──absent──▶ IN_FLIGHT, or found / unknown ──▶ gone

- A row enters only after it is durable in the store (`local_pending`), and leaves only after the store
  committed what became of it.
- Rows go out in the order of their ordinals. A retryable refusal holds all of them until its time is over,
  so a later message does not overtake an earlier one because of a limit.
- Nothing goes out before the mailbox was drained after a login.
- The window bounds what is in flight; the rest waits, in the store and as a row in memory.
"""

from typing import Final, NamedTuple

from qim.client.model import Target
from qim.client.sync import is_aged
from qim.ids import ClientMessageId, Millis
from qim.limits import UNANSWERED_REQUESTS_MAX

WINDOW: Final = 256
"""Messages in flight: a quarter of what the server allows unanswered, so requests always fit beside."""
ANSWER_SECONDS_MAX: Final = 12.0
"""The server answers within 8 s, with DEADLINE_EXCEEDED at worst; after that the message goes out again."""
RETRY_SECONDS_FIRST: Final = 0.25
RETRY_SECONDS_MAX: Final = 10.0
assert WINDOW * 2 <= UNANSWERED_REQUESTS_MAX


class PendingRow(NamedTuple):
    """A durable outgoing message."""

    ordinal: int
    client_message_id: ClientMessageId
    target: Target
    message_type: int
    custom_type: str
    body: bytes
    retention_class: int
    first_sent_at: Millis
    """Server time of the first frame; 0 when no frame ever left."""


class Outgoing:
    """The rows without an answer, and which of them go out now."""

    def __init__(self) -> None:
        self._waiting: dict[int, PendingRow] = {}
        self._in_flight: dict[ClientMessageId, tuple[PendingRow, float]] = {}
        self._checking: dict[ClientMessageId, PendingRow] = {}
        self._hold_until = 0.0
        self._refusals = 0

    @property
    def count(self) -> int:
        return len(self._waiting) + len(self._in_flight) + len(self._checking)

    def add(self, row: PendingRow) -> None:
        """A row that is durable; adding it again changes nothing."""
        if row.client_message_id not in self._in_flight and row.client_message_id not in self._checking:
            self._waiting[row.ordinal] = row

    def remove(self, client_message_id: ClientMessageId) -> PendingRow | None:
        """Its end is committed: acknowledged, failed or unknown."""
        self._refusals = 0
        if (flying := self._in_flight.pop(client_message_id, None)) is not None:
            return flying[0]
        if (checked := self._checking.pop(client_message_id, None)) is not None:
            return checked
        for ordinal, row in self._waiting.items():
            if row.client_message_id == client_message_id:
                del self._waiting[ordinal]
                return row
        return None

    def on_disconnected(self) -> None:
        """Everything in flight has an unknown outcome: it goes out again under the same identity."""
        for row, _ in self._in_flight.values():
            self._waiting[row.ordinal] = row
        for row in self._checking.values():
            self._waiting[row.ordinal] = row
        self._in_flight.clear()
        self._checking.clear()
        self._hold_until, self._refusals = 0.0, 0

    def on_retryable(
        self, client_message_id: ClientMessageId, *, retry_after_ms: int, now: float, jitter: float
    ) -> None:
        """The server asks for a repeat; all rows wait so that their order stays."""
        flying = self._in_flight.pop(client_message_id, None)
        if flying is None:
            return
        self._waiting[flying[0].ordinal] = flying[0]
        ceiling = min(RETRY_SECONDS_MAX, RETRY_SECONDS_FIRST * 2 ** min(self._refusals, 10))
        self._refusals += 1
        delay = retry_after_ms / 1000 if retry_after_ms else ceiling * (0.5 + jitter / 2)
        self._hold_until = max(self._hold_until, now + delay)

    def on_absent(self, client_message_id: ClientMessageId, *, server_now: Millis) -> None:
        """History proved that the message is not there: it starts anew under its identity."""
        row = self._checking.pop(client_message_id, None)
        if row is not None:
            self._waiting[row.ordinal] = row._replace(first_sent_at=server_now)

    def take_sends(
        self, *, now: float, server_now: Millis, is_drained: bool
    ) -> tuple[list[PendingRow], list[PendingRow]]:
        """(rows to send, rows to look up in history first). They count as in flight from here on."""
        self._requeue_unanswered(now)
        if not is_drained or now < self._hold_until or not self._waiting:
            return [], []
        sends: list[PendingRow] = []
        checks: list[PendingRow] = []
        for ordinal in sorted(self._waiting)[: WINDOW + len(self._checking)]:
            row = self._waiting[ordinal]
            if is_aged(first_sent_at=row.first_sent_at, server_now=server_now):
                checks.append(row)
                self._checking[row.client_message_id] = row
            elif len(self._in_flight) < WINDOW:
                row = row if row.first_sent_at else row._replace(first_sent_at=server_now)
                sends.append(row)
                self._in_flight[row.client_message_id] = (row, now)
            else:
                break
            del self._waiting[ordinal]
        return sends, checks

    def next_deadline(self, *, is_drained: bool) -> float | None:
        """When `take_sends` may have a new answer without anything arriving."""
        deadlines = [sent + ANSWER_SECONDS_MAX for _, sent in list(self._in_flight.values())[:1]]
        if self._waiting and is_drained and len(self._in_flight) < WINDOW:
            deadlines.append(self._hold_until)
        return min(deadlines, default=None)

    def _requeue_unanswered(self, now: float) -> None:
        # Insertion order is sending order, so the first one that is young ends the search.
        for client_message_id, (row, sent) in list(self._in_flight.items()):
            if now - sent < ANSWER_SECONDS_MAX:
                break
            del self._in_flight[client_message_id]
            self._waiting[row.ordinal] = row

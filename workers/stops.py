"""What of one core instance does not go on by itself: stopped slots, the home partition, single messages.

    slots           their store contradicted itself; sends to them are refused until an operator's `retry`
    outbox_broken   the home partition takes nothing; no send to this core instance is accepted until an
                    append succeeds, or has been due for so long that the next send may as well try it
    unfinishable    RECORDED messages whose stored record cannot be used; the recoverer passes them over

Each stands as narrow as the fault: other slots go on, and so do all reads. Nothing here is durable. A worker
that starts again meets the same fault again, with no other answer than before, so nothing is lost with it.

The commit path and the recoverer note here what they meet, and ask here before they begin. What is met again
and again is reported once.

Full: unfinishable messages are noted up to a bound; the slot of a further one stops, and the recoverer leaves
stopped slots alone, so that it does not append again and again what it cannot remember.
"""

from typing import Final

from structlog import get_logger

from qim.clock import Clock
from qim.domain.placement import slot_of_bucket
from qim.errors import QimError
from qim.ids import SlotId
from qim.limits import REQUEST_DEADLINE_MS, UNFINISHABLE_MESSAGES_MAX
from qim.metrics import Metrics
from qim.ports import MessageKey

log = get_logger()

BROKEN_OUTBOX_SECONDS: Final = REQUEST_DEADLINE_MS / 1000
"""So long a broken partition is left to the recoverer; by then every request of before has its answer."""


class Stops:
    """The stops of one core instance."""

    def __init__(self, *, home: SlotId, clock: Clock, metrics: Metrics) -> None:
        self._home = home
        self._clock = clock
        self._metrics = metrics
        self.slots: dict[SlotId, str] = {}
        """With the reason."""
        self.unfinishable: dict[MessageKey, str] = {}
        """With the reason; only an operator can mend them."""
        self.outbox_broken = ""
        """Why the home partition takes nothing."""
        self._broken_at = 0.0

    def describe(self) -> dict[str, str]:
        """All of it and why, for the operator's tools."""
        found = {f"slot {slot}": reason for slot, reason in self.slots.items()}
        if self.outbox_broken:
            found[f"Outbox partition {self._home}"] = self.outbox_broken
        for key, reason in self.unfinishable.items():
            found[f"message {key.conversation.hex()} {key.client_message_id.hex()}"] = reason
        return found

    def stop_slot(self, slot: SlotId, error: QimError) -> None:
        """Its sends are refused from now on."""
        if slot not in self.slots:
            log.error("slot_stopped", role="writer", slot=slot, reason=str(error))
            self._metrics.slot_stopped[slot] += 1
        self.slots[slot] = str(error)

    def note_unfinishable(self, key: MessageKey, error: QimError) -> None:
        """The recoverer need not try it again."""
        if key not in self.unfinishable:  # a client that asks again and again is no news
            slot = slot_of_bucket(key.bucket)
            if len(self.unfinishable) >= UNFINISHABLE_MESSAGES_MAX:
                self.stop_slot(slot, error)
                return
            log.error("pending_unfinishable", slot=slot, reason=str(error))
        self.unfinishable[key] = str(error)

    def retry(self, slot: SlotId) -> bool:
        """Sends to the slot again, and lets the recoverer try again what it could not finish there."""
        given_up = [key for key in self.unfinishable if slot_of_bucket(key.bucket) == slot]
        for key in given_up:
            del self.unfinishable[key]
        if slot in self.slots:
            del self.slots[slot]
            self._metrics.slot_stopped[slot] -= 1
            log.info("slot_resumed", role="writer", slot=slot)
            return True
        return bool(given_up)

    # --- the home partition of the Outbox ------------------------------------------------------------

    def break_outbox(self, reason: str) -> None:
        """Sends are refused, whatever their slot."""
        # Another process would meet the same partition; ending this one would only take the reads away too.
        if not self.outbox_broken:
            log.error("outbox_broken", slot=self._home, reason=reason)
            self._metrics.slot_stopped[self._home] += 1
        self.outbox_broken = reason
        self._broken_at = self._clock.monotonic()

    def is_outbox_due(self) -> bool:
        """Nothing was tried with it for so long that the next send may."""
        return self._clock.monotonic() - self._broken_at > BROKEN_OUTBOX_SECONDS

    def mend_outbox(self) -> None:
        """An append has succeeded, or the next send shall be tried."""
        self.outbox_broken = ""
        self._metrics.slot_stopped[self._home] -= 1
        log.info("slot_resumed", role="writer", slot=self._home)

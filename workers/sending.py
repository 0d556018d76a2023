"""One message on its way to COMMITTED, everybody who waits for it, and the runs it travels in.

Kept apart from the path (`workers/commits.py`) because two parts put messages on it: a pass, for clients that
wait, and the recoverer, for nobody. Both speak of a message by its identity key; the digest beside it tells
a repeat from other content under the same id.

Only the loop changes a Sending. It belongs to the pass or the recoverer that began it, from its reservation
until the answer of `mark_committed` was read, and is then forgotten: what a repeat needs is in the store. A
process that dies loses its sendings; what of them is RECORDED, the next recoverer finds.

Full: a run is what one call of a script carries, at most `SCRIPT_RUN_ITEMS_MAX`. `requests` holds one entry
per unanswered request of the sender's devices, which the gateways bound.
"""

from collections.abc import Awaitable

from qim.domain import writer as rules
from qim.ids import Millis, Offset, Seq
from qim.limits import SCRIPT_RUN_ITEMS_MAX
from qim.ports import CommitResult, MessageKey, Reservation, ReserveResult
from workers.request import Request


class Sending:
    """One message in flight and everybody who waits for its coordinates."""

    __slots__ = (
        "control", "durable", "identity", "key", "message", "offset", "planned", "repeated", "requests",
        "reserved_at", "seq",
    )  # fmt: skip

    def __init__(self, key: MessageKey, identity: bytes) -> None:
        self.key = key
        self.identity = identity
        self.planned: rules.PlannedSend | None = None
        """None: found by the recoverer."""
        self.requests: list[Request] = []
        self.repeated = False
        """Whether the first of `requests` repeats what the store knew already."""
        self.seq = Seq(0)
        self.reserved_at = Millis(0)
        self.message = b""
        """The Outbox record."""
        self.offset: Offset | None = None
        self.control = False
        self.durable = False


class Reserving:
    """A run whose reservation, or commit in one step, is on the way."""

    __slots__ = ("call", "run")

    def __init__(self, run: list[Sending], call: Awaitable[list[ReserveResult]]) -> None:
        self.run = run
        self.call = call


class Marking:
    """A run whose commit marks are on the way."""

    __slots__ = ("call", "run")

    def __init__(self, run: list[Sending], call: Awaitable[list[CommitResult]]) -> None:
        self.run = run
        self.call = call


def build_reservation(sending: Sending) -> Reservation:
    planned = sending.planned
    assert planned is not None
    return Reservation(
        sending.key, sending.identity, planned.record_bytes, planned.record.reserved_at, planned.expires_at,
        planned.outbox_frame, planned.record.membership_version,
    )  # fmt: skip


def cut_runs(sendings: list[Sending]) -> list[list[Sending]]:
    if len(sendings) <= SCRIPT_RUN_ITEMS_MAX:
        return [sendings] if sendings else []
    return [
        sendings[start : start + SCRIPT_RUN_ITEMS_MAX]
        for start in range(0, len(sendings), SCRIPT_RUN_ITEMS_MAX)
    ]

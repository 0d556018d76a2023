"""What the checker says: violations by the name of their check, and the figures of the run.

A broken run can contradict itself a million times. The first hundred of each check are kept, the rest is
counted, so that a verdict fits in memory and on a screen.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

VIOLATIONS_KEPT_MAX: Final = 100

CHECKS: Final = {
    "inconsistent-seq": "one conversation and sequence never has two records",
    "seq-gap": "the sequences of a conversation are 1…max, each there",
    "duplicate-commit": "one message has one sequence, whoever repeated it",
    "lost-ack": "each acknowledged message is in the log",
    "ack-mismatch": "… under the coordinates that were acknowledged",
    "unstable-ack": "… the same in all repeats",
    "failed-visible": "what was refused is visible nowhere",
    "early-visible": "nothing is shown or acknowledged before it is durable",
    "realtime": "acknowledged before the other was sent: the lower sequence",
    "audience": "exactly sender and recipient",
    "mailbox": "pages and mailboxes hold exactly the expected entries, in order",
    "phantom": "what is delivered is in the log, and somebody sent it",
    "corrupt": "… with the same bytes",
    "history-interval": "a history page is contiguous, equal to the log, for parties only",
    "session": "read marks never fall, unread counts are exact",
    "watermark": "W never falls and passes finished records only",
    "client": "a cursor is what a committed page said; nothing is held twice",
    "liveness": "after a fault has healed the service goes on, and catches up",
}
"""Every check in the order of a report, with its rule."""


class Violation(NamedTuple):
    check: str
    where: str
    detail: str


@dataclass
class Findings:
    """Collects violations while the checks run."""

    kept: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, check: str, where: str, detail: str) -> None:
        assert check in CHECKS
        self.counts[check] += 1
        if self.counts[check] <= VIOLATIONS_KEPT_MAX:
            self.kept.append(Violation(check, where, detail))


@dataclass
class Figures:
    """What the run did; shows whether there was anything to find."""

    operations: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Kind → how many ended ok, fail, info."""
    deliveries: int = 0
    """Entries that pages and pushes showed to a device."""
    records: int = 0
    outbox_repeats: int = 0
    """Outbox records that repeat an earlier one: the trace of a retry."""
    dispatch_repeats: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    first_ok_seconds: list[float] = field(default_factory=list)
    """After each healing, in the order of healing."""
    accepted_at: list[int] = field(default_factory=list)
    """When each acknowledged message was acknowledged first, in the order of time."""


class Verdict(NamedTuple):
    violations: list[Violation]
    counts: Counter[str]
    figures: Figures

    @property
    def clean(self) -> bool:
        return not self.counts

    def as_result(self) -> dict[str, Any]:
        """For `--json`."""
        figures = self.figures
        return {
            "schema": 1,
            "clean": self.clean,
            "violations": dict(self.counts),
            "examples": [violation._asdict() for violation in self.violations],
            "operations": {kind: dict(ends) for kind, ends in sorted(figures.operations.items())},
            "deliveries": figures.deliveries,
            "records": figures.records,
            "accepted": len(figures.accepted_at),
            "outbox_repeats": figures.outbox_repeats,
            "dispatch_repeats": figures.dispatch_repeats,
            "faults": dict(figures.faults),
            "first_ok_seconds": [round(seconds, 3) for seconds in figures.first_ok_seconds],
        }

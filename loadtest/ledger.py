"""The generator's book: every message it was to send, what was answered, what arrived, and when.

A message is a number. Its due time is fixed before the run starts (`poisson_schedule`), so whatever the
server or the generator does later, every latency counts from there. The book trusts nobody: an entry that
arrives under a second mailbox sequence, or a second time by push, is a double; an accepted message that no
push and no pull brought is lost; one without an answer stays unanswered for ever.

State belongs to one event loop. Bounded by the schedule: a few dozen bytes per message, nothing is kept per
answer. Latencies of the warm-up are not kept, its messages are counted all the same.
"""

from array import array
from bisect import bisect_left
from collections import Counter
from random import Random
from typing import Final

from loadtest.report import Counts, Latencies

UNANSWERED: Final = 0
ACCEPTED: Final = 1
REFUSED: Final = 2


def poisson_schedule(*, rate: float, seconds: float, seed: int) -> "array[float]":
    """Due times in seconds from the start: independent arrivals, the same for the same seed."""
    draw = Random(seed).expovariate  # a schedule, not a secret
    due = array("d")
    at = draw(rate)
    while at < seconds:
        due.append(at)
        at += draw(rate)
    return due


class Ledger:
    """The book of one step. Message numbers start at `first`, so that steps do not mix."""

    def __init__(self, due: "array[float]", *, first: int, warm_up_seconds: float) -> None:
        self.due = due
        self.first = first
        self.warm_up_seconds = warm_up_seconds
        self.ack = Latencies()
        self.end_to_end = Latencies()
        self.echo = Latencies()
        self.generator_lag = Latencies()
        self.refusals: Counter[int] = Counter()
        self.accepted = 0
        self._answers = bytearray(len(due))
        self._mailbox_seqs = array("q", bytes(8 * len(due)))
        self._pushes = bytearray(len(due))
        self.missing = 0
        """Accepted and not delivered yet. A delivery may overtake its answer."""
        self._doubled = 0
        self._pulled = 0
        self._echoed = 0

    def __len__(self) -> int:
        return len(self.due)

    def holds(self, number: int) -> bool:
        """Whether the message belongs to this step; late ones of an earlier step do not."""
        return 0 <= number - self.first < len(self.due)

    @property
    def offered_in_window(self) -> int:
        """Messages that are due after the warm-up."""
        return len(self.due) - bisect_left(self.due, self.warm_up_seconds)

    @property
    def is_settled(self) -> bool:
        """Every message is answered, every accepted one has arrived."""
        return self.answered == len(self.due) and self.missing == 0

    @property
    def is_echoed(self) -> bool:
        """Every accepted message has come back to its sender as an echo."""
        return self._echoed >= self.accepted

    @property
    def answered(self) -> int:
        return self.accepted + self.refusals.total()

    def on_sent(self, number: int, at: float) -> None:
        self._add(self.generator_lag, number, at)

    def on_accepted(self, number: int, at: float) -> None:
        index = number - self.first
        if self._answers[index] == UNANSWERED:
            self._answers[index] = ACCEPTED
            self.accepted += 1
            self.missing += not self._mailbox_seqs[index]
            self._add(self.ack, number, at)

    def on_refused(self, number: int, code: int) -> None:
        index = number - self.first
        if self._answers[index] == UNANSWERED:
            self._answers[index] = REFUSED
            self.refusals[code] += 1

    def on_delivered(self, number: int, mailbox_seq: int, at: float, *, pushed: bool) -> None:
        """An entry reached the recipient. A pull shows again what a push had brought: that is no double."""
        index = number - self.first
        known = self._mailbox_seqs[index]
        if not known:
            self._mailbox_seqs[index] = mailbox_seq
            self.missing -= self._answers[index] == ACCEPTED
            self._pulled += not pushed
            self._add(self.end_to_end, number, at)
        elif known != mailbox_seq or (pushed and self._pushes[index]):
            self._doubled += 1
        if pushed:
            self._pushes[index] = 1

    def on_echo(self, number: int, at: float) -> None:
        self._echoed += 1
        self._add(self.echo, number, at)

    def counts(self) -> Counts:
        refused = self.refusals.total()
        return Counts(
            offered=len(self.due),
            accepted=self.accepted,
            refused=refused,
            unanswered=len(self.due) - self.accepted - refused,
            delivered=self.accepted - self.missing,
            lost=self.missing,
            doubled=self._doubled,
            pulled=self._pulled,
            echoed=self._echoed,
        )

    def _add(self, latencies: Latencies, number: int, at: float) -> None:
        due = self.due[number - self.first]
        if due >= self.warm_up_seconds:
            latencies.add(at - due)

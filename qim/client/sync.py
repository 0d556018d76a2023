"""What the client decides about its mailbox, its history and its connection; no input, no output, no clock.

Push is a hint, the mailbox is the truth. `Chain` follows what was pushed and stored beyond the stored
cursor, and says when to pull and whether that pull may name what is held already:

    cursor ──▶ 118 ──▶ 120 ──▶ 121          131 (previous 127)
               └──── unbroken chain ────┘   └── after a hole: waits 300 ms for 127, then a plain pull

- The cursor moves only by a page that was committed with it; a push never moves it.
- `held_through` ends an unbroken chain that starts at the cursor. A previous of 0, or an echo whose message
  is not in this store, breaks the chain: then the pull is plain and fetches what may be missing.
- Everything here is told only after the store committed it, so a failed commit leaves no trace here.
- At most one pull is open. A chain that grows above its bound is forgotten; the next pull fetches it.

`Reconnect` knows when to try again: at once, then exponentially with full jitter, the server's hint first.
The functions at the end judge gaps and old unacknowledged messages. Times are seconds of a monotonic clock
unless their name ends in `_ms`.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Final, NamedTuple

from qim.ids import MailboxSeq, Millis, Seq
from qim.limits import CLOCK_SKEW_MS_MAX, EPHEMERAL_LIFE_MS, IDEMPOTENCY_WINDOW_MS, PAGE_ENTRIES_MAX
from qim.records import RetentionClass

HOLE_WAIT_SECONDS: Final = 0.3
HELD_PUSHES: Final = 64
HELD_SECONDS: Final = 10.0
UNCOVERED_MAX: Final = 1_024
"""Pushes beyond the cursor that are remembered; above it the chain is dropped and a pull settles it."""
RECONNECT_SECONDS_FIRST: Final = 0.5
RECONNECT_SECONDS_MAX: Final = 30.0
CALM_SECONDS: Final = 10.0
"""A connection that lived this long after login counts as a success; the next attempt is again at once."""
RESEND_AGE_MS: Final = 110 * 60_000
"""Ten minutes before the server forgets a client_message_id: above it only history may settle a send."""
assert RESEND_AGE_MS < IDEMPOTENCY_WINDOW_MS
assert HELD_PUSHES < PAGE_ENTRIES_MAX <= UNCOVERED_MAX


class Pull(NamedTuple):
    """A PULL_MAILBOX to send now."""

    after: MailboxSeq
    held_through: MailboxSeq = MailboxSeq(0)
    held_count: int = 0


class Pushed(NamedTuple):
    """A push that is in the store; `is_held` is False for an echo whose message is not here."""

    previous: MailboxSeq
    mailbox_seq: MailboxSeq
    is_held: bool = True


class Chain:
    """Cursor, what was pushed beyond it, and when to pull."""

    def __init__(self, cursor: MailboxSeq) -> None:
        self.cursor = cursor
        self.is_drained = False
        """The mailbox was read to its end since the login; resending waits for it."""
        self._end = cursor
        self._count = 0
        self._early: dict[MailboxSeq, MailboxSeq] = {}
        self._seqs: list[MailboxSeq] = []
        self._uncovered_since: float | None = None
        self._hole_since: float | None = None
        self._is_plain_due = False
        self._is_open = False
        self._is_held_open = False
        """Whether the open pull names what is held."""

    # --- told by the connection

    def on_login(self) -> None:
        """After each login the mailbox is read first, whatever the hint says."""
        self._is_open = False
        self.is_drained = False
        self._is_plain_due = True

    def on_newest(self, newest: MailboxSeq) -> None:
        """The server's newest entry, from PONG: above what came means that a push was lost."""
        if newest > max([self._end, *self._early]):
            self._is_plain_due = True

    def on_disconnected(self) -> None:
        self._is_open = False
        self.is_drained = False

    def on_pull_refused(self) -> None:
        """The open pull got an error; the same is due again when the caller lets it."""
        self._is_open = False
        self._is_plain_due = True

    # --- told after a commit

    def on_pushes(self, pushes: Iterable[Pushed], *, now: float) -> None:
        for push in pushes:
            if push.mailbox_seq in self._early and push.is_held:
                # Its acknowledgement came after its echo: now the message is here.
                self._early[push.mailbox_seq] = push.previous
                self._link_early()
            if push.mailbox_seq <= self._end or push.mailbox_seq in self._early:
                continue
            if self._uncovered_since is None:
                self._uncovered_since = now
            if push.is_held and self._continues(push.previous):
                self._append(push.mailbox_seq)
                self._link_early()
            else:
                # previous = 0 never links: what lies before is not known, so only a page can say.
                self._early[push.mailbox_seq] = push.previous if push.is_held else MailboxSeq(0)
                if self._hole_since is None:
                    self._hole_since = now
        if not self._early:
            self._hole_since = None
        if len(self._early) + self._count > UNCOVERED_MAX:
            self._forget_pushes()
            self._is_plain_due = True

    def on_page(self, *, covered_through: MailboxSeq, more: bool, entries: int, now: float) -> None:
        """A page and its cursor were committed."""
        # The server took what we hold as covered and says that there is more: most likely the pushes that
        # came meanwhile or are coming. They are waited for like after a hole, not fetched a second time.
        is_hint = more and not entries and self._is_held_open
        self._is_open = False
        remaining = [seq for seq in self._seqs if seq > covered_through]
        self.cursor = max(covered_through, self.cursor)
        # A page that ends inside the chain leaves its rest unbroken behind the new cursor.
        self._seqs, self._count = remaining, len(remaining)
        self._end = remaining[-1] if remaining else self.cursor
        self._early = {seq: before for seq, before in self._early.items() if seq > self.cursor}
        self._link_early()
        is_empty = not self._early and not self._count
        self._uncovered_since = None if is_empty else now
        self._hole_since = now if self._early or (is_hint and is_empty) else None
        self._is_plain_due = more and not is_hint
        self.is_drained = self.is_drained or not more

    def on_rebuilt(self, cursor: MailboxSeq) -> None:
        """The cursor was set by a rebuild; what was pushed at or below it counts as covered."""
        self.cursor = cursor
        self._forget_pushes()
        self._is_open = False
        # What came after the W of the rebuild is read at once, by a plain page.
        self._is_plain_due = True

    # --- asked

    def take_pull(self, now: float) -> Pull | None:
        """The pull that is due, or None. The caller sends it; only one is open."""
        if self._is_open:
            return None
        if self._is_plain_due or self._is_hole_over(now):
            self._is_open, self._is_plain_due, self._hole_since = True, False, None
            self._is_held_open = False
            return Pull(self.cursor)
        if self._count and (self._count >= HELD_PUSHES or self._is_held_over(now)):
            self._is_open = self._is_held_open = True
            return Pull(self.cursor, self._end, self._count)
        return None

    def next_deadline(self) -> float | None:
        """When `take_pull` may have a new answer without anything arriving."""
        if self._is_open:
            return None
        deadlines = []
        if self._hole_since is not None:
            deadlines.append(self._hole_since + HOLE_WAIT_SECONDS)
        if self._count and self._uncovered_since is not None:
            deadlines.append(self._uncovered_since + HELD_SECONDS)
        return min(deadlines, default=None)

    def _continues(self, previous: MailboxSeq) -> bool:
        if self._count:
            return previous == self._end
        # The cursor is the watermark of the whole shard, so the user's entry before may lie below it.
        return 0 < previous <= self._end

    def _append(self, mailbox_seq: MailboxSeq) -> None:
        self._seqs.append(mailbox_seq)
        self._end = mailbox_seq
        self._count += 1

    def _link_early(self) -> None:
        for seq in sorted(self._early):
            if not self._continues(self._early[seq]):
                break
            del self._early[seq]
            self._append(seq)

    def _forget_pushes(self) -> None:
        self._end, self._count, self._seqs = self.cursor, 0, []
        self._early.clear()
        self._uncovered_since = self._hole_since = None

    def _is_hole_over(self, now: float) -> bool:
        return self._hole_since is not None and now - self._hole_since >= HOLE_WAIT_SECONDS

    def _is_held_over(self, now: float) -> bool:
        return self._uncovered_since is not None and now - self._uncovered_since >= HELD_SECONDS


class Reconnect:
    """How long to wait before the next attempt."""

    def __init__(self) -> None:
        self._failures = 0

    def on_end(self, *, lived_seconds: float) -> None:
        """A connection ended; `lived_seconds` counts from its login, 0 without one."""
        self._failures = 0 if lived_seconds >= CALM_SECONDS else self._failures + 1

    def delay_seconds(self, *, hint_ms: int, jitter: float) -> float:
        """`jitter` is a random number in [0, 1). The server's hint is the least; the jitter comes on top."""
        ceiling = min(RECONNECT_SECONDS_MAX, RECONNECT_SECONDS_FIRST * 2 ** min(self._failures - 1, 10))
        spread = jitter * ceiling if self._failures > 0 else 0.0
        if hint_ms:
            # Everybody got the same hint at the same moment: spread over as long again.
            return hint_ms / 1000 + jitter * max(hint_ms / 1000, spread)
        return spread


class Verdict(Enum):
    """What history says about a message whose acknowledgement never came."""

    FOUND = "found"
    ABSENT = "absent"
    OTHER_CONTENT = "other_content"
    READ_ON = "read_on"
    UNKNOWN = "unknown"


class SeenPage(NamedTuple):
    """What the verdict needs from one page of history, newest first."""

    is_found: bool
    oldest_reserved_at: Millis
    """0 for an empty page."""
    earliest_available_seq: Seq
    head_seq: Seq
    more: bool


def is_aged(*, first_sent_at: Millis, server_now: Millis) -> bool:
    """Whether a message sent first at that server time may no longer simply be repeated."""
    return first_sent_at > 0 and server_now - first_sent_at >= RESEND_AGE_MS


def judge_page(page: SeenPage, *, first_sent_at: Millis, retention_class: int, server_now: Millis) -> Verdict:
    """Whether the message is there, is provably not there, or history cannot tell."""
    if page.is_found:
        return Verdict.FOUND
    if retention_class == RetentionClass.EPHEMERAL and server_now - first_sent_at >= EPHEMERAL_LIFE_MS:
        return Verdict.UNKNOWN
    if page.head_seq == 0:
        return Verdict.ABSENT
    # Sequences follow reservation closely, clocks of two owners differ by less than this bound.
    if page.oldest_reserved_at and page.oldest_reserved_at < first_sent_at - CLOCK_SKEW_MS_MAX:
        return Verdict.ABSENT
    if page.more:
        return Verdict.READ_ON
    return Verdict.ABSENT if page.earliest_available_seq <= 1 else Verdict.UNKNOWN


class Gap(NamedTuple):
    """The half-open range (after_seq, head_seq] that only history can fill."""

    after_seq: Seq
    head_seq: Seq


def subtract_page(gap: Gap, *, first: Seq, last: Seq) -> list[Gap]:
    """What remains of a gap when history answered for first…last, both included."""
    rest = []
    if gap.after_seq < first - 1:
        rest.append(Gap(gap.after_seq, Seq(min(gap.head_seq, first - 1))))
    if last < gap.head_seq:
        rest.append(Gap(Seq(max(gap.after_seq, last)), gap.head_seq))
    return rest

"""Checks of what devices were shown: mailbox pages, pushes, and the state that a device ends with.

A page is right when it holds exactly the entries of the true mailbox in (after, covered_through]; where the
client said what it holds already and the server agreed, the range begins behind that. A push is right when
its entry stands where it says and the entry before it is not hidden; the place of a dispatch that a retry
repeated holds no entry, and a push must not name it. A cursor is right when it is what an earlier page of
the same device said: then the ranges of all pages join without a hole, and after the last drain each device
has read everything.
"""

from bisect import bisect_right
from dataclasses import dataclass, field

from tests.checker.history import Device, Held, Pull, Push, Pushed, Shown
from tests.checker.stores import explain, mailbox_of
from tests.checker.truth import Truth, UserMailbox
from tests.checker.verdict import Figures, Findings


@dataclass(slots=True)
class Cursor:
    """What a device was told."""

    user: str
    said: set[int] = field(default_factory=lambda: {0})
    """0, and covered_through of every page."""
    last: int = 0
    """Of the newest page."""
    is_rebuilt: bool = False
    """The server said once that it no longer has all: the rest comes from histories."""


class ShownChecks:
    """Takes pages and pushes one by one; `finish` asks whether every device has read everything."""

    def __init__(self, truth: Truth, findings: Findings, figures: Figures) -> None:
        self._truth = truth
        self._findings = findings
        self._figures = figures
        self._cursors: dict[str, Cursor] = {}

    # --- pages ---

    def on_pull(self, page: Pull) -> None:
        self._figures.operations["pull"][page.type] += 1
        if page.type != "ok":
            return
        cursor = self._cursors.get(page.device)
        if cursor is None:
            cursor = self._cursors[page.device] = Cursor(page.user)
        if page.after not in cursor.said:
            detail = f"pulled after {page.after}, which no page had said"
            self._findings.add("client", f"device {page.device}", detail)
        cursor.said.add(page.covered_through)
        cursor.last = page.covered_through
        cursor.is_rebuilt |= page.rebuild
        self._figures.deliveries += len(page.entries)
        mailbox = mailbox_of(self._truth, page.user)
        self._check_page(page, mailbox)
        self._check_moment(page.user, mailbox, page.covered_through, page.t)

    def _check_page(self, page: Pull, mailbox: UserMailbox) -> None:
        where = f"page of {page.user} after {page.after}"
        if page.covered_through < page.after and not page.rebuild:
            self._findings.add("mailbox", where, f"the cursor went back to {page.covered_through}")
        start = bisect_right(mailbox.seqs, page.after)
        end = bisect_right(mailbox.seqs, page.covered_through)
        held = page.held_count
        is_held_right = bool(held) and bisect_right(mailbox.seqs, page.held_through) - start == held
        # A page that only confirms what the device holds ends there, and may know of more behind it.
        confirms = is_held_right and not page.entries and page.covered_through == page.held_through
        last = page.entries[-1].mailbox_seq if page.entries else None
        if page.more and last != page.covered_through and not confirms:
            self._findings.add("mailbox", where, "a full page does not end at its last entry")
        expected = mailbox.entries[start:end]
        if page.entries == expected:
            return
        if is_held_right:
            expected = mailbox.entries[start + held : end]
        if page.rebuild:  # older days are gone; what is shown must be right all the same
            shown = {entry.mailbox_seq for entry in page.entries}
            expected = [entry for entry in expected if entry.mailbox_seq in shown]
        if page.entries != expected:
            explain(self._truth, page.user, page.entries, expected, self._findings, where)

    def _check_moment(self, user: str, mailbox: UserMailbox, through: int, t: int) -> None:
        """Everything up to here was durable, and W was not below."""
        count = bisect_right(mailbox.seqs, through)
        if count and mailbox.durable[count - 1] > t:
            detail = f"{user} saw mailbox {through} before its record was in the Outbox"
            self._findings.add("early-visible", f"mailbox of {user}", detail)
        if self._truth.samples.is_above_watermark(mailbox.shard, through, t):
            self._findings.add(
                "early-visible", f"mailbox of {user}", f"{through} was shown before W reached it"
            )

    # --- pushes ---

    def on_push(self, push: Push) -> None:
        events = push.events
        self._figures.operations["push"]["ok"] += 1
        self._figures.deliveries += len(events)
        if not events:
            return
        mailbox = mailbox_of(self._truth, push.user)
        place = mailbox.at(events[0].mailbox_seq)
        count = len(events)
        # Nearly every frame is a piece of the mailbox: one comparison instead of one per event.
        if place < 0 or [event[1:] for event in events] != mailbox.entries[place : place + count]:
            for event in events:
                self._check_place(push, event, mailbox)
        if place < 1 or [event[0] for event in events] != mailbox.seqs[place - 1 : place - 1 + count]:
            for event in events:
                if event.previous:
                    self._check_previous(push, event, mailbox)
        self._check_moment(push.user, mailbox, events[-1].mailbox_seq, push.t)

    def _check_place(self, push: Push, event: Pushed, mailbox: UserMailbox) -> None:
        place = mailbox.at(event.mailbox_seq)
        if place < 0 or mailbox.entries[place] != event[1:]:
            self._explain_pushed(push, event, mailbox.entries[place] if place >= 0 else None)

    def _check_previous(self, push: Push, event: Pushed, mailbox: UserMailbox) -> None:
        """Nothing stands between the two that a client would take for neighbours."""
        after = bisect_right(mailbox.seqs, event.previous)
        if after < len(mailbox.seqs) and mailbox.seqs[after] < event.mailbox_seq:
            self._findings.add(
                "mailbox", f"push to {push.user}", f"hides the entry before {event.mailbox_seq}"
            )

    def _explain_pushed(self, push: Push, event: Pushed, expected: Shown | None) -> None:
        """An echo has no entry of its own to be compared; anything else is wrong."""
        where, name = f"push to {push.user}", f"{event.conversation} seq {event.seq}"
        record = self._truth.record_at(event.conversation, event.seq)
        if record is None:
            self._findings.add("phantom", where, f"{name} is not in the Outbox")
        elif event.entry and event.entry != record.entry:
            self._findings.add("corrupt", where, f"{name} has entry {event.entry}, is {record.entry}")
        elif push.user not in record.parties:
            self._findings.add("mailbox", where, f"foreign: {name}")
        elif not event.entry and record.sender != push.user:
            self._findings.add("mailbox", where, f"the echo of {name} went to its recipient")
        elif expected is None or (expected.conversation, expected.seq) != (event.conversation, event.seq):
            self._findings.add("mailbox", where, f"{name} does not stand at {event.mailbox_seq}")

    # --- devices ---

    def on_device(self, device: Device) -> None:
        cursor = self._cursors.setdefault(device.device, Cursor(device.user))
        where = f"device {device.device}"
        if device.cursor != cursor.last:
            self._findings.add("client", where, f"cursor {device.cursor}, the last page said {cursor.last}")
        if device.held is None:
            return
        mailbox = mailbox_of(self._truth, device.user)
        below = mailbox.entries[: bisect_right(mailbox.seqs, device.cursor)]
        held = set(device.held)
        if len(held) == len(device.held) and held == {shown[1:] for shown in below}:
            return
        self._explain_held(device, device.held, [] if cursor.is_rebuilt else below, where)

    def _explain_held(self, device: Device, found: list[Held], below: list[Shown], where: str) -> None:
        """More than the mailbox says is fine as long as it is true: pushes come before pages."""
        held = {(message.conversation, message.seq) for message in found}
        if len(held) != len(found):
            self._findings.add("client", where, f"holds {len(found) - len(held)} messages twice")
        for message in found:
            record = self._truth.record_at(message.conversation, message.seq)
            if record is None or device.user not in record.parties:
                self._findings.add("phantom", where, f"holds {message.conversation} seq {message.seq}")
            elif record.entry != message.entry:
                self._findings.add("corrupt", where, f"holds {message.conversation} seq {message.seq}")
        for shown in below:
            if (shown.conversation, shown.seq) not in held:
                detail = f"does not hold {shown.conversation} seq {shown.seq} below its cursor"
                self._findings.add("client", where, detail)

    def finish(self) -> None:
        for device, cursor in self._cursors.items():
            seqs = mailbox_of(self._truth, cursor.user).seqs
            if seqs and cursor.last < seqs[-1]:
                detail = f"never read: {len(seqs) - bisect_right(seqs, cursor.last)} entries"
                self._findings.add("mailbox", f"device {device}", detail)

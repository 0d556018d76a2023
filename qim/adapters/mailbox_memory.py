"""The mailbox store in memory: the reference for the mailbox scripts, and the simulation's store.

It applies each call when the method is called and answers as an instance would that never loses anything.
Invariants, per shard: W only rises, by one record at a time, and only together with that record's completion;
the day never goes back; an entry above W belongs to a dispatch that is open. Several stores over one
`MailboxState` are several workers at one instance.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from qim.adapters.ownership_memory import MemoryOwnership, Owner, done
from qim.clock import Clock
from qim.ids import DispatchId, MailboxSeq, Millis, SlotId, TenantId, UserId
from qim.limits import (
    DAY_MS,
    DISPATCH_PROGRESS_LIFE_MS,
    EPHEMERAL_KEY_LIFE_MS,
    MAILBOX_DAYS,
    MAILBOX_KEY_LIFE_MS,
)
from qim.ports import Begun, MailboxPage, MailboxPageQuery, MailboxWrite, Materialised, ShardState
from qim.records import decode_entry

HOUR_MS: Final = 3_600_000

DONE = Materialised.DONE
NO_SEQ: Final = MailboxSeq(0)


class BoxName(NamedTuple):
    """One user's entries of one day."""

    slot: SlotId
    tenant: TenantId
    user: UserId
    day: int
    ephemeral: bool

    @property
    def expires_at(self) -> int:
        life = EPHEMERAL_KEY_LIFE_MS if self.ephemeral else MAILBOX_KEY_LIFE_MS
        return (self.day + 1) * DAY_MS + life


class Progress(NamedTuple):
    """How far one dispatch is; `state` as in the store: o open, f final, s skipped."""

    digest: bytes
    state: str
    day: int


@dataclass
class MailboxState:
    """One instance; shared by the stores of several workers in a simulation."""

    owners: dict[SlotId, Owner] = field(default_factory=dict)
    shards: dict[SlotId, ShardState] = field(default_factory=dict)
    days: dict[SlotId, dict[int, MailboxSeq]] = field(default_factory=dict)
    """Day → its last mailbox_seq, written when the day turned."""
    progress: dict[int, dict[DispatchId, Progress]] = field(default_factory=dict)
    """By hour of reserved_at."""
    progress_expires_at: dict[int, int] = field(default_factory=dict)
    boxes: dict[BoxName, dict[bytes, MailboxSeq]] = field(default_factory=dict)


class MemoryMailboxStore(MemoryOwnership):
    """`MailboxStore` of the port."""

    def __init__(self, clock: Clock, state: MailboxState | None = None) -> None:
        self.state = state or MailboxState()
        super().__init__(clock, self.state.owners)

    # --- shards ---

    def initialise_shards(
        self, bases: Mapping[SlotId, MailboxSeq], log_identity: bytes
    ) -> asyncio.Future[None]:
        for slot, base in bases.items():
            fresh = ShardState(NO_SEQ, base, 0, log_identity, DispatchId(b""))
            self.state.shards.setdefault(slot, fresh)
        return done(None)

    def load_shards(self, slots: Sequence[SlotId]) -> asyncio.Future[dict[SlotId, ShardState]]:
        shards = self.state.shards
        return done({slot: shards[slot] for slot in slots if slot in shards})

    # --- the fused path ---

    def materialise(
        self, expected: Mapping[SlotId, MailboxSeq], writes: Sequence[MailboxWrite]
    ) -> asyncio.Future[list[Materialised]]:
        answers = []
        stopped: set[SlotId] = set()
        off = {slot for slot, belief in expected.items() if belief != self._watermark_of(slot)}
        for slot in {write.slot for write in writes}:
            if slot in self.state.shards and not self._is_stale(slot):
                self._turn_day(slot)
        for write in writes:
            refused_before, is_off = write.slot in stopped, write.slot in off
            answer = self._materialise_one(write, is_behind=refused_before, is_off=is_off)
            if not answer.is_passed:
                stopped.add(write.slot)
            answers.append(answer)
        return done(answers)

    def _materialise_one(self, write: MailboxWrite, *, is_behind: bool, is_off: bool) -> Materialised:
        expected = MailboxSeq(-1) if is_off else self._watermark_of(write.slot)
        refusal = self._refusal(write, expected)
        if refusal is Materialised.STALE_OWNER:
            return refusal
        if is_behind:
            return Materialised.BEHIND
        if refusal is DONE:
            return self._passed(write)
        if refusal is not None:
            return refusal
        known = self._progress_of(write).get(write.dispatch_id)
        if known is not None and known.digest != write.digest:
            return Materialised.MISMATCH
        if known is not None and known.state == "o":
            return Materialised.OPEN
        if known is None:
            day = self.state.shards[write.slot].day
            self._note_progress(write, Progress(write.digest, "f", day))
            self._put(write, write.recipients, day)
        self._move(write)
        return DONE if known is None else Materialised.REPEAT

    def _passed(self, write: MailboxWrite) -> Materialised:
        """Looks under the current day only, as the script does: it is given no other key."""
        day = self.state.shards[write.slot].day
        name = BoxName(write.slot, write.tenant, write.recipients[0], day, write.ephemeral)
        stands_at = self.state.boxes.get(name, {}).get(write.entry)
        if stands_at is None:
            return Materialised.PASSED
        return DONE if stands_at == write.mailbox_seq else Materialised.REPEAT

    # --- the general path ---

    def begin_dispatch(self, write: MailboxWrite, expected: MailboxSeq) -> asyncio.Future[Begun]:
        refusal = self._refusal(write, expected)
        shard = self.state.shards.get(write.slot)
        if refusal is not None:
            stands = shard is not None and refusal is not Materialised.STALE_OWNER
            return done(Begun(refusal, shard.day if shard is not None and stands else 0))
        known = self._progress_of(write).get(write.dispatch_id)
        if known is None:
            known = Progress(write.digest, "o", self._turn_day(write.slot))
            self._note_progress(write, known)
        if known.digest != write.digest:
            return done(Begun(Materialised.MISMATCH, self.state.shards[write.slot].day))
        return done(Begun(Materialised.OPEN if known.state == "o" else DONE, known.day))

    def append_entries(
        self, write: MailboxWrite, day: int, recipients: Sequence[UserId]
    ) -> asyncio.Future[Materialised]:
        if self._is_stale(write.slot):
            return done(Materialised.STALE_OWNER)
        known = self._progress_of(write).get(write.dispatch_id)
        if known is None:
            return done(Materialised.GAP)
        if known.digest != write.digest:
            return done(Materialised.MISMATCH)
        if known.state == "o":
            if known.day != day:
                return done(Materialised.GAP)
            self._put(write, recipients, day)
        return done(DONE)

    def finish_dispatch(
        self, write: MailboxWrite, expected: MailboxSeq, *, skipped: bool = False
    ) -> asyncio.Future[Materialised]:
        refusal = self._refusal(write, expected)
        if refusal is not None:
            return done(refusal)
        known = self._progress_of(write).get(write.dispatch_id)
        if not skipped and known is None:
            return done(Materialised.GAP)
        if not skipped and known is not None and known.digest != write.digest:
            return done(Materialised.MISMATCH)
        if known is None or (known.state == "o" and known.digest == write.digest):
            day = self.state.shards[write.slot].day if known is None else known.day
            self._note_progress(write, Progress(write.digest, "s" if skipped else "f", day))
        self._move(write)
        return done(DONE)

    # --- reading ---

    def read_mailbox(self, queries: Sequence[MailboxPageQuery]) -> asyncio.Future[list[MailboxPage]]:
        return done([self._page(query) for query in queries])

    def _page(self, query: MailboxPageQuery) -> MailboxPage:
        shard = self.state.shards.get(query.slot)
        w = shard.watermark if shard is not None else NO_SEQ
        today = max(shard.day if shard is not None else 0, self._today())
        found = self._entries(query, range(today - MAILBOX_DAYS, today + 1))
        newest = max((seq for seq, _, _ in found if seq <= w), default=NO_SEQ)
        if query.after < self._floor(query.slot, today, shard) or query.after > w:
            return MailboxPage((), w, False, True, newest)
        visible = sorted(entry for entry in found if query.after < entry[0] <= w)
        if query.after < query.held_through <= w:
            held = sum(seq <= query.held_through for seq, _, _ in visible)
            if held == query.held_count:
                return MailboxPage((), query.held_through, newest > query.held_through, False, newest)
        page = _cut(visible, query)
        more = len(page) < len(visible)
        oldest = self.clock.now_ms() - DAY_MS
        kept = tuple(
            (seq, entry)
            for seq, entry, ephemeral in page
            if not ephemeral or decode_entry(entry).record.reserved_at > oldest
        )
        return MailboxPage(kept, page[-1][0] if more else w, more, False, newest)

    def holds_entry(
        self, tenant: TenantId, user: UserId, slot: SlotId, entry: bytes, reserved_at: Millis
    ) -> asyncio.Future[bool]:
        oldest = min(reserved_at // DAY_MS - 1, self._today())
        holds = any(
            entry in box
            for name, box in self.state.boxes.items()
            if name[:3] == (slot, tenant, user)
            and name.day >= oldest
            and name.expires_at > self.clock.now_ms()
        )
        return done(holds)

    def _entries(self, query: MailboxPageQuery, days: Iterable[int]) -> list[tuple[MailboxSeq, bytes, bool]]:
        now = self.clock.now_ms()
        names = (
            BoxName(query.slot, query.tenant, query.user, day, ephemeral)
            for day in days
            for ephemeral in (False, True)
        )
        return [
            (seq, entry, name.ephemeral)
            for name in names
            if name.expires_at > now
            for entry, seq in self.state.boxes.get(name, {}).items()
        ]

    def _floor(self, slot: SlotId, today: int, shard: ShardState | None) -> MailboxSeq:
        # Day 0: nothing was ever written there, whatever an operator skipped.
        if shard is not None and shard.day and today - shard.day > MAILBOX_DAYS:
            return shard.watermark
        noted = self.state.days.get(slot, {})
        return max((seq for day, seq in noted.items() if today - day > MAILBOX_DAYS), default=NO_SEQ)

    # --- what several methods share ---

    def _refusal(self, write: MailboxWrite, expected: MailboxSeq) -> Materialised | None:
        """DONE counts as one: nothing is left to do."""
        if self._is_stale(write.slot):
            return Materialised.STALE_OWNER
        shard = self.state.shards.get(write.slot)
        if shard is None:
            return Materialised.GAP
        if write.mailbox_seq <= shard.watermark:
            return DONE
        if expected != shard.watermark or write.mailbox_seq != max(shard.watermark + 1, shard.base):
            return Materialised.GAP
        return None

    def _watermark_of(self, slot: SlotId) -> MailboxSeq:
        shard = self.state.shards.get(slot)
        return NO_SEQ if shard is None else shard.watermark

    def _today(self) -> int:
        return self.clock.now_ms() // DAY_MS

    def _turn_day(self, slot: SlotId) -> int:
        shard = self.state.shards[slot]
        today = self._today()
        if shard.day >= today:
            return shard.day
        noted = self.state.days.setdefault(slot, {})
        past = [day for day in (*noted, shard.day) if today - day > MAILBOX_DAYS]
        if shard.watermark and shard.day:
            noted[shard.day] = shard.watermark
        for day in [day for day in noted if day < max(past, default=0)]:
            del noted[day]
        self.state.shards[slot] = shard._replace(day=today)
        return today

    def _progress_of(self, write: MailboxWrite) -> dict[DispatchId, Progress]:
        hour = write.reserved_at // HOUR_MS
        if self.state.progress_expires_at.get(hour, 0) <= self.clock.now_ms():
            self.state.progress.pop(hour, None)
        return self.state.progress.setdefault(hour, {})

    def _note_progress(self, write: MailboxWrite, progress: Progress) -> None:
        self._progress_of(write)[write.dispatch_id] = progress
        expires_at = self.clock.now_ms() + DISPATCH_PROGRESS_LIFE_MS
        self.state.progress_expires_at[write.reserved_at // HOUR_MS] = expires_at

    def _put(self, write: MailboxWrite, recipients: Iterable[UserId], day: int) -> None:
        for user in recipients:
            name = BoxName(write.slot, write.tenant, user, day, write.ephemeral)
            self.state.boxes.setdefault(name, {})[write.entry] = write.mailbox_seq

    def _move(self, write: MailboxWrite) -> None:
        shard = self.state.shards[write.slot]
        moved = shard._replace(watermark=write.mailbox_seq, dispatch_id=write.dispatch_id)
        self.state.shards[write.slot] = moved


def _cut(
    entries: Sequence[tuple[MailboxSeq, bytes, bool]], query: MailboxPageQuery
) -> Sequence[tuple[MailboxSeq, bytes, bool]]:
    """The page's share: at least one entry, so that a reader always gets on."""
    size = 0
    for at, (_, entry, _) in enumerate(entries):
        size += len(entry)
        if at == query.entries_max or (at and size > query.bytes_max):
            return entries[:at]
    return entries

"""The commit store in memory: the reference that the scripts are tested against, and the simulation's store.

It answers as an instance would that never loses anything, and applies each call when the method is called.
Invariants, per conversation: every sequence from 1 to `last` is either pending or committed; `head` is the
highest sequence with everything at or below it committed; a read mark never falls. The idempotency window is
the committed fact: it lives until exactly committed_at + 2 h and is dropped when it is next looked at.

`limit_bytes` gives the store a size, counted in record bytes, so that a test can fill it. Several stores over
one `CommitState` are several workers at one instance.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from qim.adapters.ownership_memory import MemoryOwnership, Owner, done
from qim.clock import Clock
from qim.ids import (
    SEQ_MAX,
    BucketId,
    ConversationId,
    GroupId,
    Millis,
    Offset,
    RequestId,
    Seq,
    SlotId,
    TenantId,
    UserId,
)
from qim.limits import BUCKETS_PER_SLOT, CLOCK_SKEW_MS_MAX, IDEMPOTENCY_WINDOW_MS
from qim.memberships import ChangeResult, Interval, MemberState, OperatorRequest, PlacedUser
from qim.ports import (
    Commit,
    CommitResult,
    Committed,
    HistoryPage,
    HistoryQuery,
    MessageKey,
    Pending,
    ReadMark,
    ReadMarkResult,
    Reservation,
    Reserved,
    ReserveResult,
)

Place = tuple[BucketId, TenantId, ConversationId]

_NO_SEQ: Final = Seq(0)
HISTORY_ENTRY_BYTES: Final = 16
"""What `read_history` counts for an entry beside its record."""


class Fact(NamedTuple):
    """What is known of a message key."""

    identity: bytes
    reserved_at: Millis
    seq: Seq
    committed_at: Millis
    """0 while the message is RECORDED."""


@dataclass
class Conversation:
    """One conversation; see the invariants of the module."""

    last: Seq = _NO_SEQ
    head: Seq = _NO_SEQ
    committed_ahead: set[int] = field(default_factory=set)
    records: dict[int, bytes] = field(default_factory=dict)
    read_marks: dict[UserId, Seq] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    """Sequences that never count as unread."""


@dataclass
class GroupState:
    """One group; owned by `membership_memory`, and read here when somebody sends to it."""

    group: GroupId
    name: str
    owner: UserId
    digest: bytes
    version: int
    intervals: dict[UserId, Interval]
    snapshots: dict[int, frozenset[PlacedUser]]
    event: MessageKey | None = None
    """Of the last change …"""
    event_seq: Seq = _NO_SEQ
    """… and its sequence."""

    def is_member(self, user: UserId) -> bool:
        interval = self.intervals.get(user)
        return interval is not None and interval.state is MemberState.MEMBER


class Remembered(NamedTuple):
    """The result of an operator's request, for 24 h."""

    request: OperatorRequest
    result: ChangeResult
    event: MessageKey | None
    expires_at: Millis


@dataclass
class CommitState:
    """One instance; shared by the stores of several workers in a simulation."""

    owners: dict[SlotId, Owner] = field(default_factory=dict)
    pending: dict[MessageKey, Fact] = field(default_factory=dict)
    committed: dict[MessageKey, Fact] = field(default_factory=dict)
    conversations: dict[Place, Conversation] = field(default_factory=dict)
    groups: dict[Place, GroupState] = field(default_factory=dict)
    announced: list[tuple[Place, int]] = field(default_factory=list)
    requests: dict[tuple[Place, RequestId], Remembered] = field(default_factory=dict)
    positions: dict[str, dict[SlotId, Offset]] = field(default_factory=dict)
    outbox_seen: dict[SlotId, Offset] = field(default_factory=dict)
    record_bytes: int = 0


class MemoryCommitStore(MemoryOwnership):
    """`CommitStore` of the port."""

    def __init__(self, clock: Clock, state: CommitState | None = None, *, limit_bytes: int = 0) -> None:
        self.state = state or CommitState()
        super().__init__(clock, self.state.owners)
        self.limit_bytes = limit_bytes

    # --- the message path ---

    def reserve(self, items: Sequence[Reservation]) -> asyncio.Future[list[ReserveResult]]:
        if self.is_full:
            return done([_refused(Reserved.FULL)] * len(items))
        return done([self._reserve_one(item) for item in items])

    @property
    def is_full(self) -> bool:
        return bool(self.limit_bytes) and self.state.record_bytes >= self.limit_bytes

    def _reserve_one(self, item: Reservation) -> ReserveResult:
        return self.judge(item) or self.allocate(item)

    def judge(self, item: Reservation) -> ReserveResult | None:
        """What is known of a message or forbids it; None: it is new."""
        fact = self.fact_of(item.key)
        if self._is_stale(_slot(item.key.bucket)):
            return _refused(Reserved.STALE_OWNER)
        if fact is not None and fact.identity != item.identity:
            return _refused(Reserved.CONFLICT)
        if fact is not None and fact.committed_at:
            return ReserveResult(Reserved.COMMITTED, fact.seq, fact.reserved_at, b"")
        if fact is not None:
            record = self._conversation(item.key).records[fact.seq]
            return ReserveResult(Reserved.RECORDED, fact.seq, fact.reserved_at, record)
        if item.membership_version and (refusal := self._refusal_of_group(item)):
            return _refused(refusal)
        if abs(item.reserved_at - self.clock.now_ms()) > CLOCK_SKEW_MS_MAX:
            return _refused(Reserved.CLOCK)
        return None

    def _refusal_of_group(self, item: Reservation) -> Reserved | None:
        group = self.state.groups.get(item.key[:3])
        if group is None or not group.is_member(item.key.sender):
            return Reserved.NOT_MEMBER
        return None if group.version == item.membership_version else Reserved.MEMBERSHIP_CHANGED

    def owns(self, bucket: BucketId) -> bool:
        """Whether our epoch of its slot is still the newest."""
        return not self._is_stale(_slot(bucket))

    def has_unfinished(self, key: MessageKey) -> bool:
        """Whether the conversation of this message holds sequences above its visible head."""
        conversation = self._conversation(key)
        return conversation.last != conversation.head

    def allocate(self, item: Reservation) -> ReserveResult:
        """The next sequence of its conversation for a message that `judge` found new."""
        conversation = self._conversation(item.key)
        if conversation.last >= SEQ_MAX:
            return _refused(Reserved.EXHAUSTED)
        conversation.last = Seq(conversation.last + 1)
        conversation.records[conversation.last] = item.record
        self.state.record_bytes += len(item.record)
        self.state.pending[item.key] = Fact(item.identity, item.reserved_at, conversation.last, Millis(0))
        return ReserveResult(Reserved.NEW, conversation.last, item.reserved_at, b"")

    def mark_committed(self, items: Sequence[Commit]) -> asyncio.Future[list[CommitResult]]:
        now = self.clock.now_ms()
        return done([self.mark_one(item, now) for item in items])

    def mark_one(self, item: Commit, now: Millis) -> CommitResult:
        if self._is_stale(_slot(item.key.bucket)):
            return CommitResult(Committed.STALE_OWNER, Millis(0))
        fact = self.fact_of(item.key)
        if fact is None or fact[:3] != (item.identity, item.reserved_at, item.seq):
            return CommitResult(Committed.NOT_PENDING, Millis(0))
        if fact.committed_at:
            return CommitResult(Committed.ALREADY, fact.committed_at)
        del self.state.pending[item.key]
        self.state.committed[item.key] = fact._replace(committed_at=now)
        conversation = self._conversation(item.key)
        conversation.committed_ahead.add(item.seq)
        while conversation.head + 1 in conversation.committed_ahead:
            conversation.head = Seq(conversation.head + 1)
            conversation.committed_ahead.remove(conversation.head)
        if not item.control:
            mark = conversation.read_marks.get(item.key.sender, Seq(0))
            conversation.read_marks[item.key.sender] = max(mark, item.seq)
        if item.offset > self.state.outbox_seen.get(item.partition, Offset(-1)):
            self.state.outbox_seen[item.partition] = item.offset
        return CommitResult(Committed.COMMITTED, now)

    # --- recovery, reads and marks ---

    def read_pending(
        self, buckets: Sequence[BucketId], *, older_than_ms: int, entries_max: int
    ) -> asyncio.Future[list[Pending]]:
        now = self.clock.now_ms()
        found = [
            Pending(key, fact.identity, fact.seq, fact.reserved_at, self._conversation(key).records[fact.seq])
            for key, fact in self.state.pending.items()
            if key.bucket in buckets and now - fact.reserved_at > older_than_ms
        ]
        return done(found[:entries_max])

    def read_history(self, queries: Sequence[HistoryQuery]) -> asyncio.Future[list[HistoryPage]]:
        return done([self._history_page(query) for query in queries])

    def _history_page(self, query: HistoryQuery) -> HistoryPage:
        conversation = self.state.conversations.get((query.bucket, query.tenant, query.conversation))
        if conversation is None:
            return HistoryPage((), Seq(1), Seq(0), False)
        above = min(conversation.head, query.before_seq - 1) if query.before_seq else conversation.head
        walk = range(query.after_seq + 1, above + 1)
        page: list[tuple[Seq, bytes]] = []
        page_bytes = 0
        is_full = False
        for seq in walk if query.after_seq else reversed(walk):
            record = conversation.records[seq]
            page_bytes += len(record) + HISTORY_ENTRY_BYTES
            is_full = bool(page) and (len(page) >= query.entries_max or page_bytes > query.bytes_max)
            if is_full:
                break
            page.append((Seq(seq), record))
        newest_first = tuple(sorted(page, reverse=True))
        return HistoryPage(newest_first, Seq(1), conversation.head, is_full)

    def mark_read(self, items: Sequence[ReadMark]) -> asyncio.Future[list[ReadMarkResult]]:
        return done([self._mark_read_one(item) for item in items])

    def _mark_read_one(self, item: ReadMark) -> ReadMarkResult:
        if self._is_stale(_slot(item.bucket)):
            return ReadMarkResult(True, Seq(0), 0)
        place = (item.bucket, item.tenant, item.conversation)
        conversation = self.state.conversations.get(place, Conversation())
        last, head = conversation.last, conversation.head
        if item.upper_seq is not None:
            last, head = min(last, item.upper_seq), min(head, item.upper_seq)
        mark = max(conversation.read_marks.get(item.user, Seq(0)), min(item.read_seq, last))
        if mark:
            conversation.read_marks[item.user] = mark
        skipped = sum(mark < seq <= head for seq in conversation.skipped)
        return ReadMarkResult(False, mark, max(0, head - mark - skipped))

    # --- positions, guards ---

    def load_positions(
        self, group: str, partitions: Sequence[SlotId]
    ) -> asyncio.Future[dict[SlotId, Offset]]:
        return done(_chosen(self.state.positions.get(group, {}), partitions))

    def store_positions(self, group: str, positions: Mapping[SlotId, Offset]) -> asyncio.Future[None]:
        stored = self.state.positions.setdefault(group, {})
        for slot, offset in positions.items():
            stored[slot] = max(offset, stored.get(slot, offset))
        return done(None)

    def load_outbox_seen(self, partitions: Sequence[SlotId]) -> asyncio.Future[dict[SlotId, Offset]]:
        return done(_chosen(self.state.outbox_seen, partitions))

    def load_last_seq(
        self, conversations: Sequence[tuple[BucketId, TenantId, ConversationId]]
    ) -> asyncio.Future[list[Seq]]:
        nothing = Conversation()
        return done([self.state.conversations.get(place, nothing).last for place in conversations])

    def memory_used_ratio(self) -> asyncio.Future[float]:
        return done(self.state.record_bytes / self.limit_bytes if self.limit_bytes else 0.0)

    def _conversation(self, key: MessageKey) -> Conversation:
        return self.state.conversations.setdefault((key.bucket, key.tenant, key.conversation), Conversation())

    def fact_of(self, key: MessageKey) -> Fact | None:
        fact = self.state.committed.get(key)
        if fact is not None and self.clock.now_ms() > fact.committed_at + IDEMPOTENCY_WINDOW_MS:
            del self.state.committed[key]
            fact = None
        return fact or self.state.pending.get(key)


def _slot(bucket: BucketId) -> SlotId:
    return SlotId(bucket // BUCKETS_PER_SLOT)


def _refused(outcome: Reserved) -> ReserveResult:
    return ReserveResult(outcome, Seq(0), Millis(0), b"")


def _chosen(offsets: Mapping[SlotId, Offset], partitions: Sequence[SlotId]) -> dict[SlotId, Offset]:
    return {slot: offsets[slot] for slot in partitions if slot in offsets}

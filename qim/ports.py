"""The ports: what the roles may ask of a log and of the stores, and what is promised in return.

Common to all methods that return an awaitable: **the request is issued when the method is called**, in
call order, and awaiting gives its results. So a caller that calls A and then B on one port knows that A
is applied first, without waiting for A. Results are per item, in the order of the items. Errors:

    StoreUnknown   the outcome is unknown; repeat the same call with the same identity
    StoreRefused   proved: nothing was written
    StoreBroken    the store contradicts itself; the slot stops

Refusals of single items are results, never exceptions: one bad item must not fail its neighbours.
Every method is safe to repeat with the same arguments: it changes nothing and gives the same answer.

Adapters: `commits_redis`/`commits_memory`, `mailbox_redis`/`mailbox_memory`,
`commitlog_redis`/`commitlog_memory`. One adapter object speaks to one instance. A memory adapter is a
real adapter: the simulation runs on it, and the Lua scripts are tested against it. The port of groups stands
in `memberships.py`.
"""

from collections.abc import Awaitable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import msgspec

from qim.ids import (
    BootId,
    BucketId,
    ClientMessageId,
    ConversationId,
    DispatchId,
    Epoch,
    MailboxSeq,
    Millis,
    Offset,
    Seq,
    SlotId,
    TenantId,
    UserId,
)

# --- ownership ---------------------------------------------------------------------------------------


class SlotClaim(NamedTuple):
    """Who claims which slots. `take_over` is the operator's word that the other supervisor is dead."""

    slots: tuple[SlotId, ...]
    boot: BootId
    supervisor: bytes
    """16 bytes, one per supervisor process and host: `host name` is kept in `label`."""
    label: str
    """Host name, for the message of a refusal."""
    placement: bytes
    take_over: bool = False
    is_refresh: bool = False
    """Of slots that this boot id owns already: it takes nothing from anybody, however late it arrives."""


class ClaimRefusal(NamedTuple):
    slot: SlotId
    reason: str
    """`fresh`: another supervisor stamped it less than 10 s ago; `placement`: other map, not released;
    `lost`: a refresh found another owner, none, or its own release."""
    label: str
    """Host name of the holder."""


class ClaimResult(NamedTuple):
    epochs: dict[SlotId, Epoch]
    refusals: tuple[ClaimRefusal, ...]
    """When not empty nothing was claimed."""


class SlotOwnership(Protocol):
    """Owner epochs of one instance (core and mailbox alike)."""

    def claim(self, claim: SlotClaim) -> Awaitable[ClaimResult]:
        """Same boot id: same epochs, the stamp is refreshed. Another boot id: epoch + 1, or a refusal.

        All slots of the claim or none. Refreshed every 3 s by the owner. The adapter remembers the epochs
        and sends them with every script that changes state.
        """
        ...

    def release(self, claim: SlotClaim) -> Awaitable[None]:
        """Marks the slots released, if this boot id still owns them; then any placement may claim them."""
        ...


# --- commit store (core) -----------------------------------------------------------------------------


class MessageKey(NamedTuple):
    """The identity of a send: who says what id in which conversation."""

    bucket: BucketId
    tenant: TenantId
    conversation: ConversationId
    sender: UserId
    client_message_id: ClientMessageId


class Reservation(msgspec.Struct, frozen=True, gc=False):
    """One message that asks for a sequence."""

    key: MessageKey
    identity: bytes
    """36 bytes, `records.identity_digest`."""
    record: bytes
    """Encoded MessageRecord."""
    reserved_at: Millis
    expires_at: Millis
    """0, or when the record must be collected (shorter retention than the hot window)."""
    outbox_frame: bytes = b""
    """`records.build_outbox_frame`; for `OneStepCommits` only."""
    membership_version: int = 0
    """In a group: the version whose members the record names, compared while the sequence is given."""


class Reserved(Enum):
    NEW = "new"
    """A sequence was allocated, the message is RECORDED."""
    DURABLE = "durable"
    """From `OneStepCommits`: new, in the Outbox and COMMITTED."""
    TWO_STEPS = "two_steps"
    """From `OneStepCommits`: nothing was written, it must be reserved and appended apart."""
    RECORDED = "recorded"
    """Known and not finished: coordinates and the stored bytes come back."""
    COMMITTED = "committed"
    """Known and acknowledged: its coordinates."""
    CONFLICT = "conflict"
    STALE_OWNER = "stale_owner"
    CLOCK = "clock"
    """reserved_at is more than 10 s from the instance's TIME."""
    FULL = "full"
    """The store has no memory left; nothing was written."""
    EXHAUSTED = "exhausted"
    """The conversation has reached 2^53 − 1."""
    NOT_MEMBER = "not_member"
    """The sender is not in the group now, or there is no such group."""
    MEMBERSHIP_CHANGED = "membership_changed"
    """The group is at another version: plan anew with its members."""


class ReserveResult(msgspec.Struct, frozen=True, gc=False):
    """What became of one reservation."""

    outcome: Reserved
    seq: Seq
    """0 for a refusal."""
    reserved_at: Millis
    """The message's time, the same in every repeat."""
    record: bytes
    """Stored bytes for RECORDED, otherwise empty."""


class Commit(NamedTuple):
    """One message whose Outbox record is durable."""

    key: MessageKey
    identity: bytes
    seq: Seq
    reserved_at: Millis
    control: bool
    """Control messages raise no read mark."""
    partition: SlotId
    """Outbox partition that holds it …"""
    offset: Offset
    """… and where; -1 when the log did not say."""


class Committed(Enum):
    COMMITTED = "committed"
    ALREADY = "already"
    NOT_PENDING = "not_pending"
    STALE_OWNER = "stale_owner"


class CommitResult(NamedTuple):
    outcome: Committed
    committed_at: Millis
    """TIME of the instance at the first stamp; 0 where nothing is committed."""


class Pending(NamedTuple):
    """A RECORDED message as the recoverer finds it."""

    key: MessageKey
    identity: bytes
    seq: Seq
    reserved_at: Millis
    record: bytes


class HistoryQuery(NamedTuple):
    tenant: TenantId
    conversation: ConversationId
    bucket: BucketId
    before_seq: Seq
    """Exclusive; 0 = not given. With both 0: the newest page."""
    after_seq: Seq
    """Exclusive; 0 = not given. The page holds the lowest sequences above it."""
    entries_max: int
    bytes_max: int


class HistoryPage(NamedTuple):
    records: tuple[tuple[Seq, bytes], ...]
    """Newest first, only sequences up to the visible head."""
    earliest_available_seq: Seq
    head_seq: Seq
    more: bool
    """More records lie further in the direction of the walk."""


class ReadMark(NamedTuple):
    tenant: TenantId
    conversation: ConversationId
    bucket: BucketId
    user: UserId
    read_seq: Seq
    upper_seq: Seq | None = None
    """The last sequence that the user may see, of who has left a group; None: up to the visible head."""


class ReadMarkResult(NamedTuple):
    stale_owner: bool
    read_seq: Seq
    """After the call: never lowered, not raised above the last allocated sequence or `upper_seq`."""
    unread: int
    """Above the mark, up to the visible head or `upper_seq`."""


class CommitStore(SlotOwnership, Protocol):
    """Sequences, idempotency, commit facts, hot history and read marks of one core instance."""

    def reserve(self, items: Sequence[Reservation]) -> Awaitable[list[ReserveResult]]:
        """Decides each item against the store and the run's own earlier items, then writes.

        After return of NEW: sequence, record and pending fact are durable together. A refusal consumed
        no sequence. The same key twice in one call: the second sees the first as RECORDED (or CONFLICT).
        """
        ...

    def mark_committed(self, items: Sequence[Commit]) -> Awaitable[list[CommitResult]]:
        """Moves RECORDED to COMMITTED, raises head and the sender's read mark, starts the 2 h window.

        The caller may send ACKs once this was *called*: the request precedes every later read on this port.
        """
        ...

    def read_pending(
        self, buckets: Sequence[BucketId], *, older_than_ms: int, entries_max: int
    ) -> Awaitable[list[Pending]]:
        """RECORDED messages of the buckets whose reserved_at is older than that by the instance's TIME."""
        ...

    def read_history(self, queries: Sequence[HistoryQuery]) -> Awaitable[list[HistoryPage]]:
        """One page per query. Sees every `mark_committed` called before it."""
        ...

    def mark_read(self, items: Sequence[ReadMark]) -> Awaitable[list[ReadMarkResult]]:
        """Raises read marks, never lowers them, clamps to the last allocated sequence."""
        ...

    def load_positions(self, group: str, partitions: Sequence[SlotId]) -> Awaitable[dict[SlotId, Offset]]:
        """Stored positions of a consumer group; a partition without one is absent."""
        ...

    def store_positions(self, group: str, positions: Mapping[SlotId, Offset]) -> Awaitable[None]:
        """Durable on return. Only rises: a lower value than the stored one changes nothing."""
        ...

    def load_outbox_seen(self, partitions: Sequence[SlotId]) -> Awaitable[dict[SlotId, Offset]]:
        """Highest Outbox offset marked committed here per partition (guard "behind its Outbox")."""
        ...

    def load_last_seq(
        self, conversations: Sequence[tuple[BucketId, TenantId, ConversationId]]
    ) -> Awaitable[list[Seq]]:
        """Last allocated sequence of each conversation, 0 where none; for the same guard and the audit."""
        ...

    def memory_used_ratio(self) -> Awaitable[float]:
        """Used ÷ maxmemory, 0 where no limit is set. Asked once a second, not per message."""
        ...


class OneStepCommits(Protocol):
    """Reserve, append and commit in one step, where one server holds the conversations and the Outbox."""

    def commit(self, items: Sequence[Reservation], partition: SlotId) -> Awaitable[list[ReserveResult]]:
        """As `CommitStore.reserve`, with DURABLE in place of NEW, or TWO_STEPS where it cannot be done.

        The same key twice in one call: the second sees the first as COMMITTED (or CONFLICT). Readers of the
        partition are woken. StoreUnknown: each item was done wholly or not at all; nothing stays RECORDED.
        """
        ...


# --- mailbox store -----------------------------------------------------------------------------------


class ShardState(NamedTuple):
    """What a shard's reader needs to start."""

    watermark: MailboxSeq
    """0: nothing finished yet."""
    base: MailboxSeq
    """mailbox_seq = base + offset; ≥ 1; 0 when the shard was never initialised."""
    day: int
    """The shard's current day (TIME ÷ 86,400,000), never goes back."""
    log_identity: bytes
    dispatch_id: DispatchId
    """Of the record at W; empty at the start."""


class MailboxWrite(msgspec.Struct, frozen=True, gc=False):
    """One dispatch record to be materialised."""

    slot: SlotId
    mailbox_seq: MailboxSeq
    dispatch_id: DispatchId
    digest: bytes
    reserved_at: Millis
    tenant: TenantId
    recipients: tuple[UserId, ...]
    entry: bytes
    ephemeral: bool


class Materialised(Enum):
    DONE = "done"
    """Entries are there once, W is at this record."""
    REPEAT = "repeat"
    """The fused path met a dispatch again: W is at or past this record, and no entry stands here."""
    PASSED = "passed"
    """W is past this record, and none of today's entries is its own: it is one of another day, or a repeat of
    one, or was skipped. Only the mailbox shows whether an entry stands here."""
    STALE_OWNER = "stale_owner"
    GAP = "gap"
    """W is not where the caller believes; nothing of this record was written."""
    MISMATCH = "mismatch"
    """Same dispatch id, other digest: the shard must stop."""
    OPEN = "open"
    """The general path has begun this record; finish it there."""
    BEHIND = "behind"
    """An earlier record of this shard in the same call was refused."""

    @property
    def is_passed(self) -> bool:
        """W is at the record or past it."""
        is_done = self is Materialised.DONE
        return is_done or self is Materialised.REPEAT or self is Materialised.PASSED


class MailboxPageQuery(NamedTuple):
    tenant: TenantId
    user: UserId
    slot: SlotId
    after: MailboxSeq
    entries_max: int
    bytes_max: int
    held_through: MailboxSeq
    held_count: int


class MailboxPage(NamedTuple):
    entries: tuple[tuple[MailboxSeq, bytes], ...]
    covered_through: MailboxSeq
    """W on the last page, else the last entry's mailbox_seq; held_through when those were confirmed."""
    more: bool
    rebuild: bool
    newest: MailboxSeq
    """Newest entry of the user at or below W; 0 = none."""


class MailboxStore(SlotOwnership, Protocol):
    """Mailboxes and watermarks of one mailbox instance."""

    def initialise_shards(self, bases: Mapping[SlotId, MailboxSeq], log_identity: bytes) -> Awaitable[None]:
        """Writes W = 0 and the base where no state exists; for `init` and the operator only."""
        ...

    def load_shards(self, slots: Sequence[SlotId]) -> Awaitable[dict[SlotId, ShardState]]:
        """A slot without state is absent: the reader refuses to start there."""
        ...

    def materialise(
        self, expected: Mapping[SlotId, MailboxSeq], writes: Sequence[MailboxWrite]
    ) -> Awaitable[list[Materialised]]:
        """The fused path: check, entries, completion, W, one step per run. `expected` is W before the call,
        per slot; records of one slot are consecutive and in order. W already at or past a record: DONE,
        REPEAT or PASSED; so a run that overlaps what is done goes on behind it. Otherwise a W that is not the
        expected one is a GAP.
        """
        ...

    def begin_dispatch(self, write: MailboxWrite, expected: MailboxSeq) -> Awaitable["Begun"]:
        """The general path, step 1: fixes digest and day of the dispatch. Changes no entry and not W."""
        ...

    def append_entries(
        self, write: MailboxWrite, day: int, recipients: Sequence[UserId]
    ) -> Awaitable[Materialised]:
        """Step 2, any order, ≤ 64 recipients a call; the same entry twice is one member."""
        ...

    def finish_dispatch(
        self, write: MailboxWrite, expected: MailboxSeq, *, skipped: bool = False
    ) -> Awaitable[Materialised]:
        """Step 3: completion and W in one step, once all appends are DONE. `skipped`: an operator's word."""
        ...

    def read_mailbox(self, queries: Sequence[MailboxPageQuery]) -> Awaitable[list[MailboxPage]]:
        """Pages of entries in (after, W], in mailbox_seq order."""
        ...

    def holds_entry(
        self, tenant: TenantId, user: UserId, slot: SlotId, entry: bytes, reserved_at: Millis
    ) -> Awaitable[bool]:
        """Whether any kept day of this mailbox holds the entry; for `redeliver` and the audit."""
        ...


class Begun(NamedTuple):
    outcome: Materialised
    """OPEN: go on with the appends; DONE: already final at this record, W moved or may be finished."""
    day: int


# --- commit log (Outbox, dispatch) -------------------------------------------------------------------


class LogRecord(msgspec.Struct, frozen=True, gc=False):
    """One record of a partition."""

    partition: SlotId
    offset: Offset
    data: bytes


class Watermarks(NamedTuple):
    low: Offset
    """First offset that can be read."""
    high: Offset
    """Offset that the next record will get."""

    def behind(self, position: Offset) -> int:
        """Records after the last finished one; a position of -1 has finished nothing."""
        return self.high - 1 - position


class LogReader(Protocol):
    """A cursor over fixed partitions. Accepts only the next position of each."""

    def next_batch(self, *, records_max: int, bytes_max: int) -> Awaitable[list[LogRecord]]:
        """Waits until at least one record is there; order per partition is offset order.

        Raises PartitionStopped, naming the partition, when one jumps, ends below the reader's position or
        holds what cannot be read; the others are read on.
        """
        ...

    def pause(self, partition: SlotId) -> None:
        """No records of this partition until `resume`; idempotent."""
        ...

    def resume(self, partition: SlotId) -> None: ...

    def seek(self, partition: SlotId, position: Offset) -> None:
        """Goes on behind `position` (the last finished record; -1 = from the first)."""
        ...

    async def close(self) -> None: ...


class CommitLog(Protocol):
    """One of the two logs: 64 partitions of durable records with dense offsets per partition."""

    def append(self, records: Sequence[tuple[SlotId, bytes]]) -> Awaitable[list[Offset | None]]:
        """Durable on return where an offset is given; None = unknown, append the same record again.

        Records of one partition keep their order inside a call. Several producers may share a partition.
        """
        ...

    def open_reader(self, positions: Mapping[SlotId, Offset]) -> LogReader:
        """A reader behind the given positions (last finished; -1 = from the first record)."""
        ...

    def watermarks(self, partitions: Sequence[SlotId]) -> Awaitable[dict[SlotId, Watermarks]]:
        """Ends of each partition; one that holds something else than a log is left out."""
        ...

    def read(self, partition: SlotId, offset: Offset, *, records_max: int) -> Awaitable[list[LogRecord]]:
        """Records at and above `offset`, for guards, audit and operators; not the hot path."""
        ...

    def identity(self) -> Awaitable[bytes]:
        """16 bytes given at creation; another value means another log."""
        ...

    def trim(self, bounds: Mapping[SlotId, Offset]) -> Awaitable[None]:
        """Drops records below the bound of each partition; the record at the bound stays."""
        ...

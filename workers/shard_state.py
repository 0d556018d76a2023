"""State of one mailbox shard, and what travels through the mailbox role.

    watermark   the newest W that the store has confirmed
    sent        the W that it will have when everything issued succeeds; sent ≥ watermark
    queue       records for the serial path, directly behind `sent`; while it holds any, no run names it
    held        the partition is paused and what was read of it is forgotten; it comes back at W, or stays
                while `stopped` says why

Only the loop changes a shard, and only `workers/shards.py`, `workers/pauses.py` and `workers/serial.py` do. A
shard lost with its process is built again from the store: nothing here is durable, and nothing needs to be.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from qim.domain import mailbox as rules
from qim.domain.presence import Session
from qim.ids import DeviceId, DispatchId, MailboxSeq, Offset, SlotId, TenantId, UserId, WorkerId
from qim.ports import MailboxPage, MailboxPageQuery, MailboxWrite, Materialised
from qim.wire.link import PushedTo


class PresenceView(Protocol):
    """What the mailbox asks of the presence of its users."""

    def sessions_of(self, tenant: TenantId, user: UserId, /) -> Sequence[Session]: ...

    def advance(self, tenant: TenantId, user: UserId, mailbox_seq: MailboxSeq, /) -> MailboxSeq:
        """Notes the user's newest entry, gives the one before it; 0 = not known."""
        ...


class Pusher(Protocol):
    """Takes an entry to sessions on one worker. Never raises and never waits: a push may be lost."""

    def push(self, worker: WorkerId, targets: list[PushedTo], entry: bytes, /) -> None: ...


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """A record on its way into mailboxes, and who sent it."""

    write: MailboxWrite
    sender: UserId
    device: DeviceId

    @property
    def recipients(self) -> tuple[UserId, ...]:
        return self.write.recipients


class StoppedShard(NamedTuple):
    """Where a shard stands still and why."""

    offset: Offset
    """Of the record that cannot be finished; W − base + 1."""
    dispatch_id: DispatchId
    """Empty where no record could be read."""
    reason: str


class Shard:
    """State of one shard; see the invariants above."""

    __slots__ = (
        "alone", "attempts", "base", "doubtful", "held", "in_flight", "overflowed", "queue", "reload",
        "retry_at", "sent", "serving", "slot", "stopped", "watermark",
    )  # fmt: skip

    def __init__(self, slot: SlotId, *, base: MailboxSeq, watermark: MailboxSeq) -> None:
        self.slot = slot
        self.base = base
        self.watermark = watermark
        self.sent = watermark
        self.in_flight = 0
        """Records issued in runs and not answered."""
        self.doubtful: list[Delivery] = []
        """Of calls whose outcome is not known, oldest first; forgotten when the reader goes back to W."""
        self.held = False
        self.reload = False
        """W must be read from the store before going on: it was not where we believed."""
        self.attempts = 0
        self.retry_at = 0.0
        self.alone = False
        """The next record goes through the serial path, so that an error names this shard only."""
        self.queue: deque[Delivery] = deque()
        self.serving = False
        """A serial lane works on the queue."""
        self.overflowed = False
        """The queue was full, the partition is paused until it is empty."""
        self.stopped: StoppedShard | None = None

    @property
    def position(self) -> Offset:
        return rules.position_of(base=self.base, watermark=self.watermark)

    def offset_of(self, mailbox_seq: MailboxSeq) -> Offset:
        return Offset(mailbox_seq - self.base)


def build_delivery(shard: Shard, offset: Offset, data: bytes) -> Delivery:
    """Reads a dispatch record as the write that the store is asked for. Raises RecordCorrupt."""
    dispatch = rules.read_dispatch(data, shard.slot)
    header = dispatch.header
    write = MailboxWrite(
        shard.slot, rules.mailbox_seq_of(base=shard.base, offset=offset), dispatch.dispatch_id,
        header.dispatch_digest, header.reserved_at, header.tenant, dispatch.recipients, dispatch.entry,
        header.ephemeral,
    )  # fmt: skip
    return Delivery(write, header.sender, header.sender_device)


def query_of_place(write: MailboxWrite) -> MailboxPageQuery:
    """Shows the first entry at or behind the place of a record; a page holds one whatever its size."""
    before = MailboxSeq(write.mailbox_seq - 1)
    return MailboxPageQuery(write.tenant, write.recipients[0], write.slot, before, 1, 1, MailboxSeq(0), 0)


def outcome_of_place(write: MailboxWrite, page: MailboxPage) -> Materialised:
    """Of a record that W has passed: DONE where its entry stands at its place, else REPEAT."""
    stands = page.entries[:1] == ((write.mailbox_seq, write.entry),)
    return Materialised.DONE if stands else Materialised.REPEAT

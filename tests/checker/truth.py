"""What must be true, computed from the logs alone.

The Outbox says which message has which sequence. The dispatch log says which mailbox sequence it has for
whom: the first record of each dispatch id counts, later ones are repeats of a retry and change nothing. From
both follow, without any search, the conversation as history must show it and the mailbox as every page must
show it. All other checks are comparisons with slices of these lists, so most of a large history is judged by
one list comparison per page.

`durable` beside each list is the running maximum of the moment before which a record was certainly not in the
Outbox; whoever shows it earlier has shown it too early. A running maximum is right because a page or a head
covers everything below its end.

Nothing is judged here. The first record of a sequence is taken as the true one; `stores.py` reports the rest.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import TypeAlias

from tests.checker.history import (
    Dispatch,
    Fact,
    Mailbox,
    Outbox,
    Progress,
    Sample,
    Shard,
    Shown,
    Skip,
    StoreRead,
)

MessageKey: TypeAlias = tuple[str, str, str]
"""conversation, sender, client_message_id"""


@dataclass
class StoreReads:
    """The reads of the stores, sorted by kind; both logs by partition and offset."""

    outbox: list[Outbox] = field(default_factory=list)
    dispatches: list[Dispatch] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    shards: dict[int, Shard] = field(default_factory=dict)
    mailboxes: dict[str, list[Shown]] = field(default_factory=dict)
    progress: dict[str, str] = field(default_factory=dict)
    skips: list[Skip] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


@dataclass
class Conversation:
    parties: tuple[str, str]
    records: dict[int, Outbox] = field(default_factory=dict)
    entries: list[tuple[int, str]] = field(default_factory=list)
    """(seq, entry) from 1 to the first hole."""
    durable: list[int] = field(default_factory=list)
    durable_at: dict[int, int] = field(default_factory=dict)
    """Sequence → the moment before which its first record was certainly not in the Outbox."""

    @property
    def last(self) -> int:
        return max(self.records, default=0)


@dataclass
class UserMailbox:
    """What the mailbox of one user must hold, in mailbox_seq order."""

    shard: int
    seqs: list[int] = field(default_factory=list)
    entries: list[Shown] = field(default_factory=list)
    durable: list[int] = field(default_factory=list)

    def at(self, mailbox_seq: int) -> int:
        """The place of an entry, or -1."""
        place = bisect_left(self.seqs, mailbox_seq)
        return place if place < len(self.seqs) and self.seqs[place] == mailbox_seq else -1


class Samples:
    """What was seen of the stores while the run went on."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self.watermarks: dict[int, tuple[list[int], list[int]]] = {}
        """Shard → moments, and W at each."""
        self._ends: dict[int, tuple[list[int], list[int]]] = {}
        for sample in sorted(samples, key=lambda sample: sample.t):
            for columns, pairs in ((self.watermarks, sample.watermarks), (self._ends, sample.outbox_ends)):
                for place, value in pairs:
                    moments, values = columns.setdefault(place, ([], []))
                    moments.append(sample.t)
                    values.append(value)

    def absent_until(self, partition: int, offset: int) -> int:
        """The last moment at which the Outbox certainly did not hold this record."""
        moments, ends = self._ends.get(partition, ((), ()))
        after = bisect_right(ends, offset)
        return moments[after - 1] if after else 0

    def is_above_watermark(self, shard: int, mailbox_seq: int, t: int) -> bool:
        """Whether a sample that was begun after `t` found W still below."""
        moments, marks = self.watermarks.get(shard, ((), ()))
        at = bisect_right(moments, t)
        return at < len(marks) and marks[at] < mailbox_seq


@dataclass
class Truth:
    samples: Samples
    conversations: dict[str, Conversation] = field(default_factory=dict)
    messages: dict[MessageKey, Outbox] = field(default_factory=dict)
    bodies: set[str] = field(default_factory=set)
    mailboxes: dict[str, UserMailbox] = field(default_factory=dict)

    def record_at(self, conversation: str, seq: int) -> Outbox | None:
        known = self.conversations.get(conversation)
        return known.records.get(seq) if known else None

    def durable_at(self, record: Outbox) -> int:
        return self.conversations[record.conversation].durable_at[record.seq]


def sort_reads(reads: Iterable[StoreRead]) -> StoreReads:
    """One pass. Ids that repeat are kept once, which halves the memory of a large history."""
    kept: dict[str, str] = {}
    found = StoreReads()
    for read in reads:
        match read:
            case Outbox():
                _share_ids(read, kept)
                found.outbox.append(read)
            case Dispatch():
                read.conversation = kept.setdefault(read.conversation, read.conversation)
                read.recipients = tuple([kept.setdefault(user, user) for user in read.recipients])
                found.dispatches.append(read)
            case Mailbox():
                found.mailboxes.setdefault(read.user, []).extend(read.entries)
            case Progress():
                found.progress[read.dispatch_id] = read.state
            case Fact():
                found.facts.append(read)
            case Shard():
                found.shards[read.shard] = read
            case Skip():
                found.skips.append(read)
            case Sample():
                found.samples.append(read)
    by_offset = attrgetter("partition", "offset")
    found.outbox.sort(key=by_offset)
    found.dispatches.sort(key=by_offset)
    return found


def _share_ids(record: Outbox, kept: dict[str, str]) -> None:
    """An equal string takes the place of each id: nobody can see it, and it is there once."""
    share = kept.setdefault
    record.conversation = share(record.conversation, record.conversation)
    record.sender = share(record.sender, record.sender)
    record.parties = (
        share(record.parties[0], record.parties[0]),
        share(record.parties[1], record.parties[1]),
    )


def build_truth(reads: StoreReads) -> Truth:
    truth = Truth(Samples(reads.samples))
    for record in reads.outbox:
        conversation = truth.conversations.get(record.conversation)
        if conversation is None:
            conversation = truth.conversations[record.conversation] = Conversation(record.parties)
        first = conversation.records.setdefault(record.seq, record)
        if first.entry == record.entry:
            durable_at = record.durable_at or truth.samples.absent_until(record.partition, record.offset)
            earlier = conversation.durable_at.get(record.seq, durable_at)
            conversation.durable_at[record.seq] = min(earlier, durable_at)
        truth.messages.setdefault((record.conversation, record.sender, record.client_message_id), record)
        truth.bodies.add(record.body)
    for conversation in truth.conversations.values():
        _line_up(conversation)
    _build_mailboxes(truth, reads)
    return truth


def _line_up(conversation: Conversation) -> None:
    records = conversation.records
    line = [records[seq] for seq in _unbroken(records)]
    conversation.entries = [(record.seq, record.entry) for record in line]
    conversation.durable = list(accumulate([conversation.durable_at[record.seq] for record in line], max))


def _unbroken(records: dict[int, Outbox]) -> Iterator[int]:
    seq = 1
    while seq in records:
        yield seq
        seq += 1


def first_dispatches(dispatches: Iterable[Dispatch]) -> Iterator[Dispatch]:
    """Without the repeats."""
    seen: set[str] = set()
    for dispatch in dispatches:
        if dispatch.dispatch_id not in seen:
            seen.add(dispatch.dispatch_id)
            yield dispatch


def _build_mailboxes(truth: Truth, reads: StoreReads) -> None:
    skipped = {skip.dispatch_id for skip in reads.skips}
    seen: set[str] = set()
    for dispatch in reads.dispatches:
        shard = reads.shards.get(dispatch.partition)
        if shard is None or dispatch.dispatch_id in skipped or dispatch.dispatch_id in seen:
            continue
        seen.add(dispatch.dispatch_id)
        record = truth.record_at(dispatch.conversation, dispatch.seq)
        shown = Shown(shard.base + dispatch.offset, dispatch.conversation, dispatch.seq, dispatch.entry)
        for user in dispatch.recipients:
            mailbox = truth.mailboxes.get(user)
            if mailbox is None:
                mailbox = truth.mailboxes[user] = UserMailbox(dispatch.partition)
            mailbox.seqs.append(shown.mailbox_seq)
            mailbox.entries.append(shown)
            mailbox.durable.append(truth.durable_at(record) if record else 0)
    for mailbox in truth.mailboxes.values():
        mailbox.durable = list(accumulate(mailbox.durable, max))

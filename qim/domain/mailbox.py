"""How dispatch records become runs on the mailbox store, and what a start needs to be sure of.

A run is what one call materialises: consecutive records of any number of shards, at most 64 entries together.
A record for more than 16 recipients goes the general path alone, because one script must not write for long.

The numbers of a shard: **mailbox_seq = base + offset**, W is the mailbox_seq of the last finished record, 0
while nothing is finished. `position_of` and `mailbox_seq_of` are the two directions. A record is accepted
only if its number is the next one; the store checks the same again.

`check_start` decides whether a shard's stored state and the log belong together. Where they do not, the shard
fails closed: reading on would skip records that nobody delivered, or deliver what belongs to another log.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Protocol, TypeVar

from blake3 import blake3

from qim.domain.fanout import shard_of
from qim.errors import RecordCorrupt
from qim.ids import MAILBOX_SEQ_MAX, DispatchId, MailboxSeq, Offset, SlotId, UserId
from qim.limits import FUSED_RECIPIENTS_MAX, FUSED_RUN_ENTRIES_MAX, PART_RECIPIENTS_MAX, ROLE_BACKOFF_MS
from qim.records import Dispatch, Kind, check_entry, parse_dispatch_record


class Sized(Protocol):
    """What a run is cut by."""

    @property
    def recipients(self) -> tuple[UserId, ...]: ...


Write = TypeVar("Write", bound=Sized)

_UNREADABLE_DOMAIN: Final = b"qim.unreadable.v1"
_DIRECT: Final = int(Kind.DIRECT)
NOTHING_FINISHED: Final = Offset(-1)


def mailbox_seq_of(*, base: MailboxSeq, offset: Offset) -> MailboxSeq:
    """Raises RecordCorrupt past 2^48 − 1: no client could hold such a cursor."""
    seq = base + offset
    if seq > MAILBOX_SEQ_MAX:
        raise RecordCorrupt("the shard has used up its mailbox sequences")
    return MailboxSeq(seq)


def position_of(*, base: MailboxSeq, watermark: MailboxSeq) -> Offset:
    """The log offset of the last finished record; -1 when there is none."""
    return Offset(watermark - base) if watermark else NOTHING_FINISHED


def next_seq(*, base: MailboxSeq, watermark: MailboxSeq) -> MailboxSeq:
    """The only mailbox_seq that may follow W."""
    return MailboxSeq(watermark + 1 if watermark else base)


def read_dispatch(data: bytes, partition: SlotId) -> Dispatch:
    """Splits a dispatch record and checks that it belongs here. Raises RecordCorrupt."""
    dispatch = parse_dispatch_record(data)
    header = dispatch.header
    if dispatch.shard != partition:
        raise RecordCorrupt(f"record of shard {dispatch.shard} in partition {partition}")
    check_entry(header, dispatch.entry)
    if header.kind != _DIRECT:
        _check_recipients(dispatch)
        return dispatch
    parties = header.parties
    for user in dispatch.recipients:
        is_party = user == parties[:16] or user == parties[16:]
        if not is_party or shard_of(header.tenant, user) != partition:
            raise RecordCorrupt("a recipient is no party of the conversation or lives in another shard")
    if len(dispatch.recipients) == 2 and dispatch.recipients[0] >= dispatch.recipients[1]:
        raise RecordCorrupt("recipients are not in order")
    return dispatch


def _check_recipients(dispatch: Dispatch) -> None:
    """Of a group message. Whether they are members was decided where it was planned."""
    recipients = dispatch.recipients
    if len(recipients) > PART_RECIPIENTS_MAX:
        raise RecordCorrupt(f"{len(recipients)} recipients in one part")
    if any(one >= next_one for one, next_one in pairwise(recipients)):
        raise RecordCorrupt("recipients are not in order, or not each once")
    tenant = dispatch.header.tenant
    if any(shard_of(tenant, user) != dispatch.shard for user in recipients):
        raise RecordCorrupt("a recipient lives in another shard")


def identify(data: bytes) -> tuple[DispatchId, bytes]:
    """Dispatch id and digest of a record, readable or not: even a skipped one is finished under a name."""
    try:
        dispatch = parse_dispatch_record(data)
    except RecordCorrupt:
        name = blake3(_UNREADABLE_DOMAIN + data).digest(24)
        return DispatchId(name[:16]), name[16:]
    return dispatch.dispatch_id, dispatch.header.dispatch_digest


def is_fusable(write: Sized) -> bool:
    return len(write.recipients) <= FUSED_RECIPIENTS_MAX


def cut_runs(writes: Sequence[Write]) -> list[list[Write]]:
    """Cuts fusable records into runs, in order; a run is full at 64 entries."""
    runs: list[list[Write]] = []
    run: list[Write] = []
    entries = 0
    for write in writes:
        size = len(write.recipients)
        if run and entries + size > FUSED_RUN_ENTRIES_MAX:
            runs.append(run)
            run, entries = [], 0
        run.append(write)
        entries += size
    if run:
        runs.append(run)
    return runs


def check_start(
    *,
    position: Offset,
    low: Offset,
    high: Offset,
    stored_log: bytes,
    log: bytes,
    stored_dispatch: DispatchId,
    found: bytes | None,
) -> str:
    """Why a shard must not start; empty when it may.

    `found` is the dispatch record at the position, None where the log no longer holds it.
    """
    if stored_log != log:
        return "the dispatch log is another one than the shard was filled from"
    if not low <= position + 1 <= high:
        return f"the log holds {low} to {high - 1}, the shard needs {position + 1}"
    if position < 0:
        return ""
    if found is None:
        return "" if low == position + 1 else f"the record at {position} is not where it was"
    if identify(found)[0] != stored_dispatch:
        return f"the record at {position} is not the one that was finished there"
    return ""


def is_news(attempts: int) -> bool:
    """Whether the failure of this attempt is logged: the first of a series and ever fewer of the others.

    A store that is away for an hour fails a hundred thousand attempts, and says one thing.
    """
    return attempts & (attempts - 1) == 0


def backoff_ms(attempts: int) -> int:
    """How long to wait before the next attempt, after so many failed ones."""
    return ROLE_BACKOFF_MS[min(attempts, len(ROLE_BACKOFF_MS)) - 1] if attempts else 0


READ_AGAIN_MS: Final = backoff_ms(3)
"""A log that cannot be read is asked again after this pause, every time; the records wait in it."""

"""Which shards an Outbox record goes to, and with which bytes.

A direct message goes to the shard of each of its two users: the recipient gets it, the sender gets a copy for
the other devices. Users of one shard share one dispatch record, because one record is one mailbox sequence; a
message to oneself has one recipient. Parts are ordered by shard, recipients by id.

The plan is a pure function of the record: **same record, same plan, byte for byte**, in every process and in
every replay. The deterministic dispatch id in the header makes replays converge in the mailboxes. A record
that cannot be planned raises RecordCorrupt; the role stops that partition and leaves the word to an operator.
"""

from functools import lru_cache
from typing import Final, NamedTuple

from qim.domain.placement import shard_of_user
from qim.errors import RecordCorrupt
from qim.ids import SlotId, UserId
from qim.limits import USER_CACHE_ENTRIES_MAX
from qim.records import HEADER_BYTES, Kind, build_dispatch_record, check_entry, parse_header

_DIRECT: Final = int(Kind.DIRECT)
"""A plain number: the attribute of an enum class costs more than the comparison."""

shard_of = lru_cache(maxsize=USER_CACHE_ENTRIES_MAX)(shard_of_user)
"""`shard_of_user`, remembered for the users this process has seen last."""


class PlannedDispatch(NamedTuple):
    """One record for the dispatch log."""

    shard: SlotId
    record: bytes


def plan_dispatches(outbox_record: bytes) -> tuple[PlannedDispatch, ...]:
    """Every dispatch of one Outbox record, by shard. Raises RecordCorrupt."""
    header = parse_header(outbox_record)
    if header.kind != _DIRECT:
        raise RecordCorrupt(f"no plan for a conversation of kind {header.kind}")
    check_entry(header, outbox_record[HEADER_BYTES:])
    parties = header.parties
    low, high = UserId(parties[:16]), UserId(parties[16:])
    if low > high or header.sender not in (low, high):
        raise RecordCorrupt("sender and parties of the header contradict each other")
    first = shard_of(header.tenant, low)
    second = shard_of(header.tenant, high)
    if first == second:
        recipients = (low,) if low == high else (low, high)
        return (_dispatch(outbox_record, first, recipients),)
    one = _dispatch(outbox_record, first, (low,))
    other = _dispatch(outbox_record, second, (high,))
    return (one, other) if first < second else (other, one)


def _dispatch(outbox_record: bytes, shard: SlotId, recipients: tuple[UserId, ...]) -> PlannedDispatch:
    record = build_dispatch_record(outbox_record, shard=shard, part=0, recipients=recipients)
    return PlannedDispatch(shard, record)

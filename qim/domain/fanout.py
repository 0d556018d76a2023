"""Which shards an Outbox record goes to, and with which bytes.

A direct message goes to the shard of each of its two users: the recipient gets it, the sender gets a copy for
the other devices. Users of one shard share one dispatch record, because one record is one mailbox sequence; a
message to oneself has one recipient. Parts are ordered by shard, recipients by id.

A group message goes to the members at the version that it was numbered under, the sender among them; an event
of the group goes to those that its record lists. A shard with many of them gets parts of at most
`PART_RECIPIENTS_MAX`, numbered from 0, each with a dispatch id of its own. Members come in by shard, as
`snapshots`; `snapshot_of` says whose a record needs. What has nobody to go to is corrupt, never done.

The plan is a pure function of the record and of a snapshot that never changes: **same record, same plan, byte
for byte**, in every process and in every replay. The deterministic dispatch id in the header makes replays
converge in the mailboxes. A record that cannot be planned raises RecordCorrupt; the role stops that partition
and leaves the word to an operator.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

from qim.domain.placement import group_conversation, shard_of_user
from qim.errors import RecordCorrupt
from qim.ids import ID_BYTES, BucketId, ConversationId, SlotId, TenantId, UserId
from qim.limits import (
    DISPATCH_BYTES_MAX,
    GROUP_SHARD_PARTS_MAX,
    PART_RECIPIENTS_MAX,
    SLOTS,
    SNAPSHOTS_PER_PLAN_MAX,
    USER_CACHE_ENTRIES_MAX,
)
from qim.records import (
    EPHEMERAL_FLAG,
    HEADER_BYTES,
    LISTED_IN_RECORD,
    MEMBERS_AT_VERSION,
    Kind,
    RoutingHeader,
    build_dispatch_record,
    check_entry,
    decode_entry,
    parse_header,
)

_DIRECT: Final = int(Kind.DIRECT)
"""A plain number: the attribute of an enum class costs more than the comparison."""
_GROUP_KINDS: Final = (bytes([Kind.GROUP]), bytes([Kind.GROUP | EPHEMERAL_FLAG]))

shard_of = lru_cache(maxsize=USER_CACHE_ENTRIES_MAX)(shard_of_user)
"""`shard_of_user`, remembered for the users this process has seen last."""

Audience = Mapping[SlotId, Sequence[UserId]]
"""Users by shard, each shard's sorted by id."""


class SnapshotId(NamedTuple):
    """Names the members of a group at one version; they never change."""

    bucket: BucketId
    tenant: TenantId
    conversation: ConversationId
    version: int


Snapshots = Mapping[SnapshotId, Audience]
NO_SNAPSHOTS: Final[Snapshots] = MappingProxyType({})


class PlannedDispatch(NamedTuple):
    """One record for the dispatch log."""

    shard: SlotId
    record: bytes


def is_of_group(outbox_record: bytes) -> bool:
    """Whether the record belongs to a group, from one byte; it may be unreadable all the same."""
    return outbox_record[1:2] in _GROUP_KINDS


def snapshot_of(outbox_record: bytes) -> SnapshotId | None:
    """The members that the plan of this record needs; None where it needs none, or is corrupt anyway."""
    if not is_of_group(outbox_record):
        return None
    try:
        header = parse_header(outbox_record)
    except RecordCorrupt:
        return None
    parties = header.group
    if parties.audience != MEMBERS_AT_VERSION:
        return None
    return SnapshotId(header.bucket, header.tenant, header.conversation, parties.version)


def plan_dispatches(outbox_record: bytes, snapshots: Snapshots = NO_SNAPSHOTS) -> tuple[PlannedDispatch, ...]:
    """Every dispatch of one Outbox record, by shard. Raises RecordCorrupt."""
    header = parse_header(outbox_record)
    check_entry(header, outbox_record[HEADER_BYTES:])
    if header.kind != _DIRECT:
        return _plan_group(outbox_record, header, snapshots)
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


def _dispatch(
    outbox_record: bytes, shard: SlotId, recipients: tuple[UserId, ...], part: int = 0
) -> PlannedDispatch:
    record = build_dispatch_record(outbox_record, shard=shard, part=part, recipients=recipients)
    return PlannedDispatch(shard, record)


# --- groups ------------------------------------------------------------------------------------------


def _plan_group(
    outbox_record: bytes, header: RoutingHeader, snapshots: Snapshots
) -> tuple[PlannedDispatch, ...]:
    audience = _audience(outbox_record, header, snapshots)
    return tuple(
        _dispatch(outbox_record, shard, recipients, part)
        for shard in sorted(audience)
        for part, recipients in enumerate(_parts(audience[shard]))
    )


def _audience(outbox_record: bytes, header: RoutingHeader, snapshots: Snapshots) -> Audience:
    group, version, mark = header.group
    if header.conversation != group_conversation(header.tenant, group):
        raise RecordCorrupt("group and conversation of the header contradict each other")
    if mark == LISTED_IN_RECORD:
        return _listed(outbox_record, header.tenant)
    if mark != MEMBERS_AT_VERSION:
        raise RecordCorrupt(f"no audience is known by the number {mark}")
    audience = snapshots.get(SnapshotId(header.bucket, header.tenant, header.conversation, version))
    if not audience:
        raise RecordCorrupt(f"the members at version {version} cannot be read")
    if header.sender not in audience.get(shard_of(header.tenant, header.sender), ()):
        raise RecordCorrupt(f"the sender is no member at version {version}")
    return audience


def _listed(outbox_record: bytes, tenant: TenantId) -> Audience:
    users = decode_entry(outbox_record[HEADER_BYTES:]).record.audience
    if not users or any(len(user) != ID_BYTES for user in users):
        raise RecordCorrupt("the record lists no audience, or not users")
    audience: dict[SlotId, list[UserId]] = {}
    for user in sorted({*map(UserId, users)}):
        audience.setdefault(shard_of(tenant, user), []).append(user)
    return audience


def _parts(users: Sequence[UserId]) -> Iterator[tuple[UserId, ...]]:
    if len(users) > GROUP_SHARD_PARTS_MAX * PART_RECIPIENTS_MAX:
        raise RecordCorrupt(f"{len(users)} users of one shard are more than a part number can tell apart")
    step = PART_RECIPIENTS_MAX
    return (tuple(users[at : at + step]) for at in range(0, len(users), step))


# --- batches with groups -----------------------------------------------------------------------------

Record = TypeVar("Record", bound=tuple[SlotId, int, bytes])


def cut_by_snapshots(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Cuts a batch so that the members of a few groups only are held for each piece; order is kept."""
    piece: list[Record] = []
    needed: set[SnapshotId | None] = {None}
    for record in records:
        snapshot = snapshot_of(record[2])
        if len(needed | {snapshot}) > SNAPSHOTS_PER_PLAN_MAX + 1:
            yield piece
            piece, needed = [], {None}
        piece.append(record)
        needed.add(snapshot)
    if piece:
        yield piece


def cut_by_bytes(records: Iterable[Record], snapshots: Snapshots) -> Iterator[list[Record]]:
    """Cuts a piece so that what it becomes is at most `DISPATCH_BYTES_MAX`, or one record; order is kept."""
    piece: list[Record] = []
    held = 0
    for record in records:
        size = _dispatch_bytes(record[2], snapshots)
        if piece and held + size > DISPATCH_BYTES_MAX:
            yield piece
            piece, held = [], 0
        piece.append(record)
        held += size
    if piece:
        yield piece


def _dispatch_bytes(outbox_record: bytes, snapshots: Snapshots) -> int:
    """About what the record becomes; of a group message without members, whatever it may list."""
    size = len(outbox_record)
    if not is_of_group(outbox_record):
        return 2 * size
    snapshot = snapshot_of(outbox_record)
    audience = snapshots.get(snapshot) if snapshot is not None else None
    if audience is None:
        return (min(SLOTS, size // ID_BYTES) + 1) * size
    copies = sum(1 + len(users) // PART_RECIPIENTS_MAX for users in audience.values())
    return copies * size + ID_BYTES * sum(map(len, audience.values()))

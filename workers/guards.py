"""The start-up guards: a store is asked who and how it is before anything is written to it.

Every worker asks before it claims its slots, after each start; `qim init` asks the same. Before that it holds
its own retentions against each other, which needs no store. A refusal ends the whole service with 78, or 65
where the store belongs to somebody else, because a restart cannot mend it. A store that does not answer, or
is still loading, is no refusal: the caller waits.

*Behind its Outbox* catches the old copy of a disk. Every core instance remembers the highest Outbox offset
whose message it has marked committed. Records above it may only be messages in the making: their sequence
must have been allocated here. One that was not proves that this instance is older than the log. The other
way round, an instance that remembers an offset which the log never gave proves that the log is the old one.
At most the newest records are read: an old copy misses the newest, whatever else it misses.

The rules and the words are in `qim/domain/guards.py`. Nothing here has state.
"""

from collections.abc import Sequence
from typing import Final

from qim.adapters.redis_facts import StoreFacts
from qim.domain.guards import (
    ExpectedIdentity,
    Retentions,
    find_broken_retention,
    find_wrong_role,
    find_wrong_settings,
    judge_identity,
)
from qim.domain.placement import Placement, slot_of_bucket
from qim.errors import ExitCode, GuardRefused, RecordCorrupt
from qim.ids import BucketId, ConversationId, Offset, Seq, SlotId, TenantId
from qim.ports import CommitLog, CommitStore, LogRecord, Watermarks
from qim.records import entry_coordinates, outbox_entry, parse_header

PAGE_RECORDS: Final = 512
OUTBOX_RECORDS_READ_MAX: Final = 8_192
"""Newest records per partition; at full speed that is more than a second of one worker."""


def check_retention(kept: Retentions) -> None:
    """Raises GuardRefused with every inequality that does not hold."""
    if lines := find_broken_retention(kept):
        raise GuardRefused("; ".join(lines))


def check_settings(facts: StoreFacts, *, where: str) -> None:
    """Raises GuardRefused with every setting that is wrong."""
    lines = find_wrong_role(facts.role) + find_wrong_settings(facts.settings, tool=tool_for(where))
    if lines:
        raise GuardRefused("; ".join(f"{where}: {line}" for line in lines))


def check_identities(facts: StoreFacts, expected: Sequence[ExpectedIdentity], *, where: str) -> None:
    """Raises GuardRefused for the first role in which the instance is not who it must be."""
    for identity in expected:
        refusal = judge_identity(identity, facts.identities.get(identity.field))
        if refusal is not None:
            raise GuardRefused(f"{where}: {refusal}", exit_code=refusal.exit_code)


def tool_for(where: str) -> str:
    """The command line that reaches a store, for people."""
    scheme, _, rest = where.partition("://")
    if scheme == "unix":
        return f"redis-cli -s {rest}"
    host, _, port = rest.rpartition(":")
    return f"redis-cli -h {host} -p {port}"


async def check_outbox(
    *, stores: Sequence[CommitStore], outbox: CommitLog, placement: Placement, slots: Sequence[SlotId]
) -> None:
    """Raises GuardRefused when an instance and the Outbox partitions of these slots are not of one time."""
    marks = await outbox.watermarks(slots)
    for instance, store in enumerate(stores):
        seen = await store.load_outbox_seen(slots)
        for slot in slots:
            offset = seen.get(slot, Offset(-1))
            if slot not in marks:
                continue  # no log at all: the fan-out stops this partition, alone
            _check_log_is_not_older(instance, slot, offset, marks[slot])
            await _check_store_is_not_older(
                instance, store, outbox, placement, slot=slot, first=Offset(offset + 1), mark=marks[slot]
            )


def _check_log_is_not_older(instance: int, slot: SlotId, seen: Offset, mark: Watermarks) -> None:
    if seen >= mark.high:
        raise GuardRefused(
            f"Outbox partition {slot} ends at {mark.high - 1}, but core instance {instance} has committed"
            f" {seen}: the log is an older copy; restore the log from its own newest disk",
            exit_code=ExitCode.FOREIGN_STORE,
        )


async def _check_store_is_not_older(
    instance: int,
    store: CommitStore,
    outbox: CommitLog,
    placement: Placement,
    *,
    slot: SlotId,
    first: Offset,
    mark: Watermarks,
) -> None:
    offset: int = max(first, mark.low, mark.high - OUTBOX_RECORDS_READ_MAX)
    while offset < mark.high:
        records = await outbox.read(slot, Offset(offset), records_max=PAGE_RECORDS)
        if not records:
            return
        await _check_page(instance, store, placement, records)
        offset = records[-1].offset + 1


async def _check_page(
    instance: int, store: CommitStore, placement: Placement, records: Sequence[LogRecord]
) -> None:
    highest: dict[tuple[BucketId, TenantId, ConversationId], Seq] = {}
    for record in records:
        found = _place_of(record)
        if found is not None and placement.core_instance_of(slot_of_bucket(found[0][0])) == instance:
            place, seq = found
            highest[place] = max(seq, highest.get(place, Seq(0)))
    allocated = await store.load_last_seq(list(highest))
    for (bucket, _, _), seq, last in zip(highest, highest.values(), allocated, strict=True):
        if seq > last:
            raise GuardRefused(
                f"core instance {instance} is behind its Outbox: a conversation of bucket {bucket} stands at"
                f" sequence {last}, the Outbox holds {seq}; this is an older copy: restore the instance from"
                " its own newest disk",
                exit_code=ExitCode.FOREIGN_STORE,
            )


def _place_of(record: LogRecord) -> tuple[tuple[BucketId, TenantId, ConversationId], Seq] | None:
    """A record that cannot be read stops its partition later, with its own words; it proves nothing here."""
    try:
        header = parse_header(record.data)
        seq, conversation = entry_coordinates(outbox_entry(record.data))
    except RecordCorrupt:
        return None
    return (header.bucket, header.tenant, conversation), seq

"""`qim audit`: the orphan audit. After a drain every acknowledged message is complete everywhere.

It first waits until the consumers have caught up with their logs (a busy server never does: stop the load or
accept `lag` in the report), then walks four things in bounded pages:

    pending         nothing RECORDED is older than a message in flight can be
    conversations   sequences 1…n are all there and visible
    time index      no element without its record
    Outbox          each record has its commit fact, its canonical record, and an entry in each mailbox

It only reads, and it reads raw keys (`adapters/audit_redis.py`), not through the scripts it judges. What each
kind of finding means stands there. Exit 0: clean; 1: something was found; 69: a store cannot be reached.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.progress import Progress, TaskID

from qim.adapters.audit_redis import (
    ASKED_BYTES_MAX,
    PAGE,
    Finding,
    OutboxRecord,
    RedisCommitAudit,
    RedisMailboxAudit,
)
from qim.clock import Clock
from qim.domain.fanout import Snapshots, cut_by_bytes, cut_by_snapshots, plan_dispatches
from qim.domain.mailbox import position_of
from qim.domain.placement import Placement, slot_of_bucket
from qim.errors import RecordCorrupt
from qim.ids import Offset, SlotId
from qim.limits import RECOVER_AGE_MS, RECOVER_INTERVAL_MS, SLOTS
from qim.ports import CommitLog, CommitStore, LogRecord, MailboxStore
from qim.records import outbox_entry, parse_dispatch_record, parse_header
from workers.audiences import Audiences
from workers.fanout import GROUP as FANOUT_GROUP

PENDING_AGE_MS: Final = RECOVER_AGE_MS + 3 * RECOVER_INTERVAL_MS
"""The recoverer has had three passes at what is older than this."""
FIRST_PAGE: Final = 16
"""Records of a partition before their size is known."""
SETTLE_SECONDS_MAX: Final = 30.0
SETTLE_POLL_SECONDS: Final = 0.2
FINDINGS_KEPT: Final = 1_000
"""Unless told otherwise; the rest is counted only: a broken store must not fill the operator's memory."""
ALL_SLOTS: Final = [SlotId(slot) for slot in range(SLOTS)]


@dataclass(frozen=True)
class AuditedStores:
    """Everything the audit reads, by instance."""

    placement: Placement
    commits: Sequence[CommitStore]
    commit_audits: Sequence[RedisCommitAudit]
    mailboxes: Sequence[MailboxStore]
    mailbox_audits: Sequence[RedisMailboxAudit]
    outbox: CommitLog
    dispatch: CommitLog
    audiences: Audiences
    """Who a group message had to reach."""


@dataclass
class Report:
    """What was walked and what was found."""

    walked: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    findings_max: int = FINDINGS_KEPT

    def note(self, findings: Sequence[Finding]) -> None:
        self.kinds.update(finding.kind for finding in findings)
        self.findings += findings[: max(0, self.findings_max - len(self.findings))]

    def as_result(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "clean": not self.kinds,
            "walked": dict(self.walked),
            "found": dict(self.kinds),
            "findings": [finding._asdict() for finding in self.findings],
        }


async def run_audit(
    stores: AuditedStores, *, clock: Clock, progress: Progress, findings_max: int = FINDINGS_KEPT
) -> Report:
    """Waits for the consumers, then walks; see the module."""
    report = Report(findings_max=findings_max)
    await _settle(stores, report, clock, progress.add_task("waiting for consumers", total=None), progress)
    await _walk_commits(stores, report, progress)
    await _walk_outbox(stores, report, progress)
    return report


async def _settle(
    stores: AuditedStores, report: Report, clock: Clock, bar: TaskID, progress: Progress
) -> None:
    deadline = clock.monotonic() + SETTLE_SECONDS_MAX
    while behind := await _behind(stores):
        if clock.monotonic() > deadline:
            report.note([Finding("lag", f"{where}: {records} records") for where, records in behind.items()])
            break
        progress.update(bar, description=f"waiting for consumers ({sum(behind.values())} records behind)")
        await asyncio.sleep(SETTLE_POLL_SECONDS)
    progress.update(bar, total=1, completed=1)


async def _behind(stores: AuditedStores) -> dict[str, int]:
    """Records that fanout and mailboxes have not finished, by consumer and partition."""
    behind: dict[str, int] = {}
    placement = stores.placement
    outbox, dispatch = await stores.outbox.watermarks(ALL_SLOTS), await stores.dispatch.watermarks(ALL_SLOTS)
    for instance, commits in enumerate(stores.commits):
        slots = [slot for slot in ALL_SLOTS if placement.core_instance_of(slot) == instance]
        positions = await commits.load_positions(FANOUT_GROUP, slots)
        for slot in slots:
            missing = outbox[slot].behind(positions.get(slot, Offset(-1))) if slot in outbox else 0
            if missing > 0:
                behind[f"fanout partition {slot}"] = missing
    for instance, mailboxes in enumerate(stores.mailboxes):
        slots = [slot for slot in ALL_SLOTS if placement.mailbox_instance_of(slot) == instance]
        for slot, state in (await mailboxes.load_shards(slots)).items():
            finished = position_of(base=state.base, watermark=state.watermark)
            missing = dispatch[slot].behind(finished) if slot in dispatch else 0
            if missing > 0:
                behind[f"mailbox shard {slot}"] = missing
    return behind


async def _walk_commits(stores: AuditedStores, report: Report, progress: Progress) -> None:
    for audit in stores.commit_audits:
        bar = progress.add_task("pending and conversations", total=await audit.key_count())
        async for findings in audit.pending(older_than_ms=PENDING_AGE_MS):
            report.note(findings)
        async for seen, findings in audit.conversations():
            report.walked["keys"] += seen
            report.note(findings)
            progress.advance(bar, seen)
        bar = progress.add_task("time index", total=None)
        async for findings in audit.index():
            report.walked["index_pages"] += 1
            report.note(findings)
            progress.advance(bar)
        progress.update(bar, total=1, completed=1)


async def _walk_outbox(stores: AuditedStores, report: Report, progress: Progress) -> None:
    watermarks = await stores.outbox.watermarks(ALL_SLOTS)
    bar = progress.add_task("Outbox", total=sum(mark.high - mark.low for mark in watermarks.values()))
    report.note(
        [Finding("unreadable", f"Outbox partition {slot}") for slot in ALL_SLOTS if slot not in watermarks]
    )
    for slot, mark in watermarks.items():
        offset, records_max = mark.low, FIRST_PAGE
        while offset < mark.high:
            page = await stores.outbox.read(slot, offset, records_max=records_max)
            if not page:
                report.note([Finding("unreadable", f"Outbox partition {slot} offset {offset}")])
                break
            for few_groups in cut_by_snapshots(page):
                snapshots = await stores.audiences.load(record.data for record in few_groups)
                for piece in cut_by_bytes(few_groups, snapshots):
                    await _check_piece(stores, report, piece, snapshots)
            progress.advance(bar, len(page))
            report.walked["outbox_records"] += len(page)
            offset = Offset(page[-1].offset + 1)
            # What one page held in the mean says how many of the next one fit into the bytes.
            page_bytes = sum(len(record.data) for record in page)
            records_max = max(1, min(PAGE, ASKED_BYTES_MAX * len(page) // max(1, page_bytes)))


async def _check_piece(
    stores: AuditedStores, report: Report, piece: Sequence[LogRecord], snapshots: Snapshots
) -> None:
    placement = stores.placement
    by_core: dict[int, list[OutboxRecord]] = {}
    by_mailbox: dict[int, list[Any]] = {}
    for record in piece:
        try:
            header = parse_header(record.data)
            plan = [
                parse_dispatch_record(planned.record) for planned in plan_dispatches(record.data, snapshots)
            ]
        except RecordCorrupt as error:
            report.note(
                [Finding("corrupt", f"Outbox partition {record.partition} offset {record.offset}: {error}")]
            )
            continue
        instance = placement.core_instance_of(slot_of_bucket(header.bucket))
        by_core.setdefault(instance, []).append(OutboxRecord(header, outbox_entry(record.data)))
        for dispatch in plan:
            by_mailbox.setdefault(placement.mailbox_instance_of(dispatch.shard), []).append(dispatch)
    for instance, records in by_core.items():
        report.note(await stores.commit_audits[instance].facts(records))
    for instance, dispatches in by_mailbox.items():
        report.note(await stores.mailbox_audits[instance].entries(dispatches))

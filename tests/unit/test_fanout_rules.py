"""Plans of group messages: who gets one, in which parts, and what is refused rather than sent to nobody."""

from collections.abc import Iterable

import pytest

from qim.domain.fanout import (
    NO_SNAPSHOTS,
    SnapshotId,
    cut_by_bytes,
    cut_by_snapshots,
    is_of_group,
    plan_dispatches,
    shard_of,
    snapshot_of,
)
from qim.domain.mailbox import read_dispatch
from qim.errors import RecordCorrupt
from qim.ids import Offset, SlotId, UserId
from qim.limits import (
    DISPATCH_BYTES_MAX,
    GROUP_SHARD_PARTS_MAX,
    PART_RECIPIENTS_MAX,
    SNAPSHOTS_PER_PLAN_MAX,
)
from qim.ports import LogRecord
from qim.records import HEADER_BYTES, outbox_entry, parse_dispatch_record
from tests.unit.workers.group_rig import ROUTE, build_group_outbox, many, route_of
from tests.unit.workers.rig import ALICE, BOB, TENANT, build_outbox

SHARD = shard_of(TENANT, ALICE)
MARK_AT = HEADER_BYTES - 1
"""Last byte of the number that says who gets a group message."""


def by_shard(users: Iterable[UserId]) -> dict[SlotId, tuple[UserId, ...]]:
    shards: dict[SlotId, tuple[UserId, ...]] = {}
    for user in sorted(users):
        shard = shard_of(TENANT, user)
        shards[shard] = (*shards.get(shard, ()), user)
    return shards


def name_of(record: bytes) -> SnapshotId:
    name = snapshot_of(record)
    assert name is not None
    return name


@pytest.mark.shows("F2", "G2", "X12")
def test_a_group_message_goes_to_every_member_once_and_to_its_sender() -> None:
    record = build_group_outbox(seq=1)
    members = [ALICE, BOB, *many(200)]
    plan = plan_dispatches(record, {name_of(record): by_shard(members)})
    assert [item.shard for item in plan] == sorted({item.shard for item in plan})
    dispatches = [read_dispatch(data, shard) for shard, data in plan]
    assert sorted(user for item in dispatches for user in item.recipients) == sorted(members)
    assert {item.entry for item in dispatches} == {outbox_entry(record)}


@pytest.mark.shows("F2", "G2")
def test_the_members_of_another_version_do_not_count() -> None:
    record = build_group_outbox(seq=1, version=3)
    name = name_of(record)
    assert (name.version, name.conversation) == (3, ROUTE.conversation)
    with pytest.raises(RecordCorrupt, match="version 3"):
        plan_dispatches(record, {name._replace(version=2): by_shard([ALICE, BOB])})


@pytest.mark.shows("F2")
def test_many_members_of_one_shard_get_parts_each_with_an_id_of_its_own() -> None:
    record = build_group_outbox(seq=1)
    users = sorted([ALICE, *many(2 * PART_RECIPIENTS_MAX)])
    plan = plan_dispatches(record, {name_of(record): {SHARD: users}})
    parts = [parse_dispatch_record(data) for _shard, data in plan]
    assert [(part.shard, part.part, len(part.recipients)) for part in parts] == [
        (SHARD, 0, PART_RECIPIENTS_MAX),
        (SHARD, 1, PART_RECIPIENTS_MAX),
        (SHARD, 2, 1),
    ]
    assert [user for part in parts for user in part.recipients] == users
    assert len({part.dispatch_id for part in parts}) == 3
    assert len({part.header.dispatch_digest for part in parts}) == 1


def test_more_members_of_one_shard_than_parts_have_numbers_are_refused() -> None:
    record = build_group_outbox(seq=1)
    users = [ALICE] * (GROUP_SHARD_PARTS_MAX * PART_RECIPIENTS_MAX + 1)
    with pytest.raises(RecordCorrupt, match="part number"):
        plan_dispatches(record, {name_of(record): {SHARD: users}})


@pytest.mark.shows("F6")
def test_a_group_message_without_its_members_is_refused_and_never_sent_to_nobody() -> None:
    record = build_group_outbox(seq=1)
    name = name_of(record)
    for snapshots in (NO_SNAPSHOTS, {name: {}}):
        with pytest.raises(RecordCorrupt, match="members at version 1"):
            plan_dispatches(record, snapshots)


@pytest.mark.shows("G12")
def test_a_message_of_who_is_no_member_is_refused() -> None:
    record = build_group_outbox(seq=1, sender=BOB)
    with pytest.raises(RecordCorrupt, match="no member"):
        plan_dispatches(record, {name_of(record): by_shard([ALICE, *many(100)])})


@pytest.mark.shows("F2", "G7")
def test_an_event_goes_to_those_that_it_lists_and_needs_no_members() -> None:
    """Also to who left with it, and in a large group to nobody else."""
    record = build_group_outbox(seq=1, sender=BOB, listed=[BOB, ALICE, BOB])
    assert is_of_group(record)
    assert snapshot_of(record) is None
    version_one = SnapshotId(ROUTE.bucket, TENANT, ROUTE.conversation, 1)
    for snapshots in (NO_SNAPSHOTS, {version_one: by_shard(many(100))}):
        plan = plan_dispatches(record, snapshots)
        recipients = [user for shard, data in plan for user in read_dispatch(data, shard).recipients]
        assert sorted(recipients) == sorted([ALICE, BOB])


def test_an_event_that_lists_nobody_or_no_users_is_refused() -> None:
    said_so_only = bytearray(build_group_outbox(seq=1))
    said_so_only[MARK_AT] = 1
    for record in (
        build_group_outbox(seq=1, listed=[]),
        build_group_outbox(seq=1, listed=[UserId(b"short")]),
        bytes(said_so_only),
    ):
        with pytest.raises(RecordCorrupt, match="audience"):
            plan_dispatches(record)


def test_an_audience_of_an_unknown_kind_or_a_group_of_another_conversation_is_refused() -> None:
    data = bytearray(build_group_outbox(seq=1))
    members = {name_of(bytes(data)): by_shard([ALICE, BOB])}
    data[MARK_AT] = 2
    with pytest.raises(RecordCorrupt, match="by the number 2"):
        plan_dispatches(bytes(data), members)
    data[MARK_AT] = 0
    data[116] ^= 1
    with pytest.raises(RecordCorrupt, match="contradict"):
        plan_dispatches(bytes(data), members)


def test_one_byte_tells_a_group_also_where_nothing_else_can_be_read() -> None:
    assert not is_of_group(build_outbox(seq=1))
    assert not is_of_group(build_outbox(seq=1, retention_class=1))
    assert is_of_group(build_group_outbox(seq=1, retention_class=1))
    assert not is_of_group(b"")
    assert is_of_group(b"\x02\x02")
    assert snapshot_of(b"\x02\x02") is None
    with pytest.raises(RecordCorrupt):
        plan_dispatches(b"\x02\x02")


# --- batches ---


def as_records(*data: bytes) -> list[LogRecord]:
    return [LogRecord(SlotId(0), Offset(offset), item) for offset, item in enumerate(data)]


def test_a_batch_is_cut_where_it_needs_the_members_of_too_many_groups() -> None:
    groups = [build_group_outbox(seq=1, route=route_of(number)) for number in range(SNAPSHOTS_PER_PLAN_MAX)]
    others = [build_outbox(seq=1), build_group_outbox(seq=9, listed=[ALICE]), b"\x02\x02", b""]
    one_more = build_group_outbox(seq=1, version=2, route=route_of(0))
    batch = as_records(*groups, *others, *groups, one_more, *others)
    pieces = list(cut_by_snapshots(batch))
    assert [record for piece in pieces for record in piece] == batch
    assert [len(piece) for piece in pieces] == [2 * len(groups) + len(others), 1 + len(others)]
    assert list(cut_by_snapshots([])) == []


def test_a_batch_is_cut_by_what_it_becomes_not_by_what_it_is() -> None:
    large = build_group_outbox(seq=1, body=b"x" * 60_000)
    snapshots = {name_of(large): by_shard([ALICE, *many(5_000)])}
    event = build_group_outbox(seq=2, body=b"x" * 60_000, listed=many(1_000))
    batch = as_records(*[large] * 5, *[event] * 5, *[build_outbox(seq=3)] * 300)
    pieces = list(cut_by_bytes(batch, snapshots))
    assert [record for piece in pieces for record in piece] == batch
    assert [len(piece) for piece in pieces] == [2, 2, 1, 1, 1, 1, 1, 301]
    for piece in pieces:
        plans = [plan_dispatches(record.data, snapshots) for record in piece]
        assert sum(len(item.record) for plan in plans for item in plan) <= DISPATCH_BYTES_MAX
    assert list(cut_by_bytes([], {})) == []


def test_a_record_that_becomes_more_than_the_bound_goes_alone() -> None:
    record = build_group_outbox(seq=1)
    snapshots = {name_of(record): {SHARD: [ALICE] * (DISPATCH_BYTES_MAX // 16 + 1)}}
    batch = as_records(build_outbox(seq=1), record, build_outbox(seq=2))
    assert [len(piece) for piece in cut_by_bytes(batch, snapshots)] == [1, 1, 1]

"""Runs, numbers and the start check of a mailbox shard."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from qim.domain import mailbox as rules
from qim.errors import RecordCorrupt
from qim.ids import DispatchId, MailboxSeq, Offset, SlotId, UserId
from qim.limits import PART_RECIPIENTS_MAX
from qim.records import build_dispatch_record, outbox_entry
from tests.unit.workers.group_rig import build_group_outbox, many
from tests.unit.workers.rig import ALICE, build_dispatches, shard_of

LOG = b"L" * 16


class Sized(NamedTuple):
    recipients: tuple[UserId, ...]


def _sized(count: int) -> Sized:
    return Sized((ALICE,) * count)


def test_a_run_ends_at_64_entries_and_keeps_the_order() -> None:
    writes = [_sized(16)] * 4 + [_sized(2), _sized(1)]
    runs = rules.cut_runs(writes)
    assert [sum(len(write.recipients) for write in run) for run in runs] == [64, 3]
    assert [write for run in runs for write in run] == writes
    assert rules.cut_runs([]) == []


def test_only_records_of_few_recipients_are_fused() -> None:
    assert rules.is_fusable(_sized(16))
    assert not rules.is_fusable(_sized(17))


@pytest.mark.shows("F5")
def test_mailbox_sequences_are_base_plus_offset_below_2_to_48() -> None:
    base = MailboxSeq(1000)
    assert rules.mailbox_seq_of(base=base, offset=Offset(0)) == 1000
    assert rules.position_of(base=base, watermark=MailboxSeq(1000)) == 0
    assert rules.position_of(base=base, watermark=MailboxSeq(0)) == -1
    assert rules.next_seq(base=base, watermark=MailboxSeq(0)) == 1000
    assert rules.next_seq(base=base, watermark=MailboxSeq(1000)) == 1001
    with pytest.raises(RecordCorrupt):
        rules.mailbox_seq_of(base=base, offset=Offset(2**48 - 1000))


def test_a_dispatch_is_read_only_in_its_own_partition() -> None:
    for shard, record in build_dispatches(seq=1):
        assert rules.read_dispatch(record, shard).shard == shard
        with pytest.raises(RecordCorrupt):
            rules.read_dispatch(record, SlotId((shard + 1) % 64))


def test_a_dispatch_whose_entry_is_of_another_sequence_is_corrupt() -> None:
    (shard, one), *_rest = build_dispatches(seq=1)
    (_shard, other), *_rest = build_dispatches(seq=2)
    entry_at = len(one) - len(rules.read_dispatch(one, shard).entry)
    with pytest.raises(RecordCorrupt):
        rules.read_dispatch(one[:entry_at] + other[entry_at:], shard)


def test_a_dispatch_for_a_stranger_is_corrupt() -> None:
    shard = shard_of(ALICE)
    ((_shard, record),) = [item for item in build_dispatches(seq=1) if item[0] == shard]
    assert record.count(ALICE) >= 2
    at = record.index(ALICE, 148)
    with pytest.raises(RecordCorrupt):
        rules.read_dispatch(record[:at] + b"z" * 16 + record[at + 16 :], shard)


def _of_group(shard: SlotId, recipients: Sequence[UserId]) -> bytes:
    return build_dispatch_record(build_group_outbox(seq=1), shard=shard, part=1, recipients=tuple(recipients))


@pytest.mark.shows("F2")
def test_a_part_of_a_group_message_names_users_of_its_shard_each_once_in_order() -> None:
    shard = shard_of(ALICE)
    mine = [user for user in many(1_000) if shard_of(user) == shard]
    read = rules.read_dispatch(_of_group(shard, mine), shard)
    assert (read.recipients, read.part) == (tuple(mine), 1)
    stranger = next(user for user in many(1_000) if shard_of(user) != shard)
    for wrong in (mine[::-1], [mine[0], mine[0]], sorted([*mine, stranger])):
        with pytest.raises(RecordCorrupt, match="recipient"):
            rules.read_dispatch(_of_group(shard, wrong), shard)


def test_a_part_of_a_group_message_is_bounded() -> None:
    shard = shard_of(ALICE)
    mine = [user for user in many(80 * PART_RECIPIENTS_MAX) if shard_of(user) == shard]
    assert len(mine) > PART_RECIPIENTS_MAX
    full = mine[:PART_RECIPIENTS_MAX]
    assert len(rules.read_dispatch(_of_group(shard, full), shard).recipients) == PART_RECIPIENTS_MAX
    with pytest.raises(RecordCorrupt, match="in one part"):
        rules.read_dispatch(_of_group(shard, mine[: PART_RECIPIENTS_MAX + 1]), shard)


def test_a_group_message_whose_entry_is_of_another_sequence_is_corrupt() -> None:
    shard = shard_of(ALICE)
    record = _of_group(shard, [ALICE])
    read = rules.read_dispatch(record, shard)
    other = outbox_entry(build_group_outbox(seq=2))
    with pytest.raises(RecordCorrupt, match="sequence"):
        rules.read_dispatch(record[: len(record) - len(read.entry)] + other, shard)


def _check(
    *, position: int, low: int, high: int, found: bytes | None = None, log: bytes = LOG, stored: bytes = b""
) -> str:
    return rules.check_start(
        position=Offset(position),
        low=Offset(low),
        high=Offset(high),
        stored_log=LOG,
        log=log,
        stored_dispatch=DispatchId(stored),
        found=found,
    )


@pytest.mark.shows("M1")
def test_a_shard_starts_behind_the_record_that_it_finished_last() -> None:
    (shard, record), *_rest = build_dispatches(seq=1)
    stored = rules.read_dispatch(record, shard).dispatch_id
    assert _check(position=-1, low=0, high=0) == ""
    assert _check(position=4, low=2, high=9, found=record, stored=stored) == ""
    assert _check(position=4, low=5, high=9) == "", "trimmed exactly behind the position"


@pytest.mark.parametrize(
    ("position", "low", "high", "log", "stored"),
    [
        (4, 2, 9, b"X" * 16, b""),
        (4, 2, 9, LOG, b"s" * 16),
        (4, 6, 9, LOG, b""),
        (4, 0, 4, LOG, b""),
        (-1, 1, 9, LOG, b""),
    ],
)
def test_a_shard_that_does_not_fit_its_log_stays_closed(
    position: int, low: int, high: int, log: bytes, stored: bytes
) -> None:
    (_shard, record), *_rest = build_dispatches(seq=1)
    assert _check(position=position, low=low, high=high, log=log, stored=stored, found=record)


def test_a_skipped_unreadable_record_has_a_name_to_start_behind() -> None:
    name, digest = rules.identify(b"garbage")
    assert (len(name), len(digest)) == (16, 8)
    assert _check(position=0, low=0, high=1, found=b"garbage", stored=name) == ""
    assert rules.identify(b"other garbage")[0] != name


def test_a_back_off_grows_and_stays_bounded() -> None:
    waits = [rules.backoff_ms(attempts) for attempts in range(20)]
    assert waits[0] == 0
    assert waits == sorted(waits)
    assert waits[-1] == 2_000

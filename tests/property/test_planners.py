"""Planning is a function: the same record gives the same dispatches, byte for byte, in any process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qim.domain.fanout import plan_dispatches, shard_of, snapshot_of
from qim.domain.mailbox import cut_runs, read_dispatch
from qim.domain.writer import plan_send
from qim.ids import DeviceId, Millis, Seq, SlotId, TenantId, UserId
from qim.limits import FUSED_RUN_ENTRIES_MAX
from qim.records import build_outbox_record, decode_entry, decode_record
from tests.unit.workers.group_rig import build_group_outbox
from tests.unit.workers.rig import TENANT

ids = st.binary(min_size=16, max_size=16)
sends = st.fixed_dictionaries(
    {
        "tenant": st.integers(0, 2**32 - 1).map(TenantId),
        "sender": ids.map(UserId),
        "device": ids.map(DeviceId),
        "target_kind": st.just(1),
        "target": ids,
        "client_message_id": ids,
        "message_type": st.sampled_from([2, 3]),
        "custom_type": st.text(max_size=20),
        "body": st.binary(max_size=300),
        "retention_class": st.integers(0, 3),
        "now_ms": st.integers(0, 2**48).map(Millis),
    }
)
sequences = st.integers(1, 2**53 - 1).map(Seq)


@pytest.mark.shows("F1", "F2")
@given(send=sends, seq=sequences)
def test_the_same_record_gives_the_same_plan_byte_for_byte(send: dict[str, object], seq: Seq) -> None:
    planned = plan_send(**send)  # type: ignore[arg-type]  # the strategy has the types of the parameters
    record = build_outbox_record(
        bucket=planned.route.bucket,
        seq=seq,
        record=planned.record,
        record_bytes=planned.record_bytes,
        identity=planned.identity,
    )
    plan = plan_dispatches(record)
    shard_of.cache_clear()
    # A retry builds the Outbox record from the stored bytes, not from the request.
    stored = decode_record(planned.record_bytes)
    again = build_outbox_record(
        bucket=planned.route.bucket,
        seq=seq,
        record=stored,
        record_bytes=planned.record_bytes,
        identity=planned.identity,
    )
    assert again == record
    assert plan_dispatches(again) == plan
    users = {send["sender"], send["target"]}
    assert sorted(item.shard for item in plan) == [item.shard for item in plan]
    delivered: list[UserId] = []
    for shard, data in plan:
        dispatch = read_dispatch(data, shard)
        assert dispatch.header.ephemeral == (send["retention_class"] == 1)
        assert decode_entry(dispatch.entry).record == planned.record
        delivered += dispatch.recipients
    assert len(delivered) == len(set(delivered))
    assert set(delivered) == users


@pytest.mark.shows("F1", "F2")
@given(
    seq=sequences,
    named=st.sets(ids, min_size=1, max_size=80),
    body=st.binary(max_size=300),
    data=st.data(),
)
def test_a_group_message_has_the_same_plan_wherever_it_is_made(
    seq: Seq, named: set[bytes], body: bytes, data: st.DataObject
) -> None:
    members = sorted(map(UserId, named))
    sender = data.draw(st.sampled_from(members))
    listed = data.draw(st.none() | st.permutations(members))
    record = build_group_outbox(seq=seq, sender=sender, body=body, listed=listed)
    shards: dict[SlotId, list[UserId]] = {}
    for member in data.draw(st.permutations(members)):
        shards.setdefault(shard_of(TENANT, member), []).append(member)
    name = snapshot_of(record)
    assert (name is None) == (listed is not None)
    snapshots = {} if name is None else {name: {shard: sorted(users) for shard, users in shards.items()}}
    plan = plan_dispatches(record, snapshots)
    shard_of.cache_clear()
    assert plan_dispatches(record, snapshots) == plan
    dispatches = [read_dispatch(item.record, item.shard) for item in plan]
    assert [(item.shard, item.part) for item in dispatches] == sorted((shard, 0) for shard in shards)
    delivered = [user for item in dispatches for user in item.recipients]
    assert sorted(delivered) == members
    assert {decode_entry(item.entry).conversation_seq for item in dispatches} == {seq}


class _Write:
    def __init__(self, size: int) -> None:
        self.recipients = (UserId(b"u" * 16),) * size


@given(st.lists(st.integers(1, 16), max_size=100))
def test_runs_keep_every_record_in_order_within_their_bound(sizes: list[int]) -> None:
    writes = [_Write(size) for size in sizes]
    runs = cut_runs(writes)
    assert [write for run in runs for write in run] == writes
    assert all(0 < sum(len(write.recipients) for write in run) <= FUSED_RUN_ENTRIES_MAX for run in runs)

"""Properties of stored records: they come back as they were, and nothing else is taken for one."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qim import records
from qim.errors import RecordCorrupt
from qim.ids import (
    SEQ_MAX,
    BucketId,
    ClientMessageId,
    ConversationId,
    DeviceId,
    MessageId,
    Millis,
    Seq,
    SlotId,
    TenantId,
    UserId,
)
from qim.records import HEADER_BYTES, MessageRecord

ids = st.binary(min_size=16, max_size=16)
sequences = st.integers(1, SEQ_MAX).map(Seq)
buckets = st.integers(0, 255).map(BucketId)


@st.composite
def message_records(draw: st.DrawFn) -> MessageRecord:
    kind = draw(st.sampled_from(records.Kind))
    return MessageRecord(
        version=records.RECORD_VERSION,
        tenant=TenantId(draw(st.integers(0, 2**32 - 1))),
        conversation_id=ConversationId(draw(ids)),
        kind=kind,
        parties=draw(ids) + draw(ids) if kind == records.Kind.DIRECT else draw(ids),
        message_id=MessageId(draw(ids)),
        sender=UserId(draw(ids)),
        sender_device=DeviceId(draw(ids)),
        client_message_id=ClientMessageId(draw(ids)),
        message_type=draw(st.sampled_from(records.MessageType)),
        custom_type=draw(st.text(max_size=20)),
        body=draw(st.binary(max_size=300)),
        retention_class=draw(st.sampled_from(records.RetentionClass)),
        reserved_at=Millis(draw(st.integers(0, 2**48))),
        membership_version=0 if kind == records.Kind.DIRECT else draw(st.integers(1, 2**40)),
        audience=draw(st.none() | st.lists(ids, max_size=3).map(tuple)),
    )


def identity_of(record: MessageRecord, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "tenant": record.tenant,
        "conversation": record.conversation_id,
        "sender": record.sender,
        "client_message_id": record.client_message_id,
        "message_type": record.message_type,
        "retention_class": record.retention_class,
        "custom_type": record.custom_type,
        "body": record.body,
    }
    return records.identity_digest(**(fields | changes))


def outbox_of(record: MessageRecord, seq: Seq, bucket: BucketId) -> bytes:
    return records.build_outbox_record(
        bucket=bucket,
        seq=seq,
        record=record,
        record_bytes=records.encode_record(record),
        identity=identity_of(record),
    )


@given(message_records(), sequences)
def test_record_and_entry_survive_the_way(record: MessageRecord, seq: Seq) -> None:
    data = records.encode_record(record)
    assert records.decode_record(data) == record
    entry = records.decode_entry(records.build_entry(seq, data))
    assert (entry.conversation_seq, entry.record) == (seq, record)


@given(message_records(), sequences, buckets)
def test_header_is_a_function_of_the_record_and_says_what_it_says(
    record: MessageRecord, seq: Seq, bucket: BucketId
) -> None:
    data = outbox_of(record, seq, bucket)
    again = records.decode_record(records.encode_record(record))
    assert outbox_of(again, seq, bucket) == data
    header = records.parse_header(data)
    assert (header.bucket, header.tenant, header.seq) == (bucket, record.tenant, seq)
    assert (header.reserved_at, header.kind) == (record.reserved_at, record.kind)
    assert (header.sender, header.sender_device) == (record.sender, record.sender_device)
    assert header.identity == identity_of(record)
    assert header.ephemeral == (record.retention_class == records.RetentionClass.EPHEMERAL)
    entry = records.outbox_entry(data)
    records.check_entry(header, entry)
    assert records.decode_entry(entry).record == record


@given(message_records(), sequences, st.binary(min_size=1, max_size=40))
def test_other_content_under_one_sequence_has_one_dispatch_id_and_another_digest(
    record: MessageRecord, seq: Seq, more: bytes
) -> None:
    changed = msgspec.structs.replace(record, body=record.body + more)
    one = records.parse_header(outbox_of(record, seq, BucketId(0)))
    two = records.parse_header(outbox_of(changed, seq, BucketId(0)))
    assert one.dispatch_base == two.dispatch_base
    assert one.dispatch_digest != two.dispatch_digest


@given(
    message_records(),
    sequences,
    st.integers(0, 63).map(SlotId),
    st.integers(0, 255),
    st.lists(ids.map(UserId), min_size=1, max_size=70),
)
def test_dispatch_record_keeps_order_of_recipients_header_and_entry(
    record: MessageRecord, seq: Seq, shard: SlotId, part: int, recipients: list[UserId]
) -> None:
    outbox = outbox_of(record, seq, BucketId(7))
    data = records.build_dispatch_record(outbox, shard=shard, part=part, recipients=tuple(recipients))
    dispatch = records.parse_dispatch_record(data)
    assert dispatch.recipients == tuple(recipients)
    assert (dispatch.shard, dispatch.part) == (shard, part)
    assert dispatch.header == records.parse_header(outbox)
    assert dispatch.entry == records.outbox_entry(outbox)
    assert dispatch.dispatch_id == dispatch.header.dispatch_base + bytes((shard, part))


@given(message_records(), sequences, st.data())
def test_truncated_records_are_corrupt(record: MessageRecord, seq: Seq, data: st.DataObject) -> None:
    encoded = records.encode_record(record)
    length = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(RecordCorrupt):
        records.decode_record(encoded[:length])
    entry = records.build_entry(seq, encoded)
    with pytest.raises(RecordCorrupt):
        records.decode_entry(entry[: data.draw(st.integers(0, len(entry) - 1))])
    outbox = outbox_of(record, seq, BucketId(0))
    with pytest.raises(RecordCorrupt):
        records.parse_header(outbox[: data.draw(st.integers(0, HEADER_BYTES - 1))])
    dispatch = records.build_dispatch_record(outbox, shard=SlotId(0), part=0, recipients=(record.sender,) * 3)
    head_bytes = len(dispatch) - len(entry)
    with pytest.raises(RecordCorrupt):
        records.parse_dispatch_record(dispatch[: data.draw(st.integers(0, head_bytes))])


@given(st.binary(max_size=400))
def test_garbage_is_corrupt_or_parsed_and_never_anything_else(garbage: bytes) -> None:
    for parse in (
        records.decode_record,
        records.decode_entry,
        records.parse_header,
        records.parse_dispatch_record,
    ):
        for data in (garbage, b"\x01\x01\x00\x07" + garbage):
            try:
                parse(data)
            except RecordCorrupt:
                continue


@given(message_records(), st.integers(0, 10_000), st.integers(0, 255))
def test_record_with_one_changed_byte_is_corrupt_or_another_record(
    record: MessageRecord, place: int, value: int
) -> None:
    data = bytearray(records.encode_record(record))
    data[place % len(data)] = value
    try:
        decoded = records.decode_record(bytes(data))
    except RecordCorrupt:
        return
    assert records.decode_record(records.encode_record(decoded)) == decoded


@given(message_records(), st.binary(min_size=1, max_size=5), st.text(min_size=1, max_size=5))
def test_identity_changes_with_every_field_a_client_chose(
    record: MessageRecord, more_body: bytes, more_type: str
) -> None:
    identity = identity_of(record)
    assert len(identity) == records.IDENTITY_BYTES
    others = {
        identity_of(record, body=record.body + more_body),
        identity_of(record, custom_type=record.custom_type + more_type),
        identity_of(record, message_type=record.message_type + 1),
        identity_of(record, retention_class=record.retention_class + 1),
        identity_of(record, client_message_id=bytes(16 * [1])),
    }
    assert identity not in others or record.client_message_id == bytes(16 * [1])


def test_text_cannot_move_between_custom_type_and_body() -> None:
    shared: dict[str, Any] = {
        "tenant": TenantId(1),
        "conversation": ConversationId(bytes(16)),
        "sender": UserId(bytes(16)),
        "client_message_id": ClientMessageId(bytes(16)),
        "message_type": 2,
        "retention_class": 0,
    }
    one = records.identity_digest(custom_type="ab", body=b"c", **shared)
    two = records.identity_digest(custom_type="a", body=b"bc", **shared)
    assert one != two

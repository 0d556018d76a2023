"""The bytes of records: fixed places that other processes and other releases rely on."""

import msgspec
import pytest

from qim import records
from qim.errors import RecordCorrupt
from qim.ids import (
    BucketId,
    ClientMessageId,
    ConversationId,
    DeviceId,
    Millis,
    Seq,
    SlotId,
    TenantId,
    UserId,
)

ALICE, BOB = UserId(b"a" * 16), UserId(b"b" * 16)
CONVERSATION = ConversationId(b"c" * 16)
IDENTITY = records.identity_digest(
    tenant=TenantId(7),
    conversation=CONVERSATION,
    sender=BOB,
    client_message_id=ClientMessageId(b"m" * 16),
    message_type=1,
    retention_class=0,
    custom_type="",
    body=b"hello",
)
RECORD = records.MessageRecord(
    version=1,
    tenant=TenantId(7),
    conversation_id=CONVERSATION,
    kind=records.Kind.DIRECT,
    parties=ALICE + BOB,
    message_id=records.message_id_of(IDENTITY),
    sender=BOB,
    sender_device=DeviceId(b"d" * 16),
    client_message_id=ClientMessageId(b"m" * 16),
    message_type=1,
    custom_type="",
    body=b"hello",
    retention_class=0,
    reserved_at=Millis(1_700_000_000_123),
    membership_version=0,
)
OUTBOX = records.build_outbox_record(
    bucket=BucketId(0x0102 % 256),
    seq=Seq(258),
    record=RECORD,
    record_bytes=records.encode_record(RECORD),
    identity=IDENTITY,
)


def test_header_fields_stand_where_the_drawing_says() -> None:
    assert OUTBOX[:2] == b"\x02\x01"
    assert OUTBOX[2:4] == b"\x00\x02"
    assert OUTBOX[4:8] == (7).to_bytes(4, "big")
    assert OUTBOX[8:16] == (258).to_bytes(8, "big")
    assert OUTBOX[16:24] == RECORD.reserved_at.to_bytes(8, "big")
    assert OUTBOX[24:40] == RECORD.conversation_id
    assert OUTBOX[48:84] == IDENTITY
    assert OUTBOX[84:100] == BOB
    assert OUTBOX[100:116] == RECORD.sender_device
    assert OUTBOX[116:148] == ALICE + BOB
    assert records.outbox_entry(OUTBOX) == b"\x92\xcd\x01\x02" + records.encode_record(RECORD)


def test_message_id_is_a_slice_of_the_identity() -> None:
    assert IDENTITY[:4] == b"QID1"
    assert IDENTITY[4:20] == RECORD.message_id


def test_header_names_both_users_smaller_first() -> None:
    assert records.parse_header(OUTBOX).users == (ALICE, BOB)


def test_group_header_carries_group_and_version() -> None:
    group = msgspec.structs.replace(RECORD, kind=records.Kind.GROUP, parties=b"g" * 16, membership_version=3)
    data = records.build_outbox_record(
        bucket=BucketId(0),
        seq=Seq(1),
        record=group,
        record_bytes=records.encode_record(group),
        identity=IDENTITY,
    )
    header = records.parse_header(data)
    assert header.parties == b"g" * 16 + (3).to_bytes(8, "big") + bytes(8)
    assert header.group == (b"g" * 16, 3, records.MEMBERS_AT_VERSION)


@pytest.mark.shows("F2", "G7")
def test_group_header_says_where_its_audience_is_listed() -> None:
    """A reader that takes the members instead would tell a whole large group of each change."""
    named = msgspec.structs.replace(
        RECORD, kind=records.Kind.GROUP, parties=b"g" * 16, membership_version=3, audience=(ALICE,)
    )
    frame = records.build_outbox_frame(
        bucket=BucketId(0), record=named, record_bytes=records.encode_record(named), identity=IDENTITY
    )
    data = records.fill_outbox_frame(frame, seq=Seq(1), record_bytes=records.encode_record(named))
    assert data[140:148] == (1).to_bytes(8, "big")
    assert records.parse_header(data).group == (b"g" * 16, 3, records.LISTED_IN_RECORD)


def test_recipients_keep_their_order_also_when_it_is_not_sorted() -> None:
    data = records.build_dispatch_record(OUTBOX, shard=SlotId(5), part=2, recipients=(BOB, ALICE, BOB))
    assert data[148:152] == b"\x05\x02\x00\x03"
    assert records.parse_dispatch_record(data).recipients == (BOB, ALICE, BOB)


@pytest.mark.parametrize(
    ("place", "value", "what"),
    [(0, 1, "version"), (0, 0, "version"), (1, 3, "kind"), (1, 0, "kind"), (2, 1, "bucket")],
)
def test_header_of_no_known_shape_is_corrupt(place: int, value: int, what: str) -> None:
    data = bytearray(OUTBOX)
    data[place] = value
    with pytest.raises(RecordCorrupt, match=what):
        records.parse_header(bytes(data))


def test_dispatch_record_with_no_recipient_a_foreign_shard_or_no_entry_is_corrupt() -> None:
    good = records.build_dispatch_record(OUTBOX, shard=SlotId(5), part=0, recipients=(ALICE,))
    for data in (
        good[:148] + b"\x05\x00\x00\x00" + good[152:],
        good[:148] + b"\x40\x00\x00\x01" + good[152:],
        good[: 152 + 16],
        good[:150],
    ):
        with pytest.raises(RecordCorrupt):
            records.parse_dispatch_record(data)


def test_entry_of_another_sequence_contradicts_its_header() -> None:
    header = records.parse_header(OUTBOX)
    records.check_entry(header, records.outbox_entry(OUTBOX))
    with pytest.raises(RecordCorrupt):
        records.check_entry(header, records.build_entry(Seq(259), records.encode_record(RECORD)))


def test_record_of_another_version_or_with_a_short_id_is_corrupt() -> None:
    for change in ({"version": 2}, {"sender": UserId(b"short")}, {"conversation_id": ConversationId(b"")}):
        data = records.encode_record(msgspec.structs.replace(RECORD, **change))
        with pytest.raises(RecordCorrupt):
            records.decode_record(data)


def test_ignored_field_nested_without_end_is_corrupt() -> None:
    fields = msgspec.msgpack.decode(records.encode_record(RECORD))
    extra = b"\xdc\x00\x11" + msgspec.msgpack.encode(fields)[3:] + b"\x91" * 200_000
    with pytest.raises(RecordCorrupt):
        records.decode_record(extra)

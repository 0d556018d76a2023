"""What the writer decides about a SEND, without a store."""

from typing import Any

import pytest

from qim.domain.writer import plan_again, plan_history, plan_send, route_direct, route_group
from qim.errors import ClientError, InvalidArgument, TooLarge, Unsupported
from qim.ids import GroupId, Seq, TenantId, UserId
from qim.records import IDENTITY_BYTES, MessageType, decode_record, message_id_of

TENANT = TenantId(7)
ALICE = UserId(b"a" * 16)
BOB = UserId(b"b" * 16)
GROUP = GroupId(b"g" * 16)

VALID: dict[str, Any] = {
    "tenant": TENANT,
    "sender": ALICE,
    "device": b"d" * 16,
    "target_kind": 1,
    "target": BOB,
    "client_message_id": b"m" * 16,
    "message_type": 1,
    "custom_type": "",
    "body": b"hello",
    "retention_class": 0,
    "now_ms": 1_700_000_000_000,
}


def test_a_valid_send_becomes_one_record_whose_bytes_decode_to_it() -> None:
    planned = plan_send(**VALID)
    record = decode_record(planned.record_bytes)
    assert record == planned.record
    assert record.sender == ALICE
    assert record.parties == ALICE + BOB
    assert record.conversation_id == planned.route.conversation
    assert record.message_id == message_id_of(planned.identity)
    assert len(planned.identity) == IDENTITY_BYTES
    assert planned.expires_at == 0


def test_an_ephemeral_message_expires_a_day_later() -> None:
    assert plan_send(**VALID | {"retention_class": 1}).expires_at == VALID["now_ms"] + 86_400_000


def test_both_users_name_the_same_conversation() -> None:
    assert route_direct(TENANT, ALICE, BOB) == route_direct(TENANT, BOB, ALICE)
    assert route_direct(TENANT, ALICE, BOB) != route_direct(TenantId(8), ALICE, BOB)


def test_a_user_may_write_to_herself() -> None:
    assert plan_send(**VALID | {"target": ALICE}).record.parties == ALICE + ALICE


@pytest.mark.parametrize("body", [b"", b"\x00", "grüß 🎉".encode(), b"x" * 65_536])
def test_every_text_is_kept_byte_for_byte(body: bytes) -> None:
    assert plan_send(**VALID | {"body": body}).record.body == body


@pytest.mark.parametrize("message_type", [MessageType.CUSTOM, MessageType.MEDIA_REF])
def test_other_types_carry_any_bytes(message_type: MessageType) -> None:
    assert plan_send(**VALID | {"message_type": message_type, "body": b"\xff\xfe"}).record.body == b"\xff\xfe"


@pytest.mark.shows("X16")
@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"target_kind": 2}, Unsupported),
        ({"target_kind": 2, "target": b"short", "versions": {}}, InvalidArgument),
        ({"target_kind": 2, "message_type": MessageType.CONTROL, "versions": {}}, InvalidArgument),
        ({"target_kind": 3}, InvalidArgument),
        ({"target": b"short"}, InvalidArgument),
        ({"client_message_id": b"short"}, InvalidArgument),
        ({"message_type": MessageType.CONTROL}, InvalidArgument),
        ({"message_type": 4}, InvalidArgument),
        ({"retention_class": 4}, InvalidArgument),
        ({"custom_type": "ü" * 65}, TooLarge),
        ({"body": b"\xff\xfe"}, InvalidArgument),
        ({"body": b"x" * 65_537}, TooLarge),
    ],
)
def test_a_send_is_refused_before_it_reaches_a_store(
    change: dict[str, Any], refusal: type[ClientError]
) -> None:
    with pytest.raises(refusal):
        plan_send(**VALID | change)


@pytest.mark.shows("G1")
def test_a_message_to_a_group_names_the_known_version_or_the_first() -> None:
    fields = VALID | {"target_kind": 2, "target": GROUP}
    new = plan_send(**fields, versions={})
    known = plan_send(**fields, versions={new.route.conversation: 7})
    assert new.record.parties == GROUP
    assert [planned.record.membership_version for planned in (new, known)] == [1, 7]
    assert plan_send(**VALID, versions={}).record.membership_version == 0


def test_a_message_that_is_planned_again_is_the_same_message_to_another_version() -> None:
    fields = VALID | {"target_kind": 2, "target": GROUP}
    old = plan_send(**fields, versions={})
    versions = {old.route.conversation: 2}
    assert plan_again(old, versions) == plan_send(**fields, versions=versions)
    assert plan_again(old, versions).identity == old.identity


def test_groups_of_two_tenants_have_nothing_in_common() -> None:
    one, other = route_group(TENANT, GROUP), route_group(TenantId(8), GROUP)
    assert one.conversation != other.conversation


def test_a_history_page_goes_one_way_only() -> None:
    where: dict[str, Any] = {"tenant": TENANT, "user": ALICE, "kind": 1, "target": BOB}
    route = plan_history(**where, before_seq=Seq(5), after_seq=Seq(0))
    assert route == route_direct(TENANT, ALICE, BOB)
    with pytest.raises(InvalidArgument):
        plan_history(**where, before_seq=Seq(5), after_seq=Seq(1))

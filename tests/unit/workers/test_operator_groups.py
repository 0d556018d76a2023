"""What `qimctl membership` makes a worker do: words and exit codes of every answer."""

from typing import Any

import pytest

from qim.errors import ControlRefused, ExitCode, StoreUnknown
from qim.records import MembershipOp
from tests.unit.workers.group_calls import CAROL, DAVE, GROUP, JOIN, NO_GROUP, REMOVE, create_group, outbox_of
from tests.unit.workers.rig import ALICE, BOB, TENANT, Rig
from workers.control import parse_id, parse_tenant
from workers.operator_groups import change_members, list_members
from workers.writer import Writer

REQUEST = "11" * 16


@pytest.fixture
async def rig() -> Rig:
    rig = await Rig().prepare()
    await create_group(rig, (ALICE, BOB))
    return rig


@pytest.fixture
def writer(rig: Rig) -> Writer:
    return rig.roles().writer


async def order(writer: Writer, op: MembershipOp, *users: bytes, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"tenant": TENANT, "group": GROUP.hex(), "request_id": REQUEST} | changes
    return await change_members(writer, op, users=[user.hex() for user in users], **fields)


async def page(writer: Writer, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"tenant": TENANT, "group": GROUP.hex()} | changes
    return await list_members(writer, **fields)


@pytest.mark.shows("X11", "G13")
async def test_a_change_names_its_event_and_a_repeat_gives_the_same_answer(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        added = await order(writer, JOIN, CAROL, DAVE)
        await order(writer, REMOVE, DAVE, request_id="22" * 16)
        again = await order(writer, JOIN, CAROL, DAVE)
    assert added == {
        "group": GROUP.hex(), "request_id": REQUEST, "event_seq": 1, "member_count": 4,
        "membership_version": 2,
    }  # fmt: skip
    assert again == added
    assert [header.seq for header, _entry in await outbox_of(rig)] == [1, 2]


async def test_what_is_in_effect_already_has_no_event(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        told = await order(writer, JOIN, BOB)
    assert (told["event_seq"], told["member_count"], told["membership_version"]) == (None, 2, 1)


async def test_the_list_says_who_is_in_since_when_page_by_page(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        await order(writer, JOIN, CAROL)
        first = await page(writer, limit=2)
        last = await page(writer, after=first["next"], limit=-1)
    assert {key: first[key] for key in ("name", "owner", "membership_version", "total", "next")} == {
        "name": "the group", "owner": ALICE.hex(), "membership_version": 2, "total": 3, "next": BOB.hex(),
    }  # fmt: skip
    assert first["members"] == [{"user": user.hex(), "joined_at": 0} for user in (ALICE, BOB)]
    assert last["members"] == [{"user": CAROL.hex(), "joined_at": 0}]
    assert last["next"] is None


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"group": NO_GROUP.hex()}, ExitCode.NO, "there is no such group"),
        ({"group": "short"}, ExitCode.USAGE, "a group is 32 hexadecimal digits"),
        ({"request_id": "zz" * 16}, ExitCode.USAGE, "a request id is 32 hexadecimal digits"),
        ({"tenant": -1}, ExitCode.USAGE, "a tenant is a number"),
    ],
)
async def test_what_cannot_be_done_is_a_refusal_with_a_reason(
    rig: Rig, writer: Writer, changes: dict[str, Any], code: ExitCode, words: str
) -> None:
    async with rig.running(writer):
        with pytest.raises(ControlRefused, match=words) as raised:
            await order(writer, JOIN, CAROL, **changes)
        assert raised.value.exit_code == code
        if "request_id" not in changes:
            with pytest.raises(ControlRefused, match=words):
                await page(writer, **changes)
    assert not await outbox_of(rig)


async def test_a_change_of_nobody_is_wrong_usage(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        with pytest.raises(ControlRefused, match="1 to 500 users") as raised:
            await order(writer, JOIN)
    assert raised.value.exit_code == ExitCode.USAGE


@pytest.mark.shows("X11")
async def test_an_unknown_outcome_is_told_as_one_and_the_same_command_settles_it(
    rig: Rig, writer: Writer
) -> None:
    rig.memberships.fail("change_memberships", StoreUnknown(), applied=True)
    async with rig.running(writer):
        with pytest.raises(ControlRefused, match="same request id") as raised:
            await order(writer, JOIN, CAROL)
        told = await order(writer, JOIN, CAROL)
    assert raised.value.exit_code == ExitCode.UNREACHABLE
    assert (told["event_seq"], told["member_count"]) == (1, 3)
    assert len(await outbox_of(rig)) == 1


def test_ids_and_tenants_of_a_command_are_checked() -> None:
    assert parse_id("user", "0a" * 16) == b"\n" * 16
    assert parse_tenant(0) == 0
    for text in ("", "0a" * 15, "0a" * 17, "xy" * 16, 7, None):
        with pytest.raises(ControlRefused):
            parse_id("user", text)  # type: ignore[arg-type]  # whatever JSON holds
    for number in (-1, 2**32, "1", None):
        with pytest.raises(ControlRefused):
            parse_tenant(number)

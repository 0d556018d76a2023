"""Messages to groups at the writer: who may send, to which members, and what a change in between costs."""

from typing import Any

import pytest

from qim.errors import StoreBroken, StoreError, StoreRefused, StoreUnknown
from qim.limits import MEMBERSHIP_RETRIES_MAX
from qim.records import decode_entry
from tests.unit.workers.group_calls import (
    CAROL,
    DAVE,
    GROUP,
    JOIN,
    LEAVE,
    NO_GROUP,
    PLACE,
    REMOVE,
    ROUTE,
    change,
    create_group,
    last_and_head,
    outbox_of,
    send_to_group,
)
from tests.unit.workers.rig import ALICE, BOB, Client, Rig
from tests.waiting import happens
from workers.writer import Writer

PERMISSION_DENIED, UNSUPPORTED, UNAVAILABLE, MEMBERSHIP_CHANGED = 1002, 1006, 2001, 2004


@pytest.fixture
async def rig() -> Rig:
    rig = await Rig().prepare()
    await create_group(rig)
    return rig


@pytest.fixture(params=[False, True], ids=["two_steps", "one_step"])
def writer(rig: Rig, request: pytest.FixtureRequest) -> Writer:
    return rig.roles(one_step=request.param).writer


async def answered(client: Client, count: int) -> None:
    await happens(lambda: len(client.answers) >= count, what=f"{count} answers")


@pytest.mark.shows("G2")
async def test_a_message_to_a_group_is_acknowledged_and_its_record_names_the_members_version(
    rig: Rig, writer: Writer
) -> None:
    async with rig.running(writer):
        send_to_group(rig, writer, 1, 2)
        await answered(rig.alice, 2)
    assert [(ack.conversation_id, ack.conversation_seq) for ack in rig.alice.acks] == [
        (ROUTE.conversation, 1),
        (ROUTE.conversation, 2),
    ]
    for seq, (header, entry) in enumerate(await outbox_of(rig), start=1):
        assert (header.kind, header.seq, header.sender, header.bucket) == (2, seq, ALICE, ROUTE.bucket)
        assert header.group == (GROUP, 1, 0)
        record = decode_entry(entry).record
        assert (record.kind, record.parties, record.membership_version, record.audience) == (
            2,
            GROUP,
            1,
            None,
        )
    assert rig.metrics.writer_membership_retries == 0


@pytest.mark.shows("G1", "G2", "F-49")
async def test_after_a_change_a_message_goes_to_the_new_members_and_consumes_one_sequence(
    rig: Rig, writer: Writer
) -> None:
    await change(rig, JOIN, CAROL)
    async with rig.running(writer):
        send_to_group(rig, writer, 1)
        await answered(rig.alice, 1)
        send_to_group(rig, writer, 2)
        await answered(rig.alice, 2)
    assert [ack.conversation_seq for ack in rig.alice.acks] == [2, 3]
    assert [header.group.version for header, _entry in await outbox_of(rig)] == [2, 2]
    assert last_and_head(rig) == (3, 3)
    assert rig.metrics.writer_membership_retries == 1, "the version was not remembered"


@pytest.mark.shows("G1")
async def test_the_retried_record_says_the_same_version_in_all_its_places(rig: Rig, writer: Writer) -> None:
    await change(rig, JOIN, CAROL)
    async with rig.running(writer):
        send_to_group(rig, writer, 1)
        await answered(rig.alice, 1)
    ((header, entry),) = await outbox_of(rig)
    assert decode_entry(entry).record.membership_version == header.group.version == 2
    stored = rig.commit_state.conversations[PLACE].records[2]
    assert entry.endswith(stored)


@pytest.mark.shows("G1", "X16")
async def test_members_that_change_each_time_end_in_a_refusal_that_consumed_nothing(
    rig: Rig, writer: Writer
) -> None:
    changes = overtaken_by_changes(rig, times=MEMBERSHIP_RETRIES_MAX + 1)
    async with rig.running(writer):
        send_to_group(rig, writer, 1)
        await answered(rig.alice, 1)
        assert rig.alice.errors == [MEMBERSHIP_CHANGED]
        assert rig.metrics.writer_membership_retries == MEMBERSHIP_RETRIES_MAX
        assert last_and_head(rig) == (len(changes), len(changes))
        send_to_group(rig, writer, 1)
        await answered(rig.alice, 2)
    assert [ack.conversation_seq for ack in rig.alice.acks] == [len(changes) + 1]
    assert not rig.alice.acks[0].duplicate


@pytest.mark.shows("G1")
async def test_members_that_change_three_times_in_between_do_not_refuse_the_message(
    rig: Rig, writer: Writer
) -> None:
    changes = overtaken_by_changes(rig, times=MEMBERSHIP_RETRIES_MAX)
    async with rig.running(writer):
        send_to_group(rig, writer, 1)
        await answered(rig.alice, 1)
    assert [ack.conversation_seq for ack in rig.alice.acks] == [len(changes) + 1]
    assert rig.metrics.writer_membership_retries == MEMBERSHIP_RETRIES_MAX


def overtaken_by_changes(rig: Rig, *, times: int) -> list[int]:
    """Just before the store sees an attempt, somebody joins or is removed; the sequences of the events."""
    done: list[int] = []
    store, one_step = rig.commits.inner, rig.one_step.inner
    reserve, commit = store.reserve, one_step.commit

    def change_first(call: Any) -> Any:
        async def changed(*args: Any) -> Any:
            if len(done) < times:
                op = REMOVE if len(done) % 2 else JOIN
                done.append(await change(rig, op, CAROL))
            return await call(*args)

        return changed

    store.reserve, one_step.commit = change_first(reserve), change_first(commit)
    return done


@pytest.mark.shows("G12", "X16")
@pytest.mark.parametrize("op", [LEAVE, REMOVE])
async def test_who_is_no_member_any_more_is_refused_and_consumes_nothing(
    rig: Rig, writer: Writer, op: Any
) -> None:
    await change(rig, op, BOB)
    async with rig.running(writer):
        send_to_group(rig, writer, 1, client=rig.bob)
        await answered(rig.bob, 1)
        send_to_group(rig, writer, 1)
        await answered(rig.alice, 1)
    assert rig.bob.errors == [PERMISSION_DENIED]
    assert [ack.conversation_seq for ack in rig.alice.acks] == [2]


@pytest.mark.shows("F-48")
async def test_a_stranger_cannot_tell_a_group_from_one_that_does_not_exist(rig: Rig, writer: Writer) -> None:
    dave = Client(rig.clock, user=DAVE)
    async with rig.running(writer):
        send_to_group(rig, writer, 1, client=dave)
        send_to_group(rig, writer, 1, client=dave, group=NO_GROUP)
        send_to_group(rig, writer, 2, client=dave, group=BOB)
        await answered(dave, 3)
    assert dave.errors == [PERMISSION_DENIED] * 3
    assert len({repr(body) for _id, body in dave.answers}) == 1


@pytest.mark.shows("G2", "C4")
async def test_a_repeat_after_a_change_gets_its_first_coordinates(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        send_to_group(rig, writer, 1)
        await answered(rig.alice, 1)
        await change(rig, JOIN, CAROL)
        send_to_group(rig, writer, 1)
        await answered(rig.alice, 2)
        await change(rig, REMOVE, ALICE)
        send_to_group(rig, writer, 1)
        await answered(rig.alice, 3)
    assert [ack.conversation_seq for ack in rig.alice.acks] == [1, 1, 1]
    assert [ack.duplicate for ack in rig.alice.acks] == [False, True, True]
    assert len(await outbox_of(rig)) == 1


@pytest.mark.parametrize("error", [StoreRefused(), StoreUnknown(), StoreBroken()])
async def test_a_group_that_cannot_be_asked_for_is_told_as_unavailable_and_nothing_was_written(
    rig: Rig, writer: Writer, error: StoreError
) -> None:
    await change(rig, JOIN, CAROL)
    rig.memberships.fail("load_groups", error)
    async with rig.running(writer):
        send_to_group(rig, writer, 1)
        await answered(rig.alice, 1)
        assert rig.alice.errors == [UNAVAILABLE]
        assert last_and_head(rig) == (1, 1)
        send_to_group(rig, writer, 1)
        await answered(rig.alice, 2)
    assert [ack.conversation_seq for ack in rig.alice.acks] == [2]


async def test_direct_messages_of_the_pass_are_acknowledged_while_a_group_is_asked_for(
    rig: Rig, writer: Writer
) -> None:
    await change(rig, JOIN, CAROL)
    learnt = rig.memberships.hold("load_groups")
    async with rig.running(writer):
        send_to_group(rig, writer, 1)
        rig.send(writer, 2)
        await answered(rig.alice, 1)
        assert rig.alice.acks[0].conversation_id != ROUTE.conversation
        learnt.set()
        await answered(rig.alice, 2)
    assert len(rig.alice.acks) == 2


async def test_a_change_that_is_not_finished_does_not_hold_messages_up(rig: Rig, writer: Writer) -> None:
    await change(rig, JOIN, CAROL, finished=False)
    async with rig.running(writer):
        send_to_group(rig, writer, 1)
        await answered(rig.alice, 1)
        assert [ack.conversation_seq for ack in rig.alice.acks] == [2]
        assert last_and_head(rig) == (2, 0)
        rig.clock.advance(milliseconds=2_001)
        await writer.recover_once()
        assert last_and_head(rig) == (2, 2)
    (event,) = [header for header, _entry in await outbox_of(rig) if header.seq == 1]
    assert event.group == (GROUP, 2, 1), "the recoverer lost whom the event is for"


@pytest.mark.shows("G14")
async def test_without_a_store_of_groups_a_message_to_one_is_told_as_unsupported(rig: Rig) -> None:
    rig.all_memberships = []
    writer = rig.roles().writer
    async with rig.running(writer):
        send_to_group(rig, writer, 1)
        rig.send(writer, 2)
        await answered(rig.alice, 2)
    assert rig.alice.errors == [UNSUPPORTED]
    assert len(rig.alice.acks) == 1

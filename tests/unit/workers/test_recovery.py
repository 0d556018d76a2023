"""What a kill leaves is finished from what is stored: without the client, with the same bytes."""

import pytest

from qim.errors import StoreUnknown
from qim.ids import Offset, SlotId
from qim.records import decode_record, entry_coordinates, outbox_entry, parse_header
from tests.unit.workers.rig import ALICE, BOB, Rig, build_outbox
from tests.waiting import happens
from workers.failpoints import Action

COUNT = 20
HOME = SlotId(0)


async def _check_delivered(rig: Rig, count: int) -> None:
    await rig.deliver()
    for user in (ALICE, BOB):
        assert sorted(await rig.sequences_of(user)) == list(range(1, count + 1))


@pytest.mark.shows("F-02", "F-03", "C3", "C11")
@pytest.mark.parametrize("point", ["writer.reserved", "writer.appended"])
async def test_what_was_recorded_at_a_kill_is_finished_without_its_client(point: str) -> None:
    rig = await Rig().prepare()
    writer = rig.roles(failpoints={point: Action("raise")}).writer
    rig.send(writer, *range(COUNT))
    await rig.run_until_killed(writer)
    assert rig.alice.acks == []
    assert rig.head() == (COUNT, 0), "RECORDED, and not visible"
    await rig.claim()
    rig.clock.advance(milliseconds=3_000)
    assert await rig.roles().writer.recover_once() == COUNT
    assert rig.head() == (COUNT, COUNT)
    assert not rig.commit_state.pending
    await _check_delivered(rig, COUNT)


@pytest.mark.shows("C4")
async def test_a_retry_goes_on_with_the_bytes_that_were_stored_first() -> None:
    rig = await Rig().prepare()
    writer = rig.roles().writer
    rig.commits.fail("reserve", StoreUnknown(), applied=True)
    async with rig.running(writer):
        rig.send(writer, 1)
        await happens(lambda: len(rig.alice.answers) == 1, what="the unknown outcome")
        rig.clock.advance(milliseconds=1_500)
        rig.send(writer, 1)
        await happens(lambda: len(rig.alice.acks) == 1, what="the acknowledgement of the retry")
    ((_place, conversation),) = rig.commit_state.conversations.items()
    stored = conversation.records[1]
    (record,) = await rig.outbox.read(HOME, Offset(0), records_max=9)
    assert outbox_entry(record.data).endswith(stored)
    reserved_at = decode_record(stored).reserved_at
    assert parse_header(record.data).reserved_at == rig.alice.acks[0].reserved_at == reserved_at


@pytest.mark.shows("C1", "C2")
async def test_all_that_follows_an_acknowledgement_can_be_had_from_the_log_alone() -> None:
    rig = await Rig().prepare()
    writer = rig.roles().writer
    async with rig.running(writer):
        rig.send(writer, *range(COUNT))
        await happens(lambda: len(rig.alice.acks) == COUNT, what="the acknowledgements")
    records = await rig.outbox.read(HOME, Offset(0), records_max=1_000)
    sequences = [entry_coordinates(outbox_entry(record.data))[0] for record in records]
    assert sequences == list(range(1, COUNT + 1))
    await _check_delivered(rig, COUNT)


@pytest.mark.shows("X6")
async def test_no_consumer_assumes_that_the_outbox_is_in_the_order_of_sequences() -> None:
    rig = await Rig().prepare()
    await rig.outbox.append([(HOME, build_outbox(seq=seq)) for seq in (3, 1, 4, 2)])
    await _check_delivered(rig, 4)

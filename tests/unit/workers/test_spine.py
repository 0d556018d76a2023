"""The whole spine in one process: writer → Outbox → fan-out → dispatch → mailbox, and kills at every step.

A kill drops all roles at a named step. The next ones start on what the stores and logs hold, claim with
higher epochs, recover, and the client sends everything again. Whatever the step, afterwards every message is
there once: same coordinates as acknowledged, sequences without a gap, one entry in each mailbox.
"""

from functools import partial

import pytest

from qim.adapters.commitlog_memory import Fault
from qim.errors import StoreError, StoreRefused, StoreUnknown
from qim.ids import SlotId
from qim.limits import SLOTS
from qim.wire.bodies import SendAck
from tests.unit.workers.rig import ALICE, BOB, Client, Rig, Roles, build_dispatches
from tests.waiting import happens
from workers.failpoints import NAMES, Action
from workers.writer import Writer

COUNT = 60
SECOND_GROUP = COUNT // 2

# One-to-one messages alone do not enter the general path, killed in test_mailbox.py, and change no group,
# which is killed in test_group_changes.py.
POINTS = sorted(NAMES - {"mailbox.begun", "mailbox.entries", "writer.changed"})
WAYS = [(point, False) for point in POINTS] + [
    (point, True) for point in POINTS if point not in {"writer.appended", "writer.marked"}
]
"""Where to kill, and whether commits are made in one step, which has no steps between."""


async def _check(rig: Rig, acks: list[SendAck]) -> None:
    """Everything acknowledged, gap-free, once in both mailboxes."""
    coordinates: dict[bytes, set[tuple[int, bytes, int]]] = {}
    for ack in acks:
        known = coordinates.setdefault(bytes(ack.client_message_id), set())
        known.add((ack.conversation_seq, bytes(ack.message_id), ack.reserved_at))
    assert len(coordinates) == COUNT
    assert all(len(places) == 1 for places in coordinates.values()), "coordinates are stable"
    sequences = sorted(seq for places in coordinates.values() for seq, _id, _time in places)
    assert sequences == list(range(1, COUNT + 1))
    assert rig.head() == (COUNT, COUNT)
    assert not rig.commit_state.pending
    for user in (ALICE, BOB):
        entries = await rig.mailbox_of(user)
        assert sorted(seq for _mailbox_seq, seq in entries) == sequences
        assert [seq for seq, _ in entries] == sorted({seq for seq, _ in entries})


async def _restart_and_finish(rig: Rig, client: Client, *, one_step: bool) -> None:
    await rig.claim()
    rig.clock.advance(milliseconds=3_000)
    writer, fanout, mailbox = rig.roles(one_step=one_step)
    await writer.recover_once(older_than_ms=0)
    async with rig.running(writer, fanout, mailbox):
        before = len(client.acks)
        rig.send(writer, *range(COUNT), client=client)

        def answered() -> bool:
            rig.clock.advance(milliseconds=10)
            return len(client.acks) == before + COUNT

        await happens(answered, what="every message is acknowledged")
        await rig.settled(fanout, mailbox)


@pytest.mark.shows("F-01", "F-02", "F-03", "F-30", "C2", "C3", "C4", "C7", "C11", "F4", "M4", "M7", "X5")
@pytest.mark.parametrize(("point", "one_step"), WAYS)
@pytest.mark.parametrize("hit", [1, 2])
async def test_a_kill_at_any_step_loses_and_doubles_nothing(point: str, hit: int, one_step: bool) -> None:
    rig = await Rig().prepare()
    roles = rig.roles(failpoints={point: Action("raise", at_hit=hit)}, lanes=2, one_step=one_step)
    rig.send(roles.writer, *range(SECOND_GROUP))

    class Sender:
        """Sends a second group when the first one is on its way, so that there is a second hit."""

        async def run(self) -> None:
            await happens(
                lambda: "append" in rig.dispatch.calls or bool(rig.alice.acks), what="the first group"
            )
            await happens(lambda: len(rig.alice.acks) >= SECOND_GROUP, what="the first acknowledgements")
            await happens(lambda: rig.metrics.mailbox_entries >= SECOND_GROUP, what="the first entries")
            await happens(lambda: bool(rig.commit_state.positions), what="the first position")
            rig.send(roles.writer, *range(SECOND_GROUP, COUNT))

    await rig.run_until_killed(*roles, Sender())
    acknowledged = list(rig.alice.acks)
    again = Client(rig.clock)
    await _restart_and_finish(rig, again, one_step=one_step)
    await _check(rig, [*acknowledged, *again.acks])


@pytest.mark.shows("F-30", "C4")
async def test_acknowledgements_that_were_lost_are_given_again_with_the_same_coordinates() -> None:
    rig = await Rig().prepare()
    writer, fanout, mailbox = rig.roles()
    async with rig.running(writer, fanout, mailbox):
        rig.send(writer, *range(COUNT))
        await happens(lambda: len(rig.alice.acks) == COUNT, what="the acknowledgements that nobody reads")
        again = Client(rig.clock)
        rig.send(writer, *range(COUNT), client=again)
        await happens(lambda: len(again.acks) == COUNT, what="the same again")
        await rig.settled(fanout, mailbox)
    assert all(ack.duplicate for ack in again.acks)
    await _check(rig, [*rig.alice.acks, *again.acks])


@pytest.mark.shows("C7", "X5", "X6")
async def test_a_message_left_half_done_sends_its_conversation_on_the_long_way_until_it_is_finished() -> None:
    """A server that went in two steps leaves a RECORDED message behind; the next one goes in one step."""
    rig = await Rig().prepare()
    await rig.run_until_killed(*_sending(rig, rig.roles(failpoints={"writer.reserved": Action("raise")})))
    assert len(rig.commit_state.pending) == 1
    await rig.claim()
    writer, fanout, mailbox = rig.roles(one_step=True)
    async with rig.running(writer, fanout, mailbox):
        rig.send(writer, *range(1, COUNT))
        await happens(lambda: len(rig.alice.acks) == COUNT - 1, what="the others are acknowledged")
        assert "reserve" in rig.commits.calls
        assert rig.head() == (COUNT, 0), "nothing above the unfinished one is shown"
        rig.clock.advance(milliseconds=3_000)
        await writer.recover_once()
        reserved = rig.commits.calls.count("reserve")
        rig.send(writer, 0)
        await happens(lambda: len(rig.alice.acks) == COUNT, what="the first one, repeated")
        assert rig.commits.calls.count("reserve") == reserved
        await rig.settled(fanout, mailbox)
    await _check(rig, rig.alice.acks)


@pytest.mark.shows("F4", "M7")
async def test_a_commit_in_one_step_whose_outbox_record_is_doubled_leaves_each_entry_once() -> None:
    rig = await Rig().prepare()
    rig.outbox.inner.faults.append(Fault.DOUBLED)
    writer, fanout, mailbox = rig.roles(one_step=True)
    async with rig.running(writer, fanout, mailbox):
        rig.send(writer, *range(COUNT))
        await happens(lambda: len(rig.alice.acks) == COUNT, what="the acknowledgements")
        await rig.settled(fanout, mailbox)
    marks = await rig.outbox.watermarks([SlotId(slot) for slot in range(SLOTS)])
    assert sum(mark.high for mark in marks.values()) > COUNT, "something stands there twice"
    await _check(rig, rig.alice.acks)


def _sending(rig: Rig, roles: Roles) -> Roles:
    rig.send(roles.writer, 0)
    return roles


@pytest.mark.shows("F-31", "M7", "F4")
async def test_a_fanout_that_goes_back_doubles_nothing() -> None:
    rig = await Rig().prepare()
    writer, fanout, mailbox = rig.roles()
    async with rig.running(writer, fanout, mailbox):
        rig.send(writer, *range(COUNT))
        await happens(lambda: len(rig.alice.acks) == COUNT, what="the acknowledgements")
        await rig.settled(fanout, mailbox)
    rig.commit_state.positions.clear()
    await rig.deliver()
    marks = await rig.dispatch.watermarks([build_dispatches(seq=1)[0][0]])
    assert all(mark.high == 2 * COUNT for mark in marks.values()), "everything was dispatched twice"
    await _check(rig, rig.alice.acks)


@pytest.mark.shows("X6", "C7", "F4", "M7")
@pytest.mark.parametrize(
    ("error", "applied"), [(StoreRefused(), False), (StoreUnknown(), False), (StoreUnknown(), True)]
)
@pytest.mark.parametrize("one_step", [False, True])
async def test_stores_that_fail_now_and_then_lose_and_double_nothing(
    error: StoreError, applied: bool, one_step: bool
) -> None:
    rig = await Rig().prepare()
    writer, fanout, mailbox = rig.roles(one_step=one_step)
    for store, names in (
        (rig.one_step, ("commit",)),
        (rig.commits, ("reserve", "mark_committed", "store_positions")),
        (rig.outbox, ("append",)),
        (rig.dispatch, ("append",)),
        (rig.mailboxes, ("materialise",)),
    ):
        for name in names:
            _fail_every_third(store, name, error, applied=applied)
    async with rig.running(writer, fanout, mailbox):
        for number in range(COUNT):
            rig.send(writer, number)
            await happens(partial(_settled, rig, number), what="an acknowledgement")
            if number not in _acknowledged(rig):
                await _insist(rig, writer, number)
        rig.clock.advance(milliseconds=3_000)
        while rig.commit_state.pending:
            rig.clock.advance(milliseconds=1_000)
            await writer.recover_once()

        def delivered() -> bool:
            rig.clock.advance(milliseconds=10)
            home, dispatch = rig.outbox.inner.partition(SlotId(0)), rig.dispatch.inner
            through = all(at + 1 >= dispatch.partition(slot).high for slot, at in mailbox.positions.items())
            return through and fanout.positions[SlotId(0)] + 1 >= home.high

        await happens(delivered, what="everything is delivered", timeout_seconds=30)
    await _check(rig, rig.alice.acks)


def _fail_every_third(store: object, name: str, error: StoreError, *, applied: bool) -> None:
    count = [0]

    def rule(*_args: object) -> StoreError | None:
        count[0] += 1
        return type(error)() if count[0] % 3 == 0 else None

    rules = getattr(store, "after" if applied else "before")
    rules[name] = rule


def _acknowledged(rig: Rig) -> set[int]:
    return {int.from_bytes(ack.client_message_id, "big") for ack in rig.alice.acks}


def _settled(rig: Rig, number: int) -> bool:
    return len(rig.alice.answers) > 0 and (number in _acknowledged(rig) or bool(rig.alice.errors))


def _has_more(rig: Rig, count: int) -> bool:
    return len(rig.alice.answers) > count


async def _insist(rig: Rig, writer: Writer, number: int) -> None:
    while number not in _acknowledged(rig):
        count = len(rig.alice.answers)
        rig.clock.advance(milliseconds=100)
        rig.send(writer, number)
        await happens(partial(_has_more, rig, count), what="an answer")

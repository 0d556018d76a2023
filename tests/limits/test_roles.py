"""The queues of the server's roles, filled to their real bounds: what is full says so, and serves again
after.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from qim import errors
from qim.domain.gateway import Rate
from qim.ids import DispatchId, MailboxSeq, Millis, SlotId, UserId
from qim.limits import (
    BATCHES_IN_FLIGHT_MAX,
    FANOUT_BATCH_RECORDS_MAX,
    FUSED_RUN_ENTRIES_MAX,
    MAILBOX_BATCH_RECORDS_MAX,
    MAILBOX_PERMITS,
    PULLS_WAITING_MAX,
    RECOVER_AGE_MS,
    UNANSWERED_REQUESTS_MAX,
    UNFINISHABLE_MESSAGES_MAX,
    WRITER_BATCH_MESSAGES_MAX,
    WRITER_WAITING_MESSAGES_MAX,
)
from qim.ports import Begun, Commit, MailboxWrite, Materialised
from qim.wire.bodies import MailboxBatch, Ping, PullMailbox, build_message, encode_body
from qim.wire.frames import build_frame
from qim.wire.layout import Op
from tests.unit.workers.gateway_rig import GatewayRig, send_body
from tests.unit.workers.rig import (
    ALICE,
    BOB,
    BUCKET,
    CONVERSATION,
    TENANT,
    Rig,
    build_dispatches,
    build_outbox,
    shard_of,
    slot_of_conversation,
)
from tests.waiting import happens, stays
from workers.failpoints import Failpoints
from workers.serial import Serial
from workers.writer import Writer

RESOURCE_EXHAUSTED = errors.ResourceExhausted.code
CAROL = UserId(b"carol-0123456789")


class Gate:
    """Lets calls of one method take effect and holds their answers; counts how many are out at once."""

    def __init__(self, inner: Callable[..., Awaitable[Any]]) -> None:
        self._inner = inner
        self._open = asyncio.Event()
        self.out = 0
        self.most = 0

    def __call__(self, *args: Any) -> Awaitable[Any]:
        self.out += 1
        self.most = max(self.most, self.out)
        return asyncio.ensure_future(self._answer(self._inner(*args)))

    async def _answer(self, result: Awaitable[Any]) -> Any:
        await self._open.wait()
        self.out -= 1
        return await result

    def open(self) -> None:
        self._open.set()


def gate(faulty: Any, method: str) -> Gate:
    """Puts a gate in front of a method of a store or a log of the rig."""
    held = Gate(getattr(faulty.inner, method))
    setattr(faulty, method, held)
    return held


@pytest.fixture
async def rig() -> Rig:
    return await Rig().prepare()


# --- a connection ------------------------------------------------------------------------------------


async def test_a_connection_with_too_many_open_requests_is_cut_and_its_user_served_again() -> None:
    quick = Rate(1_000_000, 1_000_000)
    async with GatewayRig(sends=quick) as rig:
        client = await rig.logged_in()
        numbers = range(2, 2 + UNANSWERED_REQUESTS_MAX)
        client.send(*(build_frame(Op.SEND_MESSAGE, number, send_body()) for number in numbers))
        await rig.requests(UNANSWERED_REQUESTS_MAX)
        assert not rig.router.withdrawn
        client.send(build_frame(Op.SEND_MESSAGE, numbers[-1] + 1, send_body()))
        assert (await client.goaway()).code == errors.SlowConsumer.code
        again = await rig.logged_in()
        again.send(build_message(Op.PING, 2, Ping()))
        await again.body(Op.PONG)


# --- writer ------------------------------------------------------------------------------------------


async def test_a_full_writer_refuses_the_next_and_commits_all_that_it_took(rig: Rig) -> None:
    writer = rig.roles().writer
    rig.send(writer, *range(WRITER_WAITING_MESSAGES_MAX))
    assert rig.alice.answers == []
    rig.send(writer, WRITER_WAITING_MESSAGES_MAX)
    assert rig.alice.errors == [RESOURCE_EXHAUSTED]
    assert rig.head() == (0, 0), "what was refused has a sequence"
    async with rig.running(writer):
        await happens(lambda: len(rig.alice.acks) == WRITER_WAITING_MESSAGES_MAX, what="all are acknowledged")
        rig.send(writer, WRITER_WAITING_MESSAGES_MAX)
        await happens(lambda: len(rig.alice.acks) == WRITER_WAITING_MESSAGES_MAX + 1, what="and the next")
        await happens(lambda: rig.head()[1] == WRITER_WAITING_MESSAGES_MAX + 1, what="all are visible")


async def _half_done(rig: Rig, writer: Writer, count: int) -> None:
    """Leaves so many messages to Bob, and one to Carol, without their Outbox record."""
    rig.outbox.fail("append", errors.StoreUnknown(), times=1_000)
    rig.send(writer, *range(count))
    rig.send(writer, count, target=CAROL)
    await happens(lambda: len(rig.alice.answers) == count + 1, what="all are answered as unknown")
    rig.outbox.before.clear()
    rig.clock.advance(milliseconds=RECOVER_AGE_MS + 1)


async def test_messages_that_cannot_be_finished_are_noted_up_to_the_bound_then_their_slot_stops_alone(
    rig: Rig,
) -> None:
    writer = rig.roles().writer
    stops = writer._instances[0].commits.stops
    async with rig.running(writer):
        await _half_done(rig, writer, UNFINISHABLE_MESSAGES_MAX + 1)
        conversation = rig.commit_state.conversations[(BUCKET, TENANT, CONVERSATION)]
        whole = dict(conversation.records)
        conversation.records.update(dict.fromkeys(whole, b"garbage"))
        assert await writer.recover_once() == 1, "Carol's"
        assert len(stops.unfinishable) == UNFINISHABLE_MESSAGES_MAX
        assert list(stops.slots) == [slot_of_conversation()]
        rig.send(writer, 1_000)
        rig.send(writer, 1_000, target=CAROL)
        await happens(lambda: len(rig.alice.answers) == UNFINISHABLE_MESSAGES_MAX + 4, what="the next")
        assert rig.alice.errors[-1] == errors.Unavailable.code
        assert len(rig.alice.acks) == 1
        conversation.records.update(whole)
        assert await writer.recover_once() == 0, "before the operator's word"
        assert writer.retry(slot_of_conversation())
        assert await writer.recover_once() == UNFINISHABLE_MESSAGES_MAX + 1
        assert not writer.stopped


async def test_messages_that_cannot_be_noted_any_more_are_not_appended_again_and_again(rig: Rig) -> None:
    writer = rig.roles().writer
    async with rig.running(writer):
        await _half_done(rig, writer, UNFINISHABLE_MESSAGES_MAX + 9)
        rig.commits.before["mark_committed"] = _broken_for_bob
        await writer.recover_once()
        marks = await rig.outbox.watermarks([SlotId(0)])
        for _round in range(3):
            assert await writer.recover_once() == 0
        assert await rig.outbox.watermarks([SlotId(0)]) == marks


def _broken_for_bob(items: list[Commit]) -> errors.StoreError | None:
    return errors.StoreBroken("wrong type") if any(item.key.bucket == BUCKET for item in items) else None


async def test_a_writer_has_four_passes_in_flight_and_no_more(rig: Rig) -> None:
    writer = rig.roles().writer
    held = gate(rig.outbox, "append")
    count = (BATCHES_IN_FLIGHT_MAX + 1) * WRITER_BATCH_MESSAGES_MAX
    rig.send(writer, *range(count))
    async with rig.running(writer):
        await happens(lambda: held.out == BATCHES_IN_FLIGHT_MAX, what="every lane has a pass under way")
        await stays(lambda: writer.waiting == WRITER_BATCH_MESSAGES_MAX, what="the rest waits")
        held.open()
        await happens(lambda: len(rig.alice.acks) == count, what="all are acknowledged")
    assert held.most == BATCHES_IN_FLIGHT_MAX


# --- fan-out -----------------------------------------------------------------------------------------


async def test_a_fan_out_has_four_appends_in_flight_and_no_more(rig: Rig) -> None:
    _writer, fanout, mailbox = rig.roles()
    held = gate(rig.dispatch, "append")
    home = SlotId(0)
    count = (BATCHES_IN_FLIGHT_MAX + 1) * FANOUT_BATCH_RECORDS_MAX
    await rig.outbox.append([(home, build_outbox(seq=seq)) for seq in range(1, count + 1)])
    async with rig.running(fanout, mailbox):
        await happens(lambda: held.out == BATCHES_IN_FLIGHT_MAX, what="the window is full")
        await stays(lambda: held.out == BATCHES_IN_FLIGHT_MAX, what="no further batch is read")
        assert fanout.positions[home] == -1
        held.open()
        await rig.settled(fanout, mailbox)
    assert held.most == BATCHES_IN_FLIGHT_MAX
    assert sorted(await rig.sequences_of(BOB)) == [*range(1, count + 1)]


# --- mailbox -----------------------------------------------------------------------------------------


async def test_a_mailbox_has_four_batches_in_flight_and_no_more(rig: Rig) -> None:
    mailbox = rig.roles().mailbox
    held = gate(rig.mailboxes, "materialise")
    shard = shard_of(BOB)
    count = (BATCHES_IN_FLIGHT_MAX + 1) * MAILBOX_BATCH_RECORDS_MAX
    records = [
        record for seq in range(1, count + 1) for record in build_dispatches(seq=seq) if record[0] == shard
    ]
    await rig.dispatch.append(records)
    runs = MAILBOX_BATCH_RECORDS_MAX // FUSED_RUN_ENTRIES_MAX
    async with rig.running(mailbox):
        await happens(lambda: held.out == BATCHES_IN_FLIGHT_MAX * runs, what="the window is full")
        await stays(lambda: held.out == BATCHES_IN_FLIGHT_MAX * runs, what="no further batch is read")
        held.open()
        await happens(lambda: mailbox.positions[shard] == count - 1, what="every record is finished")
    assert held.most == BATCHES_IN_FLIGHT_MAX * runs
    assert await rig.sequences_of(BOB) == [*range(1, count + 1)]


async def test_a_full_mailbox_refuses_the_next_pull_and_answers_all_that_it_took(rig: Rig) -> None:
    mailbox = rig.roles().mailbox
    pull = encode_body(PullMailbox(MailboxSeq(0), 10))

    def ask(count: int) -> None:
        for _pull in range(count):
            mailbox.submit(rig.bob.request(Op.PULL_MAILBOX, pull))

    ask(PULLS_WAITING_MAX + 1)
    assert rig.bob.errors == [RESOURCE_EXHAUSTED]
    async with rig.running(mailbox):

        def answered() -> int:
            return sum(isinstance(body, MailboxBatch) for _id, body in rig.bob.answers)

        await happens(lambda: answered() == PULLS_WAITING_MAX, what="all that were taken are answered")
        ask(1)
        await happens(lambda: answered() == PULLS_WAITING_MAX + 1, what="and the next")


class HeldStore:
    """A store that knows one record, whose appends wait for a word."""

    def __init__(self) -> None:
        self.append_entries = Gate(self._append)

    async def begin_dispatch(self, write: MailboxWrite, expected: MailboxSeq) -> Begun:
        return Begun(Materialised.OPEN, 1)

    async def _append(self, *_arguments: Any) -> Materialised:
        return Materialised.DONE

    async def finish_dispatch(self, write: MailboxWrite, expected: MailboxSeq) -> Materialised:
        return Materialised.DONE


async def test_the_general_path_has_no_more_calls_in_flight_than_permits() -> None:
    """By more records than a worker has under way, which is one of each shard."""
    store: Any = HeldStore()
    nobody: Any = None
    serial = Serial(shards=nobody, pauses=nobody, pushes=nobody, store=store, failpoints=Failpoints())
    name, digest = DispatchId(b"d" * 16), b"8 bytes."
    write = MailboxWrite(SlotId(0), MailboxSeq(1), name, digest, Millis(0), TENANT, (ALICE,), b"", False)
    calls = [
        asyncio.ensure_future(serial._general(write, MailboxSeq(0))) for _call in range(MAILBOX_PERMITS + 8)
    ]
    await happens(lambda: store.append_entries.out == MAILBOX_PERMITS, what="every permit is taken")
    await stays(lambda: store.append_entries.out == MAILBOX_PERMITS, what="no call goes out without one")
    store.append_entries.open()
    assert await asyncio.gather(*calls) == [Materialised.DONE] * len(calls)
    assert store.append_entries.most == MAILBOX_PERMITS

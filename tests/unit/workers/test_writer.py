"""The writer on memory adapters: what is acknowledged, what is refused, what the recoverer finishes."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from qim.adapters.commits_memory import MemoryCommitStore
from qim.errors import StoreBroken, StoreError, StoreRefused, StoreUnknown
from qim.ids import Seq, WorkerId
from qim.limits import SCRIPT_RUN_ITEMS_MAX, WRITER_WAITING_MESSAGES_MAX
from qim.ports import HistoryQuery, MessageKey, Reservation
from qim.wire.bodies import HistoryBatch, MarkRead, MarkReadAck, PullHistory, Target, encode_body
from qim.wire.layout import Op
from tests.unit.workers.rig import BOB, BUCKET, Rig, message_id, slot_of_conversation
from tests.waiting import happens, stays
from workers.writer import Writer

UNAVAILABLE = 2001
RESOURCE_EXHAUSTED = 2002
DEADLINE_EXCEEDED = 2003
CONFLICT = 1004


async def _outbox_records(rig: Rig) -> int:
    marks = await rig.outbox.watermarks([rig.placement.home_partition(WorkerId(0))])
    return sum(mark.high for mark in marks.values())


async def _answered(rig: Rig, count: int) -> None:
    await happens(lambda: len(rig.alice.answers) >= count, what=f"{count} answers")


@pytest.fixture
async def rig() -> Rig:
    return await Rig().prepare()


@pytest.fixture
def writer(rig: Rig) -> Writer:
    return rig.roles().writer


@pytest.mark.shows("C1", "C7")
async def test_sends_are_numbered_in_the_order_of_their_arrival(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        rig.send(writer, *range(1, 101))
        await _answered(rig, 100)
    assert [ack.conversation_seq for ack in rig.alice.acks] == list(range(1, 101))
    assert not any(ack.duplicate for ack in rig.alice.acks)
    assert rig.head() == (100, 100)
    assert rig.metrics.writer_commits == 100


@pytest.mark.shows("F-12")
async def test_a_store_above_four_fifths_of_its_memory_refuses_new_messages_only(
    rig: Rig, writer: Writer
) -> None:
    async with rig.running(writer):
        rig.send(writer, 1)
        await _answered(rig, 1)
        store = rig.commits.inner
        store.limit_bytes = store.state.record_bytes * 9 // 8
        await happens(lambda: _refused(rig, writer), what="the writer has noticed")
        assert rig.head() <= (2, 2), "a refused message took a sequence"
        store.limit_bytes = 0
        await happens(lambda: not _refused(rig, writer), what="the writer has noticed again")


def _refused(rig: Rig, writer: Writer) -> bool:
    """Sends one more and tells whether it was refused at once."""
    before = len(rig.alice.answers)
    rig.send(writer, 2)
    return len(rig.alice.answers) > before and rig.alice.errors[-1:] == [RESOURCE_EXHAUSTED]


@pytest.mark.shows("C2")
async def test_nothing_is_acknowledged_before_its_append_is_durable(rig: Rig, writer: Writer) -> None:
    durable = rig.outbox.hold("append")
    async with rig.running(writer):
        rig.send(writer, 1)
        await happens(lambda: "append" in rig.outbox.calls, what="the append")
        await stays(lambda: not rig.alice.answers, what="no answer", period_seconds=0.05)
        durable.set()
        await _answered(rig, 1)
    assert len(rig.alice.acks) == 1


@pytest.mark.shows("C4")
async def test_a_repeat_gets_the_same_coordinates_and_is_not_appended_again(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        rig.send(writer, 1)
        await _answered(rig, 1)
        rig.clock.advance(milliseconds=7_199_999)
        rig.send(writer, 1)
        await _answered(rig, 2)
    first, again = rig.alice.acks
    assert (first.duplicate, again.duplicate) == (False, True)
    assert again == msgspec.structs.replace(first, duplicate=True)
    assert await _outbox_records(rig) == 1


@pytest.mark.shows("C4")
async def test_a_repeat_that_comes_while_the_first_is_in_flight_waits_for_it(
    rig: Rig, writer: Writer
) -> None:
    durable = rig.outbox.hold("append")
    async with rig.running(writer):
        rig.send(writer, 1, 1)
        await happens(lambda: "append" in rig.outbox.calls, what="the append")
        rig.send(writer, 1)
        await stays(lambda: not rig.alice.answers, what="no answer", period_seconds=0.05)
        durable.set()
        await _answered(rig, 3)
    assert [ack.conversation_seq for ack in rig.alice.acks] == [1, 1, 1]
    assert [ack.duplicate for ack in rig.alice.acks] == [False, True, True]
    assert await _outbox_records(rig) == 1


async def test_a_repeat_that_comes_before_the_mark_is_answered_gets_its_coordinates_at_once(
    rig: Rig, writer: Writer
) -> None:
    marked = rig.commits.hold("mark_committed")
    async with rig.running(writer):
        rig.send(writer, 1)
        await _answered(rig, 1)
        rig.send(writer, 1)
        await _answered(rig, 2)
        marked.set()
    assert [ack.duplicate for ack in rig.alice.acks] == [False, True]


@pytest.mark.shows("C5")
async def test_the_same_id_with_other_content_is_refused_and_consumes_nothing(
    rig: Rig, writer: Writer
) -> None:
    async with rig.running(writer):
        rig.send(writer, 1)
        rig.send(writer, 1, body=b"something else")
        await _answered(rig, 2)
        rig.send(writer, 1, body=b"a third thing")
        await _answered(rig, 3)
        rig.send(writer, 2)
        await _answered(rig, 4)
    assert rig.alice.errors == [CONFLICT, CONFLICT]
    assert rig.head() == (2, 2)
    assert rig.metrics.writer_conflicts == 2


@pytest.mark.shows("C4", "C7")
@pytest.mark.parametrize("applied", [False, True])
async def test_an_unknown_append_is_answered_as_unknown_and_finished_by_the_recoverer(
    rig: Rig, writer: Writer, applied: bool
) -> None:
    rig.outbox.fail("append", StoreUnknown(), applied=applied)
    async with rig.running(writer):
        rig.send(writer, 1)
        await _answered(rig, 1)
        assert rig.alice.errors == [DEADLINE_EXCEEDED]
        assert rig.head() == (1, 0), "RECORDED, and not visible"
        rig.clock.advance(milliseconds=2_001)
        assert await writer.recover_once() == 1
        rig.send(writer, 1, 2)
        await _answered(rig, 3)
    assert [(ack.conversation_seq, ack.duplicate) for ack in rig.alice.acks] == [(1, True), (2, False)]
    assert rig.head() == (2, 2)
    assert await _outbox_records(rig) == (3 if applied else 2)


async def test_a_record_whose_own_append_failed_does_not_fail_its_neighbours(
    rig: Rig, writer: Writer
) -> None:
    inner = rig.outbox.inner
    append = inner.append

    async def lose_the_second(records: Any) -> Any:
        offsets = await append(records)
        return [None if index == 1 else offset for index, offset in enumerate(offsets)]

    inner.append = lose_the_second
    async with rig.running(writer):
        rig.send(writer, 1, 2, 3)
        await _answered(rig, 3)
    assert [ack.conversation_seq for ack in rig.alice.acks] == [1, 3]
    assert rig.alice.errors == [DEADLINE_EXCEEDED]


@pytest.mark.shows("C7")
@pytest.mark.parametrize(
    ("error", "applied", "told"),
    [
        (StoreRefused(), False, UNAVAILABLE),
        (StoreUnknown(), False, DEADLINE_EXCEEDED),
        (StoreUnknown(), True, DEADLINE_EXCEEDED),
    ],
)
async def test_a_failed_reservation_is_settled_by_the_same_id(
    rig: Rig, writer: Writer, error: StoreError, applied: bool, told: int
) -> None:
    rig.commits.fail("reserve", error, applied=applied)
    async with rig.running(writer):
        rig.send(writer, 1)
        await _answered(rig, 1)
        assert rig.alice.errors == [told]
        rig.send(writer, 1)
        await _answered(rig, 2)
    assert [(ack.conversation_seq, ack.duplicate) for ack in rig.alice.acks] == [(1, applied)]
    assert rig.head() == (1, 1)


async def test_a_full_store_is_told_as_exhausted(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        rig.send(writer, 1)
        await _answered(rig, 1)
        rig.commits.inner.limit_bytes = 1
        rig.send(writer, 2, 1)
        await _answered(rig, 3)
    assert rig.alice.errors[0] == RESOURCE_EXHAUSTED
    assert rig.head() == (1, 1)


async def test_a_full_inbox_refuses_before_any_side_effect(rig: Rig, writer: Writer) -> None:
    rig.send(writer, *range(WRITER_WAITING_MESSAGES_MAX + 3))
    assert rig.alice.errors == [RESOURCE_EXHAUSTED] * 3
    assert rig.head() == (0, 0)
    assert rig.metrics.shed_queue == 3


async def test_a_request_that_waited_too_long_is_refused_untouched(rig: Rig, writer: Writer) -> None:
    rig.send(writer, 1)
    rig.clock.advance(milliseconds=8_001)
    async with rig.running(writer):
        await _answered(rig, 1)
    assert rig.alice.errors == [UNAVAILABLE]
    assert rig.head() == (0, 0)


async def test_a_request_in_flight_for_too_long_is_told_so_and_goes_on(rig: Rig, writer: Writer) -> None:
    durable = rig.outbox.hold("append")
    async with rig.running(writer):
        rig.send(writer, 1)
        await happens(lambda: "append" in rig.outbox.calls, what="the append")
        rig.clock.advance(milliseconds=8_001)
        await happens(lambda: rig.alice.errors == [DEADLINE_EXCEEDED], what="the sweep")
        durable.set()
        rig.send(writer, 1)
        await _answered(rig, 2)
    assert [(ack.conversation_seq, ack.duplicate) for ack in rig.alice.acks] == [(1, True)]


@pytest.mark.shows("F-03", "C4", "X6")
@pytest.mark.parametrize("applied", [False, True])
async def test_a_failed_mark_keeps_the_ack_and_is_repeated(rig: Rig, writer: Writer, applied: bool) -> None:
    rig.commits.fail("mark_committed", StoreUnknown(), applied=applied)
    async with rig.running(writer):
        rig.send(writer, 1)
        await _answered(rig, 1)
        assert len(rig.alice.acks) == 1
        rig.clock.advance(milliseconds=2_001)
        await happens(lambda: rig.head() == (1, 1), what="the recoverer")
    assert await _outbox_records(rig) == (1 if applied else 2)


@pytest.mark.shows("X5")
async def test_history_ends_at_an_unfinished_message_and_goes_on_when_it_is_finished(
    rig: Rig, writer: Writer
) -> None:
    rig.outbox.fail("append", StoreUnknown())
    async with rig.running(writer):
        rig.send(writer, 1)
        await _answered(rig, 1)
        rig.send(writer, 2)
        await _answered(rig, 2)
        assert await _history(rig, writer) == []
        rig.clock.advance(milliseconds=2_001)
        await writer.recover_once()
        assert await _history(rig, writer) == [2, 1]


async def _history(rig: Rig, writer: Writer) -> list[int]:
    count = len(rig.alice.answers)
    writer.submit(rig.alice.request(Op.PULL_HISTORY, encode_body(PullHistory(Target(1, BOB)))))
    await _answered(rig, count + 1)
    batch = rig.alice.answers[-1][1]
    assert isinstance(batch, HistoryBatch)
    return [bytes(entry)[1] for entry in batch.records]


@pytest.mark.shows("C2")
async def test_who_was_acknowledged_reads_it_although_the_mark_is_not_answered(
    rig: Rig, writer: Writer
) -> None:
    marked = rig.commits.hold("mark_committed")
    async with rig.running(writer):
        rig.send(writer, 1)
        await _answered(rig, 1)
        assert await _history(rig, writer) == [1]
        marked.set()


async def test_a_read_mark_is_clamped_and_answered(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        rig.send(writer, 1, 2)
        await _answered(rig, 2)
        writer.submit(rig.bob.request(Op.MARK_READ, encode_body(MarkRead(Target(1, rig.alice.user), Seq(1)))))
        writer.submit(
            rig.bob.request(Op.MARK_READ, encode_body(MarkRead(Target(1, rig.alice.user), Seq(99))))
        )
        await happens(lambda: len(rig.bob.answers) == 2, what="the marks")
    marks = [body for _id, body in rig.bob.answers]
    assert all(isinstance(mark, MarkReadAck) for mark in marks)
    assert [(mark.read_seq, mark.unread) for mark in marks] == [(1, 1), (2, 0)]


@pytest.mark.shows("G14")
@pytest.mark.parametrize("opcode", [Op.SESSION_LIST_REQ, Op.CREATE_GROUP, Op.LEAVE_GROUP])
async def test_what_is_not_offered_is_told_so(rig: Rig, opcode: Op) -> None:
    rig.all_memberships = []
    writer = rig.roles().writer
    async with rig.running(writer):
        writer.submit(rig.alice.request(opcode, b"\x90"))
        await _answered(rig, 1)
    assert rig.alice.errors == [1006]


async def test_an_unreadable_body_fails_alone(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        writer.submit(rig.alice.request(Op.SEND_MESSAGE, b"\xc1"))
        rig.send(writer, 1)
        await _answered(rig, 2)
    assert rig.alice.errors == [1003]
    assert len(rig.alice.acks) == 1


async def test_a_read_that_the_store_refuses_is_asked_again_by_the_client(rig: Rig, writer: Writer) -> None:
    rig.commits.fail("read_history", StoreUnknown())
    async with rig.running(writer):
        writer.submit(rig.alice.request(Op.PULL_HISTORY, encode_body(PullHistory(Target(1, BOB)))))
        await _answered(rig, 1)
    assert rig.alice.errors == [UNAVAILABLE]


@pytest.mark.shows("X9", "C2", "C7")
async def test_a_store_that_cannot_commit_what_is_durable_stops_the_slot_instead_of_piling_it_up(
    rig: Rig, writer: Writer
) -> None:
    rig.commits.fail("mark_committed", StoreBroken("wrong type"), times=1_000)
    async with rig.running(writer):
        rig.send(writer, 1, 2)
        await happens(lambda: bool(writer.stopped), what="the slot stops")
        rig.send(writer, 3)
        await _answered(rig, 3)
        assert rig.alice.errors == [UNAVAILABLE]
        assert rig.head() == (2, 0)
        rig.commits.before.clear()
        assert writer.retry(slot_of_conversation())
        assert await writer.recover_once(older_than_ms=-1) == 2
        rig.send(writer, 3)
        await _answered(rig, 4)
        await happens(lambda: rig.head() == (3, 3), what="everything is committed")
    assert not writer.stopped


@pytest.mark.shows("X9", "C7")
async def test_a_broken_outbox_partition_refuses_sends_serves_reads_and_goes_on_when_it_is_whole(
    rig: Rig, writer: Writer
) -> None:
    rig.outbox.fail("append", StoreBroken("no stream"), times=1_000)
    async with rig.running(writer):
        rig.send(writer, 1)
        await _answered(rig, 1)
        rig.send(writer, 2)
        writer.submit(rig.alice.request(Op.PULL_HISTORY, encode_body(PullHistory(Target(1, BOB)))))
        await _answered(rig, 3)
        assert rig.alice.errors == [DEADLINE_EXCEEDED, UNAVAILABLE]
        assert "Outbox partition 0" in writer.stopped
        assert not rig.fatal
        rig.outbox.before.clear()
        await writer.recover_once(older_than_ms=-1)
        assert not writer.stopped
        rig.send(writer, 1, 2)
        await _answered(rig, 5)
    assert [ack.conversation_seq for ack in rig.alice.acks] == [1, 2]
    assert not any(rig.metrics.slot_stopped)


async def test_a_broken_outbox_partition_with_nothing_left_to_try_is_tried_by_the_next_send(
    rig: Rig, writer: Writer
) -> None:
    writer._instances[0].commits.stops.break_outbox("no stream")
    await writer.recover_once()
    assert writer.stopped
    rig.clock.advance(milliseconds=9_000)
    await writer.recover_once()
    assert not writer.stopped


@pytest.mark.shows("X9")
async def test_a_conversation_that_cannot_be_read_spares_the_readers_of_others(
    rig: Rig, writer: Writer
) -> None:
    def broken(queries: list[HistoryQuery]) -> StoreError | None:
        return StoreBroken("wrong type") if any(query.bucket == BUCKET for query in queries) else None

    rig.commits.before["read_history"] = broken
    for target in (b"carol-0123456789", BOB, b"dave-0123456789a"):
        body = encode_body(PullHistory(Target(1, target)))
        writer.submit(rig.alice.request(Op.PULL_HISTORY, body))
    async with rig.running(writer):
        await _answered(rig, 3)
    assert rig.alice.errors == [UNAVAILABLE]
    assert [isinstance(body, HistoryBatch) for _id, body in rig.alice.answers] == [True, False, True]


async def test_a_stale_owner_commits_nothing_and_says_so_at_once(rig: Rig, writer: Writer) -> None:
    await Rig.claim(_successor(rig))
    async with rig.running(writer):
        rig.send(writer, 1)
        await _answered(rig, 1)
    assert rig.alice.errors == [UNAVAILABLE]
    assert rig.fatal == [slot_of_conversation()]
    assert rig.head() == (0, 0)


async def test_a_stale_owner_that_only_marks_what_was_read_says_so_at_once(rig: Rig, writer: Writer) -> None:
    await Rig.claim(_successor(rig))
    async with rig.running(writer):
        writer.submit(rig.alice.request(Op.MARK_READ, encode_body(MarkRead(Target(1, BOB), Seq(1)))))
        await _answered(rig, 1)
    assert rig.alice.errors == [UNAVAILABLE]
    assert rig.fatal == [slot_of_conversation()]


def _successor(rig: Rig) -> Rig:
    """Another process at the same instance, with a later boot."""
    other = Rig()
    other._boots = 7
    other.clock = rig.clock
    other.all_commits = [MemoryCommitStore(rig.clock, rig.commit_state)]
    return other


def _broken_for(number: int) -> Callable[..., StoreError | None]:
    def rule(items: list[Reservation]) -> StoreError | None:
        broken = any(item.key.client_message_id == message_id(number) for item in items)
        return StoreBroken("wrong type") if broken else None

    return rule


@pytest.mark.shows("X9")
async def test_a_store_that_contradicts_itself_stops_one_slot_and_spares_the_others(
    rig: Rig, writer: Writer
) -> None:
    rig.commits.before["reserve"] = _broken_for(2)
    other = b"carol-0123456789"
    async with rig.running(writer):
        rig.send(writer, 1, 2)
        rig.send(writer, 3, target=other)
        await _answered(rig, 3)
        assert rig.alice.errors == [DEADLINE_EXCEEDED]
        rig.send(writer, 4)
        rig.send(writer, 5, target=other)
        await _answered(rig, 5)
        assert rig.alice.errors == [DEADLINE_EXCEEDED, UNAVAILABLE]
        assert [ack.client_message_id for ack in rig.alice.acks] == [message_id(n) for n in (1, 3, 5)]
        assert list(writer.stopped) == [f"slot {slot_of_conversation()}"]
        rig.commits.before.clear()
        assert writer.retry(slot_of_conversation())
        assert not writer.retry(slot_of_conversation())
        rig.send(writer, 4)
        await _answered(rig, 6)
    assert rig.alice.acks[-1].client_message_id == message_id(4)
    assert not writer.stopped
    assert not any(rig.metrics.slot_stopped)


@pytest.mark.shows("C11")
async def test_the_recoverer_passes_over_what_it_cannot_finish(rig: Rig, writer: Writer) -> None:
    rig.outbox.fail("append", StoreUnknown())
    async with rig.running(writer):
        rig.send(writer, 1, 2)
        await _answered(rig, 2)
        (conversation,) = rig.commit_state.conversations.values()
        conversation.records[1] = b"garbage"
        rig.clock.advance(milliseconds=2_001)
        assert await writer.recover_once() == 1
        assert await writer.recover_once() == 0
    assert rig.head() == (2, 0)
    assert len(writer.stopped) == 1
    assert [key.client_message_id for key in rig.commit_state.pending] == [message_id(1)]
    assert isinstance(next(iter(rig.commit_state.pending)), MessageKey)


async def test_what_was_accepted_is_finished_before_a_drain_ends(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        rig.send(writer, *range(1, 1_001))
        await writer.drain(rig.clock.monotonic() + 5)
        rig.send(writer, 2_000)
    assert len(rig.alice.acks) == 1_000
    assert rig.alice.errors == [UNAVAILABLE]
    assert rig.head() == (1_000, 1_000)
    assert slot_of_conversation() == BUCKET // 4


@pytest.mark.shows("C4")
async def test_the_recoverer_leaves_alone_what_a_pass_still_works_on(rig: Rig, writer: Writer) -> None:
    durable = rig.outbox.hold("append")
    async with rig.running(writer):
        rig.send(writer, 1)
        await happens(lambda: "append" in rig.outbox.calls, what="the append")
        rig.clock.advance(milliseconds=3_000)
        assert await writer.recover_once() == 0
        durable.set()
        await _answered(rig, 1)
    assert await _outbox_records(rig) == 1


async def test_what_comes_while_a_pass_is_under_way_goes_together(rig: Rig, writer: Writer) -> None:
    durable = rig.outbox.hold("append")
    async with rig.running(writer):
        rig.send(writer, 1)
        await happens(lambda: "append" in rig.outbox.calls, what="the first append")
        rig.send(writer, 2)
        rig.send(writer, 3, 4)
        await stays(lambda: rig.commits.calls.count("reserve") == 1, what="the others wait for the pass")
        durable.set()
        await _answered(rig, 4)
        assert rig.commits.calls.count("reserve") == 2
    assert [ack.conversation_seq for ack in rig.alice.acks] == [1, 2, 3, 4]
    assert [ack.client_message_id for ack in rig.alice.acks] == [message_id(number) for number in range(1, 5)]


async def test_a_full_run_does_not_wait_for_the_pass_under_way(rig: Rig, writer: Writer) -> None:
    durable = rig.outbox.hold("append")
    async with rig.running(writer):
        rig.send(writer, 1)
        await happens(lambda: "append" in rig.outbox.calls, what="the first append")
        rig.send(writer, *range(2, 2 + SCRIPT_RUN_ITEMS_MAX))
        await happens(
            lambda: rig.commits.calls.count("reserve") == 2, what="the second pass beside the first"
        )
        durable.set()
        await _answered(rig, 1 + SCRIPT_RUN_ITEMS_MAX)


@pytest.mark.shows("C8")
async def test_each_conversation_is_committed_on_the_instance_of_its_bucket() -> None:
    rig = await Rig(instances=2).prepare()
    writer, fanout, mailbox = rig.roles()
    users = [f"user-{number:011}".encode() for number in range(40)]
    async with rig.running(writer, fanout, mailbox):
        for number, user in enumerate(users):
            rig.send(writer, number, target=user)
        await _answered(rig, len(users))
        await rig.settled(fanout, mailbox)
    assert len(rig.alice.acks) == len(users)
    first, second = rig.commit_states
    assert {bucket // 4 < 32 for bucket, _tenant, _conversation in first.conversations} == {True}
    assert {bucket // 4 < 32 for bucket, _tenant, _conversation in second.conversations} == {False}
    assert sorted(await rig.sequences_of(rig.alice.user)) == [1] * len(users)

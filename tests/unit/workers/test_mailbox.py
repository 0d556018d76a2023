"""The mailbox role on memory adapters: W, runs that fail, shards that stop alone, the operator's words."""

from collections.abc import Callable, Mapping, Sequence

import pytest

from qim.adapters.ownership_memory import done
from qim.domain.mailbox import read_dispatch
from qim.domain.presence import Session
from qim.errors import FailedPrecondition, StoreBroken, StoreError, StoreRefused, StoreUnknown
from qim.ids import DeviceId, Epoch, MailboxSeq, Offset, SessionId, SlotId, UserId, WorkerId
from qim.metrics import Metrics
from qim.ports import MailboxPageQuery, MailboxWrite, Materialised
from qim.wire.bodies import MailboxBatch, PullMailbox, encode_body
from qim.wire.layout import Op
from tests.unit.workers.rig import (
    ALICE,
    ALL_SLOTS,
    BOB,
    DEVICE,
    TENANT,
    Rig,
    build_dispatches,
    build_outbox,
    shard_of,
)
from tests.waiting import happens, stays
from workers.failpoints import Action
from workers.mailbox import Mailbox
from workers.shard_state import Shard, build_delivery

A = shard_of(ALICE)
B = shard_of(BOB)
assert A != B


@pytest.fixture
async def rig() -> Rig:
    return await Rig().prepare()


@pytest.fixture
def mailbox(rig: Rig) -> Mailbox:
    return rig.roles().mailbox


async def _feed(rig: Rig, *sequences: int, shards: Sequence[SlotId] = (A, B)) -> None:
    records = [item for seq in sequences for item in build_dispatches(seq=seq) if item[0] in shards]
    await rig.dispatch.append(records)


async def _reaches(mailbox: Mailbox, rig: Rig, wanted: Mapping[SlotId, int]) -> None:
    def reached() -> bool:
        rig.clock.advance(milliseconds=10)
        marks = mailbox.watermarks
        return all(marks.get(slot) == watermark for slot, watermark in wanted.items())

    await happens(reached, what=f"the watermarks {wanted}")


async def _stops(mailbox: Mailbox, rig: Rig, slot: SlotId) -> str:
    def stopped() -> bool:
        rig.clock.advance(milliseconds=10)
        return slot in mailbox.stopped

    await happens(stopped, what="the shard stops")
    return mailbox.stopped[slot].reason


@pytest.mark.shows("M4", "M7", "F5")
async def test_each_record_becomes_one_entry_per_recipient_and_moves_w(rig: Rig, mailbox: Mailbox) -> None:
    await _feed(rig, *range(1, 201))
    async with rig.running(mailbox):
        await _reaches(mailbox, rig, {A: 200, B: 200})
    entries = [(seq, seq) for seq in range(1, 201)]
    assert await rig.mailbox_of(ALICE) == entries
    assert await rig.mailbox_of(BOB) == entries
    assert rig.metrics.mailbox_entries == 400
    assert rig.metrics.watermark[A] == 200


async def test_mailbox_sequences_begin_at_the_base() -> None:
    rig = await Rig().prepare(base=1_000)
    mailbox = rig.roles().mailbox
    await _feed(rig, 1, 2)
    async with rig.running(mailbox):
        await _reaches(mailbox, rig, {A: 1_001})
    assert await rig.mailbox_of(ALICE) == [(1_000, 1), (1_001, 2)]


def _session(user: UserId, *, handle: int, worker: int = 0, device: bytes = b"e" * 16) -> Session:
    return Session(WorkerId(worker), handle, 1, TENANT, user, DeviceId(device), SessionId(b"s" * 16))


@pytest.mark.shows("M10")
async def test_a_push_starts_only_after_w_has_moved(rig: Rig, mailbox: Mailbox) -> None:
    rig.presence.sessions = {BOB: [_session(BOB, handle=1)]}
    answered = rig.mailboxes.hold("materialise")
    await _feed(rig, 1)
    async with rig.running(mailbox):
        await happens(lambda: "materialise" in rig.mailboxes.calls, what="the call")
        await stays(lambda: not rig.pusher.pushed, what="no push", period_seconds=0.05)
        answered.set()
        await happens(lambda: bool(rig.pusher.pushed), what="the push")
        assert mailbox.watermarks[B] == 1


@pytest.mark.shows("M10")
async def test_every_session_is_told_and_the_sending_device_gets_the_echo(rig: Rig, mailbox: Mailbox) -> None:
    rig.presence.sessions = {
        ALICE: [_session(ALICE, handle=1, device=DEVICE), _session(ALICE, handle=2)],
        BOB: [_session(BOB, handle=3, worker=1, device=DEVICE)],
    }
    await _feed(rig, 1, 2)
    async with rig.running(mailbox):
        await _reaches(mailbox, rig, {A: 2, B: 2})
        await happens(lambda: len(rig.pusher.pushed) == 4, what="the pushes")
    to_alice = [targets for worker, targets, _entry in rig.pusher.pushed if worker == 0]
    to_bob = [targets for worker, targets, _entry in rig.pusher.pushed if worker == 1]
    assert to_alice == [[(1, 1, 0, 1, True), (2, 1, 0, 1, False)], [(1, 1, 1, 2, True), (2, 1, 1, 2, False)]]
    assert to_bob == [[(3, 1, 0, 1, False)], [(3, 1, 1, 2, False)]]


@pytest.mark.shows("M5", "M7", "M4")
@pytest.mark.parametrize("applied", [False, True])
async def test_an_unknown_run_is_repeated_and_leaves_each_entry_once(
    rig: Rig, mailbox: Mailbox, applied: bool
) -> None:
    rig.mailboxes.fail("materialise", StoreUnknown(), times=3, applied=applied)
    await _feed(rig, *range(1, 151))
    async with rig.running(mailbox):
        await _reaches(mailbox, rig, {A: 150, B: 150})
    assert await rig.sequences_of(ALICE) == list(range(1, 151))
    assert await rig.sequences_of(BOB) == list(range(1, 151))
    assert not mailbox.stopped


def _only(slot: SlotId, error: StoreError) -> Callable[..., StoreError | None]:
    """Fails every call that names the slot."""

    def rule(_expected: object, writes: Sequence[MailboxWrite]) -> StoreError | None:
        return type(error)(*error.args) if any(write.slot == slot for write in writes) else None

    return rule


@pytest.mark.shows("M2", "M5", "X9")
async def test_a_shard_in_trouble_waits_alone_with_w_where_it_is(rig: Rig, mailbox: Mailbox) -> None:
    rig.mailboxes.before["materialise"] = _only(A, StoreUnknown())
    await _feed(rig, 1, 2, shards=[A])
    async with rig.running(mailbox):
        await happens(lambda: "materialise" in rig.mailboxes.calls, what="the first attempt")
        await _feed(rig, 1, 2, 3, shards=[B])
        await _reaches(mailbox, rig, {B: 3, A: 0})
        del rig.mailboxes.before["materialise"]
        await _reaches(mailbox, rig, {A: 2})
    assert await rig.sequences_of(ALICE) == [1, 2]


@pytest.mark.shows("M5", "X9", "F-33")
async def test_a_key_that_contradicts_itself_stops_its_shard_until_it_is_mended(
    rig: Rig, mailbox: Mailbox
) -> None:
    rig.mailboxes.before["materialise"] = _only(A, StoreBroken("wrong type"))
    await _feed(rig, 1, 2)
    async with rig.running(mailbox):
        await _reaches(mailbox, rig, {B: 2})
        assert await _stops(mailbox, rig, A) == "wrong type"
        assert mailbox.stopped[A].offset == 0
        assert rig.metrics.slot_stopped[A] == 1
        with pytest.raises(FailedPrecondition):
            await mailbox.retry(B)
        del rig.mailboxes.before["materialise"]
        await mailbox.retry(A)
        await _reaches(mailbox, rig, {A: 2})
    assert await rig.sequences_of(ALICE) == [1, 2]
    assert rig.metrics.slot_stopped[A] == 0


@pytest.mark.shows("X9", "M4", "F-34")
async def test_an_unreadable_record_stops_its_shard_and_only_the_operator_passes_it(
    rig: Rig, mailbox: Mailbox
) -> None:
    await _feed(rig, 1)
    await rig.dispatch.append([(A, b"garbage")])
    await _feed(rig, 2)
    async with rig.running(mailbox):
        await _reaches(mailbox, rig, {A: 1, B: 2})
        await _stops(mailbox, rig, A)
        await mailbox.retry(A)
        await _stops(mailbox, rig, A)
        assert mailbox.watermarks[A] == 1
        with pytest.raises(FailedPrecondition):
            await mailbox.skip(A, Offset(2))
        await mailbox.skip(A, Offset(1))
        await _reaches(mailbox, rig, {A: 3})
        with pytest.raises(FailedPrecondition):
            await mailbox.redeliver(A, Offset(1))
    assert await rig.mailbox_of(ALICE) == [(1, 1), (3, 2)]


async def test_a_skip_that_meets_a_newer_owner_changes_nothing_and_says_so(
    rig: Rig, mailbox: Mailbox
) -> None:
    await rig.dispatch.append([(A, b"garbage")])
    async with rig.running(mailbox):
        await _stops(mailbox, rig, A)
        owner = rig.mailbox_state.owners[A]
        rig.mailbox_state.owners[A] = owner._replace(epoch=Epoch(owner.epoch + 1))
        with pytest.raises(FailedPrecondition):
            await mailbox.skip(A, Offset(0))
    assert rig.fatal == [A]
    assert rig.mailbox_state.shards[A].watermark == 0


async def test_a_restart_directly_behind_a_skipped_record_starts(rig: Rig, mailbox: Mailbox) -> None:
    await rig.dispatch.append([(A, b"garbage")])
    async with rig.running(mailbox):
        await _stops(mailbox, rig, A)
        await mailbox.skip(A, Offset(0))
    later = rig.roles().mailbox
    await _feed(rig, 1)
    async with rig.running(later):
        await _reaches(later, rig, {A: 2})
    assert not later.stopped


@pytest.mark.shows("X9", "F-34")
async def test_an_entry_that_cannot_be_read_is_skipped_under_a_made_up_name_and_a_restart_knows_it(
    rig: Rig, mailbox: Mailbox
) -> None:
    def broken(slot: SlotId, offset: Offset) -> StoreError | None:
        return StoreBroken("entry") if (slot, offset) == (A, 0) else None

    await rig.dispatch.append([(A, b"garbage")])
    rig.dispatch.before["read"] = broken
    async with rig.running(mailbox):
        await _stops(mailbox, rig, A)
        await mailbox.skip(A, Offset(0))
    later = rig.roles().mailbox
    await _feed(rig, 1)
    async with rig.running(later):
        await _reaches(later, rig, {A: 2})
    assert not later.stopped


def _with_another_digest(record: bytes) -> bytes:
    return record[:40] + b"another!" + record[48:]


@pytest.mark.shows("M6", "X9", "F-32")
async def test_the_same_dispatch_with_another_digest_stops_the_shard(rig: Rig, mailbox: Mailbox) -> None:
    ((_slot, record),) = [item for item in build_dispatches(seq=1) if item[0] == A]
    await _feed(rig, 1)
    await rig.dispatch.append([(A, _with_another_digest(record))])
    await _feed(rig, 2)
    async with rig.running(mailbox):
        await _reaches(mailbox, rig, {A: 1, B: 2})
        assert "another digest" in await _stops(mailbox, rig, A)
        await mailbox.skip(A, Offset(1))
        await _reaches(mailbox, rig, {A: 3})
    assert await rig.sequences_of(ALICE) == [1, 2]


@pytest.mark.shows("M7", "F-31", "F4")
async def test_duplicated_dispatches_leave_each_entry_once(rig: Rig, mailbox: Mailbox) -> None:
    await _feed(rig, 1, 2)
    await _feed(rig, 2, 1, 3)
    async with rig.running(mailbox):
        await _reaches(mailbox, rig, {A: 5, B: 5})
    assert await rig.mailbox_of(ALICE) == [(1, 1), (2, 2), (5, 3)]


@pytest.mark.shows("X9", "F-33")
async def test_a_skipped_record_comes_back_only_by_redelivery(rig: Rig, mailbox: Mailbox) -> None:
    await _feed(rig, 1)
    async with rig.running(mailbox):
        await _reaches(mailbox, rig, {A: 1})
        rig.mailboxes.before["materialise"] = _only(A, StoreBroken("wrong type"))
        await _feed(rig, 2)
        await _stops(mailbox, rig, A)
        with pytest.raises(FailedPrecondition):
            await mailbox.redeliver(A, Offset(1))
        await mailbox.skip(A, Offset(1))
        del rig.mailboxes.before["materialise"]
        await _feed(rig, 3)
        await _reaches(mailbox, rig, {A: 3})
        assert await rig.sequences_of(ALICE) == [1, 3]
        assert await mailbox.redeliver(A, Offset(1)) == 1
        await _reaches(mailbox, rig, {A: 4})
        assert await mailbox.redeliver(A, Offset(1)) == 0
    assert await rig.mailbox_of(ALICE) == [(1, 1), (3, 3), (4, 2)]


async def _begin_elsewhere(rig: Rig, slot: SlotId) -> None:
    """Another process has begun the first dispatch of the slot on the general path and was killed."""
    ((_slot, record),) = [item for item in build_dispatches(seq=1) if item[0] == slot]
    read_dispatch(record, slot)  # raises where it is none
    shard = Shard(slot, base=MailboxSeq(1), watermark=MailboxSeq(0))
    await rig.mailboxes.begin_dispatch(build_delivery(shard, Offset(0), record).write, MailboxSeq(0))


@pytest.mark.shows("M3", "M8")
async def test_a_dispatch_begun_on_the_general_path_is_finished_there(rig: Rig, mailbox: Mailbox) -> None:
    await _begin_elsewhere(rig, A)
    await _feed(rig, 1, 2, 3)
    async with rig.running(mailbox):
        await _reaches(mailbox, rig, {A: 3, B: 3})
    assert rig.mailboxes.calls.count("finish_dispatch") == 1
    assert await rig.mailbox_of(ALICE) == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.shows("M3", "M5", "F-33")
@pytest.mark.parametrize("step", ["begin_dispatch", "append_entries", "finish_dispatch"])
@pytest.mark.parametrize("applied", [False, True])
async def test_a_failed_step_of_the_general_path_leaves_w_and_is_repeated(
    rig: Rig, mailbox: Mailbox, step: str, applied: bool
) -> None:
    await _begin_elsewhere(rig, A)
    rig.mailboxes.fail(step, StoreUnknown(), times=2, applied=applied)
    await _feed(rig, 1, 2)
    async with rig.running(mailbox):
        await _reaches(mailbox, rig, {A: 2, B: 2})
    assert await rig.sequences_of(ALICE) == [1, 2]
    if step != "finish_dispatch":
        first = rig.mailboxes.calls.index("finish_dispatch")
        assert rig.mailboxes.calls[:first].count(step) >= 3, "no finish before every step succeeded"


@pytest.mark.shows("M3", "M5")
@pytest.mark.parametrize("answer", [Materialised.GAP, Materialised.MISMATCH])
async def test_an_append_that_was_not_done_is_never_followed_by_a_finish(
    rig: Rig, mailbox: Mailbox, answer: Materialised
) -> None:
    await _begin_elsewhere(rig, A)
    inner = rig.mailboxes.inner
    append, answers = inner.append_entries, [answer]
    inner.append_entries = lambda *args: done(answers.pop()) if answers else append(*args)
    await _feed(rig, 1, 2)
    async with rig.running(mailbox):
        if answer is Materialised.MISMATCH:
            await _stops(mailbox, rig, A)
            assert "finish_dispatch" not in rig.mailboxes.calls
            await mailbox.retry(A)
        await _reaches(mailbox, rig, {A: 2})
    assert rig.mailboxes.calls.count("append_entries") == 2
    assert await rig.sequences_of(ALICE) == [1, 2]


@pytest.mark.shows("M4")
async def test_a_store_that_has_lost_its_watermark_is_not_written_to(rig: Rig, mailbox: Mailbox) -> None:
    await _feed(rig, 1, 2, 3)
    async with rig.running(mailbox):
        await _reaches(mailbox, rig, {A: 3})
        rig.mailbox_state.shards[A] = rig.mailbox_state.shards[A]._replace(watermark=MailboxSeq(1))
        await _feed(rig, 4)
        assert "lost the watermark" in await _stops(mailbox, rig, A)
        await _reaches(mailbox, rig, {B: 4})


@pytest.mark.shows("F-01", "M7", "M4")
@pytest.mark.parametrize("point", ["mailbox.taken", "mailbox.finished", "mailbox.pushed"])
async def test_a_kill_of_the_fused_path_is_healed_by_a_replay(rig: Rig, point: str) -> None:
    await _feed(rig, *range(1, 101))
    await rig.run_until_killed(rig.roles(failpoints={point: Action("raise")}).mailbox)
    await rig.claim()
    mailbox = rig.roles().mailbox
    async with rig.running(mailbox):
        await _reaches(mailbox, rig, {A: 100, B: 100})
    assert await rig.sequences_of(ALICE) == list(range(1, 101))
    assert await rig.sequences_of(BOB) == list(range(1, 101))


@pytest.mark.shows("F-01", "M3", "M7")
@pytest.mark.parametrize("point", ["mailbox.begun", "mailbox.entries", "mailbox.finished"])
async def test_a_kill_of_the_general_path_is_healed_by_a_replay(rig: Rig, point: str) -> None:
    await _begin_elsewhere(rig, A)
    await _feed(rig, 1, 2)
    await rig.run_until_killed(rig.roles(failpoints={point: Action("raise")}).mailbox)
    await rig.claim()
    mailbox = rig.roles().mailbox
    async with rig.running(mailbox):
        await _reaches(mailbox, rig, {A: 2, B: 2})
    assert await rig.sequences_of(ALICE) == [1, 2]


@pytest.mark.shows("M4")
async def test_a_stale_owner_moves_nothing_and_says_so(rig: Rig, mailbox: Mailbox) -> None:
    await rig.claim()
    epochs = dict(rig.mailboxes.inner._epochs)
    async with rig.running(mailbox):
        await happens(lambda: bool(mailbox.positions), what="the start")
        for slot in (A, B):
            owner = rig.mailbox_state.owners[slot]
            rig.mailbox_state.owners[slot] = owner._replace(epoch=Epoch(owner.epoch + 1))
        await _feed(rig, 1)
        await happens(lambda: set(rig.fatal) == {A, B}, what="the alarm")
        assert mailbox.watermarks[A] == 0
    assert epochs


@pytest.mark.shows("M1")
@pytest.mark.parametrize("missing", [True, False])
async def test_a_shard_without_its_state_or_with_another_log_stays_closed_alone(missing: bool) -> None:
    rig = Rig()
    await rig.claim()
    others = {slot: MailboxSeq(1) for slot in ALL_SLOTS if slot != A}
    await rig.mailboxes.initialise_shards(others, await rig.dispatch.identity())
    if not missing:
        await rig.mailboxes.initialise_shards({A: MailboxSeq(1)}, b"another log 0123")
    mailbox = rig.roles().mailbox
    await _feed(rig, 1)
    async with rig.running(mailbox):
        await _reaches(mailbox, rig, {B: 1})
        assert A in mailbox.stopped
        with pytest.raises(FailedPrecondition):
            await mailbox.retry(A)
        assert A not in mailbox.watermarks


@pytest.mark.parametrize("error", [StoreUnknown("lost"), StoreRefused("away")])
@pytest.mark.parametrize("method", ["load_shards", "watermarks", "identity", "read"])
async def test_a_start_whose_questions_are_not_answered_asks_again_and_pulls_are_served_meanwhile(
    rig: Rig, mailbox: Mailbox, method: str, error: StoreError
) -> None:
    await _feed(rig, 1)
    async with rig.running(mailbox):
        await _reaches(mailbox, rig, {A: 1, B: 1})
    await rig.claim()
    del rig.mailbox_state.shards[min(slot for slot in ALL_SLOTS if slot not in (A, B))]
    (rig.mailboxes if method == "load_shards" else rig.dispatch).fail(method, error, times=4)
    metrics = rig.metrics = Metrics()
    later = rig.roles().mailbox
    await _feed(rig, 2)
    async with rig.running(later):
        later.submit(rig.alice.request(Op.PULL_MAILBOX, encode_body(PullMailbox(MailboxSeq(0), 10))))
        await happens(lambda: bool(rig.alice.answers), what="the page")
        assert not later.watermarks.get(A), "it was open before the page was served"
        await _reaches(later, rig, {A: 2, B: 2})
    assert sum(metrics.slot_stopped) == len(later.stopped) == 1, "told once, not with each attempt"
    assert await rig.sequences_of(ALICE) == [1, 2]


@pytest.mark.shows("X9", "F-20")
async def test_a_partition_that_jumps_stops_its_shard_alone(rig: Rig, mailbox: Mailbox) -> None:
    async with rig.running(mailbox):
        await happens(lambda: bool(mailbox.positions), what="the start")
        rig.dispatch.inner.partition(A).low = Offset(5)
        await _feed(rig, 1)
        await _reaches(mailbox, rig, {B: 1, A: 0})
        await _stops(mailbox, rig, A)
        assert list(mailbox.stopped) == [A]


async def test_a_queue_of_the_serial_path_has_a_bound_and_loses_nothing(rig: Rig, mailbox: Mailbox) -> None:
    await _begin_elsewhere(rig, A)
    answered = rig.mailboxes.hold("append_entries")
    await _feed(rig, *range(1, 301))
    async with rig.running(mailbox):
        await _reaches(mailbox, rig, {B: 300, A: 0})
        answered.set()
        await _reaches(mailbox, rig, {A: 300})
    assert await rig.sequences_of(ALICE) == list(range(1, 301))


async def test_a_pull_is_answered_in_pages_up_to_w(rig: Rig, mailbox: Mailbox) -> None:
    await _feed(rig, *range(1, 401))
    async with rig.running(mailbox):
        await _reaches(mailbox, rig, {B: 400})
        for after in (0, 300, 400):
            mailbox.submit(
                rig.bob.request(Op.PULL_MAILBOX, encode_body(PullMailbox(MailboxSeq(after), 1_000)))
            )
        await happens(lambda: len(rig.bob.answers) == 3, what="the pages")
    pages = [body for _id, body in rig.bob.answers]
    assert all(isinstance(page, MailboxBatch) for page in pages)
    assert [(len(page.entries), page.covered_through, page.more) for page in pages] == [
        (300, 300, True),
        (100, 400, False),
        (0, 400, False),
    ]


async def test_a_pull_fails_with_a_word_when_the_store_is_away(rig: Rig, mailbox: Mailbox) -> None:
    rig.mailboxes.fail("read_mailbox", StoreUnknown())
    async with rig.running(mailbox):
        mailbox.submit(rig.bob.request(Op.PULL_MAILBOX, b"\xc1"))
        mailbox.submit(rig.bob.request(Op.PULL_MAILBOX, encode_body(PullMailbox(MailboxSeq(0), 10))))
        await happens(lambda: len(rig.bob.answers) == 2, what="the answers")
    assert rig.bob.errors == [1003, 2001]


@pytest.mark.shows("X9")
async def test_a_mailbox_that_cannot_be_read_spares_the_pulls_of_others(rig: Rig, mailbox: Mailbox) -> None:
    def broken(queries: Sequence[MailboxPageQuery]) -> StoreError | None:
        return StoreBroken("wrong type") if any(query.user == BOB for query in queries) else None

    rig.mailboxes.before["read_mailbox"] = broken
    for client in (rig.alice, rig.bob):
        mailbox.submit(client.request(Op.PULL_MAILBOX, encode_body(PullMailbox(MailboxSeq(0), 10))))
    async with rig.running(mailbox):
        await happens(lambda: rig.alice.answers and rig.bob.answers, what="the answers")
    assert rig.bob.errors == [2001]
    assert isinstance(rig.alice.answers[0][1], MailboxBatch)


@pytest.mark.shows("M1", "M2")
async def test_a_drain_finishes_the_own_partitions_and_a_restart_goes_on_at_w(
    rig: Rig, mailbox: Mailbox
) -> None:
    async with rig.running(mailbox):
        await happens(lambda: bool(mailbox.positions), what="the start")
        await _feed(rig, *range(1, 301))
        await mailbox.drain(rig.clock.monotonic() + 5)
    assert mailbox.watermarks[A] == 300
    later = rig.roles().mailbox
    calls = rig.mailboxes.calls.count("materialise")
    async with rig.running(later):
        await _feed(rig, 301)
        await _reaches(later, rig, {A: 301, B: 301})
    assert rig.mailboxes.calls.count("materialise") - calls <= 2
    assert build_outbox(seq=1) == build_outbox(seq=1)

"""The serial path of a mailbox shard: its queue ends at its bound, and its records never run side by side."""

import pytest

from qim.limits import MAILBOX_QUEUE_RECORDS_MAX
from tests.unit.workers.rig import ALICE, Rig
from tests.unit.workers.test_mailbox import A, B, _begin_elsewhere, _feed, _reaches
from tests.waiting import happens, stays
from workers.mailbox import Mailbox


@pytest.fixture
async def rig() -> Rig:
    return await Rig().prepare()


@pytest.fixture
def mailbox(rig: Rig) -> Mailbox:
    return rig.roles().mailbox


@pytest.mark.shows("M2")
async def test_a_shard_in_trouble_queues_128_records_and_no_more(rig: Rig, mailbox: Mailbox) -> None:
    await _begin_elsewhere(rig, A)
    answered = rig.mailboxes.hold("append_entries")
    await _feed(rig, *range(1, 401))
    async with rig.running(mailbox):
        await happens(lambda: mailbox.queued >= MAILBOX_QUEUE_RECORDS_MAX, what="the queue fills")
        await stays(
            lambda: mailbox.queued == MAILBOX_QUEUE_RECORDS_MAX, what="it is full", period_seconds=0.05
        )
        await _reaches(mailbox, rig, {B: 400, A: 0})
        answered.set()
        await _reaches(mailbox, rig, {A: 400})
    assert await rig.sequences_of(ALICE) == list(range(1, 401))


@pytest.mark.shows("M2")
async def test_the_records_of_a_shard_run_one_after_the_other(rig: Rig, mailbox: Mailbox) -> None:
    await _begin_elsewhere(rig, A)
    begun = rig.mailboxes.calls.count("begin_dispatch")
    answered = rig.mailboxes.hold("append_entries")
    await _feed(rig, *range(1, 9), shards=[A])
    async with rig.running(mailbox):
        await happens(lambda: mailbox.queued == 8, what="all records wait for the first")
        await happens(lambda: "append_entries" in rig.mailboxes.calls, what="the first is on its way")
        await stays(
            lambda: rig.mailboxes.calls.count("begin_dispatch") == begun + 1,
            what="alone",
            period_seconds=0.05,
        )
        answered.set()
        await _reaches(mailbox, rig, {A: 8})
    assert rig.mailboxes.calls.count("append_entries") == 1

"""Runs in flight on one shard of which an earlier one has an unknown outcome and a later one was carried out.

The store's answers are let out by hand, so the order in which a slow connection gives them is the test's.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial

import pytest

from qim.domain import mailbox as rules
from qim.domain.presence import Session
from qim.errors import StoreRefused, StoreUnknown
from qim.ids import MailboxSeq, SlotId, WorkerId
from qim.limits import DAY_MS
from qim.ports import MailboxWrite, Materialised
from tests.unit.workers.rig import BOB, DEVICE, SESSION, TENANT, Rig, build_dispatches, shard_of
from tests.waiting import happens
from workers.mailbox import Mailbox


class Answers:
    """Carries every run out at once; that the answer of the first one is lost is known only later."""

    def __init__(self, rig: Rig) -> None:
        self._materialise = rig.mailboxes.inner.materialise
        self.runs = 0
        self.is_away_after = 9
        """Runs that are carried out; later ones are refused."""
        self.lost = asyncio.Event()

    def materialise(
        self, expected: Mapping[SlotId, MailboxSeq], writes: Sequence[MailboxWrite]
    ) -> Awaitable[list[Materialised]]:
        self.runs += 1
        if self.runs > self.is_away_after:
            return self._refuse()
        done: Awaitable[list[Materialised]] = self._materialise(expected, writes)
        return self._lose() if self.runs == 1 else done

    async def _refuse(self) -> list[Materialised]:
        raise StoreRefused

    async def _lose(self) -> list[Materialised]:
        await self.lost.wait()
        raise StoreUnknown


def pushed_places(rig: Rig) -> list[tuple[int, int]]:
    """(previous, mailbox_seq) of every push to Bob, in order."""
    return [(target[2], target[3]) for _worker, targets, _entry in rig.pusher.pushed for target in targets]


@pytest.mark.shows("M4", "M10")
async def test_entries_of_a_run_whose_answer_was_lost_are_told_before_what_stands_behind_them() -> None:
    rig = await Rig().prepare()
    rig.presence.sessions[BOB] = [Session(WorkerId(0), 1, 1, TENANT, BOB, DEVICE, SESSION)]
    answers = Answers(rig)
    rig.mailboxes.materialise = answers.materialise
    _writer, _fanout, mailbox = rig.roles()
    async with rig.running(mailbox):
        for number in (1, 2, 3):
            await rig.dispatch.append(
                [one for one in build_dispatches(seq=number) if one[0] == shard_of(BOB)]
            )
            await happens(partial(_has_run, answers, number), what="the run is issued")
        answers.lost.set()
        await happens(lambda: mailbox.watermarks[shard_of(BOB)] == 3, what="everything is finished")
        await happens(lambda: len(pushed_places(rig)) >= 3, what="everything is told")
    assert pushed_places(rig) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.shows("M10")
async def test_records_that_w_has_passed_unseen_are_told_as_well() -> None:
    rig = await Rig().prepare()
    rig.presence.sessions[BOB] = [Session(WorkerId(0), 1, 1, TENANT, BOB, DEVICE, SESSION)]
    _writer, _fanout, mailbox = rig.roles()
    await mailbox.open()
    (instance,) = mailbox._instances.values()
    shard = instance.shards.shards[shard_of(BOB)]
    records = [one for number in (1, 2) for one in build_dispatches(seq=number) if one[0] == shard_of(BOB)]
    await rig.dispatch.append(records)
    await rig.deliver()
    rig.pusher.pushed.clear()
    rig.presence.newest.clear()
    # A surprise: W in the store is ahead of what this process has seen.
    shard.reload = True
    await instance.shards.pauses.reopen(shard)
    assert shard.watermark == 0
    reader = instance.shards._reader
    assert reader is not None
    runs = instance.shards._issue(await reader.next_batch(records_max=9, bytes_max=9_999))
    for run in runs:
        await instance.shards._finish(run)
    assert pushed_places(rig) == [(0, 1), (1, 2)]


async def _told(rig: Rig, mailbox: Mailbox, *numbers: int) -> None:
    """Dispatches to Bob, one run each."""
    for number in numbers:
        await rig.dispatch.append([one for one in build_dispatches(seq=number) if one[0] == shard_of(BOB)])
        high = (await rig.dispatch.watermarks([shard_of(BOB)]))[shard_of(BOB)].high
        await happens(partial(_is_at, mailbox, high), what="the run is finished")


def _is_at(mailbox: Mailbox, watermark: int) -> bool:
    return mailbox.watermarks.get(shard_of(BOB)) == watermark


@pytest.mark.shows("M7", "M10")
async def test_a_repeated_dispatch_is_not_told_again_at_a_place_where_nothing_stands() -> None:
    rig = await Rig().prepare()
    rig.presence.sessions[BOB] = [Session(WorkerId(0), 1, 1, TENANT, BOB, DEVICE, SESSION)]
    _writer, _fanout, mailbox = rig.roles()
    async with rig.running(mailbox):
        await _told(rig, mailbox, 1, 2, 1, 3)
    assert pushed_places(rig) == [(0, 1), (1, 2), (2, 4)]


@pytest.mark.parametrize("alone", [False, True])
async def test_a_repeated_dispatch_is_counted_neither_as_an_entry_nor_as_a_delivery(*, alone: bool) -> None:
    rig = await Rig().prepare()
    _writer, _fanout, mailbox = rig.roles()
    async with rig.running(mailbox):
        await _told(rig, mailbox, 1, 2)
        (instance,) = mailbox._instances.values()
        instance.shards.shards[shard_of(BOB)].alone = alone
        await _told(rig, mailbox, 1, 3)
        await happens(lambda: rig.metrics.mailbox_entries >= 3, what="the last one is counted")
    assert rig.metrics.mailbox_entries == 3
    assert sum(rig.metrics.message_delivery.counts) == 3


@pytest.mark.shows("M7", "M10")
async def test_a_repeat_on_the_careful_path_is_not_told_again_either() -> None:
    rig = await Rig().prepare()
    rig.presence.sessions[BOB] = [Session(WorkerId(0), 1, 1, TENANT, BOB, DEVICE, SESSION)]
    _writer, _fanout, mailbox = rig.roles()
    async with rig.running(mailbox):
        await _told(rig, mailbox, 1)
        (instance,) = mailbox._instances.values()
        instance.shards.shards[shard_of(BOB)].alone = True
        await _told(rig, mailbox, 1, 2)
    assert pushed_places(rig) == [(0, 1), (1, 3)]


@pytest.mark.shows("M7", "M10")
async def test_a_repeat_on_the_general_path_is_not_told_again_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "is_fusable", lambda _write: False)
    rig = await Rig().prepare()
    rig.presence.sessions[BOB] = [Session(WorkerId(0), 1, 1, TENANT, BOB, DEVICE, SESSION)]
    _writer, _fanout, mailbox = rig.roles()
    async with rig.running(mailbox):
        await _told(rig, mailbox, 1, 2, 1, 3)
    assert pushed_places(rig) == [(0, 1), (1, 2), (2, 4)]
    assert rig.metrics.mailbox_entries == 3


@pytest.mark.shows("M7", "M10")
async def test_an_entry_of_the_general_path_whose_finish_was_not_answered_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "is_fusable", lambda _write: False)
    rig = await Rig().prepare()
    rig.presence.sessions[BOB] = [Session(WorkerId(0), 1, 1, TENANT, BOB, DEVICE, SESSION)]
    rig.mailboxes.fail("finish_dispatch", StoreUnknown(), applied=True)
    _writer, _fanout, mailbox = rig.roles()
    async with rig.running(mailbox):
        await _append(rig, 1)
        await happens(partial(_comes_to, rig, mailbox, 1), what="it is finished")
    assert pushed_places(rig) == [(0, 1)]


async def _append(rig: Rig, *numbers: int) -> None:
    records = [one for number in numbers for one in build_dispatches(seq=number)]
    await rig.dispatch.append([one for one in records if one[0] == shard_of(BOB)])


def _comes_to(rig: Rig, mailbox: Mailbox, watermark: int) -> bool:
    rig.clock.advance(milliseconds=10)
    return _is_at(mailbox, watermark)


@pytest.mark.shows("M7", "M10")
@pytest.mark.parametrize("is_away", [False, True])
async def test_a_repeat_that_is_read_again_after_midnight_is_not_told_either(*, is_away: bool) -> None:
    rig = await Rig().prepare()
    rig.presence.sessions[BOB] = [Session(WorkerId(0), 1, 1, TENANT, BOB, DEVICE, SESSION)]
    _writer, _fanout, mailbox = rig.roles()
    async with rig.running(mailbox):
        await _told(rig, mailbox, 1)
        rig.clock.advance(milliseconds=DAY_MS)
        rig.mailboxes.fail("materialise", StoreUnknown(), applied=True)
        if is_away:
            rig.mailboxes.fail("read_mailbox", StoreRefused())
        await _append(rig, 1, 2)
        await happens(partial(_comes_to, rig, mailbox, 3), what="everything is finished")
    # Where the mailbox cannot be looked into, the place at 2 is named as the one before: Bob asks for it.
    assert pushed_places(rig) == [(0, 1), (2 if is_away else 1, 3)]
    assert rig.metrics.mailbox_entries == 2


@pytest.mark.shows("M10")
async def test_entries_that_were_written_before_midnight_are_told_after_it() -> None:
    rig = await Rig().prepare()
    rig.presence.sessions[BOB] = [Session(WorkerId(0), 1, 1, TENANT, BOB, DEVICE, SESSION)]
    rig.mailboxes.fail("materialise", StoreUnknown(), applied=True)
    _writer, _fanout, mailbox = rig.roles()
    async with rig.running(mailbox):
        await _append(rig, 1, 2)
        await happens(lambda: rig.mailbox_state.shards[shard_of(BOB)].watermark == 2, what="they are written")
        rig.clock.advance(milliseconds=DAY_MS)
        await happens(partial(_comes_to, rig, mailbox, 2), what="everything is finished")
    assert pushed_places(rig) == [(0, 1), (1, 2)]


@pytest.mark.shows("M7", "M10")
@pytest.mark.parametrize("is_away", [False, True])
async def test_of_a_run_whose_answer_was_lost_the_repeats_are_not_told(*, is_away: bool) -> None:
    rig = await Rig().prepare()
    rig.presence.sessions[BOB] = [Session(WorkerId(0), 1, 1, TENANT, BOB, DEVICE, SESSION)]
    _writer, _fanout, mailbox = rig.roles()
    async with rig.running(mailbox):
        await _told(rig, mailbox, 1)
        answers = Answers(rig)
        answers.is_away_after = 2 if is_away else 9
        rig.mailboxes.materialise = answers.materialise
        records = [one for number in (1, 2) for one in build_dispatches(seq=number)]
        await rig.dispatch.append([one for one in records if one[0] == shard_of(BOB)])
        await happens(partial(_has_run, answers, 1), what="the run is issued")
        await rig.dispatch.append([one for one in build_dispatches(seq=3) if one[0] == shard_of(BOB)])
        await happens(partial(_has_run, answers, 2), what="the next one too")
        answers.lost.set()
        await happens(partial(_is_at, mailbox, 4), what="everything is finished")
        await happens(lambda: (3, 4) in pushed_places(rig), what="the last one is told")
    # Where the store does not say it, the entry at 3 is named as the one before, so that Bob asks for it.
    assert pushed_places(rig) == ([(0, 1), (3, 4)] if is_away else [(0, 1), (1, 3), (3, 4)])


def _has_run(answers: Answers, number: int) -> bool:
    return answers.runs >= number

"""E7: the owner is stopped in the middle of its load, a second one takes over, and the first one wakes up.

The second owner claims every slot, runs its recoverer, and commits to the same conversations. The first one
then goes on where it stood: with answers in its socket, with messages half-done, with epochs that are no
longer true. Every write that it tries on a store must be refused, script by script and slot by slot; the log
has no fence, so what it appends there (the rest of its passes, and on purpose its newest records once more)
must converge. In the end log, history, mailboxes and all acknowledgements, those of the first owner after its
sleep included, agree.

Stored positions have no fence either: they only rise, and a lower one must change nothing.
"""

import asyncio
import signal
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Final

from qim.domain.fanout import plan_dispatches
from qim.domain.placement import slot_of_bucket
from qim.ids import MailboxSeq, Offset, Seq, SlotId, UserId
from qim.ports import (
    Commit,
    Committed,
    MailboxWrite,
    Materialised,
    MessageKey,
    ReadMark,
    Reservation,
    Reserved,
)
from qim.records import decode_entry
from tests.matrix.commit import Place, compare
from tests.matrix.media import ALL_SLOTS, Host, Parts, prepare
from tests.matrix.processes import Child, Reporter
from tests.matrix.verdict import Outcome
from tests.matrix.work import (
    ACKED,
    CONVERSATIONS,
    HOME,
    SENT,
    TENANT,
    Owner,
    all_mailboxes,
    build_writer,
    claim_of,
    consume,
    outbox_record,
    plan_task,
    read_all,
    running,
    sender_of,
    take_slots,
    target_of,
)
from workers.failpoints import Failpoints
from workers.fanout import GROUP
from workers.shard_state import Shard, build_delivery

FIRST, SECOND, LAST = b"first--supervisor"[:16], b"second-supervisor"[:16], b"the-last-supervisor"[:16]
TRIED, DOUBLED, RECOVERED = 10, 11, 12
"""Kinds of reports: (TRIED, script, tries, refusals), (DOUBLED, records), (RECOVERED, messages)."""
SCRIPTS: Final = (
    "reserve", "one step", "mark committed", "mark read", "materialise", "begin", "append entries", "finish",
    "claim", "lower position",
)  # fmt: skip
SECOND_BASE: Final = 1 << 24
"""Numbers of the tasks of the second owners; those of the first ones lie below."""
AHEAD, AHEAD_TASKS = 4, 2_000
"""The first owner has more to do than it is stopped at, so that it is stopped at work; yet it ends."""
DOUBLED_RECORDS: Final = 64


def wake_a_stale_owner(host: Host, *, tasks: int, rounds: int, seed: int = 0) -> Outcome:
    """E7."""
    host.start()
    asyncio.run(prepare(host))
    random = Random(seed)
    outcome = Outcome(strikes_wanted=rounds)
    acked: dict[int, Place] = {}
    sent = [0, 0]
    for number in range(rounds):
        wanted = random.randint(1, max(1, tasks // rounds))
        count = AHEAD_TASKS + AHEAD * wanted
        # Every other pair of owners commits in one step.
        own = partial(_own_until_stale, in_one_step=bool(number % 2), boot=2 * number + 1)
        first = Child(partial(own, host, first=sent[0], count=count))
        alive = first.read_until_told(ACKED, wanted)
        first.signal(signal.SIGSTOP)
        first.wait_stopped()
        second = Child(
            partial(
                _own_second,
                host,
                first=SECOND_BASE + sent[1],
                count=max(1, tasks // rounds // 2),
                boot=2 * number + 2,
                in_one_step=bool(number % 2),
            )
        )
        assert second.finish() == 0
        first.signal(signal.SIGCONT)
        assert first.finish() == 0
        outcome.strikes += alive
        for child in (first, second):
            acked |= {
                told.first: Place(told.second, told.third) for told in child.reports if told.kind == ACKED
            }
        sent[0] += first.counts[SENT]
        sent[1] += second.counts[SENT]
        _note_tries(outcome, first)
        outcome.count("recovered", sum(told.first for told in second.reports if told.kind == RECOVERED))
    outcome.tasks = sum(sent)
    outcome.figures["acknowledged"] = len(acked)
    if outcome.violations:
        return outcome  # without a fence a watermark may stand anywhere, and nobody could deliver behind it
    consume(host, claim_of(1, supervisor=LAST, take_over=True))
    asyncio.run(compare(host, outcome, acked))
    _check_mailboxes(outcome, asyncio.run(all_mailboxes(host)))
    return outcome


def _note_tries(outcome: Outcome, owner: Child) -> None:
    tried = {told.first: told for told in owner.reports if told.kind == TRIED}
    outcome.expect(tried.keys() == set(range(len(SCRIPTS))), "the stale owner did not try every script")
    for script, told in tried.items():
        outcome.count(SCRIPTS[script], told.second)
        outcome.violated(
            f"{SCRIPTS[script]}: a write of the old epoch was taken", times=told.second - told.third
        )
    outcome.count("doubled", sum(told.first for told in owner.reports if told.kind == DOUBLED))


def _check_mailboxes(outcome: Outcome, mailboxes: dict[UserId, list[bytes]]) -> None:
    """Each conversation is in both its mailboxes, every sequence once."""
    for number in range(CONVERSATIONS):
        for user in (sender_of(number), target_of(number)):
            found = sorted(decode_entry(entry).conversation_seq for entry in mailboxes[user])
            outcome.expect(found == [*range(1, len(found) + 1)], "a mailbox has a hole or an entry twice")
    delivered = sum(map(len, mailboxes.values()))
    committed = outcome.figures["committed"]
    outcome.expect(delivered == 2 * int(committed), f"{delivered} entries of {committed} committed tasks")


# --- the second owner --------------------------------------------------------------------------------


def _own_second(
    host: Host, reporter: Reporter, *, first: int, count: int, boot: int, in_one_step: bool
) -> None:
    asyncio.run(_own_second_async(host, reporter, range(first, first + count), boot, in_one_step))


async def _own_second_async(
    host: Host, reporter: Reporter, numbers: range, boot: int, in_one_step: bool
) -> None:
    async with host.open() as parts:
        await take_slots(parts, claim_of(boot, supervisor=SECOND, take_over=True))
        writer = build_writer(parts, Failpoints(), in_one_step=in_one_step)
        reporter.tell([(RECOVERED, await writer.recover_once(older_than_ms=0), 0, 0)])
        async with running(writer):
            await Owner(writer, reporter).send(numbers)


# --- the first owner ---------------------------------------------------------------------------------


def _own_until_stale(
    host: Host, reporter: Reporter, *, first: int, count: int, boot: int, in_one_step: bool
) -> None:
    asyncio.run(_own_until_stale_async(host, reporter, range(first, first + count), boot, in_one_step))


async def _own_until_stale_async(
    host: Host, reporter: Reporter, numbers: range, boot: int, in_one_step: bool
) -> None:
    """Commits until it is told that it owns nothing any more; then it tries everything once more."""
    stale = asyncio.Event()
    async with host.open() as parts:
        claim = claim_of(boot, supervisor=FIRST, take_over=True)
        await take_slots(parts, claim)
        marks = await parts.mailboxes.load_shards(ALL_SLOTS)
        writer = build_writer(parts, Failpoints(), in_one_step=in_one_step, on_stale=stale.set)
        async with running(writer):
            sending = asyncio.ensure_future(Owner(writer, reporter).send(numbers))
            told = asyncio.ensure_future(stale.wait())
            await asyncio.wait([sending, told], return_when=asyncio.FIRST_COMPLETED)
            for task in (sending, told):
                task.cancel()
            await asyncio.gather(sending, told, return_exceptions=True)
        await _append_again(parts, reporter)
        tries = [
            *await _try_commits(parts),
            *await _try_mailboxes(parts, {slot: state.watermark for slot, state in marks.items()}),
        ]
        refreshed = claim._replace(take_over=False)
        claims = [await store.claim(refreshed) for store in (parts.commits, parts.mailboxes)]
        tries += [("claim", bool(result.refusals)) for result in claims]
        tries.append(("lower position", await _try_to_lower(parts)))
    for script, name in enumerate(SCRIPTS):
        refusals = [refused for tried, refused in tries if tried == name]
        reporter.tell([(TRIED, script, len(refusals), sum(refusals))])


async def _append_again(parts: Parts, reporter: Reporter) -> None:
    newest = (await read_all(parts.outbox, HOME))[-DOUBLED_RECORDS:]
    assert None not in await parts.outbox.append([(HOME, record.data) for record in newest])
    reporter.tell([(DOUBLED, len(newest), 0, 0)])


async def _try_commits(parts: Parts) -> list[tuple[str, bool]]:
    """One of each per conversation, so that most slots are tried."""
    reservations, commits, marks = [], [], []
    for number in range(CONVERSATIONS):
        planned = plan_task(number + CONVERSATIONS * SECOND_BASE)
        record, route = planned.record, planned.route
        key = MessageKey(route.bucket, TENANT, route.conversation, record.sender, record.client_message_id)
        reservations.append(
            Reservation(
                key, planned.identity, planned.record_bytes, record.reserved_at, planned.expires_at,
                planned.outbox_frame,
            )
        )  # fmt: skip
        slot = slot_of_bucket(route.bucket)
        commits.append(Commit(key, planned.identity, Seq(1), record.reserved_at, False, slot, Offset(0)))
        marks.append(ReadMark(TENANT, route.conversation, route.bucket, sender_of(number), Seq(1)))
    reserved = await parts.commits.reserve(reservations)
    one_step = await parts.one_step.commit(reservations, HOME)
    marked = await parts.commits.mark_committed(commits)
    read = await parts.commits.mark_read(marks)
    return [
        *(("reserve", result.outcome is Reserved.STALE_OWNER) for result in reserved),
        *(("one step", result.outcome is Reserved.STALE_OWNER) for result in one_step),
        *(("mark committed", result.outcome is Committed.STALE_OWNER) for result in marked),
        *(("mark read", result.stale_owner) for result in read),
    ]


async def _try_mailboxes(parts: Parts, marks: dict[SlotId, MailboxSeq]) -> list[tuple[str, bool]]:
    tries = []
    for write in _writes(marks):
        expected = {write.slot: marks[write.slot]}
        (fused,) = await parts.mailboxes.materialise(expected, [write])
        begun = await parts.mailboxes.begin_dispatch(write, marks[write.slot])
        appended = await parts.mailboxes.append_entries(write, begun.day, write.recipients)
        finished = await parts.mailboxes.finish_dispatch(write, marks[write.slot])
        outcomes = {
            "materialise": fused,
            "begin": begun.outcome,
            "append entries": appended,
            "finish": finished,
        }
        tries += [(name, outcome is Materialised.STALE_OWNER) for name, outcome in outcomes.items()]
    return tries


def _writes(marks: dict[SlotId, MailboxSeq]) -> Sequence[MailboxWrite]:
    """The next write of every shard that one of our users lives in."""
    found: dict[SlotId, MailboxWrite] = {}
    for number in range(CONVERSATIONS):
        for slot, data in plan_dispatches(outbox_record(number)):
            shard = Shard(slot, base=MailboxSeq(1), watermark=marks[slot])
            found[slot] = build_delivery(shard, Offset(shard.position + 1), data).write
    return [*found.values()]


async def _try_to_lower(parts: Parts) -> bool:
    before = await parts.commits.load_positions(GROUP, [HOME])
    await parts.commits.store_positions(GROUP, {HOME: Offset(-1)})
    after = await parts.commits.load_positions(GROUP, [HOME])
    return after.get(HOME, Offset(-1)) >= before.get(HOME, Offset(-1))

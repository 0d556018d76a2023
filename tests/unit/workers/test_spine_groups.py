"""Group messages from the Outbox to the mailboxes: 10,000 members, direct messages beside them, and kills."""

from collections.abc import Sequence

import pytest

from qim.errors import StoreUnknown
from qim.ids import MailboxSeq, Offset, SlotId, UserId
from qim.limits import APPEND_ENTRIES_MAX, FUSED_RECIPIENTS_MAX
from qim.records import decode_entry
from tests.unit.workers.group_rig import build_group_outbox, create_group, many
from tests.unit.workers.rig import ALICE, ALL_SLOTS, BOB, Rig, Roles, build_outbox, shard_of
from tests.waiting import happens
from workers.failpoints import Action

HOME = SlotId(0)
FEW = [ALICE, BOB, *many(1_200)]
"""Enough that shards of both paths are among them."""
MANY = [ALICE, BOB, *many(9_998)]


async def _rig(members: Sequence[UserId]) -> Rig:
    rig = await Rig().prepare()
    await create_group(rig, members)
    return rig


async def _finish(rig: Rig, roles: Roles) -> None:
    """Runs fan-out and mailbox until both are through, with the clock going on."""
    _writer, fanout, mailbox = roles

    def through() -> bool:
        rig.clock.advance(milliseconds=10)
        home, dispatch = rig.outbox.inner.partition(HOME), rig.dispatch.inner
        if fanout.positions.get(HOME, Offset(-1)) + 1 < home.high or len(mailbox.positions) < len(ALL_SLOTS):
            return False
        return all(at + 1 >= dispatch.partition(slot).high for slot, at in mailbox.positions.items())

    async with rig.running(fanout, mailbox):
        await happens(through, what="every record is finished", timeout_seconds=30)
    assert not fanout.stopped
    assert not mailbox.stopped


def _mailboxes(rig: Rig) -> dict[UserId, list[int]]:
    """The conversation sequences in each mailbox, in the order of its places; each entry at one place."""
    found: dict[UserId, list[tuple[MailboxSeq, int]]] = {}
    for box, entries in rig.mailbox_state.boxes.items():
        places = [(seq, decode_entry(entry).conversation_seq) for entry, seq in entries.items()]
        found.setdefault(box.user, []).extend(places)
    return {user: [seq for _place, seq in sorted(places)] for user, places in found.items()}


@pytest.mark.shows("F2", "G2", "M3")
async def test_a_message_to_ten_thousand_reaches_each_once_and_delays_no_order() -> None:
    """Every shard takes the general path in chunks; what lies behind it in the shard keeps its order."""
    rig = await _rig(MANY)
    assert all(sum(shard_of(user) == slot for user in MANY) > APPEND_ENTRIES_MAX for slot in ALL_SLOTS)
    records = [build_outbox(seq=1), build_group_outbox(seq=2), *(build_outbox(seq=at) for at in (3, 4, 5))]
    await rig.outbox.append([(HOME, record) for record in records])
    await _finish(rig, rig.roles())
    found = _mailboxes(rig)
    assert found == {user: [2] for user in MANY} | {ALICE: [1, 2, 3, 4, 5], BOB: [1, 2, 3, 4, 5]}
    assert rig.mailboxes.calls.count("finish_dispatch") == len(ALL_SLOTS)
    assert rig.metrics.mailbox_entries == len(MANY) + 8


@pytest.mark.shows("F4", "M7", "F-31")
async def test_a_fan_out_that_goes_back_doubles_no_group_message() -> None:
    rig = await _rig(FEW)
    await rig.outbox.append([(HOME, build_group_outbox(seq=seq)) for seq in (1, 2, 3)])
    await _finish(rig, rig.roles())
    rig.commit_state.positions.clear()
    await _finish(rig, rig.roles())
    assert sum(rig.dispatch.inner.partition(slot).high for slot in ALL_SLOTS) == 2 * 3 * len(ALL_SLOTS)
    assert _mailboxes(rig) == {user: [1, 2, 3] for user in FEW}


@pytest.mark.shows("F-01", "F4", "M3", "M7")
@pytest.mark.parametrize(
    "point",
    [
        "fanout.planned", "fanout.appended", "fanout.stored", "mailbox.taken", "mailbox.begun",
        "mailbox.entries", "mailbox.finished", "mailbox.pushed",
    ],
)  # fmt: skip
async def test_a_kill_at_any_step_of_a_group_message_loses_and_doubles_nothing(point: str) -> None:
    rig = await _rig(FEW)
    sizes = {sum(shard_of(user) == slot for user in FEW) for slot in ALL_SLOTS}
    assert min(sizes) <= FUSED_RECIPIENTS_MAX < max(sizes), "both paths are taken"
    records = [
        record for seq in range(1, 11) for record in (build_group_outbox(seq=2 * seq - 1), _direct(seq))
    ]
    await rig.outbox.append([(HOME, record) for record in records])
    _writer, fanout, mailbox = rig.roles(failpoints={point: Action("raise")})
    await rig.run_until_killed(fanout, mailbox)
    await rig.claim()
    await _finish(rig, rig.roles())
    odd, all_of_them = list(range(1, 20, 2)), list(range(1, 21))
    found = {user: sorted(seqs) for user, seqs in _mailboxes(rig).items()}
    assert found == dict.fromkeys(FEW, odd) | {ALICE: all_of_them, BOB: all_of_them}


def _direct(seq: int) -> bytes:
    return build_outbox(seq=2 * seq)


@pytest.mark.shows("M3", "M5", "F-33")
@pytest.mark.parametrize("step", ["begin_dispatch", "append_entries", "finish_dispatch"])
@pytest.mark.parametrize("applied", [False, True])
async def test_a_store_that_fails_in_the_midst_of_a_group_message_delivers_it_whole(
    step: str, applied: bool
) -> None:
    rig = await _rig(FEW)
    rig.mailboxes.fail(step, StoreUnknown(), times=20, applied=applied)
    await rig.outbox.append([(HOME, build_group_outbox(seq=seq)) for seq in (1, 2)])
    await _finish(rig, rig.roles())
    assert _mailboxes(rig) == {user: [1, 2] for user in FEW}


@pytest.mark.shows("G7", "F2")
async def test_an_event_that_lists_a_few_reaches_nobody_else() -> None:
    rig = await _rig(FEW)
    gone = UserId(b"was-removed-just")
    await rig.outbox.append([(HOME, build_group_outbox(seq=1, version=2, listed=[gone, BOB]))])
    await _finish(rig, rig.roles())
    assert _mailboxes(rig) == {gone: [1], BOB: [1]}

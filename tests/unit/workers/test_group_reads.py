"""History, member list and read marks of a group: each user sees the own interval, and nothing beside it."""

from collections.abc import Callable
from typing import Any

import pytest

from qim.errors import StoreBroken, StoreError, StoreRefused, StoreUnknown
from qim.ids import GroupId, Seq
from qim.limits import GROUP_REQUESTS_WAITING_MAX, MEMBER_READS_MAX
from qim.wire.bodies import (
    HistoryBatch,
    MarkRead,
    MarkReadAck,
    Member,
    MemberListBatch,
    PullHistory,
    PullMembers,
    Target,
    encode_body,
)
from qim.wire.layout import Op
from tests.unit.workers.group_calls import (
    CAROL,
    DAVE,
    GROUP,
    GROUP_KIND,
    JOIN,
    LEAVE,
    NO_GROUP,
    REMOVE,
    change,
    create_group,
    send_to_group,
)
from tests.unit.workers.rig import ALICE, BOB, Client, Rig
from tests.waiting import happens
from workers.writer import Writer

DENIED, INVALID, UNSUPPORTED = 1002, 1003, 1006
UNAVAILABLE, EXHAUSTED, MEMBERSHIP_CHANGED = 2001, 2002, 2004


@pytest.fixture
async def rig() -> Rig:
    rig = await Rig().prepare()
    await create_group(rig, (ALICE, BOB))
    return rig


@pytest.fixture
def writer(rig: Rig) -> Writer:
    return rig.roles().writer


async def ask(client: Client, writer: Writer, opcode: Op, body: Any) -> Any:
    count = len(client.answers)
    writer.submit(client.request(opcode, encode_body(body)))
    await happens(lambda: len(client.answers) > count, what="an answer")
    return client.answers[-1][1]


async def history(
    client: Client,
    writer: Writer,
    *,
    before: int = 0,
    after: int = 0,
    limit: int = 50,
    group: GroupId = GROUP,
) -> Any:
    body = PullHistory(Target(GROUP_KIND, group), Seq(before), Seq(after), limit)
    return await ask(client, writer, Op.PULL_HISTORY, body)


async def mark(client: Client, writer: Writer, seq: int, group: GroupId = GROUP) -> Any:
    return await ask(client, writer, Op.MARK_READ, MarkRead(Target(GROUP_KIND, group), Seq(seq)))


async def members(
    client: Client, writer: Writer, *, after: bytes = b"", limit: int = 50, group: GroupId = GROUP
) -> Any:
    return await ask(client, writer, Op.PULL_MEMBERS, PullMembers(group, after, limit))


def seen(page: HistoryBatch) -> list[int]:
    return [bytes(entry)[1] for entry in page.records]


async def say(rig: Rig, writer: Writer, *numbers: int) -> None:
    count = len(rig.alice.acks) + len(numbers)
    send_to_group(rig, writer, *numbers)
    await happens(lambda: len(rig.alice.acks) == count, what="acknowledgements")


async def with_everybody(rig: Rig, writer: Writer) -> tuple[Client, Client]:
    """1, 2 said; 3 Carol joins; 4 to 6 said; 7 Bob leaves; 8, 9 said; 10 Carol is removed; 11 said."""
    await say(rig, writer, 1, 2)
    await change(rig, JOIN, CAROL)
    await say(rig, writer, 4, 5, 6)
    await change(rig, LEAVE, BOB)
    await say(rig, writer, 8, 9)
    await change(rig, REMOVE, CAROL)
    await say(rig, writer, 11)
    return rig.bob, Client(rig.clock, user=CAROL)


# --- history -----------------------------------------------------------------------------------------


@pytest.mark.shows("G11", "G5", "G6", "T6", "F-49")
async def test_each_sees_the_own_interval_and_nothing_beside_it(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        bob, carol = await with_everybody(rig, writer)
        for client, shown, earliest, head in (
            (rig.alice, range(11, 0, -1), 1, 11),
            (bob, range(6, 0, -1), 1, 6),
            (carol, range(9, 2, -1), 3, 9),
        ):
            page = await history(client, writer)
            assert seen(page) == list(shown)
            assert (page.earliest_available_seq, page.head_seq, page.more) == (earliest, head, False)


@pytest.mark.shows("G11")
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8])
async def test_pages_in_both_directions_are_the_interval_without_gap_or_repeat(
    rig: Rig, writer: Writer, limit: int
) -> None:
    async with rig.running(writer):
        _bob, carol = await with_everybody(rig, writer)
        down: list[int] = []
        more = True
        while more:
            page = await history(carol, writer, before=down[-1] if down else 0, limit=limit)
            down += seen(page)
            more = page.more
        up: list[int] = []
        more = True
        while more:
            page = await history(carol, writer, after=up[-1] if up else 1, limit=limit)
            up += reversed(seen(page))
            more = page.more
    assert down == list(range(9, 2, -1))
    assert up == list(range(3, 10))


@pytest.mark.shows("G11", "G6")
async def test_nothing_is_shown_to_who_asks_beside_the_interval(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        _bob, carol = await with_everybody(rig, writer)
        for before, after, shown in (
            (3, 0, []),
            (1, 0, []),
            (99, 0, [9, 8, 7, 6, 5, 4, 3]),
            (0, 9, []),
            (0, 99, []),
        ):
            page = await history(carol, writer, before=before, after=after)
            assert (seen(page), page.more, page.head_seq) == (shown, False, 9)


@pytest.mark.shows("X2", "G5")
async def test_a_rejoin_hides_what_lay_before_it(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        bob, _carol = await with_everybody(rig, writer)
        await change(rig, JOIN, BOB)
        await say(rig, writer, 13)
        page = await history(bob, writer)
        assert seen(page) == [13, 12]
        assert (page.earliest_available_seq, page.head_seq) == (12, 13)


@pytest.mark.shows("G6", "F-49")
async def test_a_removal_while_a_page_is_read_shows_nothing_of_what_comes_after_it(
    rig: Rig, writer: Writer
) -> None:
    async with rig.running(writer):
        await say(rig, writer, 1)
        overtake(rig.commits.inner, "read_history", removed_and_talked_about(rig))
        page = await history(rig.bob, writer)
    assert seen(page) == [1]
    assert page.head_seq == 1


@pytest.mark.shows("G12", "T6", "F-49")
async def test_a_removal_while_members_are_read_refuses_the_list(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        overtake(rig.memberships.inner, "load_members", removed_and_talked_about(rig))
        await members(rig.bob, writer)
    assert rig.bob.errors == [DENIED]


def removed_and_talked_about(rig: Rig) -> Callable[[], Any]:
    async def remove() -> None:
        await change(rig, REMOVE, BOB)
        await change(rig, JOIN, DAVE)

    return remove


def overtake(inner: Any, method: str, happen: Callable[[], Any], *, times: int = 1) -> None:
    """Something happens just before the store reads, so behind the interval that was read before."""
    original = getattr(inner, method)
    left = [times]

    async def later(*args: Any) -> Any:
        if left[0]:
            left[0] -= 1
            await happen()
        return await original(*args)

    setattr(inner, method, later)


async def test_an_interval_that_changes_at_each_reading_is_told_as_changing(rig: Rig, writer: Writer) -> None:
    async def leave_and_come_back() -> None:
        await change(rig, REMOVE, BOB)
        await change(rig, JOIN, BOB)

    async with rig.running(writer):
        overtake(rig.commits.inner, "read_history", leave_and_come_back, times=MEMBER_READS_MAX)
        await history(rig.bob, writer)
        assert rig.bob.errors == [MEMBERSHIP_CHANGED]
        assert seen(await history(rig.bob, writer)) == [2 * MEMBER_READS_MAX]


# --- members -----------------------------------------------------------------------------------------


@pytest.mark.shows("G12", "G13")
async def test_members_see_who_is_in_since_when_page_by_page(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        await say(rig, writer, 1)
        await change(rig, JOIN, CAROL, DAVE)
        first = await members(rig.bob, writer, limit=3)
        second = await members(rig.bob, writer, after=first.next, limit=3)
    assert first == MemberListBatch(
        GROUP, 2, [Member(ALICE, Seq(0), 1), Member(BOB, Seq(0), 0), Member(CAROL, Seq(1), 0)], CAROL, 4
    )
    assert second == MemberListBatch(GROUP, 2, [Member(DAVE, Seq(1), 0)], b"", 4)


@pytest.mark.shows("G12")
@pytest.mark.parametrize("op", [LEAVE, REMOVE])
async def test_who_is_gone_gets_no_list(rig: Rig, writer: Writer, op: Any) -> None:
    await change(rig, op, BOB)
    async with rig.running(writer):
        await members(rig.bob, writer)
        await members(rig.bob, writer, group=NO_GROUP)
    assert rig.bob.errors == [DENIED, DENIED]
    assert rig.bob.answers[0][1] == rig.bob.answers[1][1]


async def test_a_list_that_begins_behind_no_user_is_refused(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        await members(rig.alice, writer, after=b"short")
    assert rig.alice.errors == [INVALID]


# --- read marks --------------------------------------------------------------------------------------


@pytest.mark.shows("S9", "G8")
async def test_a_mark_ends_with_what_is_visible_and_counts_no_events(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        bob, carol = await with_everybody(rig, writer)
        marks = [
            await mark(bob, writer, 0),
            await mark(bob, writer, 2),
            await mark(bob, writer, 99),
            await mark(carol, writer, 0),
            await mark(carol, writer, 99),
            await mark(rig.alice, writer, 99),
        ]
    assert all(isinstance(told, MarkReadAck) for told in marks)
    assert [(told.read_seq, told.unread) for told in marks] == [
        (0, 5),
        (2, 3),
        (6, 0),
        (2, 5),
        (9, 0),
        (11, 0),
    ]


@pytest.mark.shows("S9", "X2")
async def test_behind_a_rejoin_only_what_followed_is_unread(rig: Rig, writer: Writer) -> None:
    async with rig.running(writer):
        bob, _carol = await with_everybody(rig, writer)
        await change(rig, JOIN, BOB)
        await say(rig, writer, 13)
        told = await mark(bob, writer, 0)
    assert (told.read_seq, told.unread) == (11, 1)


# --- strangers, and when something fails -------------------------------------------------------------


@pytest.mark.shows("G11", "G12", "F-48", "T7")
async def test_a_stranger_gets_one_answer_for_every_question_and_every_group(
    rig: Rig, writer: Writer
) -> None:
    dave = Client(rig.clock, user=DAVE)
    async with rig.running(writer):
        await say(rig, writer, 1)
        for group in (GROUP, NO_GROUP):
            await history(dave, writer, group=group)
            await history(dave, writer, before=1, group=group)
            await members(dave, writer, group=group)
            await mark(dave, writer, 1, group=group)
    assert dave.errors == [DENIED] * 8
    assert len({repr(body) for _id, body in dave.answers}) == 1


@pytest.mark.parametrize("error", [StoreRefused(), StoreUnknown(), StoreBroken()])
@pytest.mark.parametrize("method", ["load_intervals", "load_members"])
async def test_a_store_that_fails_is_told_as_unavailable_to_that_request_only(
    rig: Rig, writer: Writer, method: str, error: StoreError
) -> None:
    rig.memberships.fail(method, error)
    async with rig.running(writer):
        await members(rig.alice, writer)
        assert isinstance(await members(rig.alice, writer), MemberListBatch)
    assert rig.alice.errors == [UNAVAILABLE]


async def test_a_request_that_waited_too_long_is_refused_unread(rig: Rig, writer: Writer) -> None:
    held = rig.memberships.hold("load_intervals")
    async with rig.running(writer):
        first = rig.alice.request(Op.PULL_MEMBERS, encode_body(PullMembers(GROUP)))
        writer.submit(first)
        await happens(lambda: "load_intervals" in rig.memberships.calls, what="the first read")
        writer.submit(rig.bob.request(Op.PULL_MEMBERS, encode_body(PullMembers(GROUP))))
        await happens(lambda: writer.waiting == 1, what="the second waits behind it")
        rig.clock.advance(milliseconds=8_001)
        held.set()
        await happens(lambda: bool(rig.bob.answers), what="an answer")
    assert rig.bob.errors == [UNAVAILABLE]


async def test_too_many_reads_are_refused_and_the_others_are_answered(rig: Rig, writer: Writer) -> None:
    held = rig.memberships.hold("load_intervals")
    body = encode_body(PullMembers(GROUP))
    async with rig.running(writer):
        writer.submit(rig.alice.request(Op.PULL_MEMBERS, body))
        await happens(lambda: "load_intervals" in rig.memberships.calls, what="the first read")
        for _number in range(GROUP_REQUESTS_WAITING_MAX + 1):
            writer.submit(rig.alice.request(Op.PULL_MEMBERS, body))
        await happens(lambda: rig.alice.errors == [EXHAUSTED], what="the one too many")
        rig.send(writer, 1)
        await happens(lambda: bool(rig.alice.acks), what="messages go on")
        held.set()
        await happens(lambda: len(rig.alice.answers) == GROUP_REQUESTS_WAITING_MAX + 3, what="all answers")
    assert rig.alice.errors == [EXHAUSTED]


async def test_a_stale_owner_marks_nothing_and_says_so(rig: Rig, writer: Writer) -> None:
    rig.commits.inner.owns = lambda _bucket: False
    rig.commits.inner._is_stale = lambda _slot: True
    async with rig.running(writer):
        await mark(rig.alice, writer, 1)
    assert rig.alice.errors == [UNAVAILABLE]
    assert rig.fatal


@pytest.mark.shows("G14")
async def test_without_a_store_of_groups_reads_are_told_as_unsupported(rig: Rig) -> None:
    rig.all_memberships = []
    writer = rig.roles().writer
    async with rig.running(writer):
        await history(rig.alice, writer)
        await members(rig.alice, writer)
        await mark(rig.alice, writer, 1)
    assert rig.alice.errors == [UNSUPPORTED] * 3

"""The contract of groups, run by every adapter: memory, and Redis scripts on both servers.

What only a real server can show stands in `tests/lua`, every order of calls in `tests/property`; what only a
clock moved by hand can show stands at the end, for the memory adapter, which the others are compared with.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import pytest

from qim.adapters.commits_memory import MemoryCommitStore
from qim.adapters.commits_redis import RedisCommitStore
from qim.adapters.membership_memory import MemoryMemberships
from qim.adapters.membership_redis import RedisMemberships
from qim.clock import ManualClock
from qim.domain.groups import is_visible
from qim.errors import StoreBroken, StoreRefused
from qim.ids import Seq, UserId
from qim.limits import ADMIN_REQUEST_LIFE_MS, IDEMPOTENCY_WINDOW_MS, MEMBER_READS_MAX
from qim.memberships import Changed, Created, Group, GroupPlace, MemberQuery, Memberships
from qim.ports import CommitStore, Reserved
from tests.lua.commit_calls import ALICE, BOB, CLOCK, claim_of, opened_pipe
from tests.lua.group_calls import (
    CAROL,
    DAVE,
    GROUP,
    JOIN,
    LEAVE,
    PLACE,
    REMOVE,
    change_and_finish,
    change_one,
    creation_of,
    finish,
    opened_groups,
    plan,
    request_of,
    send_of,
)
from tests.services import StoreServer


class Stores(NamedTuple):
    groups: Memberships
    commits: CommitStore


@pytest.fixture(params=["memory", "valkey", "redis"])
async def stores(request: pytest.FixtureRequest) -> AsyncIterator[Stores]:
    if request.param == "memory":
        memory = MemoryCommitStore(CLOCK)
        await memory.claim(claim_of())
        yield Stores(MemoryMemberships(memory), memory)
        return
    server = request.getfixturevalue(f"{request.param}_server")
    assert isinstance(server, StoreServer)
    async with opened_pipe(server) as pipe:
        store = RedisCommitStore(pipe, CLOCK)
        await store.claim(claim_of())
        yield Stores(RedisMemberships(store), store)


@pytest.mark.shows("G2", "G5", "G6", "A1", "A2", "A3", "X2")
async def test_what_each_user_may_see_is_what_was_said_while_they_were_there(stores: Stores) -> None:
    groups, commits = stores
    await groups.create_groups([creation_of([ALICE, BOB])])
    said: dict[int, set[UserId]] = {}

    async def say(number: int, version: int, present: set[UserId]) -> None:
        (result,) = await commits.reserve([send_of(number, version)])
        assert result.outcome is Reserved.NEW
        said[result.seq] = present

    await say(1, 1, {ALICE, BOB})
    await change_and_finish(groups, commits, JOIN, [CAROL])
    await say(2, 2, {ALICE, BOB, CAROL})
    await change_and_finish(groups, commits, LEAVE, [BOB])
    await say(3, 3, {ALICE, CAROL})
    await change_and_finish(groups, commits, REMOVE, [CAROL])
    await say(4, 4, {ALICE})
    await change_and_finish(groups, commits, JOIN, [CAROL])
    await say(5, 5, {ALICE, CAROL})
    # A rejoin hides what was seen before: the interval is replaced.
    expected = {ALICE: {1, 3, 5, 7, 9}, BOB: {1, 3}, CAROL: {9}}
    for user, seqs in expected.items():
        (interval,) = await groups.load_intervals([(PLACE, user)])
        assert interval is not None
        ends = {"joined_at": interval.joined_at, "left_at": interval.left_at}
        assert {seq for seq in said if is_visible(Seq(seq), **ends)} == seqs
        assert seqs <= {seq for seq, present in said.items() if user in present}


@pytest.mark.shows("G10", "X16")
async def test_three_repeats_of_each_step_make_one_event(stores: Stores) -> None:
    groups, commits = stores
    assert await groups.create_groups([creation_of()] * 3) == [
        Created.CREATED,
        Created.EXISTS,
        Created.EXISTS,
    ]
    item = await plan(groups, JOIN, [CAROL])
    results = await groups.change_memberships([item] * 3)
    assert [result.outcome for result in results] == [Changed.NEW, Changed.UNFINISHED, Changed.UNFINISHED]
    assert len({result.event for result in results}) == 1
    await finish(commits, results[0].event)
    results = await groups.change_memberships([item] * 3)
    assert [(result.outcome, result.seq) for result in results] == [(Changed.DONE, 1)] * 3
    assert await commits.load_last_seq([PLACE]) == [1]


async def test_calls_without_items_answer_nothing(stores: Stores) -> None:
    groups, _ = stores
    assert await groups.create_groups([]) == []
    assert await groups.change_memberships([]) == []
    assert await groups.load_groups([]) == []
    assert await groups.load_intervals([]) == []
    assert await groups.load_snapshots([]) == []
    assert await groups.load_members([]) == []


async def test_an_empty_group_has_an_empty_snapshot_and_an_empty_page(stores: Stores) -> None:
    groups, commits = stores
    await groups.create_groups([creation_of([ALICE])])
    await change_and_finish(groups, commits, LEAVE, [ALICE])
    (snapshot,) = await groups.load_snapshots([(PLACE, 2)])
    assert (snapshot.version, snapshot.shards) == (2, {})
    (page,) = await groups.load_members([MemberQuery(PLACE, UserId(b""), 5)])
    assert page is not None
    assert (page.group, page.rows, page.more) == (Group(GROUP, "the group", UserId(b""), 2, 0), (), False)


@pytest.mark.shows("F6")
async def test_a_version_that_never_was_is_an_error(stores: Stores) -> None:
    groups, _ = stores
    await groups.create_groups([creation_of()])
    for version in (0, 2):
        with pytest.raises(StoreBroken):
            await groups.load_snapshots([(PLACE, 1), (PLACE, version)])


# --- a page that a change overtakes ---


class Overtaken(RedisMemberships):
    """Somebody joins between the rows of a page and the look at the version behind them."""

    joins_left = 0

    def load_groups(self, places: Sequence[GroupPlace]) -> asyncio.Future[list[Group | None]]:
        return asyncio.ensure_future(self._load_behind_a_join(places))

    async def _load_behind_a_join(self, places: Sequence[GroupPlace]) -> list[Group | None]:
        plain = RedisMemberships(self._store)
        if self.joins_left:
            user = UserId(b"%016d" % self.joins_left)
            self.joins_left -= 1
            await change_one(plain, await plan(plain, JOIN, [user]))
        return await plain.load_groups(places)


@pytest.mark.parametrize("joins", [0, 1, MEMBER_READS_MAX - 1])
async def test_a_page_that_changes_overtake_is_read_again_and_is_of_one_version(
    store_server: StoreServer, joins: int
) -> None:
    async with opened_groups(store_server) as (_, store, _):
        groups = Overtaken(store)
        groups.joins_left = 1 + joins  # the first one falls before the page
        (page,) = await groups.load_members([MemberQuery(PLACE, UserId(b""), 9)])
        assert page is not None
        assert (page.group.version, page.group.member_count, len(page.rows)) == (
            2 + joins,
            3 + joins,
            3 + joins,
        )


async def test_a_page_that_changes_overtake_for_ever_is_refused(store_server: StoreServer) -> None:
    async with opened_groups(store_server) as (_, store, _):
        groups = Overtaken(store)
        groups.joins_left = 1 + MEMBER_READS_MAX
        with pytest.raises(StoreRefused):
            await groups.load_members([MemberQuery(PLACE, UserId(b""), 9)])


# --- time ---


@pytest.mark.shows("X11", "C4")
async def test_a_request_is_known_for_a_day_and_a_plan_for_two_hours() -> None:
    clock = ManualClock()
    store = MemoryCommitStore(clock)
    groups = MemoryMemberships(store)
    await store.claim(claim_of())
    await groups.create_groups([creation_of()])
    item = await plan(groups, JOIN, [CAROL], request=request_of(1, JOIN, [CAROL]), reserved_at=clock.now_ms())
    first = await change_one(groups, item)
    await finish(store, first.event)
    clock.advance(milliseconds=IDEMPOTENCY_WINDOW_MS + 1)
    without_request = item._replace(request=None)
    assert (await change_one(groups, without_request)).outcome is Changed.MEMBERSHIP_CHANGED
    assert (await change_one(groups, item)).outcome is Changed.DONE
    clock.advance(milliseconds=ADMIN_REQUEST_LIFE_MS - IDEMPOTENCY_WINDOW_MS)
    assert (await change_one(groups, item)).outcome is Changed.MEMBERSHIP_CHANGED


async def test_a_memory_store_with_a_limit_takes_neither_groups_nor_changes() -> None:
    store = MemoryCommitStore(CLOCK, limit_bytes=10)
    groups = MemoryMemberships(store)
    await store.claim(claim_of())
    await groups.create_groups([creation_of()])
    late = await plan(groups, JOIN, [DAVE])
    await change_one(groups, await plan(groups, JOIN, [CAROL]))
    assert await groups.create_groups([creation_of()]) == [Created.FULL]
    assert (await change_one(groups, late)).outcome is Changed.FULL

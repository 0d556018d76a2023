"""The scripts of groups on a real server against the memory adapter, driven by Hypothesis with equal calls.

Two workers take the slots from each other, groups are made, changed, sent to and read, events are finished or
left, calls are repeated, and one rule kills the server and starts it again on the same file. Every answer is
compared. Beside the comparison stands an oracle of its own, a set of users per group: whatever gets a
sequence was planned for exactly the members of that moment, and the snapshot of its version says the same.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from msgspec import structs

from qim.adapters import redis_keys as keys
from qim.adapters.commitlog_memory import MemoryCommitLog
from qim.adapters.commitlog_redis import RedisCommitLog
from qim.adapters.commits_memory import MemoryCommitStore
from qim.adapters.commits_one_step_memory import MemoryOneStepCommits
from qim.adapters.commits_one_step_redis import RedisOneStepCommits
from qim.adapters.commits_redis import RedisCommitStore
from qim.adapters.membership_memory import MemoryMemberships
from qim.adapters.membership_redis import RedisMemberships
from qim.adapters.redis_pipe import RedisPipe
from qim.domain.groups import (
    OPERATOR,
    GroupRoute,
    Membership,
    choose_successor,
    does_need_successor,
    event_id_of,
    operator_request_digest,
    plan_change,
)
from qim.errors import FailedPrecondition
from qim.ids import (
    BucketId,
    ClientMessageId,
    ConversationId,
    GroupId,
    Millis,
    Offset,
    RequestId,
    Seq,
    SlotId,
    UserId,
)
from qim.memberships import (
    Changed,
    ChangeResult,
    Created,
    GroupPlace,
    MemberQuery,
    MembershipChange,
    MemberState,
    OperatorRequest,
    Snapshot,
)
from qim.ports import Commit, HistoryQuery, MessageKey, ReadMark, Reservation, Reserved, ReserveResult
from qim.records import OUTBOX_FRAME_BYTES, MembershipOp
from tests.lua.commit_calls import ALICE, BOB, CLOCK, SCRIPTS, TENANT, claim_of
from tests.lua.group_calls import CAROL, DAVE, change_of, creation_of
from tests.services import StoreServer

T = TypeVar("T")
HOME = SlotId(1)
KILLS_MAX = 1
"""Per run: a restart takes longer than everything else of a run together."""
ROUTES = [
    GroupRoute(
        GroupId(b"\r\n{}:\x00" + b"g" * 10), ConversationId(b"{b255}\x00:\r\n" + b"c" * 6), BucketId(0)
    ),
    GroupRoute(GroupId(b"h" * 16), ConversationId(bytes(16)), BucketId(255)),
]
PLACE_BYTES = 20
"""Tenant and conversation, before the version in an announcement."""
USERS = [ALICE, BOB, CAROL, DAVE]
UNREACHED = {
    Changed.CLOCK, Changed.FULL, Changed.EXHAUSTED, Reserved.CLOCK, Reserved.FULL, Reserved.EXHAUSTED,
}  # fmt: skip
"""By clocks that agree, memory without end and few messages."""
routes = st.sampled_from(ROUTES)
others = st.sampled_from([0, 0, 0, 0, 0, 0, 1])
"""0: the owner of the slots calls, 1: the worker that lost them."""
people = st.lists(st.sampled_from(USERS), min_size=1, max_size=3, unique=True)


def place_of(route: GroupRoute) -> GroupPlace:
    return GroupPlace(route.bucket, TENANT, route.conversation)


class MembershipComparison(RuleBasedStateMachine):
    """One server and one model, two workers on each side, and the oracle."""

    server: StoreServer
    seen: Counter[Changed | Reserved]
    """Outcomes over all runs: a machine that never meets one shows nothing about it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        model = MemoryCommitStore(CLOCK)
        self.models = [model, MemoryCommitStore(CLOCK, model.state)]
        self.log = MemoryCommitLog(CLOCK)
        self.pipe = self.connect()
        self.wait(self.flush())
        self.reals = [RedisCommitStore(self.pipe, CLOCK) for _ in self.models]
        self.unfinished: dict[tuple[GroupPlace, Seq], Commit] = {}
        self.asked: list[MembershipChange] = []
        self.members: dict[GroupPlace, set[UserId]] = {}
        self.older: dict[GroupPlace, list[Membership]] = {}
        self.kills = 0
        self.owner = 0
        self.take_over(0)
        self.create(0, ROUTES[0], [ALICE, BOB], "one")

    # --- both sides ---

    def wait(self, awaitable: Awaitable[T]) -> T:
        async def run() -> T:
            return await awaitable

        return self.loop.run_until_complete(run())

    async def flush(self) -> None:
        await self.pipe.command("FLUSHALL")

    def connect(self) -> RedisPipe:
        pipe = RedisPipe(self.server.url, clock=CLOCK, scripts=SCRIPTS)
        self.wait(pipe.connect())
        return pipe

    def stores(self, worker: int, name: str, *arguments: object, **named: object) -> tuple[object, object]:
        async def run() -> tuple[object, object]:
            real = await getattr(self.reals[worker], name)(*arguments, **named)
            return real, await getattr(self.models[worker], name)(*arguments, **named)

        return self.loop.run_until_complete(run())

    def groups(self, worker: int, name: str, *arguments: object) -> object:
        """The same call on both sides, which must give the same answer."""

        async def run() -> tuple[object, object]:
            real = RedisMemberships(self.reals[worker])
            model = MemoryMemberships(self.models[worker])
            return await getattr(real, name)(*arguments), await getattr(model, name)(*arguments)

        real, model = self.loop.run_until_complete(run())
        assert real == model
        return model

    def caller(self, other: int) -> int:
        return (self.owner + other) % 2

    # --- rules ---

    @rule(worker=st.integers(0, 1))
    def take_over(self, worker: int) -> None:
        self.owner = worker
        claim = claim_of(bytes([worker + 1]) * 16, slots=[SlotId(0), SlotId(63)])
        real, model = self.stores(worker, "claim", claim)
        assert real == model

    @rule(other=others, route=routes, members=people, name=st.sampled_from(["one", "one", "other"]))
    def create(self, other: int, route: GroupRoute, members: list[UserId], name: str) -> None:
        item = creation_of(members, name=name, route=route)
        first, _second = self.created(self.groups(self.caller(other), "create_groups", [item, item]))
        if first is Created.CREATED:
            self.members[item.place] = set(members)

    @staticmethod
    def created(answers: object) -> list[Created]:
        assert isinstance(answers, list)
        return answers

    @precondition(lambda self: self.members)
    @rule(
        other=others,
        route=routes,
        op=st.sampled_from(MembershipOp),
        named=people,
        is_late=st.booleans(),
        request=st.sampled_from([None, 1, 2]),
    )
    def change(
        self,
        *,
        other: int,
        route: GroupRoute,
        op: MembershipOp,
        named: list[UserId],
        is_late: bool,
        request: int | None,
    ) -> None:
        place = place_of(route)
        if place not in self.members:
            return
        older = self.older.setdefault(place, [])
        before = self.membership(place)
        late = [membership for membership in older if membership.version < before.version]
        membership = late[-1] if is_late and late else before
        named = named[:1] if op is MembershipOp.LEAVE else named
        item = self.plan(route, op, named, membership)
        if item is None:
            return
        if request is not None and op is not MembershipOp.LEAVE:
            group = route.group
            digest = operator_request_digest(tenant=TENANT, group=group, op=op, users=named)
            item = item._replace(request=OperatorRequest(RequestId(bytes([request]) * 16), digest))
        self.ask(other, item)
        older.append(before)

    @rule(other=others, route=routes, leaver=st.sampled_from(USERS))
    def come_and_go(self, other: int, route: GroupRoute, leaver: UserId) -> None:
        """Two changes, and the last one asked for again: the event of either may be unfinished."""
        for op in (MembershipOp.JOIN, MembershipOp.REMOVE, MembershipOp.REMOVE):
            self.change(other=other, route=route, op=op, named=[leaver], is_late=False, request=None)

    def plan(
        self, route: GroupRoute, op: MembershipOp, named: list[UserId], membership: Membership
    ) -> MembershipChange | None:
        place = place_of(route)
        actor = named[0] if op is MembershipOp.LEAVE else None
        successor = None
        if does_need_successor(membership, op, named):
            intervals = self.models[0].state.groups[place].intervals
            rows = [(user, intervals[user].joined_at) for user in membership.members]
            successor = choose_successor(rows, named)
        try:
            planned = plan_change(
                tenant=TENANT, route=route, op=op, actor=actor or OPERATOR, device=None, users=named,
                membership=membership, successor=successor, now_ms=CLOCK.now_ms(),
            )  # fmt: skip
        except FailedPrecondition:
            return None
        return change_of(planned, op, membership, actor=actor, route=route)

    def membership(self, place: GroupPlace) -> Membership:
        group = self.models[0].state.groups[place]
        members = frozenset(member.user for member in group.snapshots[group.version])
        return Membership(group.version, group.owner, members)

    def ask(self, other: int, item: MembershipChange) -> None:
        before = self.membership(item.place)
        (result,) = self.changed(self.groups(self.caller(other), "change_memberships", [item]))
        self.seen[result.outcome] += 1
        if result.event is not None:
            event = result.event
            self.unfinished[item.place, event.seq] = Commit(
                event.key, event.identity, event.seq, event.reserved_at, True, SlotId(2), Offset(event.seq)
            )
        if result.outcome is Changed.NEW:
            assert before.version == item.version
            users = {member.user for member in item.users}
            self.members[item.place] ^= users
            assert self.membership(item.place).members == self.members[item.place]
        else:
            assert self.membership(item.place) == before, "a refusal or a repeat changes nobody"
        self.asked.append(item)

    @staticmethod
    def changed(answers: object) -> list[ChangeResult]:
        assert isinstance(answers, list)
        return answers

    @precondition(lambda self: self.asked)
    @rule(other=others, data=st.data())
    def ask_again(self, other: int, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.asked[-6:]))
        if data.draw(st.booleans()) and item.event is not None:
            item = item._replace(event=structs.replace(item.event, record=b"newly built"))
        if item.request is not None and data.draw(st.booleans()):
            item = item._replace(request=item.request._replace(digest=b"asked for something else".ljust(32)))
        self.ask(other, item)

    @rule(
        other=others,
        route=st.sampled_from([ROUTES[0], ROUTES[0], ROUTES[1]]),
        senders=st.lists(st.sampled_from(USERS), min_size=1, max_size=4),
        only_members=st.sampled_from([True, True, False]),
        number=st.integers(0, 4),
        behind=st.sampled_from([0, 0, 0, 1, -1]),
        one_step=st.booleans(),
        then=st.sampled_from(["", "again", "other", "finish"]),
    )
    def send(
        self,
        *,
        other: int,
        route: GroupRoute,
        senders: Sequence[UserId],
        only_members: bool,
        number: int,
        behind: int,
        one_step: bool,
        then: str,
    ) -> None:
        """A run of messages, and for most of them a repeat: the same, other content, or after its commit."""
        place = place_of(route)
        present = self.members.get(place, set())
        if only_members:
            senders = [user for user in senders if user in present] or sorted(present)[:1]
        version = max(1, (self.membership(place).version if present else 1) - behind)
        items = [self.message(place, user, number + at % 2, version) for at, user in enumerate(senders)]
        self.send_all(other, items, one_step=one_step)
        if then == "finish" and self.unfinished:
            self.mark(other, sorted(self.unfinished))
        if then == "other":
            items = [structs.replace(item, identity=b"other".ljust(36, b".")) for item in items]
        if then:
            self.send_all(other, items, one_step=one_step)

    def send_all(self, other: int, items: Sequence[Reservation], *, one_step: bool) -> None:
        worker = self.caller(other)
        results = self.commit(worker, items) if one_step else self.reserve(worker, items)
        for item, result in zip(items, results, strict=True):
            self.seen[result.outcome] += 1
            place = GroupPlace(*item.key[:3])
            if result.outcome in {Reserved.NEW, Reserved.DURABLE}:
                assert item.key.sender in self.members[place]
                self.compare_audience(place, item.membership_version)
            if result.outcome in {Reserved.NEW, Reserved.RECORDED}:
                self.note_unfinished(place, item, result)

    def note_unfinished(self, place: GroupPlace, item: Reservation, result: ReserveResult) -> None:
        offset = Offset(result.seq)
        self.unfinished[place, result.seq] = Commit(
            item.key, item.identity, result.seq, result.reserved_at, False, SlotId(2), offset
        )

    @staticmethod
    def message(place: GroupPlace, sender: UserId, number: int, version: int) -> Reservation:
        key = MessageKey(*place, sender, ClientMessageId(bytes([number]) * 16))
        frame = b"\x02\x02\x00" + bytes([place.bucket]) + bytes(OUTBOX_FRAME_BYTES - 4)
        now = CLOCK.now_ms()
        return Reservation(key, b"same".ljust(36, b"."), b"record", now, Millis(0), frame, version)

    def reserve(self, worker: int, items: Sequence[Reservation]) -> list[ReserveResult]:
        real, model = self.stores(worker, "reserve", items)
        assert real == model
        assert isinstance(model, list)
        return model

    def commit(self, worker: int, items: Sequence[Reservation]) -> list[ReserveResult]:
        async def run() -> tuple[list[ReserveResult], list[ReserveResult]]:
            outbox = RedisCommitLog(self.pipe, "outbox")
            real = RedisOneStepCommits(self.reals[worker], outbox, CLOCK)
            model = MemoryOneStepCommits(self.models[worker], self.log)
            return await real.commit(items, HOME), await model.commit(items, HOME)

        real, model = self.loop.run_until_complete(run())
        assert real == model
        return model

    def compare_audience(self, place: GroupPlace, version: int) -> None:
        snapshots = self.groups(0, "load_snapshots", [(place, version)])
        assert isinstance(snapshots, list)
        snapshot: Snapshot = snapshots[0]
        audience = {user for part in snapshot.shards.values() for user in part}
        assert audience == self.members[place], "not the members of the moment that gave the sequence"

    @precondition(lambda self: self.members)
    @rule(other=others, route=routes, number=st.integers(0, 3))
    def take_the_id_of_the_next_event(self, other: int, route: GroupRoute, number: int) -> None:
        """A sender may choose the very id that a later event of the group would have."""
        place = place_of(route)
        if place not in self.members or not self.members[place]:
            return
        membership = self.membership(place)
        event_id = event_id_of(
            tenant=TENANT, group=route.group, op=MembershipOp.JOIN, actor=OPERATOR,
            version=membership.version, users=(USERS[number],),
        )  # fmt: skip
        item = self.message(place, membership.owner, 9, membership.version)
        self.reserve(
            self.caller(other), [structs.replace(item, key=item.key._replace(client_message_id=event_id))]
        )

    @precondition(lambda self: self.unfinished)
    @rule(other=others, data=st.data())
    def finish(self, other: int, data: st.DataObject) -> None:
        known = sorted(self.unfinished)
        some = st.lists(st.sampled_from(known), min_size=1, max_size=6)
        self.mark(other, data.draw(st.just(known) | st.just(known[-1:]) | some))

    def mark(self, other: int, chosen: Sequence[tuple[GroupPlace, Seq]]) -> None:
        items = [self.unfinished[name] for name in chosen]
        real, model = self.stores(self.caller(other), "mark_committed", items)
        assert isinstance(real, list)
        assert isinstance(model, list)
        assert [result.outcome for result in real] == [result.outcome for result in model]

    @rule(other=others, route=routes, user=st.sampled_from(USERS), seq=st.integers(0, 20))
    def mark_read(self, other: int, route: GroupRoute, user: UserId, seq: int) -> None:
        mark = ReadMark(TENANT, route.conversation, route.bucket, user, Seq(seq))
        real, model = self.stores(self.caller(other), "mark_read", [mark])
        assert real == model

    @rule(route=routes, after=st.sampled_from([b"", *USERS]), entries_max=st.integers(1, 4))
    def read_members(self, route: GroupRoute, after: bytes, entries_max: int) -> None:
        self.groups(0, "load_members", [MemberQuery(place_of(route), UserId(after), entries_max)])

    @precondition(lambda self: self.kills < KILLS_MAX and self.asked)
    @rule()
    def kill_and_reload(self) -> None:
        self.kills += 1
        self.wait(self.pipe.close())
        self.server.kill9()
        self.server.start()
        self.pipe = self.connect()
        self.reals = [RedisCommitStore(self.pipe, CLOCK) for _ in self.models]
        for real, model in zip(self.reals, self.models, strict=True):
            for slot, epoch in model._epochs.items():
                real.epochs[slot] = epoch.to_bytes(8, "big")
        self.compare_everything()

    # --- the whole state ---

    def compare_everything(self) -> None:
        """Heads, every snapshot, intervals, pending events, history and announcements of both sides."""
        places = [place_of(route) for route in ROUTES]
        self.groups(0, "load_groups", places)
        self.groups(0, "load_intervals", [(place, user) for place in places for user in USERS])
        known = self.models[0].state.groups
        made = [place for place in places if place in known]
        wanted = [(place, version) for place in made for version in known[place].snapshots]
        self.groups(0, "load_snapshots", wanted)
        queries = [
            HistoryQuery(TENANT, place.conversation, place.bucket, Seq(0), Seq(0), 300, 1_000_000)
            for place in places
        ]
        for name, arguments in (("read_history", (queries,)), ("load_last_seq", (places,))):
            real, model = self.stores(0, name, *arguments)
            assert real == model
        buckets = [place.bucket for place in places]
        real, model = self.stores(0, "read_pending", buckets, older_than_ms=-100_000, entries_max=1_000)
        assert isinstance(real, list)
        assert isinstance(model, list)
        assert sorted(real) == sorted(model)
        self.compare_announced(places)
        self.check_intervals(places)

    def compare_announced(self, places: Sequence[GroupPlace]) -> None:
        async def announced(place: GroupPlace) -> list[bytes]:
            elements: list[bytes] = await self.pipe.command("LRANGE", keys.announce_key(place.bucket), 0, -1)
            return elements

        told = [(place, element[PLACE_BYTES:]) for place in places for element in self.wait(announced(place))]
        model = [(place, b"%d" % version) for place, version in self.models[0].state.announced]
        assert sorted(told) == sorted(model)

    def check_intervals(self, places: Sequence[GroupPlace]) -> None:
        for place in places:
            group = self.models[0].state.groups.get(place)
            if group is not None:
                current = {u for u, i in group.intervals.items() if i.state is MemberState.MEMBER}
                assert current == self.members[place]

    def teardown(self) -> None:
        try:
            self.compare_everything()
        finally:
            self.wait(self.pipe.close())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()


@pytest.mark.shows("G1", "G2", "G3", "G4", "G5", "G6", "G10", "X11", "X14", "X16", "C10", "F-08", "F-49")
@pytest.mark.parametrize("name", ["valkey", "redis"])
def test_groups_behave_as_the_model_does_and_a_kill_loses_nothing(
    name: str, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue(f"fresh_{name}")
    seen: Counter[Changed | Reserved] = Counter()
    parts = {"server": server, "seen": seen}
    machine = type("MembershipComparisonOnServer", (MembershipComparison,), parts)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=50,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert server.kills > 0, "the kill rule never ran"
    assert {*Changed, *Reserved} - UNREACHED <= seen.keys(), f"some outcome was never met: {seen}"

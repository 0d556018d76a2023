"""Groups and their members in memory: the reference for the two scripts, and what the simulation runs on.

Made over a memory commit store, whose `CommitState` holds the groups beside the conversations: so a change
takes a sequence and leaves its event RECORDED in the very tables that sends use. A call is applied when the
method is called, each item wholly or not at all.

Invariants, per group: the members of the newest snapshot are those whose interval says so; every version from
1 on has its snapshot; `event_seq` is the sequence of the last change, 0 before the first.
"""

import asyncio
from collections.abc import Sequence

from qim.adapters.commits_memory import (
    CommitState,
    Conversation,
    Fact,
    GroupState,
    MemoryCommitStore,
    Remembered,
)
from qim.adapters.ownership_memory import done
from qim.errors import StoreBroken
from qim.ids import SEQ_MAX, Millis, Seq, SlotId, UserId
from qim.limits import ADMIN_REQUEST_LIFE_MS, CLOCK_SKEW_MS_MAX
from qim.memberships import (
    Changed,
    ChangeResult,
    Created,
    Group,
    GroupCreation,
    GroupPlace,
    Interval,
    MemberPage,
    MemberQuery,
    MemberRow,
    MembershipChange,
    MemberState,
    Snapshot,
)
from qim.ports import MessageKey, Pending, Reservation
from qim.records import MembershipOp

_FIRST_VERSION = 1
_STATE_AFTER = {
    MembershipOp.JOIN: MemberState.MEMBER,
    MembershipOp.LEAVE: MemberState.LEFT,
    MembershipOp.REMOVE: MemberState.REMOVED,
}


class MemoryMemberships:
    """`Memberships` of the port."""

    def __init__(self, store: MemoryCommitStore) -> None:
        self._store = store

    @property
    def _state(self) -> CommitState:
        return self._store.state

    # --- changes ---

    def create_groups(self, items: Sequence[GroupCreation]) -> asyncio.Future[list[Created]]:
        return done([self._create(item) for item in items])

    def _create(self, item: GroupCreation) -> Created:
        if self._store.is_full:
            return Created.FULL
        if not self._store.owns(item.place.bucket):
            return Created.STALE_OWNER
        known = self._state.groups.get(item.place)
        if known is not None:
            return Created.EXISTS if known.digest == item.digest else Created.CONFLICT
        first = Interval(MemberState.MEMBER, Seq(0), Seq(0))
        self._state.groups[item.place] = GroupState(
            item.group,
            item.name,
            item.owner,
            item.digest,
            _FIRST_VERSION,
            {member.user: first for member in item.members},
            {_FIRST_VERSION: frozenset(item.members)},
        )
        self._state.announced.append((item.place, _FIRST_VERSION))
        return Created.CREATED

    def change_memberships(self, items: Sequence[MembershipChange]) -> asyncio.Future[list[ChangeResult]]:
        return done([self._change(item) for item in items])

    def _change(self, item: MembershipChange) -> ChangeResult:
        if self._store.is_full:
            return _refused(Changed.FULL)
        if not self._store.owns(item.place.bucket):
            return _refused(Changed.STALE_OWNER)
        remembered = self._remembered(item)
        if remembered is not None:
            return remembered
        group = self._state.groups.get(item.place)
        if group is None:
            return _refused(Changed.NOT_MEMBER)
        if item.event is None:
            return self._leave_as_it_is(item, group)
        known = self._known(item, item.event, group)
        return known or self._plan_refusal(item, group) or self._apply(item, item.event, group)

    def _remembered(self, item: MembershipChange) -> ChangeResult | None:
        """The result of the request, when it is known."""
        if item.request is None:
            return None
        found = self._state.requests.get((item.place, item.request.request_id))
        if found is None or self._store.clock.now_ms() > found.expires_at:
            return None
        if found.request.digest != item.request.digest:
            return _refused(Changed.CONFLICT)
        pending = found.event and self._pending(found.event)
        if pending:
            return found.result._replace(outcome=Changed.UNFINISHED, event=pending)
        return found.result

    def _known(self, item: MembershipChange, event: Reservation, group: GroupState) -> ChangeResult | None:
        """What was made of the same change before."""
        fact = self._store.fact_of(event.key)
        if fact is None:
            return None
        if fact.identity != event.identity:
            return _refused(Changed.CONFLICT)
        if not fact.committed_at:
            pending = self._pending(event.key)
            return ChangeResult(Changed.UNFINISHED, fact.seq, _count(group), group.version, pending)
        return self._remember(item, _done(fact.seq, group))

    def _leave_as_it_is(self, item: MembershipChange, group: GroupState) -> ChangeResult:
        """A plan with nothing to do is answered when no event is unfinished."""
        if item.op is MembershipOp.LEAVE and item.actor not in group.intervals:
            return _refused(Changed.NOT_MEMBER)
        if group.version != item.version:
            return _refused(Changed.MEMBERSHIP_CHANGED)
        conversation = self._state.conversations.get(item.place, Conversation())
        if conversation.head >= group.event_seq:
            return self._remember(item, _done(Seq(0), group))
        pending = group.event and self._pending(group.event)
        if not pending:
            return _refused(Changed.WAIT)
        return ChangeResult(Changed.UNFINISHED, pending.seq, _count(group), group.version, pending)

    def _plan_refusal(self, item: MembershipChange, group: GroupState) -> ChangeResult | None:
        """Why the store does not do what was planned."""
        if group.version != item.version:
            return _refused(Changed.MEMBERSHIP_CHANGED)
        assert item.event is not None
        if abs(item.event.reserved_at - self._store.clock.now_ms()) > CLOCK_SKEW_MS_MAX:
            return _refused(Changed.CLOCK)
        if self._state.conversations.get(item.place, Conversation()).last >= SEQ_MAX:
            return _refused(Changed.EXHAUSTED)
        joins = item.op is MembershipOp.JOIN
        users = {member.user for member in item.users}
        count_after = _count(group) + (len(users) if joins else -len(users))
        heir_stays = group.is_member(item.owner_after) and item.owner_after not in users
        fits = bool(users) and (heir_stays or (count_after == 0 and not item.owner_after))
        if not fits or any(group.is_member(user) == joins for user in users):
            return _refused(Changed.MEMBERSHIP_CHANGED)
        return None

    def _apply(self, item: MembershipChange, event: Reservation, group: GroupState) -> ChangeResult:
        seq = self._store.allocate(event).seq
        self._state.conversations[item.place].skipped.add(seq)
        members = group.snapshots[group.version]
        joins = item.op is MembershipOp.JOIN
        group.version += 1
        group.snapshots[group.version] = members | {*item.users} if joins else members - {*item.users}
        for member in item.users:
            joined_at = Seq(seq - 1) if joins else group.intervals[member.user].joined_at
            left_at = Seq(0) if joins else seq
            group.intervals[member.user] = Interval(_STATE_AFTER[item.op], joined_at, left_at)
        group.owner, group.event, group.event_seq = item.owner_after, event.key, seq
        result = ChangeResult(Changed.NEW, seq, _count(group), group.version, self._pending(event.key))
        self._remember(item, _done(seq, group), event.key)
        return result

    def _remember(
        self, item: MembershipChange, result: ChangeResult, event: MessageKey | None = None
    ) -> ChangeResult:
        if item.request is not None:
            expires_at = Millis(self._store.clock.now_ms() + ADMIN_REQUEST_LIFE_MS)
            self._state.requests[item.place, item.request.request_id] = Remembered(
                item.request, result, event, expires_at
            )
        return result

    def _pending(self, key: MessageKey) -> Pending | None:
        fact: Fact | None = self._state.pending.get(key)
        if fact is None:
            return None
        record = self._state.conversations[GroupPlace(*key[:3])].records[fact.seq]
        return Pending(key, fact.identity, fact.seq, fact.reserved_at, record)

    # --- reads ---

    def load_groups(self, places: Sequence[GroupPlace]) -> asyncio.Future[list[Group | None]]:
        return done([self._head(place) for place in places])

    def _head(self, place: GroupPlace) -> Group | None:
        group = self._state.groups.get(place)
        if group is None:
            return None
        return Group(group.group, group.name, group.owner, group.version, _count(group))

    def load_snapshots(self, wanted: Sequence[tuple[GroupPlace, int]]) -> asyncio.Future[list[Snapshot]]:
        groups = [self._state.groups.get(place) for place, _ in wanted]
        snapshots = [
            _snapshot(group, version)
            for group, (_, version) in zip(groups, wanted, strict=True)
            if group is not None and version in group.snapshots
        ]
        if len(snapshots) == len(wanted):
            return done(snapshots)
        future: asyncio.Future[list[Snapshot]] = asyncio.get_running_loop().create_future()
        future.set_exception(StoreBroken("a snapshot is missing"))
        return future

    def load_intervals(
        self, wanted: Sequence[tuple[GroupPlace, UserId]]
    ) -> asyncio.Future[list[Interval | None]]:
        groups = ((self._state.groups.get(place), user) for place, user in wanted)
        return done([group.intervals.get(user) if group else None for group, user in groups])

    def load_members(self, queries: Sequence[MemberQuery]) -> asyncio.Future[list[MemberPage | None]]:
        return done([self._page(query) for query in queries])

    def _page(self, query: MemberQuery) -> MemberPage | None:
        group = self._state.groups.get(query.place)
        head = self._head(query.place)
        if group is None or head is None:
            return None
        rows = [
            MemberRow(user, interval.joined_at)
            for user, interval in sorted(group.intervals.items())
            if user > query.after and group.is_member(user)
        ]
        return MemberPage(head, tuple(rows[: query.entries_max]), len(rows) > query.entries_max)


def _refused(outcome: Changed) -> ChangeResult:
    return ChangeResult(outcome, Seq(0), 0, 0, None)


def _done(seq: Seq, group: GroupState) -> ChangeResult:
    return ChangeResult(Changed.DONE, seq, _count(group), group.version, None)


def _count(group: GroupState) -> int:
    return len(group.snapshots[group.version])


def _snapshot(group: GroupState, version: int) -> Snapshot:
    shards: dict[SlotId, list[UserId]] = {}
    for member in sorted(group.snapshots[version]):
        shards.setdefault(member.shard, []).append(member.user)
    return Snapshot(version, {shard: tuple(users) for shard, users in shards.items()})

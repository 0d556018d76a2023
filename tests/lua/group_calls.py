"""What the tests of groups share: a group on a flushed server, planned changes, and sends to it.

Changes are planned by the rules that the writer uses and put into the words of the port, so a test says only
who does what. Ids contain bytes that a careless key or protocol would trip over.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from blake3 import blake3
from msgspec import structs

from qim.adapters import redis_keys as keys
from qim.adapters.commits_redis import RedisCommitStore
from qim.adapters.membership_redis import RedisMemberships
from qim.adapters.redis_pipe import RedisPipe
from qim.domain.groups import (
    OPERATOR,
    GroupRoute,
    Membership,
    PlannedChange,
    choose_successor,
    does_need_successor,
    operator_request_digest,
    plan_change,
)
from qim.domain.placement import shard_of_user
from qim.ids import GroupId, Millis, Offset, RequestId, SlotId, UserId
from qim.memberships import (
    ChangeResult,
    GroupCreation,
    GroupPlace,
    MemberQuery,
    MembershipChange,
    Memberships,
    OperatorRequest,
    PlacedUser,
)
from qim.ports import Commit, CommitStore, MessageKey, Pending, Reservation
from qim.records import MembershipOp
from tests.lua.commit_calls import (
    ALICE,
    AWKWARD,
    BOB,
    BUCKET,
    CLOCK,
    CONVERSATION,
    TENANT,
    key_of,
    opened_store,
    reservation,
)
from tests.services import StoreServer

CAROL = UserId(b"car" + AWKWARD)
DAVE = UserId(b"dav" + AWKWARD)
GROUP = GroupId(b"grp" + AWKWARD)
ROUTE = GroupRoute(GROUP, CONVERSATION, BUCKET)
PLACE = GroupPlace(BUCKET, TENANT, CONVERSATION)
SUFFIX = keys.conversation_suffix(*PLACE)
JOIN, LEAVE, REMOVE = MembershipOp.JOIN, MembershipOp.LEAVE, MembershipOp.REMOVE


def placed(users: Iterable[UserId]) -> tuple[PlacedUser, ...]:
    return tuple(PlacedUser(shard_of_user(TENANT, user), user) for user in users)


def creation_of(
    members: Sequence[UserId] = (ALICE, BOB), *, name: str = "the group", route: GroupRoute = ROUTE
) -> GroupCreation:
    digest = blake3(name.encode() + b"".join(sorted(members))).digest()
    place = GroupPlace(route.bucket, TENANT, route.conversation)
    return GroupCreation(place, route.group, name, members[0], placed(members), digest)


def request_of(number: int, op: MembershipOp, users: Iterable[UserId]) -> OperatorRequest:
    digest = operator_request_digest(tenant=TENANT, group=GROUP, op=op, users=users)
    return OperatorRequest(RequestId(b"\r\n:{\x00}" + number.to_bytes(10, "big")), digest)


async def load_membership(groups: Memberships, route: GroupRoute = ROUTE) -> Membership:
    place = GroupPlace(route.bucket, TENANT, route.conversation)
    (head,) = await groups.load_groups([place])
    assert head is not None
    (snapshot,) = await groups.load_snapshots([(place, head.version)])
    members = {user for part in snapshot.shards.values() for user in part}
    assert len(members) == head.member_count
    return Membership(head.version, head.owner, members)


async def plan(
    groups: Memberships,
    op: MembershipOp,
    users: Sequence[UserId],
    *,
    request: OperatorRequest | None = None,
    route: GroupRoute = ROUTE,
    reserved_at: int | None = None,
) -> MembershipChange:
    """The change as the writer would ask for it now."""
    membership = await load_membership(groups, route)
    place = GroupPlace(route.bucket, TENANT, route.conversation)
    successor = None
    if does_need_successor(membership, op, users):
        (page,) = await groups.load_members([MemberQuery(place, UserId(b""), len(membership.members))])
        assert page is not None
        successor = choose_successor(page.rows, users)
    planned = plan_change(
        tenant=TENANT,
        route=route,
        op=op,
        actor=users[0] if op is LEAVE else OPERATOR,
        device=None,
        users=users,
        membership=membership,
        successor=successor,
        now_ms=Millis(CLOCK.now_ms() if reserved_at is None else reserved_at),
    )
    return change_of(planned, op, membership, actor=users[0] if op is LEAVE else None, route=route)._replace(
        request=request
    )


def change_of(
    planned: PlannedChange,
    op: MembershipOp,
    membership: Membership,
    *,
    actor: UserId | None,
    route: GroupRoute = ROUTE,
) -> MembershipChange:
    place = GroupPlace(route.bucket, TENANT, route.conversation)
    event = None
    if planned.event is not None:
        record = planned.event.record
        key = MessageKey(*place, record.sender, planned.event.client_message_id)
        identity, data = planned.event.identity, planned.event.record_bytes
        event = Reservation(key, identity, data, record.reserved_at, Millis(0))
    return MembershipChange(
        place, op, membership.version, actor, placed(planned.users), planned.owner_after, event
    )


async def change_one(groups: Memberships, item: MembershipChange) -> ChangeResult:
    (result,) = await groups.change_memberships([item])
    return result


async def finish(store: CommitStore, event: Pending | None) -> None:
    """What the writer or the recoverer does behind the Outbox."""
    assert event is not None
    commit = Commit(
        event.key, event.identity, event.seq, event.reserved_at, True, SlotId(3), Offset(event.seq)
    )
    await store.mark_committed([commit])


async def change_and_finish(
    groups: Memberships, store: CommitStore, op: MembershipOp, users: Sequence[UserId]
) -> ChangeResult:
    result = await change_one(groups, await plan(groups, op, users))
    await finish(store, result.event)
    return result


def send_of(
    number: int, version: int, *, sender: UserId = ALICE, reserved_at: int | None = None, expires_at: int = 0
) -> Reservation:
    item = reservation(key_of(number, sender=sender), reserved_at=reserved_at, expires_at=expires_at)
    return structs.replace(item, membership_version=version)


@asynccontextmanager
async def opened_groups(
    server: StoreServer, members: Sequence[UserId] = (ALICE, BOB)
) -> AsyncIterator[tuple[RedisMemberships, RedisCommitStore, RedisPipe]]:
    """A store that owns every slot, with one group of these members; none when they are empty."""
    async with opened_store(server) as (store, pipe):
        groups = RedisMemberships(store)
        if members:
            await groups.create_groups([creation_of(members)])
        yield groups, store, pipe

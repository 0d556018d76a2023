"""A group on the memory stores of the rig: made and changed through the port, as the writer would."""

from collections.abc import Sequence
from typing import Any

from qim.domain.groups import (
    OPERATOR,
    Membership,
    choose_successor,
    does_need_successor,
    plan_change,
    route_group,
)
from qim.ids import GroupId, Offset, SlotId, UserId, WorkerId
from qim.memberships import (
    Created,
    GroupCreation,
    GroupPlace,
    MemberQuery,
    MembershipChange,
    PlacedUser,
    Snapshot,
)
from qim.ports import Commit, MessageKey, Pending, Reservation
from qim.records import MembershipOp, RoutingHeader, outbox_entry, parse_header
from qim.wire.bodies import SendMessage, Target, encode_body
from qim.wire.layout import Op
from tests.unit.workers.rig import ALICE, BOB, TENANT, Client, Rig, message_id, shard_of

CAROL = UserId(b"carol-0123456789")
DAVE = UserId(b"dave--0123456789")
GROUP = GroupId(b"group-0123456789")
NO_GROUP = GroupId(b"nogroup-12345678")
ROUTE = route_group(TENANT, GROUP)
PLACE = GroupPlace(ROUTE.bucket, TENANT, ROUTE.conversation)
JOIN, LEAVE, REMOVE = MembershipOp.JOIN, MembershipOp.LEAVE, MembershipOp.REMOVE
GROUP_KIND = 2


def placed(users: Sequence[UserId]) -> tuple[PlacedUser, ...]:
    return tuple(PlacedUser(shard_of(user), user) for user in users)


async def create_group(rig: Rig, members: Sequence[UserId] = (ALICE, BOB)) -> None:
    """The group `GROUP`; its first member owns it."""
    creation = GroupCreation(PLACE, GROUP, "the group", members[0], placed(members), b"d" * 32)
    assert await rig.memberships.create_groups([creation]) == [Created.CREATED]


async def plan_now(rig: Rig, op: MembershipOp, users: Sequence[UserId]) -> MembershipChange:
    """The change, planned with the members of now."""
    (head,) = await rig.memberships.load_groups([PLACE])
    (snapshot,) = await rig.memberships.load_snapshots([(PLACE, head.version)])
    members = members_of(snapshot)
    membership = Membership(head.version, head.owner, members)
    successor = None
    if does_need_successor(membership, op, users):
        (page,) = await rig.memberships.load_members([MemberQuery(PLACE, UserId(b""), len(members))])
        successor = choose_successor(page.rows, users)
    planned = plan_change(
        tenant=TENANT,
        route=ROUTE,
        op=op,
        actor=users[0] if op is LEAVE else OPERATOR,
        device=None,
        users=users,
        membership=membership,
        successor=successor,
        now_ms=rig.clock.now_ms(),
    )
    assert planned.event is not None
    key = MessageKey(*PLACE, planned.event.record.sender, planned.event.client_message_id)
    event = Reservation(
        key, planned.event.identity, planned.event.record_bytes, planned.event.record.reserved_at,
        planned.event.record.reserved_at,
    )  # fmt: skip
    actor = users[0] if op is LEAVE else None
    return MembershipChange(
        PLACE, op, membership.version, actor, placed(planned.users), planned.owner_after, event
    )


async def change(rig: Rig, op: MembershipOp, *users: UserId, finished: bool = True) -> int:
    """Changes the members behind the writer's back; the sequence of the event."""
    (result,) = await rig.memberships.change_memberships([await plan_now(rig, op, users)])
    assert result.event is not None, result
    if finished:
        await finish(rig, result.event)
    return int(result.seq)


async def finish(rig: Rig, event: Pending) -> None:
    commit = Commit(event.key, event.identity, event.seq, event.reserved_at, True, SlotId(0), Offset(0))
    await rig.commits.mark_committed([commit])


def members_of(snapshot: Snapshot) -> set[UserId]:
    return {user for part in snapshot.shards.values() for user in part}


def send_to_group(rig: Rig, writer: Any, *numbers: int, client: Client | None = None, **changes: Any) -> None:
    """SEND_MESSAGE to the group."""
    client = client or rig.alice
    group = changes.pop("group", GROUP)
    fields: dict[str, Any] = {"message_type": 1, "custom_type": "", "body": b"hello"} | changes
    for number in numbers:
        body = SendMessage(Target(GROUP_KIND, group), message_id(number), **fields)
        writer.submit(client.request(Op.SEND_MESSAGE, encode_body(body)))


async def outbox_of(rig: Rig) -> list[tuple[RoutingHeader, bytes]]:
    """Header and entry of everything in the home partition, in order."""
    home = rig.placement.home_partition(WorkerId(0))
    records = await rig.outbox.read(home, Offset(0), records_max=10_000)
    return [(parse_header(record.data), outbox_entry(record.data)) for record in records]


def last_and_head(rig: Rig) -> tuple[int, int]:
    """Last allocated sequence and visible head of the group."""
    state = rig.commit_state.conversations.get(PLACE)
    return (state.last, state.head) if state else (0, 0)

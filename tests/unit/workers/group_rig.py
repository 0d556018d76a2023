"""Groups on the stores of a rig, and the Outbox records that a writer would make of messages to them."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from blake3 import blake3

from qim.domain.groups import EVENT_TYPE, GroupRoute, route_group
from qim.domain.placement import Placement, slot_of_bucket
from qim.ids import DeviceId, GroupId, Millis, Seq, UserId
from qim.memberships import Created, GroupCreation, GroupPlace, PlacedUser
from qim.records import (
    RECORD_VERSION,
    Kind,
    MessageRecord,
    MessageType,
    RetentionClass,
    build_outbox_record,
    encode_record,
    identity_digest,
    message_id_of,
)
from tests.unit.workers.rig import ALICE, DEVICE, TENANT, Rig, message_id, shard_of


def route_of(number: int) -> GroupRoute:
    return route_group(TENANT, GroupId(number.to_bytes(16, "big")))


ROUTE = route_of(1)


def place_of(route: GroupRoute) -> GroupPlace:
    return GroupPlace(route.bucket, TENANT, route.conversation)


def many(count: int, *, first: int = 1) -> list[UserId]:
    return [UserId(b"%016d" % number) for number in range(first, first + count)]


def instance_of(placement: Placement, route: GroupRoute) -> int:
    return placement.core_instance_of(slot_of_bucket(route.bucket))


async def create_group(rig: Rig, members: Iterable[UserId], *, route: GroupRoute = ROUTE) -> None:
    """At version 1, the first member its owner."""
    placed = tuple(PlacedUser(shard_of(user), user) for user in members)
    digest = blake3(b"".join(member.user for member in placed)).digest()
    creation = GroupCreation(place_of(route), route.group, "a group", placed[0].user, placed, digest)
    store = rig.all_memberships[instance_of(rig.placement, route)].inner
    assert await store.create_groups([creation]) == [Created.CREATED]


def forget_members(rig: Rig, *, version: int = 1, route: GroupRoute = ROUTE) -> Callable[[], None]:
    """As if the store had lost the snapshot; call the answer and it is found again."""
    snapshots = rig.commit_states[instance_of(rig.placement, route)].groups[place_of(route)].snapshots
    return partial(snapshots.__setitem__, version, snapshots.pop(version))


def build_group_outbox(
    *,
    seq: int,
    version: int = 1,
    sender: UserId = ALICE,
    device: DeviceId = DEVICE,
    body: bytes = b"",
    listed: Sequence[UserId] | None = None,
    retention_class: int = RetentionClass.DEFAULT,
    route: GroupRoute = ROUTE,
) -> bytes:
    """An Outbox record of the group; with a listed audience that of an event."""
    message_type = MessageType.TEXT if listed is None else MessageType.CONTROL
    custom_type = "" if listed is None else EVENT_TYPE
    text = body or b"text %d" % seq
    identity = identity_digest(
        tenant=TENANT, conversation=route.conversation, sender=sender, client_message_id=message_id(seq),
        message_type=message_type, retention_class=retention_class, custom_type=custom_type, body=text,
    )  # fmt: skip
    record = MessageRecord(
        RECORD_VERSION, TENANT, route.conversation, Kind.GROUP, route.group, message_id_of(identity), sender,
        device, message_id(seq), message_type, custom_type, text, retention_class,
        Millis(1_700_000_000_000), version, None if listed is None else tuple(listed),
    )  # fmt: skip
    return build_outbox_record(
        bucket=route.bucket,
        seq=Seq(seq),
        record=record,
        record_bytes=encode_record(record),
        identity=identity,
    )

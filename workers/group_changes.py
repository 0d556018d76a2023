"""Changes of groups at the writer: creation, leaving, and what an operator adds and removes.

A change is planned with the members of one version and done by the store only at that version; with it the
store records a control message, the event, which then goes the way of any RECORDED message: appended to the
Outbox, marked, and only then told. A crash in between leaves what the recoverer finishes; who asks again
continues the same event, or learns that all is in effect.

    load the group and its members → plan (pure) → `change_memberships` → append and mark the event → answer

Changes of one group follow each other, because they take the lane of its bucket, so they overtake one another
only where two owners meet. What is overtaken all the same is planned anew, three times, then the client is
told MEMBERSHIP_CHANGED. Lanes are few and long-lived: a change takes several journeys to the store, and
messages must not wait for it.

Owned state: what waits, and nothing about groups. Full: RESOURCE_EXHAUSTED before any side effect. The store
is away: UNAVAILABLE where nothing was written, else DEADLINE_EXCEEDED, and a repeat settles it. A store that
contradicts itself stops the slot for sends, as one that does so for a message.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Final, NamedTuple, TypeVar

from qim.clock import Clock
from qim.domain import groups as rules
from qim.domain.fanout import shard_of
from qim.domain.placement import slot_of_bucket
from qim.domain.writer import REFUSALS, RETRY_AFTER_MS
from qim.errors import (
    ClientError,
    Conflict,
    DeadlineExceeded,
    MembershipChanged,
    PermissionDenied,
    ResourceExhausted,
    StoreBroken,
    StoreError,
    StoreRefused,
    Unavailable,
)
from qim.ids import BucketId, DeviceId, GroupId, Millis, RequestId, Seq, TenantId, UserId
from qim.limits import (
    BATCHES_IN_FLIGHT_MAX,
    GROUP_REQUESTS_WAITING_MAX,
    MEMBER_ENTRIES_PER_CALL_MAX,
    MEMBERSHIP_RETRIES_MAX,
    REQUEST_DEADLINE_MS,
)
from qim.memberships import (
    Changed,
    ChangeResult,
    Created,
    Group,
    GroupCreation,
    GroupPlace,
    MemberQuery,
    MembershipChange,
    Memberships,
    OperatorRequest,
    PlacedUser,
)
from qim.metrics import Metrics
from qim.ports import MessageKey, Pending, Reservation
from qim.records import MembershipOp
from qim.wire.bodies import CreateGroup, GroupCreated, LeaveGroup, MemberListBatch, build_message, decode_body
from qim.wire.layout import Op
from workers.commits import UNKNOWN, Commits
from workers.failpoints import Failpoints
from workers.group_versions import GroupVersions
from workers.inbox import Inbox
from workers.request import NOTHING_WRITTEN, OnFatal, Request, reply_error

_CREATE: Final = int(Op.CREATE_GROUP)
_LEAVE: Final = int(Op.LEAVE_GROUP)
CHANGING_OPS: Final = frozenset({_CREATE, _LEAVE})
"""What a client may ask for here."""
_REPEAT: Final = "an earlier change of the members is being finished"

Answer = TypeVar("Answer")


class ChangeOrder(NamedTuple):
    """What somebody wants changed in a group."""

    tenant: TenantId
    route: rules.GroupRoute
    op: MembershipOp
    actor: UserId
    """`OPERATOR`, or who leaves …"""
    device: DeviceId | None
    """… and from where."""
    users: tuple[UserId, ...]
    request: OperatorRequest | None

    @property
    def place(self) -> GroupPlace:
        return GroupPlace(self.route.bucket, self.tenant, self.route.conversation)


class _Job(NamedTuple):
    """One thing to do, and who is told when it cannot be done."""

    arrived: float
    do: Callable[[], Awaitable[None]]
    fail: Callable[[ClientError], None]


def operator_order(
    *, tenant: TenantId, group: GroupId, op: MembershipOp, users: Iterable[bytes], request_id: RequestId
) -> ChangeOrder:
    """An administrative change. Raises InvalidArgument."""
    named = rules.check_change(op, rules.OPERATOR, users)
    digest = rules.operator_request_digest(tenant=tenant, group=group, op=op, users=named)
    request = OperatorRequest(request_id, digest)
    return ChangeOrder(tenant, rules.route_group(tenant, group), op, rules.OPERATOR, None, named, request)


class GroupChanges:
    """The changes of the groups of one core instance."""

    def __init__(
        self,
        *,
        memberships: Memberships,
        commits: Commits,
        versions: GroupVersions,
        clock: Clock,
        metrics: Metrics,
        failpoints: Failpoints,
        on_fatal: OnFatal,
    ) -> None:
        self._memberships = memberships
        self._commits = commits
        self._versions = versions
        self._clock = clock
        self._metrics = metrics
        self._failpoints = failpoints
        self._on_fatal = on_fatal
        self._lanes = tuple(
            Inbox[_Job](items_max=GROUP_REQUESTS_WAITING_MAX, bytes_max=sys.maxsize)
            for _lane in range(BATCHES_IN_FLIGHT_MAX)
        )

    def __len__(self) -> int:
        return sum(map(len, self._lanes))

    async def run(self) -> None:
        """Until closed and empty."""
        async with asyncio.TaskGroup() as tasks:
            for lane in self._lanes:
                tasks.create_task(self._run_lane(lane))

    def close(self) -> None:
        """Takes nothing more; what waits is done."""
        for lane in self._lanes:
            lane.close()

    def submit(self, request: Request) -> None:
        """CREATE_GROUP or LEAVE_GROUP. Raises what the client is told."""
        body = decode_body(request.opcode, request.body)
        if isinstance(body, CreateGroup):
            planned = rules.plan_creation(
                tenant=request.tenant, creator=request.user, request_id=body.request_id16, name=body.name,
                members=body.members,
            )  # fmt: skip
            bucket, do = planned.route.bucket, partial(self._serve_creation, request, planned)
        else:
            assert isinstance(body, LeaveGroup)
            route = rules.route_group(request.tenant, GroupId(body.group))
            order = ChangeOrder(
                request.tenant, route, MembershipOp.LEAVE, request.user, request.device, (request.user,), None
            )
            bucket, do = route.bucket, partial(self._serve_leaving, request, order)
        self._offer(bucket, _Job(request.arrived, do, partial(reply_error, request)))

    async def change(self, order: ChangeOrder) -> ChangeResult:
        """What an operator ordered. Raises the ClientError that says why not."""
        told: asyncio.Future[ChangeResult] = asyncio.get_running_loop().create_future()
        job = _Job(self._clock.monotonic(), partial(self._serve_operator, order, told), partial(_fail, told))
        self._offer(order.route.bucket, job)
        return await told

    def _offer(self, bucket: BucketId, job: _Job) -> None:
        if not self._lanes[bucket % len(self._lanes)].offer(job):
            self._metrics.shed_queue += 1
            raise ResourceExhausted("too many changes are waiting", retry_after_ms=RETRY_AFTER_MS)

    async def _run_lane(self, lane: Inbox[_Job]) -> None:
        while batch := await lane.take(1):
            for job in batch:
                await self._do(job)

    async def _do(self, job: _Job) -> None:
        if job.arrived < self._clock.monotonic() - REQUEST_DEADLINE_MS / 1000:
            job.fail(Unavailable("the request has waited too long", retry_after_ms=RETRY_AFTER_MS))
            return
        try:
            await job.do()
        except ClientError as error:
            job.fail(error)
        except StoreRefused:
            job.fail(NOTHING_WRITTEN)
        except StoreError:
            job.fail(UNKNOWN)

    # --- who asked -----------------------------------------------------------------------------------

    async def _serve_creation(self, request: Request, planned: rules.PlannedCreation) -> None:
        version = await self._create(request.tenant, planned)
        told = GroupCreated(planned.route.group, planned.route.conversation, version)
        request.origin.reply(request, build_message(Op.GROUP_CREATED, request.request_id, told))

    async def _serve_leaving(self, request: Request, order: ChangeOrder) -> None:
        result = await self._change(order)
        told = MemberListBatch(order.route.group, result.version, [], b"", result.member_count)
        request.origin.reply(request, build_message(Op.MEMBER_LIST_BATCH, request.request_id, told))

    async def _serve_operator(self, order: ChangeOrder, told: "asyncio.Future[ChangeResult]") -> None:
        result = await self._change(order)
        if not told.done():
            told.set_result(result)

    # --- creation ------------------------------------------------------------------------------------

    async def _create(self, tenant: TenantId, planned: rules.PlannedCreation) -> int:
        """The version of the group that is there now."""
        route = planned.route
        place = GroupPlace(route.bucket, tenant, route.conversation)
        creation = GroupCreation(
            place, route.group, planned.name, planned.owner, _placed(tenant, planned.members), planned.digest
        )
        self._check_slot(place)
        (outcome,) = await self._guarded(place, self._memberships.create_groups([creation]))
        match outcome:
            case Created.CREATED:
                self._versions.note(place.conversation, rules.FIRST_VERSION)
                return rules.FIRST_VERSION
            case Created.EXISTS:
                return (await self._load_group(place)).version
            case Created.CONFLICT:
                raise Conflict("request_id was used for another group")
        raise self._refusal(place, outcome.value)

    # --- change --------------------------------------------------------------------------------------

    async def _change(self, order: ChangeOrder) -> ChangeResult:
        place = order.place
        self._check_slot(place)
        for _attempt in range(MEMBERSHIP_RETRIES_MAX + 1):
            planned = await self._plan(order)
            (result,) = await self._guarded(place, self._memberships.change_memberships([planned]))
            match result.outcome:
                case Changed.NEW:
                    self._metrics.writer_membership_events += 1
                    self._versions.note(place.conversation, result.version)
                    self._failpoints.hit("writer.changed")
                    await self._finish(result.event)
                    return result
                case Changed.DONE:
                    return result
                case Changed.UNFINISHED:
                    await self._finish(result.event)
                case Changed.MEMBERSHIP_CHANGED:
                    self._metrics.writer_membership_retries += 1
                case Changed.WAIT:
                    raise MembershipChanged(_REPEAT, retry_after_ms=RETRY_AFTER_MS)
                case Changed.CONFLICT:
                    raise Conflict("the id of this change was used for something else")
                case _:
                    raise self._refusal(place, result.outcome.value)
        raise self._refusal(place, Changed.MEMBERSHIP_CHANGED.value)

    async def _plan(self, order: ChangeOrder) -> MembershipChange:
        """The change of the members of now."""
        place = order.place
        group = await self._load_group(place)
        (snapshot,) = await self._guarded(place, self._memberships.load_snapshots([(place, group.version)]))
        members = {user for part in snapshot.shards.values() for user in part}
        membership = rules.Membership(group.version, group.owner, members)
        successor = None
        if rules.does_need_successor(membership, order.op, order.users):
            successor = rules.choose_successor(await self._load_rows(place, group.version), order.users)
        planned = rules.plan_change(
            tenant=order.tenant, route=order.route, op=order.op, actor=order.actor, device=order.device,
            users=order.users, membership=membership, successor=successor, now_ms=self._clock.now_ms(),
        )  # fmt: skip
        return MembershipChange(
            place, order.op, group.version, None if order.actor == rules.OPERATOR else order.actor,
            _placed(order.tenant, planned.users), planned.owner_after, _reservation(place, planned.event),
            order.request,
        )  # fmt: skip

    async def _finish(self, event: Pending | None) -> None:
        """Brings a recorded event to COMMITTED; raises when it is not known to lie in the Outbox."""
        assert event is not None, "the store names the event that is unfinished"
        sending = self._commits.adopt(event)
        if sending is None:
            raise MembershipChanged(_REPEAT, retry_after_ms=RETRY_AFTER_MS)
        await self._commits.settle(await self._commits.publish([sending]))
        if not sending.durable:
            raise DeadlineExceeded(UNKNOWN.text, retry_after_ms=RETRY_AFTER_MS)

    # --- reads ---------------------------------------------------------------------------------------

    async def _load_group(self, place: GroupPlace) -> Group:
        (group,) = await self._guarded(place, self._memberships.load_groups([place]))
        if group is None:
            raise PermissionDenied(REFUSALS["not_member"].text)
        return group

    async def _load_rows(self, place: GroupPlace, version: int) -> list[tuple[UserId, Seq]]:
        """Who is in the group since when: asked only where its owner leaves."""
        rows: list[tuple[UserId, Seq]] = []
        after, more = UserId(b""), True
        while more:
            query = MemberQuery(place, after, MEMBER_ENTRIES_PER_CALL_MAX)
            (page,) = await self._guarded(place, self._memberships.load_members([query]))
            if page is None or page.group.version != version:
                raise MembershipChanged(_REPEAT, retry_after_ms=RETRY_AFTER_MS)
            rows += page.rows
            more = page.more
            after = rows[-1][0] if rows else after
        return rows

    # --- small things --------------------------------------------------------------------------------

    def _check_slot(self, place: GroupPlace) -> None:
        stops = self._commits.stops
        if stops.outbox_broken or slot_of_bucket(place.bucket) in stops.slots:
            raise Unavailable(NOTHING_WRITTEN.text, retry_after_ms=RETRY_AFTER_MS)

    async def _guarded(self, place: GroupPlace, call: Awaitable[Answer]) -> Answer:
        try:
            return await call
        except StoreBroken as error:
            self._commits.stops.stop_slot(slot_of_bucket(place.bucket), error)
            raise

    def _refusal(self, place: GroupPlace, outcome: str) -> ClientError:
        if outcome == Changed.STALE_OWNER.value:
            self._on_fatal(slot_of_bucket(place.bucket))
        known = REFUSALS[outcome]
        return type(known)(known.text, retry_after_ms=known.retry_after_ms)


def _placed(tenant: TenantId, users: Iterable[UserId]) -> tuple[PlacedUser, ...]:
    return tuple(PlacedUser(shard_of(tenant, user), user) for user in users)


def _reservation(place: GroupPlace, event: rules.PlannedEvent | None) -> Reservation | None:
    if event is None:
        return None
    key = MessageKey(*place, event.record.sender, event.client_message_id)
    return Reservation(key, event.identity, event.record_bytes, event.record.reserved_at, Millis(0))


def _fail(told: "asyncio.Future[ChangeResult]", error: ClientError) -> None:
    if not told.done():
        told.set_exception(error)

"""What members read of their group: history by interval, the member list, and how far they have read.

Who sees what is one interval per user, and it is read for every request: nothing about it is remembered here.
What comes between that and the page could show too much, so the interval is read again **behind** the page,
on the same connection: the page stands when both are the same, otherwise it is read anew for the newer one,
a few times, then the client is told to repeat. A read mark needs no second look; it shows nothing.

    interval → page and interval again → cut to what is visible → answer

Who was never in the group is told the same bytes as for a group that does not exist. Who has left reads up to
the event of leaving, and gets no member list.

A lane of its own takes what the passes hand over, several requests at a time, so that messages wait for none
of it. Owned state: what waits. Full: RESOURCE_EXHAUSTED. Nothing is written but read marks, which only rise:
whatever goes wrong, the client is told UNAVAILABLE and asks again.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from qim.clock import Clock
from qim.domain import groups as rules
from qim.domain.placement import slot_of_bucket
from qim.domain.writer import REFUSALS, RETRY_AFTER_MS, plan_history, route_group
from qim.errors import (
    ClientError,
    InvalidArgument,
    MembershipChanged,
    PermissionDenied,
    ResourceExhausted,
    StoreError,
    Unavailable,
)
from qim.ids import ID_BYTES, SEQ_MAX, GroupId, Seq, TenantId, UserId
from qim.limits import (
    BATCH_BYTES_MAX,
    GROUP_READS_AT_ONCE_MAX,
    GROUP_REQUESTS_WAITING_MAX,
    MEMBER_READS_MAX,
    REQUEST_DEADLINE_MS,
)
from qim.memberships import GroupPlace, Interval, MemberPage, MemberQuery, Memberships, MemberState
from qim.metrics import Metrics
from qim.ports import CommitStore, HistoryPage, HistoryQuery, ReadMark
from qim.wire.bodies import (
    MarkRead,
    MarkReadAck,
    Member,
    MemberListBatch,
    PullHistory,
    PullMembers,
    build_history_batch,
    build_message,
    clamp_page,
    decode_body,
)
from qim.wire.layout import Op
from workers.inbox import Inbox
from workers.request import NOTHING_WRITTEN, OnFatal, Request, reply_error

MEMBERS_OP: Final = int(Op.PULL_MEMBERS)
ROLE_MEMBER: Final = 0
ROLE_OWNER: Final = 1

Page = TypeVar("Page")


class GroupReads:
    """The reads of the groups of one core instance."""

    def __init__(
        self,
        *,
        memberships: Memberships,
        store: CommitStore,
        clock: Clock,
        metrics: Metrics,
        on_fatal: OnFatal,
    ) -> None:
        self._memberships = memberships
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._on_fatal = on_fatal
        self._inbox: Inbox[Request] = Inbox(items_max=GROUP_REQUESTS_WAITING_MAX, bytes_max=sys.maxsize)
        self._serving = {
            int(Op.PULL_HISTORY): self._serve_history,
            int(Op.MARK_READ): self._serve_mark,
            MEMBERS_OP: self._serve_members,
        }

    def __len__(self) -> int:
        return len(self._inbox)

    def submit(self, request: Request) -> None:
        """Raises what the client is told when there is no room."""
        if not self._inbox.offer(request):
            self._metrics.shed_queue += 1
            raise ResourceExhausted("too many reads are waiting", retry_after_ms=RETRY_AFTER_MS)

    async def run(self) -> None:
        """Until closed and empty."""
        while batch := await self._inbox.take(GROUP_READS_AT_ONCE_MAX):
            await asyncio.gather(*map(self._serve, batch))

    def close(self) -> None:
        """Takes nothing more; what waits is answered."""
        self._inbox.close()

    async def _serve(self, request: Request) -> None:
        try:
            if request.arrived < self._clock.monotonic() - REQUEST_DEADLINE_MS / 1000:
                raise Unavailable("the request has waited too long", retry_after_ms=RETRY_AFTER_MS)
            request.origin.reply(request, await self._serving[request.opcode](request))
        except ClientError as error:
            reply_error(request, error)
        except StoreError:
            reply_error(request, NOTHING_WRITTEN)

    # --- what is asked -------------------------------------------------------------------------------

    async def _serve_history(self, request: Request) -> bytes:
        body: PullHistory = decode_body(request.opcode, request.body)
        route = plan_history(
            tenant=request.tenant, user=request.user, kind=body.target.kind, target=body.target.id,
            before_seq=body.before_seq, after_seq=body.after_seq,
        )  # fmt: skip
        place = GroupPlace(route.bucket, request.tenant, route.conversation)

        def read(interval: Interval) -> Awaitable[list[HistoryPage]]:
            before, after = rules.clip_page(
                before_seq=body.before_seq, after_seq=body.after_seq,
                joined_at=interval.joined_at, left_at=interval.left_at,
            )  # fmt: skip
            query = HistoryQuery(
                request.tenant, route.conversation, route.bucket, before, after, clamp_page(body.limit),
                BATCH_BYTES_MAX,
            )  # fmt: skip
            return self._store.read_history([query])

        page, interval = await self._read_visible(place, request.user, read)
        records, more = rules.cut_page(
            page.records, page.more, joined_at=interval.joined_at, upwards=body.after_seq > 0
        )
        return build_history_batch(
            request.request_id,
            conversation_id=route.conversation,
            records=records,
            earliest_available_seq=rules.earliest_visible(
                page.earliest_available_seq, joined_at=interval.joined_at
            ),
            head_seq=rules.upper_visible(page.head_seq, left_at=interval.left_at),
            more=more,
        )

    async def _serve_members(self, request: Request) -> bytes:
        body: PullMembers = decode_body(request.opcode, request.body)
        if len(body.after_user) not in {0, ID_BYTES}:
            raise InvalidArgument("after_user is a user, or empty")
        place = _place_of(request.tenant, GroupId(body.group))

        def read(interval: Interval) -> Awaitable[list[MemberPage | None]]:
            if interval.state is not MemberState.MEMBER:
                raise PermissionDenied(REFUSALS["not_member"].text)
            query = MemberQuery(place, UserId(body.after_user), clamp_page(body.limit))
            return self._memberships.load_members([query])

        page, _interval = await self._read_visible(place, request.user, read)
        if page is None:
            raise PermissionDenied(REFUSALS["not_member"].text)
        members = [
            Member(row.user, row.joined_at, ROLE_OWNER if row.user == page.group.owner else ROLE_MEMBER)
            for row in page.rows
        ]
        after = members[-1].user if page.more and members else b""
        told = MemberListBatch(body.group, page.group.version, members, after, page.group.member_count)
        return build_message(Op.MEMBER_LIST_BATCH, request.request_id, told)

    async def _serve_mark(self, request: Request) -> bytes:
        body: MarkRead = decode_body(request.opcode, request.body)
        place = _place_of(request.tenant, GroupId(body.target.id))
        interval = await self._interval(place, request.user)
        mark = ReadMark(
            request.tenant, place.conversation, place.bucket, request.user,
            rules.mark_within(Seq(min(body.read_seq, SEQ_MAX)), joined_at=interval.joined_at),
            Seq(interval.left_at - 1) if interval.left_at else None,
        )  # fmt: skip
        (result,) = await self._store.mark_read([mark])
        if result.stale_owner:
            self._on_fatal(slot_of_bucket(place.bucket))
            raise Unavailable(NOTHING_WRITTEN.text, retry_after_ms=RETRY_AFTER_MS)
        told = MarkReadAck(place.conversation, result.read_seq, result.unread)
        return build_message(Op.MARK_READ_ACK, request.request_id, told)

    async def list_members(self, query: MemberQuery) -> MemberPage:
        """Whoever asks: for an operator."""
        (page,) = await self._memberships.load_members([query])
        if page is None:
            raise PermissionDenied(REFUSALS["not_member"].text)
        return page

    # --- who may see it ------------------------------------------------------------------------------

    async def _read_visible(
        self, place: GroupPlace, user: UserId, read: Callable[[Interval], Awaitable[list[Page]]]
    ) -> tuple[Page, Interval]:
        """A page, and the interval that held before and behind it."""
        interval = await self._interval(place, user)
        for _attempt in range(MEMBER_READS_MAX):
            (page,) = await read(interval)
            behind = await self._interval(place, user)
            if behind == interval:
                return page, interval
            interval = behind
        raise MembershipChanged(REFUSALS["membership_changed"].text, retry_after_ms=RETRY_AFTER_MS)

    async def _interval(self, place: GroupPlace, user: UserId) -> Interval:
        (interval,) = await self._memberships.load_intervals([(place, user)])
        if interval is None:
            raise PermissionDenied(REFUSALS["not_member"].text)
        return interval


def _place_of(tenant: TenantId, group: GroupId) -> GroupPlace:
    route = route_group(tenant, group)
    return GroupPlace(route.bucket, tenant, route.conversation)

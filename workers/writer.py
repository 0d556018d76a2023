"""The writer: commits what clients send, answers history and read marks, finishes what was left half-done.

A pass takes what has arrived, up to 512 messages: plan (pure) → commit in one step → acknowledge, or, where
the Outbox lies on another server: plan → reserve → append to its home partition → mark committed →
acknowledge. Each step is one await for the whole pass; `workers/commits.py` holds the steps. One window per
core instance: up to four passes are in flight on it, taken by long-lived lanes from one inbox, so a slow
instance does not stop the others and one round trip hides another. A lane issues its first calls in the step
of the loop in which it took its requests: sequences follow arrival. (Not in a conversation that goes the long
way because of what a crash left RECORDED in it; there they follow the answers.)

A pass of one costs almost as much as a pass of ten, so small passes keep a distance: while one is under way,
and until `WRITER_PASS_INTERVAL_MS` after its begin, the next one waits for a full run of a script. A request
that comes after a silence waits for nothing; one timer per pass, none per request.

Page reads go out before the reservations of their pass and behind every mark called before, on the same
connection: who was acknowledged reads what was committed.

Full, more than 4,096 waiting or a store above 80 % of its memory: RESOURCE_EXHAUSTED, before any side effect.
A request that has waited 8 s is refused untouched. A store that is away: UNAVAILABLE when nothing was
written, otherwise DEADLINE_EXCEEDED. What is RECORDED by then, the recoverer finishes with the coordinates it
has; it runs at the claim and every second.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, TypeVar

from structlog import get_logger

from qim.clock import Clock
from qim.domain import writer as rules
from qim.domain.groups import GroupRoute
from qim.domain.placement import Placement, buckets_of_slot, slot_of_bucket
from qim.errors import (
    ClientError,
    ResourceExhausted,
    StoreBroken,
    StoreError,
    StoreRefused,
    StoreUnknown,
    Unavailable,
    Unsupported,
)
from qim.ids import SEQ_MAX, BucketId, ConversationId, Millis, Seq, SlotId, TenantId, UserId, WorkerId
from qim.limits import (
    BATCH_BYTES_MAX,
    BATCHES_IN_FLIGHT_MAX,
    HISTORY_QUERIES_PER_CALL_MAX,
    RECOVER_AGE_MS,
    RECOVER_INTERVAL_MS,
    REQUEST_DEADLINE_MS,
    SCRIPT_RUN_ITEMS_MAX,
    STORE_MEMORY_RATIO_MAX,
    WRITER_BATCH_BYTES_MAX,
    WRITER_BATCH_MESSAGES_MAX,
    WRITER_PASS_INTERVAL_MS,
    WRITER_WAITING_MESSAGES_MAX,
)
from qim.memberships import ChangeResult, GroupPlace, MemberPage, MemberQuery, Memberships
from qim.metrics import Metrics
from qim.ports import (
    CommitLog,
    CommitStore,
    HistoryPage,
    HistoryQuery,
    OneStepCommits,
    ReadMark,
    ReadMarkResult,
)
from qim.records import Kind
from qim.wire.bodies import (
    MarkRead,
    MarkReadAck,
    PullHistory,
    build_history_batch,
    build_message,
    clamp_page,
    decode_body,
    decode_send,
)
from qim.wire.layout import Op
from workers.commits import Commits
from workers.company import Company
from workers.failpoints import Failpoints
from workers.group_changes import CHANGING_OPS, ChangeOrder, GroupChanges
from workers.group_reads import MEMBERS_OP, GroupReads
from workers.group_versions import GroupVersions
from workers.inbox import Inbox
from workers.recoverer import Recoverer
from workers.request import NOTHING_WRITTEN, OnFatal, Request, reply_error
from workers.subject import conversation_of

log = get_logger()

_SEND: Final = int(Op.SEND_MESSAGE)
_HISTORY: Final = int(Op.PULL_HISTORY)
_MARK_READ: Final = int(Op.MARK_READ)
_READING_OPS: Final = frozenset({_HISTORY, _MARK_READ})
_GROUP: Final = int(Kind.GROUP)
_OF_GROUPS: Final = CHANGING_OPS | _READING_OPS | {MEMBERS_OP}
# Answers that never change. They are sent, never raised: an exception raised again keeps its old traces.
_FULL: Final = ResourceExhausted("too many messages are waiting", retry_after_ms=rules.RETRY_AFTER_MS)
_STORE_FULL: Final = ResourceExhausted("the store is nearly full", retry_after_ms=rules.RETRY_AFTER_MS)
_DRAINING: Final = Unavailable("the server is going away", retry_after_ms=rules.RETRY_AFTER_MS)
_TOO_LATE: Final = Unavailable("the request has waited too long", retry_after_ms=rules.RETRY_AFTER_MS)
_UNSUPPORTED: Final = Unsupported("not offered by this server")

Query = TypeVar("Query")
Answer = TypeVar("Answer")


class Writer:
    """Owns the commit buckets of one worker."""

    def __init__(
        self,
        *,
        worker: WorkerId,
        placement: Placement,
        stores: Sequence[CommitStore],
        memberships: Sequence[Memberships] = (),
        outbox: CommitLog,
        one_step: Mapping[int, OneStepCommits] = MappingProxyType({}),
        clock: Clock,
        metrics: Metrics,
        failpoints: Failpoints,
        on_fatal: OnFatal,
        company: Company | None = None,
        lanes: int = BATCHES_IN_FLIGHT_MAX,
    ) -> None:
        self._placement = placement
        company = company or Company(clock)
        self._clock = clock
        self._metrics = metrics
        self._draining = False
        slots = placement.slots_of(worker)
        self._instances: dict[int, _Instance] = {}
        for instance in sorted({placement.core_instance_of(SlotId(slot)) for slot in slots}):
            mine = [SlotId(slot) for slot in slots if placement.core_instance_of(SlotId(slot)) == instance]
            versions = GroupVersions(memberships[instance]) if memberships else None
            commits = Commits(
                store=stores[instance],
                versions=versions,
                one_step=one_step.get(instance),
                outbox=outbox,
                home=placement.home_partition(worker),
                clock=clock,
                metrics=metrics,
                failpoints=failpoints,
                on_fatal=on_fatal,
            )
            common: dict[str, Any] = {"clock": clock, "metrics": metrics, "on_fatal": on_fatal}
            groups = None
            if versions is not None:
                members: dict[str, Any] = {"memberships": memberships[instance], **common}
                groups = _Groups(
                    GroupChanges(commits=commits, versions=versions, failpoints=failpoints, **members),
                    GroupReads(store=stores[instance], **members),
                )
            self._instances[instance] = _Instance(
                store=stores[instance],
                versions=versions,
                groups=groups,
                commits=commits,
                recoverer=Recoverer(
                    commits=commits,
                    store=stores[instance],
                    buckets=[BucketId(bucket) for slot in mine for bucket in buckets_of_slot(slot)],
                    metrics=metrics,
                ),
                failpoints=failpoints,
                company=company,
                lanes=lanes,
                **common,
            )
        self._only = next(iter(self._instances.values())) if len(self._instances) == 1 else None

    @property
    def stopped(self) -> dict[str, str]:
        """What does not go on by itself and why, for the operator's tools."""
        found: dict[str, str] = {}
        for instance in self._instances.values():
            found |= instance.commits.stops.describe()
        return found

    @property
    def waiting(self) -> int:
        """Requests not yet taken by a pass."""
        return sum(instance.waiting for instance in self._instances.values())

    def submit(self, request: Request) -> None:
        """Called by the router, in a callback: notes the request, or refuses it at once."""
        if self._draining:
            reply_error(request, _DRAINING)
            return
        instance = self._only
        if instance is None:
            try:
                instance = self._instance_of(request)
            except ClientError as error:
                reply_error(request, error)
                return
        if instance.is_full and (request.opcode == _SEND or request.opcode in CHANGING_OPS):
            self._metrics.shed_queue += 1
            reply_error(request, _STORE_FULL)
        elif not instance.inbox.offer(request, size=len(request.body)):
            self._metrics.shed_queue += 1
            reply_error(request, _FULL)

    def _instance_of(self, request: Request) -> "_Instance":
        # With several core instances the target decides whose window a request uses, so it is read here, once
        # more than the pass does; the ordinary case is one instance per worker.
        return self._instance_at(conversation_of(request).bucket)

    def _instance_at(self, bucket: BucketId) -> "_Instance":
        instance = self._instances.get(self._placement.core_instance_of(slot_of_bucket(bucket)))
        if instance is None:
            raise Unavailable(NOTHING_WRITTEN.text, retry_after_ms=rules.RETRY_AFTER_MS)
        return instance

    async def change_members(self, order: ChangeOrder) -> ChangeResult:
        """An operator's word, for a group of this worker. Raises the ClientError that says why not."""
        if self._draining:
            raise Unavailable(_DRAINING.text, retry_after_ms=rules.RETRY_AFTER_MS)
        instance = self._instance_at(order.route.bucket)
        if instance.groups is None:
            raise Unsupported(_UNSUPPORTED.text)
        if instance.is_full:
            raise ResourceExhausted(_STORE_FULL.text, retry_after_ms=rules.RETRY_AFTER_MS)
        return await instance.groups.changes.change(order)

    async def list_members(
        self, tenant: TenantId, route: GroupRoute, *, after: UserId, entries_max: int
    ) -> MemberPage:
        """For an operator, who need not be a member. Raises what says why not."""
        instance = self._instance_at(route.bucket)
        if instance.groups is None:
            raise Unsupported(_UNSUPPORTED.text)
        place = GroupPlace(route.bucket, tenant, route.conversation)
        return await instance.groups.reads.list_members(MemberQuery(place, after, entries_max))

    async def run(self) -> None:
        """Until drained. Raises what no pass can handle; the worker then ends."""
        async with asyncio.TaskGroup() as tasks:
            for instance in self._instances.values():
                for _lane in range(instance.lanes):
                    tasks.create_task(instance.run_lane())
                tasks.create_task(instance.run_groups())
            recoverer = tasks.create_task(self._run_recoverer())
            for instance in self._instances.values():
                await instance.ended.wait()
            recoverer.cancel()

    async def drain(self, deadline: float) -> None:
        """Finishes what was accepted, until the deadline (monotonic seconds); then `run` returns."""
        self._draining = True
        for instance in self._instances.values():
            instance.inbox.close()
        for instance in self._instances.values():
            try:
                async with asyncio.timeout(max(0.0, deadline - self._clock.monotonic())):
                    await instance.ended.wait()
            except TimeoutError:
                log.warning("drain_unfinished", role="writer", in_flight=len(instance.commits.in_flight))

    async def recover_once(self, *, older_than_ms: int = RECOVER_AGE_MS) -> int:
        """One pass of the recoverer over all own buckets; with 0 at the claim, when nothing is in flight."""
        recovered = 0
        for instance in self._instances.values():
            recovered += await instance.recoverer.recover(older_than_ms=older_than_ms)
        return recovered

    def retry(self, slot: SlotId) -> bool:
        """An operator has mended the slot's keys; False when nothing of it was given up here."""
        return any(instance.commits.stops.retry(slot) for instance in self._instances.values())

    async def _run_recoverer(self) -> None:
        while True:
            await asyncio.sleep(RECOVER_INTERVAL_MS / 1000)
            for instance in self._instances.values():
                instance.commits.expire()
                await instance.measure()
            self._metrics.writer_queue = self.waiting
            await self.recover_once()


class _Groups(NamedTuple):
    """What of groups does not travel in passes."""

    changes: GroupChanges
    reads: GroupReads


class _Instance:
    """The window on one core instance: its inbox and the passes in flight."""

    def __init__(
        self,
        *,
        store: CommitStore,
        versions: GroupVersions | None,
        groups: "_Groups | None",
        commits: Commits,
        recoverer: Recoverer,
        clock: Clock,
        metrics: Metrics,
        failpoints: Failpoints,
        on_fatal: OnFatal,
        company: Company,
        lanes: int,
    ) -> None:
        self.inbox: Inbox[Request] = Inbox(
            items_max=WRITER_WAITING_MESSAGES_MAX,
            bytes_max=WRITER_BATCH_BYTES_MAX * (WRITER_WAITING_MESSAGES_MAX // WRITER_BATCH_MESSAGES_MAX),
        )
        self.groups = groups
        self.commits = commits
        self.recoverer = recoverer
        self.lanes = lanes
        self.ended = asyncio.Event()
        self.is_full = False
        """New messages are refused; everything else goes on, so that the store can empty itself."""
        self._lanes_alive = lanes
        self._store = store
        self._versions = None if versions is None else versions.known
        self._clock = clock
        self._metrics = metrics
        self._failpoints = failpoints
        self._on_fatal = on_fatal
        self._company = company
        self._under_way = 0
        """Passes that have taken requests and not yet answered them."""

    @property
    def waiting(self) -> int:
        """Requests not yet taken."""
        return len(self.inbox) + (sum(len(role) for role in self.groups) if self.groups else 0)

    async def measure(self) -> None:
        """Looks how full the store is; one that does not answer is judged by its own refusals."""
        try:
            self.is_full = await self._store.memory_used_ratio() >= STORE_MEMORY_RATIO_MAX
        except StoreError:
            self.is_full = False

    async def run_lane(self) -> None:
        """Pass after pass until the inbox is closed and empty."""
        while batch := await self.inbox.take(WRITER_BATCH_MESSAGES_MAX, WRITER_BATCH_BYTES_MAX):
            await self._pass(batch)
        self._lanes_alive -= 1
        if not self._lanes_alive:
            if self.groups is None:
                self.ended.set()
            else:
                self.groups.changes.close()
                self.groups.reads.close()

    async def run_groups(self) -> None:
        """What is done for groups beside the passes, which hand it over; it ends behind the last of them."""
        if self.groups is not None:
            await asyncio.gather(self.groups.changes.run(), self.groups.reads.run())
            self.ended.set()

    async def _pass(self, batch: list[Request]) -> None:
        self._under_way += 1
        self.inbox.expect(SCRIPT_RUN_ITEMS_MAX)
        started = self._clock.monotonic()
        now_ms = self._clock.now_ms()
        oldest = started - REQUEST_DEADLINE_MS / 1000
        sends = []
        histories = []
        marks = []
        for request in batch:
            if request.arrived < oldest:
                reply_error(request, _TOO_LATE)
                continue
            try:
                if request.opcode == _SEND:
                    sends.append((request, _plan_send(request, now_ms, self._versions)))
                elif request.opcode in _READING_OPS:
                    body = decode_body(request.opcode, request.body)
                    if body.target.kind == _GROUP:
                        self._hand_over(request)
                    elif request.opcode == _HISTORY:
                        histories.append((request, _plan_history(request, body)))
                    else:
                        marks.append((request, _plan_mark(request, body)))
                else:
                    self._hand_over(request)
            except ClientError as error:
                reply_error(request, error)
        self._failpoints.hit("writer.taken")
        self._company.depart()
        reads = _call_in_runs(histories, self._store.read_history, HISTORY_QUERIES_PER_CALL_MAX)
        raised = _call_in_runs(marks, self._store.mark_read, SCRIPT_RUN_ITEMS_MAX)
        reserving = self.commits.begin(sends)
        if histories or marks:
            await _answer(reads, _reply_history)
            await _answer(raised, self._reply_mark)
        durable = await self.commits.finish(reserving)
        self._under_way -= 1
        if not self._under_way:
            self._open_at(started + WRITER_PASS_INTERVAL_MS / 1000)
        await self.commits.settle(durable)
        self._metrics.writer_batches += 1
        self._metrics.writer_batch_messages += len(sends)
        self._metrics.writer_pass.observe(self._clock.monotonic() - started)

    def _hand_over(self, request: Request) -> None:
        """To those who serve groups; raises what the client is told."""
        if self.groups is None or request.opcode not in _OF_GROUPS:
            raise Unsupported(_UNSUPPORTED.text)
        role = self.groups.changes if request.opcode in CHANGING_OPS else self.groups.reads
        role.submit(request)

    def _reply_mark(self, request: Request, mark: ReadMark, result: ReadMarkResult) -> None:
        if result.stale_owner:
            self._on_fatal(slot_of_bucket(mark.bucket))
            reply_error(request, NOTHING_WRITTEN)
            return
        ack = MarkReadAck(mark.conversation, result.read_seq, result.unread)
        request.origin.reply(request, build_message(Op.MARK_READ_ACK, request.request_id, ack))

    def _open_at(self, due: float) -> None:
        """Lets the next pass begin with whatever is there, from that moment (monotonic seconds) on."""
        wait = due - self._clock.monotonic()
        if wait > 0:
            asyncio.get_running_loop().call_later(wait, self._open)
        else:
            self._open()

    def _open(self) -> None:
        if not self._under_way:
            self.inbox.expect(1)


class _Asked(NamedTuple, Generic[Query, Answer]):
    """Requests whose answers are on the way, with what was asked."""

    asked: list[tuple[Request, Query]]
    call: Awaitable[list[Answer]]
    ask: Callable[[Sequence[Query]], Awaitable[list[Answer]]]


def _call_in_runs(
    asked: list[tuple[Request, Query]],
    method: Callable[[Sequence[Query]], Awaitable[list[Answer]]],
    items_max: int,
) -> list[_Asked[Query, Answer]]:
    if not asked:
        return []
    runs = [asked[start : start + items_max] for start in range(0, len(asked), items_max)]
    return [_Asked(run, method([query for _request, query in run]), method) for run in runs]


async def _answer(
    parts: list[_Asked[Query, Answer]], reply: Callable[[Request, Query, Answer], None]
) -> None:
    """Reads change nothing and marks only rise, so whatever went wrong, the client is told to ask again."""
    for part in parts:
        try:
            answers = await part.call
        except StoreBroken:
            # One broken conversation fails the call of all; asked one by one, only that one is refused.
            if len(part.asked) > 1:
                alone = [_Asked([one], part.ask([one[1]]), part.ask) for one in part.asked]
                await _answer(alone, reply)
            else:
                reply_error(part.asked[0][0], NOTHING_WRITTEN)
        except (StoreUnknown, StoreRefused):
            for request, _query in part.asked:
                reply_error(request, NOTHING_WRITTEN)
        else:
            for (request, query), answer in zip(part.asked, answers, strict=True):
                reply(request, query, answer)


def _plan_send(
    request: Request, now_ms: Millis, versions: Mapping[ConversationId, int] | None
) -> rules.PlannedSend:
    send = decode_send(request.body)
    return rules.plan_send(
        tenant=request.tenant,
        sender=request.user,
        device=request.device,
        target_kind=send.target.kind,
        target=send.target.id,
        client_message_id=send.client_message_id,
        message_type=send.message_type,
        custom_type=send.custom_type,
        body=send.body,
        retention_class=send.retention_class,
        now_ms=now_ms,
        versions=versions,
    )


def _plan_history(request: Request, body: PullHistory) -> HistoryQuery:
    route = rules.plan_history(
        tenant=request.tenant,
        user=request.user,
        kind=body.target.kind,
        target=body.target.id,
        before_seq=body.before_seq,
        after_seq=body.after_seq,
    )
    return HistoryQuery(
        request.tenant, route.conversation, route.bucket, body.before_seq, body.after_seq,
        clamp_page(body.limit), BATCH_BYTES_MAX,
    )  # fmt: skip


def _reply_history(request: Request, query: HistoryQuery, page: HistoryPage) -> None:
    frame = build_history_batch(
        request.request_id,
        conversation_id=query.conversation,
        records=page.records,
        earliest_available_seq=page.earliest_available_seq,
        head_seq=page.head_seq,
        more=page.more,
    )
    request.origin.reply(request, frame)


def _plan_mark(request: Request, body: MarkRead) -> ReadMark:
    route = rules.route_target(
        tenant=request.tenant, user=request.user, kind=body.target.kind, target=body.target.id
    )
    return ReadMark(
        request.tenant, route.conversation, route.bucket, request.user, Seq(min(body.read_seq, SEQ_MAX))
    )

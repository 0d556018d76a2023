"""Stores and logs that survive, clients that note their answers, and roles that can be killed.

`Rig` keeps one memory instance of everything. `roles()` builds a writer, a fan-out and a mailbox on it;
dropping them and building new ones is a kill and a restart: what they held in memory is gone, what they wrote
stays. `Faulty` wraps a store or a log: it fails chosen calls, before or after they took effect, or holds
their answers back.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, NamedTuple

from qim.adapters.commitlog_memory import MemoryCommitLog
from qim.adapters.commits_memory import CommitState, MemoryCommitStore
from qim.adapters.commits_one_step_memory import MemoryOneStepCommits
from qim.adapters.mailbox_memory import MailboxState, MemoryMailboxStore
from qim.adapters.membership_memory import MemoryMemberships
from qim.clock import ManualClock
from qim.domain.fanout import plan_dispatches
from qim.domain.fanout import shard_of as shard_of_tenant
from qim.domain.placement import Placement, bucket_of_conversation, direct_conversation, slot_of_bucket
from qim.domain.presence import Session
from qim.domain.writer import plan_send
from qim.errors import StoreError
from qim.ids import (
    BootId,
    ClientMessageId,
    DeviceId,
    MailboxSeq,
    Millis,
    Offset,
    Seq,
    SessionId,
    SlotId,
    TenantId,
    UserId,
    WorkerId,
)
from qim.limits import SLOTS
from qim.metrics import Metrics
from qim.ports import MailboxPageQuery, SlotClaim, Watermarks
from qim.records import build_outbox_record, decode_entry
from qim.wire.bodies import Error, SendAck, SendMessage, Target, decode_body, encode_body
from qim.wire.layout import HEADER, Op
from tests.waiting import happens
from workers.failpoints import Action, Failpoints, FailpointStruck
from workers.fanout import Fanout
from workers.mailbox import Mailbox
from workers.request import Request
from workers.writer import Writer

TENANT = TenantId(7)
ALICE = UserId(b"alice-0123456789")
BOB = UserId(b"bob-0123456789ab")
DEVICE = DeviceId(b"device-012345678")
SESSION = SessionId(b"s" * 16)
ALL_SLOTS = tuple(SlotId(slot) for slot in range(SLOTS))
CONVERSATION = direct_conversation(TENANT, ALICE, BOB)
BUCKET = bucket_of_conversation(TENANT, CONVERSATION)


def shard_of(user: UserId) -> SlotId:
    return shard_of_tenant(TENANT, user)


def message_id(number: int) -> ClientMessageId:
    return ClientMessageId(number.to_bytes(16, "big"))


def build_send(number: int, *, body: bytes = b"", target: UserId = BOB, **changes: Any) -> bytes:
    fields: dict[str, Any] = {"message_type": 1, "custom_type": "", "retention_class": 0} | changes
    text = body or f"text {number}".encode()
    return encode_body(SendMessage(Target(1, target), message_id(number), body=text, **fields))


def build_outbox(
    *, seq: int, sender: UserId = ALICE, target: UserId = BOB, retention_class: int = 0
) -> bytes:
    """An Outbox record as the writer builds it."""
    planned = plan_send(
        tenant=TENANT, sender=sender, device=DEVICE, target_kind=1, target=target,
        client_message_id=message_id(seq), message_type=1, custom_type="", body=f"text {seq}".encode(),
        retention_class=retention_class, now_ms=Millis(1_700_000_000_000),
    )  # fmt: skip
    return build_outbox_record(
        bucket=planned.route.bucket, seq=Seq(seq), record=planned.record, record_bytes=planned.record_bytes,
        identity=planned.identity,
    )  # fmt: skip


def build_dispatches(*, seq: int, target: UserId = BOB) -> list[tuple[SlotId, bytes]]:
    return [(item.shard, item.record) for item in plan_dispatches(build_outbox(seq=seq, target=target))]


class Client:
    """The origin of requests: notes every answer."""

    def __init__(self, clock: ManualClock, *, user: UserId = ALICE) -> None:
        self._clock = clock
        self.user = user
        self.answers: list[tuple[int, Any]] = []
        """request_id and decoded body."""
        self._next = 0

    def reply(self, request: Request, frame: bytes) -> None:
        _version, _flags, opcode, request_id, length = HEADER.unpack_from(frame)
        body = frame[HEADER.size :]
        assert len(body) == length
        assert request_id == request.request_id
        self.answers.append((request_id, decode_body(opcode, body)))

    def request(self, opcode: int, body: bytes) -> Request:
        self._next += 1
        return Request(
            origin=self, handle=1, generation=1, request_id=self._next, opcode=opcode, tenant=TENANT,
            user=self.user, device=DEVICE, session=SESSION, body=body, arrived=self._clock.monotonic(),
        )  # fmt: skip

    @property
    def acks(self) -> list[SendAck]:
        return [body for _id, body in self.answers if isinstance(body, SendAck)]

    @property
    def errors(self) -> list[int]:
        return [body.code for _id, body in self.answers if isinstance(body, Error)]


Rule = Callable[..., StoreError | None]


class Faulty:
    """Passes every call on, except where a rule says otherwise."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.before: dict[str, Rule] = {}
        """Method → what to fail with instead of calling; the rule gets the arguments."""
        self.after: dict[str, Rule] = {}
        """Method → what to fail with although it was called."""
        self.held: dict[str, asyncio.Event] = {}
        """Method → its calls take effect at once, their answers come when the event is set."""
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self.inner, name)
        if not callable(inner):
            return inner

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if (error := self._error(self.before, name, args)) is not None:
                return _failed(error)
            result = inner(*args, **kwargs)
            if (error := self._error(self.after, name, args)) is not None:
                return _failed(error)
            gate = self.held.get(name)
            return result if gate is None else asyncio.ensure_future(_later(result, gate))

        return call

    @staticmethod
    def _error(rules: dict[str, Rule], name: str, args: Any) -> StoreError | None:
        rule = rules.get(name)
        return rule(*args) if rule is not None else None

    def fail(self, name: str, error: StoreError, *, times: int = 1, applied: bool = False) -> None:
        """The next calls fail; `applied`: they take effect all the same."""
        left = [times]

        def once(*_args: Any) -> StoreError | None:
            left[0] -= 1
            return type(error)(*error.args) if left[0] >= 0 else None

        (self.after if applied else self.before)[name] = once

    def hold(self, name: str) -> asyncio.Event:
        """Holds the answers of a method back until the event is set."""
        gate = self.held[name] = asyncio.Event()
        return gate


async def _later(result: Awaitable[Any], gate: asyncio.Event) -> Any:
    await gate.wait()
    return await result


def _failed(error: StoreError) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


class RecordingPusher:
    """What would have gone to gateways."""

    def __init__(self) -> None:
        self.pushed: list[tuple[int, list[tuple[int, int, int, int, bool]], bytes]] = []

    def push(self, worker: WorkerId, targets: list[tuple[int, int, int, int, bool]], entry: bytes) -> None:
        self.pushed.append((worker, targets, entry))


class FixedPresence:
    """Sessions by user; knows nothing of announcements."""

    def __init__(self, sessions: Mapping[UserId, list[Session]] | None = None) -> None:
        self.sessions = dict(sessions or {})
        self.newest: dict[UserId, MailboxSeq] = {}

    def sessions_of(self, tenant: TenantId, user: UserId) -> list[Session]:
        return self.sessions.get(user, [])

    def advance(self, tenant: TenantId, user: UserId, mailbox_seq: MailboxSeq) -> MailboxSeq:
        previous = self.newest.get(user, MailboxSeq(0))
        self.newest[user] = mailbox_seq
        return previous


class Roles(NamedTuple):
    writer: Writer
    fanout: Fanout
    mailbox: Mailbox


class Rig:
    """One memory instance of everything, and what the tests ask of it."""

    def __init__(self, *, instances: int = 1) -> None:
        self.clock = ManualClock()
        self.placement = Placement(1, instances, instances)
        self.commit_states = [CommitState() for _instance in range(instances)]
        self.mailbox_states = [MailboxState() for _instance in range(instances)]
        self.commit_state, self.mailbox_state = self.commit_states[0], self.mailbox_states[0]
        self.all_commits: list[Any] = [
            Faulty(MemoryCommitStore(self.clock, state)) for state in self.commit_states
        ]
        self.all_memberships: list[Any] = [
            Faulty(MemoryMemberships(store.inner)) for store in self.all_commits
        ]
        self.all_mailboxes: list[Any] = [
            Faulty(MemoryMailboxStore(self.clock, state)) for state in self.mailbox_states
        ]
        self.commits, self.mailboxes = self.all_commits[0], self.all_mailboxes[0]
        self.memberships = self.all_memberships[0]
        """The first of each; most tests have no other."""
        self.outbox: Any = Faulty(MemoryCommitLog(self.clock))
        self.dispatch: Any = Faulty(MemoryCommitLog(self.clock))
        self.one_step: Any = Faulty(MemoryOneStepCommits(self.commits.inner, self.outbox.inner))
        """Of the first instance, which then holds the Outbox too."""
        self.metrics = Metrics()
        self.pusher = RecordingPusher()
        self.presence = FixedPresence()
        self.fatal: list[SlotId] = []
        self.alice = Client(self.clock)
        self.bob = Client(self.clock, user=BOB)
        self._boots = 0

    async def prepare(self, *, base: int = 1) -> "Rig":
        await self.claim()
        bases = dict.fromkeys(ALL_SLOTS, MailboxSeq(base))
        for store in self.all_mailboxes:
            await store.initialise_shards(bases, await self.dispatch.identity())
        return self

    async def claim(self) -> None:
        """A new process: its epochs rise, those of the one before are stale."""
        self._boots += 1
        claim = SlotClaim(
            ALL_SLOTS, BootId(self._boots.to_bytes(16, "big")), b"v" * 16, "here", self.placement.digest()
        )
        for store in (*self.all_commits, *self.all_mailboxes):
            await store.claim(claim)

    def roles(
        self,
        *,
        failpoints: Mapping[str, Action] | None = None,
        lanes: int = 4,
        slots: Sequence[SlotId] = ALL_SLOTS,
        one_step: bool = False,
    ) -> Roles:
        shared: dict[str, Any] = {
            "placement": self.placement,
            "clock": self.clock,
            "metrics": self.metrics,
            "failpoints": Failpoints(failpoints),
            "on_fatal": self.fatal.append,
        }
        writer = Writer(
            worker=WorkerId(0),
            stores=self.all_commits,
            memberships=self.all_memberships,
            outbox=self.outbox,
            one_step={0: self.one_step} if one_step else {},
            lanes=lanes,
            **shared,
        )
        fanout = Fanout(
            slots=slots,
            stores=self.all_commits,
            memberships=self.all_memberships,
            outbox=self.outbox,
            dispatch=self.dispatch,
            **shared,
        )
        mailbox = Mailbox(
            slots=slots, stores=self.all_mailboxes, dispatch=self.dispatch, presence=self.presence,
            pusher=self.pusher, **shared,
        )  # fmt: skip
        return Roles(writer, fanout, mailbox)

    @asynccontextmanager
    async def running(self, *roles: Any) -> AsyncIterator[None]:
        """Runs roles until the block ends, then kills them: nothing is drained."""
        tasks = [asyncio.ensure_future(role.run()) for role in roles]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            # A role that has ended by itself is the reason for whatever the block saw, so it is told first.
            for end in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
                    raise end

    async def run_until_killed(self, *roles: Any) -> None:
        """Runs roles until a failpoint strikes one of them; then all are dead."""
        with expect_strike():
            async with asyncio.TaskGroup() as tasks:
                for role in roles:
                    tasks.create_task(role.run())

    def send(self, writer: Writer, *numbers: int, client: Client | None = None, **changes: Any) -> None:
        client = client or self.alice
        for number in numbers:
            writer.submit(client.request(Op.SEND_MESSAGE, build_send(number, **changes)))

    # --- what came of it -----------------------------------------------------------------------------

    async def deliver(self) -> None:
        """A fresh fan-out and a fresh mailbox bring everything to its end."""
        _writer, fanout, mailbox = self.roles()
        async with self.running(fanout, mailbox):
            await self.settled(fanout, mailbox)

    async def settled(self, fanout: Fanout, mailbox: Mailbox) -> None:
        await happens(lambda: bool(fanout.positions and mailbox.positions), what="the roles have opened")
        for role, log in ((fanout, self.outbox), (mailbox, self.dispatch)):
            marks = await log.watermarks(ALL_SLOTS)
            await happens(partial(_is_through, role, marks), what="every record is finished")

    async def mailbox_of(self, user: UserId) -> list[tuple[int, int]]:
        """(mailbox_seq, conversation_seq) of everything the user can pull."""
        entries: list[tuple[int, int]] = []
        after = MailboxSeq(0)
        while True:
            query = MailboxPageQuery(TENANT, user, shard_of(user), after, 300, 196_608, MailboxSeq(0), 0)
            store = self.all_mailboxes[self.placement.mailbox_instance_of(shard_of(user))]
            (page,) = await store.read_mailbox([query])
            entries += [(seq, decode_entry(entry).conversation_seq) for seq, entry in page.entries]
            after = page.covered_through
            if not page.more:
                return entries

    async def sequences_of(self, user: UserId) -> list[int]:
        return [seq for _mailbox_seq, seq in await self.mailbox_of(user)]

    def head(self) -> tuple[int, int]:
        """Last allocated sequence and visible head of the conversation of Alice and Bob."""
        for (_bucket, _tenant, conversation), state in self.commit_state.conversations.items():
            if conversation == CONVERSATION:
                return state.last, state.head
        return 0, 0


def _is_through(role: Fanout | Mailbox, marks: Mapping[SlotId, Watermarks]) -> bool:
    stopped: Container[SlotId] = role.stopped
    positions = role.positions
    return all(
        positions.get(slot, Offset(-1)) + 1 >= mark.high
        for slot, mark in marks.items()
        if slot not in stopped
    )


@contextmanager
def expect_strike() -> Iterator[None]:
    """The block must end by a failpoint, possibly inside groups of tasks."""
    try:
        yield
    except BaseExceptionGroup as group:
        struck, rest = group.split(FailpointStruck)
        assert struck is not None
        assert rest is None, rest
        return
    raise AssertionError("no failpoint struck")


def slot_of_conversation() -> SlotId:
    return slot_of_bucket(BUCKET)

"""The work that the experiments do: numbered tasks, an owner that commits them, a consumer that delivers
them.

A task is one message of a fixed set of conversations; everything about it follows from its number, so any
process can say what it must look like. The owner is the real writer, the consumer the real fan-out and the
real mailbox.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from typing import Final

from qim.clock import SystemClock
from qim.domain.fanout import shard_of
from qim.domain.placement import Placement
from qim.domain.presence import Session
from qim.domain.writer import PlannedSend, plan_send
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
from qim.metrics import Metrics
from qim.ports import CommitLog, LogRecord, MailboxPageQuery, SlotClaim, Watermarks
from qim.records import build_outbox_record
from qim.wire.bodies import SendAck, SendMessage, Target, decode_body, encode_body
from qim.wire.layout import HEADER, Op
from tests.matrix.media import ALL_SLOTS, Host, Medium, Parts
from tests.matrix.processes import Child, Reporter
from tests.waiting import happens
from workers.failpoints import KILLED, Action, Failpoints, FailpointStruck
from workers.fanout import Fanout
from workers.mailbox import Mailbox
from workers.request import Request
from workers.writer import Writer

TENANT: Final = TenantId(7)
DEVICE: Final = DeviceId(b"device-of-matrix")
SESSION: Final = SessionId(b"sessionof-matrix")
CONVERSATIONS: Final = 64
PLACEMENT: Final = Placement(1, 1, 1)
HOME: Final = PLACEMENT.home_partition(WorkerId(0))
SETTLE_SECONDS_MAX: Final = 300
WINDOW: Final = 64
"""Requests of an owner that are not answered yet."""
SENT, ACKED, REFUSED, STRUCK = 1, 2, 3, 4
"""Kinds of reports: (SENT, number), (ACKED, number, seq, reserved_at), (REFUSED, number)."""


@lru_cache
def sender_of(number: int) -> UserId:
    return UserId(b"sender--" + (number % CONVERSATIONS).to_bytes(8, "big"))


@lru_cache
def target_of(number: int) -> UserId:
    return UserId(b"target--" + (number % CONVERSATIONS).to_bytes(8, "big"))


def message_id(number: int) -> ClientMessageId:
    return ClientMessageId(b"task----" + number.to_bytes(8, "big"))


def number_of(client_message_id: bytes) -> int:
    return int.from_bytes(client_message_id[8:], "big")


def plan_task(number: int, *, now_ms: Millis = Millis(1_700_000_000_000)) -> PlannedSend:
    return plan_send(
        tenant=TENANT, sender=sender_of(number), device=DEVICE, target_kind=1, target=target_of(number),
        client_message_id=message_id(number), message_type=1, custom_type="", body=b"task %d" % number,
        retention_class=0, now_ms=now_ms,
    )  # fmt: skip


def outbox_record(number: int) -> bytes:
    """The record of a task that was committed in the order of the numbers."""
    planned = plan_task(number)
    seq = Seq(number // CONVERSATIONS + 1)
    return build_outbox_record(
        bucket=planned.route.bucket, seq=seq, record=planned.record, record_bytes=planned.record_bytes,
        identity=planned.identity,
    )  # fmt: skip


# --- roles -------------------------------------------------------------------------------------------


class Nobody:
    """Presence and pusher of a service without connected devices."""

    def sessions_of(self, _tenant: TenantId, _user: UserId) -> Sequence[Session]:
        return ()

    def advance(self, _tenant: TenantId, _user: UserId, _mailbox_seq: MailboxSeq) -> MailboxSeq:
        return MailboxSeq(0)

    def push(self, _worker: WorkerId, _targets: list[tuple[int, int, int, int, bool]], _entry: bytes) -> None:
        pass


def claim_of(boot: int, *, supervisor: bytes = b"v" * 16, take_over: bool = False) -> SlotClaim:
    return SlotClaim(
        ALL_SLOTS, BootId(boot.to_bytes(16, "big")), supervisor, "here", PLACEMENT.digest(), take_over
    )


async def take_slots(parts: Parts, claim: SlotClaim) -> None:
    """Every slot of both stores, or a failure."""
    for store in (parts.commits, parts.mailboxes):
        assert not (await store.claim(claim)).refusals


def build_writer(
    parts: Parts,
    failpoints: Failpoints,
    *,
    in_one_step: bool = False,
    on_stale: Callable[[], object] = lambda: None,
) -> Writer:
    def on_fatal(slot: SlotId) -> None:
        on_stale()

    return Writer(
        worker=WorkerId(0),
        placement=PLACEMENT,
        stores=[parts.commits],
        one_step={0: parts.one_step} if in_one_step else {},
        outbox=parts.outbox,
        clock=SystemClock(),
        metrics=Metrics(),
        failpoints=failpoints,
        on_fatal=on_fatal,
    )


@asynccontextmanager
async def running(*roles: Writer | Fanout | Mailbox) -> AsyncIterator[None]:
    """Runs roles until the block ends, then drops them as they are. A role that fails ends the block."""
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(role.run()) for role in roles]
        yield
        for task in started:
            task.cancel()


class Owner:
    """A writer and the clients who send to it: a window of requests, every answer reported."""

    def __init__(self, writer: Writer, reporter: Reporter) -> None:
        self._writer = writer
        self._reporter = reporter
        self._clock = SystemClock()
        self._open: set[int] = set()
        self._room = asyncio.Event()

    async def send(self, numbers: Sequence[int]) -> None:
        """Returns when each was answered."""
        for number in numbers:
            while len(self._open) >= WINDOW:
                await self._answered()
            self._submit(number)
        while self._open:
            await self._answered()

    async def _answered(self) -> None:
        self._room.clear()
        await self._room.wait()

    def _submit(self, number: int) -> None:
        self._open.add(number)
        self._reporter.tell([(SENT, number, 0, 0)])
        message = SendMessage(Target(1, target_of(number)), message_id(number), 1, "", b"task %d" % number, 0)
        self._writer.submit(
            Request(
                origin=self, handle=1, generation=1, request_id=number, opcode=Op.SEND_MESSAGE, tenant=TENANT,
                user=sender_of(number), device=DEVICE, session=SESSION, body=encode_body(message),
                arrived=self._clock.monotonic(),
            )
        )  # fmt: skip

    def reply(self, request: Request, frame: bytes) -> None:
        opcode = HEADER.unpack_from(frame)[2]
        answer = decode_body(opcode, frame[HEADER.size :])
        number = request.request_id
        if isinstance(answer, SendAck):
            self._reporter.tell([(ACKED, number, answer.conversation_seq, answer.reserved_at)])
        else:
            self._reporter.tell([(REFUSED, number, 0, 0)])
        self._open.discard(number)
        self._room.set()


# --- the consumer ------------------------------------------------------------------------------------


def build_fanout(parts: Parts, failpoints: Failpoints) -> Fanout:
    return Fanout(
        slots=ALL_SLOTS, placement=PLACEMENT, stores=[parts.commits], memberships=[], outbox=parts.outbox,
        dispatch=parts.dispatch, clock=SystemClock(), metrics=Metrics(), failpoints=failpoints,
        on_fatal=lambda slot: None,
    )  # fmt: skip


def build_mailbox(parts: Parts, failpoints: Failpoints) -> Mailbox:
    nobody = Nobody()
    return Mailbox(
        slots=ALL_SLOTS, placement=PLACEMENT, stores=[parts.mailboxes], dispatch=parts.dispatch,
        presence=nobody, pusher=nobody, clock=SystemClock(), metrics=Metrics(), failpoints=failpoints,
        on_fatal=lambda slot: None,
    )  # fmt: skip


async def _consume(host: Host, failpoints: Failpoints, claim: SlotClaim) -> None:
    """Fan-out and mailbox until every record is finished, or until the failpoint strikes."""
    async with host.open() as parts:
        await take_slots(parts, claim)
        fanout, mailbox = build_fanout(parts, failpoints), build_mailbox(parts, failpoints)
        async with running(fanout, mailbox):
            await _settled(parts, fanout, mailbox)


async def _settled(parts: Parts, fanout: Fanout, mailbox: Mailbox) -> None:
    """Returns when every record is finished; a partition that stops for an operator is a failure."""
    await happens(lambda: bool(fanout.positions and mailbox.positions), what="the roles have opened")
    for role, log in ((fanout, parts.outbox), (mailbox, parts.dispatch)):
        marks = await log.watermarks(ALL_SLOTS)
        is_through = partial(_is_through, role, marks)
        await happens(is_through, what="every record is finished", timeout_seconds=SETTLE_SECONDS_MAX)


def _is_through(role: Fanout | Mailbox, marks: Mapping[SlotId, Watermarks]) -> bool:
    assert not role.stopped, f"stopped: {dict(role.stopped)}"
    positions = role.positions
    return all(positions.get(slot, Offset(-1)) + 1 >= mark.high for slot, mark in marks.items())


def consume(host: Host, claim: SlotClaim) -> None:
    """Delivers everything that the Outbox holds."""
    asyncio.run(_consume(host, Failpoints(), claim))


def consume_until_struck(medium: Medium, host: Host, claim: SlotClaim, *, point: str, at_hit: int) -> bool:
    """Runs a consumer that dies at a failpoint; False when it was through before.

    Where the medium outlives it, the consumer is a process and ends as after kill -9; otherwise it is dropped
    in the middle of its step.
    """
    if medium.outlives_processes:
        failpoints = Failpoints({point: Action("exit", at_hit=at_hit)})
        child = Child(lambda _reporter: asyncio.run(_consume(host, failpoints, claim)))
        code = child.finish()
        assert code in {0, KILLED}, f"the consumer ended with {code}"
        return code == KILLED
    try:
        asyncio.run(_consume(host, Failpoints({point: Action("raise", at_hit=at_hit)}), claim))
    except BaseExceptionGroup as group:
        struck, rest = group.split(FailpointStruck)
        assert struck is not None, rest
        return True
    return False


# --- what came of it ---------------------------------------------------------------------------------


async def read_all(log: CommitLog, partition: SlotId, *, first: int = 0) -> list[LogRecord]:
    """Every record of a partition at and above an offset."""
    records: list[LogRecord] = []
    while page := await log.read(partition, Offset(first), records_max=2_048):
        records += page
        first = page[-1].offset + 1
    return records


async def mailbox_of(parts: Parts, user: UserId) -> list[bytes]:
    """Every entry of a mailbox, in its order."""
    entries: list[bytes] = []
    after = MailboxSeq(0)
    while True:
        query = MailboxPageQuery(TENANT, user, shard_of(TENANT, user), after, 300, 196_608, MailboxSeq(0), 0)
        (page,) = await parts.mailboxes.read_mailbox([query])
        entries += [entry for _seq, entry in page.entries]
        after = page.covered_through
        if not page.more:
            return entries


async def all_mailboxes(host: Host) -> dict[UserId, list[bytes]]:
    async with host.open() as parts:
        users = [user for number in range(CONVERSATIONS) for user in (sender_of(number), target_of(number))]
        return {user: await mailbox_of(parts, user) for user in users}

"""The commit path of one core instance: reserve, append, mark, acknowledge; and finish what is half-done.

Where one server holds the conversations and the Outbox, one call does all of it (`OneStepCommits`), and what
that call leaves to two steps goes the long way. State of a message while it is in flight here, owned by the
loop:

    reserving   asked of the store; a refusal ends it, and so does a commit in one step
    appending   RECORDED: it has a sequence, its Outbox record is on the way
    durable     in the Outbox; acknowledged, and soon COMMITTED

`in_flight` maps the identity key of a message to its state, from before the reservation until the answer of
`mark_committed` was read. A repeat that arrives meanwhile waits for the first one, or gets its coordinates at
once when they are durable; so a message is never appended twice by two passes. The store alone decides about
everything else, in particular about the same id with other content.

**Nothing is acknowledged before its append is durable.** Where an outcome is unknown, the client is told so
(DEADLINE_EXCEEDED), the message leaves `in_flight`, and what is RECORDED is finished by the recoverer with
the same coordinates and the stored bytes, whether or not the client comes back. One step leaves nothing
RECORDED: a repeat finds all of it done, or nothing. A store that contradicts itself stops the slot for sends;
an Outbox partition that does so stops all sends of this worker, until the recoverer's next append to it
succeeds. Reads go on in both cases. Bounded by the passes in flight, which are bounded themselves.
"""

from collections.abc import Awaitable, Iterable, Sequence
from typing import Final, Protocol

from structlog import get_logger

from qim.clock import Clock
from qim.domain import writer as rules
from qim.domain.mailbox import is_news
from qim.domain.placement import slot_of_bucket
from qim.errors import (
    ClientError,
    DeadlineExceeded,
    QimError,
    RecordCorrupt,
    StoreBroken,
    StoreError,
    StoreRefused,
    StoreUnknown,
    Unavailable,
)
from qim.ids import BucketId, Millis, Offset, Seq, SlotId
from qim.limits import (
    RECOVER_AGE_MS,
    REQUEST_DEADLINE_MS,
    SCRIPT_RUN_ITEMS_MAX,
    UNFINISHABLE_MESSAGES_MAX,
    WRITER_BATCH_MESSAGES_MAX,
)
from qim.metrics import Metrics
from qim.ports import (
    Commit,
    CommitLog,
    CommitResult,
    CommitStore,
    Committed,
    MessageKey,
    OneStepCommits,
    Pending,
    Reservation,
    Reserved,
    ReserveResult,
)
from qim.records import MessageType, build_outbox_record, decode_record, fill_outbox_frame, message_id_of
from qim.wire.bodies import SendAck, build_error, build_message
from qim.wire.layout import Op
from workers.failpoints import Failpoints
from workers.request import Request

log = get_logger()

_REFUSALS: Final = {Reserved(word): error for word, error in rules.REFUSALS.items()}
_SEND_ACK: Final = int(Op.SEND_ACK)
_CONTROL: Final = int(MessageType.CONTROL)
UNKNOWN: Final = DeadlineExceeded("the outcome is not known yet", retry_after_ms=rules.RETRY_AFTER_MS)
NOTHING_WRITTEN: Final = Unavailable("the store is away", retry_after_ms=rules.RETRY_AFTER_MS)


class OnFatal(Protocol):
    """Told once that a slot must not be served by this process any more."""

    def __call__(self, slot: SlotId) -> None: ...


class Sending:
    """One message in flight and everybody who waits for its coordinates."""

    __slots__ = (
        "control", "durable", "identity", "key", "message", "offset", "planned", "repeated", "requests",
        "reserved_at", "seq",
    )  # fmt: skip

    def __init__(self, key: MessageKey, identity: bytes) -> None:
        self.key = key
        self.identity = identity
        self.planned: rules.PlannedSend | None = None
        """None: found by the recoverer."""
        self.requests: list[Request] = []
        self.repeated = False
        """Whether the first of `requests` repeats what the store knew already."""
        self.seq = Seq(0)
        self.reserved_at = Millis(0)
        self.message = b""
        """The Outbox record."""
        self.offset: Offset | None = None
        self.control = False
        self.durable = False


def reply_error(request: Request, error: ClientError) -> None:
    request.origin.reply(request, build_error(request.request_id, error))


class Commits:
    """Commits messages of the buckets that live on one core instance."""

    def __init__(
        self,
        *,
        store: CommitStore,
        one_step: OneStepCommits | None,
        outbox: CommitLog,
        home: SlotId,
        buckets: Sequence[BucketId],
        clock: Clock,
        metrics: Metrics,
        failpoints: Failpoints,
        on_fatal: OnFatal,
    ) -> None:
        self._store = store
        self._one_step = one_step
        self._outbox = outbox
        self.home = home
        self._buckets = tuple(buckets)
        self._clock = clock
        self._metrics = metrics
        self._failpoints = failpoints
        self._on_fatal = on_fatal
        self.in_flight: dict[MessageKey, Sending] = {}
        self.unfinishable: dict[MessageKey, str] = {}
        """Messages whose stored record cannot be used, with the reason; only an operator can mend them.

        Full: the slot of a further one stops, and the recoverer leaves stopped slots alone.
        """
        self.stopped: dict[SlotId, str] = {}
        """Slots whose store contradicted itself: their sends are refused, the other slots go on."""
        self.outbox_broken = ""
        """Why the home partition takes nothing; sends are refused while it says something."""
        self._broken_at = 0.0
        self._unread = 0
        self._now = clock.monotonic()

    # --- one pass ------------------------------------------------------------------------------------

    def begin(self, sends: Iterable[tuple[Request, rules.PlannedSend]]) -> list["Reserving"]:
        """Admits the messages and issues their reservations, in order, before anything is awaited."""
        fresh = []
        self._now = self._clock.monotonic()
        for request, planned in sends:
            if self.outbox_broken or (self.stopped and slot_of_bucket(planned.route.bucket) in self.stopped):
                reply_error(request, NOTHING_WRITTEN)
                continue
            sending = self._admit(request, planned)
            if sending is not None:
                fresh.append(sending)
        return [self._ask(run) for run in _cut(fresh)]

    def _ask(self, run: list[Sending]) -> "Reserving":
        items = [_reservation(sending) for sending in run]
        if self._one_step is None:
            return Reserving(run, self._store.reserve(items))
        return Reserving(run, self._one_step.commit(items, self.home))

    async def finish(self, reserving: list["Reserving"]) -> list["Marking"]:
        """Brings what `begin` has begun to its end; every request is answered when this returns.

        What comes back is committed in the store as soon as the store answers: see `settle`.
        """
        if not reserving:
            return []
        recorded, apart = await self._take(reserving)
        if apart:
            reserved = [Reserving(run, self._store.reserve([*map(_reservation, run)])) for run in _cut(apart)]
            recorded += (await self._take(reserved))[0]
        marks = await self._publish(recorded)
        self._failpoints.hit("writer.acknowledged")
        return marks

    async def _take(self, reserving: Iterable["Reserving"]) -> tuple[list[Sending], list[Sending]]:
        """Those whose record must be appended, and those which one step could not commit."""
        recorded: list[Sending] = []
        apart: list[Sending] = []
        for part in reserving:
            results = await self._reserved(part)
            self._failpoints.hit("writer.reserved")
            self._now = self._clock.monotonic()
            for sending, result in zip(part.run, results, strict=True):
                if result is None:
                    continue
                if result.outcome is Reserved.TWO_STEPS:
                    apart.append(sending)
                elif self._sort(sending, result):
                    recorded.append(sending)
        return recorded, apart

    def _admit(self, request: Request, planned: rules.PlannedSend) -> Sending | None:
        route = planned.route
        record = planned.record
        key = MessageKey(
            route.bucket, record.tenant, route.conversation, record.sender, record.client_message_id
        )
        known = self.in_flight.get(key)
        if known is not None and known.identity == planned.identity:
            if known.durable:
                self._acknowledge(known, request, repeated=True)
            else:
                request.body = b""  # a client may repeat one large message a thousand times while it waits
                known.requests.append(request)
            return None
        sending = Sending(key, planned.identity)
        sending.planned = planned
        sending.requests.append(request)
        if known is None:
            self.in_flight[key] = sending
        return sending

    async def _reserved(self, part: "Reserving") -> list[ReserveResult | None]:
        """None where the message was already answered."""
        try:
            return [*await part.call]
        except StoreRefused:
            self._give_up(part.run, NOTHING_WRITTEN)
        except StoreUnknown:
            self._give_up(part.run, UNKNOWN)
        except StoreBroken as error:
            if len(part.run) > 1:
                return [await self._reserve_alone(sending) for sending in part.run]
            self._break(part.run[0], error)
        return [None] * len(part.run)

    async def _reserve_alone(self, sending: Sending) -> ReserveResult | None:
        # One broken key fails a whole run; asked one by one, which is safe to repeat, only its slot stops.
        (result,) = await self._reserved(self._ask([sending]))
        return result

    def _sort(self, sending: Sending, result: ReserveResult) -> bool:
        """Takes the answer of the store over; True: RECORDED, its record must be appended."""
        outcome = result.outcome
        planned = sending.planned
        assert planned is not None
        sending.seq = result.seq
        sending.reserved_at = result.reserved_at
        if outcome is Reserved.DURABLE:
            self._metrics.writer_commits += 1
            self._answer_known(sending)
            return False
        if outcome is Reserved.NEW:
            sending.message = fill_outbox_frame(
                planned.outbox_frame, seq=result.seq, record_bytes=planned.record_bytes
            )
            return True
        if outcome is Reserved.RECORDED:
            sending.repeated = True
            return self._take_stored(sending, result.record)
        if outcome is Reserved.COMMITTED:
            sending.repeated = True
            self._answer_known(sending)
            return False
        if outcome is Reserved.CONFLICT:
            self._metrics.writer_conflicts += 1
        if outcome is Reserved.STALE_OWNER:
            self._on_fatal(slot_of_bucket(sending.key.bucket))
        self._give_up([sending], _REFUSALS[outcome])
        return False

    def _take_stored(self, sending: Sending, stored: bytes) -> bool:
        try:
            record = decode_record(stored)
        except RecordCorrupt as error:
            self._note_unfinishable(sending, error)
            self._give_up([sending], UNKNOWN)
            return False
        sending.control = record.message_type == _CONTROL
        sending.message = build_outbox_record(
            bucket=sending.key.bucket,
            seq=sending.seq,
            record=record,
            record_bytes=stored,
            identity=sending.identity,
        )
        return True

    async def _publish(self, recorded: list[Sending]) -> list["Marking"]:
        """Append, mark, acknowledge."""
        if not recorded:
            return []
        durable = await self._append(recorded)
        self._failpoints.hit("writer.appended")
        marks = [
            Marking(run, self._store.mark_committed([self._commit(sending) for sending in run]))
            for run in _cut(durable)
        ]
        self._failpoints.hit("writer.marked")
        # The marks are on the connection: whoever is acknowledged now and reads next, reads behind them.
        self._now = self._clock.monotonic()
        for sending in durable:
            sending.durable = True
            self._settle_requests(sending)
        return marks

    async def settle(self, marks: Iterable["Marking"]) -> int:
        """Reads the answers of `mark_committed`; how many messages became COMMITTED by us."""
        committed = 0
        for mark in marks:
            committed += await self._marked(mark)
        return committed

    async def _append(self, recorded: list[Sending]) -> list[Sending]:
        """Those whose record is durable; the others are answered as unknown and left to the recoverer."""
        home = self.home
        offsets: list[Offset | None] = [None] * len(recorded)
        try:
            offsets = await self._outbox.append([(home, sending.message) for sending in recorded])
        except (StoreUnknown, StoreRefused) as error:
            log.warning("outbox_append_unknown", records=len(recorded), reason=str(error))
        except StoreBroken as error:
            self._break_outbox(str(error))
        else:
            if self.outbox_broken:
                self._mend_outbox()
        durable = []
        for sending, offset in zip(recorded, offsets, strict=True):
            if offset is None:
                self._give_up([sending], UNKNOWN)
            else:
                sending.offset = offset
                durable.append(sending)
        return durable

    def _commit(self, sending: Sending) -> Commit:
        assert sending.offset is not None
        return Commit(
            sending.key, sending.identity, sending.seq, sending.reserved_at, sending.control, self.home,
            sending.offset,
        )  # fmt: skip

    async def _marked(self, mark: "Marking") -> int:
        """Reads the answer of `mark_committed`; what it did not do, the recoverer repeats."""
        committed = 0
        try:
            results = await mark.call
        except (StoreUnknown, StoreRefused):
            pass
        except StoreBroken as error:
            if len(mark.run) > 1:
                for sending in mark.run:
                    alone = self._store.mark_committed([self._commit(sending)])
                    committed += await self._marked(Marking([sending], alone))
                return committed
            self._note_unfinishable(mark.run[0], error)
            self._stop_slot(mark.run[0], error)
        else:
            for sending, result in zip(mark.run, results, strict=True):
                if result.outcome is Committed.COMMITTED:
                    committed += 1
                elif result.outcome is Committed.STALE_OWNER:
                    self._on_fatal(slot_of_bucket(sending.key.bucket))
        self._metrics.writer_commits += committed
        for sending in mark.run:
            self._leave(sending)
        return committed

    # --- answers -------------------------------------------------------------------------------------

    def _answer_known(self, sending: Sending) -> None:
        self._settle_requests(sending)
        self._leave(sending)

    def _settle_requests(self, sending: Sending) -> None:
        repeated = sending.repeated
        for request in sending.requests:
            self._acknowledge(sending, request, repeated=repeated)
            repeated = True
        sending.requests.clear()

    def _acknowledge(self, sending: Sending, request: Request, *, repeated: bool) -> None:
        key = sending.key
        ack = SendAck(
            key.client_message_id, key.conversation, sending.seq, message_id_of(sending.identity),
            sending.reserved_at, repeated,
        )  # fmt: skip
        request.origin.reply(request, build_message(_SEND_ACK, request.request_id, ack))
        self._metrics.message_ack.observe(self._now - request.arrived)
        if repeated:
            self._metrics.writer_duplicates += 1

    def _give_up(self, run: Iterable[Sending], error: ClientError) -> None:
        for sending in run:
            if error is UNKNOWN:
                self._metrics.writer_unknown += len(sending.requests)
            for request in sending.requests:
                reply_error(request, error)
            sending.requests.clear()
            self._leave(sending)

    def _leave(self, sending: Sending) -> None:
        if self.in_flight.get(sending.key) is sending:
            del self.in_flight[sending.key]

    def _break(self, sending: Sending, error: StoreBroken) -> None:
        self._stop_slot(sending, error)
        self._give_up([sending], UNKNOWN)

    def _stop_slot(self, sending: Sending, error: QimError) -> None:
        slot = slot_of_bucket(sending.key.bucket)
        if slot not in self.stopped:
            log.error("slot_stopped", role="writer", slot=slot, reason=str(error))
            self._metrics.slot_stopped[slot] += 1
        self.stopped[slot] = str(error)

    def _break_outbox(self, reason: str) -> None:
        # Another process would meet the same partition; ending this one would only take the reads away too.
        if not self.outbox_broken:
            log.error("outbox_broken", slot=self.home, reason=reason)
            self._metrics.slot_stopped[self.home] += 1
        self.outbox_broken = reason
        self._broken_at = self._clock.monotonic()

    def _is_outbox_due(self) -> bool:
        return self._clock.monotonic() - self._broken_at > REQUEST_DEADLINE_MS / 1000

    def _mend_outbox(self) -> None:
        self.outbox_broken = ""
        self._metrics.slot_stopped[self.home] -= 1
        log.info("slot_resumed", role="writer", slot=self.home)

    def expire(self) -> None:
        """Answers requests that have waited too long; their messages go on and keep their coordinates."""
        oldest = self._clock.monotonic() - REQUEST_DEADLINE_MS / 1000
        for sending in self.in_flight.values():
            late = [request for request in sending.requests if request.arrived < oldest]
            if late:
                sending.requests = [request for request in sending.requests if request.arrived >= oldest]
                sending.repeated = True
                self._metrics.writer_unknown += len(late)
                for request in late:
                    reply_error(request, UNKNOWN)

    # --- the recoverer -------------------------------------------------------------------------------

    async def recover(self, *, older_than_ms: int = RECOVER_AGE_MS) -> int:
        """Finishes RECORDED messages that nobody works on; how many were finished.

        Bounded by one page per call: what is left waits for the next call, a second later. What cannot be
        finished is passed over, and the page grows by it, so that it never hides what lies behind it.
        """
        entries_max = WRITER_BATCH_MESSAGES_MAX + len(self.in_flight) + len(self.unfinishable)
        try:
            pending = await self._store.read_pending(
                self._recoverable(), older_than_ms=older_than_ms, entries_max=entries_max
            )
        except StoreError as error:
            self._unread += 1
            if is_news(self._unread):
                log.warning("recoverer_could_not_read", attempts=self._unread, reason=str(error))
            return 0
        self._unread = 0
        adopted = [sending for item in pending if (sending := self._adopt(item))]
        if self.outbox_broken and not (adopted or self.in_flight) and self._is_outbox_due():
            self._mend_outbox()  # nothing is left to try it with: the next send does
        recovered = await self.settle(await self._publish(adopted))
        self._metrics.writer_recovered += recovered
        return recovered

    def _recoverable(self) -> Sequence[BucketId]:
        """Where a stopped slot may hold what could not be noted, it waits for its operator as a whole."""
        if len(self.unfinishable) < UNFINISHABLE_MESSAGES_MAX:
            return self._buckets
        return [bucket for bucket in self._buckets if slot_of_bucket(bucket) not in self.stopped]

    def _adopt(self, item: Pending) -> Sending | None:
        if item.key in self.in_flight or item.key in self.unfinishable:
            return None
        sending = Sending(item.key, item.identity)
        sending.repeated = True
        sending.seq = item.seq
        sending.reserved_at = item.reserved_at
        if not self._take_stored(sending, item.record):
            return None
        self.in_flight[item.key] = sending
        return sending

    def retry(self, slot: SlotId) -> bool:
        """Sends to the slot again, and lets the recoverer try again what it could not finish there."""
        given_up = [key for key in self.unfinishable if slot_of_bucket(key.bucket) == slot]
        for key in given_up:
            del self.unfinishable[key]
        if slot in self.stopped:
            del self.stopped[slot]
            self._metrics.slot_stopped[slot] -= 1
            log.info("slot_resumed", role="writer", slot=slot)
            return True
        return bool(given_up)

    def _note_unfinishable(self, sending: Sending, error: QimError) -> None:
        if sending.key not in self.unfinishable:  # a client that asks again and again is no news
            if len(self.unfinishable) >= UNFINISHABLE_MESSAGES_MAX:
                self._stop_slot(sending, error)
                return
            slot = slot_of_bucket(sending.key.bucket)
            log.error("pending_unfinishable", slot=slot, reason=str(error))
        self.unfinishable[sending.key] = str(error)


class Reserving:
    """A run whose reservation, or commit in one step, is on the way."""

    __slots__ = ("call", "run")

    def __init__(self, run: list[Sending], call: Awaitable[list[ReserveResult]]) -> None:
        self.run = run
        self.call = call


class Marking:
    """A run whose commit marks are on the way."""

    __slots__ = ("call", "run")

    def __init__(self, run: list[Sending], call: Awaitable[list[CommitResult]]) -> None:
        self.run = run
        self.call = call


def _reservation(sending: Sending) -> Reservation:
    planned = sending.planned
    assert planned is not None
    return Reservation(
        sending.key, sending.identity, planned.record_bytes, planned.record.reserved_at, planned.expires_at,
        planned.outbox_frame,
    )  # fmt: skip


def _cut(sendings: list[Sending]) -> list[list[Sending]]:
    if len(sendings) <= SCRIPT_RUN_ITEMS_MAX:
        return [sendings] if sendings else []
    return [
        sendings[start : start + SCRIPT_RUN_ITEMS_MAX]
        for start in range(0, len(sendings), SCRIPT_RUN_ITEMS_MAX)
    ]

"""The commit path of one core instance: reserve, append, mark, acknowledge.

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

A message to a group whose members are not those that it was planned with gets no sequence. It is planned anew
with the version of now, up to three times, behind everything else of its pass; around a change of members the
sequences of a group may therefore differ from the order of arrival.

**Nothing is acknowledged before its append is durable.** Where an outcome is unknown, the client is told so
(DEADLINE_EXCEEDED), the message leaves `in_flight`, and what is RECORDED is finished by the recoverer
(`workers/recoverer.py`), which puts it on the same path. One step leaves nothing RECORDED: a repeat finds all
of it done, or nothing. A store that contradicts itself stops the slot for sends; an Outbox partition that
does so stops all sends to this core instance, until an append to it succeeds or may be tried again
(`workers/stops.py`).
Reads go on in both cases. Bounded by the passes in flight, which are bounded themselves.
"""

from collections.abc import Iterable
from typing import Final

from structlog import get_logger

from qim.clock import Clock
from qim.domain import writer as rules
from qim.domain.placement import slot_of_bucket
from qim.errors import (
    ClientError,
    DeadlineExceeded,
    RecordCorrupt,
    StoreBroken,
    StoreRefused,
    StoreUnknown,
)
from qim.ids import Offset, SlotId
from qim.limits import MEMBERSHIP_RETRIES_MAX, REQUEST_DEADLINE_MS
from qim.memberships import GroupPlace
from qim.metrics import Metrics
from qim.ports import (
    Commit,
    CommitLog,
    CommitStore,
    Committed,
    MessageKey,
    OneStepCommits,
    Pending,
    Reserved,
    ReserveResult,
)
from qim.records import MessageType, build_outbox_record, decode_record, fill_outbox_frame, message_id_of
from qim.wire.bodies import SendAck, build_message
from qim.wire.layout import Op
from workers.failpoints import Failpoints
from workers.group_versions import GroupVersions
from workers.request import NOTHING_WRITTEN, OnFatal, Request, reply_error
from workers.sending import Marking, Reserving, Sending, build_reservation, cut_runs
from workers.stops import Stops

log = get_logger()

_REFUSALS: Final = {Reserved(word): error for word, error in rules.REFUSALS.items()}
_SEND_ACK: Final = int(Op.SEND_ACK)
_CONTROL: Final = int(MessageType.CONTROL)
UNKNOWN: Final = DeadlineExceeded("the outcome is not known yet", retry_after_ms=rules.RETRY_AFTER_MS)


class Commits:
    """Commits messages of the buckets that live on one core instance."""

    def __init__(
        self,
        *,
        store: CommitStore,
        one_step: OneStepCommits | None,
        versions: GroupVersions | None,
        outbox: CommitLog,
        home: SlotId,
        clock: Clock,
        metrics: Metrics,
        failpoints: Failpoints,
        on_fatal: OnFatal,
    ) -> None:
        self._store = store
        self._one_step = one_step
        self._versions = versions
        self._outbox = outbox
        self.home = home
        self._clock = clock
        self._metrics = metrics
        self._failpoints = failpoints
        self._on_fatal = on_fatal
        self.in_flight: dict[MessageKey, Sending] = {}
        self.stops = Stops(home=home, clock=clock, metrics=metrics)
        self._now = clock.monotonic()

    # --- one pass ------------------------------------------------------------------------------------

    def begin(self, sends: Iterable[tuple[Request, rules.PlannedSend]]) -> list[Reserving]:
        """Admits the messages and issues their reservations, in order, before anything is awaited."""
        fresh = []
        stops = self.stops
        self._now = self._clock.monotonic()
        for request, planned in sends:
            if stops.outbox_broken or (stops.slots and slot_of_bucket(planned.route.bucket) in stops.slots):
                reply_error(request, NOTHING_WRITTEN)
                continue
            sending = self._admit(request, planned)
            if sending is not None:
                fresh.append(sending)
        return [self._ask(run) for run in cut_runs(fresh)]

    def _ask(self, run: list[Sending]) -> Reserving:
        if self._one_step is None:
            return self._reserve(run)
        return Reserving(run, self._one_step.commit([*map(build_reservation, run)], self.home))

    def _reserve(self, run: list[Sending]) -> Reserving:
        return Reserving(run, self._store.reserve([*map(build_reservation, run)]))

    async def finish(self, reserving: list[Reserving]) -> list[Marking]:
        """Brings what `begin` has begun to its end; every request is answered when this returns.

        What comes back is committed in the store as soon as the store answers: see `settle`.
        """
        if not reserving:
            return []
        recorded, changed = await self._take(reserving)
        marks = await self.publish(recorded)
        if changed:
            marks += await self._finish_changed(changed)
        self._failpoints.hit("writer.acknowledged")
        return marks

    async def _take(self, reserving: Iterable[Reserving]) -> tuple[list[Sending], list[Sending]]:
        """Those whose record must be appended, and those whose group has other members by now."""
        changed: list[Sending] = []
        recorded, apart = await self._take_once(reserving, changed)
        if apart:
            reserved = [self._reserve(run) for run in cut_runs(apart)]
            recorded += (await self._take_once(reserved, changed))[0]
        return recorded, changed

    async def _take_once(
        self, reserving: Iterable[Reserving], changed: list[Sending]
    ) -> tuple[list[Sending], list[Sending]]:
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
                elif self._sort(sending, result, changed):
                    recorded.append(sending)
        return recorded, apart

    async def _finish_changed(self, changed: list[Sending]) -> list[Marking]:
        """Sends to the members of now what was planned for those of before."""
        marks: list[Marking] = []
        for _attempt in range(MEMBERSHIP_RETRIES_MAX):
            again = await self._plan_again(changed)
            recorded, changed = await self._take([self._ask(run) for run in cut_runs(again)])
            marks += await self.publish(recorded)
            if not changed:
                return marks
        self._give_up(changed, _REFUSALS[Reserved.MEMBERSHIP_CHANGED])
        return marks

    async def _plan_again(self, changed: list[Sending]) -> list[Sending]:
        """Those whose version could be learnt; the others are answered."""
        versions = self._versions
        assert versions is not None, "a message to a group was planned without groups"
        places = list(dict.fromkeys(GroupPlace(*sending.key[:3]) for sending in changed))
        unknown = await versions.refresh(places)
        self._give_up(
            [sending for sending in changed if sending.key.conversation in unknown], NOTHING_WRITTEN
        )
        again = [sending for sending in changed if sending.key.conversation not in unknown]
        for sending in again:
            assert sending.planned is not None
            sending.planned = rules.plan_again(sending.planned, versions.known)
        self._metrics.writer_membership_retries += len(again)
        return again

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

    async def _reserved(self, part: Reserving) -> list[ReserveResult | None]:
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

    def _sort(self, sending: Sending, result: ReserveResult, changed: list[Sending]) -> bool:
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
        if outcome is Reserved.MEMBERSHIP_CHANGED:
            changed.append(sending)
            return False
        if outcome is Reserved.CONFLICT:
            self._metrics.writer_conflicts += 1
        if outcome is Reserved.STALE_OWNER:
            self._on_fatal(slot_of_bucket(sending.key.bucket))
        self._give_up([sending], _REFUSALS[outcome])
        return False

    def adopt(self, item: Pending) -> Sending | None:
        """Takes over what is RECORDED and waited for by nobody; None: it is taken already, or unreadable."""
        if item.key in self.in_flight or item.key in self.stops.unfinishable:
            return None
        sending = Sending(item.key, item.identity)
        sending.repeated = True
        sending.seq = item.seq
        sending.reserved_at = item.reserved_at
        if not self._take_stored(sending, item.record):
            return None
        self.in_flight[item.key] = sending
        return sending

    def _take_stored(self, sending: Sending, stored: bytes) -> bool:
        """Goes on with the bytes that were reserved first; False where they cannot be read."""
        try:
            record = decode_record(stored)
        except RecordCorrupt as error:
            self.stops.note_unfinishable(sending.key, error)
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

    async def publish(self, recorded: list[Sending]) -> list[Marking]:
        """Append, mark, acknowledge."""
        if not recorded:
            return []
        durable = await self._append(recorded)
        self._failpoints.hit("writer.appended")
        marks = [
            Marking(run, self._store.mark_committed([self._commit(sending) for sending in run]))
            for run in cut_runs(durable)
        ]
        self._failpoints.hit("writer.marked")
        # The marks are on the connection: whoever is acknowledged now and reads next, reads behind them.
        self._now = self._clock.monotonic()
        for sending in durable:
            sending.durable = True
            self._settle_requests(sending)
        return marks

    async def settle(self, marks: Iterable[Marking]) -> int:
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
            self.stops.break_outbox(str(error))
        else:
            if self.stops.outbox_broken:
                self.stops.mend_outbox()
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

    async def _marked(self, mark: Marking) -> int:
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
            self.stops.note_unfinishable(mark.run[0].key, error)
            self.stops.stop_slot(slot_of_bucket(mark.run[0].key.bucket), error)
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
        self.stops.stop_slot(slot_of_bucket(sending.key.bucket), error)
        self._give_up([sending], UNKNOWN)

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

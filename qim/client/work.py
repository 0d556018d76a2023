"""What one pass does with what arrived, and what goes out after it.

    frames ──▶ decode ──▶ one transaction ──▶ commit ──▶ memory, waiters, events ──▶ pull, send, ping

Each pass takes everything that arrived, puts it into one transaction of the store and awaits it once. Only
after that commit is anything remembered, released or told: duplicates, the chain of pushes, acknowledged
rows, ConversationsUpdated and then MessagesAdded. A commit that fails leaves no trace here: the connection is
dropped and the mailbox brings the same messages again.

A send is durable before its frame exists: `queue` awaits the store, `pump` sends later. After each login the
mailbox is drained first. Owned here: the chain, the outgoing rows, the open requests and who waits for an
acknowledgement. Full: above `PENDING_MAX` outgoing rows a send is refused before it is queued.
"""

import asyncio
import random
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final

from msgspec import Struct

from qim.client import recovery
from qim.client.account import Account
from qim.client.errors import (
    Disconnected,
    MessageRejected,
    RateLimited,
    SdkError,
    StoreUnavailable,
    Timeout,
    build_failure,
    error_name,
    is_final,
)
from qim.client.events import EventHub
from qim.client.model import (
    Ack,
    ConversationsUpdated,
    MessageAcknowledged,
    MessageFailed,
    MessagesAdded,
    MessageState,
    Target,
)
from qim.client.outgoing import ANSWER_SECONDS_MAX, Outgoing, PendingRow
from qim.client.received import Pass, read_frame
from qim.client.steps import Applied, Echo, Incoming
from qim.client.store import Store
from qim.client.sync import Chain, Pull, Pushed, Verdict
from qim.client.transport import PING_SECONDS, ConnectionEnded, Transport, read_goodbye
from qim.clock import Clock
from qim.errors import ClientError, Conflict, DeadlineExceeded, Unauthenticated
from qim.ids import ClientMessageId, ConversationId, DeviceId, MailboxSeq, Millis, Seq
from qim.limits import PAGE_ENTRIES_MAX, UNANSWERED_REQUESTS_MAX
from qim.records import Entry
from qim.wire.bodies import (
    AuthAck,
    Error,
    HistoryBatch,
    Ping,
    Pong,
    PullMailbox,
    SendAck,
    SendMessage,
    build_message,
)
from qim.wire.frames import Frame
from qim.wire.layout import Op

PENDING_MAX: Final = 4_096
RECENT_MAX: Final = 8_192
"""Stored messages whose second arrival (push, then page) is dropped without asking the store."""
PULL_RETRY_SECONDS: Final = 1.0
PING_SECONDS_MIN: Final = 0.2
"""However often a server asks for them: pings must not become a load."""
ASKED_MAX: Final = UNANSWERED_REQUESTS_MAX // 2
"""Open requests above which the application waits; the other half is for messages, pulls and pings."""
UNKNOWN_TEXT: Final = "sent long ago without an answer, and history cannot tell whether it arrived"

Coordinates = tuple[ConversationId, Seq]


class Work:
    """See the module docstring."""

    def __init__(
        self,
        account: Account,
        *,
        store: Store,
        events: EventHub,
        clock: Clock,
        jitter: random.Random,
        wake: asyncio.Event,
    ) -> None:
        self.device_id = DeviceId(b"")
        self.transport: Transport | None = None
        self.last_end = "not connected yet"
        self._account = account
        self._store = store
        self._events = events
        self._clock = clock
        self._jitter = jitter
        self._wake = wake
        self._chain = Chain(MailboxSeq(0))
        self._outgoing = Outgoing()
        self._queueing = 0
        """Messages on their way into the store; they will wait to be sent."""
        self._waiters: dict[ClientMessageId, asyncio.Future[Ack]] = {}
        self._open: dict[int, Pull | ClientMessageId | asyncio.Future[Any]] = {}
        self._recent: set[Coordinates] = set()
        self._recent_order: deque[Coordinates] = deque()
        self._late_echoes: dict[Echo, Pushed] = {}
        self._helpers: set[asyncio.Task[None]] = set()
        self._server_time: tuple[int, float] | None = None
        self._pull_sent_at: float | None = None
        self._pull_not_before = 0.0
        self._ping_seconds = PING_SECONDS
        self._next_ping_at = 0.0

    def describe_silence(self) -> str:
        """For who waited in vain: without a connection, its last reason is what has to be mended."""
        cause = "" if self.transport is not None else f" (not connected: {self.last_end})"
        return f"no acknowledgement in time; the message stays queued{cause}"

    # --- told by the engine

    async def load(self) -> None:
        loaded = await self._store.load(bound_device=self._account.bound_device)
        self.device_id = loaded.device_id
        self._chain = Chain(loaded.cursor)
        for row in loaded.pending:
            self._outgoing.add(row)

    def on_login(self, transport: Transport, ack: AuthAck) -> None:
        now = self._clock.monotonic()
        self.transport = transport
        self._server_time = (ack.server_time, now)
        # A server that wants to hear from us more often ends connections sooner, too.
        wanted = max(PING_SECONDS_MIN, ack.heartbeat_ms / 1000)
        self._ping_seconds = min(PING_SECONDS, wanted) if ack.heartbeat_ms else PING_SECONDS
        self._next_ping_at = now + self._ping_seconds
        self._pull_not_before = 0.0
        self._chain.on_login()

    def on_disconnected(self, reason: str) -> None:
        """Every open request has an unknown outcome; outgoing rows wait for the next login."""
        self.transport = None
        self.last_end = reason
        self._pull_sent_at = None
        self._chain.on_disconnected()
        self._outgoing.on_disconnected()
        self._late_echoes.clear()
        for helper in self._helpers:
            helper.cancel()
        for opened in self._open.values():
            if isinstance(opened, asyncio.Future) and not opened.done():
                opened.set_exception(Disconnected(reason))
        self._open.clear()

    def end_waiters(self, failure: SdkError) -> None:
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(failure)
                waiter.exception()  # a send whose caller went away must not complain at its end
        self._waiters.clear()

    # --- the application's requests

    async def queue(
        self, target: Target, *, message_type: int, custom_type: str, body: bytes, retention_class: int
    ) -> PendingRow:
        """Durable when it returns. Raises StoreError, and then nothing was queued and nothing is sent."""
        if self._outgoing.count + self._queueing >= PENDING_MAX:
            raise StoreUnavailable(f"{PENDING_MAX} messages wait to be sent; this one was not queued")
        queued = self._store.queue_message(
            target=target,
            message_type=message_type,
            custom_type=custom_type,
            body=body,
            retention_class=retention_class,
            device_id=self.device_id,
            first_sent_at=self._server_now() if self._may_leave_at_once else Millis(0),
        )
        self._queueing += 1
        queued.add_done_callback(self._on_queued)
        # A caller that gives up meanwhile changes nothing: what became durable goes out.
        return await asyncio.shield(queued)

    def _on_queued(self, queued: "asyncio.Future[PendingRow]") -> None:
        self._queueing -= 1
        if not queued.cancelled() and queued.exception() is None:
            self._outgoing.add(queued.result())
            self._wake.set()

    @property
    def _may_leave_at_once(self) -> bool:
        return self.transport is not None and self._chain.is_drained

    def acknowledgement(self, client_message_id: ClientMessageId) -> "asyncio.Future[Ack]":
        """Done by the acknowledgement or by the final error."""
        if client_message_id not in self._waiters:
            self._waiters[client_message_id] = asyncio.get_running_loop().create_future()
        return self._waiters[client_message_id]

    async def ask(self, op: int, body: Struct) -> Any:  # noqa: ANN401 - the reply's body, by opcode
        """One request that is not kept: Disconnected without a connection, Timeout without an answer."""
        transport = self.transport
        if transport is None or not transport.is_ready:
            raise Disconnected(self.last_end)
        if transport.connection.open_requests >= ASKED_MAX:
            raise RateLimited(1.0)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request_id = transport.request(op, body)
        self._open[request_id] = answer
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                return await answer
        except TimeoutError as error:
            raise Timeout("no answer in time; the outcome is unknown") from error
        finally:
            self._open.pop(request_id, None)
            transport.connection.forget(request_id)

    def tell(self, applied: Applied) -> None:
        """After a commit: memory first, then waiters, then events, conversations before messages."""
        for message in applied.added:
            self._remember((message.conversation_id, message.conversation_seq))
        for ack, _ in applied.acknowledged:
            self._settle(ack)
        if applied.conversations:
            self._events.emit(ConversationsUpdated(tuple(applied.conversations)))
        if applied.added:
            self._events.emit(MessagesAdded(tuple(applied.added)))
        for ack, message in applied.acknowledged:
            self._events.emit(MessageAcknowledged(ack, message))

    # --- in

    async def receive(self, frames: list[Frame]) -> None:
        """One pass. Raises ConnectionEnded, or StoreError when something could not be stored."""
        now = self._clock.monotonic()
        got = Pass()
        try:
            for frame in frames:
                read_frame(frame, got, self._account.user)
        except ClientError as error:
            # What the server sent is not the protocol: nothing of this pass is taken.
            raise ConnectionEnded(f"unreadable from the server: {error.text}", code=4001) from error
        await self._commit(got, now=now)
        for request_id, body in got.answers:
            self._answer(request_id, body)
        for request_id, error_body in got.errors:
            await self._on_error(request_id, error_body, now=now)
        for request_id in got.pings:
            self._write(build_message(Op.PONG, request_id, Pong(self._server_now())))
        if got.newest:
            self._chain.on_newest(got.newest)
        if got.goaway is not None:
            raise read_goodbye(got.goaway)

    async def _commit(self, got: Pass, *, now: float) -> None:
        got.incoming.messages = [
            m for m in got.incoming.messages if not self._is_recent(m.conversation_id, m.conversation_seq)
        ]
        if got.incoming.messages or got.incoming.acks or got.incoming.echoes or got.page is not None:
            applied = await self._store.apply(got.incoming)
            self.tell(applied)
            self._after_commit(got, applied, now=now)
        if got.read_marks:
            changed = await self._store.set_read(got.read_marks)
            if changed:
                self._events.emit(ConversationsUpdated(tuple(changed)))

    def _after_commit(self, got: Pass, applied: Applied, *, now: float) -> None:
        for request_id, ack in zip(got.acks, got.incoming.acks, strict=True):
            self._open.pop(request_id, None)
            # The row may be gone already: its own message came by a page first.
            self._settle(_ack_of(ack))
        pushes = [self._judge_push(push, echo, applied) for push, echo in got.pushes]
        pushes += self._held_now(got.incoming.acks)
        self._chain.on_pushes(pushes, now=now)
        if got.page is not None:
            self._pull_sent_at = None
            if got.page.rebuild:
                self._help(self._rebuild(got.page.covered_through))
            else:
                self._chain.on_page(
                    covered_through=got.page.covered_through,
                    more=got.page.more,
                    entries=len(got.page.entries),
                    now=now,
                )

    def _judge_push(self, push: Pushed, echo: Echo | None, applied: Applied) -> Pushed:
        if echo is None or echo not in applied.missing_echoes:
            return push
        self._late_echoes[echo] = push
        return push._replace(is_held=False)

    def _held_now(self, acks: list[SendAck]) -> list[Pushed]:
        """Echoes that came before the acknowledgement of their message."""
        if not self._late_echoes:
            return []
        found = (self._late_echoes.pop(Echo(ack.conversation_id, ack.conversation_seq), None) for ack in acks)
        return [push for push in found if push is not None]

    def _answer(self, request_id: int, body: object) -> None:
        opened = self._open.pop(request_id, None)
        if isinstance(opened, asyncio.Future) and not opened.done():
            opened.set_result(body)

    async def _on_error(self, request_id: int, body: Error, *, now: float) -> None:
        opened = self._open.pop(request_id, None)
        if body.code == Unauthenticated.code or body.code >= 3000:
            # About the connection, not about the request: rows stay, the code decides what follows.
            raise ConnectionEnded(
                f"{error_name(body.code)}: {body.text}",
                code=body.code,
                reconnect_after_ms=body.retry_after_ms,
            )
        if isinstance(opened, Pull):
            self._pull_sent_at = None
            self._chain.on_pull_refused()
            self._pull_not_before = now + max(body.retry_after_ms / 1000, PULL_RETRY_SECONDS)
        elif isinstance(opened, asyncio.Future):
            if not opened.done():
                opened.set_exception(build_failure(body.code, body.text, body.retry_after_ms))
        elif opened is not None:
            await self._on_send_error(opened, body, now=now)

    async def _on_send_error(self, client_message_id: ClientMessageId, body: Error, *, now: float) -> None:
        if not is_final(body.code):
            self._outgoing.on_retryable(
                client_message_id, retry_after_ms=body.retry_after_ms, now=now, jitter=self._jitter.random()
            )
            return
        failure = MessageRejected(f"{error_name(body.code)}: {body.text}", code=body.code)
        await self._fail(client_message_id, MessageState.FAILED, failure)
        if body.code == Conflict.code:
            # Another copy of this store used our identities: this one is shown as failed, never renumbered;
            # later messages get identities that nobody else can have.
            is_bound = self._account.bound_device is not None
            self.device_id = await self._store.renew_identity(is_device_bound=is_bound)

    async def _fail(
        self, client_message_id: ClientMessageId, state: MessageState, failure: MessageRejected
    ) -> None:
        message = await self._store.end_pending(
            client_message_id, state=state, failure=str(failure), code=failure.code
        )
        self._outgoing.remove(client_message_id)
        waiter = self._waiters.pop(client_message_id, None)
        if waiter is not None and not waiter.done():
            waiter.set_exception(failure)
            waiter.exception()
        if message is not None:
            self._events.emit(MessageFailed(message))

    def _settle(self, ack: Ack) -> None:
        self._outgoing.remove(ack.client_message_id)
        waiter = self._waiters.pop(ack.client_message_id, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(ack)

    def _remember(self, coordinates: Coordinates) -> None:
        self._recent.add(coordinates)
        self._recent_order.append(coordinates)
        if len(self._recent_order) > RECENT_MAX:
            self._recent.discard(self._recent_order.popleft())

    def _is_recent(self, conversation_id: ConversationId, seq: Seq) -> bool:
        return (conversation_id, seq) in self._recent

    # --- out

    async def pump(self) -> None:
        """Everything that is due goes out: a ping, a pull, outgoing messages."""
        transport = self.transport
        if transport is None or not transport.is_ready:
            return
        now = self._clock.monotonic()
        if now >= self._next_ping_at:
            self._next_ping_at = now + self._ping_seconds
            transport.request(Op.PING, Ping(self._server_now()))
        if self._pull_sent_at is not None and now - self._pull_sent_at >= ANSWER_SECONDS_MAX:
            raise ConnectionEnded("the server does not answer a pull")
        if now >= self._pull_not_before and (pull := self._chain.take_pull(now)) is not None:
            body = PullMailbox(pull.after, PAGE_ENTRIES_MAX, pull.held_through, pull.held_count)
            self._open[transport.request(Op.PULL_MAILBOX, body)] = pull
            self._pull_sent_at = now
        await self._pump_sends(transport, now=now)

    async def _pump_sends(self, transport: Transport, *, now: float) -> None:
        server_now = self._server_now()
        sends, checks = self._outgoing.take_sends(
            now=now, server_now=server_now, is_drained=self._chain.is_drained
        )
        first_time = [row for row in sends if row.first_sent_at == server_now]
        if first_time:
            # The time of the first frame is durable before that frame: the age rule depends on it.
            await self._store.mark_sent(first_time)
            if not transport.is_ready:
                return  # it ended meanwhile: the rows wait for the next login
        for row in sends:
            body = SendMessage(
                recovery.wire_target(row.target), row.client_message_id, row.message_type, row.custom_type,
                row.body, row.retention_class,
            )  # fmt: skip
            self._open[transport.request(Op.SEND_MESSAGE, body)] = row.client_message_id
        if checks:
            self._help(self._check(checks))

    def next_deadline(self) -> float:
        deadlines = [
            self._next_ping_at,
            self._pull_sent_at + ANSWER_SECONDS_MAX if self._pull_sent_at is not None else None,
            self._outgoing.next_deadline(is_drained=self._chain.is_drained),
        ]
        pull_at = self._chain.next_deadline()
        if pull_at is not None:
            deadlines.append(max(pull_at, self._pull_not_before))
        return min(deadline for deadline in deadlines if deadline is not None)

    def _write(self, frame: bytes) -> None:
        if self.transport is not None:
            self.transport.write(frame)

    def _server_now(self) -> Millis:
        """0 before the first login of this process: then nothing is known of the server's time."""
        if self._server_time is None:
            return Millis(0)
        at_login, login = self._server_time
        return Millis(at_login + int((self._clock.monotonic() - login) * 1000))

    # --- what takes several requests

    def _help(self, work: Coroutine[Any, Any, None]) -> None:
        helper: asyncio.Task[None] = asyncio.create_task(self._guarded(work))
        self._helpers.add(helper)
        helper.add_done_callback(self._helpers.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        transport = self.transport
        try:
            await work
        except (SdkError, ClientError) as error:
            # The next login begins this anew; until then it has changed nothing.
            if transport is not None:
                transport.abort(str(error))
        finally:
            self._wake.set()

    async def _rebuild(self, cursor: MailboxSeq) -> None:
        items = await recovery.list_for_rebuild(self.ask, await self._store.conversations())
        self.tell(await self._store.rebuild(cursor=cursor, items=items))
        self._chain.on_rebuilt(cursor)

    async def _check(self, rows: list[PendingRow]) -> None:
        """One after the other: these are few and old."""
        for row in rows:
            server_now = self._server_now()
            verdict, found = await recovery.search_history(
                self.ask, row, tenant=self._account.tenant, me=self._account.user, server_now=server_now
            )
            if found is not None and verdict is Verdict.FOUND:
                await self._acknowledge_found(row, *found)
            elif verdict is Verdict.ABSENT:
                await self._store.mark_sent([row._replace(first_sent_at=server_now)])
                self._outgoing.on_absent(row.client_message_id, server_now=server_now)
                self._wake.set()
            elif verdict is Verdict.OTHER_CONTENT:
                failure = MessageRejected("another message has this identity", code=Conflict.code)
                await self._fail(row.client_message_id, MessageState.FAILED, failure)
            else:
                failure = MessageRejected(UNKNOWN_TEXT, code=DeadlineExceeded.code)
                await self._fail(row.client_message_id, MessageState.UNKNOWN, failure)

    async def _acknowledge_found(self, row: PendingRow, page: HistoryBatch, entry: Entry) -> None:
        record = entry.record
        ack = SendAck(
            row.client_message_id, page.conversation_id, entry.conversation_seq, record.message_id,
            record.reserved_at, duplicate=True,
        )  # fmt: skip
        applied = await self._store.apply(Incoming(acks=[ack]))
        self.tell(applied)
        self._settle(_ack_of(ack))


def _ack_of(ack: SendAck) -> Ack:
    return Ack(
        client_message_id=ack.client_message_id, conversation_id=ack.conversation_id,
        conversation_seq=ack.conversation_seq, message_id=ack.message_id, reserved_at=ack.reserved_at,
        duplicate=ack.duplicate,
    )  # fmt: skip

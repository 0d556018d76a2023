"""What an application holds of the SDK: `AsyncClient`. `Client` in `blocking.py` is the same without async.

    async with AsyncClient("chat.example:7443", token, ca="ca.pem") as client:
        ack = await client.send(peer, "hello")
        async for event in client.events():
            ...

What is sent is durable here before it leaves, goes out again after every loss under the same identity, and
ends as acknowledged or as failed, never silently. What is received is in the local store before an event
tells of it. Everything works without a connection that does not need one: reading the store, and queueing.

A device that is new, or was away for longer than the mailbox keeps, rebuilds: `recovery.py` says how. Where
the server has no SESSION_LIST yet (it answers UNSUPPORTED), the rebuild takes the server's watermark as its
cursor and notes a gap for every conversation that this store knows; opening a conversation fills its gaps. A
conversation that only the list could name stays unknown until its next message, and is whole from then on.

The client belongs to the event loop in which it was entered.
"""

import asyncio
import random
from collections.abc import AsyncGenerator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from qim.client import recovery
from qim.client.account import Secret, default_data_dir, parse_endpoint, read_account, store_path
from qim.client.engine import Engine, Identity
from qim.client.errors import MessageRejected, SdkError, Timeout
from qim.client.model import (
    Ack,
    Conversation,
    ConversationsUpdated,
    Event,
    HistoryPage,
    Message,
    Target,
    as_target,
)
from qim.client.outgoing import PendingRow
from qim.client.received import read_history
from qim.client.store import Store
from qim.client.sync import Gap
from qim.client.transport import build_tls_context
from qim.clock import Clock, SystemClock
from qim.errors import InvalidArgument, TooLarge
from qim.ids import ClientMessageId, Seq, UserId
from qim.limits import CUSTOM_TYPE_BYTES_MAX, MESSAGE_BODY_BYTES_MAX, PAGE_ENTRIES_MAX
from qim.records import MessageType, RetentionClass
from qim.wire.bodies import HistoryBatch, MarkRead, MarkReadAck, PullHistory
from qim.wire.layout import Op

SEND_SECONDS: Final = 30.0
"""How long `send` waits for its acknowledgement; the message stays queued afterwards."""
GAP_PAGES_MAX: Final = 8
"""History pages that one opening of a conversation fetches; the next opening goes on."""
CLIENT_NAME: Final = "qim-python"
CLIENT_VERSION: Final = "0.1"
ENTERED_TWICE: Final = "a client is entered once, and this one was; make a new one, it finds the same store"
AnyTarget = Target | bytes | str


class AsyncClient:
    """One account on this device. Raises AuthError on entering when the server refuses the token.

    One client is connected per account and data directory: a second one logs in as the same device and
    replaces the first, which then ends with AuthError. Other processes may read the same store meanwhile.
    """

    def __init__(
        self,
        endpoint: str,
        token: str,
        *,
        data_dir: str | Path | None = None,
        ca: str | Path | None = None,
        server_name: str | None = None,
        client_name: str = CLIENT_NAME,
        clock: Clock | None = None,
    ) -> None:
        self._endpoint = parse_endpoint(endpoint)
        self._token = Secret(token)
        self._account = read_account(self._token)
        self._tls = build_tls_context(ca)
        self._server_name = server_name
        self._client_name = client_name
        self._clock = clock or SystemClock()
        self._jitter = random.SystemRandom()
        self.store_path = store_path(
            Path(data_dir) if data_dir else default_data_dir(), self._endpoint, self._account
        )
        self._engine: Engine | None = None

    def __repr__(self) -> str:
        return f"AsyncClient({self._endpoint.canonical()}, user={self._account.user.hex()})"

    async def __aenter__(self) -> Self:
        """Opens the store and tries to connect once; without a network it goes on trying by itself."""
        if self._engine is not None:
            raise RuntimeError(ENTERED_TWICE)
        store, rebuilt = await Store.open(self.store_path, me=self._account.user, clock=self._clock)
        identity = Identity(
            self._endpoint, self._server_name, self._account, self._client_name, CLIENT_VERSION
        )
        engine = Engine(
            identity, self._token, store=store, tls=self._tls, clock=self._clock, jitter=self._jitter
        )
        self._engine = engine
        try:
            if rebuilt is not None:
                engine.events.emit(rebuilt)
            await engine.start()
            engine.check_alive()
        except BaseException:
            await engine.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._running.close()

    @property
    def user(self) -> UserId:
        return self._account.user

    @property
    def is_connected(self) -> bool:
        return self._running.work.transport is not None

    async def wait_connected(self, timeout: float = 10.0) -> None:
        """Raises Disconnected with the last reason when there is no login in time, or AuthError."""
        await self._running.wait_ready(timeout)

    # --- sending

    async def send(
        self,
        target: AnyTarget,
        body: str | bytes,
        *,
        message_type: int | None = None,
        custom_type: str = "",
        retention_class: int = RetentionClass.DEFAULT,
        timeout: float | None = SEND_SECONDS,
    ) -> Ack:
        """Sends text or bytes and waits for the acknowledgement.

        Text is TEXT, bytes are CUSTOM unless said otherwise. Raises MessageRejected for a final no (locally
        too: too long, not UTF-8), StoreError when it could not be made durable, and then it is not sent.
        Timeout means unknown: it stays queued and goes out again under the same identity. While the server
        asks for patience the SDK waits by itself, within the same time.
        """
        row = await self._queue(target, body, message_type, custom_type, retention_class)
        waiter = self._running.work.acknowledgement(row.client_message_id)
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(waiter)
        except TimeoutError as error:
            raise Timeout(self._running.work.describe_silence()) from error

    async def queue(
        self,
        target: AnyTarget,
        body: str | bytes,
        *,
        message_type: int | None = None,
        custom_type: str = "",
        retention_class: int = RetentionClass.DEFAULT,
    ) -> ClientMessageId:
        """Like `send`, but returns once the message is durable here. Events tell what becomes of it."""
        row = await self._queue(target, body, message_type, custom_type, retention_class)
        return row.client_message_id

    async def discard(self, client_message_id: ClientMessageId) -> bool:
        """Removes a failed or unknown message from the store; a queued one cannot be taken back."""
        return await self._running.store.discard(client_message_id)

    async def _queue(
        self, target: AnyTarget, body: str | bytes, message_type: int | None, custom_type: str, retention: int
    ) -> PendingRow:
        engine = self._running
        engine.check_alive()
        kind = message_type or (MessageType.TEXT if isinstance(body, str) else MessageType.CUSTOM)
        raw = check_content(body, kind, custom_type)
        if retention not in RetentionClass.__members__.values():
            raise MessageRejected(f"no retention class {retention}", code=InvalidArgument.code)
        return await engine.work.queue(
            as_target(target), message_type=kind, custom_type=custom_type, body=raw, retention_class=retention
        )

    # --- reading

    def events(self) -> AsyncGenerator[Event, None]:
        """Every call is a reader of its own; the first one also gets what happened before it.

        Ends when the client is closed; raises what ended the client, AuthError for example.
        """
        return self._running.events.read()

    async def conversations(self) -> list[Conversation]:
        """The most recent first, from the local store."""
        return await self._running.store.conversations()

    async def messages(self, target: AnyTarget, *, before: int = 0, limit: int = 50) -> list[Message]:
        """Opens a conversation: fills its known gaps if there is a connection, then reads the store.

        Oldest first; unacknowledged messages stand at the end. A hole in the sequence is not an error. Raises
        ValueError for a limit below 1.
        """
        _check_limit(limit)
        named = as_target(target)
        if self.is_connected:
            await self._fill_gaps(named)
        return await self._running.store.messages(named, before=Seq(before), limit=limit)

    async def history(self, target: AnyTarget, *, before: int = 0, limit: int = 50) -> HistoryPage:
        """A page of the server's history before a sequence (0: the newest), stored here as well.

        A page has at most 300 messages, whatever `limit` asks for. Raises ValueError for a limit below 1,
        Disconnected, RateLimited, MessageRejected or Timeout.
        """
        _check_limit(limit)
        return await self._pull(as_target(target), before=Seq(before), limit=min(limit, PAGE_ENTRIES_MAX))

    async def mark_read(self, target: AnyTarget, read_seq: int) -> int:
        """Tells the server that everything up to `read_seq` is read; returns the unread count of the server.

        The server keeps the highest for all devices of the user. Another device learns of it from its next
        `mark_read` only; `read_seq=0` asks without marking anything.
        """
        engine = self._running
        answer: MarkReadAck = await engine.work.ask(
            Op.MARK_READ, MarkRead(recovery.wire_target(as_target(target)), Seq(read_seq))
        )
        changed = await engine.store.set_read([(answer.conversation_id, answer.read_seq)])
        if changed:
            engine.events.emit(ConversationsUpdated(tuple(changed)))
        return answer.unread

    def renew_token(self, token: str) -> None:
        """A fresh token of the same account: renews the connection and serves the next logins."""
        secret = Secret(token)
        renewed = read_account(secret)
        if renewed != self._account:
            raise ValueError("the token belongs to another account or device; open another client for it")
        self._token = secret
        self._running.replace_token(secret)

    async def _fill_gaps(self, target: Target) -> None:
        try:
            for _ in range(GAP_PAGES_MAX):
                gaps = await self._running.store.gaps(target)
                if not gaps:
                    return
                await self._pull(target, before=Seq(gaps[0].head_seq + 1), limit=PAGE_ENTRIES_MAX)
        except SdkError:
            # What is here can be shown; the gap row stays and the next opening tries again.
            self._running.check_alive()

    async def _pull(self, target: Target, *, before: Seq, limit: int) -> HistoryPage:
        engine = self._running
        request = PullHistory(recovery.wire_target(target), before_seq=before, limit=limit)
        page: HistoryBatch = await engine.work.ask(Op.PULL_HISTORY, request)
        messages = read_history(page, self._account.user)
        applied = await engine.store.apply_history(
            target=target, conversation_id=page.conversation_id, messages=messages,
            page=answered_range(page, messages, before=before),
        )  # fmt: skip
        engine.work.tell(applied)
        return HistoryPage(
            messages=tuple(messages), earliest_available_seq=page.earliest_available_seq,
            head_seq=page.head_seq, more=page.more,
        )  # fmt: skip

    @property
    def _running(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the client is used inside `with` or `async with`")
        return self._engine


def _check_limit(limit: int) -> None:
    """On the wire 0 means "as many as possible" and SQLite reads -1 so: neither is what was asked for."""
    if limit < 1:
        raise ValueError(f"limit is at least 1, not {limit}")


def answered_range(page: HistoryBatch, messages: list[Message], *, before: Seq) -> Gap | None:
    """Which sequences the page speaks for; the last page speaks for everything below it too."""
    last = Seq(before - 1) if before else page.head_seq
    if not page.more:
        return Gap(Seq(0), last)
    return Gap(Seq(messages[0].conversation_seq - 1), last) if messages else None


def check_content(body: str | bytes, message_type: int, custom_type: str) -> bytes:
    """The bytes to send. Raises MessageRejected for what the server would refuse; nothing is stored then."""
    if not isinstance(body, str | bytes | bytearray | memoryview):
        # bytes(5) would be five zeros, sent without a word.
        raise TypeError(f"a body is str or bytes, not {type(body).__name__}")
    try:
        raw = body.encode() if isinstance(body, str) else bytes(body)
        if message_type == MessageType.TEXT and not isinstance(body, str):
            raw.decode()
        custom = custom_type.encode()
    except UnicodeError:
        raise MessageRejected("text must be valid Unicode in UTF-8", code=InvalidArgument.code) from None
    if len(raw) > MESSAGE_BODY_BYTES_MAX:
        raise MessageRejected(
            f"the body has {len(raw)} bytes, at most {MESSAGE_BODY_BYTES_MAX} are possible",
            code=TooLarge.code,
        )
    if len(custom) > CUSTOM_TYPE_BYTES_MAX:
        raise MessageRejected(
            f"custom_type has {len(custom)} bytes, at most {CUSTOM_TYPE_BYTES_MAX} are possible",
            code=TooLarge.code,
        )
    if message_type not in {MessageType.TEXT, MessageType.CUSTOM, MessageType.MEDIA_REF}:
        raise MessageRejected("message_type must be TEXT, CUSTOM or MEDIA_REF", code=InvalidArgument.code)
    return raw

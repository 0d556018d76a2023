"""The local store: one writer thread that runs everything that waits as one transaction.

A step is a small function over the connection. The thread takes all steps that came since its last pass,
runs them between one BEGIN IMMEDIATE and one COMMIT, and only then reports their results, with one wake-up of
the event loop per transaction. So a thousand messages a second cost a few dozen commits, and a result that
was seen is durable. When a commit fails every step of it fails and nothing of it was written.

- The application never sees "locked": the thread waits, up to `BUSY_SECONDS_MAX`, then the step fails with a
  sentence that says who is in the way.
- The cursor moves in the transaction that stores the page, or in that of a rebuild, nowhere else.
- Ordinals are taken from blocks; a block is reserved in a transaction of its own under BEGIN IMMEDIATE before
  the first of its ordinals is used. What a crash or a rollback leaves over is never used.
- Full: above `STEPS_WAITING_MAX` a step is refused before it is queued.
- Damage that is found while open ends the store: every later step fails, the next opening mends the file.

The thread owns the connection. Steps read and write through `StoreSteps`, which knows the tables.
"""

import asyncio
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from qim.client import schema
from qim.client.account import client_message_id
from qim.client.errors import StoreDamaged, StoreError, StoreUnavailable
from qim.client.model import (
    Conversation,
    Message,
    MessageState,
    StoreRebuilt,
    Target,
)
from qim.client.outgoing import PendingRow
from qim.client.steps import Applied, Incoming, Loaded, RebuildItem, StoreSteps
from qim.client.sync import Gap
from qim.clock import Clock
from qim.ids import ClientMessageId, ConversationId, DeviceId, MailboxSeq, Millis, Seq, UserId

BUSY_SECONDS_MAX: Final = 60.0
"""Six waits of SQLite itself; a backup or another process of the same account is done by then."""
STEPS_WAITING_MAX: Final = 10_000
STEPS_PER_TRANSACTION_MAX: Final = 512
"""Bounds how long the first step of a transaction waits for the last."""
ORDINAL_BLOCK: Final = 64

T = TypeVar("T")


class _Step(Generic[T]):
    __slots__ = ("error", "future", "is_last", "ordinals", "result", "run")

    def __init__(
        self, run: Callable[[StoreSteps], T], future: "asyncio.Future[T]", ordinals: int, *, is_last: bool
    ) -> None:
        self.run = run
        self.future = future
        self.ordinals = ordinals
        self.is_last = is_last
        """Ends its transaction: what comes behind it counts on what it has committed."""
        self.result: T | None = None
        self.error: BaseException | None = None

    def report(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)  # type: ignore[arg-type]  # T itself may be optional


class Store:
    """One account's file. Made by `Store.open`; every method is one step."""

    def __init__(self, path: Path, *, me: UserId, clock: Clock) -> None:
        self.path = path
        self._me = me
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Step[Any]] = deque()
        self._wake = threading.Condition()
        self._is_closing = False
        self._damage: StoreDamaged | None = None
        self._ordinals: deque[int] = deque()
        self._opened: asyncio.Future[StoreRebuilt | None] = self._loop.create_future()
        self._closed: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def open(cls, path: Path, *, me: UserId, clock: Clock) -> tuple["Store", StoreRebuilt | None]:
        """Opens the file, mending it if needed. Raises StoreUnavailable with the reason."""
        store = cls(path, me=me, clock=clock)
        threading.Thread(target=store._run, name="qim-store", daemon=True).start()
        return store, await store._opened

    async def close(self) -> None:
        """Runs what waits, then closes; the file has no log beside it afterwards."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        await asyncio.shield(self._closed)

    # --- steps

    async def load(self, *, bound_device: DeviceId | None) -> Loaded:
        return await self._step(lambda steps: steps.load(bound_device))

    def queue_message(
        self,
        *,
        target: Target,
        message_type: int,
        custom_type: str,
        body: bytes,
        retention_class: int,
        device_id: DeviceId,
        first_sent_at: Millis,
    ) -> "asyncio.Future[PendingRow]":
        """The message is durable when this is done; its identity is never used again."""

        def run(steps: StoreSteps) -> PendingRow:
            ordinal = self._ordinals.popleft()
            row = PendingRow(
                ordinal, client_message_id(device_id, ordinal), target, message_type, custom_type, body,
                retention_class, first_sent_at,
            )  # fmt: skip
            steps.insert_pending(row)
            return row

        return self._step(run, ordinals=1)

    async def mark_sent(self, rows: Sequence[PendingRow]) -> None:
        """Notes when the first frame of each row leaves, before it leaves."""
        await self._step(lambda steps: steps.mark_sent(rows))

    async def apply(self, incoming: Incoming) -> Applied:
        """Everything of one pass in one transaction: pushes, acknowledgements, a page with its cursor."""
        return await self._step(lambda steps: steps.apply(incoming))

    async def apply_history(
        self,
        *,
        target: Target,
        conversation_id: ConversationId,
        messages: Sequence[Message],
        page: Gap | None,
    ) -> Applied:
        """A page of history and the gap that it fills, in one transaction."""
        return await self._step(lambda steps: steps.apply_history(target, conversation_id, messages, page))

    async def rebuild(self, *, cursor: MailboxSeq, items: Sequence[RebuildItem]) -> Applied:
        """The cursor of a rebuild and its gap rows, in one transaction."""
        return await self._step(lambda steps: steps.rebuild(cursor, items))

    async def end_pending(
        self, client_message_id: ClientMessageId, *, state: MessageState, failure: str, code: int
    ) -> Message | None:
        """Keeps the row as failed or unknown, so that it can be shown."""
        return await self._step(lambda steps: steps.end_pending(client_message_id, state, failure, code))

    async def discard(self, client_message_id: ClientMessageId) -> bool:
        """Removes a failed or unknown message; a queued one stays."""
        return await self._step(lambda steps: steps.discard(client_message_id))

    async def set_read(self, marks: Sequence[tuple[ConversationId, Seq]]) -> list[Conversation]:
        return await self._step(lambda steps: steps.set_read(marks))

    async def conversations(self) -> list[Conversation]:
        return await self._step(lambda steps: steps.conversations())

    async def messages(self, target: Target, *, before: Seq, limit: int) -> list[Message]:
        return await self._step(lambda steps: steps.messages(target, before, limit))

    async def gaps(self, target: Target) -> list[Gap]:
        return await self._step(lambda steps: steps.gaps(target))

    async def next_login(self) -> Millis:
        """The time that the next AUTH tells."""
        now_ms = self._clock.now_ms()
        return await self._step(lambda steps: steps.next_login(now_ms))

    async def renew_identity(self, *, is_device_bound: bool) -> DeviceId:
        """Another copy of this file used our ordinals: a new counter, and a new device where that is free."""

        def run(steps: StoreSteps) -> DeviceId:
            self._ordinals.clear()
            return steps.renew_identity(is_device_bound)

        # A message queued behind it needs an ordinal of the new counter, which is reserved between the two.
        return await self._step(run, is_last=True)

    def _step(
        self, run: Callable[[StoreSteps], T], *, ordinals: int = 0, is_last: bool = False
    ) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = self._loop.create_future()
        with self._wake:
            if self._is_closing:
                raise StoreUnavailable(f"local store {self.path} is closed")
            if len(self._waiting) >= STEPS_WAITING_MAX:
                raise StoreUnavailable(
                    f"local store {self.path}: {STEPS_WAITING_MAX} steps wait for the disk"
                )
            self._waiting.append(_Step(run, future, ordinals, is_last=is_last))
            self._wake.notify()
        return future

    # --- the writer thread

    def _run(self) -> None:
        try:
            connection, rebuilt = schema.open_store(self.path)
        except StoreError as error:
            self._tell(self._opened.set_exception, error)
            return
        event = rebuilt and StoreRebuilt(str(rebuilt.set_aside), len(rebuilt.rows), rebuilt.complete)
        self._tell(self._opened.set_result, event)
        while (batch := self._take()) is not None:
            self._run_transaction(connection, batch)
            self._tell(_report, batch)
        with suppress(sqlite3.Error):
            connection.close()
        if self._damage:
            schema.mark_damaged(self.path)
        self._tell(self._closed.set_result, None)

    def _tell(self, call: Callable[[Any], None], argument: object) -> None:
        # A loop that is gone has nobody left to tell; the thread still closes its file.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, argument)

    def _take(self) -> list[_Step[Any]] | None:
        with self._wake:
            while not self._waiting and not self._is_closing:
                self._wake.wait()
            if not self._waiting:
                return None
            batch: list[_Step[Any]] = []
            while self._waiting and len(batch) < STEPS_PER_TRANSACTION_MAX:
                batch.append(self._waiting.popleft())
                if batch[-1].is_last:
                    break
            return batch

    def _run_transaction(self, connection: sqlite3.Connection, batch: list[_Step[Any]]) -> None:
        error: BaseException | None = self._damage
        if error is None:
            try:
                self._reserve_ordinals(connection, sum(step.ordinals for step in batch))
                self._begin(connection)
                steps = StoreSteps(connection, self._me)
                for step in batch:
                    step.result = step.run(steps)
                connection.execute("COMMIT")
            except Exception as raised:  # noqa: BLE001 - the top of this thread; a step that waits must hear of it
                error = self._translate(raised)
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
        for step in batch:
            step.error = error

    def _reserve_ordinals(self, connection: sqlite3.Connection, count: int) -> None:
        if len(self._ordinals) >= count:
            return
        block = max(ORDINAL_BLOCK, count)
        self._begin(connection)
        first = StoreSteps(connection, self._me).reserve_ordinals(block)
        connection.execute("COMMIT")
        # Only a committed block is used; a new one replaces the rest of the old.
        self._ordinals = deque(range(first, first + block))

    def _begin(self, connection: sqlite3.Connection) -> None:
        deadline = self._clock.monotonic() + BUSY_SECONDS_MAX
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not is_busy or self._clock.monotonic() >= deadline:
                    raise

    def _translate(self, error: Exception) -> BaseException:
        if not isinstance(error, sqlite3.Error):
            return error
        text = schema.explain(error, self.path)
        if schema.is_damage(error):
            self._damage = StoreDamaged(f"{text}; open it again to have it set aside and rebuilt")
            return self._damage
        return StoreUnavailable(text)


def _report(batch: list[_Step[Any]]) -> None:
    for step in batch:
        step.report()

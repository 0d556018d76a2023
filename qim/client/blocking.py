"""`Client`: the same surface as `AsyncClient` for programs without an event loop.

One daemon thread runs the loop; every method hands its coroutine over and waits, and may be called from
several threads. Nothing is decided here. The thread ends with the `with` block; a program that is killed
instead loses nothing, because everything that matters was committed before it was told.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from qim.client.client import ENTERED_TWICE, SEND_SECONDS, AnyTarget, AsyncClient
from qim.client.model import Ack, Conversation, Event, HistoryPage, Message
from qim.clock import Clock
from qim.ids import ClientMessageId, UserId
from qim.records import RetentionClass

T = TypeVar("T")


class Client:
    """One account on this device; methods block the calling thread.

    Each method does what the method of `AsyncClient` of the same name says, and raises the same. Another
    device of the same user on one machine is another `data_dir`.
    """

    def __init__(
        self,
        endpoint: str,
        token: str,
        *,
        data_dir: str | Path | None = None,
        ca: str | Path | None = None,
        server_name: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._client = AsyncClient(
            endpoint, token, data_dir=data_dir, ca=ca, server_name=server_name, clock=clock
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="qim-client", daemon=True)

    def __repr__(self) -> str:
        return repr(self._client).removeprefix("Async")

    def __enter__(self) -> Self:
        if self._thread.ident is not None:
            raise RuntimeError(ENTERED_TWICE)
        self._thread.start()
        try:
            self._call(self._client.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._call(self._client.__aexit__(kind, error, trace))
        finally:
            self._stop()

    @property
    def user(self) -> UserId:
        return self._client.user

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    def wait_connected(self, timeout: float = 10.0) -> None:
        self._call(self._client.wait_connected(timeout))

    def send(
        self,
        target: AnyTarget,
        body: str | bytes,
        *,
        message_type: int | None = None,
        custom_type: str = "",
        retention_class: int = RetentionClass.DEFAULT,
        timeout: float | None = SEND_SECONDS,
    ) -> Ack:
        return self._call(
            self._client.send(
                target, body, message_type=message_type, custom_type=custom_type,
                retention_class=retention_class, timeout=timeout,
            )
        )  # fmt: skip

    def queue(
        self,
        target: AnyTarget,
        body: str | bytes,
        *,
        message_type: int | None = None,
        custom_type: str = "",
        retention_class: int = RetentionClass.DEFAULT,
    ) -> ClientMessageId:
        return self._call(
            self._client.queue(
                target,
                body,
                message_type=message_type,
                custom_type=custom_type,
                retention_class=retention_class,
            )
        )

    def discard(self, client_message_id: ClientMessageId) -> bool:
        return self._call(self._client.discard(client_message_id))

    def events(self) -> Iterator[Event]:
        """Blocks for the next event; ends when the client is closed by another thread."""
        stream = self._client.events()
        try:
            while True:
                event = self._call(_next(stream))
                if event is None:
                    return
                yield event
        finally:
            if self._loop.is_running():
                self._call(stream.aclose())

    def conversations(self) -> list[Conversation]:
        return self._call(self._client.conversations())

    def messages(self, target: AnyTarget, *, before: int = 0, limit: int = 50) -> list[Message]:
        return self._call(self._client.messages(target, before=before, limit=limit))

    def history(self, target: AnyTarget, *, before: int = 0, limit: int = 50) -> HistoryPage:
        return self._call(self._client.history(target, before=before, limit=limit))

    def mark_read(self, target: AnyTarget, read_seq: int) -> int:
        return self._call(self._client.mark_read(target, read_seq))

    def renew_token(self, token: str) -> None:
        async def renew() -> None:
            self._client.renew_token(token)

        self._call(renew())

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            # Nobody would run it: the caller would wait for ever.
            coroutine.close()
            raise RuntimeError("the client is used inside `with`; it is not entered or already closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C in the waiting thread: the work in the loop ends too.
            future.cancel()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(stream: Any) -> Event | None:  # noqa: ANN401 - an async generator of events
    event: Event | None = await anext(stream, None)
    return event

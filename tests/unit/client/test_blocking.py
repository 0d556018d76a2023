"""`Client`, the face without async, against the same fake server; and the bounded stream of events."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from qim.client import (
    AuthError,
    Client,
    Connected,
    EventsDropped,
    MessageRejected,
    MessagesAdded,
    RateLimited,
    Timeout,
)
from qim.client.events import EVENTS_WAITING_MAX, EventHub, EventStream
from qim.errors import ResourceExhausted, Unauthenticated
from qim.wire.layout import Op
from tests.unit.client.fake_server import PEER, FakeServer, build_token
from tests.waiting import happens

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, work)


def threads_of_clients() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("qim-")]


async def test_the_blocking_client_sends_reads_and_listens(
    server: FakeServer, ca: Path, tmp_path: Path
) -> None:
    server.deliver("hello", push=False)

    def work() -> None:
        with Client(server.endpoint, build_token(), data_dir=tmp_path, ca=ca) as client:
            client.wait_connected()
            assert client.is_connected
            added = next(event for event in client.events() if isinstance(event, MessagesAdded))
            assert [message.text for message in added.messages] == ["hello"]
            assert client.send(PEER, "hi").conversation_seq == 2
            assert [message.text for message in client.messages(PEER)] == ["hello", "hi"]
            assert client.mark_read(PEER, 2) == 0
            assert len(client.history(PEER).messages) == 2
            assert len(client.conversations()) == 1
            client.renew_token(build_token())
            with pytest.raises(MessageRejected):
                client.queue(PEER, "\ud800")
        assert "SECRET" not in repr(client)

    await in_thread(work)
    # A thread that has said its last word is still there for a moment.
    await happens(lambda: not threads_of_clients(), what="every thread of the clients has ended")


async def test_the_blocking_client_raises_what_the_other_raises(
    server: FakeServer, ca: Path, tmp_path: Path
) -> None:
    server.refusals[Op.MARK_READ].append(ResourceExhausted(retry_after_ms=1_500))

    def work() -> None:
        with Client(server.endpoint, build_token(), data_dir=tmp_path, ca=ca) as client:
            with pytest.raises(RateLimited) as raised:
                client.mark_read(PEER, 1)
            assert raised.value.retry_after == 1.5
            server.silent_ops.add(Op.SEND_MESSAGE)
            with pytest.raises(Timeout) as late:
                client.send(PEER, "x", timeout=0.05)
            assert "not connected" not in str(late.value)
            with pytest.raises(TypeError, match="not int"):
                client.send(PEER, 5)  # type: ignore[arg-type]  # what a program without types does
        server.login_refusal = Unauthenticated("no")
        with pytest.raises(AuthError), Client(server.endpoint, build_token(), data_dir=tmp_path, ca=ca):
            pass

    await in_thread(work)
    # A thread that has said its last word is still there for a moment.
    await happens(lambda: not threads_of_clients(), what="every thread of the clients has ended")


async def test_a_client_outside_its_with_block_says_so_instead_of_waiting(
    server: FakeServer, ca: Path, tmp_path: Path
) -> None:
    def work() -> None:
        client = Client(server.endpoint, build_token(), data_dir=tmp_path, ca=ca)
        with pytest.raises(RuntimeError, match="not entered"):
            client.conversations()
        with client:
            client.conversations()
            with pytest.raises(RuntimeError, match="entered once"):
                client.__enter__()
            client.conversations()
        with pytest.raises(RuntimeError, match="already closed"):
            client.send(PEER, "x")
        with pytest.raises(RuntimeError, match="make a new one"):
            client.__enter__()

    await in_thread(work)


async def test_a_reader_that_does_not_read_loses_the_oldest_events_and_is_told() -> None:
    stream = EventStream()
    for _ in range(EVENTS_WAITING_MAX + 3):
        stream.emit(Connected())
    stream.close(None)
    seen: list[Any] = [event async for event in stream.read()]
    assert seen[0] == EventsDropped(3)
    assert len(seen) == EVENTS_WAITING_MAX + 1


async def test_every_reader_gets_what_follows_and_the_first_one_what_was_before() -> None:
    hub = EventHub()
    hub.emit(Connected())
    first = hub.read()
    assert await anext(first) == Connected()
    second = hub.read()
    waiting = asyncio.ensure_future(anext(second))
    await asyncio.sleep(0)
    hub.emit(EventsDropped(1))
    assert await waiting == await anext(first) == EventsDropped(1)
    hub.close(AuthError("over", code=1001))
    for stream in (first, second, hub.read()):
        with pytest.raises(AuthError):
            await anext(stream)

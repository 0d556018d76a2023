"""The queues of the client, filled: what is full says so, and works again when there is room."""

import asyncio
import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qim.client import RateLimited, StoreUnavailable, work
from qim.client.model import Target
from qim.client.outgoing import WINDOW, Outgoing, PendingRow
from qim.client.store import STEPS_WAITING_MAX, Store
from qim.client.sync import UNCOVERED_MAX, Chain, Pushed
from qim.client.transport import ARRIVED_BYTES_MAX, Transport
from qim.client.work import ASKED_MAX, RECENT_MAX, Work
from qim.clock import SystemClock
from qim.ids import ClientMessageId, ConversationId, MailboxSeq, Millis, Seq, UserId
from qim.wire.bodies import build_push
from qim.wire.connection import State
from qim.wire.layout import Op
from tests.unit.client.conftest import Enter
from tests.unit.client.fake_server import PEER, FakeServer
from tests.waiting import happens

PENDING = WINDOW + 44
"""In place of PENDING_MAX: more than the window, and still quick."""


async def test_a_full_outgoing_queue_refuses_the_next_message_and_takes_one_for_each_that_left(
    server: FakeServer, enter: Enter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert work.PENDING_MAX > PENDING
    monkeypatch.setattr(work, "PENDING_MAX", PENDING)
    client, _reader = await enter()
    await happens(lambda: client.is_connected, what="connected")
    with server.silence(Op.SEND_MESSAGE):
        # All at once: those that are on their way into the store count too.
        calls = [client.queue(PEER, f"text {number}") for number in range(PENDING + 9)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results[PENDING:]] == [StoreUnavailable] * 9
        assert not any(isinstance(result, Exception) for result in results[:PENDING])
        with pytest.raises(StoreUnavailable, match="not queued"):
            await client.queue(PEER, "one more")
    server.cut()
    ack = await _send_when_there_is_room(client)
    assert ack.conversation_seq == PENDING + 1, "something that was taken is missing"


async def _send_when_there_is_room(client: Any) -> Any:
    acks: list[Any] = []

    async def attempt() -> None:
        try:
            acks.append(await client.send(PEER, "there is room"))
        except StoreUnavailable:
            await asyncio.sleep(0)

    async with asyncio.timeout(20):
        while not acks:
            await attempt()
    return acks[0]


async def test_too_many_questions_are_refused_and_taken_again_when_some_are_answered(
    server: FakeServer, enter: Enter
) -> None:
    client, _reader = await enter()
    await happens(lambda: client.is_connected, what="connected")
    refused: asyncio.Future[Any] | None = None
    asked: list[asyncio.Future[Any]] = []
    with server.silence(Op.PULL_HISTORY):
        while refused is None:
            question = asyncio.ensure_future(client.history(PEER))
            await asyncio.sleep(0)
            if question.done():
                refused = question
            else:
                asked.append(question)
        with pytest.raises(RateLimited):
            await refused
        # Requests of the client's own may stand beside them.
        assert ASKED_MAX - 2 <= len(asked) <= ASKED_MAX
        await happens(lambda: len(server.received(Op.PULL_HISTORY)) == len(asked), what="all were sent")
    for question in asked[1:]:
        question.cancel()
    await asyncio.gather(*asked[1:], return_exceptions=True)
    assert (await client.history(PEER)).messages == ()
    asked[0].cancel()
    await asyncio.gather(asked[0], return_exceptions=True)


async def test_recent_messages_are_remembered_up_to_the_bound() -> None:
    nothing: Any = None
    remembering = Work(
        nothing, store=nothing, events=nothing, clock=SystemClock(), jitter=random.Random(1), wake=nothing
    )
    conversation = ConversationId(b"c" * 16)
    for seq in range(RECENT_MAX + 100):
        remembering._remember((conversation, Seq(seq)))
    assert len(remembering._recent) == len(remembering._recent_order) == RECENT_MAX
    assert remembering._is_recent(conversation, Seq(RECENT_MAX + 99))
    assert not remembering._is_recent(conversation, Seq(99))


def row(number: int) -> PendingRow:
    name = ClientMessageId(number.to_bytes(16, "big"))
    return PendingRow(number, name, Target(1, b"b" * 16), 1, "", b"text", 0, Millis(0))


def test_the_window_is_filled_and_opens_by_one_with_each_acknowledgement() -> None:
    outgoing = Outgoing()
    for number in range(WINDOW + 10):
        outgoing.add(row(number))

    def take() -> list[int]:
        sends, _checks = outgoing.take_sends(now=1.0, server_now=Millis(1), is_drained=True)
        return [sent.ordinal for sent in sends]

    assert take() == [*range(WINDOW)]
    assert take() == []
    outgoing.remove(row(0).client_message_id)
    assert take() == [WINDOW]
    assert outgoing.count == WINDOW + 9, "what waits is still there"


class Socket:
    """Notes whether it is read."""

    def __init__(self) -> None:
        self.is_read = True

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


async def test_a_client_that_is_behind_stops_reading_and_loses_nothing() -> None:
    transport = Transport(clock=SystemClock(), wake=asyncio.Event())
    socket: Any = Socket()
    transport._socket = socket
    transport.connection.state = State.READY
    (push,) = build_push([(1, 2, b"\x92\x01" + b"\xc6" + (60_000).to_bytes(4, "big") + bytes(60_000))])
    count = ARRIVED_BYTES_MAX // len(push)
    for _frame in range(count):
        transport.data_received(push)
    assert socket.is_read
    transport.data_received(push)
    assert not socket.is_read
    assert not transport.is_silent(1e12), "a silence of our own making ends nothing"
    assert len(transport.take()) == count + 1
    assert socket.is_read
    transport.data_received(push)
    assert len(transport.take()) == 1


def _give(number: int, _steps: object) -> int:
    return number


async def test_a_store_with_too_many_steps_refuses_the_next_and_runs_all_that_it_took(tmp_path: Path) -> None:
    store, _rebuilt = await Store.open(tmp_path / "store.db", me=UserId(b"m" * 16), clock=SystemClock())
    began, released = threading.Event(), threading.Event()

    def hold(_steps: object) -> None:
        began.set()
        released.wait(20)

    held = store._step(hold)
    await happens(began.is_set, what="the disk is slow")
    taken = [store._step(partial(_give, number)) for number in range(STEPS_WAITING_MAX)]
    with pytest.raises(StoreUnavailable, match="steps wait"):
        await store.conversations()
    released.set()
    await held
    assert await asyncio.gather(*taken) == [*range(STEPS_WAITING_MAX)]
    assert await store.conversations() == []
    await store.close()


def test_too_many_pushes_beyond_the_cursor_are_forgotten_and_pulled() -> None:
    chain = Chain(MailboxSeq(0))
    pushes = [Pushed(MailboxSeq(seq - 1), MailboxSeq(seq)) for seq in range(10, 10 + UNCOVERED_MAX)]
    chain.on_pushes(pushes, now=0.0)
    assert len(chain._early) == UNCOVERED_MAX
    one_more = MailboxSeq(10 + UNCOVERED_MAX)
    chain.on_pushes([Pushed(MailboxSeq(one_more - 1), one_more)], now=0.0)
    assert len(chain._early) == 0
    pull = chain.take_pull(0.0)
    assert pull is not None
    assert (pull.after, pull.held_count) == (0, 0), "everything is asked for again"

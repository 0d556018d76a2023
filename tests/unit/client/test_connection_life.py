"""Silence, pings and broken answers: the clock of the client is moved by hand, the socket is real."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from qim.client import (
    AuthError,
    ConnectionLost,
    Disconnected,
    RateLimited,
    Reconnected,
    StoreTrouble,
    Timeout,
)
from qim.client.errors import MessageRejected, SdkError, StoreUnavailable, build_failure, is_final
from qim.client.steps import Applied, Incoming, StoreSteps
from qim.client.sync import HELD_SECONDS
from qim.client.transport import Transport
from qim.clock import ManualClock
from qim.errors import CLIENT_ERRORS, GoingAway, Replaced, Unavailable
from qim.ids import Millis
from qim.limits import CONNECTION_SILENCE_MS_MAX, PING_INTERVAL_MS
from qim.wire.bodies import build_goaway
from qim.wire.frames import build_frame
from qim.wire.layout import Op
from tests.unit.client.conftest import Enter
from tests.unit.client.fake_server import PEER, FakeServer
from tests.waiting import happens


def advance(client: Any, clock: ManualClock, *, milliseconds: int) -> None:
    clock.advance(milliseconds=milliseconds)
    client._running._wake.set()


async def test_a_ping_goes_out_every_25_seconds_and_its_answer_finds_a_lost_push(
    server: FakeServer, enter: Enter
) -> None:
    clock = ManualClock()
    client, reader = await enter(clock=clock)
    await happens(lambda: len(server.received(Op.PULL_MAILBOX)) == 1, what="the first pull")
    server.deliver("quiet", push=False)
    advance(client, clock, milliseconds=PING_INTERVAL_MS - 1)
    advance(client, clock, milliseconds=1)
    await happens(lambda: server.received(Op.PING), what="the ping")
    await happens(lambda: reader.texts() == ["quiet"], what="the message that no push brought")


@pytest.mark.shows("O13")
async def test_every_log_in_of_a_device_tells_a_later_time_than_the_one_before(
    server: FakeServer, enter: Enter
) -> None:
    """A clock that stands still, then one that was set back before another process opened the store."""
    clock = ManualClock()
    _, reader = await enter(clock=clock)
    server.goaway(GoingAway("again"))
    await happens(lambda: reader.of(Reconnected), what="the second log-in")
    clock.step_wall(milliseconds=-60_000)
    await enter(clock=clock)
    first = clock.now_ms() + 60_000
    assert [auth.device_time for auth in server.received(Op.AUTH)] == [first, first + 1, first + 2]


async def test_a_log_in_whose_time_cannot_be_stored_is_reported_and_comes_again(
    server: FakeServer, enter: Enter, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, reader = await enter()
    original = StoreSteps.next_login
    failures: list[int] = []

    def fail_first(steps: StoreSteps, now_ms: Millis) -> Millis:
        if not failures:
            failures.append(1)
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return original(steps, now_ms)

    monkeypatch.setattr(StoreSteps, "next_login", fail_first)
    server.cut()
    await happens(lambda: reader.of(Reconnected), what="the second attempt")
    [trouble] = reader.of(StoreTrouble)
    assert "disk is full" in trouble.reason
    assert len(server.received(Op.AUTH)) == 2, "nothing is said to the server without it"


@pytest.mark.shows("O13")
@pytest.mark.parametrize("is_full", [False, True])
async def test_who_is_replaced_hears_it_also_while_the_disk_is_slow_or_full(
    server: FakeServer, enter: Enter, monkeypatch: pytest.MonkeyPatch, *, is_full: bool
) -> None:
    """Whoever does not hear it comes back, and replaces its own successor for good."""
    client, reader = await enter()
    store = client._running.store
    storing, is_over = asyncio.Event(), asyncio.Event()
    original = store.apply

    async def apply_slowly(incoming: Incoming) -> Applied:
        storing.set()
        await is_over.wait()
        if is_full:
            raise StoreUnavailable("the disk is full")
        applied: Applied = await original(incoming)
        return applied

    monkeypatch.setattr(store, "apply", apply_slowly)
    server.deliver("meanwhile")
    await storing.wait()
    server.goaway(Replaced("another copy"))
    await happens(lambda: client._running.work.transport.failure, what="the end has been seen")
    is_over.set()
    await happens(lambda: reader.failure, what="it ends")
    assert (type(reader.failure), reader.failure.code) == (AuthError, Replaced.code)
    assert len(server.received(Op.AUTH)) == 1


@pytest.mark.parametrize("is_polite", [False, True])
async def test_a_line_that_goes_while_the_log_in_time_is_stored_is_tried_again(
    server: FakeServer, enter: Enter, monkeypatch: pytest.MonkeyPatch, *, is_polite: bool
) -> None:
    client, reader = await enter()
    lines: list[Transport] = []
    connect, next_login = Transport.connect, client._running.store.next_login

    async def connect_and_note(*where: Any, **how: Any) -> Transport:
        lines.append(await connect(*where, **how))
        return lines[-1]

    async def lose_the_first() -> Millis:
        if len(lines) == 1 and is_polite:
            lines[0].data_received(build_goaway(GoingAway("no room"), reconnect_after_ms=0))
        elif len(lines) == 1:
            lines[0].abort("no room")
        time: Millis = await next_login()
        return time

    monkeypatch.setattr(Transport, "connect", connect_and_note)
    monkeypatch.setattr(client._running.store, "next_login", lose_the_first)
    server.cut()
    await happens(lambda: reader.of(Reconnected), what="the attempt after it")
    assert reader.of(ConnectionLost)[1].reason.endswith("no room")
    assert len(lines) == 2


@pytest.mark.shows("O13")
@pytest.mark.parametrize("stored", [2**48 - 1, 2**63 - 1, -5, "text", b"\xff", None, 1.5])
async def test_a_log_in_time_that_cannot_be_is_not_told(
    server: FakeServer, enter: Enter, tmp_path: Path, stored: object
) -> None:
    clock = ManualClock()
    client, _ = await enter(clock=clock)
    with closing(sqlite3.connect(client.store_path)) as other, other:
        other.execute("UPDATE meta SET value = ? WHERE key = 'login'", (stored,))
    await enter(clock=clock)
    assert [auth.device_time for auth in server.received(Op.AUTH)] == [clock.now_ms()] * 2


async def test_a_clock_beyond_what_a_session_can_carry_tells_the_last_time(
    server: FakeServer, enter: Enter
) -> None:
    await enter(clock=ManualClock(now_ms=2**50))
    assert [auth.device_time for auth in server.received(Op.AUTH)] == [2**48 - 1]


async def test_a_server_that_wants_pings_more_often_gets_them(server: FakeServer, enter: Enter) -> None:
    clock = ManualClock()
    server.heartbeat_ms = 5_000
    client, _ = await enter(clock=clock)
    await happens(lambda: len(server.received(Op.PULL_MAILBOX)) == 1, what="the first pull")
    for pings in (1, 2):
        advance(client, clock, milliseconds=5_000)
        await happens(lambda wanted=pings: len(server.received(Op.PING)) == wanted, what="a ping")  # type: ignore[misc]  # bound in this turn of the loop


async def test_a_silent_connection_is_dead_after_33_seconds(server: FakeServer, enter: Enter) -> None:
    clock = ManualClock()
    client, reader = await enter(clock=clock)
    await happens(lambda: len(server.received(Op.PULL_MAILBOX)) == 1, what="the first pull")
    server.silent_ops |= {Op.PING, Op.PULL_MAILBOX}
    advance(client, clock, milliseconds=CONNECTION_SILENCE_MS_MAX)
    [lost] = await happens(lambda: reader.of(ConnectionLost), what="the end")
    assert "silent" in lost.reason
    await happens(lambda: reader.of(Reconnected), what="the second login")


async def test_few_held_pushes_are_covered_after_ten_seconds(server: FakeServer, enter: Enter) -> None:
    server.deliver("anchor", push=False)
    clock = ManualClock()
    client, reader = await enter(clock=clock)
    await happens(reader.texts, what="the page")
    server.deliver("one")
    await client.send(PEER, "two")
    await happens(lambda: len(reader.texts()) == 3, what="the push and the own message")
    await happens(lambda: client._running.work._chain._count == 2, what="the echo in the chain")
    advance(client, clock, milliseconds=int(HELD_SECONDS * 1000))
    await happens(lambda: server.received(Op.PULL_MAILBOX)[-1].held_count == 2, what="the pull")


async def test_an_unanswered_pull_ends_the_connection(server: FakeServer, enter: Enter) -> None:
    clock = ManualClock()
    server.silent_ops.add(Op.PULL_MAILBOX)
    client, reader = await enter(clock=clock)
    await happens(lambda: server.received(Op.PULL_MAILBOX), what="the pull")
    advance(client, clock, milliseconds=12_000)
    [lost] = await happens(lambda: reader.of(ConnectionLost), what="the end")
    assert "pull" in lost.reason


@pytest.mark.parametrize("end", ["cut", "goaway"])
async def test_a_connection_that_ends_while_a_send_is_made_durable_does_not_end_the_client(
    server: FakeServer, enter: Enter, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    client, reader = await enter()
    await happens(lambda: client._running.work._chain.is_drained, what="the first drain")
    store, transport = client._running.store, client._running.work.transport
    assert transport is not None
    mark_sent = store.mark_sent
    waited: list[Any] = []

    async def mark_sent_late(rows: Any) -> None:
        if not waited:
            waited.append(rows)
            server.cut() if end == "cut" else server.goaway(GoingAway())
            await happens(lambda: not transport.is_ready, what="the end of the connection")
        await mark_sent(rows)

    monkeypatch.setattr(store, "mark_sent", mark_sent_late)
    # Queued without a login in sight: its first frame is stamped, and that is awaited, before it leaves.
    client._running.work._chain.is_drained = False
    sending = asyncio.create_task(client.send(PEER, "meanwhile"))
    await happens(lambda: client._running.work._outgoing.count, what="the message is queued")
    client._running.work._chain.is_drained = True
    client._running._wake.set()
    assert (await sending).conversation_seq == 1
    assert waited
    assert reader.failure is None


async def test_a_refused_pull_is_repeated(server: FakeServer, enter: Enter) -> None:
    clock = ManualClock()
    server.refusals[Op.PULL_MAILBOX].append(Unavailable())
    server.deliver("waiting", push=False)
    client, reader = await enter(clock=clock)
    await happens(lambda: not server.refusals[Op.PULL_MAILBOX] or None, what="the refusal")
    await happens(lambda: client._running.work._pull_not_before > 0, what="the refusal is understood")
    advance(client, clock, milliseconds=1_000)
    await happens(lambda: reader.texts() == ["waiting"], what="the page")


@pytest.mark.parametrize(
    "frame",
    [
        build_frame(Op.PUSH_EVENTS, 0, b"\xc1"),
        build_frame(Op.PUSH_EVENTS, 0, b"\x91\x91\x93\x01\x02\x92\x01\xc4\x40" + bytes(64)),
        b"\x09" * 12,
    ],
    ids=["no-msgpack", "no-entry", "no-frame"],
)
async def test_what_is_not_the_protocol_ends_the_client_and_loses_nothing(
    server: FakeServer, enter: Enter, frame: bytes
) -> None:
    client, reader = await enter()
    await happens(lambda: len(server.received(Op.PULL_MAILBOX)) == 1, what="the first pull")
    server._broadcast(frame)
    await happens(lambda: reader.failure, what="the end")
    assert isinstance(reader.failure, AuthError)
    assert 4000 <= reader.failure.code < 5000
    assert await client.messages(PEER) == []


async def test_an_unknown_push_is_ignored(server: FakeServer, enter: Enter) -> None:
    client, _ = await enter()
    server._broadcast(build_frame(0x0FFF, 0, b"\x90"))
    await client.send(PEER, "still here")
    assert server.logins == 1


async def test_a_login_as_another_user_is_refused(
    server: FakeServer, enter: Enter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.client.fake_server.ME", b"z" * 16)
    with pytest.raises(AuthError, match="another user"):
        await enter()


async def test_a_request_without_a_connection_says_why(server: FakeServer, enter: Enter, ca: Path) -> None:
    client, reader = await enter()
    await server.stop()
    await happens(lambda: reader.of(ConnectionLost), what="the end")
    with pytest.raises(Disconnected):
        await client.mark_read(PEER, 1)
    await server.start(server.port)


async def test_open_requests_fail_with_their_connection(server: FakeServer, enter: Enter) -> None:
    client, _ = await enter()
    server.silent_ops.add(Op.PULL_HISTORY)
    asked = asyncio.create_task(client.history(PEER))
    await happens(lambda: server.received(Op.PULL_HISTORY), what="the request")
    server.cut()
    with pytest.raises(Disconnected):
        await asked


@pytest.mark.parametrize("code", [*sorted(CLIENT_ERRORS), 1999, 2999, 3999, 4999])
def test_the_range_of_a_code_decides_what_it_becomes(code: int) -> None:
    failure = build_failure(code, "text", 250)
    assert is_final(code) is (code < 2000 or code >= 4000)
    expected: type[SdkError]
    if code == 1001 or code >= 4000:
        expected = AuthError
    elif code < 2000:
        expected = MessageRejected
    elif code == 2002:
        expected = RateLimited
    else:
        expected = Timeout if code < 3000 else Disconnected
    assert type(failure) is expected

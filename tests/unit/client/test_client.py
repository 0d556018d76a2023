"""The whole client against a fake server over real TLS: what is sent, resent, received, shown and refused."""

# ruff: noqa: ASYNC240 - the files are looked at after the fact, nothing else runs meanwhile

import asyncio
import gc
import logging
from pathlib import Path
from typing import Any

import pytest

from qim.client import (
    AsyncClient,
    AuthError,
    Connected,
    ConnectionLost,
    ConversationsUpdated,
    Disconnected,
    MessageAcknowledged,
    MessageFailed,
    MessageRejected,
    MessagesAdded,
    MessageState,
    Reconnected,
    StoreTrouble,
    StoreUnavailable,
    Target,
    Timeout,
)
from qim.client.steps import StoreSteps
from qim.client.sync import HELD_PUSHES, RESEND_AGE_MS
from qim.errors import (
    GoingAway,
    PermissionDenied,
    RemoteProtocolError,
    Replaced,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from qim.limits import MESSAGE_BODY_BYTES_MAX
from qim.wire.layout import Op
from tests.unit.client.conftest import Enter
from tests.unit.client.fake_server import ME, OTHER, PEER, FakeServer, build_token, conversation_of
from tests.waiting import happens, stays


async def test_a_message_is_sent_acknowledged_and_stored(server: FakeServer, enter: Enter) -> None:
    client, reader = await enter()
    ack = await client.send(PEER, "hello")
    assert (ack.conversation_id, ack.conversation_seq, ack.duplicate) == (conversation_of(PEER), 1, False)
    [message] = await client.messages(PEER)
    assert (message.text, message.state, message.sender) == ("hello", MessageState.STORED, ME)
    await happens(lambda: reader.of(MessageAcknowledged), what="the event")
    assert reader.texts() == ["hello"]


async def test_received_messages_come_by_page_and_by_push_once_each(server: FakeServer, enter: Enter) -> None:
    server.deliver("before", push=False)
    client, reader = await enter()
    await happens(lambda: reader.texts() == ["before"], what="the page")
    server.deliver("after")
    await happens(lambda: reader.texts() == ["before", "after"], what="the push")
    [conversation] = await client.conversations()
    assert (conversation.target, conversation.unread, conversation.head_seq) == (Target(1, PEER), 2, 2)
    assert conversation.head is not None
    assert conversation.head.text == "after"


@pytest.mark.shows("K5")
async def test_conversations_are_updated_before_their_messages_are_added(
    server: FakeServer, enter: Enter
) -> None:
    server.deliver("one", push=False)
    _, reader = await enter()
    await happens(lambda: reader.texts() == ["one"], what="the page")
    server.deliver("two", peer=OTHER)
    await happens(lambda: reader.texts() == ["one", "two"], what="the push")
    told: set[bytes] = set()
    for event in reader.events:
        if isinstance(event, ConversationsUpdated):
            told |= {conversation.conversation_id for conversation in event.conversations}
        if isinstance(event, MessagesAdded):
            assert {message.conversation_id for message in event.messages} <= told
    kinds = [type(e) for e in reader.events if isinstance(e, ConversationsUpdated | MessagesAdded)]
    assert kinds == [ConversationsUpdated, MessagesAdded] * 2


@pytest.mark.shows("K1", "F-30")
async def test_a_lost_acknowledgement_is_resent_with_the_same_identity(
    server: FakeServer, enter: Enter
) -> None:
    client, _ = await enter()
    server.acks_to_swallow = 1
    server.pushes_echo = False
    ack = await client.send(PEER, "once")
    sends = server.received(Op.SEND_MESSAGE)
    assert len({send.client_message_id for send in sends}) == 1
    assert ack.conversation_seq == 1
    assert len(server.history[conversation_of(PEER)]) == 1
    assert [message.text for message in await client.messages(PEER)] == ["once"]


@pytest.mark.shows("K1")
async def test_a_resend_after_a_reconnect_waits_for_the_mailbox(server: FakeServer, enter: Enter) -> None:
    client, reader = await enter()
    with server.silence(Op.SEND_MESSAGE):
        cmid = await client.queue(PEER, "kept")
        await happens(lambda: server.received(Op.SEND_MESSAGE), what="the first frame")
    server.silent_ops.add(Op.PULL_MAILBOX)
    server.cut()
    await happens(lambda: reader.of(Reconnected), what="the second login")
    await happens(lambda: len(server.received(Op.PULL_MAILBOX)) == 2, what="the pull of the second login")
    await stays(lambda: len(server.received(Op.SEND_MESSAGE)) == 1, what="nothing is resent before the page")
    server.silent_ops.clear()
    server.cut()
    await happens(lambda: reader.of(MessageAcknowledged), what="the acknowledgement")
    assert {send.client_message_id for send in server.received(Op.SEND_MESSAGE)} == {cmid}


@pytest.mark.shows("K1")
async def test_the_row_is_durable_before_the_frame_leaves(
    server: FakeServer, enter: Enter, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = await enter()
    order: list[str] = []
    original = StoreSteps.insert_pending

    def insert(steps: StoreSteps, row: Any) -> None:
        original(steps, row)
        order.append(f"stored, {len(server.received(Op.SEND_MESSAGE))} frames")

    monkeypatch.setattr(StoreSteps, "insert_pending", insert)
    await client.send(PEER, "x")
    assert order == ["stored, 0 frames"]


@pytest.mark.shows("K1")
async def test_a_send_that_cannot_be_made_durable_is_reported_and_never_sent(
    server: FakeServer, enter: Enter, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = await enter()

    def fail(steps: StoreSteps, row: Any) -> None:
        import sqlite3

        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(StoreSteps, "insert_pending", fail)
        with pytest.raises(StoreUnavailable, match="the disk is full; free some space"):
            await client.send(PEER, "lost?")
    await client.send(PEER, "later")
    assert [send.body for send in server.received(Op.SEND_MESSAGE)] == [b"later"]


@pytest.mark.shows("K1")
async def test_a_message_queued_without_a_network_goes_out_from_the_next_process(
    server: FakeServer, enter: Enter, ca: Path, tmp_path: Path
) -> None:
    port = server.port
    await server.stop()
    async with AsyncClient(server.endpoint, build_token(), data_dir=tmp_path / "data", ca=ca) as client:
        assert not client.is_connected
        cmid = await client.queue(PEER, "from the tunnel")
        [queued] = await client.messages(PEER)
        assert (queued.state, queued.client_message_id) == (MessageState.QUEUED, cmid)
        with pytest.raises(Disconnected):
            await client.history(PEER)
        with pytest.raises(Timeout, match=r"not connected: .*Connect call failed"):
            await client.send(PEER, "second", timeout=0.05)
    await server.start(port)
    _, reader = await enter()
    await happens(lambda: len(reader.of(MessageAcknowledged)) == 2, what="both acknowledgements")
    assert [send.body for send in server.received(Op.SEND_MESSAGE)] == [b"from the tunnel", b"second"]


async def test_a_final_error_is_raised_and_stays_visible_on_the_message(
    server: FakeServer, enter: Enter
) -> None:
    client, reader = await enter()
    server.refusals[Op.SEND_MESSAGE].append(PermissionDenied("no"))
    with pytest.raises(MessageRejected, match="PermissionDenied: no") as raised:
        await client.send(PEER, "refused")
    assert raised.value.code == PermissionDenied.code
    [message] = await client.messages(PEER)
    assert (message.state, message.failure_code) == (MessageState.FAILED, PermissionDenied.code)
    [failed] = await happens(lambda: reader.of(MessageFailed), what="the event")
    assert failed.message.text == "refused"
    server.cut()
    await happens(lambda: reader.of(Reconnected), what="the second login")
    await client.send(PEER, "accepted")
    assert [send.body for send in server.received(Op.SEND_MESSAGE)] == [b"refused", b"accepted"]
    assert await client.discard(message.client_message_id)
    assert [message.text for message in await client.messages(PEER)] == ["accepted"]


async def test_a_busy_server_is_waited_for_and_the_order_stays(server: FakeServer, enter: Enter) -> None:
    client, _ = await enter()
    server.refusals[Op.SEND_MESSAGE] += [ResourceExhausted(retry_after_ms=50), Unavailable(retry_after_ms=30)]
    first = asyncio.create_task(client.send(PEER, "one"))
    await happens(lambda: not server.refusals[Op.SEND_MESSAGE] or None, what="both refusals")
    second = await client.send(PEER, "two")
    assert ((await first).conversation_seq, second.conversation_seq) == (1, 2)


@pytest.mark.shows("K6", "F-38")
async def test_a_copied_store_gets_a_conflict_that_is_shown_and_never_renumbered(
    server: FakeServer, enter: Enter, tmp_path: Path
) -> None:
    first, _ = await enter()
    await first.send(PEER, "before the copy")
    path = first.store_path
    await first.__aexit__(None, None, None)
    copy = tmp_path / "copy" / path.relative_to(tmp_path / "data")
    copy.parent.mkdir(parents=True)
    copy.write_bytes(path.read_bytes())
    one, _ = await enter()
    await one.send(PEER, "from the original")
    await one.__aexit__(None, None, None)
    two, reader = await enter(data="copy")
    with pytest.raises(MessageRejected, match="Conflict"):
        await two.send(PEER, "from the copy")
    failed = [m for m in await two.messages(PEER) if m.state is MessageState.FAILED]
    assert [message.text for message in failed] == ["from the copy"]
    await happens(lambda: reader.of(MessageFailed), what="the event")
    later = await two.send(PEER, "after")
    assert later.conversation_seq == 3
    used = [
        send.client_message_id for send in server.received(Op.SEND_MESSAGE) if send.body == b"from the copy"
    ]
    assert len(used) == 1
    server.cut()
    await happens(lambda: reader.of(Reconnected), what="a login as a new device")
    assert server.devices[-1] != server.devices[0]


@pytest.mark.parametrize("body", ["x" * (MESSAGE_BODY_BYTES_MAX + 1), "€" * 21_846], ids=["ascii", "utf-8"])
async def test_an_oversized_body_is_refused_here_and_later_messages_flow(
    server: FakeServer, enter: Enter, body: str
) -> None:
    client, _ = await enter()
    with pytest.raises(MessageRejected, match="at most 65536 are possible"):
        await client.send(PEER, body)
    await client.send(PEER, "x" * MESSAGE_BODY_BYTES_MAX)
    assert [len(send.body) for send in server.received(Op.SEND_MESSAGE)] == [MESSAGE_BODY_BYTES_MAX]


AWKWARD = [
    "",
    "\0",
    "a\0b\0",
    "👨‍👩‍👧",
    "e\u0301 \u00e9",
    "\u202eabc",
    "\u2028\ufeff",
    "\n" * 65_536,
    '{"$a": "%s"}',
]


async def test_awkward_content_comes_back_byte_for_byte(server: FakeServer, enter: Enter) -> None:
    client, _ = await enter()
    for body in AWKWARD:
        await client.send(PEER, body)
    await client.send(PEER, bytes(range(256)), custom_type="x/y")
    stored = [message.body for message in await client.messages(PEER)]
    assert stored == [body.encode() for body in AWKWARD] + [bytes(range(256))]
    sent = server.received(Op.SEND_MESSAGE)[-1]
    assert (sent.message_type, sent.custom_type) == (2, "x/y")


@pytest.mark.parametrize(("body", "kind"), [("\ud800", None), (b"\xff", 1), ("control", 9)])
async def test_what_the_server_would_refuse_is_refused_before_it_is_stored(
    server: FakeServer, enter: Enter, body: Any, kind: int | None
) -> None:
    client, _ = await enter()
    with pytest.raises(MessageRejected):
        await client.send(PEER, body, message_type=kind)
    assert await client.messages(PEER) == []


# --- the mailbox


async def test_a_hole_in_the_chain_is_pulled(server: FakeServer, enter: Enter) -> None:
    client, reader = await enter()
    await happens(lambda: len(server.received(Op.PULL_MAILBOX)) == 1, what="the first pull")
    server.deliver("lost", push=False)
    server.deliver("seen")
    await happens(lambda: "seen" in reader.texts(), what="the push")
    await happens(lambda: "lost" in reader.texts(), what="the pull")
    assert [message.text for message in await client.messages(PEER)] == ["lost", "seen"]
    assert server.received(Op.PULL_MAILBOX)[-1].held_through == 0


@pytest.mark.shows("K3")
async def test_held_pushes_move_the_cursor_by_a_pull_that_fetches_nothing(
    server: FakeServer, enter: Enter
) -> None:
    server.deliver("anchor", push=False)
    client, reader = await enter()
    await happens(reader.texts, what="the page")
    cursor = (await client._running.store.load(bound_device=None)).cursor
    for number in range(HELD_PUSHES - 1):
        server.deliver(str(number))
    await happens(lambda: len(reader.texts()) == HELD_PUSHES, what="the pushes")
    assert (await client._running.store.load(bound_device=None)).cursor == cursor
    server.deliver("last")
    await happens(lambda: server.received(Op.PULL_MAILBOX)[-1].held_count == HELD_PUSHES, what="the pull")
    assert server.received(Op.PULL_MAILBOX)[-1].held_through == server.newest()

    async def moved() -> int:
        return int((await client._running.store.load(bound_device=None)).cursor)

    from tests.waiting import eventually_async

    async def at_newest() -> bool:
        return await moved() == server.newest()

    await eventually_async(at_newest, what="the cursor at the held push")


@pytest.mark.shows("K4", "K2")
async def test_nothing_is_remembered_or_told_when_the_commit_fails(
    server: FakeServer, enter: Enter, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, reader = await enter()
    await happens(lambda: len(server.received(Op.PULL_MAILBOX)) == 1, what="the first pull")
    cursor = (await client._running.store.load(bound_device=None)).cursor
    original = StoreSteps._describe
    failures: list[int] = []

    def fail_late(steps: StoreSteps, applied: Any) -> None:
        import sqlite3

        if applied.added and len(failures) < 2:
            failures.append(1)
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        original(steps, applied)

    monkeypatch.setattr(StoreSteps, "_describe", fail_late)
    server.acks_to_swallow = 0
    send = asyncio.create_task(client.send(PEER, "mine"))
    await happens(lambda: reader.of(StoreTrouble), what="the failed commit")
    assert not send.done()
    assert reader.texts() == []
    [queued] = await client.messages(PEER)
    assert queued.state is MessageState.QUEUED
    server.deliver("theirs")
    ack = await send
    await happens(lambda: sorted(reader.texts()) == ["mine", "theirs"], what="both, once")
    assert len(failures) == 2
    assert ack.conversation_seq == 1
    assert (await client._running.store.load(bound_device=None)).cursor >= cursor


async def test_a_second_device_reads_everything_in_order(server: FakeServer, enter: Enter) -> None:
    for number in range(650):
        server.deliver(str(number), push=False)
    client, reader = await enter()
    await happens(lambda: len(reader.texts()) == 650, what="three pages")
    shown = await client.messages(PEER, limit=1_000)
    assert [message.conversation_seq for message in shown] == list(range(1, 651))


async def test_a_rebuild_takes_the_watermark_and_opening_a_conversation_fills_its_gap(
    server: FakeServer, enter: Enter
) -> None:
    server.deliver("old", push=False)
    first, reader = await enter()
    await happens(reader.texts, what="the page")
    await first.__aexit__(None, None, None)
    for number in range(400):
        server.deliver(f"missed {number}", push=False)
    server.mailbox.clear()
    server.is_rebuild_due = True
    client, reader = await enter()
    await happens(lambda: len(server.received(Op.PULL_MAILBOX)) >= 3, what="the page after the rebuild")
    assert server.received(Op.SESSION_LIST_REQ)
    assert server.received(Op.PULL_MAILBOX)[-1].after_mailbox_seq == server.watermark
    assert await client._running.store.gaps(Target(1, PEER)) == [(1, 401)]
    shown = await client.messages(PEER, limit=500)
    assert [message.conversation_seq for message in shown] == list(range(1, 402))
    assert await client._running.store.gaps(Target(1, PEER)) == []
    await client.send(PEER, "goes on")


async def test_history_pages_backwards_and_is_stored(server: FakeServer, enter: Enter) -> None:
    for number in range(30):
        server.deliver(str(number), push=False)
    server.mailbox.clear()
    client, _ = await enter()
    page = await client.history(PEER, limit=10)
    assert ([message.conversation_seq for message in page.messages], page.more) == (list(range(21, 31)), True)
    older = await client.history(PEER, before=21, limit=100)
    assert ([message.conversation_seq for message in older.messages], older.more) == (
        list(range(1, 21)),
        False,
    )
    assert len(await client.messages(PEER)) == 30


async def test_marking_read_lowers_the_unread_count(server: FakeServer, enter: Enter) -> None:
    server.deliver("a", push=False)
    server.deliver("b", push=False)
    client, reader = await enter()
    await happens(lambda: len(reader.texts()) == 2, what="the page")
    assert await client.mark_read(PEER, 1) == 0
    assert [conversation.unread for conversation in await client.conversations()] == [1]


# --- old messages without an answer


@pytest.mark.parametrize("outcome", ["found", "absent", "unknown"])
async def test_an_old_message_is_settled_by_history(server: FakeServer, enter: Enter, outcome: str) -> None:
    client, _ = await enter()
    server.pushes_echo = False
    if outcome == "found":
        # The server has it, the acknowledgement and the mailbox entry never arrive.
        original = server._commit
        server._commit = lambda record, **more: original(record, **{**more, "push": False})  # type: ignore[method-assign]  # this one server answers otherwise
    with server.silence(Op.SEND_MESSAGE):
        cmid = await client.queue(PEER, "old")
        await happens(lambda: server.received(Op.SEND_MESSAGE), what="the first frame")
    [sent] = server.received(Op.SEND_MESSAGE)
    await client.__aexit__(None, None, None)
    if outcome == "found":
        server._on_send(1, sent, _Nowhere())  # type: ignore[arg-type]  # a socket that takes nothing
        server.mailbox.clear()
    if outcome == "unknown":
        server.server_time += RESEND_AGE_MS + 60_000
        for number in range(3):
            server.deliver(str(number), push=False)
        server.mailbox.clear()
        server.earliest = 2
    else:
        server.server_time += RESEND_AGE_MS + 60_000
    later, reader = await enter()
    if outcome == "unknown":
        [failed] = await happens(lambda: reader.of(MessageFailed), what="the failure")
        assert (failed.message.state, failed.message.client_message_id) == (MessageState.UNKNOWN, cmid)
    else:
        [done] = await happens(lambda: reader.of(MessageAcknowledged), what="the acknowledgement")
        assert done.ack.client_message_id == cmid
        assert [message.text for message in await later.messages(PEER)] == ["old"]
    assert len(server.received(Op.SEND_MESSAGE)) == (2 if outcome == "absent" else 1)
    assert server.received(Op.PULL_HISTORY)


class _Nowhere:
    def write(self, _: bytes) -> None:
        """The connection was cut: nobody reads."""


# --- the connection


async def test_the_hint_of_a_goaway_is_honoured(server: FakeServer, enter: Enter) -> None:
    _, reader = await enter()
    server.goaway(GoingAway("restart"), reconnect_after_ms=300)
    [lost] = await happens(lambda: reader.of(ConnectionLost), what="the end")
    assert (lost.code, 0.3 <= lost.retry_in <= 1.0) == (GoingAway.code, True)
    await stays(lambda: server.logins == 1, what="no login before the hint", period_seconds=0.2)
    await happens(lambda: reader.of(Reconnected), what="the second login")


async def test_a_refused_token_stops_and_is_raised(server: FakeServer, ca: Path, tmp_path: Path) -> None:
    server.login_refusal = Unauthenticated("no")
    client = AsyncClient(server.endpoint, build_token(), data_dir=tmp_path / "data", ca=ca)
    with pytest.raises(AuthError) as raised:
        await client.__aenter__()
    assert raised.value.code == Unauthenticated.code
    await stays(lambda: len(server.received(Op.AUTH)) == 1, what="one login only")


@pytest.mark.parametrize(
    "error", [Unauthenticated("expired"), Replaced("newer login"), RemoteProtocolError("bad")]
)
async def test_a_final_goaway_stops_and_everybody_who_waits_hears_it(
    server: FakeServer, enter: Enter, error: Any
) -> None:
    client, reader = await enter()
    with server.silence(Op.SEND_MESSAGE):
        send = asyncio.create_task(client.send(PEER, "waiting"))
        await happens(lambda: server.received(Op.SEND_MESSAGE), what="the frame")
        server.goaway(error)
        with pytest.raises(AuthError):
            await send
    await happens(lambda: reader.failure, what="the end of the events")
    assert isinstance(reader.failure, AuthError)
    assert reader.failure.code == error.code
    with pytest.raises(AuthError):
        await client.send(PEER, "too late")
    await stays(lambda: server.logins == 1, what="no second login")
    [kept] = await client.messages(PEER)
    assert kept.state is MessageState.QUEUED


async def test_an_unknown_authority_is_no_connection_and_says_why(server: FakeServer, tmp_path: Path) -> None:
    async with AsyncClient(server.endpoint, build_token(), data_dir=tmp_path / "data") as client:
        with pytest.raises(Disconnected, match="TLS failed"):
            await client.wait_connected(timeout=0.05)


async def test_a_token_is_in_no_path_repr_log_or_event(
    server: FakeServer, enter: Enter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    client, reader = await enter()
    await client.send(PEER, "x")
    server.login_refusal = Unauthenticated("no")
    server.cut()
    await happens(lambda: reader.failure, what="the refused login")
    seen = [repr(client), caplog.text, repr(reader.events), repr(reader.failure), repr(vars(client))]
    seen += [str(path) for path in tmp_path.rglob("*")]
    seen += [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    assert not [text for text in seen if "SECRETSIGNATURE" in text]


async def test_two_accounts_in_one_process_share_nothing(
    server: FakeServer, enter: Enter, ca: Path, tmp_path: Path
) -> None:
    client, _ = await enter()
    await client.send(PEER, "mine")
    await client.__aexit__(None, None, None)
    await server.stop()
    other = AsyncClient(server.endpoint, build_token(OTHER), data_dir=tmp_path / "data", ca=ca)
    assert other.store_path != client.store_path
    async with other:
        assert await other.conversations() == []
    await server.start()


async def test_a_thousand_pushes_are_stored_in_few_transactions(
    server: FakeServer, enter: Enter, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qim.client.store import Store

    client, reader = await enter()
    transactions: list[int] = []
    original = Store._run_transaction

    def count(store: Store, connection: Any, batch: Any) -> None:
        transactions.append(len(batch))
        original(store, connection, batch)

    monkeypatch.setattr(Store, "_run_transaction", count)
    await happens(lambda: len(server.received(Op.PULL_MAILBOX)) == 1, what="the first pull")
    for number in range(1_000):
        server.deliver(str(number))
    await happens(lambda: len(reader.texts()) == 1_000, what="all of them", timeout_seconds=20)
    assert len(transactions) < 250
    assert len(await client.messages(PEER, limit=2_000)) == 1_000


async def test_the_first_login_and_later_ones_are_told_apart(server: FakeServer, enter: Enter) -> None:
    _, reader = await enter()
    server.cut()
    await happens(lambda: reader.of(Reconnected), what="the second login")
    kinds = [
        type(event) for event in reader.events if isinstance(event, Connected | ConnectionLost | Reconnected)
    ]
    assert kinds == [Connected, ConnectionLost, Reconnected]


@pytest.mark.shows("K1")
async def test_a_send_that_is_given_up_while_it_becomes_durable_still_goes_out(
    server: FakeServer, enter: Enter
) -> None:
    client, reader = await enter()
    for _ in range(20):
        task = asyncio.create_task(client.send(PEER, "kept"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await happens(lambda: len(reader.texts()) == 20, what="all are acknowledged")
    assert len(server.history[conversation_of(PEER)]) == 20


async def test_a_send_whose_caller_left_complains_to_nobody(server: FakeServer, enter: Enter) -> None:
    client, reader = await enter()
    server.refusals[Op.SEND_MESSAGE].append(PermissionDenied("no"))
    with server.silence(Op.PING):
        task = asyncio.create_task(client.send(PEER, "x"))
        await happens(lambda: server.received(Op.SEND_MESSAGE), what="the frame")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await happens(lambda: reader.of(MessageFailed), what="the failure")
    del task
    gc.collect()

"""Two and three workers with real Unix sockets between them: requests, answers, pushes, presence, failure."""

import asyncio
import contextlib
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from qim import errors, limits
from qim.clock import ManualClock
from qim.domain.gateway import GatewayLimits
from qim.domain.placement import (
    Placement,
    bucket_of_conversation,
    direct_conversation,
    shard_of_user,
    slot_of_bucket,
)
from qim.errors import StoreUnknown
from qim.ids import BootId, DeviceId, MailboxSeq, UserId, WorkerId
from qim.metrics import Metrics
from qim.ports import MailboxPage, MailboxPageQuery, MailboxStore
from qim.tokens import TokenVerifier
from qim.wire.bodies import Ping, PullMailbox, build_message, decode_body
from qim.wire.frames import Frame, build_frame
from qim.wire.layout import LinkOp, Op
from qim.wire.link import Hello, build_hello
from tests.unit.workers.gateway_rig import (
    KEY_ID,
    PHONE,
    TABLET,
    TENANT,
    RawClient,
    entry,
    run_on_uvloop,
    send_body,
    signing_key,
    token,
)
from tests.waiting import happens, stays
from workers.gateway import Gateway
from workers.link import Links, LinkState
from workers.outbound import Outbound
from workers.presence import Presence
from workers.request import Request
from workers.router import OwnerCache, Router

TWO = Placement(workers=2, core_instances=1, mailbox_instances=1)
FIRST, SECOND = WorkerId(0), WorkerId(1)


def user_of(worker: WorkerId, number: int = 0) -> UserId:
    """The `number`-th user in counting order whose shard this worker owns."""
    users = (UserId(count.to_bytes(16, "big")) for count in range(10_000))
    owned = [user for user in users if TWO.worker_of(shard_of_user(TENANT, user)) == worker]
    return owned[number]


def peer_of(user: UserId, worker: WorkerId) -> UserId:
    """Somebody with whom the user's conversation is owned by this worker."""
    for count in range(20_000, 30_000):
        peer = UserId(count.to_bytes(16, "big"))
        bucket = bucket_of_conversation(TENANT, direct_conversation(TENANT, user, peer))
        if TWO.worker_of(slot_of_bucket(bucket)) == worker:
            return peer
    raise AssertionError("no such peer")


class RecordingRole:
    """A writer or a mailbox that keeps its requests until the test answers them."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def submit(self, request: Request) -> None:
        self.requests.append(request)

    async def next(self) -> Request:
        await happens(lambda: self.requests, what="a request arrived")
        return self.requests.pop(0)


class NewestOnly:
    """The mailbox store as presence sees it."""

    def __init__(self) -> None:
        self.newest = MailboxSeq(17)
        self.asked: list[int] = []
        self.failing = False

    async def read_mailbox(self, queries: Sequence[MailboxPageQuery]) -> list[MailboxPage]:
        self.asked.append(len(queries))
        if self.failing:
            raise StoreUnknown("time-out")
        return [MailboxPage((), MailboxSeq(0), more=False, rebuild=True, newest=self.newest) for _ in queries]


class Node:
    """One worker: gateway on plain TCP, router, presence, links; writer and mailbox only record."""

    def __init__(self, worker: WorkerId, folder: Path, *, placement: Placement = TWO) -> None:
        self.worker = worker
        self.clock = ManualClock()
        self.metrics = Metrics()
        self.writer, self.mailbox, self.store = RecordingRole(), RecordingRole(), NewestOnly()
        outbound = Outbound(asyncio.get_running_loop())
        self.router = Router(worker=worker, placement=placement, clock=self.clock, metrics=self.metrics)
        self.gateway = Gateway(
            router=self.router,
            tokens=TokenVerifier({KEY_ID: signing_key()[1]}, issuer="qim", audience="qim", clock=self.clock),
            clock=self.clock,
            outbound=outbound,
            bounds=GatewayLimits(),
            metrics=self.metrics,
            tls=None,
        )
        self.presence = Presence(
            placement=placement, mailboxes=[cast("MailboxStore", self.store)], answers=self.router
        )
        self.links = Links(
            worker=worker, workers=placement.workers, placement=placement.digest(),
            boot=BootId(os.urandom(16)),
            runtime_dir=folder, outbound=outbound, user=self.router,
        )  # fmt: skip
        self.router.bind(
            gateway=self.gateway,
            presence=self.presence,
            writer=self.writer,
            mailbox=self.mailbox,
            links=self.links,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._clients: list[RawClient] = []

    async def start(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        await self.gateway.listen(listener)
        await self.links.listen()
        self._tasks = [asyncio.create_task(self.links.run()), asyncio.create_task(self.presence.run())]

    async def stop(self) -> None:
        """Everything at once, as at the end of the process; nobody is told."""
        for client in self._clients:
            await client.close()
        await self.gateway.drain(self.clock.monotonic())
        await self.presence.drain(0)
        await self.links.close()
        await asyncio.gather(*self._tasks)

    async def connect(self) -> RawClient:
        client = RawClient(*await asyncio.open_connection("127.0.0.1", self.port))
        self._clients.append(client)
        return client

    async def logged_in(self, user: UserId, *, device: DeviceId = PHONE) -> RawClient:
        client = await self.connect()
        await client.log_in(token(self.clock, user=user), device=device)
        return client


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a Unix socket's name ends at 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="ql"))
    yield path
    shutil.rmtree(path)


async def up(*nodes: Node) -> None:
    for node in nodes:
        await happens(
            lambda node=node: set(node.links.health.values()) == {LinkState.UP},  # type: ignore[misc]  # bound in this turn of the loop
            what="every link is up",
        )


@asynccontextmanager
async def running(*nodes: Node) -> AsyncIterator[None]:
    for node in nodes:
        await node.start()
    try:
        yield
    finally:
        for node in nodes:
            await node.stop()


@asynccontextmanager
async def two_workers(folder: Path) -> AsyncIterator[tuple[Node, Node]]:
    first, second = Node(FIRST, folder), Node(SECOND, folder)
    async with running(first, second):
        await up(first, second)
        yield first, second


def acknowledge(request: Request) -> None:
    request.origin.reply(request, build_frame(Op.SEND_ACK, request.request_id, b"\x90"))


def send_to(peer: UserId, request_id: int) -> bytes:
    return build_frame(Op.SEND_MESSAGE, request_id, send_body(peer=peer))


# --- requests and answers ----------------------------------------------------------------------------


async def test_a_request_reaches_its_owner_untouched_and_the_answer_comes_back(folder: Path) -> None:
    async with two_workers(folder) as (first, second):
        user = user_of(FIRST)
        client = await first.logged_in(user)
        peer = peer_of(user, SECOND)
        client.send(send_to(peer, 5))
        request = await second.writer.next()
        assert (request.tenant, request.user, request.device, request.request_id) == (TENANT, user, PHONE, 5)
        assert request.body == send_body(peer=peer)
        acknowledge(request)
        assert await client.frame() == Frame(Op.SEND_ACK, 5, b"\x90")
        assert not first.writer.requests


async def test_a_request_that_is_ours_stays_here(folder: Path) -> None:
    async with two_workers(folder) as (first, second):
        client = await first.logged_in(user_of(FIRST))
        client.send(send_to(peer_of(user_of(FIRST), FIRST), 5))
        acknowledge(await first.writer.next())
        assert (await client.frame()).request_id == 5
        assert not second.writer.requests


async def test_a_pull_goes_to_the_owner_of_the_user(folder: Path) -> None:
    async with two_workers(folder) as (first, second):
        client = await first.logged_in(user_of(SECOND))
        client.send(build_message(Op.PULL_MAILBOX, 5, PullMailbox(MailboxSeq(0), 300)))
        request = await second.mailbox.next()
        request.origin.reply(request, build_frame(Op.MAILBOX_BATCH, 5, bytes(limits.BATCH_BYTES_MAX)))
        assert len((await client.frame()).body) == limits.BATCH_BYTES_MAX


async def test_both_workers_agree_on_the_owner_of_a_conversation(folder: Path) -> None:
    async with two_workers(folder) as (first, second):
        one = user_of(FIRST)
        other = peer_of(one, SECOND)
        here, there = await first.logged_in(one), await second.logged_in(other)
        here.send(send_to(other, 2))
        there.send(send_to(one, 3))
        assert {(await second.writer.next()).user for _ in range(2)} == {one, other}


@pytest.mark.shows("X16")
@pytest.mark.parametrize(
    ("body", "error"),
    [
        (send_body(kind=2, peer=b"g" * 15), errors.InvalidArgument),
        (send_body(kind=7), errors.InvalidArgument),
        (send_body(bytes(limits.MESSAGE_BODY_BYTES_MAX + 1)), errors.TooLarge),
        (b"", errors.InvalidArgument),
        (b"\x96\x92\x01\xc4\x10short", errors.InvalidArgument),
        (b"\xc1" * 40, errors.InvalidArgument),
    ],
)
async def test_a_send_that_names_nobody_is_answered_and_goes_nowhere(
    folder: Path, body: bytes, error: type[errors.ClientError]
) -> None:
    async with two_workers(folder) as (first, second):
        client = await first.logged_in(user_of(FIRST))
        client.send(build_frame(Op.SEND_MESSAGE, 5, body))
        frame = await client.frame()
        assert frame.request_id == 5
        assert decode_body(Op.ERROR, frame.body).code == error.code
        assert not first.writer.requests + second.writer.requests


async def test_the_largest_message_travels(folder: Path) -> None:
    async with two_workers(folder) as (first, second):
        user = user_of(FIRST)
        client = await first.logged_in(user)
        body = send_body(bytes(limits.MESSAGE_BODY_BYTES_MAX), peer=peer_of(user, SECOND))
        client.send(build_frame(Op.SEND_MESSAGE, 5, body))
        assert (await second.writer.next()).body == body


async def test_an_unusual_but_legal_encoding_of_the_target_finds_its_owner(folder: Path) -> None:
    async with two_workers(folder) as (first, second):
        user = user_of(FIRST)
        client = await first.logged_in(user)
        usual = send_body(peer=peer_of(user, SECOND))
        unusual = usual.replace(b"\x92\x01\xc4\x10", b"\x92\xcc\x01\xc4\x10", 1)
        client.send(build_frame(Op.SEND_MESSAGE, 5, unusual))
        assert (await second.writer.next()).body == unusual


# --- presence and pushes -----------------------------------------------------------------------------


@pytest.mark.shows("M10")
async def test_a_push_reaches_a_session_behind_another_worker(folder: Path) -> None:
    async with two_workers(folder) as (first, second):
        user = user_of(SECOND)
        client = await first.logged_in(user)
        (session,) = second.presence.sessions_of(TENANT, user)
        assert session.worker == FIRST
        previous = second.presence.advance(TENANT, user, MailboxSeq(20))
        target = (session.handle, session.generation, previous, 20, False)
        second.router.push(session.worker, [target], entry(3))
        ((told_previous, mailbox_seq, pushed),) = (await client.body(Op.PUSH_EVENTS)).events
        assert (told_previous, mailbox_seq, bytes(pushed)) == (17, 20, entry(3))


async def test_log_ins_carry_the_newest_entry_and_the_store_is_asked_once_per_user(folder: Path) -> None:
    async with two_workers(folder) as (first, second):
        user = user_of(SECOND)
        client = await first.connect()
        assert (await client.log_in(token(first.clock, user=user))).newest_mailbox_seq == 17
        second.presence.advance(TENANT, user, MailboxSeq(30))
        tablet = await second.connect()
        acknowledged = await tablet.log_in(token(second.clock, user=user), device=TABLET)
        assert acknowledged.newest_mailbox_seq == 30
        client.send(build_message(Op.PING, 2, Ping()))
        assert (await client.body(Op.PONG)).newest_mailbox_seq == 30
        assert second.store.asked == [1]


async def test_a_store_that_fails_makes_nobody_wait_and_is_asked_again(folder: Path) -> None:
    async with two_workers(folder) as (first, second):
        second.store.failing = True
        client = await first.connect()
        user = user_of(SECOND)
        assert (await client.log_in(token(first.clock, user=user))).newest_mailbox_seq == 0
        second.store.failing = False
        client.send(build_message(Op.PING, 2, Ping()))
        assert (await client.body(Op.PONG)).newest_mailbox_seq == 17


async def test_a_later_log_in_at_another_worker_replaces_the_device(folder: Path) -> None:
    async with two_workers(folder) as (first, second):
        user = user_of(FIRST)
        old = await second.logged_in(user)
        first.clock.advance(milliseconds=1)
        await first.logged_in(user)
        assert (await old.goaway()).code == errors.Replaced.code
        await stays(lambda: len(first.presence) == 1, what="the new session stays")
        assert first.presence.sessions_of(TENANT, user)[0].worker == FIRST


async def test_a_closed_session_is_withdrawn_at_its_owner(folder: Path) -> None:
    async with two_workers(folder) as (first, second):
        client = await first.logged_in(user_of(SECOND))
        assert len(second.presence) == 1
        await client.close()
        await happens(lambda: len(second.presence) == 0, what="withdrawn")


# --- peers that go and come --------------------------------------------------------------------------


async def test_without_its_owner_a_request_is_refused_at_once_and_the_connection_lives(folder: Path) -> None:
    first = Node(FIRST, folder)
    async with running(first):
        user = user_of(FIRST)
        client = await first.logged_in(user)
        client.send(send_to(peer_of(user, SECOND), 5))
        frame = await client.frame()
        assert frame.request_id == 5
        assert decode_body(Op.ERROR, frame.body).code == errors.Unavailable.code
        client.send(send_to(peer_of(user, FIRST), 6))
        acknowledge(await first.writer.next())
        assert (await client.frame()).request_id == 6
        assert first.metrics.link_unavailable == 1


@pytest.mark.shows("F-30")
async def test_a_request_whose_answer_is_lost_with_the_link_has_an_unknown_outcome(folder: Path) -> None:
    async with two_workers(folder) as (first, second):
        user = user_of(FIRST)
        client = await first.logged_in(user)
        client.send(send_to(peer_of(user, SECOND), 5))
        request = await second.writer.next()
        stream = second.links.stream(FIRST)
        assert stream is not None
        stream.abort()
        frame = await client.frame()
        assert frame.request_id == 5
        assert decode_body(Op.ERROR, frame.body).code == errors.DeadlineExceeded.code
        await up(first, second)
        acknowledge(request)
        client.send(send_to(peer_of(user, SECOND), 6))
        acknowledge(await second.writer.next())
        assert await client.frame() == Frame(Op.SEND_ACK, 6, b"\x90")


async def test_after_a_link_is_back_every_session_is_known_again(folder: Path) -> None:
    async with two_workers(folder) as (first, second):
        client = await first.logged_in(user_of(SECOND))
        stream = first.links.stream(SECOND)
        assert stream is not None
        stream.abort()
        await happens(lambda: len(second.presence) == 0, what="dropped with the link")
        await happens(lambda: len(second.presence) == 1, what="announced again")
        client.send(build_message(Op.PING, 2, Ping()))
        await client.body(Op.PONG)


async def test_a_restarted_owner_learns_every_session_and_serves_on(folder: Path) -> None:
    first, second = Node(FIRST, folder), Node(SECOND, folder)
    await first.start()
    await second.start()
    await up(first, second)
    client = await first.logged_in(user_of(SECOND))
    await second.stop()
    await happens(lambda: first.links.health[SECOND] is LinkState.CONNECTING, what="lost")
    client.send(build_message(Op.PING, 2, Ping()))
    assert (await client.body(Op.PONG)).newest_mailbox_seq == 0
    again = Node(SECOND, folder)
    await again.start()
    await up(first, again)
    await happens(lambda: len(again.presence) == 1, what="announced again")
    client.send(build_message(Op.PING, 3, Ping()))
    assert (await client.body(Op.PONG)).newest_mailbox_seq == 17
    await first.stop()
    await again.stop()


async def test_a_second_stream_of_a_restarted_peer_replaces_the_first(folder: Path) -> None:
    async with two_workers(folder) as (first, second):
        old = second.links.stream(FIRST)
        reader, writer = await asyncio.open_unix_connection(str(folder / "link-1.sock"))
        writer.write(build_hello(Hello(TWO.digest(), FIRST, BootId(bytes(16)))))
        await happens(lambda: second.links.stream(FIRST) not in {old, None}, what="replaced")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        await up(first, second)


# --- who may link ------------------------------------------------------------------------------------


async def test_workers_with_different_maps_do_not_talk(folder: Path) -> None:
    first = Node(FIRST, folder)
    other = Node(SECOND, folder, placement=Placement(workers=2, core_instances=2, mailbox_instances=1))
    async with running(first, other):
        for node, peer in ((first, SECOND), (other, FIRST)):
            await happens(
                lambda node=node, peer=peer: node.links.health[peer] is LinkState.REFUSED_PLACEMENT,  # type: ignore[misc]  # bound in this turn of the loop
                what="refused and shown",
            )
        assert first.links.stream(SECOND) is None
        client = await first.logged_in(user_of(FIRST))
        client.send(send_to(peer_of(user_of(FIRST), SECOND), 5))
        assert (await client.body(Op.ERROR)).code == errors.Unavailable.code


STRANGERS = {
    "itself": build_hello(Hello(TWO.digest(), SECOND, BootId(bytes(16)))),
    "a number that does not exist": build_hello(Hello(TWO.digest(), WorkerId(9), BootId(bytes(16)))),
    "no greeting": build_frame(LinkOp.ANNOUNCE, 0, bytes(61)),
    "a short greeting": build_frame(LinkOp.HELLO, 0, bytes(3)),
    "garbage": b"GET / HTTP/1.1\r\n\r\n",
    "an endless frame": b"\x01\x00\xf0\x01" + bytes(4) + b"\xff" * 4,
}


@pytest.mark.shows("F-45")
@pytest.mark.parametrize("name", STRANGERS)
async def test_a_stranger_on_the_link_socket_is_cut(folder: Path, name: str) -> None:
    second = Node(SECOND, folder)
    async with running(second):
        reader, writer = await asyncio.open_unix_connection(str(folder / "link-1.sock"))
        writer.write(STRANGERS[name])
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                while await reader.read(4_096):
                    pass
        writer.close()
        assert second.links.stream(FIRST) is None


@pytest.mark.parametrize("op", [Op.AUTH, Op.SESSION_LIST_REQ, 0x7777])
async def test_a_peer_that_forwards_what_must_not_travel_is_cut(folder: Path, op: int) -> None:
    async with two_workers(folder) as (first, second):
        stream = first.links.stream(SECOND)
        assert stream is not None
        stream.send(build_frame(LinkOp.REQUEST, 1, bytes(8) + op.to_bytes(2, "big") + bytes(52)))
        await asyncio.wait_for(stream.ended.wait(), 5)
        await up(first, second)


async def test_only_the_owner_may_open_the_link_socket(folder: Path) -> None:
    second = Node(SECOND, folder)
    (folder / "link-1.sock").write_text("left by a predecessor")
    async with running(second):
        mode = (folder / "link-1.sock").stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
    assert not (folder / "link-1.sock").exists()


# --- full --------------------------------------------------------------------------------------------


async def stalled_link(first: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that does not read: everything written to it stays here."""
    stream = first.links.stream(SECOND)
    assert stream is not None
    monkeypatch.setattr(type(stream), "flush", lambda _stream: None)


async def test_a_full_link_refuses_requests_and_drops_pushes_but_keeps_what_it_took(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_workers(folder) as (first, second):
        user = user_of(FIRST)
        client = await first.logged_in(user)
        peer = peer_of(user, SECOND)
        with monkeypatch.context() as stalled:
            await stalled_link(first, stalled)
            large = entry(1, bytes(60_000))
            while not first.metrics.link_pushes_dropped:
                first.router.push(SECOND, [(0, 0, 0, 1, False)], large)
            client.send(send_to(peer, 5))
            assert (await client.body(Op.ERROR)).code == errors.Unavailable.code
            stream = first.links.stream(SECOND)
            assert stream is not None
            assert limits.LINK_UNSENT_BYTES_MAX < stream.unsent_bytes < limits.LINK_REPLY_BYTES_MAX
        stream.flush()
        await happens(lambda: not stream.is_full, what="written")
        client.send(send_to(peer, 6))
        acknowledge(await second.writer.next())
        assert (await client.frame()).request_id == 6


async def test_answers_that_nobody_takes_end_the_link(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_workers(folder) as (first, second):
        with monkeypatch.context() as stalled:
            await stalled_link(first, stalled)
            stream = first.links.stream(SECOND)
            assert stream is not None
            with capture_logs() as lines:
                for _ in range(limits.LINK_REPLY_BYTES_MAX // 1_000_000 + 5):
                    stream.send(bytes(1_000_000))
                await asyncio.wait_for(stream.ended.wait(), 5)
        assert [line["event"] for line in lines].count("link_overrun") == 1
        await up(first, second)


def test_the_owner_cache_is_bounded_and_keeps_what_is_used() -> None:
    cache: OwnerCache[int] = OwnerCache(8)
    cache.put(0, SECOND)
    for key in range(1, 100):
        cache.put(key, FIRST)
        assert cache.get(0) == SECOND
        assert len(cache) <= 9
    assert cache.get(1) is None


def test_the_same_holds_on_the_loop_that_workers_run(folder: Path) -> None:
    scenarios: Sequence[Any] = (
        test_a_request_reaches_its_owner_untouched_and_the_answer_comes_back,
        test_a_push_reaches_a_session_behind_another_worker,
        test_a_request_whose_answer_is_lost_with_the_link_has_an_unknown_outcome,
        test_a_restarted_owner_learns_every_session_and_serves_on,
        test_workers_with_different_maps_do_not_talk,
    )
    for scenario in scenarios:
        run_on_uvloop(lambda scenario=scenario: scenario(folder))  # type: ignore[misc]  # bound in this turn of the loop

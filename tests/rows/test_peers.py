"""Peers that take and give nothing: F-40, F-43 and F-44 on a whole service, with genuine users beside them.

Thousands of sockets of one test are spread over a few seconds, as a flood from outside would be; the figures
say how many there were and how long the service kept them.
"""

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final, Self

import pytest

from qim.client.probe import Probe, text_message
from qim.client.transport import build_tls_context
from qim.ctl import protocol
from qim.errors import ControlError
from qim.ids import DeviceId
from qim.limits import (
    AUTH_TIMEOUT_MS,
    FRAME_TIMEOUT_MS,
    TLS_HANDSHAKE_TIMEOUT_MS,
    UNSENT_BYTES_MAX,
)
from qim.wire.bodies import Auth, SendAck, build_message, decode_body
from qim.wire.layout import Op
from tests.field.figures import Figures
from tests.process.load import Account
from tests.rows.world import new_account, probe_of
from tests.services.dev_server import DevServer
from tests.waiting import eventually, happens

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

PUSHES: Final = 10_000
PUSH_BYTES: Final = 1_024
IN_FLIGHT: Final = 256
STRANGERS: Final = 2_000
LOGGED_IN: Final = 200
OPENED_AT_ONCE: Final = 50
SLACK_SECONDS: Final = 3.0
"""For a machine of two shared cores that closes thousands of sockets at the same moment."""
GROWTH_BYTES_MAX: Final = 16 * 2**20
"""What a flood may leave behind: a seventh of what it takes while it lasts."""
MEMORY_SECONDS_MAX: Final = 30.0
"""Until the memory of a flood has been given back, twice the interval and a spare one."""


def metrics_of(server: DevServer) -> dict[str, float]:
    """Plain numbers, summed over the processes; empty while nobody answers."""
    control = Path(json.loads((server.folder / "dev.json").read_text())["control_socket"])
    try:
        processes = protocol.call(control, "metrics", timeout_seconds=5.0)["processes"]
    except ControlError:
        return {}
    found: dict[str, float] = {}
    for process in processes:
        for name, value in (process or {}).items():
            if isinstance(value, int | float):
                found[name] = found.get(name, 0) + value
    return found


def metric(server: DevServer, name: str) -> float:
    """One number; asked again where a snapshot was just being written."""
    return eventually(lambda: metrics_of(server) or None, what="metrics")[name]  # type: ignore[index]  # not None


def memory_of(pid: int) -> int:
    """Resident bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4_096


def descriptors_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


# --- F-40 ---------------------------------------------------------------------------------------------


@pytest.mark.shows("F-40", "M10")
async def test_a_reader_that_stopped_is_cut_at_its_bytes_and_pulls_everything_later(
    tmp_path: Path, figures: Figures
) -> None:
    rates = {"QIM__LIMITS__SENDS_PER_SECOND": "100000", "QIM__LIMITS__SENDS_BURST": "200000"}
    with DevServer(tmp_path, environment=rates) as server:
        sender, receiver = new_account(server), new_account(server)
        (worker,) = server.worker_pids()
        descriptors = descriptors_of(worker)
        async with probe_of(server, receiver) as slow, probe_of(server, receiver) as normal:
            stop_reading(slow)
            began, memory = time.monotonic(), memory_of(worker)
            with QueueWatch(server) as queue:
                await push(server, sender, receiver)
                await happens(
                    lambda: len(normal.pushed) >= PUSHES,
                    what="the reading device got all",
                    timeout_seconds=30,
                )
            seconds = time.monotonic() - began
            assert metric(server, "slow_disconnects") == 1, "the reader that stopped was not cut"
            assert queue.highest <= UNSENT_BYTES_MAX
            assert "connection_slow" in server.log()
            # Its descriptor is gone although it takes nothing: what the kernel holds is the kernel's.
            await happens(lambda: descriptors_of(worker) == descriptors + 1, what="the slow one is cut")
        grown = memory_of(worker) - memory
        async with probe_of(server, receiver) as back:
            entries = await back.drain_mailbox()
        assert [entry.conversation_seq for _, entry in entries] == list(range(1, PUSHES + 1))
    figures.note("pushes of 1 KiB", PUSHES)
    figures.note("messages a second", PUSHES / seconds)
    figures.note("most bytes held for the reader that stopped", int(queue.highest))
    figures.note("memory of the worker grew by MiB", grown / 2**20)
    figures.note("entries pulled afterwards", len(entries))


class QueueWatch:
    """Reads the gauge of held bytes again and again, in a thread, and keeps the highest."""

    def __init__(self, server: DevServer) -> None:
        self.highest = 0.0
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.05):
            self.highest = max(self.highest, metrics_of(self._server).get("send_queue_bytes", 0.0))


def stop_reading(probe: Probe) -> None:
    transport = probe.writer.transport
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    transport.pause_reading()  # type: ignore[attr-defined]  # a transport that reads


async def push(server: DevServer, sender: Account, receiver: Account) -> None:
    text = "x" * PUSH_BYTES
    async with probe_of(server, sender) as probe:
        waiting: list[asyncio.Future[Any]] = []
        for _ in range(PUSHES):
            waiting.append(probe.post(Op.SEND_MESSAGE, text_message(receiver.user, text)))
            if len(waiting) >= IN_FLIGHT:
                await asyncio.wait_for(waiting.pop(0), 20)
        for frame in [await asyncio.wait_for(answer, 20) for answer in waiting]:
            assert isinstance(decode_body(frame.opcode, frame.body), SendAck)


# --- F-43 ---------------------------------------------------------------------------------------------


def client_hello(server: DevServer) -> bytes:
    """The first bytes that an honest client would send."""
    context = build_tls_context(server.certificate)
    outgoing = ssl.MemoryBIO()
    hello = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        hello.do_handshake()
    return outgoing.read()


async def open_stranger(server: DevServer, first: bytes) -> float:
    """Connects, says `first` and no more; seconds until the server has ended it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    began = time.monotonic()
    try:
        writer.write(first)
        while await reader.read(4_096):
            pass
    except OSError:
        pass
    finally:
        writer.transport.abort()
    return time.monotonic() - began


async def flood(open_one: Callable[[int], Awaitable[float]], count: int) -> list[float]:
    """All at the same time, opened a few at a time; how long each was kept."""
    tasks = []
    for number in range(count):
        tasks.append(asyncio.ensure_future(open_one(number)))
        if number % OPENED_AT_ONCE == 0:
            await asyncio.sleep(0)
    return list(await asyncio.wait_for(asyncio.gather(*tasks), 120))


async def log_in_meanwhile(server: DevServer, account: Account, until: "asyncio.Future[Any]") -> list[float]:
    """Genuine log-ins, one after the other, until the flood is over; how long each took."""
    seconds = []
    while not until.done():
        began = time.monotonic()
        async with probe_of(server, account) as probe:
            assert probe.ack is not None
        seconds.append(time.monotonic() - began)
    return seconds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    with DevServer(tmp_path_factory.mktemp("d")) as server:
        yield server


@pytest.mark.shows("F-43")
@pytest.mark.parametrize("kind", ["half a ClientHello", "nothing", "garbage in TLS", "plain text"])
async def test_thousands_of_strangers_are_closed_in_time_and_genuine_users_are_served(
    server: DevServer, kind: str, figures: Figures
) -> None:
    hello = client_hello(server)
    first = {
        "half a ClientHello": hello[: len(hello) // 2],
        "nothing": b"",
        "garbage in TLS": b"\x16\x03\x01\x02\x00" + bytes(range(256)) * 2,
        "plain text": b"GET / HTTP/1.1\r\nHost: qim\r\n\r\n",
    }[kind]
    (worker,) = server.worker_pids()
    account = new_account(server)
    await flood(lambda _: open_stranger(server, first), STRANGERS // 4)
    memory, descriptors = memory_of(worker), descriptors_of(worker)
    flooding = asyncio.ensure_future(flood(lambda _: open_stranger(server, first), STRANGERS))
    logins = await log_in_meanwhile(server, account, flooding)
    kept = await flooding
    await happens(lambda: descriptors_of(worker) <= descriptors + 2, what="descriptors return")
    assert max(kept) <= TLS_HANDSHAKE_TIMEOUT_MS / 1000 + SLACK_SECONDS
    peak = memory_of(worker) - memory
    await happens(
        lambda: memory_of(worker) - memory < GROWTH_BYTES_MAX, what="memory is flat again",
        timeout_seconds=MEMORY_SECONDS_MAX,
    )  # fmt: skip
    assert logins
    assert server.worker_pids() == [worker]
    figures.note("strangers", STRANGERS)
    figures.note("kept at most, seconds", max(kept))
    figures.note("genuine log-ins meanwhile", len(logins))
    figures.note("slowest of them, seconds", max(logins))
    figures.note("memory grew by MiB, at the end of the flood", peak / 2**20)
    figures.note("memory grew by MiB, half a minute later at most", (memory_of(worker) - memory) / 2**20)


# --- F-44 ---------------------------------------------------------------------------------------------


async def trickle(writer: asyncio.StreamWriter, frame: bytes, ended: "asyncio.Future[Any]") -> float:
    """Sends a byte a second until the server ends the connection; seconds from the first byte."""
    began = time.monotonic()
    for at in range(len(frame)):
        writer.write(frame[at : at + 1])
        done, _ = await asyncio.wait({ended}, timeout=1.0)
        if done:
            return time.monotonic() - began
    raise AssertionError("the whole frame was taken")


async def trickle_a_login(server: DevServer, context: ssl.SSLContext, frame: bytes) -> float:
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", server.port, ssl=context, server_hostname="localhost", ssl_handshake_timeout=60
    )
    ended = asyncio.ensure_future(until_end(reader))
    try:
        return await trickle(writer, frame, ended)
    finally:
        writer.transport.abort()
        await ended


async def until_end(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(65_536):
            pass


async def trickle_a_message(server: DevServer, account: Account, frame: bytes) -> float:
    async with probe_of(server, account) as probe:
        return await trickle(probe.writer, frame, probe._reading)


@pytest.mark.shows("F-44")
@pytest.mark.parametrize("who", ["strangers", "users"])
async def test_frames_of_a_byte_a_second_end_at_their_deadline(
    server: DevServer, who: str, figures: Figures
) -> None:
    (worker,) = server.worker_pids()
    genuine, count = new_account(server), STRANGERS if who == "strangers" else LOGGED_IN
    context = build_tls_context(server.certificate)
    login = build_message(Op.AUTH, 1, Auth(genuine.token, DeviceId(b"d" * 16)))
    message = build_message(Op.SEND_MESSAGE, 9, text_message(genuine.user, "never whole"))
    users = [new_account(server) for _ in range(LOGGED_IN)]

    async def open_one(number: int) -> float:
        if who == "strangers":
            return await trickle_a_login(server, context, login)
        return await trickle_a_message(server, users[number], message)

    memory, descriptors = memory_of(worker), descriptors_of(worker)
    flooding = asyncio.ensure_future(flood(open_one, count))
    logins = await log_in_meanwhile(server, genuine, flooding)
    kept = await flooding
    await happens(lambda: descriptors_of(worker) <= descriptors + 2, what="descriptors return")
    limit = FRAME_TIMEOUT_MS if who == "users" else max(FRAME_TIMEOUT_MS, AUTH_TIMEOUT_MS)
    assert max(kept) <= limit / 1000 + SLACK_SECONDS
    assert min(kept) >= 1.0, "cut before it could be told from a slow network"
    assert logins
    assert server.worker_pids() == [worker]
    figures.note(f"{who} that send a byte a second", count)
    figures.note("kept at most, seconds", max(kept))
    figures.note("genuine log-ins meanwhile", len(logins))
    figures.note("slowest of them, seconds", max(logins))
    figures.note("memory grew by MiB", (memory_of(worker) - memory) / 2**20)

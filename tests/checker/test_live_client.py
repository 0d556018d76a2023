"""A client process of a live run: its history is written before its sockets, and a final code ends it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import pytest

from qim.clock import SystemClock
from qim.errors import GoingAway, Replaced
from qim.ids import MailboxSeq, Millis, SessionId, UserId
from qim.wire import bodies
from qim.wire.frames import FrameSplitter
from qim.wire.layout import Op
from tests.checker.history import FileHistory, Pull, Recorder
from tests.checker.live_client import ClientProcess, Unanswered
from tests.checker.live_device import EndedForGood
from tests.checker.live_memory import ClientOrder, DeviceOrder
from tests.waiting import happens
from workers.devfolder import make_certificate
from workers.listeners import build_tls_context

ME, PEER, DEVICE = "0a" * 16, "0b" * 16, "0d" * 16
NAME = "client-0.0"


def _process(folder: Path, recorder: Recorder, *, port: int = 1) -> ClientProcess:
    key, certificate = make_certificate(datetime.fromtimestamp(SystemClock().now_ms() / 1000, tz=UTC))
    (folder / "key.pem").write_bytes(key)
    (folder / "certificate.pem").write_bytes(certificate)
    device = DeviceOrder(ME, "token", DEVICE, [PEER], sends_per_second=0.0)
    ca = str(folder / "certificate.pem")
    return ClientProcess(ClientOrder(port, ca, 1, NAME, str(folder), 7, [device]), recorder)


class LookingTransport:
    """At each write it looks what stands in the history by now."""

    def __init__(self, history: Path) -> None:
        self.seen: list[tuple[int, list[str]]] = []
        """Opcode, and the types of the pulls in the file."""
        self._history = history
        self._splitter = FrameSplitter()
        self.request_id = 0

    def write(self, data: bytes) -> None:
        pulls = [
            str(event.type) for event in FileHistory([self._history]).events() if isinstance(event, Pull)
        ]
        for frame in self._splitter.feed(data):
            self.seen.append((frame.opcode, pulls))
            self.request_id = frame.request_id


async def test_a_frame_leaves_when_its_event_stands_in_the_file(tmp_path: Path) -> None:
    with Recorder(tmp_path / f"{NAME}.jsonl") as recorder:
        process = _process(tmp_path, recorder)
        (device,) = process.devices
        transport = LookingTransport(tmp_path / f"{NAME}.jsonl")
        process.on_connected(device, cast(asyncio.Transport, transport))
        device.log_in()
        await happens(lambda: len(transport.seen) == 1, what="AUTH left")
        ack = bodies.AuthAck(
            UserId(bytes.fromhex(ME)), SessionId(bytes(16)), Millis(0), 25_000, {}, MailboxSeq(0)
        )
        device.receive(memoryview(bodies.build_message(Op.AUTH_ACK, transport.request_id, ack)))
        device.tick(time.monotonic_ns())
        await happens(lambda: len(transport.seen) == 2, what="the pull left")
    assert transport.seen == [(Op.AUTH, []), (Op.PULL_MAILBOX, ["invoke"])]


@contextlib.asynccontextmanager
async def _server(folder: Path, goodbye: bytes) -> AsyncIterator[tuple[asyncio.Server, list[int]]]:
    """Says nothing but goodbye; counts who came."""
    came: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        came.append(1)
        writer.write(goodbye)
        writer.close()

    tls = build_tls_context(certificate_file=folder / "certificate.pem", key_file=folder / "key.pem")
    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as server:
        yield server, came


async def test_a_process_that_is_told_never_to_come_back_ends_with_an_error(tmp_path: Path) -> None:
    with Recorder(tmp_path / f"{NAME}.jsonl") as recorder:
        process = _process(tmp_path, recorder)
        async with _server(tmp_path, bodies.build_goaway(Replaced("another one"))) as (server, _):
            process.order.port = server.sockets[0].getsockname()[1]
            with pytest.raises(EndedForGood, match=r"Replaced \(4003\) another one"):
                await asyncio.wait_for(process.run(asyncio.Event()), 10.0)


async def test_a_process_that_is_told_to_come_back_does(tmp_path: Path) -> None:
    stop = asyncio.Event()
    with Recorder(tmp_path / f"{NAME}.jsonl") as recorder:
        process = _process(tmp_path, recorder)
        async with _server(tmp_path, bodies.build_goaway(GoingAway())) as (server, came):
            process.order.port = server.sockets[0].getsockname()[1]
            running = asyncio.create_task(process.run(stop))
            await happens(lambda: len(came) >= 2, what="came again")
            stop.set()
            await asyncio.wait_for(running, 10.0)


async def test_a_process_whose_messages_stay_without_an_answer_says_so(tmp_path: Path) -> None:
    stop = asyncio.Event()
    stop.set()
    with Recorder(tmp_path / f"{NAME}.jsonl") as recorder:
        process = _process(tmp_path, recorder)
        process.settle_seconds_max = 0.1
        process.devices[0].memory.on_made("0c" * 16, PEER)
        with pytest.raises(Unanswered, match="1 messages have no answer after 0 s"):
            await asyncio.wait_for(process.run(stop), 10.0)


async def test_a_device_that_is_lost_to_a_mistake_of_ours_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Recorder(tmp_path / f"{NAME}.jsonl") as recorder:
        process = _process(tmp_path, recorder)
        monkeypatch.setattr(process.devices[0], "begin", None)
        with pytest.raises(TypeError):
            await asyncio.wait_for(process.run(asyncio.Event()), 10.0)

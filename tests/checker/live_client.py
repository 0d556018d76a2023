"""One client process of a live run: the sockets of several devices, one buffer, one history file.

It is started by `live.py` and may be killed at any moment; what it must remember stands in its files
(`live_memory.py`), so the next process goes on. One tick for all devices asks each what is due. Events and
frames that follow from a tick or from the reads of one pass of the loop are gathered: first the events are
written to the history in one call, then each socket gets its frames in one write. Nothing leaves that is not
in the history.

On SIGTERM nothing new is sent; the process waits until each message has its answer, and ends. Where one has
none after `SETTLE_SECONDS_MAX`, it ends with an error that says how many. With `is_final`
it drains each device to an empty page and reads its histories and marks instead, exact; a server that refuses
any of it ends it with an error. So does whatever a server of this protocol may not send, and, in every
process, a code that forbids a device to come back.
"""

import asyncio
import contextlib
import gc
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import uvloop

from qim.client.transport import build_tls_context
from qim.limits import PAGE_ENTRIES_MAX, READ_BUFFER_BYTES
from tests.checker.history import Device, Recorder
from tests.checker.live_device import DeviceClient
from tests.checker.live_memory import ClientOrder, recall
from tests.waiting import eventually_async

TICK_SECONDS: Final = 0.01
RETRY_SECONDS: Final = 0.1
CONNECT_SECONDS_MAX: Final = 10.0
SETTLE_SECONDS_MAX: Final = 40.0
"""After SIGTERM; whoever sent it waits longer (`live_clients.py`)."""
ANSWER_SECONDS_MAX: Final = 20.0
DRAINS_AT_ONCE: Final = 4
GC_THRESHOLDS: Final = (50_000, 20, 20)


class Unanswered(Exception):
    """The server is there, and messages stay without an answer."""


class ClientProcess:
    """The desk of its devices: it owns the sockets, the clock of the ticks and the history."""

    def __init__(self, order: ClientOrder, recorder: Recorder) -> None:
        self.order, self.recorder = order, recorder
        self.is_stopping = False
        self.settle_seconds_max = SETTLE_SECONDS_MAX
        memories = recall(order)
        self.devices = [DeviceClient(self, *both) for both in zip(order.devices, memories, strict=True)]
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tls = build_tls_context(order.ca)
        self._buffer = memoryview(bytearray(READ_BUFFER_BYTES))
        self._sockets: dict[DeviceClient, asyncio.Transport] = {}
        self._out: dict[DeviceClient, list[bytes]] = {}
        self._operations = 0
        self._is_woken = False

    # --- for the devices ---

    def next_operation(self) -> int:
        self._operations += 1
        return self._operations

    def put(self, device: DeviceClient, frame: bytes) -> None:
        self._out.setdefault(device, []).append(frame)
        self.wake()

    def wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Events first."""
        self._is_woken = False
        self.recorder.flush()
        out, self._out = self._out, {}
        for device, frames in out.items():
            transport = self._sockets.get(device)
            if transport is not None:
                transport.write(b"".join(frames))

    # --- sockets ---

    async def connect(self, device: DeviceClient) -> "_Socket":
        device.begin()
        async with asyncio.timeout(CONNECT_SECONDS_MAX):
            _, protocol = await asyncio.get_running_loop().create_connection(
                lambda: _Socket(self, device, self._buffer), "127.0.0.1", self.order.port,
                ssl=self._tls, server_hostname="localhost",
            )  # fmt: skip
        device.log_in()
        return protocol

    def on_connected(self, device: DeviceClient, transport: asyncio.Transport) -> None:
        self._sockets[device] = transport

    def on_lost(self, device: DeviceClient) -> None:
        self._sockets.pop(device, None)
        self._out.pop(device, None)
        device.on_lost()
        self.wake()

    def fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    # --- the load ---

    async def run(self, stop: asyncio.Event) -> None:
        """Until every message has its answer after `stop`; raises where that takes too long."""
        tasks = [asyncio.create_task(self._keep_connected(device)) for device in self.devices]
        self._tick()
        try:
            await self._unless_failed(stop.wait())
            self.is_stopping = True
            async with asyncio.timeout(self.settle_seconds_max):
                await self._unless_failed(self._settled())
        except TimeoutError as error:
            left = sum(len(device.memory.unanswered) for device in self.devices)
            raise Unanswered(
                f"{left} messages have no answer after {self.settle_seconds_max:.0f} s"
            ) from error
        finally:
            for task in tasks:
                task.cancel()
            self.recorder.flush()

    async def _unless_failed(self, waiting: Any) -> None:
        task = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait({task, self.failed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
        if self.failed.done():
            await self.failed

    async def _settled(self) -> None:
        while not all(device.is_settled for device in self.devices):
            await _pause(RETRY_SECONDS)

    async def _keep_connected(self, device: DeviceClient) -> None:
        try:
            while True:
                with contextlib.suppress(OSError, TimeoutError):
                    await (await self.connect(device)).lost
                await _pause(RETRY_SECONDS)
        except Exception as error:  # noqa: BLE001 - a device that is gone in silence would carry no load
            self.fail(error)

    def _tick(self) -> None:
        try:
            now_ns = time.monotonic_ns()
            for device in self.devices:
                device.tick(now_ns)
        except BaseException as error:  # noqa: BLE001 - the run must end with it, not the loop go on without it
            self.fail(error)
            return
        asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    # --- the last reads ---

    async def drain(self) -> None:
        """To an empty page, then every history and mark, exact."""
        gate = asyncio.Semaphore(DRAINS_AT_ONCE)
        self._tick()
        await self._unless_failed(
            asyncio.gather(*(self._drain_behind(gate, device) for device in self.devices))
        )
        self.recorder.flush()

    async def _drain_behind(self, gate: asyncio.Semaphore, device: DeviceClient) -> None:
        async with gate:
            try:
                await self._drain(device)
            except BaseException as error:
                self.fail(error)
                raise

    async def _drain(self, device: DeviceClient) -> None:
        await self.connect(device)
        await self._answered(device, lambda: device.is_ready)
        me = device.device
        self.recorder.note(
            Device(time.monotonic_ns(), self.order.process, me.user, me.device, device.memory.cursor)
        )
        for peer in me.peers:
            before, more = 0, True
            while more:
                device.ask_history(peer, before=before, limit=PAGE_ENTRIES_MAX, is_final=True)
                await self._answered(device, lambda: device.is_idle)
                before = device.history_goes_on
                more = bool(before)
            device.mark_read(peer, wanted=0, is_final=True)
            await self._answered(device, lambda: device.is_idle)

    async def _answered(self, device: DeviceClient, is_there: Any) -> None:
        async def look() -> bool:
            return bool(is_there()) or device.failure > 0

        await eventually_async(look, what="an answer to a last read", timeout_seconds=ANSWER_SECONDS_MAX)
        assert not device.failure, f"a last read was refused with {device.failure}"


class _Socket(asyncio.BufferedProtocol):
    """The transport of one device; all of a process read into one buffer."""

    def __init__(self, desk: ClientProcess, device: DeviceClient, buffer: memoryview) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._desk, self._device, self._buffer = desk, device, buffer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an isinstance check: the TLS transport of uvloop is no subclass.
        self._desk.on_connected(self._device, cast(asyncio.Transport, transport))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._device.receive(self._buffer[:nbytes])
        except BaseException as error:  # noqa: BLE001 - the loop would only log it
            self._desk.fail(error)
        self._desk.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._desk.on_lost(self._device)
        if not self.lost.done():
            self.lost.set_result(None)


async def _pause(seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), seconds)


async def main(order: ClientOrder) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    with Recorder(Path(order.folder) / f"{order.process}.jsonl") as recorder:
        process = ClientProcess(order, recorder)
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        await (process.drain() if order.is_final else process.run(stop))


if __name__ == "__main__":
    uvloop.run(main(msgspec.json.decode(sys.argv[1], type=ClientOrder)))

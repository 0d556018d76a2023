"""A TCP proxy between a client and a server of a test, that delays, holds, cuts, swallows and resets.

It runs on an event loop in a thread of its own, so that a test whose loop is busy does not slow it down.
What it does to the bytes is one immutable `Faults`, replaced as a whole while connections live; `counters`
say what it really did, so that a test can show that its fault struck.

    cut            bytes are held, nothing is closed: a network that lost its route. `heal` lets them go on,
                   as the retransmissions of TCP would. One direction alone may be cut.
    swallow        requests reach the server, its answers are thrown away. A stream with a hole must never go
                   on, so such a connection is reset, at once (`close_after_swallow`) or when healed.
    limit_bytes    the connection ends behind so many bytes of the direction, in the middle of a frame
    slice_bytes    every read leaves in pieces of this size, each written on its own

Full: at most one read per direction is held and reading stops meanwhile, so a held connection pushes back as
a real one does. Delayed bytes are bounded by what arrives during the delay. When one side ends, what was read
from it is still delivered, then the other side is ended in the same manner.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

Direction = Literal["to_server", "to_client"]

READ_BYTES: Final = 65_536
ANSWER_SECONDS_MAX: Final = 10.0
STOP_SECONDS_MAX: Final = 5.0
SLICE_PAUSE_SECONDS: Final = 0.001
RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
"""SO_LINGER with zero seconds: closing throws away what is unsent and answers with RST."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What happens to the bytes; the default is a plain wire."""

    latency_ms: float = 0.0
    """Each direction, so a round trip takes twice as long."""
    bytes_per_second: float = 0.0
    """Of each direction of each connection; 0 = not limited."""
    cut: frozenset[Direction] = frozenset()
    swallow: bool = False
    close_after_swallow: bool = True
    slice_bytes: int = 0
    limit_bytes: int = 0
    """Counted over the life of a connection, in the direction to the client; 0 = not limited."""
    refuse: bool = False
    """New connections are reset before anything is forwarded."""


BOTH_WAYS: Final[frozenset[Direction]] = frozenset({"to_server", "to_client"})


@dataclass
class Counters:
    """What was done. Written by the proxy's thread alone, read by anybody."""

    connections: int = 0
    bytes_to_server: int = 0
    bytes_to_client: int = 0
    delayed_reads: int = 0
    held_bytes_to_server: int = 0
    held_bytes_to_client: int = 0
    swallowed_bytes: int = 0
    slices: int = 0
    resets: int = 0
    limited: int = 0
    refused: int = 0

    def note_held(self, direction: Direction, size: int) -> None:
        if direction == "to_server":
            self.held_bytes_to_server += size
        else:
            self.held_bytes_to_client += size

    def note_passed(self, direction: Direction, size: int) -> None:
        if direction == "to_server":
            self.bytes_to_server += size
        else:
            self.bytes_to_client += size


class Proxy:
    """Listens on a port of its own. `upstream`, a socket's path or host and port, is read per connection."""

    def __init__(self, upstream: Path | tuple[str, int]) -> None:
        self.upstream = upstream
        self.faults = Faults()
        self.counters = Counters()
        self.port = 0
        self.changed = asyncio.Event()
        """Belongs to the proxy's loop; replaced at each change of the faults."""
        self._connections: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._server: asyncio.Server | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ANSWER_SECONDS_MAX)
        self._loop.close()

    # --- what tests switch ---

    def set(self, faults: Faults) -> None:
        """From now on; returns when it holds for every connection."""
        self._call(self._set(faults))

    def heal(self) -> None:
        """A plain wire again. Connections whose stream lost bytes are reset."""
        self.set(Faults())

    def reset(self) -> int:
        """Ends every connection with RST on both sides; how many there were."""
        ended: int = self._call(self._reset())
        return ended

    def open_connections(self) -> int:
        return len(self._connections)

    # --- on the proxy's loop ---

    def _call(self, work: "Coroutine[Any, Any, Any]") -> Any:
        done: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return done.result(ANSWER_SECONDS_MAX)

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in list(self._connections):
            connection.abort()
        # They end by themselves; the stream server reports a cancelled one as an error of its own.
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_SECONDS_MAX)

    async def _set(self, faults: Faults) -> None:
        self.faults = faults
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()
        if not faults.swallow:
            for connection in [one for one in self._connections if one.has_hole]:
                self.reset_one(connection)

    async def _reset(self) -> int:
        open_now = list(self._connections)
        for connection in open_now:
            self.reset_one(connection)
        return len(open_now)

    def reset_one(self, connection: "_Connection") -> None:
        self.counters.resets += 1
        connection.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.counters.connections += 1
        if self.faults.refuse:
            self.counters.refused += 1
            abort(writer)
            return
        try:
            upstream = await self._connect()
        except OSError:
            # Nobody listens behind us: the client learns it as it would have without us.
            abort(writer)
            return
        connection = _Connection(self, (reader, writer), upstream)
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            connection.abort()
            self._connections.discard(connection)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self.upstream, Path):
            # Resolved each time: a service may put its sockets elsewhere at each start and leave a link.
            return await asyncio.open_unix_connection(str(self.upstream.resolve()))
        return await asyncio.open_connection(*self.upstream)


class _Connection:
    """One client and its server."""

    def __init__(
        self,
        proxy: Proxy,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._proxy = proxy
        self._client, self._server = client, server
        self._pumps: list[asyncio.Task[None]] = []
        self.has_hole = False
        """Bytes to the client were thrown away."""
        self._passed_to_client = 0
        self._free_at: dict[Direction, float] = {"to_server": 0.0, "to_client": 0.0}
        """When the limited wire has sent what was put on it."""

    async def run(self) -> None:
        """Until both directions have ended, or the connection was aborted."""
        self._pumps = [
            asyncio.create_task(self._pump("to_server", self._client[0], self._server[1])),
            asyncio.create_task(self._pump("to_client", self._server[0], self._client[1])),
        ]
        await asyncio.wait(self._pumps)

    def abort(self) -> None:
        """What is held or on the wire is thrown away."""
        abort(self._client[1])
        abort(self._server[1])
        for pump in self._pumps:
            pump.cancel()

    async def _pump(
        self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        on_wire: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivering = asyncio.create_task(self._deliver(direction, on_wire, writer))
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(READ_BYTES):
                    await self._until_open(direction, len(data))
                    if direction == "to_client" and self._proxy.faults.swallow:
                        self._swallow(data)
                    else:
                        on_wire.put_nowait((self._due(direction, len(data)), data))
            await self._until_open(direction, 0)
            on_wire.put_nowait((0.0, b""))
            await delivering
        finally:
            delivering.cancel()

    async def _until_open(self, direction: Direction, size: int) -> None:
        """Returns when the direction is not cut."""
        if direction in self._proxy.faults.cut:
            self._proxy.counters.note_held(direction, size)
        while direction in self._proxy.faults.cut:
            await self._proxy.changed.wait()

    def _swallow(self, data: bytes) -> None:
        self.has_hole = True
        self._proxy.counters.swallowed_bytes += len(data)
        if self._proxy.faults.close_after_swallow:
            self._proxy.reset_one(self)

    def _due(self, direction: Direction, size: int) -> float:
        faults, now = self._proxy.faults, asyncio.get_running_loop().time()
        if not (faults.latency_ms or faults.bytes_per_second):
            return 0.0
        self._proxy.counters.delayed_reads += 1
        sent = max(now, self._free_at[direction])
        if faults.bytes_per_second:
            sent += size / faults.bytes_per_second
        self._free_at[direction] = sent
        return sent + faults.latency_ms / 1000

    async def _deliver(
        self,
        direction: Direction,
        on_wire: "asyncio.Queue[tuple[float, bytes]]",
        writer: asyncio.StreamWriter,
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await on_wire.get()
            if due > loop.time():
                await _until(due)
            # A cut strikes what is on the wire too; it is held like the rest.
            await self._until_open(direction, 0)
            if not data:
                if writer.can_write_eof() and not writer.is_closing():
                    with contextlib.suppress(OSError):
                        writer.write_eof()
                return
            await self._write(direction, data, writer)

    async def _write(self, direction: Direction, data: bytes, writer: asyncio.StreamWriter) -> None:
        faults, counters = self._proxy.faults, self._proxy.counters
        if direction == "to_client" and faults.limit_bytes:
            left = faults.limit_bytes - self._passed_to_client
            data = data[: max(0, left)]
        size = faults.slice_bytes or len(data)
        for at in range(0, len(data), max(1, size)):
            writer.write(data[at : at + size])
            if faults.slice_bytes:
                counters.slices += 1
                # A pause, because what follows at once is read in one piece by a peer that is busy.
                await _until(asyncio.get_running_loop().time() + SLICE_PAUSE_SECONDS)
        with contextlib.suppress(OSError):
            await writer.drain()
        counters.note_passed(direction, len(data))
        if direction == "to_client":
            self._passed_to_client += len(data)
            if faults.limit_bytes and self._passed_to_client >= faults.limit_bytes:
                counters.limited += 1
                self.abort_after_flush(writer)

    def abort_after_flush(self, writer: asyncio.StreamWriter) -> None:
        """The client gets what was allowed and then the end; the server is cut at once."""
        writer.close()
        abort(self._server[1])


async def _until(moment: float) -> None:
    """Waits until the time of the loop has come."""
    reached = asyncio.Event()
    asyncio.get_running_loop().call_at(moment, reached.set)
    await reached.wait()


def abort(writer: asyncio.StreamWriter) -> None:
    """Closes with RST where the socket is a TCP one."""
    raw = writer.get_extra_info("socket")
    if raw is not None and raw.family in {socket.AF_INET, socket.AF_INET6} and not writer.is_closing():
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    writer.transport.abort()

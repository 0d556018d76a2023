"""Connections in memory between processes, with delays, cuts and lost bytes.

Both directions of a connection keep their order and have delays of their own. A connection lives until one
end closes it, a process dies, or the fault layer cuts it: then everything under way is lost, and each end
learns of it at its own time, or never (half-open: its own silence rules must notice).

A listener belongs to a process. Several may share an address, as with SO_REUSEPORT; a path has one, the last.
A stopped process still owns its listener: who is sent there waits for its accept.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Final, NamedTuple, Protocol

from qim.wire.layout import ALPN
from tests.simulation.loop import CLIENTS, PROCESS, Process, VirtualLoop

NEVER: Final = -1.0


class _Tls:
    """What a TLS layer would say of itself."""

    @staticmethod
    def selected_alpn_protocol() -> str:
        return ALPN


class Weather(NamedTuple):
    """How a connection behaves; seconds."""

    delay_min: float
    delay_max: float


class Listener(NamedTuple):
    process: Process
    factory: Callable[[], asyncio.BaseProtocol]


class Observer(Protocol):
    """Sees the bytes of one process on the wire."""

    def sent(self, end: "End", data: bytes) -> None: ...

    def arrived(self, end: "End", data: bytes) -> None: ...


class ListenerHandle:
    """What the owner of a listener gets: it may only close it."""

    def __init__(self, net: "Network", process: Process, address: str) -> None:
        self._net = net
        self._process = process
        self._address = address

    def close(self) -> None:
        self._net.stop_listening(self._process, self._address)


class End(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, net: "Network", process: Process, *, peer_name: str, weather: Weather) -> None:
        super().__init__()
        self._net = net
        self.process = process
        self.peer: End | None = None
        self.protocol: asyncio.BaseProtocol | None = None
        self._peer_name = peer_name
        self._weather = weather
        self._arrives_at = 0.0
        self._is_closing = False
        self._is_reading = True
        self._held: deque[bytes] = deque()
        self.is_cut = False
        """Nothing that was or will be sent arrives at this end."""
        self._is_told = False

    # --- asyncio.Transport ---------------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"ssl_object": _Tls, "peername": (self._peer_name, 1)}.get(name, default)

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing and self.peer is not None:
            self._net.send(self, bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        while self._held and self._is_reading:
            self._give(self._held.popleft())

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._net.close(self)

    def abort(self) -> None:
        self.close()

    # --- called by the network -----------------------------------------------------------------------

    def next_arrival(self, now: float, delay: float) -> float:
        """When bytes that leave for this end now arrive: never before earlier ones."""
        self._arrives_at = max(self._arrives_at, now + delay)
        return self._arrives_at

    def draw_delay(self, rng: Random) -> float:
        return rng.uniform(self._weather.delay_min, self._weather.delay_max)

    def deliver(self, data: bytes) -> None:
        if self.is_cut or self._is_closing:
            return
        if not self._is_reading:
            self._held.append(data)
        else:
            self._give(data)

    def _give(self, data: bytes) -> None:
        protocol = self.protocol
        if isinstance(protocol, asyncio.BufferedProtocol):
            while data:
                buffer = memoryview(protocol.get_buffer(len(data)))
                size = min(len(data), len(buffer))
                buffer[:size] = data[:size]
                data = data[size:]
                protocol.buffer_updated(size)
        elif isinstance(protocol, asyncio.Protocol):
            protocol.data_received(data)

    def lose(self, error: Exception | None) -> None:
        """Tells the protocol, once."""
        if not self._is_told and self.protocol is not None:
            self._is_told = True
            self._is_closing = True
            self.protocol.connection_lost(error)


class Network:
    """Listeners and connections of one world."""

    def __init__(self, loop: VirtualLoop, rng: Random) -> None:
        self._loop = loop
        self._rng = rng
        self._listeners: dict[str, list[Listener]] = {}
        self.ends: list[End] = []
        self.is_over = False
        self.observers: dict[Process, Observer] = {}
        self.client_weather = Weather(0.000_2, 0.005)
        self.link_weather = Weather(0.000_02, 0.000_2)
        self.unreachable: set[str] = set()
        """Names of processes without a network: their attempts to connect time out."""
        self.slice_share = 0.0

    # --- listeners -----------------------------------------------------------------------------------

    def listen(
        self, address: str, factory: Callable[[], asyncio.BaseProtocol], *, alone: bool
    ) -> ListenerHandle:
        process = PROCESS.get()
        assert process is not None
        others = [] if alone else self._listeners.get(address, [])
        self._listeners[address] = [*others, Listener(process, factory)]
        return ListenerHandle(self, process, address)

    def listening(self, address: str) -> list[Listener]:
        return [one for one in self._listeners.get(address, []) if one.process.is_alive]

    def stop_listening(self, process: Process, address: str) -> None:
        listeners = self._listeners.get(address, [])
        self._listeners[address] = [one for one in listeners if one.process is not process]

    # --- connections ---------------------------------------------------------------------------------

    async def connect(
        self, address: str, factory: Callable[[], asyncio.BaseProtocol]
    ) -> tuple[End, asyncio.BaseProtocol]:
        """Raises ConnectionRefusedError; waits for the other side's accept, however long that takes."""
        process = PROCESS.get()
        assert process is not None
        weather = self.client_weather if address == CLIENTS else self.link_weather
        await asyncio.sleep(self._rng.uniform(weather.delay_min, weather.delay_max))
        if process.name in self.unreachable:
            await self._loop.create_future()
        listeners = self.listening(address)
        if not listeners:
            raise ConnectionRefusedError(111, "Connection refused")
        listener = self._rng.choice(listeners)
        mine = End(self, process, peer_name=listener.process.name, weather=weather)
        theirs = End(self, listener.process, peer_name=process.name, weather=weather)
        mine.peer, theirs.peer = theirs, mine
        self.ends += (mine, theirs)
        accepted: asyncio.Future[None] = self._loop.create_future()
        self._loop.call_soon(
            self._accept, theirs, listener.factory, accepted, context=listener.process.context
        )
        await accepted
        protocol = factory()
        mine.protocol = protocol
        protocol.connection_made(mine)
        return mine, protocol

    def _accept(
        self, end: End, factory: Callable[[], asyncio.BaseProtocol], accepted: asyncio.Future[None]
    ) -> None:
        end.protocol = factory()
        end.protocol.connection_made(end)
        if not accepted.done():
            accepted.set_result(None)
        else:
            # Who connected gave up meanwhile.
            self._tell(end, ConnectionResetError(), 0.0)

    def send(self, end: End, data: bytes) -> None:
        """Bytes leave an end; a long piece may arrive in two parts."""
        peer = end.peer
        if self.is_over or peer is None:
            return
        if (observer := self.observers.get(end.process)) is not None:
            observer.sent(end, data)
        if peer.is_cut:
            return
        pieces = [data]
        if len(data) > 1 and self._rng.random() < self.slice_share:
            at = self._rng.randrange(1, len(data))
            pieces = [data[:at], data[at:]]
        for piece in pieces:
            when = peer.next_arrival(self._loop.time(), peer.draw_delay(self._rng))
            self._loop.call_at(when, self._arrive, peer, piece, context=peer.process.context)

    def _arrive(self, end: End, data: bytes) -> None:
        observer = self.observers.get(end.process)
        if observer is not None and not end.is_cut and not end.is_closing():
            observer.arrived(end, data)
        end.deliver(data)

    def close(self, end: End) -> None:
        """One end closes: the other one learns of it behind everything that was sent."""
        if self.is_over:
            return
        self._tell(end, None, 0.0)
        peer = end.peer
        if peer is not None and not peer.is_cut:
            when = peer.next_arrival(self._loop.time(), peer.draw_delay(self._rng))
            self._loop.call_at(when, peer.lose, None, context=peer.process.context)

    def cut(self, end: End, *, told_after: float, peer_told_after: float) -> None:
        """Everything under way is lost. `NEVER`: that end is not told."""
        peer = end.peer
        for one, after in ((end, told_after), (peer, peer_told_after)):
            if one is not None:
                one.is_cut = True
                if after >= 0:
                    self._tell(one, ConnectionResetError("cut"), after)

    def _tell(self, end: End, error: Exception | None, after: float) -> None:
        self._loop.call_later(after, end.lose, error, context=end.process.context)

    def drop_process(self, process: Process) -> None:
        """A process has died: its peers learn of it, behind what it had handed to the kernel."""
        for address in self._listeners:
            self.stop_listening(process, address)
        for end in self.ends:
            if end.process is process and end.peer is not None:
                self.close_dead(end)
        self.ends = [end for end in self.ends if end.process is not process]

    def close_dead(self, end: End) -> None:
        peer = end.peer
        assert peer is not None
        when = peer.next_arrival(self._loop.time(), peer.draw_delay(self._rng))
        self._loop.call_at(when, peer.lose, ConnectionResetError("died"), context=peer.process.context)

    def open_ends(self, process: Process) -> list[End]:
        """Of living connections."""
        self.ends = [end for end in self.ends if not (end.is_closing() or end.is_cut)]
        return [end for end in self.ends if end.process is process]

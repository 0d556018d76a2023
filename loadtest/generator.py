"""The open-loop generator: users in pairs over TLS, one event loop, one buffer for all their reads.

Every message has a due time before the run begins. A tick once a millisecond writes what is due, whether or
not earlier messages were answered: a slow server gets no relief, and a slow generator is counted against
the numbers. One write per message, because its users are different people; reads are parsed in place.

The generator owns its users and their sockets. It never reconnects: a connection that ends in a run is a
result (unanswered messages), and the report names the code. Bounds: log-ins at once; messages in flight
only by the schedule. When the server dies, the step ends at its drain limit and tells what is missing.
"""

import asyncio
import ssl
from array import array
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Final, cast

from loadtest.ledger import Ledger, poisson_schedule
from loadtest.server import Server
from loadtest.user import Account, User, make_account, parse_body
from qim.clock import Clock
from qim.limits import READ_BUFFER_BYTES
from qim.records import Entry
from qim.wire.bodies import SendAck
from qim.wire.layout import ALPN

TICK_SECONDS: Final = 0.001
SWEEP_TICKS: Final = 50
LOG_INS_AT_ONCE: Final = 32
LOG_IN_SECONDS_MAX: Final = 30.0
DRAIN_SECONDS_MAX: Final = 15.0
PULL_SECONDS_MAX: Final = 5.0
ECHO_SECONDS_MAX: Final = 1.0
POLL_SECONDS: Final = 0.02


def client_context(server: Server) -> ssl.SSLContext:
    """TLS 1.3 and nothing else, as every client of the protocol."""
    context = ssl.create_default_context(cafile=str(server.ca_file))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    return context


class _Socket(asyncio.BufferedProtocol):
    """The transport of one user."""

    def __init__(self, user: User, buffer: memoryview, clock: Clock) -> None:
        self.user = user
        self.transport: asyncio.Transport | None = None
        self._buffer = buffer
        self._clock = clock

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an isinstance check: the TLS transport of uvloop is no subclass.
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the protocol's signature
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        answer = self.user.receive(self._buffer[:nbytes], self._clock.monotonic())
        if answer:
            self.write(answer)

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self.transport = None
        self.user.is_ready = False
        self.user.connection.close()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()


class Generator:
    """Users of one run; `step` may be called several times, with a ledger of its own each time."""

    def __init__(
        self, server: Server, *, users: int, run: int, seed: int, body_size: int, clock: Clock
    ) -> None:
        assert users % 2 == 0
        self._server = server
        self._clock = clock
        self._run = run
        self._seed = seed
        self._sent = 0
        self._buffer = memoryview(bytearray(READ_BUFFER_BYTES))
        accounts = [make_account(run, number) for number in range(users)]
        self._sockets = [self._socket(number, accounts, body_size) for number in range(users)]
        self._ready = asyncio.Event()
        self._ledger = Ledger(array("d"), first=0, warm_up_seconds=0.0)
        self._started = 0.0
        self._position = 0
        self._ticks = 0
        self._choose = Random(seed).randrange
        self._played: asyncio.Future[None]
        self._numbers: dict[tuple[int, int], int] = {}
        self._early_echoes: dict[tuple[int, int], float] = {}
        self.ended: Counter[int] = Counter()
        """Connections that the server ended, by code."""

    def _socket(self, number: int, accounts: list[Account], body_size: int) -> _Socket:
        partner = accounts[number ^ 1].user
        user = User(accounts[number], partner, index=number, run=self._run, sink=self, body_size=body_size)
        return _Socket(user, self._buffer, self._clock)

    # --- the life of the users ---

    async def connect(self) -> None:
        """Logs everybody in; raises ConnectionError when the server does not take them all in time."""
        context = client_context(self._server)
        gate = asyncio.Semaphore(LOG_INS_AT_ONCE)

        async def log_in(sock: _Socket) -> None:
            async with gate:
                await asyncio.get_running_loop().create_connection(
                    lambda: sock,
                    self._server.host,
                    self._server.port,
                    ssl=context,
                    server_hostname=self._server.server_name,
                )
                sock.write(sock.user.log_in(self._server.token_for(sock.user.account.user, self._clock)))

        await asyncio.gather(*map(log_in, self._sockets))
        try:
            async with asyncio.timeout(LOG_IN_SECONDS_MAX):
                await self._ready.wait()
        except TimeoutError:
            pass  # told below, with those who were refused
        ready = sum(sock.user.is_ready for sock in self._sockets)
        if ready < len(self._sockets):
            codes = f"refused with {dict(self.ended)}" if self.ended else "no answer"
            raise ConnectionError(f"{ready} of {len(self._sockets)} users could log in: {codes}")

    async def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        await asyncio.sleep(0)

    # --- a step ---

    def prepare(self, *, rate: float, seconds: float, warm_up_seconds: float) -> Ledger:
        """A new ledger with its schedule; the clock starts with `play`."""
        due = poisson_schedule(rate=rate, seconds=seconds + warm_up_seconds, seed=self._seed)
        self._ledger = Ledger(due, first=self._sent, warm_up_seconds=warm_up_seconds)
        self._numbers.clear()
        self._early_echoes.clear()
        return self._ledger

    async def play(self) -> None:
        """Sends everything at its time; returns when the last message was written."""
        self._position, self._ticks = 0, 0
        self._choose = Random(self._seed + self._ledger.first).randrange
        self._played = asyncio.get_running_loop().create_future()
        self._started = self._clock.monotonic()
        self._tick()
        await self._played
        self._sent += len(self._ledger)

    def _tick(self) -> None:
        """Everything that is due by now, however late; then the next tick."""
        ledger, users = self._ledger, len(self._sockets)
        now = self._clock.monotonic()
        elapsed = now - self._started
        while self._position < len(ledger) and ledger.due[self._position] <= elapsed:
            self._send(ledger.first + self._position, self._sockets[self._choose(users)], now)
            self._position += 1
        self._ticks += 1
        if self._ticks % SWEEP_TICKS == 0:
            self._sweep(now)
        if self._position < len(ledger):
            asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        elif not self._played.done():
            self._played.set_result(None)

    async def settle(self) -> None:
        """Waits for what is on its way, then lets everybody pull once: what is missing then is lost."""
        ledger = self._ledger
        await self._until(lambda: ledger.is_settled, DRAIN_SECONDS_MAX)
        if not ledger.is_settled:
            for sock in self._sockets:
                if sock.user.is_ready:
                    sock.write(sock.user.pull(self._clock.monotonic()))
            await self._until(lambda: ledger.is_settled, PULL_SECONDS_MAX)
        # The server lets the last echoes wait for company that does not come any more.
        await self._until(lambda: ledger.is_echoed, ECHO_SECONDS_MAX)

    async def _until(self, is_reached: Callable[[], bool], seconds: float) -> None:
        deadline = self._clock.monotonic() + seconds
        while not is_reached() and self._clock.monotonic() < deadline:
            self._sweep(self._clock.monotonic())
            await asyncio.sleep(POLL_SECONDS)

    def _send(self, number: int, sock: _Socket, now: float) -> None:
        # A dead connection leaves its message unanswered: that is the result, not a reason to choose another.
        if sock.user.is_ready:
            sock.write(sock.user.send(number, now))
            self._ledger.on_sent(number, now - self._started)

    def _sweep(self, now: float) -> None:
        for sock in self._sockets:
            data = sock.user.due_frame(now)
            if data:
                sock.write(data)

    # --- what the users report ---

    def on_ready(self, user: User) -> None:  # noqa: ARG002 - the sink's signature
        if all(sock.user.is_ready for sock in self._sockets):
            self._ready.set()

    def on_accepted(self, user: User, number: int, ack: SendAck) -> None:
        if self._ledger.holds(number):
            now = self._clock.monotonic() - self._started
            self._ledger.on_accepted(number, now)
            key = (user.index >> 1, ack.conversation_seq)
            early = self._early_echoes.pop(key, None)
            if early is None:
                self._numbers[key] = number
            else:
                self._ledger.on_echo(number, early)

    def on_refused(self, user: User, number: int, code: int) -> None:  # noqa: ARG002 - the sink's signature
        if self._ledger.holds(number):
            self._ledger.on_refused(number, code)

    def on_entry(self, user: User, mailbox_seq: int, entry: Entry, *, pushed: bool) -> None:  # noqa: ARG002 - as above
        run, number = parse_body(entry.record.body)
        if run == self._run and self._ledger.holds(number):
            at = self._clock.monotonic() - self._started
            self._ledger.on_delivered(number, mailbox_seq, at, pushed=pushed)

    def on_echo(self, user: User, seq: int) -> None:
        """The echo names a sequence; the ACK, which may come later, says which message it was."""
        key = (user.index >> 1, seq)
        at = self._clock.monotonic() - self._started
        number = self._numbers.pop(key, None)
        if number is None:
            self._early_echoes[key] = at
        elif self._ledger.holds(number):
            self._ledger.on_echo(number, at)

    def on_ended(self, user: User, code: int) -> None:  # noqa: ARG002 - the sink's signature
        self.ended[code] += 1
        self._ready.set()  # nobody waits for a log-in that will not come

"""One pipelined connection to a Redis or Valkey server; replies come in the order of the commands.

A command is issued when the method is called: it is packed, put behind the earlier ones and written with
them in one write per pass of the loop. The bookkeeping of a command is one entry in a queue of callbacks;
there is no task, timer or lock. RESP2 is asked for by name, so that a server default never changes what a
script answers.

State: the connection object owns its queue and its buffer and dies with its socket; the pipe owns the current
connection and one task that makes a new one. What an outcome means is decided here, once, for all adapters:

    not connected, or queued and not yet written    StoreRefused, at once
    OOM, LOADING, BUSY, REFUSED (our scripts)       StoreRefused
    MISCONF, READONLY, NOAUTH, NOPERM, MOVED        StoreUnfit: wrong settings or instance, the slot stops
    NOSCRIPT                                        the text is sent once; nothing had been written
    any other error of the server                   StoreBroken
    time-out, reset, end of stream                  the connection closes, all in flight is StoreUnknown

All commands share one time limit and are answered in order, so the first of the queue is always the oldest
and one sweep finds every time-out. A waiter that was cancelled keeps its place; its reply is dropped. Full
(commands in flight, or bytes that the socket does not take): StoreRefused, the caller waits. When the server
dies the pipe connects again with growing pauses, loads the scripts, then calls `on_connected`, so that owners
claim again. Only a script that the server forgot while we were connected runs later than it was issued.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, cast
from urllib.parse import unquote, urlsplit

import hiredis

from qim.adapters.lua_scripts import LuaScripts
from qim.clock import Clock
from qim.errors import ConfigError, StoreBroken, StoreError, StoreRefused, StoreUnfit, StoreUnknown
from qim.limits import (
    STORE_INFLIGHT_COMMANDS_MAX,
    STORE_RECONNECT_SECONDS,
    STORE_TIMEOUT_MS,
    STORE_UNSENT_BYTES_MAX,
    SWEEP_INTERVAL_MS,
)
from qim.metrics import Metrics

Argument = bytes | str | int
OnReply = Callable[[Any], None]
"""Gets the reply, or a StoreError as a value. Must not raise: a raise would tear the replies behind it."""

READ_BUFFER_BYTES: Final = 65_536
_NOTHING: Final = object()
_REFUSING: Final = frozenset(
    {"OOM", "LOADING", "BUSY", "NOSCRIPT", "REFUSED", "MASTERDOWN", "NOREPLICAS", "TRYAGAIN"}
)
_UNFIT: Final = frozenset(
    {"MISCONF", "READONLY", "NOAUTH", "WRONGPASS", "NOPERM", "MOVED", "ASK", "CLUSTERDOWN"}
)


class Address(NamedTuple):
    """Where a server listens; a path for a Unix socket, otherwise host and port."""

    path: str
    host: str
    port: int
    user: str
    password: str

    def __str__(self) -> str:
        return f"unix://{self.path}" if self.path else f"redis://{self.host}:{self.port}"


def parse_url(url: str) -> Address:
    """`unix://[user:password@]/path` or `redis://[user:password@]host[:port]`, database 0."""
    parts = urlsplit(url)
    user = unquote(parts.username or "")
    password = unquote(parts.password or "")
    match parts.scheme:
        case "unix" if parts.path.startswith("/") and not parts.hostname:
            return Address(unquote(parts.path), "", 0, user, password)
        case "redis" if parts.hostname and parts.path in {"", "/", "/0"}:
            return Address("", parts.hostname, parts.port or 6379, user, password)
        case _:
            problem = "a store address must be unix:///path or redis://[user:password@]host:port (database 0)"
            raise ConfigError([problem])


def error_of(reply: hiredis.ReplyError) -> StoreError:
    """What an error reply means, by its first word; the table stands in the docstring of the module."""
    text = str(reply)
    word = text.split(" ", 1)[0]
    if word in _REFUSING:
        return StoreRefused(text)
    return StoreUnfit(text) if word in _UNFIT else StoreBroken(text)


class _Connection(asyncio.BufferedProtocol):
    """One socket: the queue of who waits, and the bytes of this pass."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        *,
        metrics: Metrics,
        timeout_ms: int,
        on_lost: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._monotonic = clock.monotonic
        self._metrics = metrics
        self._timeout_seconds = timeout_ms / 1000
        self._on_lost = on_lost
        self._reader = hiredis.Reader(notEnoughData=_NOTHING)
        self._read_buffer = bytearray(READ_BUFFER_BYTES)
        self._waiting: deque[tuple[float, OnReply]] = deque()
        self._unwritten: list[bytes] = []
        self._unsent_bytes = 0
        self._is_flush_due = False
        self._is_paused = False
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self.writes = 0

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def send(self, data: bytes, on_reply: OnReply) -> None:
        """Queues one packed command; refused without side effect when closed or full."""
        if self._transport is None:
            on_reply(StoreRefused("not connected"))
        elif len(self._waiting) >= STORE_INFLIGHT_COMMANDS_MAX or self._unsent_bytes > STORE_UNSENT_BYTES_MAX:
            self._metrics.redis_refused += 1
            on_reply(StoreRefused("too much in flight"))
        else:
            self._waiting.append((self._monotonic() + self._timeout_seconds, on_reply))
            self._unwritten.append(data)
            self._unsent_bytes += len(data)
            if not self._is_flush_due:
                self._is_flush_due = True
                self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Writes what was issued since the last write; called once per pass of the loop."""
        self._is_flush_due = False
        if self._transport is None or self._is_paused or not self._unwritten:
            return
        data = self._unwritten[0] if len(self._unwritten) == 1 else b"".join(self._unwritten)
        self._unwritten.clear()
        self._unsent_bytes = 0
        self.writes += 1
        self._transport.write(data)

    # --- asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked by class: uvloop's transports are none of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._sweep_timer = self._loop.call_later(SWEEP_INTERVAL_MS / 1000, self._sweep)

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002 - the protocol's signature
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._reader.feed(self._read_buffer, 0, nbytes)  # type: ignore[arg-type]  # any buffer is taken
            while (reply := self._reader.gets()) is not _NOTHING:
                if not self._waiting:
                    raise hiredis.ProtocolError("a reply that nobody asked for")
                _, on_reply = self._waiting.popleft()
                on_reply(self._error(reply) if isinstance(reply, hiredis.ReplyError) else reply)
        except hiredis.ProtocolError as error:
            self.close(f"the server broke the protocol: {error}")

    def _error(self, reply: hiredis.ReplyError) -> StoreError:
        error = error_of(reply)
        if isinstance(error, StoreBroken):
            self._metrics.redis_broken += 1
        else:
            self._metrics.redis_refused += 1
        return error

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.close(f"connection lost: {exc or 'end of stream'}")

    def close(self, reason: str) -> None:
        """Ends the socket; who waits gets unknown where bytes may have left, and refused otherwise."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        transport.abort()
        unwritten = len(self._unwritten)
        self._unwritten.clear()
        waiting = list(self._waiting)
        self._waiting.clear()
        # The pipe is told first, so that a caller who issues again from its answer meets a closed pipe.
        self._on_lost()
        written = len(waiting) - unwritten
        self._metrics.redis_unknown += written
        self._metrics.redis_refused += unwritten
        for at, (_, on_reply) in enumerate(waiting):
            on_reply(StoreUnknown(reason) if at < written else StoreRefused(reason))

    def _sweep(self) -> None:
        if self._waiting and self._waiting[0][0] <= self._monotonic():
            self.close("no answer within the time limit")
        else:
            self._sweep_timer = self._loop.call_later(SWEEP_INTERVAL_MS / 1000, self._sweep)


class RedisPipe:
    """The commands of one event loop to one server. Created after the fork, inside a running loop."""

    def __init__(
        self,
        url: str,
        *,
        clock: Clock,
        scripts: LuaScripts,
        metrics: Metrics | None = None,
        timeout_ms: int = STORE_TIMEOUT_MS,
    ) -> None:
        self.address = parse_url(url)
        self._metrics = metrics or Metrics()
        self.on_connected: list[Callable[[], None]] = []
        """Called after each connection but the first, when commands flow again."""
        self.commands = 0
        self.reconnects = 0
        self._clock = clock
        self._scripts = scripts
        self._timeout_ms = timeout_ms
        self._connection: _Connection | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    async def connect(self) -> None:
        """The first connection; raises StoreRefused or StoreUnfit. Later ones are made unasked."""
        await self._open()

    def command(self, *arguments: Argument) -> asyncio.Future[Any]:
        """Issues one command and gives a future of its reply."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.submit(arguments, _resolve(future))
        return future

    def script(
        self, name: str, keys: Sequence[bytes], arguments: Sequence[Argument] = ()
    ) -> asyncio.Future[Any]:
        """Calls a script by its digest, by its text when the server does not know it."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.submit_script(name, keys, arguments, _resolve(future))
        return future

    def submit(self, arguments: Iterable[Argument], on_reply: OnReply) -> None:
        """As `command`, with a callback in place of a future: adapters decode many replies into one."""
        self.commands += 1
        if self._connection is None:
            self._metrics.redis_refused += 1
            on_reply(StoreRefused(f"{self.address}: not connected"))
        else:
            self._connection.send(_pack(arguments), on_reply)

    def submit_script(
        self, name: str, keys: Sequence[bytes], arguments: Sequence[Argument], on_reply: OnReply
    ) -> None:
        """As `script`, with a callback in place of a future."""
        rest = (len(keys), *keys, *arguments)
        on_first_reply = partial(self._on_script_reply, name, rest, on_reply, self._clock.monotonic())
        self.submit(("EVALSHA", self._scripts.sha(name), *rest), on_first_reply)

    def _on_script_reply(
        self, name: str, rest: Sequence[Argument], on_reply: OnReply, issued: float, reply: object
    ) -> None:
        if type(reply) is StoreRefused and str(reply).startswith("NOSCRIPT"):
            self.submit(("EVAL", self._scripts.text(name), *rest), on_reply)
            return
        histogram = self._metrics.redis_script.get(name)
        if histogram is not None:
            histogram.observe(self._clock.monotonic() - issued)
        on_reply(reply)

    def flush(self) -> None:
        """Writes at once instead of at the end of the pass."""
        if self._connection is not None:
            self._connection.flush()

    async def close(self) -> None:
        """Ends the connection for good; what is in flight becomes unknown."""
        self._is_closed = True
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.gather(self._reconnecting, return_exceptions=True)
        if self._connection is not None:
            self._connection.close("closed by us")

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        connection = _Connection(
            loop,
            self._clock,
            metrics=self._metrics,
            timeout_ms=self._timeout_ms,
            on_lost=lambda: self._on_lost(connection),
        )
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                if self.address.path:
                    await loop.create_unix_connection(lambda: connection, self.address.path)
                else:
                    await loop.create_connection(lambda: connection, self.address.host, self.address.port)
                await self._greet(connection)
                if not connection.is_open:
                    raise StoreRefused(f"{self.address}: the connection ended as soon as it was made")
                self._connection = connection
        except (OSError, TimeoutError) as error:
            reason = str(error) or "no answer within the time limit"
            raise StoreRefused(f"{self.address}: {reason}") from error
        finally:
            if self._connection is not connection:
                connection.close("not ready")

    async def _greet(self, connection: _Connection) -> None:
        """Protocol version, login and scripts, in one write."""
        hello: tuple[Argument, ...] = ("HELLO", 2)
        if self.address.password:
            hello += ("AUTH", self.address.user or "default", self.address.password)
        loads = (("SCRIPT", "LOAD", self._scripts.text(name)) for name in self._scripts)
        replies = [_issue(connection, arguments) for arguments in (hello, *loads)]
        answers = await asyncio.gather(*replies, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        if answers[1:] != [self._scripts.sha(name) for name in self._scripts]:
            raise StoreBroken(f"{self.address}: the server names a script by another digest")

    def _on_lost(self, connection: _Connection) -> None:
        if connection is self._connection:
            self._connection = None
            if not self._is_closed:
                self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect())

    async def _reconnect(self) -> None:
        attempt = 0
        while True:
            await asyncio.sleep(STORE_RECONNECT_SECONDS[min(attempt, len(STORE_RECONNECT_SECONDS) - 1)])
            attempt += 1
            try:
                await self._open()
            except StoreError:
                continue
            break
        self.reconnects += 1
        self._metrics.redis_reconnects += 1
        for notify in self.on_connected:
            notify()


def _pack(arguments: Iterable[Argument]) -> bytes:
    # The package declares a tuple of exactly one argument.
    packed: bytes = hiredis.pack_command(tuple(arguments))  # type: ignore[arg-type]
    return packed


def _issue(connection: _Connection, arguments: Iterable[Argument]) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    connection.send(_pack(arguments), _resolve(future))
    return future


def _resolve(future: asyncio.Future[Any]) -> OnReply:
    """Sets the future, unless its waiter was cancelled: then the reply only kept the order."""

    def on_reply(reply: object) -> None:
        if future.done():
            return
        if isinstance(reply, StoreError):
            future.set_exception(reply)
        else:
            future.set_result(reply)

    return on_reply

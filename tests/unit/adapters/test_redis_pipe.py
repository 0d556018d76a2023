"""The pipe against a server that answers what the test says, byte by byte, and against real servers.

The scripted server reads whole commands and answers with prepared bytes; it can keep silent, split a reply,
answer an error in the middle, or cut the line. The clock is moved by hand, so no test waits for a time-out.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import hiredis
import pytest
import uvloop

from qim.adapters.lua_scripts import LuaScripts
from qim.adapters.redis_pipe import Address, RedisPipe, error_of, parse_url
from qim.clock import ManualClock, SystemClock
from qim.errors import ConfigError, StoreBroken, StoreError, StoreRefused, StoreUnfit, StoreUnknown
from qim.limits import STORE_INFLIGHT_COMMANDS_MAX, STORE_TIMEOUT_MS
from qim.metrics import Metrics
from tests.services import StoreServer
from tests.waiting import eventually_async, happens

SCRIPTS = LuaScripts(
    {"echo": b"#!lua\nreturn ARGV[1]", "fail": b"#!lua\nreturn redis.call('HGET', KEYS[1], 'f')"}
)
Answer = Callable[[list[bytes]], bytes | None]


def answer_greeting(command: list[bytes], scripts: LuaScripts = SCRIPTS) -> bytes | None:
    """What every server says to HELLO and SCRIPT LOAD."""
    if command[0] == b"HELLO":
        return b"*0\r\n"
    if command[:2] == [b"SCRIPT", b"LOAD"]:
        name = next(name for name in scripts if scripts.text(name) == command[2])
        return b"$40\r\n" + scripts.sha(name) + b"\r\n"
    return None


class ScriptedServer:
    """Answers each command with what `answer` returns; None is silence."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self.path = path
        self.answer = answer
        self.answer_greeting: Answer = answer_greeting
        self.commands: list[list[bytes]] = []
        self.reads = 0
        self.transports: list[asyncio.Transport] = []
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: ScriptedConnection(self), self.path)

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> None:
        for transport in self.transports:
            transport.abort()
        self.transports.clear()

    def write(self, data: bytes) -> None:
        self.transports[-1].write(data)


class ScriptedConnection(asyncio.Protocol):
    def __init__(self, server: ScriptedServer) -> None:
        self.server = server
        self.parser = hiredis.Reader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.server.transports.append(transport)

    def data_received(self, data: bytes) -> None:
        self.server.reads += 1
        self.parser.feed(data)
        while (command := self.parser.gets()) is not False:
            reply = self.server.answer_greeting(command)
            if reply is None and self.server.transports:
                self.server.commands.append(command)
                reply = self.server.answer(command)
            if reply is not None:
                self.server.write(reply)


@asynccontextmanager
async def scripted(
    tmp_path: Path, answer: Answer, *, clock: ManualClock | None = None
) -> AsyncIterator[tuple[ScriptedServer, RedisPipe]]:
    server = ScriptedServer(tmp_path / "s", answer)
    await server.start()
    pipe = RedisPipe(server.url, clock=clock or ManualClock(), scripts=SCRIPTS)
    await pipe.connect()
    try:
        yield server, pipe
    finally:
        await pipe.close()
        server.stop()


def echo(command: list[bytes]) -> bytes:
    return b"+" + command[1] + b"\r\n"


async def settle(*futures: "asyncio.Future[object]") -> list[object]:
    return await asyncio.gather(*futures, return_exceptions=True)


async def test_replies_meet_their_commands_when_errors_stand_between_them(tmp_path: Path) -> None:
    def answer(command: list[bytes]) -> bytes:
        return b"-WRONGTYPE no\r\n" if command[0] == b"BAD" else echo(command)

    async with scripted(tmp_path, answer) as (_, pipe):
        got = await settle(pipe.command("A", "1"), pipe.command("BAD", "2"), pipe.command("A", "3"))
        assert got[0] == b"1"
        assert isinstance(got[1], StoreBroken)
        assert got[2] == b"3"


async def test_the_commands_of_one_pass_leave_in_one_write(tmp_path: Path) -> None:
    async with scripted(tmp_path, echo) as (server, pipe):
        before = server.reads
        got = await settle(*(pipe.command("A", number) for number in range(50)))
        assert got == [b"%d" % number for number in range(50)]
        assert server.reads == before + 1


async def test_a_reply_that_arrives_byte_by_byte_is_put_together(tmp_path: Path) -> None:
    async with scripted(tmp_path, lambda _: None) as (server, pipe):
        one, two = pipe.command("A"), pipe.command("B")
        await happens(lambda: len(server.commands) == 2, what="the commands arrive")
        for byte in b"$5\r\nhello\r\n*2\r\n:7\r\n$-1\r\n":
            server.write(bytes([byte]))
            await asyncio.sleep(0)
        assert await one == b"hello"
        assert await two == [7, None]


async def test_a_reply_larger_than_the_read_buffer_is_put_together(tmp_path: Path) -> None:
    big = b"x" * 300_000
    async with scripted(tmp_path, lambda _: b"$300000\r\n" + big + b"\r\n") as (_, pipe):
        assert await pipe.command("A") == big


async def test_a_cancelled_waiter_never_shifts_the_replies_behind_it(tmp_path: Path) -> None:
    async with scripted(tmp_path, lambda _: None) as (server, pipe):
        one, two, three = pipe.command("A"), pipe.command("B"), pipe.command("C")
        two.cancel()
        await happens(lambda: len(server.commands) == 3, what="the cancelled command was sent all the same")
        server.write(b":1\r\n:2\r\n:3\r\n")
        assert (await one, await three) == (1, 3)
        assert two.cancelled()


@pytest.mark.shows("F-16", "F-23")
async def test_a_time_out_closes_the_connection_and_all_in_flight_is_unknown(tmp_path: Path) -> None:
    clock = ManualClock()
    async with scripted(tmp_path, lambda _: None, clock=clock) as (server, pipe):
        one = pipe.command("A")
        clock.advance(milliseconds=STORE_TIMEOUT_MS - 10)
        two = pipe.command("B")
        await happens(lambda: len(server.commands) == 2, what="the commands arrive")
        clock.advance(milliseconds=20)
        got = await settle(one, two)
        assert [type(error) for error in got] == [StoreUnknown, StoreUnknown]
        assert not pipe.is_connected
        with pytest.raises(StoreRefused):
            await pipe.command("C")


async def test_an_answer_in_time_keeps_the_connection(tmp_path: Path) -> None:
    clock = ManualClock()
    async with scripted(tmp_path, echo, clock=clock) as (_, pipe):
        for number in range(3):
            assert await pipe.command("A", number) == b"%d" % number
            clock.advance(milliseconds=STORE_TIMEOUT_MS - 10)
        assert pipe.is_connected


@pytest.mark.shows("F-08")
async def test_a_lost_line_fails_what_was_sent_as_unknown_and_the_pipe_comes_back(tmp_path: Path) -> None:
    async with scripted(tmp_path, lambda _: None) as (server, pipe):
        noted: list[str] = []
        pipe.on_connected.append(lambda: noted.append("again"))
        sent = pipe.command("A", "1")
        await happens(lambda: len(server.commands) == 1, what="the command arrives")
        server.cut()
        assert isinstance((await settle(sent))[0], StoreUnknown)
        server.answer = echo
        await happens(lambda: pipe.is_connected, what="the pipe connects again")
        assert await pipe.command("A", "2") == b"2"
        assert (noted, pipe.reconnects) == (["again"], 1)
        assert [command[1] for command in server.commands] == [b"1", b"2"], "nothing is sent a second time"


async def test_what_was_issued_but_never_written_is_refused_not_unknown(tmp_path: Path) -> None:
    async with scripted(tmp_path, lambda _: None) as (server, pipe):
        sent = pipe.command("A")
        await happens(lambda: len(server.commands) == 1, what="the command arrives")
        queued = pipe.command("B")
        assert pipe._connection is not None
        pipe._connection.close("cut before the write")
        got = await settle(sent, queued)
        assert [type(error) for error in got] == [StoreUnknown, StoreRefused]


async def test_an_answer_callback_that_issues_again_meets_a_closed_pipe(tmp_path: Path) -> None:
    async with scripted(tmp_path, lambda _: None) as (server, pipe):
        second: list[object] = []
        pipe.submit(("A",), lambda _: pipe.submit(("B",), second.append))
        await happens(lambda: len(server.commands) == 1, what="the command arrives")
        server.cut()
        await happens(lambda: second, what="the second command is answered")
        assert type(second[0]) is StoreRefused


async def test_a_pipe_that_is_not_connected_refuses_at_once(tmp_path: Path) -> None:
    pipe = RedisPipe(f"unix://{tmp_path}/nobody", clock=ManualClock(), scripts=SCRIPTS)
    with pytest.raises(StoreRefused):
        await pipe.connect()
    with pytest.raises(StoreRefused):
        await pipe.command("A")
    await pipe.close()


@pytest.mark.shows("F-16")
async def test_too_much_in_flight_is_refused_and_the_rest_goes_on(tmp_path: Path) -> None:
    async with scripted(tmp_path, echo) as (_, pipe):
        futures = [pipe.command("A", number) for number in range(STORE_INFLIGHT_COMMANDS_MAX + 2)]
        got = await settle(*futures)
        assert [type(answer) for answer in got[-2:]] == [StoreRefused, StoreRefused]
        assert got[:-2] == [b"%d" % number for number in range(STORE_INFLIGHT_COMMANDS_MAX)]


async def test_a_reply_that_nobody_asked_for_ends_the_connection(tmp_path: Path) -> None:
    async with scripted(tmp_path, lambda _: b"+one\r\n+two\r\n") as (_, pipe):
        assert await pipe.command("A") == b"one"
        await happens(lambda: not pipe.is_connected, what="the connection ends")


async def test_a_missing_script_is_sent_as_text_once_and_keeps_the_others_in_order(tmp_path: Path) -> None:
    def answer(command: list[bytes]) -> bytes:
        return b"-NOSCRIPT none\r\n" if command[0] == b"EVALSHA" else b"+" + command[-1] + b"\r\n"

    async with scripted(tmp_path, answer) as (server, pipe):
        got = await settle(pipe.command("A", "1"), pipe.script("echo", [], ["x"]), pipe.command("A", "2"))
        assert got == [b"1", b"x", b"2"]
        assert [command[0] for command in server.commands] == [b"A", b"EVALSHA", b"A", b"EVAL"]
        server.answer = lambda _: b"-NOSCRIPT none\r\n"
        with pytest.raises(StoreRefused):
            await pipe.script("echo", [], ["x"])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("OOM command not allowed", StoreRefused),
        ("LOADING the dataset", StoreRefused),
        ("BUSY running a script", StoreRefused),
        ("NOSCRIPT none", StoreRefused),
        ("REFUSED by our script", StoreRefused),
        ("MISCONF cannot persist", StoreUnfit),
        ("READONLY a replica", StoreUnfit),
        ("NOAUTH required", StoreUnfit),
        ("WRONGTYPE a list", StoreBroken),
        ("ERR user_script:3: attempt to index", StoreBroken),
        ("BUSYGROUP exists", StoreBroken),
    ],
)
def test_the_first_word_of_an_error_says_what_it_means(text: str, kind: type[Exception]) -> None:
    assert type(error_of(hiredis.ReplyError(text))) is kind


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("unix:///run/a.sock", Address("/run/a.sock", "", 0, "", "")),
        ("unix://u:p%40@/run/a.sock", Address("/run/a.sock", "", 0, "u", "p@")),
        ("redis://host", Address("", "host", 6379, "", "")),
        ("redis://:secret@host:7000/0", Address("", "host", 7000, "", "secret")),
    ],
)
def test_addresses_are_read(url: str, address: Address) -> None:
    assert parse_url(url) == address
    assert "secret" not in str(address)


@pytest.mark.parametrize("url", ["host:6379", "redis://host/3", "unix://host/path", "rediss://host", ""])
def test_an_address_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        parse_url(url)


@asynccontextmanager
async def real_pipe(server: StoreServer) -> AsyncIterator[RedisPipe]:
    pipe = RedisPipe(server.url, clock=SystemClock(), scripts=SCRIPTS)
    await pipe.connect()
    try:
        yield pipe
    finally:
        await pipe.close()


async def test_a_flushed_script_cache_is_not_noticed_on_a_real_server(store_server: StoreServer) -> None:
    async with real_pipe(store_server) as pipe:
        assert await pipe.script("echo", [], [b"\x00\r\n"]) == b"\x00\r\n"
        got = await settle(
            pipe.command("SCRIPT", "FLUSH"), pipe.script("echo", [], ["x"]), pipe.command("ECHO", "y")
        )
        assert got == [b"OK", b"x", b"y"]


async def test_a_type_error_inside_a_script_is_broken_on_a_real_server(store_server: StoreServer) -> None:
    async with real_pipe(store_server) as pipe:
        await pipe.command("SET", "pipe-test", "text")
        with pytest.raises(StoreBroken):
            await pipe.script("fail", [b"pipe-test"])
        await pipe.command("DEL", "pipe-test")


@pytest.mark.shows("F-08")
async def test_a_killed_server_is_met_again_with_its_data(fresh_valkey: StoreServer) -> None:
    async with real_pipe(fresh_valkey) as pipe:
        await pipe.command("SET", "kept", "1")
        fresh_valkey.kill9()
        await happens(lambda: not pipe.is_connected, what="the pipe notices")
        with pytest.raises(StoreRefused):
            await pipe.command("GET", "kept")
        fresh_valkey.start()
        await happens(lambda: pipe.is_connected, what="the pipe connects again")
        assert await pipe.command("GET", "kept") == b"1"
        assert await pipe.script("echo", [], ["x"]) == b"x"


async def test_a_wrong_password_is_refused_by_name(store_server: StoreServer) -> None:
    url = f"unix://default:wrong@{store_server.socket_path}"
    pipe = RedisPipe(url, clock=SystemClock(), scripts=SCRIPTS)
    async with real_pipe(store_server) as admin:
        await admin.command("CONFIG", "SET", "requirepass", "right")
        try:
            with pytest.raises(StoreUnfit):
                await pipe.connect()
            right = RedisPipe(url.replace("wrong", "right"), clock=SystemClock(), scripts=SCRIPTS)
            await right.connect()
            assert await right.command("ECHO", "in") == b"in"
            await right.close()
        finally:
            await admin.command("CONFIG", "SET", "requirepass", "")


async def test_outcomes_and_script_times_are_counted(tmp_path: Path) -> None:
    metrics = Metrics()
    scripts = LuaScripts({"claim_slot": b"#!lua\nreturn 1"})
    server = ScriptedServer(
        tmp_path / "s", lambda command: None if command[0] == b"SILENT" else b"-ERR no\r\n"
    )
    server.answer_greeting = lambda command: answer_greeting(command, scripts)
    await server.start()
    pipe = RedisPipe(server.url, clock=ManualClock(), scripts=scripts, metrics=metrics)
    await settle(pipe.command("EARLY"))
    await pipe.connect()
    await settle(pipe.script("claim_slot", []))
    silent = pipe.command("SILENT")
    await happens(lambda: server.commands[-1][0] == b"SILENT", what="the command arrives")
    server.cut()
    await settle(silent)
    await happens(lambda: pipe.is_connected, what="the pipe connects again")
    counts = (metrics.redis_refused, metrics.redis_broken, metrics.redis_unknown, metrics.redis_reconnects)
    assert counts == (1, 1, 1, 1)
    assert sum(metrics.redis_script["claim_slot"].counts) == 1
    await pipe.close()
    server.stop()


async def test_a_line_that_ends_during_the_greeting_is_refused_and_tried_again_later(tmp_path: Path) -> None:
    server = ScriptedServer(tmp_path / "s", echo)
    server.answer_greeting = lambda _: server.cut()
    await server.start()
    pipe = RedisPipe(server.url, clock=ManualClock(), scripts=SCRIPTS)
    with pytest.raises(StoreError):
        await pipe.connect()
    assert not pipe.is_connected
    server.answer_greeting = answer_greeting
    await pipe.connect()
    assert await pipe.command("A", "1") == b"1"
    await pipe.close()
    server.stop()


def test_the_pipe_works_on_the_loop_of_the_workers(fresh_valkey: StoreServer) -> None:
    """uvloop has transports and callbacks of its own; the roles run on it."""

    async def talk() -> None:
        async with real_pipe(fresh_valkey) as pipe:
            got = await settle(*(pipe.command("ECHO", "x" * 50_000) for _ in range(50)), pipe.command("BAD"))
            assert got[:-1] == [b"x" * 50_000] * 50
            assert isinstance(got[-1], StoreBroken)
            fresh_valkey.kill9()
            await happens(lambda: not pipe.is_connected, what="the pipe notices")
            fresh_valkey.start()
            await happens(lambda: pipe.is_connected, what="the pipe connects again")
            assert await pipe.script("echo", [], ["x"]) == b"x"

    uvloop.run(talk())


async def test_a_line_that_ends_right_after_the_greeting_leaves_no_dead_pipe(tmp_path: Path) -> None:
    server = ScriptedServer(tmp_path / "s", echo)
    loads: list[bytes] = []

    def answer_and_end(command: list[bytes]) -> bytes | None:
        reply = answer_greeting(command)
        loads.append(command[0])
        if loads.count(b"SCRIPT") == len(SCRIPTS.names) and command[0] == b"SCRIPT" and reply is not None:
            server.write(reply)
            server.transports[-1].close()
            return b""
        return reply

    server.answer_greeting = answer_and_end
    await server.start()
    pipe = RedisPipe(server.url, clock=ManualClock(), scripts=SCRIPTS)
    try:
        await pipe.connect()
    except StoreRefused:
        await pipe.connect()

    async def is_answered() -> bool:
        return (await settle(pipe.command("A", "1"))) == [b"1"]

    await eventually_async(is_answered, what="the pipe works")
    await pipe.close()
    server.stop()

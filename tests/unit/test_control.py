"""The control socket: real sockets, the real client, and peers that break the protocol."""

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from qim.ctl import protocol
from qim.ctl.protocol import LENGTH, ControlClient, encode_message
from qim.errors import ControlRefused, ControlUnreachable, ExitCode, StoreRefused
from qim.limits import CONTROL_MESSAGE_BYTES_MAX
from workers.control import CONNECTIONS_MAX, ControlServer, Handler


def echo(**arguments: Any) -> dict[str, Any]:
    return {"echo": arguments}


async def store_is_down() -> dict[str, Any]:
    raise StoreRefused("not connected")


def broken() -> dict[str, Any]:
    raise TypeError("a bug")


def fenced(*, slot: int) -> dict[str, Any]:
    raise ControlRefused(f"slot {slot} is not ours", exit_code=ExitCode.FENCED)


def with_bytes() -> dict[str, Any]:
    return {"id": b"\x01\xff"}


@pytest.fixture
async def path(tmp_path: Path) -> AsyncIterator[Path]:
    path = tmp_path / "control.sock"
    handlers: dict[str, Handler] = {
        "echo": echo,
        "down": store_is_down,
        "broken": broken,
        "fenced": fenced,
        "bytes": with_bytes,
    }
    server = ControlServer(path, handlers)
    await server.start()
    yield path
    await server.close()
    assert not path.exists()


async def call(path: Path, command: str, **arguments: Any) -> dict[str, Any]:
    """The blocking client in a thread, as a tool in another process would be."""
    return await asyncio.to_thread(protocol.call, path, command, arguments, timeout_seconds=5.0)


async def test_a_command_gets_its_arguments_and_its_result_comes_back(path: Path) -> None:
    assert await call(path, "echo", slot=7, name="é") == {"echo": {"slot": 7, "name": "é"}}
    assert await call(path, "bytes") == {"id": "01ff"}


async def test_several_commands_share_one_connection(path: Path) -> None:
    def both() -> list[dict[str, Any]]:
        with ControlClient(path) as client:
            return [client.call("echo", {"at": at}) for at in range(2)]

    assert await asyncio.to_thread(both) == [{"echo": {"at": 0}}, {"echo": {"at": 1}}]


@pytest.mark.parametrize(
    ("command", "arguments", "code", "words"),
    [
        ("nothing", {}, ExitCode.USAGE, "unknown command 'nothing'"),
        ("fenced", {"slot": 3}, ExitCode.FENCED, "slot 3 is not ours"),
        ("fenced", {}, ExitCode.USAGE, "missing a required argument: 'slot'"),
        ("fenced", {"slot": 1, "more": 2}, ExitCode.USAGE, "unexpected keyword argument 'more'"),
        ("down", {}, ExitCode.NO, "not connected"),
        ("broken", {}, ExitCode.BUG, "internal error: TypeError"),
    ],
)
async def test_a_refusal_carries_words_and_exit_code(
    path: Path, command: str, arguments: dict[str, Any], code: int, words: str
) -> None:
    with pytest.raises(ControlRefused, match=words) as refused:
        await call(path, command, **arguments)
    assert refused.value.exit_code == code
    assert await call(path, "echo") == {"echo": {}}, "the process serves on"


async def test_only_the_owner_may_open_the_socket(path: Path) -> None:
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600  # noqa: PTH116


async def test_nobody_there_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(ControlUnreachable, match="is qim running") as unreachable:
        await call(tmp_path / "nothing.sock", "echo")
    assert unreachable.value.exit_code == ExitCode.UNREACHABLE


async def test_a_path_longer_than_a_socket_allows_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(ControlUnreachable):
        await call(tmp_path / ("x" * 200), "echo")


async def test_a_server_that_closes_in_the_middle_is_unreachable(tmp_path: Path) -> None:
    path = tmp_path / "half.sock"

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(LENGTH.pack(100) + b"{")
        writer.close()

    server = await asyncio.start_unix_server(half, path)
    with pytest.raises(ControlUnreachable, match="closed the connection"):
        await call(path, "echo")
    server.close()


@pytest.mark.parametrize(
    "data",
    [
        LENGTH.pack(CONTROL_MESSAGE_BYTES_MAX + 1),
        LENGTH.pack(2) + b"[]",
        LENGTH.pack(4) + b"\xff\xff\xff\xff",
        LENGTH.pack(60_000) + b"[" * 60_000,
    ],
    ids=["too long", "not an object", "not text", "nested"],
)
async def test_a_peer_that_breaks_the_protocol_is_cut_off(path: Path, data: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(data)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    assert await call(path, "echo") == {"echo": {}}


async def test_arguments_that_are_no_object_are_refused(path: Path) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(encode_message({"command": "echo", "arguments": [1]}))
    length = LENGTH.unpack(await reader.readexactly(4))[0]
    assert b"arguments are an object" in await reader.readexactly(length)
    writer.close()


async def test_connections_above_the_maximum_are_closed(path: Path) -> None:
    held = [await asyncio.open_unix_connection(path) for _ in range(CONNECTIONS_MAX)]
    for reader, writer in held:
        writer.write(encode_message({"command": "echo", "arguments": {}}))
        await reader.readexactly(4)
    reader, writer = await asyncio.open_unix_connection(path)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    for _, each in [*held, (reader, writer)]:
        each.close()


async def test_a_socket_left_by_a_crash_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(os.fspath(path))
    server = ControlServer(path, {"echo": echo})
    await server.start()
    assert await call(path, "echo") == {"echo": {}}
    await server.close()

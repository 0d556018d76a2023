"""The control socket of a process: commands in, plain dictionaries out.

Every child opens one Unix socket in the runtime folder (`control-<worker>.sock`, admin `control.sock`). The
messages are those of `qim/ctl/protocol.py`. A handler is a function of the command's arguments that returns a
dictionary, at once or as an awaitable; it runs on the loop of the process, so it must be short or await.

Who may connect: the folder and the mode of the socket (0600) allow only the service's own user and root, and
the kernel's word about the peer is checked as well, in case somebody widened the folder.

Bounded: connections, message size, time between two requests and time for one. Above the first bound a
connection is closed unanswered; a peer that breaks the protocol is cut off. A handler that fails is answered
with its error and harms nobody else; a bug in one is logged and answered as 70. When the process ends, the
socket file is removed; one left by a crash is replaced at the next start.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from structlog import get_logger

from qim.ctl.protocol import LENGTH, Answer, decode_body, decode_length, encode_message
from qim.errors import ControlRefused, ExitCode, QimError
from qim.ids import ID_BYTES, TenantId
from qim.tokens import TENANT_MAX

CONNECTIONS_MAX: Final = 16
"""People and the admin process; a script that opens more waits for its own connections to close."""
IDLE_SECONDS_MAX: Final = 60.0
ANSWER_SECONDS_MAX: Final = 30.0
BACKLOG: Final = 16
_CREDENTIALS: Final = struct.Struct("=iII")

Handler = Callable[..., Answer | Awaitable[Answer]]

log = get_logger()


class ControlServer:
    """Serves the commands of one process on one socket."""

    def __init__(self, path: Path, handlers: Mapping[str, Handler]) -> None:
        self._path = path
        self._handlers = dict(handlers)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Opens the socket; what a crashed predecessor left there is replaced."""
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        mask = os.umask(0o177)
        try:
            listener.bind(str(self._path))
        finally:
            os.umask(mask)
        self._server = await asyncio.start_unix_server(self._on_connection, sock=listener, backlog=BACKLOG)

    async def close(self) -> None:
        """Cuts what is open and removes the socket."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if len(self._connections) <= CONNECTIONS_MAX and _is_allowed(writer):
                await self._serve(reader, writer)
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the peer went away, broke the protocol or fell silent; a cancel is our own close
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            async with asyncio.timeout(IDLE_SECONDS_MAX):
                request = decode_body(
                    await reader.readexactly(decode_length(await reader.readexactly(LENGTH.size)))
                )
            writer.write(await self._answer(request))
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                await writer.drain()

    async def _answer(self, request: Answer) -> bytes:
        try:
            return encode_message({"ok": True, "result": await self._run(request)})
        except ControlRefused as refusal:
            return _refusal(str(refusal), refusal.exit_code)
        except (QimError, OSError) as error:
            return _refusal(str(error) or type(error).__name__, ExitCode.NO)
        except TimeoutError:
            return _refusal(f"no result within {ANSWER_SECONDS_MAX:.0f} s", ExitCode.UNREACHABLE)
        except Exception as failure:  # noqa: BLE001 - a bug in a command must not end the whole process
            return _report_bug(request, failure)

    async def _run(self, request: Answer) -> Answer:
        name, arguments = request.get("command"), request.get("arguments", {})
        handler = self._handlers.get(name) if isinstance(name, str) else None
        if handler is None:
            raise ControlRefused(f"unknown command {str(name)[:64]!r}", exit_code=ExitCode.USAGE)
        if not isinstance(arguments, dict):
            raise ControlRefused("arguments are an object", exit_code=ExitCode.USAGE)
        call = _bind(handler, arguments)
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            result = call()
            return result if isinstance(result, dict) else await result


def parse_id(what: str, text: str) -> bytes:
    """An id among the arguments of a command. Raises ControlRefused, without quoting what was typed."""
    try:
        found = bytes.fromhex(text)
    except (TypeError, ValueError):
        found = b""
    if len(found) != ID_BYTES:
        raise ControlRefused(f"a {what} is {2 * ID_BYTES} hexadecimal digits", exit_code=ExitCode.USAGE)
    return found


def parse_tenant(number: object) -> TenantId:
    """Raises ControlRefused."""
    if not isinstance(number, int) or not 0 <= number <= TENANT_MAX:
        raise ControlRefused(f"a tenant is a number from 0 to {TENANT_MAX}", exit_code=ExitCode.USAGE)
    return TenantId(number)


def _bind(handler: Handler, arguments: dict[str, Any]) -> Callable[[], Answer | Awaitable[Answer]]:
    """Wrong arguments are the caller's mistake; a TypeError inside the handler is ours."""
    from inspect import signature  # noqa: PLC0415 - needed by people's commands only, not by a worker's start

    try:
        signature(handler).bind(**arguments)
    except TypeError as error:
        raise ControlRefused(str(error), exit_code=ExitCode.USAGE) from error
    return lambda: handler(**arguments)


def _report_bug(request: Answer, failure: Exception) -> bytes:
    log.error("control_failed", command=str(request.get("command"))[:64], exc_info=failure)
    return _refusal(f"internal error: {type(failure).__name__}", ExitCode.BUG)


def _refusal(text: str, code: int) -> bytes:
    return encode_message({"ok": False, "error": text[:2_000], "code": int(code)})


def _is_allowed(writer: asyncio.StreamWriter) -> bool:
    peer = writer.get_extra_info("socket")
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return user in {0, os.geteuid()}

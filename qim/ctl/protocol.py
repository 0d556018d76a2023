"""The control protocol: length-prefixed JSON over the Unix socket of a process, and a blocking client for it.

    request   u32 big-endian length ‖ {"command": "status", "arguments": {…}}
    answer    u32 big-endian length ‖ {"ok": true, "result": {…}}
                                    or {"ok": false, "error": "…", "code": exit code}

One request at a time on a connection, any number after each other. A message has a maximum, checked from the
length alone; a peer that breaks the protocol is cut off. Bytes travel as hexadecimal text.

The client blocks, because its user is a person at a command line. A server that is not there, hangs, or
breaks off in the middle is `ControlUnreachable` (exit 69): whether the command was carried out is then
unknown, and every command may be repeated. A refusal is `ControlRefused` with the server's words and its
exit code.
"""

import json
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from qim.errors import ControlRefused, ControlUnreachable, ExitCode
from qim.limits import CONTROL_MESSAGE_BYTES_MAX

LENGTH: Final = struct.Struct(">I")
TIMEOUT_SECONDS: Final = 10.0

Answer = dict[str, Any]


def encode_message(message: Answer) -> bytes:
    """One message, ready to be written; raises ValueError when it is too large."""
    body = json.dumps(message, separators=(",", ":"), default=_plain).encode()
    if len(body) > CONTROL_MESSAGE_BYTES_MAX:
        raise ValueError(f"a control message of {len(body)} bytes; {CONTROL_MESSAGE_BYTES_MAX} are allowed")
    return LENGTH.pack(len(body)) + body


def decode_length(head: bytes) -> int:
    """The length of the body; raises ValueError before anything of that size is read."""
    length: int = LENGTH.unpack(head)[0]
    if length > CONTROL_MESSAGE_BYTES_MAX:
        raise ValueError(f"a control message of {length} bytes; {CONTROL_MESSAGE_BYTES_MAX} are allowed")
    return length


def decode_body(body: bytes) -> Answer:
    """The message; raises ValueError when it is not a JSON object."""
    try:
        message = json.loads(body)
    except RecursionError as error:
        raise ValueError("a control message nested too deeply") from error
    if isinstance(message, dict):
        return message
    raise ValueError("a control message is an object")


def _plain(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    raise TypeError(f"{type(value).__name__} in a control message")


class ControlClient:
    """A connection to one process. Use as a context manager, or `call`."""

    def __init__(self, path: Path, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Connects at once; raises ControlUnreachable."""
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_seconds)
        try:
            self._socket.connect(str(path))
        except (OSError, ValueError) as error:
            self._socket.close()
            raise ControlUnreachable(f"{path}: {_reason(error)}; is qim running?") from error

    def call(self, command: str, arguments: Mapping[str, Any] | None = None) -> Answer:
        """Runs one command; raises ControlRefused or ControlUnreachable."""
        try:
            self._socket.sendall(encode_message({"command": command, "arguments": dict(arguments or {})}))
            answer = decode_body(self._receive(decode_length(self._receive(LENGTH.size))))
        except (OSError, ValueError) as error:
            raise ControlUnreachable(f"{self._path}: {_reason(error)}") from error
        if not answer.get("ok"):
            code = answer.get("code", ExitCode.NO)
            raise ControlRefused(str(answer.get("error", "refused")), exit_code=int(code))
        result: Answer = answer.get("result") or {}
        return result

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(count - len(parts))
            if not part:
                raise ConnectionResetError("the server closed the connection")
            parts += part
        return bytes(parts)


def call(
    path: Path,
    command: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Answer:
    """Connects, runs one command, closes."""
    with ControlClient(path, timeout_seconds=timeout_seconds) as client:
        return client.call(command, arguments)


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error)

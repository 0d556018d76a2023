"""A whole service for one test: `qim dev` in a folder of its own, started and ended by its pid.

What is tested is what a person starts: launcher, embedded store, supervisor, workers, TLS. The parts that a
test kills are named by their pids, which the service itself reports. Users are made up on the spot: the
folder holds the key that signs their tokens.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from qim.ctl import protocol
from qim.errors import ControlError
from qim.ids import Millis, TenantId, UserId
from qim.tokens import mint_token
from tests.waiting import eventually
from workers.devfolder import KEY_ID

REPOSITORY: Final = Path(__file__).parents[2]
START_SECONDS_MAX: Final = 40.0
STOP_SECONDS_MAX: Final = 40.0
TOKEN_END_MS: Final = Millis(4_000_000_000_000)
TENANT: Final = TenantId(1)


class User(NamedTuple):
    user: UserId
    token: str


class DevServer:
    """One run of `qim dev`; a second run on the same folder goes on with its data."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "dev",
        workers: int = 1,
        environment: Mapping[str, str] | None = None,
        output: Path | None = None,
        arguments: Sequence[str] = (),
        module: str = "workers",
    ) -> None:
        """`arguments` are added to `qim dev`; `module` is what Python runs as `qim`."""
        self.folder = folder / name
        self.port = _free_port()
        self._workers = workers
        self._environment = dict(environment or {})
        self._output = output or folder / "dev.out"
        self._arguments = tuple(arguments)
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- life ---

    def start(self) -> None:
        command = [
            sys.executable, "-m", self._module, "dev", "--data-dir", str(self.folder),
            "--port", str(self.port), "--workers", str(self._workers), *self._arguments,
        ]  # fmt: skip
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "COLUMNS": "200", **self._environment},
            )
        eventually(self._is_serving, what="qim dev serves", timeout_seconds=START_SECONDS_MAX)

    def stop(self) -> int:
        """As Ctrl-C does; the exit code of the launcher."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(signal.SIGINT)
        try:
            return process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            raise

    def _is_serving(self) -> bool:
        process = self._process
        assert process is not None
        if process.poll() is not None:
            raise AssertionError(f"qim dev ended with {process.returncode}:\n{self.output()}")
        return "serving until" in self.output()

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def log(self) -> str:
        return (self.folder / "qim.log").read_text(errors="replace")

    # --- parts ---

    @property
    def certificate(self) -> Path:
        return self.folder / "certificate.pem"

    def status(self) -> dict[str, Any] | None:
        """None while the admin process does not answer."""
        try:
            return protocol.call(Path(self._said("control")), "status", timeout_seconds=5.0)
        except ControlError:
            return None

    def until_ready(self) -> None:
        eventually(
            lambda: (self.status() or {}).get("ready"), what="ready again", timeout_seconds=START_SECONDS_MAX
        )

    def worker_pids(self) -> list[int]:
        status = self.status()
        assert status is not None
        return [int(row["pid"]) for row in status["workers"] if row["pid"]]

    def store_pid(self) -> int:
        """Of the newest store: the launcher starts another one when it dies."""
        pids = [line.split()[2] for line in self.output().splitlines() if line.startswith("store      pid")]
        return int(pids[-1].rstrip(","))

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def new_user(self) -> User:
        user = UserId(os.urandom(16))
        key = (self.folder / "token-key.pem").read_bytes()
        token = mint_token(
            key, KEY_ID, tenant=TENANT, user=user, expires_at_ms=TOKEN_END_MS, issuer="qim", audience="qim"
        )
        return User(user, token)

    def tool(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs `qim COMMAND` on this folder."""
        return subprocess.run(
            [sys.executable, "-m", "workers", command, "--data-dir", str(self.folder), *arguments],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    def _said(self, what: str) -> str:
        for line in self.output().splitlines():
            if line.startswith(what):
                return line.split()[1]
        raise AssertionError(f"qim dev said nothing of {what}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

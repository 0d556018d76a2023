"""A server for a measurement: the given one, or one that is started here and taken away afterwards.

It is started as a person would start it, by `qim dev` with data of its own, so what is measured is what
people run. Nothing is tuned for the generator: it has enough users to stay below the rate limit of each. The
launcher stops the service first and the store last. A generator that is killed leaves nothing running: the
kernel then ends the launcher, which ends the rest.
"""

import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep
from typing import IO, Any, Final

from loadtest.server import Server, listener_pid
from qim.clock import SystemClock
from qim.ctl.protocol import call
from qim.errors import QimError
from workers.child import start_program

ADDRESS: Final = "127.0.0.1"
START_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 40.0
POLL_SECONDS: Final = 0.1


@contextmanager
def start_server(given: Server | None, *, workers: int, redis_server: str | None) -> Iterator[Server]:
    """The server to measure; raises ConnectionError when it does not start."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="qim-bench-") as folder:
        data = Path(folder) / "data"
        with (Path(folder) / "launcher.log").open("w+b") as log:
            process = _start(data, log=log, workers=workers, redis_server=redis_server)
            try:
                status = _await_ready(process, data)
                if status is None:
                    log.seek(0)
                    told = (log.read() + _read_if_there(data / "qim.log")).decode(errors="replace")
                    raise ConnectionError(f"the server did not start: {told[-2000:].strip()}")
                yield describe(data, status)
            finally:
                stop(process)


def _read_if_there(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def stop(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C would, by force at the deadline."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def describe(data: Path, status: dict[str, Any]) -> Server:
    """What a generator must know of a running `qim dev`, from its folder and its status."""
    runtime = data / "run"
    return Server(
        host=ADDRESS,
        port=status["port"],
        ca_file=data / "certificate.pem",
        token_key_pem=(data / "token-key.pem").read_bytes(),
        runtime_dir=runtime,
        store_pid=listener_pid(runtime / "store.sock"),
    )


def _start(data: Path, *, log: IO[bytes], workers: int, redis_server: str | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "workers", "dev", "--data-dir", str(data), "--port", str(_free_port())]
    if workers:
        command += ["--workers", str(workers)]
    if redis_server:
        command += ["--redis-server", redis_server]
    return start_program(command, log=log)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        port: int = probe.getsockname()[1]
        return port


def _await_ready(process: subprocess.Popen[bytes], data: Path) -> dict[str, Any] | None:
    """The status of a ready server; None when it ended or took too long."""
    clock = SystemClock()
    deadline = clock.monotonic() + START_SECONDS_MAX
    while process.poll() is None and clock.monotonic() < deadline:
        with suppress(QimError):
            status = call(data / "run" / "control.sock", "status", timeout_seconds=5.0)
            if status["ready"]:
                return status
        sleep(POLL_SECONDS)
    return None

"""A server for a measurement: the given one, or one that is started here and taken away afterwards.

The server is started as a person would start it, `qim dev` with data of its own, so what is measured is what
people run. The rate limit of one user stays as it is: the generator has enough users.
"""

import json
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from loadtest.server import Server

START_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 40.0


@contextmanager
def start_server(given: Server | None, *, workers: int, redis_server: str | None) -> Iterator[Server]:
    """The server to measure; raises ConnectionError when it does not start."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="qim-bench-") as folder:
        process = _start(Path(folder), workers=workers, redis_server=redis_server)
        try:
            yield _read_server(process)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(folder: Path, *, workers: int, redis_server: str | None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "workers", "dev", "--folder", str(folder), "--json"]
    if workers:
        command += ["--workers", str(workers)]
    if redis_server:
        command += ["--redis-server", redis_server]
    # A group of its own: Ctrl-C ends the measurement, which then stops the server itself.
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def _read_server(process: subprocess.Popen[str]) -> Server:
    """The first line of the launcher: what it started, as one JSON object."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], START_SECONDS_MAX)
    line = process.stdout.readline() if readable else ""
    if not line.startswith("{"):
        raise ConnectionError(
            f"the server did not start (exit code {process.poll()}): {line.strip() or 'silent'}"
        )
    started = json.loads(line)
    host, _, port = started["endpoint"].rpartition(":")
    return Server(
        host=host,
        port=int(port),
        ca_file=Path(started["ca"]),
        token_key_pem=Path(started["token_key"]).read_bytes(),
        kid=started["kid"],
        runtime_dir=Path(started["runtime"]),
        store_pid=started["store_pid"],
    )

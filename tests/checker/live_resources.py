"""What every process of a live run holds at one moment: memory, descriptors, threads, by its part.

A process that is not there just now, because it was killed, is left out; its successor has another pid and is
not warm. So what must be flat is read from rows of one pid.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import psutil

from tests.services.dev_server import DevServer


class Resources(NamedTuple):
    """Of one process."""

    memory_bytes: int
    descriptors: int
    threads: int
    pid: int
    """Another one than before: a successor, which is not warm."""


def measure(server: DevServer, clients: dict[str, int]) -> dict[str, Resources]:
    """Of the server and of the clients; nothing while no worker can be asked for."""
    status = server.status() or {"workers": []}
    workers = [int(row["pid"]) for row in status["workers"] if row["pid"]]
    supervisor = next((parent for worker in _processes(workers) if (parent := worker.parent())), None)
    launcher = supervisor and supervisor.parent()
    if supervisor is None or launcher is None:
        return {}
    parts = {launcher.pid: "launcher", supervisor.pid: "supervisor"}
    parts |= {pid: f"worker {number}" for number, pid in enumerate(workers)}
    parts |= {pid: name for name, pid in clients.items()}
    found: dict[str, Resources] = {}
    for process in (launcher, *launcher.children(recursive=True), *_processes(clients.values())):
        with contextlib.suppress(psutil.NoSuchProcess):
            part = parts.get(process.pid) or ("store" if process.ppid() == launcher.pid else "admin")
            found[part] = Resources(
                process.memory_info().rss, process.num_fds(), process.num_threads(), process.pid
            )
    return found


def _processes(pids: Iterable[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)

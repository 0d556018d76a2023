"""What every process of a live run holds at one moment: memory, descriptors, threads, by its part.

A process that is not there just now, because it was killed, is left out; its successor has another pid and is
not warm. So what must be flat is read from rows of one pid.

The parts are found from outside, by their pids and parents, so that a process cannot embellish its own
figures and needs no code for them: the workers name themselves in the status, above each stand its supervisor
and the launcher, below the launcher stands the rest. Nothing here is kept between two calls but what
`/proc` keeps: the processor time of a dead process is with its parent, so totals must be asked of the whole
tree, and a share of the machine is only as good as the machine was ours alone.
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


class ProcessorSeconds(NamedTuple):
    """Running totals."""

    server: float
    """With those of its processes that were killed and waited for."""
    machine: float
    """Of everybody."""

    def since(self, earlier: "ProcessorSeconds") -> "ProcessorSeconds":
        return ProcessorSeconds(self.server - earlier.server, self.machine - earlier.machine)


def processor_seconds(server: DevServer) -> ProcessorSeconds:
    launcher = _launcher(_workers(server))
    total = 0.0
    for process in (launcher, *launcher.children(recursive=True)) if launcher else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    machine = psutil.cpu_times()
    return ProcessorSeconds(total, machine.user + machine.nice + machine.system)


def measure(server: DevServer, clients: dict[str, int]) -> dict[str, Resources]:
    """Of the server and of the clients; nothing while no worker can be asked for."""
    workers = _workers(server)
    launcher = _launcher(workers)
    if launcher is None:
        return {}
    parts = {launcher.pid: "launcher"} | {pid: f"worker {number}" for number, pid in enumerate(workers)}
    parts |= {pid: name for name, pid in clients.items()}
    found: dict[str, Resources] = {}
    for process in (launcher, *launcher.children(recursive=True), *_processes(clients.values())):
        with contextlib.suppress(psutil.NoSuchProcess):
            part = parts.get(process.pid) or _part(process, launcher)
            found[part] = Resources(
                process.memory_info().rss, process.num_fds(), process.num_threads(), process.pid
            )
    return found


def _processes(pids: Iterable[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def _workers(server: DevServer) -> list[int]:
    status = server.status() or {"workers": []}
    return [int(row["pid"]) for row in status["workers"] if row["pid"]]


def _launcher(workers: Iterable[int]) -> psutil.Process | None:
    """The parent of the supervisor of any worker that is there."""
    for worker in _processes(workers):
        with contextlib.suppress(psutil.NoSuchProcess):
            supervisor = worker.parent()
            return supervisor.parent() if supervisor else None
    return None


def _part(process: psutil.Process, launcher: psutil.Process) -> str:
    if process.ppid() != launcher.pid:
        return "admin"
    return "supervisor" if process.children() else "store"

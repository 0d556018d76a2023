"""The server under test, seen from outside: where it listens, which processes it is, what they use and count.

A generator needs an endpoint, the certificate to trust and the key to sign its users' tokens with. With the
runtime folder as well it can tell who used the processor: the control sockets in that folder belong to the
workers, and the kernel says which process listens on each. The store's process is named by the store itself.

Nothing here is on the path of a message. Samples are taken at the two ends of the measured window; the
counters come from each worker's control socket. A server that does not answer is a sample without counters,
never an error: the report then shows a dash.
"""

import os
import platform
import resource
import socket
import struct
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from loadtest.report import ProcessorTime
from qim.clock import Clock
from qim.ctl.protocol import call
from qim.errors import QimError
from qim.ids import Millis, TenantId, UserId
from qim.metrics import quantile
from qim.tokens import mint_token

TENANT: Final = TenantId(1)
TOKEN_LIFE_MS: Final = 6 * 3_600_000
CONTROL_TIMEOUT_SECONDS: Final = 2.0
_PEER: Final = struct.Struct("=iII")
_ROLE_COUNTERS: Final = tuple(
    f"{role}_{part}" for role in ("writer", "fanout", "mailbox") for part in ("batches", "batch_messages")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Everything a generator must know."""

    host: str
    port: int
    ca_file: Path
    token_key_pem: bytes = field(repr=False)
    kid: str = "dev"
    issuer: str = "qim"
    audience: str = "qim"
    server_name: str = "localhost"
    runtime_dir: Path | None = None
    store_pid: int | None = None

    def token_for(self, user: UserId, clock: Clock) -> str:
        """A token that outlives any run; the server never sees how it was made."""
        return mint_token(
            self.token_key_pem,
            self.kid,
            tenant=TENANT,
            user=user,
            expires_at_ms=Millis(clock.now_ms() + TOKEN_LIFE_MS),
            issuer=self.issuer,
            audience=self.audience,
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """Running totals at one moment."""

    at: float
    workers: float
    redis: float
    attendants: float
    """Supervisor and admin process: ours, but no message passes through them."""
    generator: float
    busy: float
    """Of the machine, interrupts left out: they are mostly the work of our own traffic."""
    stolen: float


class Observer:
    """Takes samples of one server and the machine."""

    def __init__(self, server: Server, clock: Clock) -> None:
        self._clock = clock
        self._runtime_dir = server.runtime_dir
        self._workers = _listeners(server.runtime_dir, "control-*.sock")
        self._store = _process(server.store_pid)
        admins = _listeners(server.runtime_dir, "control.sock")
        self._attendants = admins + [parent for admin in admins if (parent := admin.parent())]

    @property
    def can_see_workers(self) -> bool:
        return bool(self._workers)

    @property
    def worker_count(self) -> int:
        return len(self._workers)

    def sample(self) -> Sample:
        """Takes well under a millisecond, so it may run on the generator's loop."""
        machine = psutil.cpu_times()
        own = resource.getrusage(resource.RUSAGE_SELF)
        return Sample(
            at=self._clock.monotonic(),
            workers=sum(map(_cpu_seconds, self._workers)),
            redis=_cpu_seconds(self._store),
            attendants=sum(map(_cpu_seconds, self._attendants)),
            generator=own.ru_utime + own.ru_stime,
            busy=machine.user + machine.nice + machine.system,
            stolen=getattr(machine, "steal", 0.0),
        )

    def counters(self) -> dict[str, Any]:
        """Sums over the server's processes; empty when nobody answers. Blocks: call it in a thread."""
        total: dict[str, Any] = {}
        if self._runtime_dir is not None:
            path = self._runtime_dir / "control.sock"
            with suppress(QimError):
                answer = call(path, "metrics", timeout_seconds=CONTROL_TIMEOUT_SECONDS)
                for metrics in answer["processes"]:
                    add_counters(total, metrics)
        return total


def spent(before: Sample, after: Sample) -> ProcessorTime:
    """What was used between two samples."""
    workers, redis = after.workers - before.workers, after.redis - before.redis
    generator = after.generator - before.generator
    ours = workers + redis + generator + after.attendants - before.attendants
    return ProcessorTime(
        window_seconds=after.at - before.at,
        workers=workers,
        redis=redis,
        generator=generator,
        others=after.busy - before.busy - ours,
        stolen=after.stolen - before.stolen,
    )


def worker_lag_p99_ms(before: Mapping[str, Any], after: Mapping[str, Any]) -> float | None:
    """From two sums of the workers' own histograms; None where they were not read."""
    new, old = after.get("loop_lag"), before.get("loop_lag")
    if new is None:
        return None
    counts = [n - o for n, o in zip(new, old or [0] * len(new), strict=True)]
    return quantile(counts, 0.99) * 1000


def add_counters(total: dict[str, Any], metrics: Mapping[str, Any]) -> None:
    for name in _ROLE_COUNTERS:
        total[name] = total.get(name, 0) + metrics.get(name, 0)  # a process that published nothing yet
    lag = metrics.get("loop_lag")
    if isinstance(lag, Mapping):
        known = total.get("loop_lag", [0.0] * len(lag["counts"]))
        total["loop_lag"] = [a + b for a, b in zip(known, lag["counts"], strict=True)]


def _listeners(runtime_dir: Path | None, pattern: str) -> list[psutil.Process]:
    """The processes behind the control sockets of a folder."""
    paths = sorted(runtime_dir.glob(pattern)) if runtime_dir is not None else []
    return [process for path in paths if (process := _process(listener_pid(path)))]


def listener_pid(path: Path) -> int | None:
    """The process that listens on a Unix socket, by the kernel's word."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONTROL_TIMEOUT_SECONDS)
        probe.connect(str(path))
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        pid: int = _PEER.unpack(credentials)[0]
        return pid
    return None


def _process(pid: int | None) -> psutil.Process | None:
    with suppress(psutil.Error):
        return psutil.Process(pid) if pid else None
    return None


def _cpu_seconds(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def machine_facts(*, workers: int | None) -> dict[str, Any]:
    """The header without which a number does not count."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
        "workers": workers,
    }


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
    with suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() or "unknown"
    return "unknown"

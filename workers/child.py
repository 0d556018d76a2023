"""The first steps of every child, between the fork and its own work.

The order matters. First the parent-death signal and the check that the parent still lives, so that no orphan
keeps a port or a slot; then everything inherited that must not be used here: sibling sockets, the service
manager's variables, the supervisor's signal handlers and wake-up descriptor, the state of `random`. Signals
stay blocked until the handlers are the defaults again, otherwise one that arrives in between would run the
supervisor's handler in the child.

`run_child` never returns into the supervisor's code: whatever happens, the process ends with an exit code of
`qim.errors.ExitCode`. A refusal that names its remedy is logged as one line; only a bug leaves a traceback.

`start_program` is the other way to a child, for launchers: a program with the same parent-death signal.
"""

import ctypes
import faulthandler
import gc
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Final, NoReturn

from structlog import get_logger

from qim.errors import ConfigError, ExitCode, GuardRefused, StaleOwner
from workers.heartbeat import HeartbeatPage, HeartbeatRecord

PR_SET_PDEATHSIG: Final = 1
GC_THRESHOLD: Final = 100_000
"""New containers between two young collections. The messages in flight are some ten thousand that are all
freed by reference count; the default of 700 spent a twelfth of a busy worker on looking at them."""
MANAGER_VARIABLES: Final = (
    "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES",
)  # fmt: skip
COMM_BYTES_MAX: Final = 15

# Loaded before the fork: loading a library in the child could take a lock that another thread held.
_libc = ctypes.CDLL(None, use_errno=True)
log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildContext:
    """What one child gets from the supervisor."""

    name: str
    """As in logs and in the table of processes: `admin`, `worker-0`."""
    number: int
    """Its record in the shared page."""
    generation: int
    """1 for the first fork of this child; rises with each re-fork."""
    record: HeartbeatRecord
    page: HeartbeatPage
    supervisor_pid: int
    listener: socket.socket | None


ChildEntry = Callable[[ChildContext], int]
"""The work of a child: returns its exit code."""


def die_with_parent(parent_pid: int, *, signal_number: int = signal.SIGKILL) -> None:
    """The kernel sends the signal when the parent ends; a parent that has ended already is seen here."""
    _libc.prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent_pid:
        os._exit(ExitCode.BUG)


def start_program(
    command: Sequence[str], *, log: IO[bytes], keep: Sequence[int] = (), cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """A program that belongs to this process: it ends with it, and Ctrl-C in the terminal does not reach it.

    So whoever started it decides when it stops. `keep`: descriptors that it inherits. Raises OSError.
    """
    return subprocess.Popen(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        process_group=0,
        pass_fds=tuple(keep),
        preexec_fn=partial(die_with_parent, os.getpid(), signal_number=signal.SIGTERM),  # noqa: PLW1509 - no thread exists here, and only a system call is made
    )


def run_child(entry: ChildEntry, context: ChildContext) -> NoReturn:
    """Called in the child with all signals blocked."""
    code: int = ExitCode.BUG
    try:
        _become_child(context)
        code = entry(context)
    except (GuardRefused, ConfigError, StaleOwner) as refusal:
        code = _report_refusal(refusal)
    except BaseException as failure:  # noqa: BLE001 - nothing may unwind into the supervisor's frames
        code = _report_bug(failure)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: exit handlers and buffers belong to the supervisor.
        os._exit(code)


def _report_refusal(refusal: GuardRefused | ConfigError | StaleOwner) -> int:
    match refusal:
        case GuardRefused():
            log.error("start_refused", reason=str(refusal))
            return refusal.exit_code
        case ConfigError():
            log.error("start_refused", reason="; ".join(refusal.problems))
            return ExitCode.CONFIG
        case StaleOwner():
            log.error("worker_fenced", reason=str(refusal))
            return ExitCode.FENCED


def _report_bug(failure: BaseException) -> int:
    log.critical("child_failed", exc_info=failure)
    return ExitCode.BUG


def _become_child(context: ChildContext) -> None:
    die_with_parent(context.supervisor_pid)
    for name in MANAGER_VARIABLES:
        os.environ.pop(name, None)
    signal.set_wakeup_fd(-1)
    _reset_signals(signal.valid_signals())
    random.seed()
    faulthandler.enable()
    Path("/proc/self/comm").write_bytes(f"qim-{context.name}".encode()[:COMM_BYTES_MAX])
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    context.record.set_pid(os.getpid())


def _reset_signals(numbers: Iterable[int]) -> None:
    for number in numbers:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    # Ctrl-C reaches the whole foreground group; only the supervisor decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())

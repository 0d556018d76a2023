"""Standing still: processes by signals, a store's clients by CLIENT PAUSE; and the end of a process.

A stopped process is not a cut network: what is sent to it waits in the kernel and is worked off when it goes
on. `stopped` returns only when the process stands still, and lets it go whatever happens inside. A store that
pauses its clients answers nobody until the pause is over: it ends by its time.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.waiting import eventually


def state_of(pid: int) -> str:
    """One letter as in ps: R, S, T for stopped, Z for ended and not yet waited for; empty when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    # The name in brackets may itself hold brackets and blanks.
    return text.rpartition(")")[2].split()[0]


def is_gone(pid: int) -> bool:
    return state_of(pid) in {"", "Z"}


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end if the process still exists."""
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: state_of(pid) == "T", what=f"process {pid} stands still")
        yield
    finally:
        if not is_gone(pid):
            os.kill(pid, signal.SIGCONT)


def kill9(pid: int) -> None:
    """SIGKILL; returns when the process has ended."""
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: is_gone(pid), what=f"process {pid} has ended")


def ask_store(socket_path: Path, *command: str | int) -> Any:
    """One command over a connection of its own, tried once."""
    once = Retry(NoBackoff(), 0)
    with redis.Redis(unix_socket_path=str(socket_path), retry=once) as store:
        return store.execute_command(*command)


def pause_clients(socket_path: Path, *, milliseconds: int) -> None:
    """From now on no client gets an answer for so long. Returns at once; `ask_store` waits for the end."""
    ask_store(socket_path, "CLIENT", "PAUSE", milliseconds, "ALL")

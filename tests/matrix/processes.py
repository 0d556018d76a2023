"""Processes that an experiment may kill: forked from the experiment, so that one starts in milliseconds.

A child runs one function and ends with `os._exit`; nothing of it survives but what it wrote into the medium
and what it reported. Reports are fixed records in a pipe, written at once: what was reported before a kill -9
arrives after it. The parent has no event loop while it forks, and the child makes its own. A child that
raises prints its trace and ends with 1; one whose parent dies is ended by the kernel.
"""

import ctypes
import os
import select
import signal
import struct
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

SILENT_SECONDS_MAX: Final = 120.0
PR_SET_PDEATHSIG: Final = 1
_REPORT: Final = struct.Struct(">B3Q")
_libc = ctypes.CDLL(None)


class Report(NamedTuple):
    """Four numbers; what they mean is agreed between an experiment and its child."""

    kind: int
    first: int
    second: int
    third: int


class Reporter:
    """The child's end of the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def tell(self, reports: Iterable[tuple[int, int, int, int]]) -> None:
        """In one write each 100 reports: a pipe takes so much at once or not at all."""
        packed = [_REPORT.pack(*report) for report in reports]
        for start in range(0, len(packed), 100):
            os.write(self._descriptor, b"".join(packed[start : start + 100]))


class Child:
    """One forked process."""

    def __init__(self, work: Callable[[Reporter], None]) -> None:
        self._residue = b""
        self.reports: list[Report] = []
        """Everything it has told, in order."""
        self.counts: Counter[int] = Counter()
        """Reports of each kind."""
        self.exit_code: int | None = None
        self._read, write = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._read)
            _run(work, Reporter(write), parent)
        os.close(write)
        os.set_blocking(self._read, False)

    def read(self, *, timeout_seconds: float = SILENT_SECONDS_MAX) -> bool:
        """Waits for more reports; False when the child has closed its end."""
        ready, _, _ = select.select([self._read], [], [], timeout_seconds)
        if not ready:
            raise AssertionError(f"the child {self.pid} reports nothing for {timeout_seconds} s")
        data = self._residue + (new := os.read(self._read, 65_536))
        whole = len(data) - len(data) % _REPORT.size
        self._residue = data[whole:]
        for numbers in _REPORT.iter_unpack(data[:whole]):
            self.reports.append(Report._make(numbers))
            self.counts[numbers[0]] += 1
        return bool(new)

    def read_until_told(self, kind: int, count: int) -> bool:
        """Reads so many reports of a kind; False when the child ended before it had told them."""
        while self.counts[kind] < count:
            if not self.read():
                return False
        return True

    def signal(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            os.kill(self.pid, number)

    def wait_stopped(self) -> None:
        """Returns when the process stands still after SIGSTOP."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), f"ended with {status} instead of standing still"

    def kill9(self) -> None:
        """Ends it without warning; what it had told before is still read."""
        self.signal(signal.SIGKILL)
        self.finish()

    def finish(self) -> int:
        """Reads to the end and waits; the exit code, negative for a signal."""
        if self.exit_code is None:
            while self.read():
                pass
            os.close(self._read)
            _, status = os.waitpid(self.pid, 0)
            self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code


def _run(work: Callable[[Reporter], None], reporter: Reporter, parent: int) -> None:
    code = 1
    try:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            work(reporter)
            code = 0
    except BaseException:  # noqa: BLE001 - the top of a process: whatever it was is told, and the code says so
        traceback.print_exc()
    finally:
        os._exit(code)

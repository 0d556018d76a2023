"""System calls of a server that are slow or fail, made by strace.

strace starts the server, so no right to attach to a stranger is needed; with `-D` it stands beside the server
and not above it, so the process id, its parent and its exit are those of the server. It ends with the server.

`faults` are strace's own words, `fdatasync:delay_enter=2000000` (microseconds) or
`fdatasync:error=EIO:when=20`, where `when` counts the calls of one thread. What really happened stands in the
output, one line per call that was tampered with, and `struck` counts them: a test must never believe an
expression that matched nothing.

The embedded store calls fdatasync for its append-only file, from its main thread where every write is flushed
before it is answered and from a helper thread where it is flushed once a second, and fsync for its folder.
"""

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.faults.wrapped import write_wrapper
from tests.services import require_service

STRACE_REMEDY: Final = "apt-get install strace"
FLUSHES: Final = "fsync,fdatasync"
MARKS: Final = ("(DELAYED)", "(INJECTED)")


class Strace:
    """One way to start a server, and what its calls met."""

    def __init__(
        self, folder: Path, binary: str, *, faults: Sequence[str], calls: str = FLUSHES, once: bool = False
    ) -> None:
        """With `once` only the first start is traced: what ends the server must not end the next one too."""
        self._strace = require_service(shutil.which("strace"), name="strace", remedy=STRACE_REMEDY)
        self.output = folder / "strace.out"
        before = [self._strace, "-D", "-f", "-qq", "-A", "-o", str(self.output), "-e", f"trace={calls}"]
        for fault in faults:
            before += ["-e", f"inject={fault}"]
        # `--` because the server's own arguments begin with dashes.
        started = shlex.quote(str(folder / "straced-once"))
        plain = [f'[ -e {started} ] && exec {shlex.quote(binary)} "$@"', f": > {started}"]
        self.server = write_wrapper(
            folder / "straced-server", binary, before=[*before, "--"], shell=plain if once else []
        )
        """What to start in place of the server."""

    def lines(self) -> list[str]:
        return self.output.read_text(errors="replace").splitlines() if self.output.exists() else []

    def calls(self, name: str) -> int:
        """How often a call was begun."""
        return sum(f" {name}(" in line for line in self.lines())

    def struck(self) -> int:
        """How many calls were delayed or made to fail."""
        return sum(line.endswith(MARKS) for line in self.lines())

"""A wall clock of one program that a test moves, forwards and backwards, while the program runs.

The C file in `clock_shim` is preloaded into the program; it adds the offset that stands in a mapped file.
Monotonic clocks do not move: time-outs go on as before, only the date changes. It works for programs that
are linked dynamically and ask libc, as Valkey, Redis and Python do.
"""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.faults.compiled import build_library

SOURCE: Final = "clock_shim/clock.c"
OFFSET: Final = struct.Struct("<q")


class ShiftedClock:
    """The offset of every program that was started with `environment`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock-offset"
        self._library = build_library(SOURCE, folder)
        self._file.write_bytes(OFFSET.pack(0))

    @property
    def environment(self) -> Mapping[str, str]:
        return {"LD_PRELOAD": str(self._library), "QIM_CLOCK_FILE": str(self._file)}

    def shift(self, *, seconds: float) -> None:
        """From the next look at the clock on; 0 is the true time."""
        # Written over, never replaced: the programs have mapped this very file.
        with self._file.open("r+b") as file:
            file.write(OFFSET.pack(round(seconds * 1e9)))

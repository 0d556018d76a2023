"""Power loss without root: what would be left of a store's files, at every moment of a run.

The store is started with the C file in `disk_shim` preloaded. That notes each flush behind its end and before
the store learns of it: how long the file was when the flush began, or which names the folder had. Everything
else is in the page cache only and is treated as lost. Because the store only appends, the content of a file
at a moment is its begin, so the image of any moment can be written after the run; nothing has to be stopped,
and a moment inside a rewrite that lasts a microsecond is as easy as any other.

    an instant      a length of the notes. `now()` is taken behind an acknowledgement: whatever that one
                    waited for stands before it.
    the image       the names of the last flush of the folder, each file cut at its last finished flush;
                    with `renamed` the newest names, since a rename may reach the disk unasked

It models no torn sectors, and no data that survive without a flush. Full: the notes are one line per flush.
When the store is killed and started again with the same watch, the notes go on.
"""

from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, NewType

from tests.faults.compiled import build_library
from tests.faults.wrapped import write_wrapper

SOURCE: Final = "disk_shim/disk.c"
APPEND_ONLY: Final = "appendonlydir"
MANIFEST: Final = "appendonly.aof.manifest"

Instant = NewType("Instant", int)
"""Bytes of notes: orders everything that happened to the disk."""
Inode = NewType("Inode", int)
Names = Mapping[str, Inode]


class DiskState(NamedTuple):
    """What is known of the disk at an instant."""

    names: Names
    """As of the last flush of the folder."""
    newest_names: Names
    lengths: Mapping[Inode, int]
    """Of files that were flushed at least once."""

    @property
    def is_rewriting(self) -> bool:
        """A second base or a second file behind it exists: a rewrite has begun and is not cleaned up."""
        return any(
            sum(kind in name for name in names) > 1
            for names in (self.names, self.newest_names)
            for kind in (".base.", ".incr.")
        )


class DiskWatch:
    """Everything that became durable of one store."""

    def __init__(self, folder: Path, binary: str, *, settings: Mapping[str, str] | None = None) -> None:
        """`folder` must lie on the disk of the store's own folder: files are kept there by links."""
        self._log = folder / "log"
        self._kept = folder / "kept"
        self._kept.mkdir(parents=True)
        self._read = 0
        self._state = DiskState({}, {}, {})
        self._instants: list[tuple[Instant, DiskState]] = []
        environment = {
            "LD_PRELOAD": str(build_library(SOURCE, folder)),
            "QIM_DISK_FOLDER": str(folder),
            "QIM_DISK_NAME": APPEND_ONLY,
        }
        self.server = write_wrapper(
            folder / "watched-server", binary, environment=environment, settings=settings
        )
        """What to start in place of the server."""

    def now(self) -> Instant:
        return Instant(self._log.stat().st_size if self._log.exists() else 0)

    def instants(self) -> list[tuple[Instant, DiskState]]:
        """Every note with the state behind it, from the first moment at which the folder was durable."""
        with self._log.open() as log:
            log.seek(self._read)
            for line in log:
                self._read += len(line)
                self._state = _behind(self._state, line)
                if MANIFEST in self._state.names:
                    self._instants.append((Instant(self._read), self._state))
        return self._instants

    def state_at(self, instant: Instant) -> DiskState:
        """The newest state that is not younger than the instant."""
        notes = self.instants()
        behind = bisect_right(notes, instant, key=_instant_of)
        assert behind > 0, "nothing was durable yet"
        return notes[behind - 1][1]

    def write_image(self, instant: Instant, store: Path, *, renamed: bool = False) -> None:
        """Makes the folder of a store as a power loss at that instant would have left it."""
        state = self.state_at(instant)
        folder = store / APPEND_ONLY
        folder.mkdir(parents=True)
        for name, inode in (state.newest_names if renamed else state.names).items():
            length = state.lengths.get(inode, 0)
            data = b""
            if length:
                with (self._kept / str(inode)).open("rb") as kept:
                    data = kept.read(length)
                assert len(data) == length, f"{name} shrank: it is not a file that only grows"
            (folder / name).write_bytes(data)


def _instant_of(note: tuple[Instant, DiskState]) -> Instant:
    return note[0]


def _behind(state: DiskState, line: str) -> DiskState:
    match line.split():
        case ["file", inode, length]:
            return state._replace(lengths={**state.lengths, Inode(int(inode)): int(length)})
        case ["durable", *names]:
            return state._replace(names=_parse(names), newest_names=_parse(names))
        case ["names", *names]:
            return state._replace(newest_names=_parse(names))
        case _:
            raise AssertionError(f"not a note: {line!r}")


def _parse(pairs: list[str]) -> Names:
    found = (pair.rpartition("=") for pair in pairs)
    return {name: Inode(int(inode)) for name, _, inode in found}

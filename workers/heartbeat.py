"""The shared pages: one heartbeat record and one snapshot area per child.

Anonymous shared memory, made by the supervisor before the first fork and inherited by every child, re-forked
ones included. It needs no file, no lock and no system call to write, and it outlives a child that was killed.

    record, 64 bytes, native order
     0      4           8       9            10             12          16         24          32 … 64
     +------+-----------+-------+------------+--------------+-----------+----------+-----------+-------+
     | pid  | generation| state | stage done | stage wanted | free      | stamp ns | ready ns  | free  |
     | u32  | u32       | u8    | u8         | u16          | u32       | u64      | u64       |       |
     +------+-----------+-------+------------+--------------+-----------+----------+-----------+-------+
     child   supervisor  child   child        supervisor                 child      child

    snapshot area
     0                8        12       16
     +----------------+--------+--------+----------------------
     | sequence u64   | length | free   | bytes
     +----------------+--------+--------+----------------------

Each field has one writer and is aligned to its size, so it is never seen half written. A snapshot is longer
than that: its sequence is odd while it is written and even afterwards, and a reader that meets an odd or a
changed sequence reads again. The stamp is written by the child's event loop itself, never by a thread: a
thread stays lively while the loop is stuck. When a child dies its record keeps its last words until the next
one starts.
"""

import mmap
import struct
from typing import Final

from qim.domain.supervisor import ChildState, Stage

RECORD_BYTES: Final = 64
SNAPSHOT_HEAD: Final = struct.Struct("=QII")
SNAPSHOT_READS_MAX: Final = 8
"""A writer needs microseconds; after so many torn reads it has died in the middle."""
_U32 = struct.Struct("=I")
_U16 = struct.Struct("=H")
_U64 = struct.Struct("=Q")
_PID, _GENERATION, _STATE, _DONE, _WANTED, _STAMP, _READY = 0, 4, 8, 9, 10, 16, 24


class HeartbeatPage:
    """All records and snapshot areas; made once, before the first fork."""

    def __init__(self, *, children: int, snapshot_bytes_max: int) -> None:
        self._children = children
        self._area_bytes = SNAPSHOT_HEAD.size + snapshot_bytes_max
        self._memory = mmap.mmap(-1, children * (RECORD_BYTES + self._area_bytes))

    def record(self, child: int) -> "HeartbeatRecord":
        """The record of one child, by its number in the supervisor's table."""
        assert 0 <= child < self._children
        area = self._children * RECORD_BYTES + child * self._area_bytes
        return HeartbeatRecord(self._memory, child * RECORD_BYTES, area, self._area_bytes)

    def __len__(self) -> int:
        return self._children


class HeartbeatRecord:
    """One child's record and snapshot area; the same object serves writer and reader."""

    __slots__ = ("_area", "_area_bytes", "_at", "_memory")

    def __init__(self, memory: mmap.mmap, at: int, area: int, area_bytes: int) -> None:
        self._memory = memory
        self._at = at
        self._area = area
        self._area_bytes = area_bytes

    # --- written by the supervisor ---

    def begin(self, *, generation: int, stamp_ns: int, wanted: Stage) -> None:
        """A clean record for a child that is about to be forked; the stamp starts its first grace."""
        self._memory[self._at : self._at + RECORD_BYTES] = bytes(RECORD_BYTES)
        self._memory[self._area : self._area + SNAPSHOT_HEAD.size] = bytes(SNAPSHOT_HEAD.size)
        _U32.pack_into(self._memory, self._at + _GENERATION, generation)
        _U64.pack_into(self._memory, self._at + _STAMP, stamp_ns)
        self.want(wanted)

    def want(self, stage: Stage) -> None:
        """Tells the child how far to drain; it looks when it is signalled and at each beat."""
        _U16.pack_into(self._memory, self._at + _WANTED, stage)

    # --- written by the child ---

    def set_pid(self, pid: int) -> None:
        _U32.pack_into(self._memory, self._at + _PID, pid)

    def stamp(self, now_ns: int) -> None:
        _U64.pack_into(self._memory, self._at + _STAMP, now_ns)

    def set_state(self, state: ChildState, *, now_ns: int) -> None:
        """`ready` also notes since when."""
        _U64.pack_into(self._memory, self._at + _READY, now_ns if state is ChildState.READY else 0)
        self._memory[self._at + _STATE] = state

    def report_done(self, stage: Stage) -> None:
        self._memory[self._at + _DONE] = stage

    def write_snapshot(self, data: bytes) -> None:
        """Replaces the snapshot; what does not fit is our mistake."""
        assert len(data) <= self._area_bytes - SNAPSHOT_HEAD.size
        sequence, _, _ = SNAPSHOT_HEAD.unpack_from(self._memory, self._area)
        _U64.pack_into(self._memory, self._area, sequence | 1)
        start = self._area + SNAPSHOT_HEAD.size
        self._memory[start : start + len(data)] = data
        _U32.pack_into(self._memory, self._area + 8, len(data))
        _U64.pack_into(self._memory, self._area, (sequence | 1) + 1)

    # --- read by anybody ---

    @property
    def pid(self) -> int:
        return self._u32(_PID)

    @property
    def generation(self) -> int:
        return self._u32(_GENERATION)

    @property
    def state(self) -> ChildState:
        return ChildState(self._memory[self._at + _STATE])

    @property
    def stage_done(self) -> Stage:
        return Stage(self._memory[self._at + _DONE])

    @property
    def stage_wanted(self) -> Stage:
        return Stage(_U16.unpack_from(self._memory, self._at + _WANTED)[0])

    @property
    def stamp_ns(self) -> int:
        return self._u64(_STAMP)

    @property
    def ready_ns(self) -> int:
        """Since when the child is ready; 0 if it is not."""
        return self._u64(_READY)

    def read_snapshot(self) -> bytes | None:
        """The newest whole snapshot; None when there is none, or its writer died while writing."""
        for _ in range(SNAPSHOT_READS_MAX):
            sequence, length, _ = SNAPSHOT_HEAD.unpack_from(self._memory, self._area)
            start = self._area + SNAPSHOT_HEAD.size
            data = bytes(self._memory[start : start + length])
            if not sequence:
                return None
            if not sequence & 1 and sequence == SNAPSHOT_HEAD.unpack_from(self._memory, self._area)[0]:
                return data
        return None

    def _u32(self, field: int) -> int:
        value: int = _U32.unpack_from(self._memory, self._at + field)[0]
        return value

    def _u64(self, field: int) -> int:
        value: int = _U64.unpack_from(self._memory, self._at + field)[0]
        return value

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

Each field has one writer and is aligned to its size, so it is never seen half written. The snapshot area
behind the records is longer than that; its content (`qim/metrics.py`) tells a torn read from a whole one. The
stamp is written by the child's event loop itself, never by a thread: a thread stays lively while the loop is
stuck. When a child dies its record keeps its last words until the next one starts.
"""

import mmap
import struct
from typing import Final

from qim.domain.supervisor import ChildState, Stage

RECORD_BYTES: Final = 64
_U32 = struct.Struct("=I")
_U16 = struct.Struct("=H")
_U64 = struct.Struct("=Q")
_PID, _GENERATION, _STATE, _DONE, _WANTED, _STAMP, _READY = 0, 4, 8, 9, 10, 16, 24


class HeartbeatPage:
    """All records and snapshot areas; made once, before the first fork."""

    def __init__(self, *, children: int, snapshot_bytes: int) -> None:
        self._children = children
        self._area_bytes = snapshot_bytes
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
        self._memory[self._area : self._area + self._area_bytes] = bytes(self._area_bytes)
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
        assert len(data) <= self._area_bytes
        self._memory[self._area : self._area + len(data)] = data

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

    def read_snapshot(self) -> bytes:
        """The area as it is, zeros when nothing was written; the content tells whether it is whole."""
        return self._memory[self._area : self._area + self._area_bytes]

    def _u32(self, field: int) -> int:
        value: int = _U32.unpack_from(self._memory, self._at + field)[0]
        return value

    def _u64(self, field: int) -> int:
        value: int = _U64.unpack_from(self._memory, self._at + field)[0]
        return value

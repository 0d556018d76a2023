"""What happened in a run: one JSON line per event, and the final reads of the stores in the same form.

A history is a bag of typed events. The clients of a live run write it to files, one per process; a simulation
keeps it in a list. `check(history)` of this package judges both alike:

    check(MemoryHistory(events))             a list of events, each process in its own order
    check(FileHistory([path, …]))            files that `Recorder` wrote, in any order

Rules for whoever records:

- `invoke` is written before the frame leaves; then exactly one of `ok`, `fail`, `info` under the same
  (process, operation). An `invoke` without an end counts as `info`, and `info` is for ever: it may have
  happened. `fail` only for a proved "no"; `type_of_error` knows which codes those are.
- A repeat of a message is another operation with the same client_message_id.
- `t` is nanoseconds on one clock of the whole run (monotonic, or virtual). A result carries the moment at
  which it was seen, a sample the moment before it was begun, a fault and its healing the moment of each.
- Bodies are unique: `body` names the writer. Digests are `digest_of(bytes)`; `entry` is the digest of the
  Entry as it travels, so equal digests mean equal bytes, sequence included. Ids are any strings, hexadecimal
  by custom; one id is the same string everywhere. The sequence 0 and the empty string mean "none".
- The store events come last in a run: heal, drain every device to an empty page, read each history, then
  dump: every partition from offset 0, every shard, every mailbox. What is not dumped counts as not there.
- A device is one client database. It may move from process to process (a restart), never be in two at once.

A line is a JSON array, `["send", t, process, …]` with the fields in the order of the class. The first line of
a file is `["qim-history", 1, holds]`. Files that hold "stores" (samples and dumps) are read first, so that
the rest can stream. A last line that a kill cut short never happened. New fields stand last, with a default.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, NamedTuple, Protocol, Self, TypeAlias

import msgspec
from blake3 import blake3

from qim.errors import DeadlineExceeded, Unavailable

FORMAT: Final = 1
MAGIC: Final = "qim-history"
BLOCK_BYTES: Final = 1 << 20
LINES_GATHERED_MAX: Final = 1_000

Type: TypeAlias = Literal["invoke", "ok", "fail", "info"]
Holds: TypeAlias = Literal["events", "stores"]


class Shown(NamedTuple):
    """A message in a mailbox: of a page, or of the dump."""

    mailbox_seq: int
    conversation: str
    seq: int
    entry: str


class Pushed(NamedTuple):
    """A message in a push; `entry` is empty for the echo of a session's own message."""

    previous: int
    mailbox_seq: int
    conversation: str
    seq: int
    entry: str


class Held(NamedTuple):
    """A message in the database of a device."""

    conversation: str
    seq: int
    entry: str


# --- what clients did --------------------------------------------------------------------------------


class Send(msgspec.Struct, array_like=True, gc=False, tag_field="kind", tag="send"):
    t: int
    process: str
    type: Type
    operation: int
    user: str
    conversation: str
    client_message_id: str
    body: str
    """Digest of the body that this attempt carried."""
    message_id: str = ""
    seq: int = 0
    reserved_at: int = 0
    duplicate: bool = False
    code: int = 0


class Pull(msgspec.Struct, array_like=True, tag_field="kind", tag="pull"):
    """One page of a mailbox; the request's fields are repeated in its result."""

    t: int
    process: str
    type: Type
    operation: int
    user: str
    device: str
    after: int
    held_through: int = 0
    held_count: int = 0
    entries: list[Shown] = []
    covered_through: int = 0
    more: bool = False
    rebuild: bool = False
    code: int = 0


class Push(msgspec.Struct, array_like=True, tag_field="kind", tag="push"):
    """One frame; there is no invoke."""

    t: int
    process: str
    user: str
    device: str
    events: list[Pushed]


class History(msgspec.Struct, array_like=True, tag_field="kind", tag="history"):
    """One page of a conversation, (seq, entry) newest first as it came."""

    t: int
    process: str
    type: Type
    operation: int
    user: str
    conversation: str
    before: int = 0
    after: int = 0
    entries: list[tuple[int, str]] = []
    earliest: int = 0
    head: int = 0
    more: bool = False
    code: int = 0
    final: bool = False
    """Read after everything healed: must show all."""


class Read(msgspec.Struct, array_like=True, gc=False, tag_field="kind", tag="read"):
    """A read mark; `unread` is None where nobody noted it."""

    t: int
    process: str
    type: Type
    operation: int
    user: str
    conversation: str
    wanted: int
    read_seq: int = 0
    unread: int | None = None
    code: int = 0
    final: bool = False
    """Asked after everything healed: must be exact."""


class Device(msgspec.Struct, array_like=True, tag_field="kind", tag="device"):
    """The database of a device after its last drain; `held` is None for a client that keeps no messages."""

    t: int
    process: str
    user: str
    device: str
    cursor: int
    held: list[Held] | None = None


# --- what was done to the server ---------------------------------------------------------------------


class Fault(msgspec.Struct, array_like=True, gc=False, tag_field="kind", tag="fault"):
    """`what` is a word such as kill, pause or cut; `phase` says whether it struck or healed."""

    t: int
    process: str
    phase: Literal["strike", "heal"]
    what: str
    target: str = ""


# --- reads of the stores: samples while the run goes on, all the others at its end --------------------


class Sample(msgspec.Struct, array_like=True, tag_field="kind", tag="sample"):
    """Read while the run goes on: (shard, W) and (Outbox partition, next offset). Optional, and worth it:
    without samples nobody knows that something was shown too early. `t` is the moment before the reads."""

    t: int
    process: str
    watermarks: list[tuple[int, int]]
    outbox_ends: list[tuple[int, int]] = []


class Outbox(msgspec.Struct, array_like=True, gc=False, tag_field="kind", tag="outbox"):
    """One record of the Outbox. `durable_at` is exact where a simulation knows it, else 0."""

    partition: int
    offset: int
    conversation: str
    seq: int
    parties: tuple[str, str]
    sender: str
    client_message_id: str
    message_id: str
    body: str
    entry: str
    reserved_at: int = 0
    durable_at: int = 0


class Dispatch(msgspec.Struct, array_like=True, gc=False, tag_field="kind", tag="dispatch"):
    """One record of the dispatch log; the partition is the shard."""

    partition: int
    offset: int
    dispatch_id: str
    conversation: str
    seq: int
    recipients: tuple[str, ...]
    entry: str


class Fact(msgspec.Struct, array_like=True, gc=False, tag_field="kind", tag="fact"):
    """A commit fact. Without any fact in a history, facts are not judged."""

    state: Literal["pending", "committed"]
    conversation: str
    sender: str
    client_message_id: str
    message_id: str
    seq: int


class Shard(msgspec.Struct, array_like=True, gc=False, tag_field="kind", tag="shard"):
    """W of a shard at the end; mailbox_seq = base + offset."""

    shard: int
    base: int
    watermark: int


class Mailbox(msgspec.Struct, array_like=True, tag_field="kind", tag="mailbox"):
    """The mailbox of one user in mailbox_seq order; several events of one user follow each other."""

    user: str
    entries: list[Shown]


class Progress(msgspec.Struct, array_like=True, gc=False, tag_field="kind", tag="progress"):
    """A dispatch as its shard remembers it: `o` open, `f` finished, `s` skipped."""

    dispatch_id: str
    state: Literal["o", "f", "s"]


class Skip(msgspec.Struct, array_like=True, gc=False, tag_field="kind", tag="skip"):
    """An operator's word: this record of the dispatch log counts as finished."""

    shard: int
    mailbox_seq: int
    dispatch_id: str


Event: TypeAlias = Send | Pull | Push | History | Read | Device | Fault
StoreRead: TypeAlias = Sample | Outbox | Dispatch | Fact | Shard | Mailbox | Progress | Skip
STORE_READS: Final = (Sample, Outbox, Dispatch, Fact, Shard, Mailbox, Progress, Skip)


class RunHistory(Protocol):
    """What the checker asks of a history. Both may be called more than once."""

    def store_reads(self) -> Iterator[StoreRead]: ...

    def events(self) -> Iterator[Event]:
        """Each process in its own order; the parts of a device that moves in theirs."""
        ...


class MemoryHistory:
    """A history in a list; the order of the whole list is taken as it is."""

    def __init__(self, events: Iterable[Event | StoreRead]) -> None:
        self.all = list(events)

    def store_reads(self) -> Iterator[StoreRead]:
        return (event for event in self.all if isinstance(event, STORE_READS))

    def events(self) -> Iterator[Event]:
        return (event for event in self.all if not isinstance(event, STORE_READS))


class HistoryUnreadable(Exception):
    """A file is not a history; says which line."""


_decoder: Final = msgspec.json.Decoder(Event | StoreRead)
_encoder: Final = msgspec.json.Encoder()


class FileHistory:
    """A history in files, streamed line by line. Files are ordered by the time of their first event."""

    def __init__(self, paths: Sequence[Path]) -> None:
        heads = [(*_read_head(path), path) for path in paths]
        self._stores = [path for holds, _, path in heads if holds == "stores"]
        self._events = [path for holds, _, path in sorted(heads) if holds == "events"]

    def store_reads(self) -> Iterator[StoreRead]:
        for path in self._stores:
            for event in _read_lines(path):
                if not isinstance(event, STORE_READS):
                    raise HistoryUnreadable(f"{path}: an event of a client between the final reads")
                yield event

    def events(self) -> Iterator[Event]:
        for path in self._events:
            for event in _read_lines(path):
                if isinstance(event, STORE_READS):
                    raise HistoryUnreadable(f"{path}: a final read between the events of a client")
                yield event


class Recorder:
    """Appends events to one file. A kill loses at most the write in hand.

    `write` is one line and one call of the system. `note` gathers, `flush` writes what was gathered: whoever
    notes an event flushes before anything that follows from it can be seen outside.
    """

    def __init__(self, path: Path, *, holds: Holds = "events") -> None:
        self._file = path.open("ab", buffering=0)
        self._noted: list[Event | StoreRead] = []
        if path.stat().st_size == 0:
            self._file.write(_encoder.encode((MAGIC, FORMAT, holds)) + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, event: Event | StoreRead) -> None:
        self._file.write(_encoder.encode(event) + b"\n")

    def write_all(self, events: Iterable[Event | StoreRead]) -> None:
        """Many at once, for dumps: nobody is killed between their lines."""
        for event in events:
            self.note(event)
        self.flush()

    def note(self, event: Event | StoreRead) -> None:
        self._noted.append(event)
        if len(self._noted) >= LINES_GATHERED_MAX:
            self.flush()

    def flush(self) -> None:
        if not self._noted:
            return
        rest = memoryview(_encoder.encode_lines(self._noted))
        self._noted.clear()
        while rest:  # the system may take less than it was given
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self.flush()
        self._file.close()


def digest_of(data: bytes) -> str:
    """Sixteen hexadecimal digits; equal digests are taken as equal bytes."""
    return blake3(data).digest(8).hex()


def type_of_error(code: int) -> Literal["fail", "info"]:
    """What an answer ERROR says about a send: a proved no, or nothing."""
    unknown = code in {Unavailable.code, DeadlineExceeded.code} or code >= 3000
    return "info" if unknown else "fail"


def _read_head(path: Path) -> tuple[Holds, int]:
    """What the file holds and the time of its first event, 0 without one."""
    with path.open("rb") as file:
        head, first = file.readline(), file.readline()
    try:
        magic, version, holds = msgspec.json.decode(head, type=tuple[str, int, Holds])
    except msgspec.MsgspecError as error:
        raise HistoryUnreadable(f"{path}: the first line is no head of a history") from error
    if (magic, version) != (MAGIC, FORMAT):
        raise HistoryUnreadable(f"{path}: {magic} of version {version}, this program reads {MAGIC} {FORMAT}")
    if holds == "stores" or not first.endswith(b"\n"):
        return holds, 0
    event = _decoder.decode(first)
    return holds, 0 if isinstance(event, STORE_READS) else event.t


def _read_lines(path: Path) -> Iterator[Event | StoreRead]:
    """Decoded a megabyte at a time: a call per line would cost as much as the line."""
    with path.open("rb", buffering=0) as file:
        rest = b""
        lines = 0
        while block := file.read(BLOCK_BYTES):
            whole, newline, rest = (rest + block).rpartition(b"\n")
            if not newline:
                continue
            if not lines:
                whole, lines = whole.partition(b"\n")[2], 1  # without the head
            try:
                yield from _decoder.decode_lines(whole)
            except msgspec.MsgspecError as error:
                raise HistoryUnreadable(_name_line(path, whole, lines)) from error
            lines += whole.count(b"\n") + 1
        # What stands behind the last line end was cut short by a kill.


def _name_line(path: Path, whole: bytes, lines_before: int) -> str:
    for number, line in enumerate(whole.split(b"\n"), start=lines_before + 1):
        try:
            _decoder.decode(line)
        except msgspec.MsgspecError as error:
            return f"{path}, line {number}: {error}"
    raise AssertionError("no line of an unreadable block is unreadable")


def files_of(folder: Path) -> list[Path]:
    """The history files of a run folder."""
    return sorted(folder.glob("*.jsonl"))

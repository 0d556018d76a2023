"""The media that are judged, each with what it claims. A further medium is one more entry of `MEDIA`.

A `Host` is one instance of a medium for one experiment: it starts, is killed, and is opened by any number of
processes. Opening gives both logs and the stores beside them, because the experiments judge what follows from
a log together with what its consumers write. For the memory log all of that lives in the process that uses
it, and a fork takes a copy: what a killed child has appended is gone, exactly as the memory of a dead process
is.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from qim.adapters.commitlog_memory import MemoryCommitLog
from qim.adapters.commitlog_redis import RedisCommitLog
from qim.adapters.commits_memory import CommitState, MemoryCommitStore
from qim.adapters.commits_one_step_memory import MemoryOneStepCommits
from qim.adapters.commits_one_step_redis import RedisOneStepCommits
from qim.adapters.commits_redis import RedisCommitStore
from qim.adapters.lua_scripts import LuaScripts
from qim.adapters.mailbox_memory import MailboxState, MemoryMailboxStore
from qim.adapters.mailbox_redis import RedisMailboxStore
from qim.adapters.redis_pipe import RedisPipe
from qim.clock import SystemClock
from qim.ids import MailboxSeq, Offset, SlotId
from qim.limits import SLOTS
from qim.ports import CommitLog, CommitStore, MailboxStore, OneStepCommits
from tests.faults.power_loss import DiskWatch, Instant
from tests.services import StoreServer, find_valkey, require_service

VALKEY_REMEDY: Final = "it comes with the pinned packages; run `make test` to set them up"
ALL_SLOTS: Final = tuple(map(SlotId, range(SLOTS)))
OUTBOX_IDENTITY: Final = b"matrix outbox id"
DISPATCH_IDENTITY: Final = b"matrix dispatch."


class Parts(NamedTuple):
    """A medium as one process has it open, and the stores beside it."""

    outbox: CommitLog
    dispatch: CommitLog
    commits: CommitStore
    mailboxes: MailboxStore
    one_step: OneStepCommits
    """Commits and Outbox of one server, in one step."""
    cut_outbox: Callable[[Mapping[SlotId, Offset]], Awaitable[None]]
    """Drops everything below the bounds past all consumers, as an operator's hand or a retention rule
    would.
    """


class Host(Protocol):
    """One instance of a medium."""

    def start(self, *, is_watched: bool = False) -> None:
        """Starts it, on the data that are there. `is_watched`: what reaches its disk is noted."""
        ...

    def kill9(self) -> None:
        """Ends, without warning, the process that holds the medium."""
        ...

    def moment(self) -> int:
        """This moment in the notes of a watched instance. Whatever was answered before stands before it."""
        ...

    def after_power_loss(self, moment: int) -> "Host":
        """Another instance, as a loss of power at that moment would have left this one."""
        ...

    def close(self) -> None: ...

    def open(self) -> AbstractAsyncContextManager[Parts]: ...


class MemoryHost:
    """The memory log. Dies with any process that uses it."""

    def __init__(self, _folder: Path) -> None:
        self.start()

    def start(self, *, is_watched: bool = False) -> None:
        clock = SystemClock()
        self._outbox = MemoryCommitLog(clock, identity=OUTBOX_IDENTITY)
        self._dispatch = MemoryCommitLog(clock, identity=DISPATCH_IDENTITY)
        self._commits, self._mailboxes = CommitState(), MailboxState()

    def kill9(self) -> None:
        self.start()

    def moment(self) -> int:
        return 0

    def after_power_loss(self, moment: int) -> "MemoryHost":
        return MemoryHost(Path())

    def close(self) -> None:
        self.start()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Parts]:
        clock = SystemClock()
        commits, mailboxes = (
            MemoryCommitStore(clock, self._commits),
            MemoryMailboxStore(clock, self._mailboxes),
        )
        one_step = MemoryOneStepCommits(commits, self._outbox)
        yield Parts(self._outbox, self._dispatch, commits, mailboxes, one_step, self._outbox.trim)


class RedisHost:
    """Streams of one server process of its own, with the stores on the same server."""

    def __init__(self, folder: Path, *, fsync: str = "always") -> None:
        self._folder = folder
        self._fsync = fsync
        self._watch: DiskWatch | None = None
        self._server: StoreServer | None = None
        self._images = 0

    def start(self, *, is_watched: bool = False) -> None:
        if self._server is None:
            binary = require_service(find_valkey(), name="valkey-server", remedy=VALKEY_REMEDY)
            if is_watched:
                self._watch = DiskWatch(self._folder / "watch", binary)
                binary = str(self._watch.server)
            settings = {"appendfsync": self._fsync}
            self._server = StoreServer(binary, self._folder / "store", settings=settings)
        self._server.start()

    def kill9(self) -> None:
        assert self._server is not None
        self._server.kill9()

    def moment(self) -> int:
        assert self._watch is not None
        return self._watch.now()

    def after_power_loss(self, moment: int) -> "RedisHost":
        assert self._watch is not None
        self._images += 1
        folder = self._folder / f"image{self._images}"
        self._watch.write_image(Instant(moment), folder / "store")
        return RedisHost(folder, fsync=self._fsync)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Parts]:
        assert self._server is not None
        clock = SystemClock()
        pipe = RedisPipe(self._server.url, clock=clock, scripts=LuaScripts.load())
        await pipe.connect()

        async def cut(bounds: Mapping[SlotId, Offset]) -> None:
            for slot, bound in bounds.items():
                await pipe.command("XTRIM", outbox.keys[slot], "MINID", "=", b"%d" % (bound + 1))

        outbox = RedisCommitLog(pipe, "outbox", clock=clock)
        dispatch = RedisCommitLog(pipe, "dispatch", clock=clock)
        commits = RedisCommitStore(pipe, clock)
        one_step = RedisOneStepCommits(commits, outbox, clock)
        try:
            yield Parts(outbox, dispatch, commits, RedisMailboxStore(pipe, clock), one_step, cut)
        finally:
            await pipe.close()


async def prepare(host: Host) -> None:
    """Gives an empty medium its identities and its shards, as `qim init` does."""
    async with host.open() as parts:
        for log, identity in ((parts.outbox, OUTBOX_IDENTITY), (parts.dispatch, DISPATCH_IDENTITY)):
            if isinstance(log, RedisCommitLog):
                await log.create_identity(identity)
        await parts.mailboxes.initialise_shards(dict.fromkeys(ALL_SLOTS, MailboxSeq(1)), DISPATCH_IDENTITY)


@dataclass(frozen=True)
class Medium:
    """One row of the table."""

    name: str
    claim: str
    """Its class, in words."""
    host: Callable[[Path], Host]
    fails: frozenset[str] = frozenset()
    """Experiments that it says it fails."""
    not_asked: Mapping[str, str] = field(default_factory=dict)
    """Experiments that make no sense for it, each with the reason."""
    outlives_processes: bool = True
    """Whether a killed process leaves the medium behind."""
    guards_consumers: bool = True
    """Whether trimming asks the consumers itself, whatever bound it is told."""


MEDIA: Final = (
    Medium(
        "redis-streams",
        "tasks after an ACK: one copy on one disk, every append flushed before it is answered",
        RedisHost,
    ),
    Medium(
        "everysec",
        "the same streams, flushed once a second: survives nothing for certain, and qim refuses it",
        partial(RedisHost, fsync="everysec"),
        fails=frozenset({"E2b"}),
        not_asked={
            "E2a": "loses only where a write waits in memory for a slow flush",
            **dict.fromkeys(
                ("E1", "E3", "E4", "E4-emptied", "E7"), "as redis-streams: only the flush differs"
            ),
        },
    ),
    Medium(
        "memory",
        "hints only: nothing outlives the process",
        MemoryHost,
        fails=frozenset({"E1", "E2a", "E2b"}),
        not_asked={"E7": "no second process can open it"},
        outlives_processes=False,
        guards_consumers=False,
    ),
)

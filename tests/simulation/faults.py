"""Store servers as a worker reaches them: over one connection each, which delays, loses and breaks.

The memory adapters are the servers: durable, single-threaded, shared by all workers. A `Pipe` is the
connection of one worker to one server. It keeps the promises of a real one: commands are executed in the
order of their calls, answers come in that order; between two pipes nothing is ordered. What goes wrong:

    refused      the call fails before its effect (StoreRefused), the ones behind it are executed
    unanswered   executed, the answer is lost (StoreUnknown)
    twice        executed twice, as a retry below us would; either answer comes back
    partly       an append to a log stops half-way; for the rest "unknown" is answered
    cut          everything in flight is unknown: a first part is still executed, perhaps much later, which is
                 how writes of a predecessor arrive after its successor has claimed
    stopped      a server executes nothing for a while; above the limit of a command the pipe is cut

A server that crashes is a cut of all its pipes and a time without connections: nothing it acknowledged is
lost. After a cut a pipe refuses calls until it is connected again.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from random import Random
from typing import Any, Final, NamedTuple

from qim.adapters.commitlog_memory import MemoryCommitLog
from qim.adapters.ownership_memory import MemoryOwnership
from qim.errors import StoreRefused, StoreUnknown
from qim.ids import Epoch, Offset, SlotId
from qim.limits import STORE_TIMEOUT_MS
from qim.ports import ClaimResult, LogRecord
from tests.simulation.loop import VirtualLoop

TIMEOUT_SECONDS: Final = STORE_TIMEOUT_MS / 1000


class Rates(NamedTuple):
    """Shares of calls that meet a fault, and delays in seconds."""

    refused: float = 0.0
    unanswered: float = 0.0
    twice: float = 0.0
    partly: float = 0.0
    delay_min: float = 0.000_1
    delay_max: float = 0.001


class Command(NamedTuple):
    """One call on its way to the server."""

    run: Callable[[], Any]
    answer: "asyncio.Future[Any]"
    issued: float


class Server:
    """One store server: when it executes nothing, and when it takes no connections."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopped_until = 0.0
        self.down_until = 0.0
        self.pipes: list[Pipe] = []


class Pipe:
    """The connection of one worker to one server; see the module docstring."""

    def __init__(self, loop: VirtualLoop, server: Server, rng: Random, rates: Rates) -> None:
        self._loop = loop
        self._server = server
        self._rng = rng
        self.rates = rates
        self.is_connected = True
        self.is_over = False
        self.on_connected: list[Callable[[], None]] = []
        self.struck: dict[str, int] = {}
        self._waiting: deque[Command] = deque()
        self._unanswered: deque[Command] = deque()
        self._arrives_at = 0.0
        self._answers_at = 0.0
        server.pipes.append(self)

    @property
    def waiting(self) -> int:
        """How many commands are on their way to the server."""
        return len(self._waiting)

    def call(self, run: Callable[[], Any]) -> "asyncio.Future[Any]":
        """Issues a command now; its effect and its answer come later."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        if self.is_over:
            return answer
        if not self.is_connected:
            answer.set_exception(StoreRefused("not connected"))
            return answer
        rates, dice = self.rates, self._rng.random()
        if dice < rates.refused:
            return self.refuse()
        command = Command(run, answer, self._loop.time())
        self._waiting.append(command)
        self._unanswered.append(command)
        now = self._loop.time()
        self._arrives_at = max(self._arrives_at, now + self._delay(), self._server.stopped_until)
        self._at(self._arrives_at, self._execute_next)
        return answer

    def refuse(self) -> "asyncio.Future[Any]":
        """The answer to a command that fails before its effect."""
        self._strike("refused")
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._at(self._answer_time(), _fail, answer, StoreRefused("refused by the schedule"))
        return answer

    def _at(self, when: float, callback: Callable[..., None], *args: Any) -> None:
        self._loop.call_at(when, callback, *args, context=WORLD)

    def _delay(self) -> float:
        return self._rng.uniform(self.rates.delay_min, self.rates.delay_max)

    def _answer_time(self) -> float:
        self._answers_at = max(self._answers_at, self._loop.time() + self._delay())
        return self._answers_at

    def _strike(self, what: str) -> None:
        self.struck[what] = self.struck.get(what, 0) + 1

    def _execute_next(self) -> None:
        """One command has arrived: always the oldest, whichever timer brought it."""
        if not self._waiting or self.is_over:
            return
        now = self._loop.time()
        if now < self._server.stopped_until:
            self._at(self._server.stopped_until, self._execute_next)
            return
        command = self._waiting.popleft()
        dice = self._rng.random()
        result = command.run()
        if dice < self.rates.twice:
            self._strike("twice")
            second = command.run()
            result = second if self._rng.random() < 0.5 else result
        error: BaseException | None = result.exception()
        if self.rates.twice <= dice < self.rates.twice + self.rates.unanswered:
            self._strike("unanswered")
            error = StoreUnknown("the answer was lost by the schedule")
        value = None if error is not None else result.result()
        self._at(self._answer_time(), self._answer, command, value, error)

    def _answer(self, command: Command, value: Any, error: BaseException | None) -> None:
        if self._unanswered and self._unanswered[0] is command:
            self._unanswered.popleft()
        if command.answer.done():
            return
        if error is not None:
            command.answer.set_exception(error)
        else:
            command.answer.set_result(value)

    # --- cuts ----------------------------------------------------------------------------------------

    def cut(self, *, executed: int, late_by: float, back_after: float) -> None:
        """The first `executed` of what waits still arrive, that much later; the caller gets no answer."""
        if not self.is_connected:
            return
        self._strike("cut")
        self.is_connected = False
        arriving = [self._waiting.popleft() for _ in range(min(executed, len(self._waiting)))]
        self._waiting.clear()
        when = self._loop.time() + late_by
        for command in arriving:
            self._at(when, _run_unheard, self, command)
        unanswered, self._unanswered = self._unanswered, deque()
        for command in unanswered:
            _fail(command.answer, StoreUnknown("the connection was cut"))
        self._at(self._loop.time() + back_after, self._connect)

    def _connect(self) -> None:
        if self.is_connected or self.is_over:
            return
        now = self._loop.time()
        if now < self._server.down_until:
            self._at(self._server.down_until + self._delay(), self._connect)
            return
        self.is_connected = True
        self._arrives_at = self._answers_at = now
        for callback in self.on_connected:
            callback()

    def look_at_clock(self) -> None:
        """Called while the server is stopped: the oldest command may have waited too long."""
        if self._unanswered and self._loop.time() - self._unanswered[0].issued >= TIMEOUT_SECONDS:
            count = self._rng.randrange(len(self._waiting) + 1)
            late = max(0.0, self._server.stopped_until - self._loop.time())
            self.cut(executed=count, late_by=late, back_after=max(late, 0.05))


def _fail(answer: "asyncio.Future[Any]", error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # nobody may be left to hear of it


def _run_unheard(pipe: Pipe, command: Command) -> None:
    if not pipe.is_over:
        command.run()


WORLD: Final = Context()
"""The context of no process."""


class SentEpochs(MemoryOwnership):
    """A memory store that judges a command by the epochs that its sender knew, as a script does."""

    known: Mapping[SlotId, Epoch] = {}
    """Of the last claim whose answer arrived; replaced, never changed."""
    sent: Mapping[SlotId, Epoch] = {}
    """What came with the command that is executed now."""

    def _is_stale(self, slot: SlotId) -> bool:
        owner = self._owners.get(slot)
        return owner is None or owner.epoch != self.sent.get(slot)

    def remember(self, answer: "asyncio.Future[ClaimResult]") -> None:
        """A claim was answered."""
        if not answer.cancelled() and answer.exception() is None:
            self.known = {**self.known, **answer.result().epochs}


class FaultyPort:
    """A store port over a pipe: every method of the adapter, issued as a command."""

    def __init__(self, adapter: Any, pipe: Pipe, *, owner: SentEpochs | None = None) -> None:
        """`owner` knows the epochs that every command carries; None: this port is not fenced."""
        self._adapter = adapter
        self.pipe = pipe
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._adapter, name)
        pipe, owner = self.pipe, self._owner

        def issue(*args: Any, **kwargs: Any) -> "asyncio.Future[Any]":
            if owner is None:
                return pipe.call(lambda: method(*args, **kwargs))
            known = owner.known

            def run() -> Any:
                owner.sent = known
                return method(*args, **kwargs)

            answer = pipe.call(run)
            if name == "claim":
                answer.add_done_callback(owner.remember)
            return answer

        setattr(self, name, issue)
        return issue


class FaultyLog(FaultyPort):
    """A log over a pipe: appends may stop half-way, readers come with a delay."""

    def __init__(self, adapter: MemoryCommitLog, pipe: Pipe, rng: Random) -> None:
        super().__init__(adapter, pipe)
        self._rng = rng

    def append(self, records: Sequence[tuple[SlotId, bytes]]) -> "asyncio.Future[list[Offset | None]]":
        records = list(records)
        if records and self._rng.random() < self.pipe.rates.partly:
            stored = self._rng.randrange(len(records) + 1)
            told = self._rng.random() < 0.5
            return self.pipe.call(lambda: self._append_partly(records, stored, told=told))
        return self.pipe.call(lambda: self._adapter.append(records))

    def _append_partly(
        self, records: list[tuple[SlotId, bytes]], stored: int, *, told: bool
    ) -> "asyncio.Future[list[Offset | None]]":
        future: asyncio.Future[list[Offset | None]] = self._adapter.append(records[:stored])
        offsets = future.result()
        if not told:
            offsets = [None] * stored
        answer: asyncio.Future[list[Offset | None]] = asyncio.get_running_loop().create_future()
        answer.set_result([*offsets, *([None] * (len(records) - stored))])
        return answer

    def open_reader(self, positions: Mapping[SlotId, Offset]) -> "FaultyReader":
        return FaultyReader(self._adapter.open_reader(positions), self.pipe, self._rng)


class FaultyReader:
    """A reader whose batches come late, and not at all while its pipe is cut or the server stands still."""

    def __init__(self, inner: Any, pipe: Pipe, rng: Random) -> None:
        self._inner = inner
        self._pipe = pipe
        self._rng = rng
        self.pause = inner.pause
        self.resume = inner.resume
        self.seek = inner.seek
        self.close = inner.close

    async def next_batch(self, *, records_max: int, bytes_max: int) -> list[LogRecord]:
        """Asks the server first, so a cut or a stop shows itself here as well."""
        await self._pipe.call(_nothing)
        # A small batch now and then: how much a reader gets at once is nobody's promise.
        if self._rng.random() < 0.25:
            records_max = self._rng.randint(1, 4)
        batch: list[LogRecord] = await self._inner.next_batch(records_max=records_max, bytes_max=bytes_max)
        return batch


def _nothing() -> "asyncio.Future[None]":
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_result(None)
    return future

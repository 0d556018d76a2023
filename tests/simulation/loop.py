"""An event loop whose time is a number: it jumps to the next timer when nothing is ready.

It has no selector, no thread and no wall clock, so a run is a function of its callbacks alone. asyncio itself
(tasks, timeouts, task groups, events) runs on it unchanged.

A `Process` is a group of callbacks that can be stopped and killed like an operating-system process. Every
callback belongs to the process in whose context it was scheduled: what a killed process would still have done
never happens (no `finally` runs, as after kill -9), what a stopped one has to do waits and then happens in
its order. Callbacks of no process belong to the world: network, store servers, the judge.

Order: callbacks that are ready run in the order in which they became ready, timers of the same moment in the
order in which they were set. Which of two processes comes first is decided by the delays that the fault layer
draws, never by a hash or an address. A loop in which nothing can happen any more raises `Stuck`, one that
spins without time passing does as well.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any, Final, TypeVarTuple, Unpack

if TYPE_CHECKING:
    from tests.simulation.network import Network

Ts = TypeVarTuple("Ts")

CLIENTS: Final = "clients"
"""The address where all gateways listen."""
ENDINGS_MAX: Final = 5
TICK_SECONDS: Final = 1e-6
"""How long one pass of the loop takes."""
SPINS_MAX: Final = 200_000
"""Callbacks without a pause; far above what a batch of every role needs."""


class Stuck(Exception):
    """Nothing is ready and no timer is set, or callbacks go on for ever at one moment."""


class Due(list[Any]):
    """A callback that waits: moment, number, callback, arguments, context, process.

    It stands where asyncio has handles, of which a run makes thousands: a list is made, and compared with
    another by moment and number, without a line of Python. Cancelled, it has no callback any more.
    """

    __slots__ = ()

    def cancel(self) -> None:
        self[2] = self[3] = None

    def cancelled(self) -> bool:
        return self[2] is None

    def when(self) -> float:
        moment: float = self[0]
        return moment


class Process:
    """What is stopped and killed together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_paused = False
        self.is_held = False
        """Paused or dead: nothing of it runs."""
        self.parked: deque[Due] = deque()
        self.tasks: list[asyncio.Task[Any]] = []
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
_NOWHERE: Final = Context()
_sleep: Final = asyncio.sleep


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module docstring."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._runnable: deque[Due] = deque()
        self._timers: list[Due] = []
        self._count = 0
        self._spins = 0
        self._is_ending = False
        self._is_stopping = False
        self._world_tasks: list[asyncio.Task[Any]] = []
        self.raised: list[dict[str, Any]] = []
        """What callbacks raised and nobody awaited; a run in which this happens has failed."""
        self.callbacks = 0
        self.unended: list[asyncio.Task[Any]] = []
        self.network: Network | None = None
        """Who stands in for sockets."""
        self.set_task_factory(_make_task)
        self.set_exception_handler(lambda _loop, context: self.raised.append(context))

    # --- what asyncio asks of a loop -----------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]  # a Due does what a handle does
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> Due:
        if context is None:
            context = copy_context()
        due = Due((0.0, 0, callback, args, context, context.get(PROCESS)))
        self._runnable.append(due)
        return due

    def call_soon_threadsafe(  # type: ignore[override]  # the same Due
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> Due:
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]  # the same Due
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> Due:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]  # the same Due
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> Due:
        if context is None:
            context = copy_context()
        self._count += 1
        due = Due((when, self._count, callback, args, context, context.get(PROCESS)))
        heapq.heappush(self._timers, due)
        return due

    def sleep(self, delay: float, result: Any = None) -> Awaitable[Any]:
        """As asyncio.sleep, on a bare future: most of what happens is that a sleeper looks around."""
        if delay <= 0:
            return _sleep(0, result)
        future: asyncio.Future[Any] = asyncio.Future(loop=self)
        self._count += 1
        due = Due((self._now + delay, self._count, _wake, (future, result), _NOWHERE, PROCESS.get()))
        heapq.heappush(self._timers, due)
        return future

    def stop(self) -> None:
        self._is_stopping = True

    def run_forever(self) -> None:
        asyncio.events._set_running_loop(self)
        self._is_stopping = False
        try:
            while not self._is_stopping:
                self._run_moment()
        finally:
            asyncio.events._set_running_loop(None)

    def is_running(self) -> bool:
        return asyncio.events._get_running_loop() is self

    def run_until_complete(self, future: Any) -> Any:
        task = asyncio.ensure_future(future, loop=self)
        task.add_done_callback(self._stop_behind)
        try:
            self.run_forever()
        finally:
            task.remove_done_callback(self._stop_behind)
        return task.result()

    def _stop_behind(self, _task: object) -> None:
        self.stop()

    async def shutdown_default_executor(self) -> None:
        """There is none: nothing here runs in a thread."""

    # --- sockets, by the network in memory -----------------------------------------------------------

    @property
    def _net(self) -> "Network":
        assert self.network is not None
        return self.network

    async def create_connection(self, protocol_factory: Any, *args: Any, **kwargs: Any) -> Any:
        return await self._net.connect(CLIENTS, protocol_factory)

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **kwargs: Any) -> Any:
        return await self._net.connect(str(path), protocol_factory)

    async def create_server(self, protocol_factory: Any, *args: Any, **kwargs: Any) -> Any:
        return self._net.listen(CLIENTS, protocol_factory, alone=False)

    async def create_unix_server(self, protocol_factory: Any, path: Any = None, **kwargs: Any) -> Any:
        return self._net.listen(str(path), protocol_factory, alone=True)

    # --- time and processes --------------------------------------------------------------------------

    def _run_moment(self) -> None:
        """Everything that is ready now; then the timers that are due, or the jump to the next one."""
        runnable = self._runnable
        for _ in range(len(runnable)):
            due = runnable.popleft()
            _, _, callback, args, context, process = due
            if process is not None and process.is_held and not self._is_ending:
                process.parked.append(due)
            elif callback is not None:
                self._spins += 1
                try:
                    context.run(callback, *args)
                except Exception as error:  # noqa: BLE001 - as a loop does: the next callback runs all the same
                    self.call_exception_handler({"message": f"in {callback!r}", "exception": error})
        if self._spins > SPINS_MAX:
            raise Stuck(f"{SPINS_MAX} callbacks without a pause at {self._now:.3f} s")
        # Whatever ran took a moment: a deadline that rounding put just before its timer is then over.
        self._now += TICK_SECONDS
        if not self._is_stopping:
            self._take_due()

    def _take_due(self) -> None:
        timers = self._timers
        while timers and timers[0][2] is None:
            heapq.heappop(timers)
        if not self._runnable:
            if not timers:
                raise Stuck(f"nothing is left to happen at {self._now:.3f} s")
            if timers[0][0] > self._now:
                self._now = timers[0][0]
                self.callbacks += self._spins
                self._spins = 0
        while timers and timers[0][0] <= self._now:
            self._runnable.append(heapq.heappop(timers))

    def spawn(self, process: Process, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Starts the main coroutine of a process."""
        return process.context.run(self.create_task, work, name=name)

    def kill(self, process: Process) -> None:
        """Ends it between two callbacks: whatever it was about to do does not happen."""
        process.is_alive = False
        process.is_held = True

    def pause(self, process: Process) -> None:
        process.is_paused = process.is_held = True

    def resume(self, process: Process) -> None:
        """What has become due meanwhile happens now, in its order."""
        process.is_paused = False
        process.is_held = not process.is_alive
        while process.is_alive and process.parked:
            self._runnable.append(process.parked.popleft())

    def end(self, processes: list[Process]) -> None:
        """After the verdict: gives every coroutine its end, so that none is left to the garbage collector."""
        self._is_ending = True
        self._spins = 0
        self._timers.clear()
        for process in processes:
            # A task whose wake-up was held back can only end by it.
            self._runnable.extend(process.parked)
        everything = [*self._world_tasks, *(task for process in processes for task in process.tasks)]
        # Some wait once more on their way out, for what will not come any more.
        for _ in range(ENDINGS_MAX):
            tasks = [task for task in everything if not task.done()]
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            self.run_until_complete(_all_ended(tasks))
        self.unended = [task for task in everything if not task.done()]
        self.close()

    def note_task(self, task: asyncio.Task[Any], process: Process | None) -> None:
        (self._world_tasks if process is None else process.tasks).append(task)


def _make_task(
    loop: asyncio.AbstractEventLoop, coro: Any, *, context: Context | None = None
) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, context=context)
    assert isinstance(loop, VirtualLoop)
    loop.note_task(task, PROCESS.get() if context is None else context.get(PROCESS))
    return task


def _wake(future: "asyncio.Future[Any]", result: Any) -> None:
    if not future.done():
        future.set_result(result)


async def _all_ended(tasks: list[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks, timeout=10)

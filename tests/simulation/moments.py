"""Faults that wait for their moment: a process dies in the middle of a call to a store.

A promise is often kept by the order of two writes that are issued within one callback. A kill at a random
time falls between them once in some thousand schedules: both are over a millisecond later, and a schedule
takes seconds. So half of the kills name a call instead: from their time on they wait for the next one of its
kind, by whichever worker, and that worker dies:

    lost         at once: the call does not arrive, everything issued before it on its connection does
    under way    soon after: it is on its way, executed, or answered just now, as the delays have it
    refused      soon after the store has refused the call: mostly before it is repeated

The calls are those that make something durable, one group per step of a message. A worker that another owner
has replaced meanwhile is left alone, and so is everybody after the world has healed: a kill without its
moment does not strike, and is not counted.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from tests.simulation.faults import WORLD, FaultyPort, Pipe
from tests.simulation.host import Host, Stores

if TYPE_CHECKING:
    from tests.simulation.schedule import Strike
    from tests.simulation.world import World

Calls = Iterator[tuple[FaultyPort, str]]
Struck = Callable[["World", "Strike", str], None]


class KillAmid:
    """One kill that waits: for the first call of its kind by a worker that lives now."""

    def __init__(self, world: "World", one: "Strike", struck: Struck) -> None:
        """`struck` is told when it strikes."""
        self._world = world
        self._one = one
        self._struck = struck
        self._waits = True
        for host in world.hosts:
            if host is not None:
                for port, name in CALLS[one.amid](host.stores):
                    setattr(port, name, self._watched(host, port.pipe, getattr(port, name)))

    def _watched(self, host: Host, pipe: Pipe, issue: Callable[..., Any]) -> Callable[..., Any]:
        def issue_watched(*args: Any) -> Any:
            if not self._waits or self._world.is_healed or self._is_gone(host):
                return issue(*args)
            self._waits = False
            self._begin(host, pipe)
            return pipe.refuse() if self._one.fate == "refused" else issue(*args)

        return issue_watched

    def _begin(self, host: Host, pipe: Pipe) -> None:
        """The call is issued next. A process dies between two callbacks, so not within this one."""
        one, loop = self._one, self._world.loop
        arriving = {pipe: pipe.waiting} if one.fate == "lost" else None
        after = one.after * pipe.rates.delay_max
        loop.call_later(after, self._kill, host, arriving, context=WORLD)

    def _kill(self, host: Host, arriving: dict[Pipe, int] | None) -> None:
        world, one = self._world, self._one
        if world.is_healed or self._is_gone(host):
            return
        world.end_worker(host, arriving=arriving)
        world.hosts[host.worker] = None
        world.loop.call_later(one.seconds / 4, world.start_worker, int(host.worker))
        self._struck(world, one, f"{host.process.name} {one.amid}, {one.fate}")

    def _is_gone(self, host: Host) -> bool:
        return host.has_ended or host.process.is_paused or self._world.hosts[host.worker] is not host


def _taking(stores: Stores) -> Calls:
    yield stores.outbox, "append"
    for store in stores.one_step.values():
        yield store, "commit"


def _dispatching(stores: Stores) -> Calls:
    yield stores.dispatch, "append"


def _noting(stores: Stores) -> Calls:
    for store in stores.commits:
        yield store, "store_positions"


def _delivering(stores: Stores) -> Calls:
    for store in stores.mailboxes:
        yield store, "materialise"


CALLS: Final[dict[str, Callable[[Stores], Calls]]] = {
    "taking": _taking, "dispatching": _dispatching, "noting": _noting, "delivering": _delivering,
}  # fmt: skip

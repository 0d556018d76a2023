"""The connection to a store: order is kept, and each fault does what it says, no more."""

import asyncio
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from qim.errors import StoreRefused, StoreUnknown
from tests.simulation.faults import Pipe, Rates, Server
from tests.simulation.loop import VirtualLoop


class Store:
    """Notes what was executed, and when."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.executed: list[tuple[int, float]] = []

    def command(self, number: int) -> Callable[[], "asyncio.Future[int]"]:
        def run() -> "asyncio.Future[int]":
            self.executed.append((number, self._loop.time()))
            answer: asyncio.Future[int] = self._loop.create_future()
            answer.set_result(number)
            return answer

        return run

    @property
    def order(self) -> list[int]:
        return [number for number, _at in self.executed]


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    yield made
    made.end([])


def _rig(loop: VirtualLoop, rates: Rates) -> tuple[Server, Pipe, Store]:
    server = Server("store")
    return server, Pipe(loop, server, Random(1), rates), Store(loop)


async def _gather(pipe: Pipe, store: Store, count: int) -> list[Any]:
    calls = [pipe.call(store.command(number)) for number in range(count)]
    return await asyncio.gather(*calls, return_exceptions=True)


def test_commands_and_answers_keep_their_order(loop: VirtualLoop) -> None:
    _server, pipe, store = _rig(loop, Rates(delay_max=0.5))
    assert loop.run_until_complete(_gather(pipe, store, 30)) == list(range(30))
    assert store.order == list(range(30))


def test_a_refused_command_was_not_executed(loop: VirtualLoop) -> None:
    _server, pipe, store = _rig(loop, Rates(refused=1.0))
    (answer,) = loop.run_until_complete(_gather(pipe, store, 1))
    assert isinstance(answer, StoreRefused)
    assert store.order == []


def test_an_unanswered_command_was_executed_once(loop: VirtualLoop) -> None:
    _server, pipe, store = _rig(loop, Rates(unanswered=1.0))
    (answer,) = loop.run_until_complete(_gather(pipe, store, 1))
    assert isinstance(answer, StoreUnknown)
    assert store.order == [0]


def test_a_doubled_command_is_executed_twice_and_answered_once(loop: VirtualLoop) -> None:
    _server, pipe, store = _rig(loop, Rates(twice=1.0))
    assert loop.run_until_complete(_gather(pipe, store, 1)) == [0]
    assert store.order == [0, 0]


def test_what_was_under_way_at_a_cut_arrives_late_and_in_part(loop: VirtualLoop) -> None:
    _server, pipe, store = _rig(loop, Rates(delay_min=0.5, delay_max=0.6))
    loop.call_later(0.1, lambda: pipe.cut(executed=2, late_by=3.0, back_after=1.0))
    answers = loop.run_until_complete(_gather(pipe, store, 4))
    assert all(isinstance(answer, StoreUnknown) for answer in answers)
    (refused,) = loop.run_until_complete(_gather(pipe, store, 1))
    assert isinstance(refused, StoreRefused)
    assert not pipe.is_connected
    loop.run_until_complete(asyncio.wait_for(_until(loop, 5.0), 10))
    assert [(number, round(at)) for number, at in store.executed] == [(0, 3), (1, 3)]
    assert pipe.is_connected


async def _until(loop: VirtualLoop, moment: float) -> None:
    await asyncio.sleep(moment - loop.time())


def test_a_stopped_server_executes_in_order_when_it_goes_on(loop: VirtualLoop) -> None:
    server, pipe, store = _rig(loop, Rates(delay_min=0.1, delay_max=0.2))
    loop.call_later(0.05, setattr, server, "stopped_until", 2.0)
    later: list[Any] = []
    loop.call_later(1.0, lambda: later.append(pipe.call(store.command(9))))
    assert loop.run_until_complete(_gather(pipe, store, 3)) == [0, 1, 2]
    loop.run_until_complete(_until(loop, 3.0))
    assert store.order == [0, 1, 2, 9]
    assert all(at >= 2.0 for _number, at in store.executed)


@pytest.mark.parametrize("waited", [4, 7])
def test_a_command_that_a_stopped_server_holds_for_too_long_is_unknown(
    loop: VirtualLoop, waited: int
) -> None:
    server, pipe, store = _rig(loop, Rates(delay_min=0.1, delay_max=0.2))
    server.stopped_until = waited
    for moment in range(1, waited + 1):
        loop.call_later(moment, pipe.look_at_clock)
    (answer,) = loop.run_until_complete(_gather(pipe, store, 1))
    assert isinstance(answer, StoreUnknown) is (waited > 5)

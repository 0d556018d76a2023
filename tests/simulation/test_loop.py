"""The loop of virtual time: asyncio works on it, time jumps, processes stop and die."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.simulation.loop import Process, Stuck, VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    yield made
    if not made.is_closed():
        made.end([])


async def _sleep_an_hour() -> str:
    await asyncio.sleep(3_600)
    return "done"


def test_an_hour_passes_at_once(loop: VirtualLoop) -> None:
    assert loop.run_until_complete(_sleep_an_hour()) == "done"
    assert 3_600 <= loop.time() < 3_601


def test_timeouts_groups_and_events_of_asyncio_work_on_it(loop: VirtualLoop) -> None:
    seen: list[str] = []

    async def waits(event: asyncio.Event) -> None:
        await event.wait()
        seen.append("woken")

    async def whole() -> None:
        event = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(waits(event))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(5):
                    await asyncio.sleep(10)
            event.set()

    loop.run_until_complete(whole())
    assert seen == ["woken"]
    assert 5 <= loop.time() < 5.1


def test_timers_of_one_moment_run_in_the_order_in_which_they_were_set(loop: VirtualLoop) -> None:
    seen: list[int] = []
    for number in range(20):
        loop.call_later(1.0, seen.append, number)
    loop.run_until_complete(_sleep_an_hour())
    assert seen == list(range(20))


def test_a_loop_in_which_nothing_can_happen_says_so(loop: VirtualLoop) -> None:

    async def waits_for_nothing() -> None:
        await loop.create_future()

    with pytest.raises(Stuck, match="nothing is left"):
        loop.run_until_complete(waits_for_nothing())


def test_a_loop_that_spins_says_so(loop: VirtualLoop) -> None:

    async def spins() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Stuck, match="without a pause"):
        loop.run_until_complete(spins())


def _ticking(loop: VirtualLoop, process: Process) -> list[float]:
    ticks: list[float] = []

    async def tick() -> None:
        try:
            while True:
                await asyncio.sleep(1)
                ticks.append(round(loop.time()))
        finally:
            ticks.append(-1)

    loop.spawn(process, tick(), name="tick")
    return ticks


def test_a_killed_process_does_nothing_more_not_even_its_last_words(loop: VirtualLoop) -> None:
    process = Process("p")
    ticks = _ticking(loop, process)
    loop.call_later(3.5, loop.kill, process)
    loop.call_later(10, lambda: ticks.append(0))
    loop.run_until_complete(_sleep_an_hour())
    assert ticks == [1, 2, 3, 0]
    loop.end([process])
    assert loop.unended == []


def test_a_stopped_process_goes_on_where_it_stood(loop: VirtualLoop) -> None:
    process = Process("p")
    ticks = _ticking(loop, process)
    loop.call_later(2.5, loop.pause, process)
    loop.call_later(10, loop.resume, process)
    loop.call_later(12.5, loop.kill, process)
    loop.run_until_complete(_sleep_an_hour())
    assert ticks == [1, 2, 10, 11, 12]
    loop.end([process])

"""Runs one schedule from its seed to its verdict."""

import asyncio
import random
import secrets
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import structlog

from qim.client import sync
from tests.checker.check import check
from tests.checker.history import MemoryHistory
from tests.simulation.device import give_back
from tests.simulation.dump import dump
from tests.simulation.loop import PROCESS, Stuck
from tests.simulation.mutants import MUTANTS
from tests.simulation.schedule import Plan, draw_plan
from tests.simulation.world import NotQuiet, World


class Outcome(NamedTuple):
    """What a seed came to."""

    seed: int
    violations: tuple[str, ...]
    trace: tuple[str, ...]
    events: int
    struck: dict[str, int]
    sends: int
    virtual_seconds: float
    callbacks: int


def run_seed(seed: int, *, mutant: str = "", with_trace: bool = True) -> Outcome:
    """One schedule; `mutant` names how the program is broken for it."""
    with MUTANTS[mutant]() if mutant else nullcontext():
        return run_plan(draw_plan(seed), with_trace=with_trace)


def run_plan(plan: Plan, *, with_trace: bool = True) -> Outcome:
    world = World(plan)
    held = mock.patch.object(sync, "HELD_SECONDS", plan.held_seconds)
    sleep = mock.patch.object(asyncio, "sleep", world.loop.sleep)
    with _chance_from(plan.run_seed), _logs_to(world), held, sleep:
        try:
            violations = _judge(world)
        finally:
            finish(world)
    events = world.book.events
    trace = (*world.trace, *map(repr, events)) if with_trace else ()
    return Outcome(
        plan.seed, tuple(violations), trace, len(events),
        world.struck, plan.sends, world.loop.time(), world.loop.callbacks,
    )  # fmt: skip


def _judge(world: World) -> list[str]:
    try:
        world.loop.run_until_complete(world.run())
    except (NotQuiet, Stuck) as error:
        return [f"liveness: {error}", *world.mistakes]
    for event in dump(world):
        world.book.write(event)
    violations = [*world.mistakes, *(f"a callback raised: {raised}" for raised in world.loop.raised)]
    violations += map(str, check(MemoryHistory(world.book.events)))
    return violations


def finish(world: World) -> None:
    """Nothing of the run may outlive it, nor do anything on its way out."""
    world.net.is_over = True
    for server in world.servers.all:
        for pipe in server.pipes:
            pipe.is_over = True
    world.loop.end(world.processes)
    for device in world.devices:
        give_back(device.database)
    assert not world.loop.unended, world.loop.unended


@contextmanager
def _chance_from(seed: int) -> Iterator[None]:
    """What the program takes from the system's chance comes from the seed as well."""
    rng = random.Random(seed ^ 0x5EED)
    with mock.patch.object(secrets, "token_bytes", rng.randbytes):
        yield


@contextmanager
def _logs_to(world: World) -> Iterator[None]:
    def keep(_logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        process = PROCESS.get()
        words = " ".join(f"{name}={value}" for name, value in sorted(event.items()))
        world.note(process.name if process else "world", f"{method} {words}")
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[keep], cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)

"""Runs one schedule from its seed to its verdict."""

import random
import secrets
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final, NamedTuple
from unittest import mock

import structlog

from tests.checker.check import check
from tests.checker.history import MemoryHistory, Pull
from tests.simulation.dump import dump
from tests.simulation.loop import PROCESS, Stuck
from tests.simulation.mutants import MUTANTS
from tests.simulation.schedule import Plan, draw_plan
from tests.simulation.world import NotQuiet, World

NOT_AT_ITS_END: Final = "a full page does not end at its last entry"


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


def run_seed(seed: int, *, mutant: str = "") -> Outcome:
    """One schedule; `mutant` names how the program is broken for it."""
    with MUTANTS[mutant]() if mutant else nullcontext():
        return run_plan(draw_plan(seed))


def run_plan(plan: Plan) -> Outcome:
    world = World(plan)
    with _chance_from(plan.run_seed), _logs_to(world):
        try:
            violations = _judge(world)
        finally:
            finish(world)
    return Outcome(
        plan.seed, tuple(violations), (*world.trace, *map(repr, world.book.events)), len(world.book.events),
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
    violations += check_history(MemoryHistory(world.book.events))
    return violations


def check_history(found: MemoryHistory) -> list[str]:
    """A page that only confirms what the device holds may say `more` without entries: the port says so."""
    confirmed = {
        f"page of {page.user} after {page.after}"
        for page in found.events()
        if isinstance(page, Pull) and page.held_count and page.covered_through == page.held_through
    }
    return [
        str(violation)
        for violation in check(found)
        if violation.detail != NOT_AT_ITS_END or violation.where not in confirmed
    ]


def finish(world: World) -> None:
    """Nothing of the run may outlive it, nor do anything on its way out."""
    world.net.is_over = True
    for server in world.servers.all:
        for pipe in server.pipes:
            pipe.is_over = True
    world.loop.end(world.processes)
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

"""Many seeds over several processes: each takes the next few seeds, results come back as they are ready.

A world is made of cycles, and to take one apart costs a tenth of its run. So nothing is collected: a process
of the pool runs one seed to be warm, then forks for every few seeds, and what they leave ends with the fork.
"""

import gc
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

import msgspec

from tests.simulation.run import Outcome, run_seed

SEEDS_PER_TASK: Final = 20


@dataclass
class Tally:
    """What many schedules came to."""

    schedules: int = 0
    sends: int = 0
    events: int = 0
    virtual_seconds: float = 0.0
    seconds: float = 0.0
    struck: dict[str, int] = field(default_factory=dict)
    failures: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.schedules += 1
        self.sends += outcome.sends
        self.events += outcome.events
        self.virtual_seconds += outcome.virtual_seconds
        for what, count in outcome.struck.items():
            self.struck[what] = self.struck.get(what, 0) + count
        if outcome.violations:
            self.failures[outcome.seed] = outcome.violations

    @property
    def per_minute(self) -> float:
        return 60 * self.schedules / self.seconds if self.seconds else 0.0


def run_many(
    seeds: Sequence[int], *, mutant: str = "", processes: int = 0, until_failure: bool = False
) -> Iterator[Tally]:
    """Yields the growing tally after every few seeds; the last one is the result."""
    started = time.monotonic()
    tally = Tally()
    parts = [seeds[at : at + SEEDS_PER_TASK] for at in range(0, len(seeds), SEEDS_PER_TASK)]
    work = [(part, mutant) for part in parts]
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes or os.cpu_count() or 1, initializer=_begin) as pool:
        for outcomes in pool.imap_unordered(_run_part, work):
            for outcome in outcomes:
                tally.add(outcome)
            tally.seconds = time.monotonic() - started
            yield tally
            if until_failure and tally.failures:
                pool.terminate()
                return


def _begin() -> None:
    run_seed(0, with_trace=False)
    gc.collect()
    gc.freeze()
    gc.disable()


def _run_part(work: tuple[Sequence[int], str]) -> list[Outcome]:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        _run_forked(work, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        data = answer.read()
    os.waitpid(child, 0)
    # A fork that raised has said nothing; here the same happens again, and is told of.
    return msgspec.msgpack.decode(data, type=list[Outcome]) if data else _run_here(work)


def _run_forked(work: tuple[Sequence[int], str], writer: int) -> NoReturn:
    try:
        data = msgspec.msgpack.encode(_run_here(work))
        with os.fdopen(writer, "wb") as answer:
            answer.write(data)
    finally:
        os._exit(0)


def _run_here(work: tuple[Sequence[int], str]) -> list[Outcome]:
    seeds, mutant = work
    # A trace is made again from its seed; it is not worth the way between two processes.
    return [run_seed(seed, mutant=mutant, with_trace=False) for seed in seeds]

"""Schedules that every change runs, and the proof that they would find what they look for."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.simulation.mutants import MUTANTS
from tests.simulation.pool import Tally, run_many
from tests.simulation.run import run_seed
from tests.simulation.schedule import draw_plan
from tests.simulation.strikes import STRIKES

ROOT: Final = Path(__file__).parents[2]
SCHEDULES: Final = 400
SCHEDULES_MIN: Final = 60
SECONDS_MAX: Final = 25.0
FINDING_SEEDS: Final = {
    "acknowledged-before-the-append": range(51, 61),
    "duplicate-not-recognised": range(57, 177),
    "epoch-not-checked": range(53, 73),
    "position-stored-before-the-work": range(176, 212),
    "w-moved-before-the-entries": range(17, 77),
}
"""Where a mutant is found at once. What a seed meets drifts with changes of the program, so a few follow."""


def run_all(seeds: Sequence[int], *, mutant: str = "", until_failure: bool = False) -> Tally:
    *_, tally = run_many(seeds, mutant=mutant, until_failure=until_failure)
    return tally


def told(tally: Tally) -> str:
    lines = [f"seed {seed}: {found[0]}" for seed, found in sorted(tally.failures.items())]
    return "\n".join([*lines, "again: python -m tests.simulation --seed N --replay"])


@pytest.mark.timeout(180)
@pytest.mark.shows("C2", "C4", "C7", "C11", "F3", "F4", "M4", "M5", "M7", "M10", "X5", "X6", "K1", "K2", "K3")
def test_schedules_of_faults_lose_double_and_misdeliver_nothing() -> None:
    tally = Tally()
    for tally in run_many(range(1, SCHEDULES + 1)):
        # A busy machine runs fewer; the rest belongs to the next change.
        if tally.seconds > SECONDS_MAX and tally.schedules >= SCHEDULES_MIN:
            break
    assert not tally.failures, told(tally)
    assert tally.schedules >= SCHEDULES_MIN
    assert set(tally.struck) == set(STRIKES), "every fault struck at least once"


@pytest.mark.long
@pytest.mark.timeout(14_400)
def test_a_hundred_thousand_schedules_find_nothing() -> None:
    tally = run_all(range(1, 100_001))
    assert not tally.failures, told(tally)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("mutant", sorted(FINDING_SEEDS))
def test_a_few_known_seeds_find_each_mutant(mutant: str) -> None:
    found = (seed for seed in FINDING_SEEDS[mutant] if run_seed(seed, mutant=mutant).violations)
    seed = next(found, None)
    assert seed is not None
    assert not run_seed(seed).violations, "it is the mutant that was found"


@pytest.mark.long
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_two_thousand_schedules_find_each_mutant(mutant: str) -> None:
    tally = run_all(range(1, 2_001), mutant=mutant, until_failure=True)
    assert tally.failures


def _replay(seed: int, *, hash_seed: str) -> bytes:
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed), "--replay"]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert run.returncode == 0, run.stdout[-2_000:] + run.stderr
    return run.stdout


@pytest.mark.parametrize("seed", [17, 104, 176])
def test_a_seed_is_replayed_byte_for_byte_whatever_the_hash_seed(seed: int) -> None:
    first = _replay(seed, hash_seed="1")
    assert first == _replay(seed, hash_seed="4242")
    assert len(first.splitlines()) > 100


def test_two_runs_of_one_seed_in_one_process_are_the_same() -> None:
    assert run_seed(5).trace == run_seed(5).trace


def test_seeds_differ_and_a_plan_is_a_function_of_its_seed() -> None:
    assert draw_plan(1) == draw_plan(1)
    assert len({draw_plan(seed) for seed in range(50)}) == 50


def test_plans_cover_what_they_may_draw() -> None:
    plans = [draw_plan(seed) for seed in range(500)]
    assert {plan.workers for plan in plans} == {1, 2, 3}
    assert {plan.topology for plan in plans} == {"together", "apart", "instances"}
    assert {plan.one_step for plan in plans} == {True, False}
    assert {strike.what for plan in plans for strike in plan.strikes} == set(STRIKES)

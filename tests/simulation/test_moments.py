"""A kill that waits for a call: it strikes in its middle, does to it what it says, and only that."""

from typing import Final

import pytest

from tests.simulation.faults import Rates
from tests.simulation.moments import CALLS
from tests.simulation.mutants import MUTANTS
from tests.simulation.run import Outcome, run_plan
from tests.simulation.schedule import FATES, MOMENTS, Act, Plan, Strike, draw_plan

SENDS: Final = tuple(Act(at / 10, "send", 0, 1, 1) for at in range(4, 14))


def _plan(one: Strike, *, acts: tuple[Act, ...] = SENDS, topology: str = "together") -> Plan:
    """One worker, two users, nothing that goes wrong but this."""
    return draw_plan(1)._replace(
        workers=1, topology=topology, one_step=topology == "together", users=2, devices=(0, 1),
        wrong_clocks_ms=(0,), acts=acts, strikes=(one,), rates=Rates(), commit_failures=0.0, seconds=1.5,
    )  # fmt: skip


def _kill(amid: str, fate: str, *, at: float = 0.7) -> Strike:
    return Strike(at, "kill_amid", 0, 0.2, amid, fate, 0.0 if fate == "lost" else 1.0)


def _kills(outcome: Outcome) -> list[str]:
    return [line for line in outcome.trace if "kill_amid strikes" in line]


@pytest.mark.parametrize("topology", ["together", "apart"])
@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("amid", MOMENTS)
def test_a_kill_amid_any_call_strikes_once_and_the_program_loses_nothing(
    amid: str, fate: str, topology: str
) -> None:
    outcome = run_plan(_plan(_kill(amid, fate), topology=topology))
    (line,) = _kills(outcome)
    assert f"worker-0.1 {amid}, {fate}" in line
    assert outcome.struck == {"kill_amid": 1}
    assert outcome.violations == ()


@pytest.mark.parametrize("amid", MOMENTS)
def test_a_kill_whose_call_does_not_come_does_not_strike(amid: str) -> None:
    outcome = run_plan(_plan(_kill(amid, "lost"), acts=()))
    assert _kills(outcome) == []
    assert outcome.struck == {}
    assert outcome.violations == ()


def test_a_kill_does_not_strike_after_everything_has_healed() -> None:
    late = Act(1.499, "burst", 0, 1, 8)
    outcome = run_plan(_plan(_kill("noting", "lost", at=1.498), acts=(late,)))
    assert _kills(outcome) == []
    assert outcome.violations == ()


def test_moments_have_calls_and_are_all_drawn() -> None:
    assert set(MOMENTS) == set(CALLS)
    strikes = [one for seed in range(1_000) for one in draw_plan(seed).strikes if one.what == "kill_amid"]
    assert {(one.amid, one.fate) for one in strikes} == {(amid, fate) for amid in MOMENTS for fate in FATES}
    assert all((one.after == 0.0) == (one.fate == "lost") for one in strikes)


@pytest.mark.parametrize("fate", ["lost", "refused"])
def test_a_position_that_is_stored_too_early_is_found_by_a_kill_amid_the_dispatch(fate: str) -> None:
    plans = [_plan(_kill("dispatching", fate))._replace(run_seed=seed) for seed in range(8)]
    with MUTANTS["position-stored-before-the-work"]():
        found = [run_plan(plan).violations for plan in plans]
    # What a lost call leaves behind may also arrive too late to do harm, so not every run finds it.
    assert sum(any("never dispatched" in each for each in violations) for violations in found) >= 3
    assert not any(run_plan(plan).violations for plan in plans), "it is the mutant that was found"

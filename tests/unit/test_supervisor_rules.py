"""The supervisor's decisions: back-off, silence, flapping, exits, the stages of a drain."""

import pytest

from qim.domain.supervisor import (
    STAGE_SHARES,
    Drain,
    Fate,
    RestartPolicy,
    Silence,
    Stage,
    WatchLimits,
    judge_exit,
    judge_silence,
    may_ping_watchdog,
    stage_budget_ms,
)

WATCH = WatchLimits()
NO_JITTER = 0.5


def delays(
    policy: RestartPolicy, deaths: int, *, ready_for_ms: int = 0, fate: Fate = Fate.RESTART
) -> list[int]:
    return [
        policy.on_death(now_ms=0, ready_for_ms=ready_for_ms, fate=fate, jitter=NO_JITTER)
        for _ in range(deaths)
    ]


def test_the_back_off_grows_to_its_cap_and_stays_there() -> None:
    assert delays(RestartPolicy(WATCH), 9) == [0, 500, 1000, 2000, 4000, 8000, 16000, 30000, 30000]


def test_the_first_restart_is_immediate_whatever_the_jitter() -> None:
    assert RestartPolicy(WATCH).on_death(now_ms=0, ready_for_ms=0, fate=Fate.RESTART, jitter=1.0) == 0


@pytest.mark.parametrize(("jitter", "expected"), [(0.0, 400), (0.5, 500), (1.0, 600)])
def test_jitter_spreads_the_back_off_by_a_fifth(jitter: float, expected: int) -> None:
    policy = RestartPolicy(WATCH)
    delays(policy, 1)
    assert policy.on_death(now_ms=0, ready_for_ms=0, fate=Fate.RESTART, jitter=jitter) == expected


def test_a_minute_of_ready_forgives_earlier_deaths() -> None:
    policy = RestartPolicy(WATCH)
    delays(policy, 5)
    assert delays(policy, 2, ready_for_ms=60_000) == [0, 0]


def test_less_than_a_minute_of_ready_forgives_nothing() -> None:
    policy = RestartPolicy(WATCH)
    delays(policy, 3)
    assert delays(policy, 1, ready_for_ms=59_999) == [2000]


def test_a_fenced_child_waits_for_the_cap_at_once() -> None:
    assert delays(RestartPolicy(WATCH), 1, fate=Fate.FENCED) == [30_000]


def test_five_deaths_within_a_minute_are_flapping() -> None:
    policy = RestartPolicy(WATCH)
    for now_ms in (0, 10_000, 20_000, 30_000):
        policy.on_death(now_ms=now_ms, ready_for_ms=0, fate=Fate.RESTART, jitter=NO_JITTER)
        assert not policy.is_flapping(now_ms)
    policy.on_death(now_ms=60_000, ready_for_ms=0, fate=Fate.RESTART, jitter=NO_JITTER)
    assert policy.is_flapping(60_000)
    assert not policy.is_flapping(60_001)


@pytest.mark.parametrize(
    ("silent_ms", "verdict"),
    [
        (0, Silence.FINE), (999, Silence.FINE), (1_000, Silence.SLOW), (4_999, Silence.SLOW),
        (5_000, Silence.ABORT), (6_999, Silence.ABORT), (7_000, Silence.KILL), (10**9, Silence.KILL),
    ],
)  # fmt: skip
def test_silence_is_judged_by_its_length(silent_ms: int, verdict: Silence) -> None:
    assert judge_silence(silent_ms, WATCH) is verdict


@pytest.mark.parametrize(
    ("exit_code", "fate"),
    [
        (65, Fate.HALT), (78, Fate.HALT), (75, Fate.FENCED), (70, Fate.RESTART), (1, Fate.RESTART),
        (0, Fate.RESTART), (-9, Fate.RESTART), (-6, Fate.RESTART), (-65, Fate.RESTART),
    ],
)  # fmt: skip
def test_the_exit_code_decides_whether_a_child_returns(exit_code: int, fate: Fate) -> None:
    assert judge_exit(exit_code) is fate


def test_the_watchdog_ping_needs_every_child_alive_or_in_repair() -> None:
    assert may_ping_watchdog([0, 0, 30_000], WATCH)
    assert not may_ping_watchdog([0, 0, 30_001], WATCH)
    assert may_ping_watchdog([], WATCH)


def test_a_drain_passes_its_stages_at_their_budgets_when_nobody_reports() -> None:
    drain = Drain(now_ms=0, budget_ms=25_000)
    seen = []
    for now_ms in range(0, 25_001, 500):
        while drain.advance(now_ms=now_ms, slowest=Stage.NONE):
            seen.append((now_ms, drain.stage))
    assert seen == [
        (4_000, Stage.DOOR), (4_000, Stage.GOODBYE), (12_000, Stage.ROLES), (20_000, Stage.CLOSE),
    ]  # fmt: skip
    assert not drain.is_overdue(24_999)
    assert drain.is_overdue(25_000)


def test_a_stage_ends_as_soon_as_all_children_have_done_it() -> None:
    drain = Drain(now_ms=0, budget_ms=25_000, first=Stage.DOOR)
    assert drain.advance(now_ms=1, slowest=Stage.DOOR)
    assert drain.stage is Stage.GOODBYE
    assert not drain.advance(now_ms=2, slowest=Stage.DOOR)
    assert drain.advance(now_ms=2, slowest=Stage.GOODBYE)
    assert drain.advance(now_ms=3, slowest=Stage.ROLES)
    assert not drain.is_overdue(5_002)
    assert drain.is_overdue(5_003)


def test_the_notice_lasts_even_when_children_are_done() -> None:
    drain = Drain(now_ms=0, budget_ms=25_000)
    assert not drain.advance(now_ms=3_999, slowest=Stage.CLOSE)
    assert drain.advance(now_ms=4_000, slowest=Stage.NONE)


def test_a_second_signal_jumps_to_the_last_stage_once() -> None:
    drain = Drain(now_ms=0, budget_ms=25_000)
    assert drain.hurry(now_ms=100)
    assert drain.stage is Stage.CLOSE
    assert not drain.hurry(now_ms=200)
    assert drain.is_overdue(5_100)
    assert not drain.advance(now_ms=9_999, slowest=Stage.CLOSE)


def test_the_budgets_shrink_with_the_whole() -> None:
    assert [stage_budget_ms(stage, 2_500) for stage in STAGE_SHARES] == [400, 0, 800, 800, 500]

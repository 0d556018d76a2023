"""The arithmetic of a measurement: what may be claimed, and what takes a claim away again."""

from array import array
from typing import Any

import pytest

from loadtest.capacity import choose, exit_code, users_for
from loadtest.ledger import Ledger, poisson_schedule
from loadtest.report import (
    Counts,
    Floor,
    Latencies,
    Percentiles,
    ProcessorTime,
    Run,
    StepSearch,
    as_json,
    batch_means,
    marks,
    mean_floor,
    percentile,
)
from loadtest.server import add_counters, worker_lag_p99_ms
from qim.errors import ExitCode

NONE = Percentiles(0.0, 0.0, 0.0, 0.0)


def counts(**changes: int) -> Counts:
    fields = {
        "offered": 100, "accepted": 100, "refused": 0, "unanswered": 0, "delivered": 100, "lost": 0,
        "doubled": 0, "pulled": 0, "echoed": 100,
    }  # fmt: skip
    return Counts(**(fields | changes))


def processor(**changes: float) -> ProcessorTime:
    fields = {
        "window_seconds": 10.0, "workers": 0.02, "redis": 0.01, "generator": 1.0, "others": 0.1,
        "stolen": 0.1,
    }  # fmt: skip
    return ProcessorTime(**(fields | changes))


def run(**changes: Any) -> Run:
    fields: dict[str, Any] = {
        "rate": 10.0,
        "seconds": 10.0,
        "counts": counts(),
        "offered_in_window": 100,
        "accepted_in_window": 100,
        "ack": Percentiles(1.0, 2.0, 3.0, 4.0),
        "end_to_end": Percentiles(2.0, 4.0, 6.0, 8.0),
        "echo": NONE,
        "generator_lag": NONE,
        "processor": processor(),
    }
    return Run(**(fields | changes))


@pytest.mark.parametrize(
    ("values", "share", "wanted"),
    [
        ([], 0.99, 0.0),
        ([7.0], 0.5, 7.0),
        ([1.0, 2.0], 0.5, 1.0),
        ([1.0, 2.0, 3.0], 0.5, 2.0),
        (list(range(1, 101)), 0.99, 99),
        (list(range(1, 101)), 0.999, 100),
        (list(range(1, 1001)), 0.999, 999),
        (list(range(1, 101)), 1.0, 100),
    ],
)
def test_percentile_is_the_smallest_value_that_covers_the_share(
    values: list[float], share: float, wanted: float
) -> None:
    assert percentile(values, share) == wanted


def test_summary_sorts_and_speaks_milliseconds() -> None:
    latencies = Latencies()
    for seconds in (0.003, 0.001, 0.002):
        latencies.add(seconds)
    assert latencies.summary() == Percentiles(2.0, 3.0, 3.0, 3.0)
    assert Latencies().summary() == NONE


# --- the ledger ---


def ledger(due: list[float], *, warm_up_seconds: float = 0.0, first: int = 0) -> Ledger:
    return Ledger(array("d", due), first=first, warm_up_seconds=warm_up_seconds)


def test_late_answer_counts_from_the_time_the_message_was_due() -> None:
    book = ledger([1.0])
    book.on_sent(0, 3.5)
    book.on_accepted(0, 4.0)
    book.on_delivered(0, 9, 4.5, pushed=True)
    assert book.generator_lag.summary().max == 2500.0
    assert book.ack.summary().max == 3000.0
    assert book.end_to_end.summary().max == 3500.0


def test_frozen_server_shows_in_the_percentiles_although_few_messages_met_it() -> None:
    # 100 a second for 100 s; everything due in a freeze of 5 s is answered at its end.
    due = [n / 100 for n in range(10_000)]
    book = ledger(due)
    for number, at in enumerate(due):
        book.on_accepted(number, max(at + 0.001, 55.0) if 50.0 <= at < 55.0 else at + 0.001)
    summary = book.ack.summary()
    assert summary.p50 == 1.0
    assert summary.p99 == pytest.approx(4000, abs=20)
    assert summary.max == pytest.approx(5000, abs=1)


def test_warm_up_is_checked_but_not_measured() -> None:
    book = ledger([0.5, 1.5, 2.5], warm_up_seconds=1.0)
    for number in range(3):
        book.on_accepted(number, 3.0)
        book.on_delivered(number, number + 1, 3.0, pushed=True)
    assert len(book.ack) == len(book.end_to_end) == 2
    assert book.offered_in_window == 2
    assert book.counts().accepted == 3


def test_every_message_is_accepted_refused_or_unanswered() -> None:
    book = ledger([0.0] * 5)
    book.on_accepted(0, 1.0)
    book.on_accepted(0, 1.0)
    book.on_refused(1, 2002)
    book.on_refused(1, 2002)
    book.on_accepted(1, 1.0)
    found = book.counts()
    assert (found.offered, found.accepted, found.refused, found.unanswered) == (5, 1, 1, 3)
    assert dict(book.refusals) == {2002: 1}


def test_accepted_message_that_never_arrives_is_lost_and_a_refused_one_is_not() -> None:
    book = ledger([0.0] * 4)
    book.on_accepted(0, 1.0)
    book.on_accepted(1, 1.0)
    book.on_refused(2, 2003)
    book.on_delivered(1, 5, 1.0, pushed=False)
    found = book.counts()
    assert (found.delivered, found.lost, found.pulled) == (1, 1, 1)
    assert not book.is_settled
    book.on_delivered(0, 4, 2.0, pushed=True)
    book.on_refused(3, 2001)
    assert book.is_settled


def test_delivery_may_overtake_its_answer() -> None:
    book = ledger([0.0])
    book.on_delivered(0, 5, 1.0, pushed=True)
    assert book.missing == 0
    book.on_accepted(0, 2.0)
    assert (book.missing, book.counts().delivered, book.counts().lost) == (0, 1, 0)


def test_pull_of_what_was_pushed_is_no_double_but_a_second_entry_or_push_is() -> None:
    book = ledger([0.0] * 3)
    for number in range(3):
        book.on_delivered(number, 10 + number, 1.0, pushed=True)
    book.on_delivered(0, 10, 2.0, pushed=False)
    assert book.counts().doubled == 0
    book.on_delivered(1, 99, 2.0, pushed=False)
    book.on_delivered(2, 12, 2.0, pushed=True)
    assert book.counts().doubled == 2


def test_push_behind_the_pull_that_brought_it_is_no_double() -> None:
    book = ledger([0.0])
    book.on_delivered(0, 10, 1.0, pushed=False)
    book.on_delivered(0, 10, 2.0, pushed=True)
    assert book.counts().doubled == 0


def test_messages_of_another_step_are_not_held() -> None:
    book = ledger([0.0, 0.0], first=100)
    assert [number for number in range(98, 104) if book.holds(number)] == [100, 101]
    book.on_accepted(101, 1.0)
    assert book.counts().accepted == 1


def test_schedule_is_the_same_for_a_seed_and_keeps_its_rate() -> None:
    one = poisson_schedule(rate=500, seconds=20, seed=7)
    assert one == poisson_schedule(rate=500, seconds=20, seed=7)
    assert one != poisson_schedule(rate=500, seconds=20, seed=8)
    assert list(one) == sorted(one)
    assert len(one) == pytest.approx(10_000, rel=0.05)
    assert one[-1] < 20


# --- the rules ---


@pytest.mark.parametrize(("generator", "is_void"), [(7.0, False), (7.1, True)])
def test_run_is_void_above_seventy_percent_of_a_core(generator: float, is_void: bool) -> None:
    measured = run(processor=processor(generator=generator))
    assert measured.is_void is is_void
    assert measured.is_sustained is not is_void
    assert ("VOID" in marks(measured)) is is_void


@pytest.mark.parametrize(
    ("others", "stolen", "is_noisy"),
    [(0.2, 0.2, False), (0.6, 0.0, True), (0.0, 0.6, True), (-0.5, 0.4, False)],
)
def test_run_is_marked_when_others_took_more_than_five_percent_of_a_core(
    others: float, stolen: float, is_noisy: bool
) -> None:
    measured = run(processor=processor(others=others, stolen=stolen))
    assert measured.is_noisy is is_noisy
    assert ("noisy" in marks(measured)) is is_noisy
    assert measured.is_sustained


@pytest.mark.parametrize(
    "changes",
    [
        {"counts": counts(lost=1, delivered=99)},
        {"counts": counts(doubled=1)},
        {"counts": counts(accepted=99, delivered=99, unanswered=1)},
        {"counts": counts(accepted=99, delivered=99, refused=1)},
        {"end_to_end": Percentiles(2.0, 1000.0, 1200.0, 1300.0)},
    ],
)
def test_run_is_not_sustained_when_anything_is_missing_or_late(changes: dict[str, Any]) -> None:
    assert run().is_sustained
    assert not run(**changes).is_sustained
    assert exit_code(run(**changes), find_max=True) == ExitCode.NO


def test_lost_message_fails_a_plain_run_and_a_refused_one_does_not() -> None:
    assert exit_code(run(), find_max=False) == ExitCode.OK
    assert exit_code(run(counts=counts(lost=1)), find_max=False) == ExitCode.NO
    assert exit_code(run(counts=counts(accepted=99, refused=1)), find_max=False) == ExitCode.OK
    assert exit_code(run(processor=processor(generator=9.0)), find_max=False) == ExitCode.NO


def test_processor_time_is_per_accepted_message() -> None:
    assert run().processor.per_message_us(100) == {"workers": 200.0, "redis": 100.0, "generator": 10_000.0}
    assert run().server_us == 300.0
    assert set(processor().per_message_us(0).values()) == {0.0}


def test_floor_is_the_mean_of_before_and_after() -> None:
    assert mean_floor([]) is None
    floor = mean_floor([Floor(100.0, 30.0), Floor(140.0, 50.0)])
    assert floor == Floor(120.0, 40.0)
    assert floor.total_us == 160.0


def test_object_has_every_promised_name() -> None:
    found = as_json(run(), floors=[Floor(100.0, 50.0)], machine={"cpu": "x"})
    promised = {
        "offered_per_s", "accepted_per_s", "delivered", "lost", "doubled", "unanswered", "ack_ms",
        "end_to_end_ms", "cpu_us_per_message", "floor_us", "batch", "machine",
    }  # fmt: skip
    assert promised <= set(found)
    assert set(found["ack_ms"]) == set(found["end_to_end_ms"]) == {"p50", "p99", "p999", "max"}
    assert set(found["cpu_us_per_message"]) == {"workers", "redis", "generator"}
    assert set(found["batch"]) == {"writer", "fanout", "mailbox"}
    assert (found["floor_us"], found["server_to_floor"], found["offered_per_s"]) == (150.0, 2.0, 10.0)
    assert as_json(run(), floors=[], machine={})["floor_us"] is None


def test_batch_means_are_differences_of_sums_over_the_processes() -> None:
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    for _ in range(2):
        add_counters(before, {"writer_batches": 10.0, "writer_batch_messages": 10.0})
        add_counters(after, {"writer_batches": 20.0, "writer_batch_messages": 50.0})
    assert batch_means(before, after) == {"writer": 4.0, "fanout": None, "mailbox": None}
    assert batch_means({}, {}) == {"writer": None, "fanout": None, "mailbox": None}


def test_worker_lag_comes_from_the_window_alone() -> None:
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    add_counters(before, {"loop_lag": {"counts": [0.0, 0.0, 50.0] + [0.0] * 14, "sum": 1.0}})
    add_counters(after, {"loop_lag": {"counts": [100.0, 0.0, 50.0] + [0.0] * 14, "sum": 1.0}})
    assert worker_lag_p99_ms(before, after) == 0.25
    assert worker_lag_p99_ms({}, {}) is None


def test_process_that_published_nothing_yet_does_not_disturb_the_sums() -> None:
    total: dict[str, Any] = {}
    add_counters(total, {})
    assert set(total.values()) == {0}


# --- the search ---


@pytest.mark.parametrize("limit", [700, 1000, 4321, 9000])
def test_search_ends_just_below_the_limit(limit: float) -> None:
    search = StepSearch(1000)
    steps = 0
    while search.next_rate is not None:
        rate = search.next_rate
        search.report(rate, sustained=rate <= limit)
        steps += 1
    assert search.best is not None
    assert limit * 0.93 <= search.best <= limit
    assert steps <= 14


def test_search_without_any_sustained_rate_gives_up() -> None:
    search = StepSearch(1000)
    for _ in range(40):
        if search.next_rate is None:
            break
        search.report(search.next_rate, sustained=False)
    assert search.next_rate is None
    assert search.best is None


def test_quoted_run_is_the_highest_sustained_one_else_the_last() -> None:
    bad = run(rate=30.0, counts=counts(lost=1))
    assert choose([run(rate=20.0), run(rate=10.0), bad]).rate == 20.0
    assert choose([bad]) is bad


@pytest.mark.parametrize("rate", [1.0, 1000.0, 9001.0])
def test_users_are_even_in_number_and_far_below_their_limit(rate: float) -> None:
    users = users_for(rate)
    assert users % 2 == 0
    assert rate / users <= 20

"""The metrics catalogue: every name once and well formed, every snapshot read back or recognised as torn."""

import re

import pytest

from qim.limits import SLOTS
from qim.metrics import (
    CATALOGUE,
    HISTOGRAM_BOUNDS_SECONDS,
    SCRIPTS,
    SNAPSHOT_BYTES,
    Histogram,
    Metrics,
    quantile,
    read_snapshot,
)


def test_names_follow_the_rules_and_each_series_exists_once() -> None:
    seen = set()
    for series, _shape in CATALOGUE.values():
        assert re.fullmatch(r"qim_[a-z_]+", series.name), series.name
        assert (series.name, series.labels) not in seen
        seen.add((series.name, series.labels))
        assert series.meaning.endswith("."), series.name
        assert not re.search(r"\b(user|conversation|connection|address|topic)=", series.labels)
        if series.kind == "histogram":
            assert series.name.endswith("_seconds")
        if series.kind == "counter":
            assert series.name.endswith(("_total", "_sum", "_count"))


def test_one_name_has_one_kind_and_one_unit() -> None:
    by_name: dict[str, set[tuple[str, str]]] = {}
    for series, _shape in CATALOGUE.values():
        by_name.setdefault(series.name, set()).add((series.kind, series.unit))
    assert all(len(kinds) == 1 for kinds in by_name.values())


def test_bounds_double_from_a_quarter_millisecond_sixteen_times() -> None:
    assert HISTOGRAM_BOUNDS_SECONDS[0] == 0.00025
    assert HISTOGRAM_BOUNDS_SECONDS[-1] == pytest.approx(8.192)
    assert len(HISTOGRAM_BOUNDS_SECONDS) == 16


@pytest.mark.parametrize("index", range(16))
def test_a_duration_on_a_bound_is_counted_below_it_and_one_above_it_in_the_next(index: int) -> None:
    histogram = Histogram()
    histogram.observe(HISTOGRAM_BOUNDS_SECONDS[index])
    assert histogram.counts[index] == 1
    histogram.observe(HISTOGRAM_BOUNDS_SECONDS[index] * 1.01)
    assert histogram.counts[index + 1] == 1


def test_nothing_negative_zero_or_huge_is_lost() -> None:
    histogram = Histogram()
    histogram.observe(-1.0)
    histogram.observe(0.0)
    histogram.observe(1e6, times=3)
    assert (histogram.counts[0], histogram.counts[-1]) == (2, 3)


def test_a_snapshot_is_read_back_field_by_field() -> None:
    metrics = Metrics()
    metrics.writer_commits += 7
    metrics.cpu_seconds = 1.5
    metrics.fanout_lag[63] = 9
    metrics.message_ack.observe(0.002, times=4)
    metrics.redis_script["append_log"].observe(0.001)
    data = metrics.snapshot(sequence=5)
    assert len(data) == SNAPSHOT_BYTES
    found = read_snapshot(data)
    assert found["writer_commits"] == 7
    assert found["cpu_seconds"] == 1.5
    assert found["fanout_lag"] == [0.0] * (SLOTS - 1) + [9.0]
    ack = found["message_ack"]
    assert isinstance(ack, dict)
    assert ack["sum"] == pytest.approx(0.008)
    assert ack["counts"] == [float(count) for count in metrics.message_ack.counts]
    scripts = found["redis_script"]
    assert isinstance(scripts, dict)
    assert tuple(scripts) == SCRIPTS
    assert set(found) == set(CATALOGUE)


def test_a_torn_foreign_or_empty_snapshot_reads_as_nothing() -> None:
    old, new = Metrics(), Metrics()
    new.writer_commits = 1
    first, second = old.snapshot(sequence=1), new.snapshot(sequence=2)
    half = SNAPSHOT_BYTES // 2
    assert read_snapshot(second[:half] + first[half:]) == {}
    assert read_snapshot(first[:half] + second[half:]) == {}
    assert read_snapshot(bytes(SNAPSHOT_BYTES)) == {}
    assert read_snapshot(b"") == {}
    assert read_snapshot(bytes([first[0] ^ 1]) + first[1:]) == {}
    flipped = bytearray(first)
    flipped[half] ^= 1
    assert read_snapshot(memoryview(flipped)) == {}


def test_counting_something_outside_the_catalogue_fails() -> None:
    with pytest.raises(AttributeError):
        Metrics().no_such_thing = 1  # type: ignore[attr-defined]  # there is no such field


def test_quantile_is_the_bound_of_its_bucket() -> None:
    histogram = Histogram()
    assert quantile(histogram.counts, 0.5) == 0.0
    histogram.observe(0.0001, times=98)
    histogram.observe(0.003, times=2)
    assert quantile(histogram.counts, 0.5) == 0.00025
    assert quantile(histogram.counts, 0.99) == 0.004
    histogram.observe(100.0, times=1000)
    assert quantile(histogram.counts, 0.99) == float("inf")

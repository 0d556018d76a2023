"""Failpoints: parsing, striking at the named hit, and the proof that one struck."""

from pathlib import Path

import pytest

from qim.errors import ConfigError
from workers.failpoints import (
    Action,
    Failpoints,
    FailpointStruck,
    failpoints_from_environment,
    parse_failpoints,
)


def test_several_failpoints_are_read_from_one_text() -> None:
    assert parse_failpoints("writer.reserved=exit@3, mailbox.finished=pause:2000,fanout.stored=raise") == {
        "writer.reserved": Action("exit", at_hit=3),
        "mailbox.finished": Action("pause", pause_ms=2000),
        "fanout.stored": Action("raise"),
    }


@pytest.mark.parametrize(
    "text",
    [
        "writer.nowhere=exit",
        "writer.taken",
        "writer.taken=pause",
        "writer.taken=exit@x",
        "writer.taken=exit:5",
    ],
)
def test_a_mistake_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_failpoints(text)
    assert text.partition("=")[0] in refusal.value.problems[0]


def test_an_inactive_point_does_nothing_and_counts_nothing() -> None:
    points = Failpoints({"writer.taken": Action("raise")})
    points.hit("fanout.planned")
    assert points.hits == {}


def test_a_point_strikes_at_its_hit_only_and_leaves_a_line(tmp_path: Path) -> None:
    written = tmp_path / "struck"
    points = Failpoints({"writer.taken": Action("raise", at_hit=2)}, log_file=written)
    points.hit("writer.taken")
    assert not written.exists()
    with pytest.raises(FailpointStruck):
        points.hit("writer.taken")
    points.hit("writer.taken")
    assert written.read_text() == "failpoint_hit writer.taken\n"


def test_a_pause_goes_on_afterwards() -> None:
    points = Failpoints({"writer.taken": Action("pause", pause_ms=1)})
    points.hit("writer.taken")
    assert points.hits == {"writer.taken": 1}


def test_the_environment_alone_enables_nothing(tmp_path: Path) -> None:
    environ = {"QIM_FAILPOINTS": "writer.taken=raise", "QIM_FAILPOINTS_LOG": str(tmp_path / "struck")}
    failpoints_from_environment(environ, enabled=False).hit("writer.taken")
    with pytest.raises(FailpointStruck):
        failpoints_from_environment(environ, enabled=True).hit("writer.taken")

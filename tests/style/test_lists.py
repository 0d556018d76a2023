"""Closed lists: every metric and every log event that is used is listed, and every listed one is used."""

import ast
from collections.abc import Iterator

from qim.logsetup import EVENTS
from qim.metrics import CATALOGUE, SCRIPTS
from tests.style.source_files import ROOT, Source, python_sources

LOG_METHODS = frozenset({"debug", "info", "warning", "error", "critical", "exception"})
LOG_OBJECTS = frozenset({"log", "_log", "logger"})


def _product() -> Iterator[Source]:
    return (source for source in python_sources() if source.is_in("qim", "workers"))


def _owner(node: ast.expr) -> str:
    """The last word before the attribute: `metrics` in `self.metrics.pushes`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def metric_fields_used(source: Source) -> set[str]:
    """Fields behind a name or attribute called `metrics`."""
    return {
        node.attr
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and _owner(node.value) in {"metrics", "_metrics"}
    }


def _is_log_call(called: ast.expr) -> bool:
    if not isinstance(called, ast.Attribute) or called.attr not in LOG_METHODS:
        return False
    return _owner(called.value) in LOG_OBJECTS


def events_logged(source: Source) -> Iterator[tuple[int, str | None]]:
    """Line and event of each log call; None where the event is not a plain word."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and node.args and _is_log_call(node.func):
            match node.args[0]:
                case ast.Constant(value=str(event)):
                    yield node.lineno, event
                case ast.IfExp(body=ast.Constant(value=str(event)), orelse=ast.Constant(value=str(other))):
                    yield from ((node.lineno, event), (node.lineno, other))
                case _:
                    yield node.lineno, None


def test_every_metric_used_is_in_the_catalogue() -> None:
    methods = {"snapshot"}
    unknown = {
        f"{source.path}: metrics.{field}"
        for source in _product()
        for field in metric_fields_used(source)
        if field not in CATALOGUE and field not in methods
    }
    assert not unknown, "\n".join(sorted(unknown))


def test_every_metric_of_the_catalogue_is_set_somewhere() -> None:
    used = {field for source in _product() for field in metric_fields_used(source)}
    assert not set(CATALOGUE) - used, sorted(set(CATALOGUE) - used)


def test_every_script_is_measured_under_its_name() -> None:
    assert {path.stem for path in (ROOT / "lua").glob("*.lua")} == set(SCRIPTS)


def test_every_event_logged_is_a_listed_word() -> None:
    wrong = [
        f"{source.path}:{line}: {event}"
        for source in _product()
        for line, event in events_logged(source)
        if event is None or event not in EVENTS
    ]
    assert not wrong, "\n".join(wrong)


def test_every_listed_event_is_logged_somewhere() -> None:
    used = {event for source in _product() for _line, event in events_logged(source)} | {"library_logged"}
    assert not set(EVENTS) - used, sorted(set(EVENTS) - used)


def test_an_event_that_is_not_a_plain_word_is_seen() -> None:
    text = "log.info(f'user {x}')"
    assert list(events_logged(Source("workers/x.py", text, ast.parse(text)))) == [(1, None)]

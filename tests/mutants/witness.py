"""The pytest plugin that runs inside a copy of the project and writes down what it saw.

It proves that the copy was tested: an editable installation puts the real project on the path of every
interpreter, so a wrong order of that path would test the unbroken code and call every mutant a survivor. At
the end each imported file of this project must lie inside the copy, or the report names it as a stray.

A failure counts in the call and behind it; what fails before the call is a test that could not begin.
Examples that were drawn and fail are not made smaller: nobody reads them, and it takes longest of all.
"""

import json
import os
import sys
from pathlib import Path
from typing import Final

import pytest
from hypothesis import Phase, settings

from tests.mutants.model import without_parameters

TREE_VARIABLE: Final = "MUTANT_TREE"
REPORT_VARIABLE: Final = "MUTANT_REPORT"
ERROR_CHARACTERS_MAX: Final = 600
_PACKAGES: Final = frozenset({"qim", "workers", "tests", "loadtest"})

_outcomes: dict[str, set[str]] = {"passed": set(), "failed": set(), "unusable": set()}
_shows: dict[str, list[str]] = {}
_errors: dict[str, str] = {}


def find_strays(tree: Path) -> list[str]:
    """Imported files of the project that do not lie in the tree."""
    files = (
        getattr(module, "__file__", None)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in _PACKAGES
    )
    return sorted(file for file in files if file and not Path(file).resolve().is_relative_to(tree))


def pytest_configure() -> None:
    settings.register_profile("mutants", derandomize=True, phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutants")


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.excinfo is not None:
        _errors[without_parameters(item.nodeid)] = repr(call.excinfo.value)[:ERROR_CHARACTERS_MAX]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marks = [str(proof_id) for mark in item.iter_markers("shows") for proof_id in mark.args]
        _shows.setdefault(without_parameters(item.nodeid), []).extend(marks)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    test = without_parameters(report.nodeid)
    if report.skipped or (report.failed and report.when == "setup"):
        _outcomes["unusable"].add(test)
    elif report.failed:
        _outcomes["failed"].add(test)
    elif report.when == "call":
        _outcomes["passed"].add(test)


def pytest_sessionfinish() -> None:
    seen: dict[str, object] = {name: sorted(tests) for name, tests in _outcomes.items()}
    seen["shows"] = {test: sorted(set(marks)) for test, marks in _shows.items()}
    seen["errors"] = _errors
    seen["strays"] = find_strays(Path(os.environ[TREE_VARIABLE]).resolve())
    Path(os.environ[REPORT_VARIABLE]).write_text(json.dumps(seen), encoding="utf-8")

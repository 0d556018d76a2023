"""The table at the end of a test run: which guarantee or fault row is shown by which test, and which mutant
of the code turns it red.

A test says what it proves with `@pytest.mark.shows("C4", "F-02")`. `IdsTable` is a pytest plugin that notes
the mark of every collected test and the outcome of every test that ran, and prints one line per id. The list
of required ids stands here, so an id without any test is visible as `unproved` instead of merely absent. A
required id is proved when at least one test that shows it passed, none failed, and a mutant breaks it: a test
that passes whatever the code does is no proof. The mutants are those that `tests/mutants` declares; that each
of them is really caught is shown by `make mutants`. An id that no mutant can break stands there with a
reason.

`--ids-required` turns an unproved id into a failed run; `make test` passes it. Without the option a developer
can run one folder and still see what that folder proves. An id outside the list is printed too, but is never
required.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import pytest

Outcome = Literal["passed", "failed", "skipped"]

REQUIRED_IDS: Final[tuple[str, ...]] = (
    *(f"C{n}" for n in (1, 2, 3, 4, 5, 6, 7, 8, 10, 11)),
    *(f"F{n}" for n in range(1, 6)),
    *(f"M{n}" for n in range(1, 11)),
    *(f"K{n}" for n in range(1, 8)),
    *(f"X{n}" for n in (3, 5, 6, 9, 16)),
    *(f"F-{n:02d}" for n in (1, 2, 3, 8, 12, 28, 30, 31, 33, 45, 46, 47)),
)

UNPROVED: Final = "unproved"
FAILED: Final = "FAILED"
PROVED: Final = "passed"


class Row(NamedTuple):
    """One line of the table."""

    proof_id: str
    tests: tuple[str, ...]
    mutants: tuple[str, ...]
    result: str


def sort_key(proof_id: str) -> tuple[str, int]:
    """Orders C2 before C10, and the fault rows (F-01) apart from the fan-out rules (F1)."""
    letters = proof_id.rstrip("0123456789")
    return letters, int(proof_id[len(letters) :] or 0)


def judge(outcomes: Iterable[Outcome], *, can_turn_red: bool = True) -> str:
    """What a set of test outcomes says about one id, if the code was seen to break it."""
    seen = set(outcomes)
    if "failed" in seen:
        return FAILED
    return PROVED if "passed" in seen and can_turn_red else UNPROVED


def shown_ids(item: pytest.Item) -> tuple[str, ...]:
    """Every id named by a `shows` mark of the test, its class or its module."""
    return tuple(str(proof_id) for mark in item.iter_markers("shows") for proof_id in mark.args)


def short_name(nodeid: str) -> str:
    """The test function without folder and parameters: a name that is a sentence needs no path."""
    return nodeid.rpartition("::")[2].partition("[")[0]


def build_rows(
    tests_by_id: Mapping[str, Sequence[str]],
    outcomes: Mapping[str, Outcome],
    *,
    mutants: Mapping[str, Sequence[str]],
    without_mutant: Mapping[str, str],
) -> list[Row]:
    """One row per id; `without_mutant` says of an id why no mutant can break it."""
    rows = []
    for proof_id in sorted({*REQUIRED_IDS, *tests_by_id}, key=sort_key):
        nodeids = tests_by_id.get(proof_id, ())
        names = tuple(dict.fromkeys(short_name(nodeid) for nodeid in nodeids))
        breaking = tuple(mutants.get(proof_id, ()))
        if not breaking and proof_id in without_mutant:
            breaking = (f"none: {without_mutant[proof_id]}",)
        result = judge((outcomes[n] for n in nodeids if n in outcomes), can_turn_red=bool(breaking))
        rows.append(Row(proof_id, names, breaking, result))
    return rows


class IdsTable:
    """Collects marks and outcomes, prints the table, and fails the run when an id must be proved and
    is not.
    """

    def __init__(
        self, *, ids_required: bool, mutants: Mapping[str, Sequence[str]], without_mutant: Mapping[str, str]
    ) -> None:
        self.ids_required = ids_required
        self._mutants = mutants
        self._without_mutant = without_mutant
        self.tests_by_id: dict[str, list[str]] = defaultdict(list)
        self.outcomes: dict[str, Outcome] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for proof_id in shown_ids(item):
                self.tests_by_id[proof_id].append(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A failure in any phase counts; a pass counts only in the call itself."""
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped:
            self.outcomes.setdefault(report.nodeid, "skipped")
        elif report.when == "call":
            self.outcomes.setdefault(report.nodeid, "passed")

    def rows(self) -> list[Row]:
        return build_rows(
            self.tests_by_id, self.outcomes, mutants=self._mutants, without_mutant=self._without_mutant
        )

    def unproved(self) -> list[str]:
        """Required ids without a passing test or without a mutant."""
        return [row.proof_id for row in self.rows() if row.proof_id in REQUIRED_IDS and row.result != PROVED]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (
            self.ids_required
            and session.exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
            and self.unproved()
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not (self.ids_required or self.tests_by_id):
            return
        terminalreporter.section("id | tests that show it | mutants that turn it red | result")
        for proof_id, names, mutants, result in self.rows():
            if names or self.ids_required:
                shown, breaking = ", ".join(names) or "-", ", ".join(mutants) or "-"
                terminalreporter.line(f"{proof_id:<5}| {shown} | {breaking} | {result}")
        missing = self.unproved()
        if self.ids_required and missing:
            terminalreporter.line(f"unproved and required: {', '.join(missing)}", red=True)

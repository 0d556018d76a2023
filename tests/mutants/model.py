"""What a mutant is: a name, a sentence, ids, tests, and texts to be replaced.

A change names its old text instead of a line number or a context: it applies wherever that text stands, and
says so when the text is gone or stands twice. Nothing is applied approximately, because a mutant that lands
beside its target would be reported as a hole in the tests.

A mutant is *caught* when **every** test it names fails in its call, and the failed tests together show every
id it names. A test that cannot even start proves nothing, and neither does one that never ended, nor one that
met a name that does not exist: a mutant must break a promise, not the program.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

CANNOT_RUN: Final = (
    "NameError(", "UnboundLocalError(", "SyntaxError(", "ImportError(", "AttributeError(",
    "Error compiling script", "attempt to ",
)  # fmt: skip
"""What an error says when the broken code is no program any more; the last two are Lua's words."""


class DoesNotApplyError(Exception):
    """The code under a mutant has changed; the text says which and where."""


def without_parameters(nodeid: str) -> str:
    """A test is named once, however many parameters it has."""
    return nodeid.partition("[")[0]


class Change(NamedTuple):
    """`old` stands exactly once in the file and becomes `new`."""

    path: str
    old: str
    new: str

    def apply_to(self, text: str) -> str:
        """The broken text. Raises DoesNotApplyError."""
        count = text.count(self.old)
        if count != 1:
            raise DoesNotApplyError(
                f"{self.path}: the text to be replaced stands there {count} times instead of once; the code"
                f" has changed, bring the mutant up to date:\n{self.old}"
            )
        return text.replace(self.old, self.new)


class Mutant(NamedTuple):
    """One broken promise."""

    name: str
    breaks: str
    """One sentence: what the code does now that it must not do."""
    ids: tuple[str, ...]
    tests: tuple[str, ...]
    """`file::function`, with parameters where one of many is enough: the cheapest that must notice, each."""
    changes: tuple[Change, ...]
    is_long: bool = False
    """A minute of its own, or a tool that a bare machine may lack; a plain run leaves it out."""

    def apply(self, tree: Path) -> None:
        """Breaks the copy of the project there. Raises DoesNotApplyError before anything is written."""
        broken: dict[Path, str] = {}
        for change in self.changes:
            path = tree / change.path
            if not path.is_file():
                raise DoesNotApplyError(f"{change.path}: there is no such file any more")
            broken[path] = change.apply_to(broken.get(path) or path.read_text(encoding="utf-8"))
        for path, text in broken.items():
            path.write_text(text, encoding="utf-8")
            for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
                compiled.unlink()  # its age and size might be those of the broken file


class Verdict(Enum):
    """What a run says about a mutant."""

    CAUGHT = "red"
    SURVIVED = "SURVIVED"
    NO_MATCH = "DOES NOT APPLY"
    UNDECIDED = "NO VERDICT"


@dataclass
class Report:
    """What the witness saw in one run of pytest; names of tests are without parameters."""

    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    unusable: set[str] = field(default_factory=set)
    """Skipped, or failed before the test itself began."""
    shows: dict[str, list[str]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """Of the failed tests, what ended them."""
    strays: list[str] = field(default_factory=list)
    """Files of this project that were imported from elsewhere than the copy."""

    def shown_by_failed(self) -> set[str]:
        return {proof_id for test in self.failed for proof_id in self.shows.get(test, ())}


def judge(mutant: Mutant, report: Report) -> tuple[Verdict, str]:
    """The verdict, and what is wrong when it is not the wanted one."""
    if report.strays:
        return Verdict.UNDECIDED, f"not the copy was tested: {report.strays[0]}"
    for error in report.errors.values():
        if any(word in error for word in CANNOT_RUN):
            return Verdict.UNDECIDED, f"the code does not run at all: {error}"
    wanted = [without_parameters(test) for test in mutant.tests]
    silent = [test for test in wanted if test not in report.failed]
    unusable = [test for test in silent if test in report.unusable or test not in report.passed]
    if unusable:
        return Verdict.UNDECIDED, f"did not run: {', '.join(unusable)}"
    if silent:
        return Verdict.SURVIVED, f"still green: {', '.join(silent)}"
    hidden = sorted(set(mutant.ids) - report.shown_by_failed())
    if hidden:
        return Verdict.SURVIVED, f"no failed test shows {', '.join(hidden)}"
    return Verdict.CAUGHT, ""


def find_unfit(report: Report, tests: Iterable[str]) -> list[str]:
    """Tests that are not green on the code as it is: what they say about a mutant means nothing."""
    wanted = {without_parameters(test) for test in tests}
    return sorted(test for test in wanted if test not in report.passed or test in report.failed)


def names_by_id(mutants: Iterable[Mutant]) -> Mapping[str, tuple[str, ...]]:
    """Which mutants turn an id red, by their own declaration."""
    found: dict[str, list[str]] = {}
    for mutant in mutants:
        for proof_id in mutant.ids:
            found.setdefault(proof_id, []).append(mutant.name)
    return {proof_id: tuple(names) for proof_id, names in found.items()}

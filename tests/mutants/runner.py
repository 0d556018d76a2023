"""Runs mutants: once the unbroken code as a control, then each mutant on a copy of its own.

The control runs the union of all named tests and must be green; otherwise a red mutant would say nothing.
The interpreter is the one that runs this, with the copy in front of everything on its path. Tests draw fixed
examples, and a missing service fails instead of skipping, as for every change.

Owned here: one temporary folder, removed at the end whatever happens. A run that does not end is killed with
all its children; its mutant is undecided, which is a failure like a survivor.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from tests.mutants.model import DoesNotApplyError, Mutant, Report, Verdict, find_unfit, judge
from tests.mutants.tree import copy_project, copy_tree
from tests.mutants.witness import REPORT_VARIABLE, TREE_VARIABLE

CONTROL_SECONDS_MAX: Final = 900.0
MUTANT_SECONDS_MAX: Final = 120.0
LONG_MUTANT_SECONDS_MAX: Final = 300.0
TEST_SECONDS_MAX: Final = 20
"""A mutant may make a test wait for ever; the test's own limit is made for healthy code."""


class ControlError(Exception):
    """The named tests are not green on the unbroken code; the text names them."""


class Result(NamedTuple):
    """One line of the table."""

    mutant: Mutant
    verdict: Verdict
    detail: str
    seconds: float
    errors: Mapping[str, str] = MappingProxyType({})
    """What ended each failed test."""


def run_tests(tree: Path, tests: Sequence[str], *, seconds_max: float) -> tuple[Report | None, str]:
    """What the witness saw, and the end of the output; no report when pytest did not come to its end."""
    # Beside the tree, whose copies must not meet sockets of its stores; and short, as their paths must be.
    scratch = Path(tempfile.mkdtemp(dir=tree.parent))
    seen = scratch / "witness.json"
    command = [
        sys.executable, "-m", "pytest", "--quiet", "-p", "tests.mutants.witness", "-p", "no:cacheprovider",
        f"--timeout={TEST_SECONDS_MAX}", "-m", "", "--basetemp", str(scratch / "t"), *tests,
    ]  # fmt: skip
    environment = os.environ | {
        "CI": "true", "PYTHONPATH": str(tree), TREE_VARIABLE: str(tree), REPORT_VARIABLE: str(seen),
    }  # fmt: skip
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds_max)
        except subprocess.TimeoutExpired:
            return None, f"did not end within {seconds_max:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # the usual case: nobody of the group is left
                os.killpg(process.pid, signal.SIGKILL)
    if not seen.is_file():
        return None, output[-2_000:]
    return msgspec.json.decode(seen.read_bytes(), type=Report), output[-2_000:]


def check_control(base: Path, mutants: Sequence[Mutant]) -> float:
    """Seconds that the union of the named tests takes on the unbroken code. Raises ControlError."""
    started = time.monotonic()
    wanted = sorted({test for mutant in mutants for test in mutant.tests})
    unfit, _ = _find_unfit(base, wanted)
    if unfit:
        # Once more and alone: of many tests on a busy machine one may come too late.
        unfit, output = _find_unfit(base, unfit)
        if unfit:
            raise ControlError("not green on the unbroken code:\n" + "\n".join([*unfit, output]))
    return time.monotonic() - started


def _find_unfit(base: Path, tests: Sequence[str]) -> tuple[list[str], str]:
    report, output = run_tests(base, tests, seconds_max=CONTROL_SECONDS_MAX)
    if report is None:
        raise ControlError(output)
    if report.strays:
        raise ControlError(f"not the copy was tested: {report.strays[0]}")
    return find_unfit(report, tests), output


def run_mutant(base: Path, folder: Path, mutant: Mutant) -> Result:
    """One mutant on a copy of the base."""
    started = time.monotonic()
    tree = copy_tree(base, folder / mutant.name)
    try:
        mutant.apply(tree)
    except DoesNotApplyError as error:
        return Result(mutant, Verdict.NO_MATCH, str(error), time.monotonic() - started)
    seconds_max = LONG_MUTANT_SECONDS_MAX if mutant.is_long else MUTANT_SECONDS_MAX
    report, output = run_tests(tree, mutant.tests, seconds_max=seconds_max)
    shutil.rmtree(tree)
    verdict, detail = (Verdict.UNDECIDED, output) if report is None else judge(mutant, report)
    errors = {} if report is None else report.errors
    return Result(mutant, verdict, detail, time.monotonic() - started, errors)


@contextmanager
def base_copy() -> Iterator[tuple[Path, Path]]:
    """A copy of the project, and the folder beside which the broken ones may lie."""
    with tempfile.TemporaryDirectory(prefix="qim-mutants-") as name:
        folder = Path(name).resolve()
        yield copy_project(folder / "base"), folder


def run_mutants(base: Path, folder: Path, mutants: Sequence[Mutant], *, jobs: int) -> Iterator[Result]:
    """The results as they come; the caller has run the control."""
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for done in as_completed([pool.submit(run_mutant, base, folder, mutant) for mutant in mutants]):
            yield done.result()

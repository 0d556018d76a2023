"""`python -m tests.mutants [NAME…] [--long] [--json] [--jobs N] [--list]`: breaks the code on purpose.

It sees that the tests notice, on copies of the tree.

Without names all are run but the long ones, which take a minute each or need strace and a compiler; `--long`
runs those too.

Exit code 0: every mutant was caught, and with all of them run every required id was turned red. 1: one
survived, did not apply or came to no verdict. 2: the tests are not green on the unbroken code, or a name is
not known. The table goes to standard output line by line, as the mutants end.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Final

from tests.mutants.catalogue import ALL, unproved_ids
from tests.mutants.model import Mutant, Verdict
from tests.mutants.runner import ControlError, Result, base_copy, check_control, run_mutants

NAME_WIDTH: Final = max(len(mutant.name) for mutant in ALL)


def say(text: str) -> None:
    """A line for whoever waits, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def short_test(test: str) -> str:
    """The function alone: a name that is a sentence needs no path."""
    return test.rpartition("::")[2]


def format_row(result: Result) -> str:
    mutant = result.mutant
    row = (
        f"{mutant.name:<{NAME_WIDTH}} | {' '.join(mutant.ids) or '-'} | {result.verdict.value}"
        f" | {result.seconds:.1f} s | {', '.join(map(short_test, mutant.tests))}"
    )
    if result.verdict is Verdict.CAUGHT:
        return row
    return f"{row}\n    it breaks: {mutant.breaks}\n    {result.detail.strip()}".replace("\n", "\n    ")


def build_json(results: Iterable[Result]) -> str:
    rows = [
        {
            "name": result.mutant.name, "breaks": result.mutant.breaks, "ids": result.mutant.ids,
            "tests": result.mutant.tests, "verdict": result.verdict.value, "detail": result.detail,
            "seconds": round(result.seconds, 1), "errors": dict(result.errors),
        }
        for result in results
    ]  # fmt: skip
    return json.dumps(rows, indent=2)


def choose(names: Sequence[str], *, with_long: bool = False) -> list[Mutant]:
    """The named mutants, without a name all that are wanted. Raises SystemExit for a name that nobody has."""
    unknown = sorted(set(names) - {mutant.name for mutant in ALL})
    if unknown:
        sys.stderr.write(f"no such mutant: {', '.join(unknown)}; --list shows all\n")
        raise SystemExit(2)
    if names:
        return [mutant for mutant in ALL if mutant.name in names]
    return [mutant for mutant in ALL if with_long or not mutant.is_long]


def run(mutants: Sequence[Mutant], *, jobs: int, progress: bool) -> list[Result]:
    """Control, then all mutants; prints as it goes."""
    results: list[Result] = []
    with base_copy() as (base, folder):
        seconds = check_control(base, mutants)
        if progress:
            say(f"control: the named tests are green on the unbroken code ({seconds:.0f} s)")
        for result in run_mutants(base, folder, mutants, jobs=jobs):
            results.append(result)
            if progress:
                say(f"{len(results):>3}/{len(mutants)} {format_row(result)}")
    return sorted(results, key=lambda result: mutants.index(result.mutant))


def conclude(results: Sequence[Result]) -> tuple[bool, str]:
    """Whether all is as it must be, and the last line."""
    bad = [result.mutant.name for result in results if result.verdict is not Verdict.CAUGHT]
    caught = [result.mutant for result in results if result.verdict is Verdict.CAUGHT]
    words = [f"{len(caught)} of {len(results)} mutants were caught"]
    if bad:
        words.append(f"not caught: {', '.join(bad)}")
    left_out = [mutant for mutant in ALL if mutant.is_long and mutant not in caught]
    is_whole = len(results) >= len(choose(()))
    missing = unproved_ids([*caught, *left_out]) if is_whole else []
    if is_whole and len(results) < len(ALL):
        words.append(f"{len(ALL) - len(results)} long ones left out (--long)")
    if missing:
        words.append(f"turned red by no mutant: {', '.join(missing)}")
    return not bad and not missing, "; ".join(words)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Break the code on purpose.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutants")
    parser.add_argument("--long", action="store_true", help="those too that take a minute or need tools")
    parser.add_argument("--json", action="store_true", help="print the results as JSON at the end")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="mutants side by side")
    parser.add_argument("--list", action="store_true", help="name every mutant and what it breaks")
    arguments = parser.parse_args()
    mutants = choose(arguments.names, with_long=arguments.long or arguments.list)
    if arguments.list:
        say("\n".join(f"{mutant.name:<{NAME_WIDTH}} {mutant.breaks}" for mutant in mutants))
        return 0
    try:
        results = run(mutants, jobs=max(1, arguments.jobs), progress=not arguments.json)
    except ControlError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    is_good, words = conclude(results)
    say(build_json(results) if arguments.json else words)
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())

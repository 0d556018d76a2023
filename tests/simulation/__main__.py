"""Command line of the simulation: many seeds, or one seed with its trace.

python -m tests.simulation --seeds 2000
python -m tests.simulation --seed 17 --replay
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from tests.simulation.mutants import MUTANTS
from tests.simulation.pool import Tally, run_many
from tests.simulation.run import run_seed
from tests.simulation.schedule import draw_plan

LAST_EVENTS = 80
BAR_CHARACTERS = 40


def main() -> int:
    arguments = _parse()
    if arguments.seed is not None:
        return replay(arguments.seed, mutant=arguments.mutant, last=0 if arguments.replay else LAST_EVENTS)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    tally = Tally()
    for tally in run_many(
        seeds, mutant=arguments.mutant, processes=arguments.processes, until_failure=arguments.until_failure
    ):
        if not arguments.json:
            _show(tally, len(seeds))
    report = asdict(tally) | {"per_minute": round(tally.per_minute), "commit": commit()}
    sys.stdout.write(json.dumps(report) + "\n" if arguments.json else _summary(tally))
    return 1 if tally.failures else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2_000, help="how many schedules")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--seed", type=int, help="this one only, with its last events")
    parser.add_argument("--replay", action="store_true", help="with --seed: print its whole trace")
    parser.add_argument("--mutant", choices=["", *MUTANTS], default="", help="break the program on purpose")
    parser.add_argument("--processes", type=int, default=0, help="0: one per CPU")
    parser.add_argument("--until-failure", action="store_true", help="stop at the first seed that fails")
    parser.add_argument("--json", action="store_true", help="one object instead of a bar")
    return parser.parse_args()


def replay(seed: int, *, mutant: str = "", last: int = 0) -> int:
    """Prints the trace of one seed, whole or its last events, and the verdict."""
    outcome = run_seed(seed, mutant=mutant)
    sys.stdout.write(f"seed {seed}, commit {commit()}\n{draw_plan(seed)}\n")
    sys.stdout.writelines(f"{line}\n" for line in outcome.trace[-last:])
    sys.stdout.writelines(f"VIOLATION {violation}\n" for violation in outcome.violations)
    sys.stdout.write(f"{len(outcome.violations)} violations\n")
    return 1 if outcome.violations else 0


def commit() -> str:
    """Which state of the code ran, for the report; `+` behind it: with changes."""
    root = Path(__file__).parents[2]
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def _show(tally: Tally, wanted: int) -> None:
    done = BAR_CHARACTERS * tally.schedules // wanted
    bar = "#" * done + "." * (BAR_CHARACTERS - done)
    sys.stderr.write(
        f"\r[{bar}] {tally.schedules}/{wanted}, {tally.per_minute:.0f} per minute,"
        f" {len(tally.failures)} failed "
    )
    sys.stderr.flush()


def _summary(tally: Tally) -> str:
    struck = ", ".join(f"{what} {count}" for what, count in sorted(tally.struck.items()))
    lines = [
        f"\n{tally.schedules} schedules in {tally.seconds:.1f} s: {tally.per_minute:.0f} per minute",
        f"{tally.sends} sends, {tally.events} events, {tally.virtual_seconds:.0f} s of virtual time",
        f"struck: {struck}",
    ]
    for seed, violations in sorted(tally.failures.items()):
        lines.append(f"seed {seed} (commit {commit()}): {violations[0]}")
        lines.append(f"    again: python -m tests.simulation --seed {seed} --replay")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

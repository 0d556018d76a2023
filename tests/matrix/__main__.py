"""`python -m tests.matrix [--json] [--tasks N] [experiment …]`: the table, and 0 when every claim holds."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence

import structlog

from tests.matrix.experiments import EXPERIMENTS, TASKS, run_cells
from tests.matrix.media import MEDIA
from tests.matrix.verdict import Cell, render


def main(words: Sequence[str] | None = None) -> int:
    arguments = _arguments(words)
    cells: list[Cell] = []
    for cell in run_cells(MEDIA, arguments.experiments or EXPERIMENTS, tasks=arguments.tasks):
        cells.append(cell)
        sys.stderr.write(f"{cell.medium} {cell.experiment}: {cell.verdict}, {cell.seconds:.1f} s\n")
    text = json.dumps([cell.as_dict() for cell in cells], indent=2) if arguments.json else render(cells)
    sys.stdout.write(f"{text}\n")
    return 0 if all(cell.meets_claim for cell in cells) else 1


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    known = "\n".join(f"  {name:11} {experiment.what}" for name, experiment in EXPERIMENTS.items())
    media = "\n".join(f"  {medium.name:14} {medium.claim}" for medium in MEDIA)
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix",
        description="May a medium carry tasks after an ACK?",
        epilog=f"experiments:\n{known}\n\nmedia and what they claim:\n{media}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiments", nargs="*", metavar="experiment", help="only these; default: all")
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    parser.add_argument("--tasks", type=int, default=TASKS, help="per experiment (default %(default)s)")
    arguments = parser.parse_args(words)
    unknown = set(arguments.experiments) - EXPERIMENTS.keys()
    if unknown or arguments.tasks < 1:
        parser.error(f"no experiment {', '.join(sorted(unknown))}" if unknown else "--tasks is at least 1")
    return arguments


if __name__ == "__main__":
    # The roles say at length what an experiment does to them; the table says it shorter.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    sys.exit(main())

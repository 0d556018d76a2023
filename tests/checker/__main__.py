"""`python -m tests.checker FILES…`: judges a recorded run.

Arguments are history files or run folders. Prints the verdict as a table, or with `--json` as one object.
Exit 0: clean; 1: something contradicts a promise; 2: the arguments or a file cannot be read.
"""

import sys
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from tests.checker.check import judge
from tests.checker.history import FileHistory, HistoryUnreadable, files_of
from tests.checker.verdict import CHECKS, Verdict

CLEAN, BROKEN, UNREADABLE = 0, 1, 2
EXAMPLES_SHOWN_MAX: Final = 20

app = App(name="python -m tests.checker", help=__doc__)


@app.default
def main(*files: Path, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Judge a recorded run.

    Parameters
    ----------
    files
        History files, or folders whose *.jsonl files are read.
    json
        Print one JSON object instead of a table.
    """
    if not files:
        sys.stderr.write("no history: name files or a run folder\n")
        return UNREADABLE
    try:
        verdict = judge(FileHistory(_expand(files)))
    except (OSError, HistoryUnreadable) as error:
        sys.stderr.write(f"{error}\n")
        return UNREADABLE
    print_verdict(verdict, as_json=json)
    return CLEAN if verdict.clean else BROKEN


def _expand(files: tuple[Path, ...]) -> list[Path]:
    found = [path for file in files for path in (files_of(file) if file.is_dir() else [file])]
    if not found:
        raise HistoryUnreadable(f"no *.jsonl files in {', '.join(map(str, files))}")
    return found


def print_verdict(verdict: Verdict, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.encode(verdict.as_result()).decode() + "\n")
        return
    console = Console()
    table = Table("check", "rule", "violations", title="verdict")
    for check, rule in CHECKS.items():
        found = verdict.counts[check]
        table.add_row(check, rule, f"[red]{found}[/red]" if found else "[green]none[/green]")
    console.print(table)
    for violation in verdict.violations[:EXAMPLES_SHOWN_MAX]:
        console.print(f"[red]{violation.check}[/red] {violation.where}: {violation.detail}", highlight=False)
    if sum(verdict.counts.values()) > EXAMPLES_SHOWN_MAX:
        console.print(f"… {sum(verdict.counts.values())} violations in all; --json names more of them")
    console.print(_operations_table(verdict))
    for line in _figure_lines(verdict):
        console.print(line, highlight=False)
    console.print("[green]clean[/green]" if verdict.clean else "[red]broken[/red]")


def _operations_table(verdict: Verdict) -> Table:
    table = Table("operation", "begun", "ok", "fail", "info", title="what the run did")
    for kind, ends in sorted(verdict.figures.operations.items()):
        begun = ends["invoke"] or ends["ok"]
        never_ended = max(0, begun - ends["ok"] - ends["fail"] - ends["info"])
        counts = (begun, ends["ok"], ends["fail"], ends["info"] + never_ended)
        table.add_row(kind, *(f"{count:,}" for count in counts))
    return table


def _figure_lines(verdict: Verdict) -> list[str]:
    figures = verdict.figures
    struck = ", ".join(f"{what} {count}" for what, count in sorted(figures.faults.items())) or "none"
    seconds = ", ".join(f"{seconds:.2f}" for seconds in figures.first_ok_seconds) or "-"
    repeats = f"Outbox {figures.outbox_repeats:,}, dispatch log {figures.dispatch_repeats:,}"
    return [
        f"{figures.deliveries:,} deliveries of {figures.records:,} messages",
        f"repeats after retries: {repeats}",
        f"faults: {struck}",
        f"seconds from each healing to the first acknowledgement: {seconds}",
    ]


if __name__ == "__main__":
    sys.exit(app())

"""The experiments by their names, with how large they are, and the runner that makes cells of the table.

Every experiment gets an instance of the medium for itself, in a folder that is removed afterwards.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

from tests.matrix.commit import commit_under_strikes
from tests.matrix.durability import KILLS, POWER_LOSSES, kill_under_load, lose_power_under_load
from tests.matrix.fencing import wake_a_stale_owner
from tests.matrix.media import Host, Medium
from tests.matrix.progress import deliver_twice
from tests.matrix.retention import stop_past_retention
from tests.matrix.verdict import Cell, Outcome, judge

TASKS: Final = 10_000
TASKS_PER_TAKE_OVER: Final = 1_000


class Bench:
    """What an experiment works with: instances of one medium that end with the experiment."""

    def __init__(self, medium: Medium, folder: Path, hosts: ExitStack) -> None:
        self.medium = medium
        self._folder = folder
        self._hosts = hosts
        self._instances = 0

    def host(self) -> Host:
        self._instances += 1
        host = self.medium.host(self._folder / f"instance{self._instances}")
        self._hosts.callback(host.close)
        return host


class Experiment(NamedTuple):
    """One column of the table."""

    what: str
    run: Callable[[Bench, int], Outcome]


def _share(tasks: int, full: int) -> int:
    """Strikes of a smaller form: in proportion, at least two."""
    return max(2, min(full, full * tasks // TASKS))


EXPERIMENTS: Final[Mapping[str, Experiment]] = {
    "E1": Experiment(
        "the owner dies after each step of a commit, nobody sends again, the recoverer runs",
        lambda bench, tasks: commit_under_strikes(bench.host(), tasks=tasks),
    ),
    "E2a": Experiment(
        "kill -9 under load, 50 times: what was acknowledged can be read",
        lambda bench, tasks: kill_under_load(bench.host(), tasks=tasks, strikes=_share(tasks, KILLS)),
    ),
    "E2b": Experiment(
        "loss of power under load, 20 times: what was acknowledged can be read",
        lambda bench, tasks: lose_power_under_load(
            bench.host(), tasks=tasks, strikes=_share(tasks, POWER_LOSSES)
        ),
    ),
    "E3": Experiment(
        "every task twice and shuffled, the consumer dies between entry and progress: as delivered once",
        lambda bench, tasks: deliver_twice(bench.medium, bench.host(), bench.host(), tasks=tasks),
    ),
    "E4": Experiment(
        "a consumer past retention is told so, and skips nothing",
        lambda bench, tasks: stop_past_retention(bench.medium, bench.host(), tasks=tasks),
    ),
    "E4-emptied": Experiment(
        "the same where retention left nothing of a partition",
        lambda bench, tasks: stop_past_retention(
            bench.medium, bench.host(), tasks=min(tasks, 1_000), emptied=True
        ),
    ),
    "E7": Experiment(
        "a stopped owner wakes up behind its successor: its store writes are refused, its appends converge",
        lambda bench, tasks: wake_a_stale_owner(
            bench.host(), tasks=tasks, rounds=_share(tasks, TASKS // TASKS_PER_TAKE_OVER)
        ),
    ),
}


def run_cell(medium: Medium, name: str, *, tasks: int) -> Cell:
    reason = medium.not_asked.get(name)
    if reason is not None:
        return Cell(medium.name, name, "not applicable", 0.0, Outcome(), reason)
    started = monotonic()
    with tempfile.TemporaryDirectory(prefix="qim-matrix-") as folder, ExitStack() as hosts:
        try:
            outcome = EXPERIMENTS[name].run(Bench(medium, Path(folder), hosts), tasks)
        except AssertionError as error:
            # A step that could not even be made, for example a role that stops for an operator.
            outcome = Outcome(tasks=tasks, strikes=1)
            outcome.violated(str(error))
    verdict = judge(outcome, claimed=name not in medium.fails)
    return Cell(medium.name, name, verdict, monotonic() - started, outcome)


def run_cells(media: Iterable[Medium], names: Iterable[str], *, tasks: int = TASKS) -> Iterator[Cell]:
    wanted = tuple(names)
    for medium in media:
        for name in wanted:
            yield run_cell(medium, name, tasks=tasks)

"""`make prove`: a real server under mixed load and random faults, then the verdict of the checker.

What runs: `qim dev` (launcher, embedded store, workers, TLS) and client processes with several devices each.
One seed gives the order, the kinds and the victims of the faults: kill -9 of a worker, of the store or of a
client process, SIGSTOP of a worker or of the store for one to three seconds. Meanwhile W and the ends of the
Outbox are sampled. At the end everything has healed; the clients wait for the answers they miss, each device
drains its mailbox to an empty page and reads its histories, the orphan audit walks the stores, they are
dumped, and the checker judges it all. `--rate` is what is offered: messages are due by the clock, and those
that an outage held back follow it. A run in which too few of them were accepted does not pass.

Everything stands in the run folder; `python -m tests.checker FOLDER` judges it again. A clean run removes its
folder unless it was named. Exit 0: clean, load carried, and in a run of more than three times `--kill-every`
a fault struck; 1: not; 2: wrong arguments.
"""

import asyncio
import contextlib
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec
from cyclopts import App, Parameter, validators
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tests.checker.__main__ import BROKEN, CLEAN, print_verdict
from tests.checker.check import judge
from tests.checker.history import FileHistory, Recorder, files_of
from tests.checker.live_clients import Clients, Plan, pause
from tests.checker.live_faults import Faults
from tests.checker.live_load import Load, Repair, lines_of, weigh
from tests.checker.live_resources import ProcessorSeconds, Resources, measure, processor_seconds
from tests.checker.live_stores import LiveStores
from tests.checker.verdict import Verdict
from tests.services.dev_server import DevServer
from workers.audit import Report, run_audit

COURSE_SECONDS: Final = 30.0
"""The resources of all processes are noted this often, and told where nobody watches a bar."""


Course: TypeAlias = list[tuple[float, dict[str, Resources]]]
"""Second, resources."""


class Outcome(NamedTuple):
    verdict: Verdict
    audit: Report
    before: dict[str, Resources]
    """Warm."""
    course: Course
    """While the load went on."""
    loaded: dict[str, Resources]
    """At the end of the load, the clients still there."""
    after: dict[str, Resources]
    load: Load
    samples: int
    plan: Plan
    folder: Path
    is_named: bool
    """Somebody asked for this folder, so it stays whatever happens."""

    @property
    def struck(self) -> int:
        return self.verdict.figures.faults.total()

    @property
    def is_good(self) -> bool:
        expected = self.plan.seconds > 3 * self.plan.kill_every
        is_right = self.verdict.clean and not self.audit.kinds
        return is_right and self.load.is_carried and (self.struck > 0 or not expected)

    @property
    def is_kept(self) -> bool:
        """Whether the folder is still there for whoever reads the result."""
        return self.is_named or not self.is_good


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=console, disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        yield progress


async def prove(plan: Plan, folder: Path, console: Console, *, is_named: bool) -> Outcome:
    with (
        tempfile.TemporaryDirectory(prefix="qim-prove-server-") as data,
        DevServer(Path(data), workers=plan.workers, output=folder / "server.out") as server,
        Recorder(folder / "stores.jsonl", holds="stores") as store_recorder,
        Recorder(folder / "faults.jsonl") as fault_recorder,
        _progress(console) as progress,
    ):
        clients = Clients(server, folder, plan)
        try:
            async with LiveStores(server.folder, store_recorder) as stores:
                loaded = await _load(plan, server, clients, stores, fault_recorder, progress)
                report = await _final_reads(clients, stores, progress)
                after = await asyncio.to_thread(measure, server, {})
        finally:
            await clients.abandon()
            shutil.copy(server.folder / "qim.log", folder / "qim.log")
    progress.stop()
    tell(progress, "the checker judges")
    verdict = judge(FileHistory(files_of(folder)))
    load = weigh(
        verdict.figures.accepted_at, began_ns=clients.began_ns, ended_ns=clients.ended_ns, rate=plan.rate,
        repairs=loaded.repairs, client_cpu_seconds=loaded.client_cpu_seconds,
        server_cpu_seconds=loaded.spent.server, machine_cpu_seconds=loaded.spent.machine,
    )  # fmt: skip
    return Outcome(
        verdict,
        report,
        loaded.before,
        loaded.course,
        loaded.after,
        after,
        load,
        stores.samples,
        plan,
        folder,
        is_named,
    )


class Loaded(NamedTuple):
    """What the time of the load left, besides the histories."""

    before: dict[str, Resources]
    course: Course
    after: dict[str, Resources]
    repairs: list[Repair]
    client_cpu_seconds: float
    spent: ProcessorSeconds


async def _load(
    plan: Plan,
    server: DevServer,
    clients: Clients,
    stores: LiveStores,
    recorder: Recorder,
    progress: Progress,
) -> Loaded:
    """Load and faults for the time of the plan; resources once everything is warm and at the end."""
    stop, stop_samples = asyncio.Event(), asyncio.Event()
    async with _beside(stores.sample_until(stop_samples)) as sampling:
        children = _children_seconds()
        spent = await asyncio.to_thread(processor_seconds, server)
        await clients.start()
        await pause(asyncio.Event(), min(3.0, plan.seconds / 4))
        before = await asyncio.to_thread(measure, server, clients.pids)
        faults = Faults(server, clients, recorder, plan)
        async with _beside(faults.run_until(stop)) as striking:
            course = await _watch(plan, server, clients, faults, striking, progress)
            stop.set()
            await striking
        await pause(asyncio.Event(), 1.0)  # somebody must be acknowledged after the last healing
        after = await asyncio.to_thread(measure, server, clients.pids)
        await clients.finish()
        spent = (await asyncio.to_thread(processor_seconds, server)).since(spent)
        children = _children_seconds() - children
        stop_samples.set()
        await sampling
    return Loaded(before, course, after, faults.repairs, children, spent)


async def _watch(
    plan: Plan,
    server: DevServer,
    clients: Clients,
    faults: Faults,
    striking: asyncio.Task[None],
    progress: Progress,
) -> Course:
    """Raises as soon as a client or the strikes have ended by themselves."""
    bar = progress.add_task("load and faults", total=plan.seconds)
    course: Course = []
    deadline = time.monotonic() + plan.seconds
    while (left := deadline - time.monotonic()) > 0:
        if striking.done():
            await striking  # raises what stopped it
        clients.check()
        progress.update(bar, completed=plan.seconds - left)
        if plan.seconds - left >= (len(course) + 1) * COURSE_SECONDS:
            course.append((plan.seconds - left, await asyncio.to_thread(measure, server, clients.pids)))
            tell(progress, f"{plan.seconds - left:.0f} s of load, {len(faults.repairs)} faults healed")
        await pause(asyncio.Event(), min(0.2, left))
    return course


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Beside the block and never after it: nobody would end the process that it may be starting then."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _children_seconds() -> float:
    """Processor time of the children that have ended: the clients, for the server goes on."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tell(progress: Progress, what: str) -> None:
    """A line where nobody watches a bar."""
    if not progress.console.is_terminal:
        progress.console.print(what, highlight=False)


async def _final_reads(clients: Clients, stores: LiveStores, progress: Progress) -> Report:
    tell(progress, "the orphan audit walks the stores")
    report = await run_audit(stores.audited, clock=stores.clock, progress=progress)
    bar = progress.add_task("every device drains", total=1)
    tell(progress, "every device drains")
    await clients.drain()
    progress.advance(bar)
    tell(progress, "the stores are dumped")
    await stores.dump()
    return report


# --- what people and programs read -------------------------------------------------------------------


def as_result(outcome: Outcome) -> dict[str, Any]:
    return {
        **outcome.verdict.as_result(),
        "good": outcome.is_good,
        "plan": outcome.plan._asdict(),
        "load": outcome.load.as_result(),
        "audit": outcome.audit.as_result(),
        "samples": outcome.samples,
        "resources": {
            when: {part: row._asdict() for part, row in rows.items()}
            for when, rows in (
                ("before", outcome.before),
                ("loaded", outcome.loaded),
                ("after", outcome.after),
            )
        },
        "course": [
            (round(second, 1), {part: row._asdict() for part, row in rows.items()})
            for second, rows in outcome.course
        ],
        "folder": str(outcome.folder) if outcome.is_kept else "",
    }


def print_outcome(outcome: Outcome, console: Console) -> None:
    print_verdict(outcome.verdict, as_json=False)
    table = Table(
        "process", "MiB", "descriptors", "threads", title="warm → after the load → after the last reads"
    )
    moments = (outcome.before, outcome.loaded, outcome.after)
    for part in sorted(set().union(*moments)):
        rows = [moment.get(part) for moment in moments]
        table.add_row(
            part,
            *(
                " → ".join(str(row[n] // scale) if row else "-" for row in rows)
                for n, scale in ((0, 1 << 20), (1, 1), (2, 1))
            ),
        )
    console.print(table)
    for line in lines_of(outcome.load):
        console.print(line, highlight=False, soft_wrap=True)
    audit = outcome.audit.as_result()
    console.print(f"orphan audit: {'clean' if audit['clean'] else audit['found']}; {audit['walked']}")
    if not outcome.struck:
        console.print("no fault struck")
    where = f", run folder {outcome.folder}" if outcome.is_kept else ""
    console.print(f"seed {outcome.plan.seed}, {outcome.samples} samples{where}", soft_wrap=True)


app = App(name="python -m tests.checker.live", help=__doc__)
Positive = Annotated[float, Parameter(validator=validators.Number(gt=0))]


@app.default
def main(
    *,
    seconds: Positive | None = None,
    seed: int | None = None,
    rate: Positive = 200.0,
    kill_every: Positive | None = None,
    workers: Annotated[int, Parameter(validator=validators.Number(gt=0))] = 2,
    soak: Annotated[bool, Parameter(negative="")] = False,
    folder: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Run a server under load and faults, then judge it.

    Parameters
    ----------
    seconds
        How long; 60, or 900 with --soak.
    seed
        Of the schedule; drawn and printed if not given.
    rate
        New messages per second of all users together; at least nine of ten must be accepted.
    kill_every
        Seconds from one fault to the next, on average; 5, or 10 with --soak.
    workers
        Workers of the server.
    soak
        The long run: 15 minutes with a fault every 10 seconds.
    folder
        Where the histories are written and kept; it must not hold any.
    json
        Print one JSON object.
    """
    plan = Plan(
        seconds or (900.0 if soak else 60.0),
        random.SystemRandom().randrange(1 << 32) if seed is None else seed,
        rate,
        kill_every or (10.0 if soak else 5.0),
        workers,
    )
    where = folder or Path(tempfile.mkdtemp(prefix="qim-prove-"))
    where.mkdir(parents=True, exist_ok=True)
    if files_of(where):
        sys.stderr.write(f"{where} holds the histories of another run\n")
        return 2
    console = Console(stderr=json)
    console.print(
        f"seed {plan.seed}: {plan.seconds:.0f} s at {plan.rate:.0f} messages a second", highlight=False
    )
    outcome = asyncio.run(prove(plan, where, console, is_named=folder is not None))
    (where / "outcome.json").write_bytes(msgspec.json.encode(as_result(outcome)))
    if json:
        sys.stdout.write(msgspec.json.encode(as_result(outcome)).decode() + "\n")
    else:
        print_outcome(outcome, console)
    if not outcome.is_kept:
        shutil.rmtree(where)
    return CLEAN if outcome.is_good else BROKEN


if __name__ == "__main__":
    sys.exit(app())

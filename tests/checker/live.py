"""`make prove`: a real server under mixed load and random faults, then the verdict of the checker.

What runs: `qim dev` (launcher, embedded store, workers, TLS) and client processes with several devices each.
One seed gives the order, the kinds and the victims of the faults: kill -9 of a worker, of the store or of a
client process, SIGSTOP of a worker or of the store for one to three seconds. Meanwhile W and the ends of the
Outbox are sampled. At the end everything has healed; the clients wait for the answers they miss, each device
drains its mailbox to an empty page and reads its histories, the orphan audit walks the stores, they are
dumped, and the checker judges it all. `--rate` is what is offered: messages are due by the clock, and those
that an outage held back follow it. A run in which too few of them were accepted does not pass.

Everything stands in the run folder; `python -m tests.checker FOLDER` judges it again. A clean run removes its
folder unless it was named. Exit 0: clean, load carried, and faults struck; 1: not; 2: wrong arguments.
"""

import asyncio
import contextlib
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import psutil
from cyclopts import App, Parameter, validators
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tests.checker.__main__ import BROKEN, CLEAN, print_verdict
from tests.checker.check import judge
from tests.checker.history import Fault, FileHistory, Recorder, files_of
from tests.checker.live_load import Load, Repair, lines_of, weigh
from tests.checker.live_memory import ClientOrder, DeviceOrder
from tests.checker.live_stores import LiveStores
from tests.checker.verdict import Verdict
from tests.services.dev_server import REPOSITORY, TENANT, DevServer
from tests.waiting import eventually_async
from workers.audit import Report, run_audit

USERS_MIN: Final = 8
SENDS_PER_USER_MAX: Final = 40.0
"""Below what the server allows to one user, also while he catches up."""
READERS_MAX: Final = 16
"""Users with a second device, which only reads."""
LOOKS_PER_SECOND: Final = 200.0
"""Turns of all users together after which they may read something; with a higher rate it is not more."""
CLIENT_PROCESSES: Final = 3
PEERS: Final = 3
"""Each user writes to the users beside it."""
HEAL_SECONDS_MAX: Final = 150.0
"""A store that holds gigabytes reads its file for a minute; the launcher waits for two."""
DRAIN_SECONDS_MAX: Final = 1_800.0
SETTLE_SECONDS_MAX: Final = 60.0
TOLD_SECONDS: Final = 10.0
"""A line of progress this often, where nobody watches a bar."""
FAULTS: Final = ("kill worker", "kill store", "kill client", "pause worker", "pause store")
WEIGHTS: Final = (4, 2, 3, 2, 1)


class Plan(NamedTuple):
    seconds: float
    seed: int
    rate: float
    kill_every: float
    workers: int


class Resources(NamedTuple):
    """Of one server process."""

    memory_bytes: int
    descriptors: int
    threads: int


class Outcome(NamedTuple):
    verdict: Verdict
    audit: Report
    before: dict[str, Resources]
    """Warm."""
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


class Clients:
    """The client processes, each replaced by a successor when it was killed."""

    def __init__(self, server: DevServer, folder: Path, plan: Plan) -> None:
        self._processes: list[asyncio.subprocess.Process] = []
        count = max(USERS_MIN, math.ceil(plan.rate / SENDS_PER_USER_MAX))
        users = [server.new_user() for _ in range(count)]
        curiosity = min(1.0, LOOKS_PER_SECOND / plan.rate)
        self.orders = [
            ClientOrder(
                server.port,
                str(server.certificate),
                TENANT,
                f"client-{n}.0",
                str(folder),
                plan.seed,
                [],
                curiosity=curiosity,
            )
            for n in range(CLIENT_PROCESSES)
        ]
        chance = random.Random(plan.seed)
        for place, user in enumerate(users):
            peers = [users[(place + step) % count].user.hex() for step in (1, count - 1, count // 2)[:PEERS]]
            for number in range(2 if place < READERS_MAX else 1):  # the second device only reads
                order = DeviceOrder(
                    user.user.hex(), user.token, chance.randbytes(16).hex(), peers,
                    0.0 if number else plan.rate / count,
                )  # fmt: skip
                self.orders[(place + number) % CLIENT_PROCESSES].devices.append(order)

    async def start(self) -> None:
        self.began_ns = time.monotonic_ns()
        for order in self.orders:
            order.began_ns = self.began_ns
        self._processes = [await self._start(order) for order in self.orders]

    @property
    def pids(self) -> dict[str, int]:
        return {
            order.process.partition(".")[0]: process.pid
            for order, process in zip(self.orders, self._processes, strict=True)
        }

    async def _start(self, order: ClientOrder) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.checker.live_client", msgspec.json.encode(order).decode(),
            cwd=REPOSITORY,
        )  # fmt: skip

    async def kill(self, place: int) -> None:
        """kill -9, and a successor that goes on with its histories."""
        process, order = self._processes[place], self.orders[place]
        process.kill()
        await process.wait()
        order.process = _successor(order.process)
        self._processes[place] = await self._start(order)

    async def finish(self) -> None:
        self.ended_ns = time.monotonic_ns()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        await self._ended(SETTLE_SECONDS_MAX)

    def check(self) -> None:
        """Raises when one has ended by itself."""
        for process in self._processes:
            assert not process.returncode, f"a client process ended with {process.returncode}"

    async def drain(self) -> None:
        """The last reads, by the successors of all."""
        for order in self.orders:
            order.process, order.is_final = _successor(order.process), True
        self._processes = [await self._start(order) for order in self.orders]
        await self._ended(DRAIN_SECONDS_MAX)

    async def _ended(self, seconds_max: float) -> None:
        for process in self._processes:
            code = await asyncio.wait_for(process.wait(), seconds_max)
            assert code == 0, f"a client process ended with {code}"

    async def abandon(self) -> None:
        """After an error: nobody is left behind."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _successor(process: str) -> str:
    name, _, number = process.partition(".")
    return f"{name}.{int(number) + 1}"


class Faults:
    """Strikes and heals, one fault after the other, and notes both."""

    def __init__(self, server: DevServer, clients: Clients, recorder: Recorder, plan: Plan) -> None:
        self._server, self._clients, self._recorder, self._plan = server, clients, recorder, plan
        self._chance = random.Random(f"faults {plan.seed}")
        self.repairs: list[Repair] = []

    async def run_until(self, stop: asyncio.Event) -> None:
        while not await pause(stop, self._plan.kill_every * self._chance.uniform(0.6, 1.4)):
            what, _, target = self._chance.choices(FAULTS, WEIGHTS)[0].partition(" ")
            await self._strike(what, target)

    async def _strike(self, what: str, target: str) -> None:
        victim = await self._victim(target)
        self._note("strike", what, target, victim)
        began = time.monotonic()
        if target == "client":
            await self._clients.kill(victim)
        elif what == "kill":
            os.kill(victim, signal.SIGKILL)
            await self._healed(target, victim)
        else:
            os.kill(victim, signal.SIGSTOP)
            await pause(asyncio.Event(), self._chance.uniform(1.0, 3.0))
            with contextlib.suppress(ProcessLookupError):  # a worker that is silent for too long is replaced
                os.kill(victim, signal.SIGCONT)
            await self._healed("", victim)
        self._note("heal", what, target, victim)
        self.repairs.append(Repair(f"{what} {target}", time.monotonic() - began))

    async def _victim(self, target: str) -> int:
        """A pid; of a client its place."""
        if target == "client":
            return self._chance.randrange(CLIENT_PROCESSES)
        if target == "store":
            return self._server.store_pid()
        return self._chance.choice(await asyncio.to_thread(self._server.worker_pids))

    async def _healed(self, replaced: str, victim: int) -> None:
        """Ready again, and whoever was killed has a successor."""
        await eventually_async(
            lambda: asyncio.to_thread(self._is_healed, replaced, victim),
            what=f"the server is ready again after {replaced or 'a pause'}",
            timeout_seconds=HEAL_SECONDS_MAX,
        )

    def _is_healed(self, replaced: str, victim: int) -> bool:
        status = self._server.status()
        if not status or not status.get("ready"):
            return False
        if replaced == "store":
            return self._server.store_pid() != victim
        running = {row["pid"] for row in status["workers"] if row["pid"] and psutil.pid_exists(row["pid"])}
        return len(running) == self._plan.workers and (replaced != "worker" or victim not in running)

    def _note(self, phase: Any, what: str, target: str, victim: int) -> None:
        fault = Fault(time.monotonic_ns(), "harness", phase, f"{what} {target}", str(victim))
        self._recorder.write(fault)


async def pause(stop: asyncio.Event, seconds: float) -> bool:
    """Whether `stop` came within the time."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
    return stop.is_set()


def measure(server: DevServer, clients: dict[str, int]) -> dict[str, Resources]:
    """Memory, descriptors and threads of every process of the server and of the clients, by its part."""
    launcher = psutil.Process(server.store_pid()).parent()
    assert launcher is not None
    workers = server.worker_pids()
    parts = {launcher.pid: "launcher", server.store_pid(): "store"}
    parts |= {pid: f"worker {number}" for number, pid in enumerate(workers)}
    found: dict[str, Resources] = {}
    parts |= {pid: name for name, pid in clients.items()}
    for process in (launcher, *launcher.children(recursive=True), *_processes(clients.values())):
        with contextlib.suppress(psutil.NoSuchProcess):
            part = parts.get(process.pid) or ("supervisor" if process.ppid() == launcher.pid else "admin")
            found[part] = Resources(process.memory_info().rss, process.num_fds(), process.num_threads())
    return found


def _processes(pids: Iterable[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


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
    verdict = judge(FileHistory(files_of(folder)))
    load = weigh(
        verdict.figures.accepted_at, began_ns=clients.began_ns, ended_ns=clients.ended_ns, rate=plan.rate,
        repairs=loaded.repairs, client_cpu_seconds=loaded.client_cpu_seconds,
    )  # fmt: skip
    return Outcome(
        verdict, report, loaded.before, loaded.after, after, load, stores.samples, plan, folder, is_named
    )


class Loaded(NamedTuple):
    """What the time of the load left, besides the histories."""

    before: dict[str, Resources]
    after: dict[str, Resources]
    repairs: list[Repair]
    client_cpu_seconds: float


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
    sampling = asyncio.create_task(stores.sample_until(stop_samples))
    spent = _children_seconds()
    await clients.start()
    await pause(asyncio.Event(), min(3.0, plan.seconds / 4))
    before = await asyncio.to_thread(measure, server, clients.pids)
    faults = Faults(server, clients, recorder, plan)
    striking = asyncio.create_task(faults.run_until(stop))
    bar = progress.add_task("load and faults", total=plan.seconds)
    deadline = time.monotonic() + plan.seconds
    while (left := deadline - time.monotonic()) > 0:
        if striking.done():
            await striking  # raises what stopped it
        clients.check()
        progress.update(bar, completed=plan.seconds - left)
        await pause(asyncio.Event(), min(0.2, left))
    stop.set()
    await striking
    await pause(asyncio.Event(), 1.0)  # somebody must be acknowledged after the last healing
    after = await asyncio.to_thread(measure, server, clients.pids)
    await clients.finish()
    stop_samples.set()
    await sampling
    return Loaded(before, after, faults.repairs, _children_seconds() - spent)


def _children_seconds() -> float:
    """Processor time of the children that have ended: the clients, for the server goes on."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def _final_reads(clients: Clients, stores: LiveStores, progress: Progress) -> Report:
    report = await run_audit(stores.audited, clock=stores.clock, progress=progress)
    bar = progress.add_task("every device drains", total=1)
    await clients.drain()
    progress.advance(bar)
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

"""`make bench`: what the server carries, and what a message costs it.

    make bench ARGS="--rate 1000 --seconds 20 --json"
    make bench ARGS="--find-max"

One process generates, open loop, on one event loop; the server runs in processes of its own. Without
`--endpoint` the server is started here, with the embedded store and data of its own, which are removed at the
end. A run is: calibrate the floor, log everybody in, warm up, measure, drain, let everybody pull once,
calibrate again. What is missing after that pull is lost.

A run is void when the generator used more than 70 % of a core, and marked when others used more than 5 % of
one. Exit code 1: void, or something accepted was lost or doubled, or something stayed unanswered.
"""

import asyncio
import json
import resource
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Final

import uvloop
from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from loadtest.floor import find_store_binary, measure_floor
from loadtest.generator import Generator
from loadtest.launch import start_server
from loadtest.report import Floor, Run, StepSearch, as_json, batch_means, marks, mean_floor
from loadtest.server import Observer, Server, machine_facts, spent, worker_lag_p99_ms
from loadtest.user import NUMBER
from qim.clock import SystemClock
from qim.errors import ConfigError, ExitCode, QimError

USER_SENDS_PER_SECOND_MAX: Final = 20.0
"""A fifth of the default limit of one user: bursts of the schedule must never meet the limit."""
USERS_MIN: Final = 200
USERS_FOR_SEARCH: Final = 600
STEPS_MAX: Final = 14

app = App(name="capacity", help=__doc__, version_flags=())


def _option(text: str, **names: Any) -> Parameter:
    return Parameter(help=text, negative=(), **names)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure."""

    rate: Annotated[float, _option("messages a second; with --find-max those of the first step")] = 1000.0
    seconds: Annotated[float, _option("length of the measured window")] = 20.0
    warm_up: Annotated[float, _option("seconds before it, checked but not measured")] = 3.0
    users: Annotated[int, _option("an even number; 0 chooses enough for the rate")] = 0
    find_max: Annotated[bool, _option("search the highest sustained rate")] = False
    seed: Annotated[int, _option("of the schedule")] = 1
    body_bytes: Annotated[int, _option("size of a message, at least 16")] = 128
    no_floor: Annotated[bool, _option("leave the calibration out")] = False
    redis_server: Annotated[str | None, _option("binary for the embedded store and the calibration")] = None
    workers: Annotated[int, _option("of the server that is started here; 0 leaves it to the profile")] = 0


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server that runs already; without --endpoint one is started."""

    endpoint: Annotated[str | None, _option("host:port of a running server")] = None
    ca: Annotated[Path | None, _option("certificate to trust")] = None
    token_key: Annotated[Path | None, _option("private key that signs the users' tokens")] = None
    kid: Annotated[str, _option("id of that key")] = "dev"
    issuer: Annotated[str, _option("`iss` of the tokens")] = "qim"
    audience: Annotated[str, _option("`aud` of the tokens")] = "qim"
    server_name: Annotated[str, _option("name in the server's certificate")] = "localhost"
    runtime: Annotated[Path | None, _option("folder of its control sockets, for processor time")] = None
    store_pid: Annotated[int | None, _option("process of its store")] = None

    def server(self) -> Server | None:
        """Raises ConfigError when the options do not fit together."""
        if self.endpoint is None:
            return None
        host, _, port = self.endpoint.rpartition(":")
        if self.ca is None or self.token_key is None or not port.isdecimal():
            raise ConfigError(["--endpoint is host:port, and needs --ca and --token-key"])
        return Server(
            host=host,
            port=int(port),
            ca_file=self.ca,
            token_key_pem=self.token_key.read_bytes(),
            kid=self.kid,
            issuer=self.issuer,
            audience=self.audience,
            server_name=self.server_name,
            runtime_dir=self.runtime,
            store_pid=self.store_pid,
        )


DEFAULT_PLAN: Final = Plan()
DEFAULT_TARGET: Final = Target()


@app.default
def main(
    *,
    plan: Plan = DEFAULT_PLAN,
    target: Target = DEFAULT_TARGET,
    as_object: Annotated[bool, _option("one JSON object on standard output", name="--json")] = False,
) -> int:
    """Measures a server: rate, latency, correctness and the processor time of a message."""
    raise_descriptor_limit()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: the server goes, too
    try:
        return _run(with_users(plan), target.server(), as_object=as_object)
    except ConfigError as error:
        print(f"capacity: {error}", file=sys.stderr)
        return ExitCode.USAGE
    except (QimError, OSError) as error:
        print(f"capacity: {error}", file=sys.stderr)
        return ExitCode.UNREACHABLE
    except KeyboardInterrupt:
        return ExitCode.NO


def with_users(plan: Plan) -> Plan:
    """The plan with an even number of users and a body that can name its message."""
    users = USERS_FOR_SEARCH if plan.find_max else users_for(plan.rate)
    chosen = plan.users + plan.users % 2 or users
    return replace(plan, users=chosen, body_bytes=max(NUMBER.size, plan.body_bytes))


def _run(plan: Plan, given: Server | None, *, as_object: bool) -> int:
    with start_server(given, workers=plan.workers, redis_server=plan.redis_server) as server:
        runs, floors, machine = uvloop.run(measure(plan, server))
    best = choose(runs)
    if as_object:
        result = as_json(best, floors=floors, machine=machine)
        if plan.find_max:
            result["steps"] = [as_json(run, floors=floors, machine={}) for run in runs]
        print(json.dumps(result, indent=1))
    else:
        show(runs, floors, machine, best)
    return exit_code(best, find_max=plan.find_max)


def users_for(rate: float) -> int:
    """An even number of users of whom none comes near the limit of one."""
    return max(USERS_MIN, 2 * ceil(rate / USER_SENDS_PER_SECOND_MAX / 2))


def choose(runs: list[Run]) -> Run:
    """The run that is quoted: the highest sustained one, else the last."""
    sustained = [run for run in runs if run.is_sustained]
    return max(sustained, key=lambda run: run.rate) if sustained else runs[-1]


def exit_code(run: Run, *, find_max: bool) -> ExitCode:
    good = run.is_sustained if find_max else run.is_correct and not run.is_void
    return ExitCode.OK if good else ExitCode.NO


def raise_descriptor_limit() -> None:
    """As many sockets as this process may have: one per user."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# --- the run -----------------------------------------------------------------------------------------


async def measure(plan: Plan, server: Server) -> tuple[list[Run], list[Floor], dict[str, Any]]:
    """All steps with a calibration before and after."""
    observer = Observer(server, SystemClock())
    generator = Generator(
        server,
        users=plan.users,
        run=secrets.randbits(63),
        seed=plan.seed,
        body_size=plan.body_bytes,
        clock=SystemClock(),
    )
    floors = [await calibrate(plan, server)] if not plan.no_floor else []
    await generator.connect()
    try:
        runs = await (search(plan, generator, observer) if plan.find_max else once(plan, generator, observer))
    finally:
        await generator.close()
    if not plan.no_floor:
        floors.append(await calibrate(plan, server))
    machine = machine_facts(workers=observer.worker_count if observer.can_see_workers else None)
    return runs, floors, machine | {"users": plan.users, "seed": plan.seed, "body_bytes": plan.body_bytes}


async def calibrate(plan: Plan, server: Server) -> Floor:
    folder = server.runtime_dir.parent if server.runtime_dir is not None else Path(tempfile.gettempdir())
    binary = find_store_binary(plan.redis_server, server.store_pid)
    return await measure_floor(store_binary=binary, folder=folder, body_bytes=plan.body_bytes)


async def once(plan: Plan, generator: Generator, observer: Observer) -> list[Run]:
    async with progress(f"{plan.rate:g} msg/s", plan.warm_up + plan.seconds):
        return [await step(plan, plan.rate, generator, observer)]


async def search(plan: Plan, generator: Generator, observer: Observer) -> list[Run]:
    """Steps until the highest sustained rate lies between two neighbours."""
    found = StepSearch(plan.rate)
    runs: list[Run] = []
    while found.next_rate is not None and len(runs) < STEPS_MAX:
        rate = round(found.next_rate)
        async with progress(f"step {len(runs) + 1}: {rate} msg/s", plan.warm_up + plan.seconds):
            run = await step(plan, rate, generator, observer)
        runs.append(run)
        found.report(rate, sustained=run.is_sustained)
        if generator.ended:
            break  # a search with missing users would measure something else
    return runs


async def step(plan: Plan, rate: float, generator: Generator, observer: Observer) -> Run:
    """One rate: warm up, measure, drain."""
    ledger = generator.prepare(rate=rate, seconds=plan.seconds, warm_up_seconds=plan.warm_up)
    counters = await asyncio.to_thread(observer.counters)
    play = asyncio.ensure_future(generator.play())
    await asyncio.sleep(plan.warm_up)
    before, accepted_before = observer.sample(), ledger.accepted
    await asyncio.sleep(plan.seconds)
    accepted_in_window = ledger.accepted - accepted_before
    after = observer.sample()
    await play
    counters_after = await asyncio.to_thread(observer.counters)
    await generator.settle()
    return Run(
        rate=rate,
        seconds=plan.seconds,
        counts=ledger.counts(),
        offered_in_window=ledger.offered_in_window,
        accepted_in_window=accepted_in_window,
        ack=ledger.ack.summary(),
        end_to_end=ledger.end_to_end.summary(),
        echo=ledger.echo.summary(),
        generator_lag=ledger.generator_lag.summary(),
        processor=spent(before, after),
        worker_lag_p99_ms=worker_lag_p99_ms(counters, counters_after),
        batch=batch_means(counters, counters_after),
        refusals=dict(ledger.refusals + generator.ended),
    )


@asynccontextmanager
async def progress(text: str, seconds: float) -> AsyncIterator[None]:
    """A bar on standard error, drawn once a second: drawing costs the generator."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=seconds)

        async def draw() -> None:
            while True:
                await asyncio.sleep(1)
                bar.update(task, advance=1)
                bar.refresh()

        drawing = asyncio.ensure_future(draw())
        try:
            yield
        finally:
            drawing.cancel()


# --- what people see ---------------------------------------------------------------------------------


def show(runs: list[Run], floors: list[Floor], machine: dict[str, Any], best: Run) -> None:
    """The tables: one row per step, then the quoted one in detail."""
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()), highlight=False)
    if len(runs) > 1:
        console.print(_step_table(runs))
    console.print(_run_table(best, mean_floor(floors)))


def _step_table(runs: list[Run]) -> Table:
    table = Table(
        "offered/s", "accepted/s", "ACK P99 ms", "end to end P99 ms", "server µs", "", title="steps"
    )
    for run in runs:
        table.add_row(
            f"{run.rate:.0f}",
            f"{run.accepted_in_window / run.seconds:.0f}",
            f"{run.ack.p99:.1f}",
            f"{run.end_to_end.p99:.1f}",
            f"{run.server_us:.0f}",
            marks(run) or "sustained",
        )
    return table


def _run_table(run: Run, floor: Floor | None) -> Table:
    table = Table("what", "value", title=f"{run.rate:g} messages a second for {run.seconds:g} s")
    counts, cpu = run.counts, run.processor.per_message_us(run.accepted_in_window)
    rows = {
        "offered, accepted, refused, unanswered": (
            f"{counts.offered}, {counts.accepted}, {counts.refused}, {counts.unanswered}"
        ),
        "delivered (by pull only), lost, doubled": (
            f"{counts.delivered} ({counts.pulled}), {counts.lost}, {counts.doubled}"
        ),
        "accepted per second": f"{run.accepted_in_window / run.seconds:.1f}",
        "refusals by code": ", ".join(f"{code}: {n}" for code, n in run.refusals.items()) or "none",
        "generator, core share": f"{run.processor.generator_share:.0%}",
        "others and hypervisor, core share": f"{run.processor.noise_share:.0%}",
        "processor µs per message": ", ".join(f"{name} {value:g}" for name, value in cpu.items()),
        "server µs per message": f"{run.server_us:g}" + _times_floor(run, floor),
        "mean batch": ", ".join(f"{role} {_or_dash(size)}" for role, size in run.batch.items()) or "-",
        "worker loop lag P99 ms": _or_dash(run.worker_lag_p99_ms),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    for name, part in (
        ("ACK", run.ack),
        ("end to end", run.end_to_end),
        ("echo", run.echo),
        ("generator lag", run.generator_lag),
    ):
        table.add_row(
            f"{name} ms: P50, P99, P99.9, max",
            f"{part.p50:.1f}, {part.p99:.1f}, {part.p999:.1f}, {part.max:.1f}",
        )
    table.add_row("verdict", marks(run) or "sustained")
    return table


def _times_floor(run: Run, floor: Floor | None) -> str:
    if floor is None or not floor.total_us:
        return ""
    return f" = {run.server_us / floor.total_us:.2f} × floor of {floor.total_us:g}"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


if __name__ == "__main__":
    sys.exit(app())

"""`qim audit`: opens its own connections, walks everything, prints what it found.

It only reads, and it asks the start-up guards first: an audit of a foreign store would report nonsense. On a
busy server the consumers never stand still; their lag is then a finding. Findings beyond `--findings-max` are
counted, not kept. The result goes to standard output; progress to standard error: a bar on a terminal, one
line every ten seconds elsewhere. Ctrl-C says how far it came.
"""

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from qim.clock import SystemClock
from qim.config import Config, Secret
from qim.config_checks import read_secret
from qim.ctl.render import escape
from qim.errors import ExitCode, StoreRefused, StoreUnfit
from workers.audit import Report, run_audit
from workers.wiring import Stores, wire_audit

LINE_SECONDS: Final = 10.0


def audit(config: Config, *, findings_max: int, as_json: bool) -> int:
    """0 when clean, 1 when something was found. Raises StoreError or GuardRefused."""
    password = read_secret(config.redis.password, environ=os.environ)
    report = asyncio.run(_audit(config, password, findings_max=findings_max))
    result = report.as_result()
    if as_json:
        import orjson  # noqa: PLC0415 - only for this form of the answer

        sys.stdout.write(orjson.dumps(result).decode() + "\n")
    else:
        sys.stdout.write(describe(result))
    return ExitCode.OK if result["clean"] else ExitCode.NO


async def _audit(config: Config, password: Secret, *, findings_max: int) -> Report:
    clock = SystemClock()
    stores, audited = wire_audit(config, clock=clock, password=password)
    console = Console(stderr=True)
    try:
        await _connect(stores)
        await stores.check()
        with make_progress(console) as progress:
            telling = asyncio.ensure_future(_tell(progress, console))
            try:
                return await run_audit(audited, clock=clock, progress=progress, findings_max=findings_max)
            except asyncio.CancelledError:
                console.print(f"stopped: {_so_far(progress)}", highlight=False, markup=False)
                raise
            finally:
                telling.cancel()
                await asyncio.gather(telling, return_exceptions=True)
    finally:
        await stores.close()


async def _connect(stores: Stores) -> None:
    try:
        await stores.connect()
    except StoreUnfit:
        raise
    except StoreRefused as error:
        # The store of `qim dev` lives as long as its launcher, which is what a person forgets.
        raise StoreRefused(
            f"no store answers at {error}; it must run for an audit (that of qim dev runs during `make run`)"
        ) from error


def make_progress(console: Console) -> Progress:
    """What is done, of how many, and how long it will still take."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class _Rate(ProgressColumn):
    """Things per second, once there is a first second to measure."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f}/s")


async def _tell(progress: Progress, console: Console) -> None:
    """For a file or a service manager, which cannot redraw a line."""
    while not console.is_terminal:
        await asyncio.sleep(LINE_SECONDS)
        console.print(_so_far(progress), highlight=False, markup=False, soft_wrap=True)


def _so_far(progress: Progress) -> str:
    return ", ".join(
        f"{task.description} {task.completed:.0f} of {task.total or 0:.0f}" for task in progress.tasks
    )


def describe(result: Mapping[str, Any]) -> str:
    """The report for people: one line per thing that was walked, per kind and per finding."""
    lines = ["clean" if result["clean"] else "NOT clean"]
    lines += [f"  walked {count:>10,}  {what.replace('_', ' ')}" for what, count in result["walked"].items()]
    lines += [f"  found  {count:>10,}  {kind}" for kind, count in result["found"].items()]
    lines += [f"  {finding['kind']}: {escape(finding['where'])}" for finding in result["findings"]]
    unlisted = sum(result["found"].values()) - len(result["findings"])
    if unlisted:
        lines.append(f"  and {unlisted:,} more; --findings-max lists them")
    return "\n".join(lines) + "\n"

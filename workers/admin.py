"""The admin process: one place to ask about the whole service.

It owns no slot, no store client and no chat state. It reads the shared page (state, heartbeats, counters of
every child) and asks the workers over their control sockets; so it still reports when a worker hangs: that
worker's row says that it did not answer. A command that names a slot goes to the worker that owns it, one
that does not goes to all and the answers are joined. Nothing is changed here itself.

Its own socket is `control.sock` in the runtime folder. When a worker does not answer in time, `status` says
which one and still gives the others' answers. It ends last in a drain, so that health can be seen to the end.
"""

import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from structlog import get_logger

from qim.clock import SystemClock
from qim.config import Config
from qim.ctl import protocol
from qim.domain.groups import route_group
from qim.domain.growth import Estimate, FirstLook, estimate
from qim.domain.placement import Placement, slot_of_bucket
from qim.domain.supervisor import ChildState, Stage
from qim.errors import ControlError, ControlRefused, ControlUnreachable, ExitCode
from qim.ids import GroupId, SlotId
from qim.limits import SLOTS
from qim.logsetup import configure_logging
from qim.metrics import Metrics, read_snapshot
from workers.child import ChildContext
from workers.control import ControlServer, Handler, parse_id, parse_tenant
from workers.heartbeat import HeartbeatRecord
from workers.reload import read_reload
from workers.vitals import Vitals

SCHEMA: Final = 1
ASK_SECONDS_MAX: Final = 5.0
SAMPLE_SECONDS: Final = 1.0
ANSWERED: Final = ("slots", "connections", "commits", "loop_lag_ms")
"""Of a row of `status`: what only the worker itself can tell."""
OF_A_SLOT: Final = ("mailbox.retry", "mailbox.skip", "mailbox.redeliver", "outbox.retry", "outbox.skip")
OF_A_GROUP: Final = ("membership.add", "membership.remove", "membership.list")
OF_ALL: Final = ("slots", "lag", "mailbox.show", "outbox.show")

log = get_logger()
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminJob:
    """What the admin process gets, made before the first fork."""

    config: Config
    placement: Placement
    port: int
    first_worker: int
    """Number of worker 0 in the supervisor's table."""


def run_admin(job: AdminJob, context: ChildContext) -> int:
    """The entry point of the child; returns its exit code."""
    configure_logging(level=read_reload(job.config).level, log_format=job.config.log.format, process="admin")
    return asyncio.run(Admin(job, context).run())


class Admin:
    """One admin process."""

    def __init__(self, job: AdminJob, context: ChildContext) -> None:
        self._job = job
        self._context = context
        self._workers = range(job.placement.workers)
        self._clock = SystemClock()
        self._first_look: FirstLook | None = None
        self._ended = asyncio.Event()

    async def run(self) -> int:
        """Until told to end."""
        record = self._context.record
        vitals = Vitals(
            record=record,
            metrics=Metrics(),
            clock=self._clock,
            on_beat=self._look_at_page,
            before_publish=lambda: None,
        )
        vitals.start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._on_terminate)
        control = ControlServer(Path(self._job.config.server.runtime_dir, "control.sock"), self._commands())
        await control.start()
        record.set_state(ChildState.READY, now_ns=vitals.now_ns())
        sampling = asyncio.ensure_future(self._sample())
        await self._ended.wait()
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        await control.close()
        record.report_done(Stage.CLOSE)
        return ExitCode.OK

    def _look_at_page(self) -> None:
        if self._context.record.stage_wanted is Stage.CLOSE:
            self._ended.set()

    def _on_terminate(self) -> None:
        if self._context.record.stage_wanted in {Stage.NONE, Stage.CLOSE}:
            self._ended.set()

    def _commands(self) -> dict[str, Handler]:
        commands: dict[str, Handler] = {"status": self.status, "metrics": self.metrics}
        for name in OF_ALL:
            commands[name] = partial(self._join, name)
        for name in OF_A_SLOT:
            commands[name] = partial(self._forward, name)
        for name in OF_A_GROUP:
            commands[name] = partial(self._forward_group, name)
        return commands

    # --- commands ---

    async def status(self) -> Answer:
        """Ready or not and why; a row per worker and per store."""
        # At the same time: a worker that hangs must not cost its time limit twice.
        answers, stores = await asyncio.gather(self._ask_all("status"), self._stores())
        rows = [self._row(worker, answer) for worker, answer in zip(self._workers, answers, strict=True)]
        reasons = [reason for row in rows for reason in row.pop("reasons")]
        return {
            "schema": SCHEMA,
            "ready": not reasons,
            "reasons": reasons,
            "deployment": self._job.config.server.deployment,
            "address": self._job.config.gateway.address,
            "port": self._job.port,
            "connections": sum(row["connections"] or 0 for row in rows),
            "workers": rows,
            "stores": stores,
        }

    def metrics(self) -> Answer:
        """The counters of every process, by its number in the supervisor's table."""
        records = (self._context.page.record(child) for child in range(len(self._context.page)))
        return {"processes": [read_snapshot(record.read_snapshot()) for record in records]}

    async def _join(self, command: str) -> Answer:
        """What every worker answers with one list; the lists are joined."""
        result: Answer = {"schema": SCHEMA}
        for worker, answer in enumerate(await self._ask_all(command)):
            if isinstance(answer, ControlError):
                raise ControlUnreachable(f"worker {worker}: {answer}") from answer
            for key, value in answer.items():
                if isinstance(value, dict):
                    result.setdefault(key, {}).update(value)
                else:
                    result.setdefault(key, []).extend(value)
        return result

    async def _forward(self, command: str, *, slot: int, offset: int | None = None) -> Answer:
        """What only the owner of a slot can answer."""
        if not 0 <= slot < SLOTS:
            raise ControlRefused(
                f"there is no slot {slot}; slots are 0 to {SLOTS - 1}", exit_code=ExitCode.USAGE
            )
        arguments = {"slot": slot} if offset is None else {"slot": slot, "offset": offset}
        worker = self._job.placement.worker_of(SlotId(slot))
        return {"schema": SCHEMA, **await self._ask(worker, command, arguments)}

    async def _forward_group(self, command: str, *, tenant: int, group: str, **arguments: Any) -> Answer:
        """What only the owner of a group's conversation can do."""
        route = route_group(parse_tenant(tenant), GroupId(parse_id("group", group)))
        worker = self._job.placement.worker_of(slot_of_bucket(route.bucket))
        asked = {"tenant": tenant, "group": group, **arguments}
        return {"schema": SCHEMA, **await self._ask(worker, command, asked)}

    # --- asking ---

    async def _ask_all(self, command: str) -> Sequence[Answer | ControlError]:
        """The answer of each worker, or why there is none."""
        asked = (self._ask(worker, command, {}) for worker in self._workers)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found: list[Answer | ControlError] = []
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ControlError):
                raise answer
            found.append(answer)
        return found

    async def _ask(self, worker: int, command: str, arguments: Mapping[str, Any]) -> Answer:
        path = Path(self._job.config.server.runtime_dir, f"control-{worker}.sock")
        # The blocking client in a thread: this process serves a handful of people, not messages.
        return await asyncio.to_thread(
            protocol.call, path, command, arguments, timeout_seconds=ASK_SECONDS_MAX
        )

    async def _stores(self) -> list[Answer]:
        """A row per server; every worker knows all of them, so one that answers is enough."""
        answers = await self._ask_all("stores")
        answer = next((answer for answer in answers if not isinstance(answer, ControlError)), None)
        if answer is None:
            unknown = Estimate(None, None, f"no worker can tell: {answers[0]}")
            names = ("roles", "used_bytes", "max_bytes", "max_is", "evicted", "messages")
            config = self._job.config
            urls = dict.fromkeys((*config.redis.core, *config.mailbox_urls, config.log_url))
            return [{"store": url, **dict.fromkeys(names), **unknown._asdict()} for url in urls]
        return [self._judge(row, messages=answer["messages"]) for row in answer["stores"]]

    def _judge(self, row: Answer, *, messages: int) -> Answer:
        now_ms = int(self._clock.monotonic() * 1000)
        if self._first_look is None:
            self._first_look = FirstLook(messages, now_ms)
        found = estimate(
            used_bytes=row["used_bytes"],
            empty_bytes=row.pop("empty_bytes"),
            max_bytes=row["max_bytes"],
            messages=messages,
            first=self._first_look,
            now_ms=now_ms,
        )
        return row | {"messages": messages} | found._asdict()

    async def _sample(self) -> None:
        """A first look soon after the start, so that growth has a beginning before anybody asks."""
        while self._first_look is None:
            await self._stores()
            await asyncio.sleep(SAMPLE_SECONDS)

    def _row(self, worker: int, answer: Answer | ControlError) -> Answer:
        record = self._context.page.record(self._job.first_worker + worker)
        now_ns = int(self._clock.monotonic() * 1_000_000_000)
        seen = _seen_in_page(record, now_ns=now_ns)
        reasons = (
            [] if record.state is ChildState.READY else [f"worker {worker} is {record.state.name.lower()}"]
        )
        if isinstance(answer, ControlError):
            reasons.append(f"worker {worker} does not answer: {answer}")
            answered: Answer = dict.fromkeys(ANSWERED)
        else:
            answered = {name: answer[name] for name in ANSWERED}
            if answer["waiting_for"]:
                # Says more than the state alone.
                reasons = [f"worker {worker} waits: {answer['waiting_for']}"]
            else:
                reasons += [f"worker {worker} is not connected to {store}" for store in answer["away"]]
            reasons += [f"worker {worker}: {what}" for what in answer["stopped"]]
            reasons += [f"worker {worker}: {what} is {state}" for what, state in answer["not_ready"].items()]
        return {"worker": worker, **seen, **answered, "reasons": reasons}


def _seen_in_page(record: HeartbeatRecord, *, now_ns: int) -> Answer:
    seen = read_snapshot(record.read_snapshot())
    rss = seen.get("rss_bytes")
    return {
        "pid": record.pid or None,
        "state": record.state.name.lower(),
        "silent_ms": max(0, now_ns - record.stamp_ns) // 1_000_000 if record.stamp_ns else None,
        "restarts": max(0, record.generation - 1),
        "rss_bytes": int(rss) if isinstance(rss, int | float) else None,
    }

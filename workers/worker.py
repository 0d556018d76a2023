"""A worker process: from the fork to its last word. The only import of uvloop.

    STARTING   loop, heartbeat, control socket: from here on the process can be asked and watched
    WAITING    a store is down: connected again with back-off, beating all the while
    …          start guards, CPU pin, claim of the slots, guard "behind its Outbox"
    READY      roles serve
    DRAINING   stage by stage, as the supervisor writes them into the shared page

A drain may come in any state; what is being prepared is then cut off. SIGTERM means "look at the page"; a
SIGTERM without a stage there comes from a person and drains this worker alone, its successor is forked.
SIGHUP takes the certificate and the log level over.

The loop thread is pinned last, after every client exists: a thread keeps the mask of the thread that made it.
Ends with 0 (drained), 65/78 (a guard refused), 75 (fenced) or 70 (a role failed); the first reason counts.
"""

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop
from structlog import get_logger

from qim.clock import SystemClock
from qim.config import Config, Secret
from qim.domain.guards import Retentions
from qim.domain.placement import Placement
from qim.domain.supervisor import ChildState, Stage, stage_budget_ms
from qim.errors import ExitCode, GuardRefused, StaleOwner, StoreBroken, StoreRefused, StoreUnfit, StoreUnknown
from qim.ids import BootId, SlotId, WorkerId
from qim.limits import LOG_RETENTION_MS
from qim.logsetup import LineSink, configure_logging
from qim.metrics import Metrics
from qim.ports import SlotClaim
from qim.tokens import TokenVerifier
from workers.child import ChildContext
from workers.claims import Claims, owned_slots
from workers.control import ControlServer
from workers.failpoints import Failpoints
from workers.guards import check_outbox, check_retention
from workers.operator import worker_commands
from workers.reload import read_reload
from workers.roles import Roles
from workers.vitals import Vitals
from workers.wiring import Scripts, Stores, wire

STANDARD_ERROR: Final = 2
CONNECT_BACKOFF_SECONDS: Final = (0.1, 0.2, 0.5, 1.0, 2.0)

log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """What every worker of a service gets, made before the first fork."""

    config: Config
    placement: Placement
    scripts: Scripts
    tokens: TokenVerifier
    tls: ssl.SSLContext
    failpoints: Failpoints
    password: Secret
    supervisor: bytes
    """16 random bytes of this supervisor process."""
    cpus: tuple[int, ...]
    """One per worker; empty: nobody is pinned."""
    housekeeping: tuple[int, ...]
    """Where threads of clients may run."""
    take_over: bool


def run_worker(job: WorkerJob, worker: WorkerId, context: ChildContext) -> int:
    """The entry point of the child; returns its exit code."""
    sink = configure_logging(
        level=read_reload(job.config).level, log_format=job.config.log.format, process="worker", worker=worker
    )
    if job.cpus:
        os.sched_setaffinity(0, job.housekeeping)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Worker(job, worker, context, sink).run())


class Worker:
    """One worker process."""

    def __init__(self, job: WorkerJob, worker: WorkerId, context: ChildContext, sink: LineSink) -> None:
        self.job = job
        self.worker = worker
        self.context = context
        self.boot = BootId(os.urandom(16))
        self.clock = SystemClock()
        self.metrics = Metrics()
        self.slots = tuple(SlotId(slot) for slot in job.placement.slots_of(worker))
        self.roles: Roles | None = None
        self.claims: Claims | None = None
        self.waiting_for = ""
        """What the start waits for, in words; empty when it does not wait."""
        self._sink = sink
        self._stores: Stores | None = None
        self._away: list[str] = []
        """Servers without a connection when last looked at."""
        self._told = asyncio.Event()
        """Set when the wanted stage has changed."""
        self._wanted = Stage.NONE
        self._alone = False
        """Drains without the others, because a person signalled this process."""
        self._vitals = Vitals(
            record=context.record,
            metrics=self.metrics,
            clock=self.clock,
            on_beat=self._look_at_page,
            before_publish=self._collect_metrics,
        )

    @property
    def stores(self) -> Stores:
        """The adapters; there are none before the start has got so far."""
        if self._stores is None:
            raise StoreRefused("the stores are not connected yet")
        return self._stores

    @property
    def stores_away(self) -> list[str]:
        """Servers that are not connected now; the start says in `waiting_for` what it misses."""
        return [] if self._stores is None else self._stores.away

    @property
    def loop_lag_ms(self) -> float:
        return self._vitals.loop_lag_ms

    async def run(self) -> int:
        """Until drained or failed; returns the exit code."""
        self._vitals.start()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_terminate)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload)
        log.info("worker_started", generation=self.context.generation)
        path = Path(self.job.config.server.runtime_dir, f"control-{self.worker}.sock")
        control = ControlServer(path, worker_commands(self))
        await control.start()
        try:
            return await self._live()
        finally:
            await self._close()
            await control.close()

    async def _live(self) -> int:
        if not await self._unless_told(self._prepare()):
            self._report_all()
            return ExitCode.OK
        assert self.roles is not None
        self._set_state(ChildState.READY)
        log.info("worker_ready", slots=f"{self.slots[0]}-{self.slots[-1]}")
        if await self._unless_told(self._serve()):
            return ExitCode.FENCED
        self._set_state(ChildState.DRAINING)
        assert self.claims is not None
        # A drain may last longer than a stamp stays fresh: nobody may take the slots before it has ended.
        keeping = asyncio.ensure_future(self.claims.keep())
        try:
            await self._drain(self.roles)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        return ExitCode.OK

    # --- start ---

    async def _prepare(self) -> None:
        job = self.job
        stores = self._stores = wire(
            job.config,
            workers=job.placement.workers,
            scripts=job.scripts,
            clock=self.clock,
            metrics=self.metrics,
            password=job.password,
        )
        claims = self.claims = self._make_claims(stores)
        await self._until_stores_answer(lambda: self._admit(stores, claims))
        roles = self.roles = Roles(
            config=job.config,
            worker=self.worker,
            placement=job.placement,
            boot=self.boot,
            stores=stores,
            tokens=job.tokens,
            tls=job.tls,
            clock=self.clock,
            metrics=self.metrics,
            failpoints=job.failpoints,
        )
        if job.cpus:
            os.sched_setaffinity(0, {job.cpus[self.worker % len(job.cpus)]})
        if self.worker == 0:
            log.info("log_retention", hours=LOG_RETENTION_MS // 3_600_000)
        assert self.context.listener is not None
        listener = self.context.listener
        await roles.start(listener)

    async def _admit(self, stores: Stores, claims: Claims) -> None:
        check_retention(Retentions())
        await stores.connect()
        await stores.check()
        await claims.claim_all(self._wait_for)
        await check_outbox(
            stores=stores.commits, outbox=stores.outbox, placement=self.job.placement, slots=self.slots
        )

    def _make_claims(self, stores: Stores) -> Claims:
        job = self.job
        placement = job.placement
        claim = SlotClaim(
            slots=(),
            boot=self.boot,
            supervisor=job.supervisor,
            label=socket.gethostname(),
            placement=placement.digest(),
            take_over=job.take_over,
        )
        core = [placement.core_instance_of(slot) for slot in self.slots]
        mailbox = [placement.mailbox_instance_of(slot) for slot in self.slots]
        owned = owned_slots("core instance", stores.commits, slots=self.slots, instances=core)
        owned += owned_slots("mailbox instance", stores.mailboxes, slots=self.slots, instances=mailbox)
        return Claims(owned, claim=claim, clock=self.clock)

    async def _until_stores_answer(self, attempt: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Repeats while a store is away; raises GuardRefused and StaleOwner."""
        tries = 0
        while True:
            try:
                await attempt()
            except StaleOwner:
                raise
            except (StoreUnfit, StoreBroken) as error:
                raise GuardRefused(str(error)) from error
            except (StoreRefused, StoreUnknown) as error:
                self._wait_for(str(error))
            else:
                self._wait_for("")
                return
            await asyncio.sleep(CONNECT_BACKOFF_SECONDS[min(tries, len(CONNECT_BACKOFF_SECONDS) - 1)])
            tries += 1

    def _wait_for(self, reason: str) -> None:
        if reason and not self.waiting_for:
            log.warning("worker_waiting", reason=reason)
            self._tell_person(reason)
        self.waiting_for = reason
        self._set_state(ChildState.WAITING if reason else ChildState.STARTING)

    def _tell_person(self, reason: str) -> None:
        """A sentence beside the log line, of one worker for all, so that nobody takes waiting for hanging."""
        for_people = self.job.config.log.format == "console" or os.isatty(STANDARD_ERROR)
        if self.worker == 0 and for_people:
            sentence = (
                f"qim: waiting for a store ({reason}); serves as soon as the store answers, Ctrl-C ends it"
            )
            self._sink.write(sentence.encode())

    # --- service ---

    async def _serve(self) -> None:
        """Returns when fenced; raises when a role failed or a guard refused a server that came back."""
        assert self.roles is not None
        assert self.claims is not None
        assert self._stores is not None
        back = asyncio.Event()
        self._stores.on_connected(back.set)
        parts = [
            asyncio.ensure_future(part)
            for part in (
                self.roles.failed(), self.claims.keep(), self._recheck(back), _first(self.roles.fenced),
            )
        ]  # fmt: skip
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
            log.error("worker_fenced", reason="a store answered that a newer owner has a slot of this worker")
        finally:
            for part in parts:
                part.cancel()

    async def _recheck(self, back: asyncio.Event) -> None:
        """A server that comes back may be empty or foreign: it is asked again, then claimed again."""
        assert self._stores is not None
        assert self.claims is not None
        while True:
            await back.wait()
            back.clear()
            try:
                await self._stores.check()
                await self.claims.refresh()
            except StaleOwner:
                raise
            except (StoreRefused, StoreUnknown):
                continue

    # --- drain ---

    async def _drain(self, roles: Roles) -> None:
        done = Stage.NONE
        while done < Stage.CLOSE:
            self._told.clear()
            if done >= self._wanted:
                await self._told.wait()
                continue
            # Told to close at once, or alone and so in charge of its own order.
            hurried = self._wanted is Stage.CLOSE and not self._alone
            done = Stage.CLOSE if hurried else Stage(done + 1)
            await self._unless_hurried(self._do_stage(roles, done))
            self.context.record.report_done(done)

    async def _do_stage(self, roles: Roles, stage: Stage) -> None:
        budget_ms = stage_budget_ms(stage, self.job.config.server.drain_timeout_ms)
        deadline = self.clock.monotonic() + budget_ms / 1000
        match stage:
            case Stage.GOODBYE:
                await roles.say_goodbye(deadline)
            case Stage.ROLES:
                await roles.drain(deadline)
            case Stage.CLOSE:
                await roles.close()
                if self.claims is not None:
                    await self.claims.release()
            case _:
                pass

    async def _unless_hurried(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        in_last = self._wanted is Stage.CLOSE
        # Only the last stage may cut another one short.
        while not task.done():
            self._told.clear()
            told = asyncio.ensure_future(self._told.wait())
            await asyncio.wait({task, told}, return_when=asyncio.FIRST_COMPLETED)
            told.cancel()
            if self._wanted is Stage.CLOSE and not in_last:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return
        task.result()

    async def _close(self) -> None:
        if self.roles is not None:
            await self.roles.close()
        if self._stores is not None:
            await self._stores.close()

    # --- being told ---

    async def _unless_told(self, work: Coroutine[Any, Any, None]) -> bool:
        """Runs until done (True) or until a drain is wanted (False: what ran is cut off)."""
        task = asyncio.ensure_future(work)
        told = asyncio.ensure_future(self._told.wait())
        try:
            await asyncio.wait({task, told}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return task.done()
        finally:
            task.cancel()
            told.cancel()
            await asyncio.gather(task, told, return_exceptions=True)

    def _look_at_page(self) -> None:
        """A signal can be lost between two processes; the page cannot."""
        wanted = self.context.record.stage_wanted
        if wanted > self._wanted:
            self._wanted = wanted
            # The notice is for balancers; a worker goes on as before.
            if wanted > Stage.NOTICE:
                self._told.set()
            else:
                self.context.record.report_done(wanted)

    def _on_terminate(self) -> None:
        if self.context.record.stage_wanted is Stage.NONE:
            self._alone = True
            self._wanted = Stage.CLOSE
            self._told.set()
        self._look_at_page()

    def _on_reload(self) -> None:
        """The supervisor has checked everything that is taken over here."""
        reload = read_reload(self.job.config)
        reload.load_certificate(self.job.tls)
        self._sink = configure_logging(
            level=reload.level, log_format=self.job.config.log.format, process="worker", worker=self.worker
        )

    def _report_all(self) -> None:
        self.context.record.report_done(Stage.CLOSE)

    def _set_state(self, state: ChildState) -> None:
        self.context.record.set_state(state, now_ns=self._vitals.now_ns())

    def _collect_metrics(self) -> None:
        self.metrics.log_dropped = self._sink.dropped
        if self._stores is None:
            return
        away = self._stores.away
        for where in away:
            if where not in self._away:
                log.error("store_lost", store=where)
        for where in self._away:
            if where not in away:
                log.info("store_reached", store=where)
        self._away = away


async def _first(fenced: asyncio.Future[SlotId]) -> None:
    await asyncio.shield(fenced)

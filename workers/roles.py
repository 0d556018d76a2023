"""The roles of one worker, put together, started from the end of the pipe and drained from its head.

    start   presence, mailbox, fanout, recoverer's first pass, writer, links, gateway
    drain   gateway, then writer, fanout, mailbox, presence, links

So nothing is accepted before everything behind it runs, and nothing behind stops while something before it
may still hand over. Each role is one task for its whole life. A role that ends by an exception ends the
worker (70): a half-working worker would only look alive. A slot that a store says is no longer ours ends it
too (75).

This class owns the tasks; what they share (router, caches, tables) they got when they were made.
"""

import asyncio
import socket
import ssl
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from structlog import get_logger

from qim.clock import Clock
from qim.config import Config
from qim.domain.gateway import GatewayLimits, Rate
from qim.domain.mailbox import NOTHING_FINISHED
from qim.domain.placement import Placement
from qim.errors import StoreError
from qim.ids import BootId, SlotId, WorkerId
from qim.memberships import Memberships
from qim.metrics import Metrics
from qim.ports import CommitLog, CommitStore, MailboxStore, OneStepCommits
from qim.tokens import TokenVerifier
from workers.company import Company
from workers.failpoints import Failpoints
from workers.fanout import Fanout
from workers.gateway import Gateway
from workers.link import Links, LinkState
from workers.mailbox import Mailbox
from workers.outbound import Outbound
from workers.presence import Presence
from workers.retention import Retention
from workers.router import Router
from workers.writer import Writer

LAG_SECONDS: Final = 10.0
"""One question per partition; a lag that matters grows for minutes."""

log = get_logger()


class RoleStores(Protocol):
    """What the roles need of `wiring.Stores`; the simulation brings its own, on memory adapters."""

    @property
    def commits(self) -> Sequence[CommitStore]: ...

    @property
    def memberships(self) -> Sequence[Memberships]: ...

    @property
    def mailboxes(self) -> Sequence[MailboxStore]: ...

    @property
    def one_step(self) -> Mapping[int, OneStepCommits]: ...

    @property
    def outbox(self) -> CommitLog: ...

    @property
    def dispatch(self) -> CommitLog: ...


class Roles:
    """Everything of one worker that serves messages."""

    def __init__(
        self,
        *,
        config: Config,
        worker: WorkerId,
        placement: Placement,
        boot: BootId,
        stores: RoleStores,
        tokens: TokenVerifier,
        tls: ssl.SSLContext | None,
        clock: Clock,
        metrics: Metrics,
        failpoints: Failpoints,
    ) -> None:
        self._config = config
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False
        self.fenced: asyncio.Future[SlotId] = asyncio.get_running_loop().create_future()
        """Gets the slot that this process must not serve any more."""
        slots = tuple(SlotId(slot) for slot in placement.slots_of(worker))
        outbound = Outbound(asyncio.get_running_loop())
        router = Router(worker=worker, placement=placement, clock=clock, metrics=metrics)
        self.gateway = Gateway(
            router=router,
            tokens=tokens,
            clock=clock,
            outbound=outbound,
            bounds=gateway_limits(config),
            metrics=metrics,
            tls=tls,
        )
        self.presence = Presence(placement=placement, mailboxes=stores.mailboxes, answers=router)
        common: dict[str, Any] = {
            "placement": placement, "clock": clock, "metrics": metrics, "failpoints": failpoints,
            "on_fatal": self._on_fatal, "company": Company(clock),
        }  # fmt: skip
        self.writer = Writer(
            worker=worker,
            stores=stores.commits,
            memberships=stores.memberships,
            one_step=stores.one_step,
            outbox=stores.outbox,
            **common,
        )
        logs: dict[str, Any] = {"outbox": stores.outbox, "dispatch": stores.dispatch}
        self.fanout = Fanout(
            slots=slots, stores=stores.commits, memberships=stores.memberships, **logs, **common
        )
        self.mailbox = Mailbox(
            slots=slots,
            stores=stores.mailboxes,
            dispatch=stores.dispatch,
            presence=self.presence,
            pusher=router,
            **common,
        )
        # A pair's lower number dials; the highest worker is only dialled.
        self._dials = worker < placement.workers - 1
        self.links = self._make_links(worker, placement, boot, outbound, router)
        router.bind(
            gateway=self.gateway,
            presence=self.presence,
            writer=self.writer,
            mailbox=self.mailbox,
            links=self.links,
        )
        self._cursors = Cursors(slots=slots, roles=self, stores=stores, metrics=metrics, clock=clock)

    def _make_links(
        self, worker: WorkerId, placement: Placement, boot: BootId, outbound: Outbound, router: Router
    ) -> Links | None:
        if placement.workers == 1:
            return None
        return Links(
            worker=worker,
            workers=placement.workers,
            placement=placement.digest(),
            boot=boot,
            runtime_dir=Path(self._config.server.runtime_dir),
            outbound=outbound,
            user=router,
        )

    # --- start ---

    async def start(self, listener: socket.socket) -> None:
        """Serves when this returns. `listener` is the bound public socket."""
        self._begin("presence", self.presence.run())
        self._begin("mailbox", self.mailbox.run())
        self._begin("fanout", self.fanout.run())
        # Finished or not: what it could not finish stays pending and delays only its own conversations.
        await self.writer.recover_once(older_than_ms=0)
        self._begin("writer", self.writer.run())
        self._begin("cursors", self._cursors.run())
        if self.links is not None:
            await self.links.listen()
            if self._dials:
                self._begin("links", self.links.run())
        self._begin("gateway", self.gateway.run())
        await self.gateway.listen(
            listener,
            backlog=self._config.gateway.backlog,
            handshake_timeout_ms=self._config.gateway.handshake_timeout_ms,
        )

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work, name=name))

    async def failed(self) -> None:
        """Returns never while all is well; raises what ended a role. Ends quietly once drained."""
        pending = set(self._tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = None if task.cancelled() else task.exception()
                if error is not None:
                    log.error("role_stopped", role=task.get_name(), exc_info=error)
                    raise error
                assert self._draining or task.cancelled(), f"role {task.get_name()} ended by itself"

    def _on_fatal(self, slot: SlotId) -> None:
        if not self.fenced.done():
            self.fenced.set_result(slot)

    # --- drain ---

    async def say_goodbye(self, deadline: float) -> None:
        """Accepts nothing more and asks the clients to come back later."""
        self._draining = True
        await self.gateway.drain(deadline)

    async def drain(self, deadline: float) -> None:
        """After this nothing accepted is unfinished, or the deadline (monotonic seconds) has come."""
        self._draining = True
        await self.writer.drain(deadline)
        await self.fanout.drain(deadline)
        await self.mailbox.drain(deadline)
        await self.presence.drain(deadline)

    async def close(self) -> None:
        """Ends what still runs."""
        self._draining = True
        if self.links is not None:
            await self.links.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def not_ready(self) -> Mapping[str, str]:
        """Why this worker cannot serve everything, by what is missing."""
        if self.links is None:
            return {}
        return {
            f"link to worker {peer}": state.value
            for peer, state in self.links.health.items()
            if state is not LinkState.UP
        }


class Cursors:
    """What follows the two logs of a worker from outside the message path: the trimmers and the lag."""

    def __init__(
        self, *, slots: tuple[SlotId, ...], roles: Roles, stores: RoleStores, metrics: Metrics, clock: Clock
    ) -> None:
        self._slots = slots
        self._metrics = metrics
        self._roles = roles
        self._stores = stores
        self._trimmers = [
            Retention(
                name="outbox",
                slots=slots,
                commit_log=stores.outbox,
                positions=lambda: roles.fanout.positions,
                clock=clock,
            ),
            Retention(
                name="dispatch",
                slots=slots,
                commit_log=stores.dispatch,
                positions=lambda: roles.mailbox.positions,
                clock=clock,
            ),
        ]

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for trimmer in self._trimmers:
                tasks.create_task(trimmer.run())
            while True:
                await asyncio.sleep(LAG_SECONDS)
                await self._measure()

    async def _measure(self) -> None:
        metrics, roles = self._metrics, self._roles
        metrics.mailbox_queue = roles.mailbox.queued
        try:
            outbox = await self._stores.outbox.watermarks(self._slots)
            dispatch = await self._stores.dispatch.watermarks(self._slots)
        except StoreError:
            # The last numbers stay; that a store is away is said elsewhere.
            return
        dispatched, delivered = roles.fanout.positions, roles.mailbox.positions
        for slot in self._slots:
            # A partition that cannot be read is told of as stopped; its last number stays.
            if slot in outbox:
                position = dispatched.get(slot, NOTHING_FINISHED)
                metrics.fanout_lag[slot] = outbox[slot].behind(position)
            if slot in dispatch:
                position = delivered.get(slot, NOTHING_FINISHED)
                metrics.mailbox_lag[slot] = dispatch[slot].behind(position)


def gateway_limits(config: Config) -> GatewayLimits:
    """The bounds that an operator may set, as the gateway takes them."""
    gateway, bounds = config.gateway, config.limits
    return GatewayLimits(
        connections_max=gateway.connections_max,
        auth_timeout_ms=gateway.auth_timeout_ms,
        ping_interval_ms=gateway.ping_interval_ms,
        silence_ms_max=gateway.silence_ms_max,
        unanswered_requests_max=bounds.unanswered_requests_max,
        unsent_bytes_max=bounds.unsent_bytes_max,
        sends=Rate(bounds.sends_per_second, bounds.sends_burst),
        failed_logins=Rate(bounds.failed_logins_per_second, bounds.failed_logins_burst),
    )

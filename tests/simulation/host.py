"""A worker process of the simulation: the real roles, links and gateway on stores behind faulty pipes.

It starts, serves, is fenced, drains and ends as `workers/worker.py` does it, without signals, shared pages
and start-up guards of settings. Each start is another boot on new connections; what the one before still had
on its way to a server may arrive later.
"""

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final, NamedTuple, Protocol

from qim.adapters.commitlog_memory import MemoryCommitLog
from qim.adapters.commits_memory import CommitState, MemoryCommitStore
from qim.adapters.commits_one_step_memory import MemoryOneStepCommits
from qim.adapters.mailbox_memory import MailboxState, MemoryMailboxStore
from qim.adapters.membership_memory import MemoryMemberships
from qim.clock import Clock
from qim.config import Config
from qim.domain.placement import Placement, slot_of_bucket
from qim.errors import StaleOwner, StoreRefused, StoreUnknown
from qim.ids import BootId, Millis, Offset, SlotId, WorkerId
from qim.metrics import Metrics
from qim.ports import (
    Commit,
    CommitResult,
    Committed,
    MailboxWrite,
    Reservation,
    ReserveResult,
    SlotClaim,
)
from qim.tokens import Identity
from tests.simulation.faults import FaultyLog, FaultyPort, Pipe, Rates, SentEpochs, Server
from tests.simulation.loop import Process, VirtualLoop
from workers.claims import Claims, owned_slots
from workers.failpoints import Failpoints
from workers.guards import check_outbox
from workers.link import Links
from workers.roles import Roles

DRAIN_SECONDS: Final = 8.0
RETRY_SECONDS: Final = 0.1
CONFIG: Final = Config()


class LoopClock:
    """The clock of one host: virtual time, and a wall clock that may be wrong."""

    def __init__(self, loop: VirtualLoop, *, start_ms: int, wrong_by_ms: int = 0) -> None:
        self._loop = loop
        self._start_ms = start_ms
        self.wrong_by_ms = wrong_by_ms

    def now_ms(self) -> Millis:
        return Millis(self._start_ms + self.wrong_by_ms + int(self._loop.time() * 1000))

    def monotonic(self) -> float:
        return self._loop.time()


class Verifier:
    """Knows the tokens of the simulation's devices; signatures are not its subject."""

    def __init__(self, identities: dict[str, Identity]) -> None:
        self._identities = identities

    def verify(self, token: str) -> Identity:
        return self._identities[token]


class WatchedLog(MemoryCommitLog):
    """A log that remembers when each record became durable."""

    def __init__(self, clock: Clock, loop: VirtualLoop) -> None:
        super().__init__(clock)
        self._loop = loop
        self.durable_at: dict[tuple[SlotId, Offset], float] = {}

    def store(self, records: Sequence[tuple[SlotId, bytes]]) -> list[Offset]:
        offsets = super().store(records)
        for (partition, _data), offset in zip(records, offsets, strict=True):
            self.durable_at[partition, offset] = self._loop.time()
        return offsets


class Overstep(Protocol):
    """Told of a write that took effect although its writer no longer owned the slot."""

    def __call__(self, what: str, slot: SlotId) -> None: ...


class WatchedCommits(SentEpochs, MemoryCommitStore):
    """Looks at the table of owners by itself: what an epoch check lets through is not its word."""

    def __init__(self, clock: Clock, state: CommitState, boot: BootId, overstep: Overstep) -> None:
        super().__init__(clock, state)
        self._boot = boot
        self._overstep = overstep

    def allocate(self, item: Reservation) -> ReserveResult:
        self._look("a reservation", slot_of_bucket(item.key.bucket))
        return super().allocate(item)

    def mark_one(self, item: Commit, now: Millis) -> CommitResult:
        result = super().mark_one(item, now)
        if result.outcome is Committed.COMMITTED:
            self._look("a commit", slot_of_bucket(item.key.bucket))
        return result

    def _look(self, what: str, slot: SlotId) -> None:
        owner = self._owners.get(slot)
        if owner is None or owner.boot != self._boot:
            self._overstep(what, slot)


class WatchedMailboxes(SentEpochs, MemoryMailboxStore):
    """The same for the watermarks."""

    def __init__(self, clock: Clock, state: MailboxState, boot: BootId, overstep: Overstep) -> None:
        super().__init__(clock, state)
        self._boot = boot
        self._overstep = overstep

    def _move(self, write: MailboxWrite) -> None:
        owner = self._owners.get(write.slot)
        if owner is None or owner.boot != self._boot:
            self._overstep("a move of W", write.slot)
        super()._move(write)


class Servers(NamedTuple):
    """Everything durable: instances and logs, and the server that each of them lives on."""

    commits: list[CommitState]
    mailboxes: list[MailboxState]
    outbox: WatchedLog
    dispatch: MemoryCommitLog
    core_servers: list[Server]
    mailbox_servers: list[Server]
    log_server: Server

    @property
    def all(self) -> list[Server]:
        return list(dict.fromkeys([*self.core_servers, *self.mailbox_servers, self.log_server]))


class Stores:
    """The stores of one process, as `RoleStores` wants them."""

    def __init__(self, servers: Servers, setting: "Setting", rates: Rates, boot: BootId) -> None:
        clock, rng = setting.store_clock, setting.rng
        self.pipes = {server: Pipe(setting.loop, server, rng, rates) for server in servers.all}
        commits = [WatchedCommits(clock, state, boot, setting.overstep) for state in servers.commits]
        self.commits: Sequence[Any] = [
            FaultyPort(store, self.pipes[server], owner=store)
            for store, server in zip(commits, servers.core_servers, strict=True)
        ]
        self.memberships: Sequence[Any] = [
            FaultyPort(MemoryMemberships(store), self.pipes[server], owner=store)
            for store, server in zip(commits, servers.core_servers, strict=True)
        ]
        self.one_step: dict[int, Any] = {
            number: FaultyPort(
                MemoryOneStepCommits(store, servers.outbox), self.pipes[servers.log_server], owner=store
            )
            for number, store in enumerate(commits)
            if setting.one_step and servers.core_servers[number] is servers.log_server
        }
        mailboxes = [WatchedMailboxes(clock, state, boot, setting.overstep) for state in servers.mailboxes]
        self.mailboxes: Sequence[Any] = [
            FaultyPort(store, self.pipes[server], owner=store)
            for store, server in zip(mailboxes, servers.mailbox_servers, strict=True)
        ]
        log_pipe = self.pipes[servers.log_server]
        self.outbox: Any = FaultyLog(servers.outbox, log_pipe, rng)
        self.dispatch: Any = FaultyLog(servers.dispatch, log_pipe, rng)


class LoopLinks(Links):
    """Links over the network in memory: no file is made or removed."""

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._accepted, path=str(self._path(self._worker)))

    async def close(self) -> None:
        self._closing.set()
        self.outbound.flush()
        if self._server is not None:
            self._server.close()
        for stream in [*self._unnamed, *self._streams.values()]:
            stream.close()


class LoopRoles(Roles):
    """The roles with these links."""

    def _make_links(self, *args: Any) -> Links | None:
        links = super()._make_links(*args)
        if links is not None:
            links.__class__ = LoopLinks
        return links


class Setting(NamedTuple):
    """What all processes of a run share."""

    loop: VirtualLoop
    placement: Placement
    servers: Servers
    rng: Random
    verifier: Verifier
    store_clock: Clock
    one_step: bool
    overstep: Overstep
    note: Callable[[str, str], None]
    ended: "Callable[[Host], None]"
    """Told by a process that exits: nothing of it may run any more."""


class Host:
    """One boot of one worker."""

    def __init__(self, setting: Setting, worker: WorkerId, number: int, clock: Clock, rates: Rates) -> None:
        self.worker = worker
        self.process = Process(f"worker-{worker}.{number}")
        self._boot = BootId(number.to_bytes(16, "big"))
        self.stores = Stores(setting.servers, setting, rates, self._boot)
        self.roles: LoopRoles | None = None
        self.is_serving = False
        self.is_draining = False
        self.has_ended = False
        self.ended_by = ""
        self.mistake: Exception | None = None
        self.metrics = Metrics()
        self._setting = setting
        self._clock = clock
        self._claims: Claims | None = None
        self._back = asyncio.Event()
        for pipe in self.stores.pipes.values():
            pipe.on_connected.append(self._on_back)

    def _on_back(self) -> None:
        if self.process.is_alive:
            self._setting.loop.call_soon(self._back.set, context=self.process.context)

    def start(self) -> None:
        self._setting.loop.spawn(self.process, self._live(), name=self.process.name)

    async def _live(self) -> None:
        try:
            await self._prepare()
            self.is_serving = True
            self._setting.note(self.process.name, "serves")
            await self._serve()
            if self.is_draining:
                return
            self.ended_by = "fenced"
        except StaleOwner as error:
            self.ended_by = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - the top of a process: a mistake of ours is a finding
            self.ended_by = repr(error)
            self.mistake = error
        self.is_serving = False
        self.has_ended = True
        self._setting.note(self.process.name, self.ended_by)
        self._setting.ended(self)

    async def _prepare(self) -> None:
        setting = self._setting
        slots = tuple(SlotId(slot) for slot in setting.placement.slots_of(self.worker))
        claims = self._claims = self._make_claims(slots)
        while True:
            try:
                await claims.claim_all(lambda _reason: None)
                await check_outbox(
                    stores=self.stores.commits, outbox=self.stores.outbox, placement=setting.placement,
                    slots=slots,
                )  # fmt: skip
                roles = self._make_roles()
                listener: Any = None
                await roles.start(listener)
            except StaleOwner:
                raise
            except (StoreRefused, StoreUnknown):
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self.roles = roles
                return

    def _make_claims(self, slots: tuple[SlotId, ...]) -> Claims:
        placement = self._setting.placement
        claim = SlotClaim((), self._boot, b"one supervisor..", "simulation", placement.digest())
        core = [placement.core_instance_of(slot) for slot in slots]
        mailbox = [placement.mailbox_instance_of(slot) for slot in slots]
        owned = owned_slots("core", self.stores.commits, slots=slots, instances=core)
        owned += owned_slots("mailbox", self.stores.mailboxes, slots=slots, instances=mailbox)
        return Claims(owned, claim=claim, clock=self._clock)

    def _make_roles(self) -> LoopRoles:
        tokens: Any = self._setting.verifier
        return LoopRoles(
            config=CONFIG, worker=self.worker, placement=self._setting.placement, boot=self._boot,
            stores=self.stores, tokens=tokens, tls=None, clock=self._clock, metrics=self.metrics,
            failpoints=Failpoints(),
        )  # fmt: skip

    async def _serve(self) -> None:
        """Returns when fenced; raises what ended a role."""
        assert self.roles is not None
        assert self._claims is not None
        fenced: asyncio.Future[SlotId] = self.roles.fenced
        parts: list[asyncio.Future[Any]] = [
            fenced,
            asyncio.ensure_future(self.roles.failed()),
            asyncio.ensure_future(self._claims.keep()),
            asyncio.ensure_future(self._recheck()),
        ]
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for part in done:
            part.result()

    async def _recheck(self) -> None:
        assert self._claims is not None
        while True:
            await self._back.wait()
            self._back.clear()
            try:
                await self._claims.refresh()
            except StaleOwner:
                raise
            except (StoreRefused, StoreUnknown):
                continue

    async def drain(self) -> None:
        """As the supervisor asks for it, stage by stage."""
        roles, claims = self.roles, self._claims
        if roles is None or claims is None:
            return
        self.is_draining = True
        deadline = self._clock.monotonic() + DRAIN_SECONDS
        await roles.say_goodbye(deadline)
        await roles.drain(deadline)
        await roles.close()
        await claims.release()
        self.has_ended = True
        self.ended_by = "drained"

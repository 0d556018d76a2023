"""One schedule as a world: servers, workers, devices, what they do, what strikes them, and the end of it.

The world itself belongs to no process. It starts and ends processes, strikes at the planned moments, heals
everything, waits until nothing moves any more, lets every device read everything once more, and dumps the
stores. It judges nothing but liveness: what must become quiet does so within a bounded virtual time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from random import Random
from typing import Final, NamedTuple, TypeVar

from qim.adapters.commitlog_memory import MemoryCommitLog
from qim.adapters.commits_memory import CommitState
from qim.adapters.mailbox_memory import MailboxState, MemoryMailboxStore
from qim.client.errors import SdkError, StoreError
from qim.domain.fanout import shard_of
from qim.domain.placement import Placement
from qim.ids import DeviceId, MailboxSeq, Millis, SlotId, UserId, WorkerId
from qim.limits import SLOTS
from qim.tokens import Identity
from tests.simulation.device import Client, CommitFaults, LoopStore, build_token, open_database
from tests.simulation.dump import sample
from tests.simulation.faults import WORLD, Pipe, Rates, Server
from tests.simulation.host import Host, LoopClock, Servers, Setting, Verifier, WatchedLog
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.network import Network, Weather
from tests.simulation.recording import Book, Wire
from tests.simulation.schedule import TENANT, Act, Plan
from tests.simulation.strikes import strike

T = TypeVar("T")

ALL_SLOTS: Final = tuple(SlotId(slot) for slot in range(SLOTS))
QUIET_SECONDS_MAX: Final = 180.0
POLL_SECONDS: Final = 0.5
RESTART_SECONDS: Final = 0.2


class NotQuiet(Exception):
    """After everything healed, something still moves, or waits in vain."""


class Placed(NamedTuple):
    """A device of the plan."""

    number: int
    user: UserId
    device: DeviceId


class Device:
    """A database and the process that works on it now."""

    def __init__(self, world: "World", placed: Placed) -> None:
        self.placed = placed
        self.database = open_database(placed.device, ordinal=1 + placed.number * 1_000)
        self.faults = CommitFaults(world.rng, world.plan.commit_failures)
        self.client: Client | None = None
        self.process: Process | None = None
        self.boots = 0
        self.waiting: list[Act] = []
        """What its user wanted while it was off."""


def build_servers(plan: Plan, clock: LoopClock, loop: VirtualLoop) -> Servers:
    count = 2 if plan.topology == "instances" else 1
    together = [Server("store")]
    core = together if plan.topology == "together" else [Server(f"core-{at}") for at in range(count)]
    mailbox = together if plan.topology == "together" else [Server(f"mailbox-{at}") for at in range(count)]
    return Servers(
        commits=[CommitState() for _ in range(count)], mailboxes=[MailboxState() for _ in range(count)],
        outbox=WatchedLog(clock, loop), dispatch=MemoryCommitLog(clock), core_servers=core,
        mailbox_servers=mailbox, log_server=together[0] if plan.topology == "together" else Server("log"),
    )  # fmt: skip


class World:
    """See the module docstring."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.loop = VirtualLoop()
        self.rng = Random(plan.run_seed)
        self.store_clock = LoopClock(self.loop, start_ms=plan.start_ms)
        self.clocks = [
            LoopClock(self.loop, start_ms=plan.start_ms, wrong_by_ms=wrong) for wrong in plan.wrong_clocks_ms
        ]
        self.net = Network(self.loop, self.rng)
        self.net.client_weather = Weather(0.000_2, plan.client_delay)
        self.net.slice_share = plan.slice_share
        self.loop.network = self.net
        self.servers = build_servers(plan, self.store_clock, self.loop)
        self.book = Book(self.loop.time)
        self.trace: list[str] = []
        self.users = [UserId(f"user-{at}-0123456789"[:16].encode()) for at in range(plan.users)]
        self.processes: list[Process] = []
        self.hosts: list[Host | None] = [None] * plan.workers
        self.retired: list[Host] = []
        self.devices = self._place_devices()
        self.mistakes: list[str] = []
        self.struck: dict[str, int] = {}
        self.is_healed = False
        self.rates = plan.rates
        self._boots = 0
        count = len(self.servers.commits)
        self.setting = Setting(
            loop=self.loop, placement=Placement(plan.workers, count, count), servers=self.servers,
            rng=self.rng, verifier=self._verifier(), store_clock=self.store_clock, one_step=plan.one_step,
            overstep=self._overstep, note=self.note, ended=self._on_exit,
        )  # fmt: skip

    def _place_devices(self) -> list[Device]:
        return [
            Device(self, Placed(at, self.users[user], DeviceId(f"device-{at}-0123456789"[:16].encode())))
            for at, user in enumerate(self.plan.devices)
        ]

    def _verifier(self) -> Verifier:
        far = Millis(self.plan.start_ms * 2)
        return Verifier(
            {
                build_token(TENANT, each.placed.user, each.placed.device): Identity(
                    TENANT, each.placed.user, each.placed.device, far
                )
                for each in self.devices
            }
        )

    def note(self, who: str, what: str) -> None:
        self.trace.append(f"{self.loop.time():12.6f} {who}: {what}")

    def _overstep(self, what: str, slot: SlotId) -> None:
        self.mistakes.append(f"fencing: {what} on slot {slot} by a process that does not own it any more")

    # --- processes -----------------------------------------------------------------------------------

    def start_worker(self, worker: int) -> None:
        self._boots += 1
        host = Host(self.setting, WorkerId(worker), self._boots, self.clocks[worker], self.rates)
        self.hosts[worker] = host
        self.processes.append(host.process)
        host.start()

    def _on_exit(self, host: Host) -> None:
        if host.mistake is not None:
            self.mistakes.append(f"{host.process.name} raised {host.mistake!r}")
        self.loop.call_soon(self.end_worker, host, context=WORLD)

    def end_worker(self, host: Host, *, arriving: Mapping[Pipe, int] | None = None) -> None:
        """Its process is gone; what it had on its way may still arrive at the stores.

        `arriving`: how many commands of a pipe do; of the others chance decides.
        """
        if not host.process.is_alive:
            return
        self.note(host.process.name, "ends")
        self.loop.kill(host.process)
        self.net.drop_process(host.process)
        for pipe in host.stores.pipes.values():
            executed = (arriving or {}).get(pipe, self.rng.randint(0, 3))
            pipe.cut(executed=executed, late_by=self.rng.choice((0.0, 0.01, 2.0)), back_after=1e9)

    def start_device(self, device: Device) -> None:
        device.boots += 1
        placed = device.placed
        process = Process(f"device-{placed.number}.{device.boots}")
        device.process = process
        self.processes.append(process)
        self.net.observers[process] = Wire(self.book, process.name, TENANT, placed.user, placed.device.hex())
        task = self.loop.spawn(process, self._live(device), name=process.name)
        task.add_done_callback(self._on_task_done, context=WORLD)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.mistakes.append(f"{task.get_name()} raised {error!r}")

    async def _live(self, device: Device) -> None:
        placed = device.placed
        clock = LoopClock(self.loop, start_ms=self.plan.start_ms)
        store = LoopStore(device.database, me=placed.user, clock=clock, faults=device.faults)
        token = build_token(TENANT, placed.user, placed.device)
        client = Client(store, token, clock=clock, rng=self.rng)
        try:
            await client.begin()
        except StoreError as error:
            # An application that cannot open its store tries again; whatever else ends it is a finding.
            self.note(f"device-{placed.number}", str(error))
            self.loop.call_later(RESTART_SECONDS, self._begin_again, device, context=WORLD)
            return
        except SdkError as error:
            self.mistakes.append(f"device {placed.number} could not begin: {error!r}")
            return
        device.client = client
        waiting, device.waiting = device.waiting, []
        for act in waiting:
            await self._do(device, client, act)

    def _begin_again(self, device: Device) -> None:
        self.kill_device(device)
        self.start_device(device)

    def kill_device(self, device: Device) -> None:
        process, device.process, device.client = device.process, None, None
        if process is not None:
            self.note(process.name, "is killed")
            self.loop.kill(process)
            self.net.drop_process(process)
            if device.database.in_transaction:
                device.database.execute("ROLLBACK")

    # --- what users do -------------------------------------------------------------------------------

    def act(self, act: Act) -> None:
        device = self.devices[act.device]
        if device.client is None or device.process is None:
            device.waiting.append(act)
            return
        work = self._do(device, device.client, act)
        task = self.loop.spawn(device.process, work, name=f"act {act.what}")
        task.add_done_callback(self._on_task_done, context=WORLD)

    async def _do(self, device: Device, client: Client, act: Act) -> None:
        peer = self.users[act.peer]
        try:
            match act.what:
                case "send" | "burst":
                    for number in range(act.times):
                        await client.queue(peer, f"{act.at:.6f} {act.device} {number}")
                case "read":
                    known = await client.messages(peer, limit=1)
                    await client.mark_read(peer, known[-1].conversation_seq if known else 0)
                case _:
                    await client.history(peer, limit=self.rng.choice((1, 3, 300)))
        except SdkError as error:
            self.note(f"device-{device.placed.number}", f"{act.what} gave {type(error).__name__}")

    # --- the run -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ends when everything is quiet and dumped; raises NotQuiet when it does not become so."""
        await self._begin()
        for act in self.plan.acts:
            self.loop.call_at(act.at, self.act, act)
        for one in self.plan.strikes:
            self.loop.call_at(one.at, strike, self, one)
        self.loop.call_later(0.1, self._watch)
        self.loop.call_later(0.1, self._sample)
        await self._sleep(self.plan.seconds)
        self._heal()
        await self._until_quiet()
        await self._read_everything()

    async def _begin(self) -> None:
        identity = await self.servers.dispatch.identity()
        for state in self.servers.mailboxes:
            bases = dict.fromkeys(ALL_SLOTS, MailboxSeq(1))
            await MemoryMailboxStore(self.store_clock, state).initialise_shards(bases, identity)
        for worker in range(self.plan.workers):
            self.start_worker(worker)
        for device in self.devices:
            self.loop.call_later(self.rng.uniform(0, 0.3), self.start_device, device)

    async def _sleep(self, seconds: float) -> None:
        waiter = self.loop.create_future()
        self.loop.call_later(seconds, waiter.set_result, None)
        await waiter

    def _watch(self) -> None:
        """The supervisor: a worker that ended is started again."""
        for worker, host in enumerate(self.hosts):
            if host is not None and host.has_ended:
                self.end_worker(host)
                self.hosts[worker] = None
                self.loop.call_later(RESTART_SECONDS, self.start_worker, worker)
        for host in self.retired:
            if host.has_ended and host.process.is_alive:
                self.end_worker(host)
        self.loop.call_later(0.1, self._watch)

    def _sample(self) -> None:
        if not self.is_healed:
            self.book.write(sample(self))
            self.loop.call_later(0.1, self._sample)

    def _heal(self) -> None:
        self.is_healed = True
        self.note("world", "heals")
        self.rates = Rates()
        for server in self.servers.all:
            server.stopped_until = min(server.stopped_until, self.loop.time())
            server.down_until = min(server.down_until, self.loop.time())
            for pipe in server.pipes:
                pipe.rates = self.rates
        self.net.unreachable.clear()
        for device in self.devices:
            device.faults.share = 0.0
            if device.process is None:
                self.start_device(device)
        for host in [*self.hosts, *self.retired]:
            if host is not None and host.process.is_paused:
                self.loop.resume(host.process)

    async def _until_quiet(self) -> None:
        deadline = self.loop.time() + QUIET_SECONDS_MAX
        while (why := self._moving()) or self._is_early():
            if self.loop.time() > deadline:
                raise NotQuiet(why)
            await self._sleep(POLL_SECONDS)

    def _is_early(self) -> bool:
        return self.loop.time() < self.plan.seconds + POLL_SECONDS

    def _moving(self) -> str:
        """What is not at its end yet."""
        for worker, host in enumerate(self.hosts):
            if host is None or not host.is_serving or host.is_draining:
                return f"worker {worker} does not serve"
        for host in self.retired:
            if host.process.is_alive:
                return f"{host.process.name} lives on, although its slots have another owner"
        for device in self.devices:
            client = device.client
            if client is None:
                return f"device {device.placed.number} has not begun"
            if client.engine.fatal is not None:
                raise NotQuiet(f"device {device.placed.number} ended: {client.engine.fatal!r}")
            if not client.is_quiet:
                return f"device {device.placed.number} is not quiet"
            if client.engine.work._chain.cursor < self.newest_of(device.placed.user):
                return f"device {device.placed.number} has not read everything"
        return self._stores_moving()

    def _stores_moving(self) -> str:
        if pending := sum(len(state.pending) for state in self.servers.commits):
            return f"{pending} messages are RECORDED and not COMMITTED"
        for slot in ALL_SLOTS:
            instance = self.setting.placement.core_instance_of(slot)
            stored = self.servers.commits[instance].positions.get("fanout", {}).get(slot, -1)
            if stored + 1 < self.servers.outbox.partition(slot).high:
                return f"Outbox partition {slot} is dispatched up to {stored} only"
            shard = self.servers.mailboxes[self.setting.placement.mailbox_instance_of(slot)].shards[slot]
            if shard.watermark < shard.base - 1 + self.servers.dispatch.partition(slot).high and (
                self.servers.dispatch.partition(slot).high
            ):
                return f"shard {slot} is finished up to {shard.watermark} only"
        return ""

    def newest_of(self, user: UserId) -> int:
        """The newest entry of a user that may be seen."""
        slot = shard_of(TENANT, user)
        state = self.servers.mailboxes[self.setting.placement.mailbox_instance_of(slot)]
        w = state.shards[slot].watermark
        entries = (seq for name, box in state.boxes.items() if name.user == user for seq in box.values())
        return max((seq for seq in entries if seq <= w), default=0)

    async def _read_everything(self) -> None:
        """Every device's user reads every conversation once more, through the SDK."""
        self.book.is_final = True
        reads = [
            self.loop.spawn(process, self._read_all(device, client), name="final reads")
            for device in self.devices
            if (process := device.process) is not None and (client := device.client) is not None
        ]
        for read in reads:
            try:
                await read
            except SdkError as error:
                raise NotQuiet(f"a read after everything healed gave {error!r}") from error

    async def _read_all(self, device: Device, client: Client) -> None:
        for peer in self.users:
            if peer != device.placed.user:
                before = 0
                while True:
                    page = await self._patiently(partial(client.history, peer, before=before, limit=300))
                    if not page.more or not page.messages:
                        break
                    before = page.messages[0].conversation_seq
                await self._patiently(partial(client.mark_read, peer, 0))

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """A connection may still be about to end: who asks then asks again, as an application does."""
        deadline = self.loop.time() + QUIET_SECONDS_MAX
        while True:
            try:
                return await ask()
            except SdkError:
                if self.loop.time() > deadline:
                    raise
                await asyncio.sleep(POLL_SECONDS)


__all__ = ["NotQuiet", "World"]

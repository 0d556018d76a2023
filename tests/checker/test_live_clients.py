"""The client processes of a live run from outside: none ends unnoticed, and none is left behind."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import psutil
import pytest
from rich.console import Console
from rich.progress import Progress

from qim.ids import UserId
from tests.checker import live_faults
from tests.checker.history import Recorder
from tests.checker.live import _load
from tests.checker.live_clients import CLIENT_PROCESSES, Clients, Plan
from tests.checker.live_faults import Faults
from tests.checker.live_memory import ClientOrder
from tests.checker.live_stores import LiveStores
from tests.services.dev_server import DevServer, User
from tests.waiting import eventually, happens, stays

PLAN = Plan(seconds=2.0, seed=7, rate=10.0, kill_every=0.01, workers=1)


class SilentServer:
    """Has users, and no process that could be asked."""

    port = 1
    certificate = Path("certificate.pem")

    def __init__(self, store_pid: int = 0) -> None:
        self._store_pid = store_pid

    def new_user(self) -> User:
        return User(UserId(os.urandom(16)), "token")

    def status(self) -> None:
        return None

    def store_pid(self) -> int:
        return self._store_pid


class IdleStores:
    async def sample_until(self, stop: asyncio.Event) -> None:
        await stop.wait()


class SleepingClients(Clients):
    """Processes that do nothing; the start of a successor is held up."""

    def __init__(self, folder: Path) -> None:
        super().__init__(cast(DevServer, SilentServer()), folder, PLAN)
        self.started: list[asyncio.subprocess.Process] = []
        self.is_between = False
        """A victim is dead, and its successor not there yet."""
        self.let_go = asyncio.Event()

    async def _start(self, order: ClientOrder) -> asyncio.subprocess.Process:
        if len(self.started) >= CLIENT_PROCESSES:
            self.is_between = True
            await self.let_go.wait()
        self.started.append(await asyncio.create_subprocess_exec("sleep", "600"))
        return self.started[-1]

    def check(self) -> None:
        super().check()
        assert not self.is_between, "something went wrong meanwhile"

    async def end_all(self) -> None:
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@pytest.fixture
async def clients(tmp_path: Path) -> AsyncIterator[SleepingClients]:
    clients = SleepingClients(tmp_path)
    yield clients
    await clients.end_all()


def _is_dead(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def test_a_victim_has_a_successor(clients: SleepingClients) -> None:
    clients.let_go.set()
    await clients.start()
    victim = clients.started[1]
    await clients.kill(1)
    assert victim.returncode == -signal.SIGKILL
    assert clients.pids["client-1"] == clients.started[3].pid
    assert clients.orders[1].process == "client-1.1"


@pytest.mark.parametrize("is_noticed", [False, True])
async def test_one_that_ended_by_itself_just_before_it_was_killed_ends_the_run(
    clients: SleepingClients, *, is_noticed: bool
) -> None:
    clients.let_go.set()
    await clients.start()
    victim = clients.started[1]
    os.kill(victim.pid, signal.SIGTERM)  # the end of its own: not by the kill
    if is_noticed:
        await victim.wait()
    else:
        eventually(lambda: _is_dead(victim.pid), what="it ended, and the loop has not heard of it")
    # 255: the kill itself has collected the dead child, so that nobody else learns its code any more.
    with pytest.raises(AssertionError, match=r"ended with (-15|255) before it was killed"):
        await clients.kill(1)
    assert len(clients.started) == CLIENT_PROCESSES


async def test_a_run_that_fails_while_a_successor_is_started_leaves_no_process_behind(
    clients: SleepingClients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_faults, "FAULTS", ("kill client",))
    monkeypatch.setattr(live_faults, "WEIGHTS", (1,))
    server, stores = cast(DevServer, SilentServer()), cast(LiveStores, IdleStores())
    others = asyncio.all_tasks()
    with Recorder(tmp_path / "faults.jsonl") as recorder, Progress(console=Console(quiet=True)) as progress:
        with pytest.raises(AssertionError, match="meanwhile"):
            await _load(PLAN, server, clients, stores, recorder, progress)
        assert asyncio.all_tasks() == others, "samples and strikes have ended with the run"
        await clients.abandon()
        clients.let_go.set()
        await stays(lambda: len(clients.started) == CLIENT_PROCESSES, what="no successor")
    assert all(process.returncode is not None for process in clients.started)


async def test_a_start_that_fails_leaves_no_process_behind(clients: SleepingClients) -> None:
    clients.orders.append(clients.orders[0])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(clients.start(), 0.5)  # the one too many is never there
    await clients.abandon()
    assert [process.returncode for process in clients.started] == [-signal.SIGKILL] * CLIENT_PROCESSES


async def test_who_is_paused_when_the_strikes_are_broken_off_goes_on(
    tmp_path: Path, clients: SleepingClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_faults, "FAULTS", ("pause store",))
    monkeypatch.setattr(live_faults, "WEIGHTS", (1,))
    await clients.start()
    store = psutil.Process(clients.started[0].pid)
    server = cast(DevServer, SilentServer(store.pid))
    with Recorder(tmp_path / "faults.jsonl") as recorder:
        striking = asyncio.create_task(Faults(server, clients, recorder, PLAN).run_until(asyncio.Event()))
        await happens(lambda: store.status() == psutil.STATUS_STOPPED, what="it is paused")
        striking.cancel()
        await asyncio.gather(striking, return_exceptions=True)
    await happens(lambda: store.status() != psutil.STATUS_STOPPED, what="it goes on")

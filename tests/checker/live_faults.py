"""The faults of a live run: one after the other, each healed and noted before the next.

The seed gives their order, kinds, victims and pauses. Of a client the healing is the start of its successor;
of everything else it is a server that says that it is ready, with as many workers as before and a successor
of whoever was killed.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from typing import Any, Final

import psutil

from tests.checker.history import Fault, Recorder
from tests.checker.live_clients import CLIENT_PROCESSES, Clients, Plan, pause
from tests.checker.live_load import Repair
from tests.services.dev_server import DevServer

HEAL_SECONDS_MAX: Final = 150.0
"""A store that holds gigabytes reads its file for a minute; the launcher waits for two."""
HEAL_POLL_SECONDS: Final = 0.1
"""Whoever asks all the time makes an outage longer."""
FAULTS: Final = ("kill worker", "kill store", "kill client", "pause worker", "pause store")
WEIGHTS: Final = (4, 2, 3, 2, 1)


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
            try:
                await pause(asyncio.Event(), self._chance.uniform(1.0, 3.0))
            finally:  # a run that fails now must still be able to stop its server
                with contextlib.suppress(ProcessLookupError):  # a worker that is silent too long is replaced
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
        deadline = time.monotonic() + HEAL_SECONDS_MAX
        while not await asyncio.to_thread(self._is_healed, replaced, victim):
            what = replaced or "a pause"
            assert time.monotonic() < deadline, f"the server was not ready again after {what}"
            await pause(asyncio.Event(), HEAL_POLL_SECONDS)

    def _is_healed(self, replaced: str, victim: int) -> bool:
        status = self._server.status()
        if not status or not status.get("ready"):
            return False
        if replaced == "store" and self._server.store_pid() == victim:
            return False
        running = {row["pid"] for row in status["workers"] if row["pid"] and psutil.pid_exists(row["pid"])}
        return len(running) == self._plan.workers and (replaced != "worker" or victim not in running)

    def _note(self, phase: Any, what: str, target: str, victim: int) -> None:
        fault = Fault(time.monotonic_ns(), "harness", phase, f"{what} {target}", str(victim))
        self._recorder.write(fault)

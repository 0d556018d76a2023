"""The client processes of a live run: who writes to whom, and the successors of those that were killed.

The number of users follows from the rate, so that none of them meets the server's limit for one user, also
while he catches up after an outage. Each has a device that sends; the first of them a second one too, which
only reads. The devices of one user live in different processes. What a process knows and does stands in
`live_memory.py` and `live_client.py`; here they are only started, killed, ended and started again for the
last reads. One that ends by itself ends the run, also when a kill was just on its way to it.
"""

import asyncio
import contextlib
import math
import random
import signal
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tests.checker.live_client import SETTLE_SECONDS_MAX
from tests.checker.live_memory import ClientOrder, DeviceOrder
from tests.services.dev_server import REPOSITORY, TENANT, DevServer

USERS_MIN: Final = 8
SENDS_PER_USER_MAX: Final = 40.0
"""Below what the server allows to one user, also while he catches up."""
READERS_MAX: Final = 16
"""Users with a second device, which only reads."""
LOOKS_PER_SECOND: Final = 200.0
"""Turns of all users together after which they may read something; with a higher rate it is not more."""
CLIENT_PROCESSES: Final = 3
DRAIN_SECONDS_MAX: Final = 1_800.0
END_SECONDS_MAX: Final = SETTLE_SECONDS_MAX + 20.0
"""A process that has waited for its answers in vain still ends by itself, and says so."""


class Plan(NamedTuple):
    seconds: float
    seed: int
    rate: float
    kill_every: float
    workers: int


class Clients:
    """The client processes, each replaced by a successor when it was killed."""

    def __init__(self, server: DevServer, folder: Path, plan: Plan) -> None:
        self._processes: list[asyncio.subprocess.Process] = []
        self._dying: asyncio.subprocess.Process | None = None
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
            # To both neighbours and across: conversations with one writer, with two, and with strangers.
            peers = [users[(place + step) % count].user.hex() for step in (1, count - 1, count // 2)]
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
        await self._start_all()

    @property
    def pids(self) -> dict[str, int]:
        return {
            order.process.partition(".")[0]: process.pid
            for order, process in zip(self.orders, self._processes, strict=True)
        }

    async def _start_all(self) -> None:
        """One by one, so that `abandon` knows those that are there when the next cannot be started."""
        self._processes = []
        for order in self.orders:
            self._processes.append(await self._start(order))

    async def _start(self, order: ClientOrder) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.checker.live_client", msgspec.json.encode(order).decode(),
            cwd=REPOSITORY,
        )  # fmt: skip

    async def kill(self, place: int) -> None:
        """kill -9, and a successor that goes on with its histories."""
        process, order = self._processes[place], self.orders[place]
        self._dying = process
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        code = await process.wait()
        assert code == -signal.SIGKILL, f"a client process ended with {code} before it was killed"
        order.process = _successor(order.process)
        self._processes[place] = await self._start(order)

    async def finish(self) -> None:
        self.ended_ns = time.monotonic_ns()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        await self._ended(END_SECONDS_MAX)

    def check(self) -> None:
        """Raises when one has ended by itself."""
        for process in self._processes:
            if process is self._dying:
                continue
            assert process.returncode is None, f"a client process ended with {process.returncode}"

    async def drain(self) -> None:
        """The last reads, by the successors of all."""
        for order in self.orders:
            order.process, order.is_final = _successor(order.process), True
        await self._start_all()
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


async def pause(stop: asyncio.Event, seconds: float) -> bool:
    """Whether `stop` came within the time."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
    return stop.is_set()

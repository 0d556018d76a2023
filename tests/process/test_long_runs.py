"""The rows that take minutes: what `make test` shows once, here again and again.

A minute of kill -9 every three seconds, the store among the victims, with one, two and four workers; and a
minute at a thousand messages a second, judged by what must hold on every machine: nothing lost, nothing
doubled, nothing unanswered. Run by `make test-long`.
"""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.process.load import Load
from tests.process.test_crashes import build_load, judge
from tests.services.dev_server import REPOSITORY, DevServer

SECONDS = 60.0
BETWEEN_KILLS_SECONDS = 3.0
KILLS_MIN = 8
STORE_KILLS_MAX = 3
"""The launcher gives a store up that dies five times within a minute; that is not what is tested here."""
MESSAGES_AT_ONCE = 20

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


async def _strike(server: DevServer, until: float, chance: random.Random) -> int:
    """Kills one part after the other; how many were killed."""
    kills, store_kills = 0, 0
    while time.monotonic() < until:
        victims = server.worker_pids() if server.status() else []
        if store_kills < STORE_KILLS_MAX and chance.random() < 0.25:
            victims, store_kills = [server.store_pid()], store_kills + 1
        if victims:
            # A victim of the blow before may still be on its way back.
            with contextlib.suppress(ProcessLookupError):
                server.kill(chance.choice(victims))
                kills += 1
        pause = asyncio.Event()
        try:
            await asyncio.wait_for(pause.wait(), BETWEEN_KILLS_SECONDS)
        except TimeoutError:
            continue
    return kills


async def _talk(load: Load, until: float) -> None:
    while time.monotonic() < until:
        await load.run(messages_per_user=MESSAGES_AT_ONCE, seconds_max=120.0)


@pytest.mark.shows("F-01", "F-08", "C2", "C4", "C7", "M7")
@pytest.mark.parametrize("workers", [1, 2, 4])
async def test_a_minute_of_kills_loses_and_doubles_nothing(workers: int, tmp_path: Path) -> None:
    with DevServer(tmp_path, workers=workers) as server:
        load = build_load(server)
        until = time.monotonic() + SECONDS
        kills, _ = await asyncio.gather(_strike(server, until, random.Random(workers)), _talk(load, until))
        assert kills >= KILLS_MIN, "the faults did not strike"
        server.until_ready()
        await judge(server, load)


def test_a_minute_at_a_thousand_messages_a_second_loses_nothing() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "loadtest.capacity", "--rate", "1000", "--seconds", "60", "--json"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    result = json.loads(run.stdout)
    assert (result["lost"], result["doubled"], result["unanswered"]) == (0, 0, 0)
    assert result["delivered"] == result["accepted"] > 55_000

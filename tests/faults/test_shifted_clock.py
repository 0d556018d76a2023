"""The wall clock of a store and of Python moves and comes back; their monotonic clocks do not move."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qim.clock import SystemClock
from tests.faults.pausing import ask_store
from tests.faults.shifted_clock import ShiftedClock
from tests.faults.wrapped import write_wrapper
from tests.services import StoreServer
from tests.waiting import eventually

HOUR = 3600.0
DAY = 86_400.0
NEAR = 5.0
CLOCKS = (
    "import datetime, sys, time\n"
    "for _ in sys.stdin:\n"
    "    print(time.time(), datetime.datetime.now().timestamp(), time.monotonic(), flush=True)\n"
)


@pytest.fixture
def clock(tmp_path: Path) -> ShiftedClock:
    return ShiftedClock(tmp_path)


@pytest.fixture
def store(valkey_binary: str, tmp_path: Path, clock: ShiftedClock) -> Iterator[StoreServer]:
    wrapper = write_wrapper(tmp_path / "shifted", valkey_binary, environment=clock.environment)
    server = StoreServer(str(wrapper), tmp_path / "store")
    server.start()
    yield server
    server.close()


@pytest.fixture
def python(clock: ShiftedClock) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", CLOCKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **clock.environment},
    ) as process:  # fmt: skip
        yield process
        assert process.stdin is not None
        process.stdin.close()


def true_seconds() -> float:
    return SystemClock().now_ms() / 1000


def store_seconds(store: StoreServer) -> float:
    seconds, microseconds = ask_store(store.socket_path, "TIME")
    return float(seconds) + float(microseconds) / 1e6


def clocks_of(process: "subprocess.Popen[str]") -> list[float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return [float(word) for word in process.stdout.readline().split()]


@pytest.mark.parametrize("seconds", [3 * HOUR, -1 * HOUR, 40 * DAY])
def test_the_time_of_a_store_moves_and_comes_back(
    store: StoreServer, clock: ShiftedClock, seconds: float
) -> None:
    assert abs(store_seconds(store) - true_seconds()) < NEAR
    # A server may answer with the time of the pass of its loop that had begun before the step.
    clock.shift(seconds=seconds)
    eventually(lambda: abs(store_seconds(store) - true_seconds() - seconds) < NEAR, what="the time has moved")
    clock.shift(seconds=0)
    eventually(lambda: abs(store_seconds(store) - true_seconds()) < NEAR, what="the time has come back")


def test_a_key_expires_early_when_the_clock_of_the_store_jumps(
    store: StoreServer, clock: ShiftedClock
) -> None:
    ask_store(store.socket_path, "SET", "key", "value", "PX", 7_200_000)
    assert ask_store(store.socket_path, "EXISTS", "key") == 1
    clock.shift(seconds=3 * HOUR)
    assert ask_store(store.socket_path, "EXISTS", "key") == 0


def test_python_reads_the_moved_clock_and_a_steady_monotonic_one(
    python: "subprocess.Popen[str]", clock: ShiftedClock
) -> None:
    wall, date, monotonic = clocks_of(python)
    assert abs(wall - true_seconds()) < NEAR
    clock.shift(seconds=8 * DAY)
    moved_wall, moved_date, later = clocks_of(python)
    assert abs(moved_wall - wall - 8 * DAY) < NEAR
    assert abs(moved_date - date - 8 * DAY) < NEAR
    assert 0 <= later - monotonic < NEAR
    clock.shift(seconds=0)
    assert abs(clocks_of(python)[0] - true_seconds()) < NEAR


def test_a_program_without_the_library_keeps_its_time(fresh_valkey: StoreServer, clock: ShiftedClock) -> None:
    clock.shift(seconds=3 * HOUR)
    assert abs(store_seconds(fresh_valkey) - true_seconds()) < NEAR

"""The load generators against a real server: short runs that lose nothing, and refusals that are told."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.launch import start_server
from loadtest.server import Observer, Server
from qim.clock import SystemClock
from tests.process.service import REPOSITORY

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def server(valkey_binary: str) -> Iterator[Server]:
    """One `qim dev` with one worker for all tests of this module."""
    with start_server(None, workers=1, redis_server=valkey_binary) as started:
        yield started


@pytest.fixture
def key_file(server: Server, tmp_path: Path) -> Path:
    path = tmp_path / "token-key.pem"
    path.write_bytes(server.token_key_pem)
    return path


def run_tool(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def capacity(server: Server, key_file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_tool(
        "loadtest.capacity",
        "--endpoint", f"{server.host}:{server.port}", "--ca", str(server.ca_file),
        "--token-key", str(key_file), "--runtime", str(server.runtime_dir),
        "--store-pid", str(server.store_pid), "--seconds", "2", "--warm-up", "0.5", *arguments,
    )  # fmt: skip


def test_capacity_run_loses_nothing_and_reports_one_object(server: Server, key_file: Path) -> None:
    done = capacity(server, key_file, "--rate", "100", "--users", "20", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["accepted"] == found["offered"] == found["delivered"] == found["echoed"]
    assert (found["lost"], found["doubled"], found["unanswered"], found["void"]) == (0, 0, 0, False)
    assert found["offered"] > 150
    assert 0 < found["ack_ms"]["p50"] <= found["ack_ms"]["max"]
    assert found["ack_ms"]["p50"] <= found["end_to_end_ms"]["p50"]
    assert found["cpu_us_per_message"]["workers"] > 0
    assert found["floor_us"] > 0
    assert min(found["batch"].values()) >= 1
    assert found["machine"]["workers"] == 1


def test_capacity_refuses_a_server_that_is_not_there(server: Server, key_file: Path) -> None:
    done = run_tool(
        "loadtest.capacity", "--endpoint", "127.0.0.1:1", "--ca", str(server.ca_file), "--token-key",
        str(key_file), "--no-floor", "--users", "2",
    )  # fmt: skip
    assert done.returncode == 69
    assert done.stderr.startswith("capacity: ")
    assert "Traceback" not in done.stderr


def test_capacity_tells_when_its_users_may_not_log_in(server: Server, key_file: Path) -> None:
    done = capacity(server, key_file, "--no-floor", "--kid", "unknown", "--users", "2")
    assert done.returncode == 69
    assert "users could log in" in done.stderr


def test_observer_sees_the_processes_and_counters_of_the_server(server: Server) -> None:
    observer = Observer(server, SystemClock())
    assert observer.worker_count == 1
    sample = observer.sample()
    assert min(sample.workers, sample.redis, sample.attendants) > 0
    assert {"writer_batches", "loop_lag"} <= set(observer.counters())


def test_locust_users_log_in_send_and_receive_through_the_real_codec(
    server: Server, key_file: Path, tmp_path: Path
) -> None:
    done = run_tool(
        "locust", "-f", "loadtest/locustfile.py", "--headless", "--users", "4", "--spawn-rate", "4",
        "--run-time", "4s", "--stop-timeout", "10", "--only-summary",
        "--json-file", str(tmp_path / "run"),
        environment={
            "QIM_ENDPOINT": f"{server.host}:{server.port}",
            "QIM_CA": str(server.ca_file),
            "QIM_TOKEN_KEY": str(key_file),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    # Written after the users have stopped; the CSV files may be a second old and show messages on the way.
    rows = {row["method"]: row for row in json.loads((tmp_path / "run.json").read_bytes())}
    assert rows["AUTH"]["num_requests"] == 4
    assert rows["SEND"]["num_requests"] == rows["E2E"]["num_requests"] > 8
    assert {row["num_failures"] for row in rows.values()} == {0}

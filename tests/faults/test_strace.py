"""strace makes flushes slow or lets them fail, and says how often it did; the server keeps its process id."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from tests.faults.pausing import ask_store, is_gone
from tests.faults.strace import Strace
from tests.services import StoreServer
from tests.waiting import eventually


@contextmanager
def traced(binary: str, folder: Path, *, faults: Sequence[str]) -> Iterator[tuple[StoreServer, Strace]]:
    strace = Strace(folder, binary, faults=faults)
    server = StoreServer(str(strace.server), folder / "store")
    try:
        server.start()
        yield server, strace
    finally:
        server.close()


def seconds_of_write(server: StoreServer) -> float:
    began = time.monotonic()
    assert ask_store(server.socket_path, "SET", "key", "value")
    return time.monotonic() - began


def write_ten_times(server: StoreServer) -> None:
    for _ in range(10):
        seconds_of_write(server)


def test_a_delayed_flush_delays_the_answer(valkey_binary: str, tmp_path: Path) -> None:
    with traced(valkey_binary, tmp_path, faults=["fdatasync:delay_enter=300000:when=8+"]) as (server, strace):
        eventually(lambda: seconds_of_write(server) > 0.3, what="a write that waits for its flush")
        eventually(lambda: strace.struck() > 0, what="strace says so")


def test_without_a_fault_flushes_are_seen_and_nothing_is_slow(valkey_binary: str, tmp_path: Path) -> None:
    with traced(valkey_binary, tmp_path, faults=[]) as (server, strace):
        before = strace.calls("fdatasync")
        assert seconds_of_write(server) < 0.3
        eventually(lambda: strace.calls("fdatasync") > before, what="the write was flushed by fdatasync")
        assert strace.struck() == 0


def test_a_flush_that_fails_ends_the_server_before_it_answers(valkey_binary: str, tmp_path: Path) -> None:
    with traced(valkey_binary, tmp_path, faults=["fdatasync:error=EIO:when=8+"]) as (server, strace):
        pid = server.pid
        with pytest.raises(redis.ConnectionError):
            write_ten_times(server)
        eventually(lambda: not server.is_running(), what="the server has ended")
        assert strace.struck() > 0
        assert is_gone(pid)
        assert "fsync error" in server.log_tail()


def test_the_process_id_is_that_of_the_server(valkey_binary: str, tmp_path: Path) -> None:
    with traced(valkey_binary, tmp_path, faults=[]) as (server, _):
        told = ask_store(server.socket_path, "INFO", "server")["process_id"]
        assert int(told) == server.pid
        server.kill9()
        assert not server.is_running()

"""Stopped processes stand still and go on; a paused store answers nobody and then everybody."""

import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.faults.pausing import ask_store, is_gone, kill9, pause_clients, state_of, stopped
from tests.services import StoreServer
from tests.waiting import eventually


@pytest.fixture
def sleeper() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait(5)


def test_a_stopped_process_goes_on_afterwards(sleeper: int) -> None:
    with stopped(sleeper):
        assert state_of(sleeper) == "T"
    eventually(lambda: state_of(sleeper) == "S", what="it goes on")


def test_a_stopped_process_goes_on_when_the_test_fails(sleeper: int) -> None:
    with pytest.raises(ZeroDivisionError), stopped(sleeper):
        raise ZeroDivisionError
    eventually(lambda: state_of(sleeper) == "S", what="it goes on")


def test_a_process_killed_while_stopped_is_left_alone(sleeper: int) -> None:
    with stopped(sleeper):
        kill9(sleeper)
    assert is_gone(sleeper)


def test_a_paused_store_answers_when_the_pause_is_over(fresh_valkey: StoreServer) -> None:
    began = time.monotonic()
    pause_clients(fresh_valkey.socket_path, milliseconds=300)
    assert ask_store(fresh_valkey.socket_path, "PING")
    assert time.monotonic() - began >= 0.3


def test_a_store_that_is_not_paused_answers_at_once(fresh_valkey: StoreServer) -> None:
    began = time.monotonic()
    assert ask_store(fresh_valkey.socket_path, "PING")
    assert time.monotonic() - began < 0.3

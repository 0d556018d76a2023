"""The real supervisor with tiny children: death, silence, drain, exit codes."""

import os
import signal
from pathlib import Path

import pytest

from tests.process.service import Service, is_alive
from tests.waiting import eventually


def test_a_killed_child_is_forked_again_and_the_others_stay(tmp_path: Path) -> None:
    with Service(tmp_path, {"one": "beat", "two": "beat"}) as service:
        service.until_ready()
        os.kill(service.pid_of("one"), signal.SIGKILL)
        service.until_did("one", "started", generation=2)
        assert service.logged("worker_killed", child="one")
        assert service.did("two", "started", generation=2) is None
        assert is_alive(service.pid_of("two"))


def test_a_stopped_child_is_killed_and_replaced(tmp_path: Path) -> None:
    with Service(tmp_path, {"one": "beat"}) as service:
        service.until_ready()
        os.kill(service.pid_of("one"), signal.SIGSTOP)
        service.until_did("one", "started", generation=2)
        measures = [
            entry["measure"] for event in ("worker_slow", "worker_silent") for entry in service.logged(event)
        ]
        assert measures == ["slow", "abort", "kill"]
        assert service.logged("child_died", child="one", exit_code=-signal.SIGKILL)
        assert not service.logged("worker_killed"), "our own kill is not reported as a stranger's"


def test_a_blocked_loop_is_aborted_with_its_stack_written(tmp_path: Path) -> None:
    with Service(tmp_path, {"one": "block"}) as service:
        service.until_ready()
        service.go()
        service.until_did("one", "started", generation=2)
        assert service.logged("child_died", child="one", exit_code=-signal.SIGABRT)
        assert "Fatal Python error: Aborted" in service.log_text()
        assert 'supervised.py", line' in service.log_text()


@pytest.mark.shows("F-06")
def test_children_die_with_their_supervisor(tmp_path: Path) -> None:
    with Service(tmp_path, {"one": "beat", "two": "deaf"}) as service:
        service.until_ready()
        pids = [service.pid_of("one"), service.pid_of("two")]
        service.process.kill()
        eventually(lambda: not any(is_alive(pid) for pid in pids), what="no orphan lives")


@pytest.mark.shows("F-07")
def test_a_crash_loop_backs_off_while_the_other_child_works(tmp_path: Path) -> None:
    watch = {"backoff_ms": [0, 50, 100, 60_000], "listener_backoff_ms": 2_000}
    with Service(tmp_path, {"one": "crash", "two": "beat"}, watch=watch) as service:
        service.until_logged("child_died", restart_in_ms=60_000)
        assert [entry["restart_in_ms"] for entry in service.logged("child_died")] == [0, 50, 100, 60_000]
        assert service.did("one", "started", generation=5) is None
        assert is_alive(service.pid_of("two"))
        service.signal(signal.SIGTERM)
        assert service.ended() == 0


def test_five_quick_deaths_are_reported_as_flapping(tmp_path: Path) -> None:
    with Service(tmp_path, {"one": "crash"}, watch={"backoff_ms": [0, 10, 10, 10, 60_000]}) as service:
        assert service.until_logged("child_flapping")["deaths"] == 5


@pytest.mark.parametrize("code", [65, 78])
def test_a_refusal_ends_the_whole_service_with_its_code(tmp_path: Path, code: int) -> None:
    with Service(tmp_path, {"admin": "beat", "one": f"exit:{code}", "two": "beat"}) as service:
        service.until_ready()
        service.go()
        assert service.ended() == code
        assert service.did("two", "stage CLOSE") is not None
        assert service.did("one", "started", generation=2) is None


def test_a_fenced_child_returns_only_at_the_cap(tmp_path: Path) -> None:
    with Service(tmp_path, {"one": "exit:75"}, watch={"backoff_ms": [0, 45_000]}) as service:
        service.until_ready()
        service.go()
        assert service.until_logged("child_died")["restart_in_ms"] == 45_000
        assert service.logged("child_fenced", child="one")


def test_a_drain_goes_through_its_stages_and_ends_admin_last(tmp_path: Path) -> None:
    with Service(tmp_path, {"admin": "beat", "one": "beat", "two": "beat"}) as service:
        service.until_ready()
        service.signal(signal.SIGTERM)
        assert service.ended() == 0
        said = [(line["child"], line["what"]) for line in service.said() if line["what"].startswith("stage")]
        for child in ("one", "two"):
            stages = [what for name, what in said if name == child]
            assert stages[-3:] == ["stage GOODBYE", "stage ROLES", "stage CLOSE"]
        assert said[-1] == ("admin", "stage CLOSE")
        assert [what for name, what in said if name == "admin"] == ["stage CLOSE"]


def test_a_child_that_misses_the_deadline_is_killed_by_name(tmp_path: Path) -> None:
    with Service(tmp_path, {"one": "deaf", "two": "beat"}, watch={"drain_ms": 600}) as service:
        service.until_ready()
        pid = service.pid_of("one")
        service.signal(signal.SIGTERM)
        assert service.ended() == 0
        assert [entry["child"] for entry in service.logged("drain_deadline_missed")] == ["one"]
        assert not is_alive(pid)


def test_a_second_signal_goes_to_the_last_stage(tmp_path: Path) -> None:
    with Service(tmp_path, {"one": "beat"}, watch={"drain_ms": 600_000}) as service:
        service.until_ready()
        service.signal(signal.SIGTERM)
        service.until_did("one", "stage NOTICE")
        service.signal(signal.SIGINT)
        assert service.ended() == 0
        stages = [line["what"] for line in service.said() if line["what"].startswith("stage")]
        assert stages == ["stage NOTICE", "stage CLOSE"]


def test_a_dead_child_is_not_forked_during_a_drain(tmp_path: Path) -> None:
    with Service(tmp_path, {"one": "beat", "two": "beat"}, watch={"drain_ms": 25_000}) as service:
        service.until_ready()
        service.signal(signal.SIGTERM)
        service.until_did("one", "stage NOTICE")
        os.kill(service.pid_of("one"), signal.SIGKILL)
        service.until_logged("child_ended", child="one")
        service.signal(signal.SIGTERM)
        assert service.ended() == 0
        assert service.did("one", "started", generation=2) is None


def test_a_reload_reaches_the_children_and_a_refused_one_does_not(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    bad.mkdir()
    with Service(good, {"one": "beat"}, reload=True) as service:
        service.until_ready()
        service.signal(signal.SIGHUP)
        service.until_did("one", "reloaded")
    with Service(bad, {"one": "beat"}) as service:
        service.until_ready()
        service.signal(signal.SIGHUP)
        service.until_logged("config_reload_refused")
        assert service.did("one", "reloaded") is None


def test_a_fork_with_a_second_thread_is_refused(tmp_path: Path) -> None:
    with Service(tmp_path, {"one": "beat"}, thread=True) as service:
        assert service.ended() != 0
        assert "2 threads before a fork" in service.log_text()
        assert service.said() == []


def test_a_child_stopped_together_with_its_supervisor_is_not_punished(tmp_path: Path) -> None:
    with Service(tmp_path, {"one": "beat"}, watch={"kill_ms": 1_000_000, "abort_ms": 900_000}) as service:
        service.until_ready()
        child = service.pid_of("one")
        service.signal(signal.SIGSTOP)
        os.kill(child, signal.SIGSTOP)
        eventually(lambda: not is_running(child), what="the child is stopped")
        stamp_grows_old(seconds=0.8)
        os.kill(child, signal.SIGCONT)
        service.signal(signal.SIGCONT)
        service.until_logged("supervisor_paused")
        assert not service.logged("worker_slow")


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"


def stamp_grows_old(*, seconds: float) -> None:
    """The subject is the passing of real time, so here it must pass."""
    started = os.times().elapsed
    eventually(lambda: os.times().elapsed - started > seconds, what="time passes")

"""What the service manager hears, over a real datagram socket."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.process.service import Service
from tests.waiting import eventually
from workers.notify import Notifier


class Manager:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.lines: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.setblocking(False)

    def heard(self) -> list[str]:
        while True:
            try:
                self.lines += self._socket.recv(4096).decode().splitlines()
            except BlockingIOError:
                return self.lines

    def until_heard(self, start: str) -> str:
        return (
            eventually(
                lambda: next((line for line in self.heard() if line.startswith(start)), None),
                what=f"heard {start}",
            )
            or ""
        )

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    address = f"@qim-{uuid4().hex}" if request.param == "abstract" else str(tmp_path / "notify")
    manager = Manager(address)
    yield manager
    manager.close()


def test_the_manager_hears_a_whole_life(tmp_path: Path, manager: Manager) -> None:
    environment = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "40000"}
    with Service(tmp_path, {"one": "wait"}, environment=environment, reload=True) as service:
        assert manager.until_heard("EXTEND_TIMEOUT_USEC=") == "EXTEND_TIMEOUT_USEC=30000000"
        manager.until_heard("STATUS=0 of 1 processes ready; one waiting")
        assert "READY=1" not in manager.heard()
        service.go()
        manager.until_heard("READY=1")
        assert "STATUS=1 of 1 processes ready" in manager.heard()
        manager.until_heard("WATCHDOG=1")
        service.signal(signal.SIGHUP)
        manager.until_heard("RELOADING=1")
        assert int(manager.until_heard("MONOTONIC_USEC=").partition("=")[2]) > 0
        eventually(lambda: manager.heard().count("READY=1") == 2, what="READY follows RELOADING")
        service.signal(signal.SIGTERM)
        manager.until_heard("STOPPING=1")
        assert service.ended() == 0
        started = service.did("one", "started")
        assert started is not None
        assert started["environment"] == [], "a child must not be able to speak for the service"


def test_the_watchdog_is_withheld_when_a_child_cannot_be_repaired(tmp_path: Path, manager: Manager) -> None:
    environment = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "40000"}
    watch = {"slow_ms": 100, "abort_ms": 900_000, "kill_ms": 1_000_000, "repair_ms": 200}
    with Service(tmp_path, {"one": "beat"}, environment=environment, watch=watch) as service:
        manager.until_heard("WATCHDOG=1")
        pid = service.pid_of("one")
        os.kill(pid, signal.SIGSTOP)
        service.until_logged("watchdog_withheld")
        os.kill(pid, signal.SIGCONT)


def test_a_watchdog_of_another_process_is_not_fed() -> None:
    assert Notifier.from_environment({"WATCHDOG_USEC": "5000", "WATCHDOG_PID": "1"}).watchdog_usec == 0
    mine = {"WATCHDOG_USEC": "5000", "WATCHDOG_PID": str(os.getpid())}
    assert Notifier.from_environment(mine).watchdog_usec == 5000


def test_without_a_manager_every_message_is_a_no_op() -> None:
    notifier = Notifier()
    notifier.ready("ready")
    notifier.watchdog()
    assert notifier.dropped == 0


def test_a_manager_that_went_away_stops_nothing(tmp_path: Path) -> None:
    notifier = Notifier(str(tmp_path / "nobody"))
    notifier.status("ready")
    notifier.close()
    assert notifier.dropped == 1


def test_a_status_is_one_line_of_bounded_length(tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "notify"))
    notifier = Notifier(manager.address)
    notifier.status("a\nREADY=1 " + "é" * 1000)
    assert "READY=1" not in manager.heard()
    assert len(manager.lines[0].encode()) <= 520
    notifier.close()
    manager.close()

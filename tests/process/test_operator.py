"""qimctl and the tools against a real server: what its JSON promises, and a shard that stands still.

One server serves the whole file. What a test breaks it mends again: a mailbox key is given the wrong type,
which is how a store contradicts itself, and is removed.
"""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from qim.adapters.mailbox_keys import WATERMARKS, mailbox_key, unpack_state
from qim.client import AuthError, Client
from qim.client.probe import Probe
from qim.clock import SystemClock
from qim.domain.placement import shard_of_user
from qim.errors import ExitCode
from qim.ids import SlotId, TenantId
from qim.limits import DAY_MS
from tests.process.service import REPOSITORY
from tests.services.dev_server import DevServer, User
from tests.waiting import eventually, eventually_async

pytestmark = pytest.mark.timeout(120)
TENANT = TenantId(1)


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    with DevServer(tmp_path_factory.mktemp("d"), workers=2, environment={"COLUMNS": "80"}) as dev:
        yield dev


@pytest.fixture
def announced(dev: DevServer) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((dev.folder / "dev.json").read_text())
    return facts


def qimctl(dev: DevServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = "from qim.ctl.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments, "--data-dir", str(dev.folder)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def answer(dev: DevServer, *arguments: str, code: int = ExitCode.OK) -> dict[str, Any]:
    result = qimctl(dev, *arguments, "--json")
    assert result.returncode == code, result.stdout + result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["schema"] == 1
    return found


def client(dev: DevServer, user: User, folder: Path) -> Client:
    return Client(f"127.0.0.1:{dev.port}", user.token, ca=dev.certificate, data_dir=folder / user.user.hex())


# --- the keys of the JSON are a contract ---


def test_status_says_ready_and_has_a_row_for_each_worker_and_store(dev: DevServer) -> None:
    status = answer(dev, "status")
    assert set(status) == {
        "schema", "ready", "reasons", "deployment", "address", "port", "connections", "workers", "stores",
    }  # fmt: skip
    assert status["ready"] is True
    assert status["reasons"] == []
    assert status["port"] == dev.port
    assert [row["worker"] for row in status["workers"]] == [0, 1]
    for row in status["workers"]:
        assert set(row) == {
            "worker", "pid", "state", "silent_ms", "restarts", "rss_bytes", "slots", "connections", "commits",
            "loop_lag_ms",
        }  # fmt: skip
        assert row["state"] == "ready"
        assert row["restarts"] == 0
        assert row["loop_lag_ms"] >= 0
    (store,) = status["stores"]
    assert set(store) == {
        "store", "roles", "used_bytes", "max_bytes", "max_is", "evicted", "messages", "bytes_per_message",
        "days_left", "days_left_reason",
    }  # fmt: skip
    assert store["roles"] == "core, mailbox, log"
    assert 0 < store["used_bytes"] < store["max_bytes"]
    assert store["days_left"] is None
    assert store["days_left_reason"]


def test_slots_and_lag_have_a_row_for_each_slot_and_consumer(dev: DevServer) -> None:
    slots = answer(dev, "slots")["slots"]
    assert [row["slot"] for row in slots] == list(range(64))
    assert {row["worker"] for row in slots} == {0, 1}
    for row in slots:
        assert set(row) == {"slot", "worker", "epoch", "watermark", "stopped", "reason"}
        assert row["epoch"] >= 1
        assert (row["stopped"], row["reason"]) == (False, None)
    dev_lag = answer(dev, "lag")["lag"]
    assert all(set(row) == {"slot", "consumer", "position", "last", "lag"} for row in dev_lag)
    assert all(row["lag"] == row["last"] - row["position"] for row in dev_lag)


def test_what_stands_still_is_an_empty_list_while_nothing_does(dev: DevServer) -> None:
    assert answer(dev, "mailbox", "show") == {"schema": 1, "stopped": []}
    assert answer(dev, "outbox", "show") == {"schema": 1, "stopped": [], "unfinished": {}}


def test_tokens_are_printed_in_one_piece_and_are_those_of_the_files(
    dev: DevServer, announced: dict[str, Any]
) -> None:
    printed = dev.output().splitlines()
    for user in announced["users"].values():
        assert Path(user["token_file"]).read_text() in printed
        assert stat.S_IMODE(Path(user["token_file"]).stat().st_mode) == 0o600


def test_the_announcement_names_living_processes_and_sockets(
    dev: DevServer, announced: dict[str, Any]
) -> None:
    assert set(announced) == {
        "schema", "endpoint", "host", "port", "certificate", "config", "log", "control_socket",
        "store_socket", "users", "pids",
    }  # fmt: skip
    assert announced["endpoint"] == f"127.0.0.1:{dev.port}"
    assert all(Path(f"/proc/{pid}").exists() for pid in announced["pids"].values())
    for name in ("certificate", "config", "log", "control_socket", "store_socket"):
        assert Path(announced[name]).exists()


# --- tokens ---


def test_a_minted_token_logs_in(dev: DevServer, tmp_path: Path) -> None:
    made = json.loads(dev.tool("token", "carol", "--json").stdout)
    assert set(made) == {"schema", "token", "kid", "tenant", "user", "device", "expires_at_ms"}
    token = dev.tool("token", "carol")
    assert token.returncode == 0, token.stderr
    assert len(token.stdout.splitlines()) == 1
    with Client(
        f"127.0.0.1:{dev.port}", token.stdout.strip(), ca=dev.certificate, data_dir=tmp_path
    ) as carol:
        carol.wait_connected()


def test_a_wrong_token_is_refused_at_login_and_harms_nobody(dev: DevServer, tmp_path: Path) -> None:
    user = dev.new_user()
    signed, _, signature = user.token.rpartition(".")
    forged = User(user.user, f"{signed}.{signature[:-8]}AAAAAAAA")
    with pytest.raises(AuthError), client(dev, forged, tmp_path) as refused:
        refused.wait_connected()
    with client(dev, dev.new_user(), tmp_path) as other:
        other.wait_connected()


# --- a shard that stands still ---


class Wrong:
    """The mailbox of a user with the wrong type under its key."""

    def __init__(self, store_socket: str, user: User) -> None:
        self._store = Redis(unix_socket_path=store_socket)
        self.slot = shard_of_user(TENANT, user.user)
        value = self._store.hget(WATERMARKS.decode(), str(int(self.slot)))
        assert isinstance(value, bytes)
        # A shard that was never written stands on no day yet; the test may run over midnight.
        today = SystemClock().now_ms() // DAY_MS
        self._keys = [
            mailbox_key(SlotId(self.slot), TENANT, user.user, day=day, ephemeral=False)
            for day in (unpack_state(value).day, today, today + 1)
        ]

    def make(self) -> None:
        for key in self._keys:
            self._store.set(key, "not a mailbox")

    def mend(self) -> None:
        for key in self._keys:
            if self._store.type(key) == b"string":  # what was delivered since stays
                self._store.delete(key)

    def close(self) -> None:
        self.mend()
        self._store.close()


@pytest.fixture
def peers(dev: DevServer) -> tuple[User, User]:
    return dev.new_user(), dev.new_user()


@pytest.fixture
def wrong(announced: dict[str, Any], peers: tuple[User, User]) -> Iterator[Wrong]:
    wrong = Wrong(announced["store_socket"], peers[1])
    wrong.make()
    yield wrong
    wrong.close()


def stopped(dev: DevServer) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(qimctl(dev, "mailbox", "show", "--json").stdout)["stopped"]
    return rows


def is_ready(dev: DevServer) -> bool:
    return qimctl(dev, "status").returncode == ExitCode.OK


def send(dev: DevServer, peers: tuple[User, User], folder: Path) -> None:
    with client(dev, peers[0], folder) as sender:
        sender.send(peers[1].user, "hello")


async def held(dev: DevServer, user: User) -> int:
    async with Probe("127.0.0.1", dev.port, dev.certificate, token=user.token) as probe:
        return len(await probe.drain_mailbox())


@pytest.mark.shows("M5", "X9")
async def test_a_stopped_shard_is_shown_and_goes_on_after_the_cause_is_gone(
    dev: DevServer, peers: tuple[User, User], wrong: Wrong, tmp_path: Path
) -> None:
    send(dev, peers, tmp_path)
    (row,) = eventually(lambda: stopped(dev), what="the shard stands still", timeout_seconds=30.0)
    assert row["slot"] == wrong.slot
    assert row["reason"]
    shown = qimctl(dev, "mailbox", "show")
    assert shown.returncode == ExitCode.NO
    assert row["reason"][:20] in shown.stdout
    status = answer(dev, "status", code=ExitCode.NO)
    assert f"mailbox shard {wrong.slot}" in status["reasons"][0]
    marked = [slot for slot in answer(dev, "slots")["slots"] if slot["stopped"]]
    assert [slot["slot"] for slot in marked] == [wrong.slot]

    assert qimctl(dev, "mailbox", "retry", str(wrong.slot)).returncode == ExitCode.OK
    eventually(lambda: stopped(dev), what="it stops again while the cause is there")
    wrong.mend()
    assert qimctl(dev, "mailbox", "retry", str(wrong.slot)).returncode == ExitCode.OK
    eventually(lambda: is_ready(dev), what="ready again")
    assert await held(dev, peers[1]) == 1


@pytest.mark.shows("X9")
async def test_a_record_may_be_skipped_and_delivered_later(
    dev: DevServer, peers: tuple[User, User], wrong: Wrong, tmp_path: Path
) -> None:
    send(dev, peers, tmp_path)
    (row,) = eventually(lambda: stopped(dev), what="the shard stands still", timeout_seconds=30.0)
    slot, offset = str(row["slot"]), str(row["offset"])
    refused = qimctl(dev, "mailbox", "skip", slot, str(row["offset"] + 1), "--yes")
    assert refused.returncode == ExitCode.NO
    assert len(refused.stderr.splitlines()) == 1
    assert qimctl(dev, "mailbox", "skip", slot, offset, "--yes").returncode == ExitCode.OK
    eventually(lambda: is_ready(dev), what="the shard goes on")
    wrong.mend()
    assert await held(dev, peers[1]) == 0
    done = answer(dev, "mailbox", "redeliver", slot, offset, "--yes")
    assert done["recipients"] == 1

    async def arrived() -> bool:
        return await held(dev, peers[1]) == 1

    await eventually_async(arrived, what="the record arrives after all")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("mailbox", "retry", "64"), ExitCode.USAGE, "slots are 0 to 63"),
        (("mailbox", "retry", "3"), ExitCode.NO, "3"),
        (("mailbox", "skip", "3", "0", "--yes"), ExitCode.NO, "3"),
        (("outbox", "retry", "3"), ExitCode.NO, "3"),
        (("outbox", "skip", "3", "0", "--yes"), ExitCode.NO, "3"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_command_for_a_slot_that_does_not_stand_still_is_refused_in_one_line(
    dev: DevServer, arguments: tuple[str, ...], code: int, words: str
) -> None:
    result = qimctl(dev, *arguments)
    assert result.returncode == code, result.stdout
    (line,) = result.stderr.splitlines()
    assert words in line


@pytest.mark.shows("C11")
def test_an_audit_of_this_server_is_clean(dev: DevServer) -> None:
    result = dev.tool("audit", "--json")
    assert result.returncode == ExitCode.OK, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert set(report) == {"schema", "clean", "walked", "found", "findings"}
    assert report["walked"]["outbox_records"] >= 2


@pytest.mark.shows("C11")
def test_an_audit_finds_a_record_that_was_lost(
    dev: DevServer, announced: dict[str, Any], peers: tuple[User, User], tmp_path: Path
) -> None:
    send(dev, peers, tmp_path)
    store = Redis(unix_socket_path=announced["store_socket"])

    def mailboxes() -> list[bytes]:
        return [key for key in store.keys("mbox:*") if isinstance(key, bytes) and bytes(peers[1].user) in key]

    (key,) = eventually(mailboxes, what="the message is in its mailbox")
    lost = store.dump(key)
    assert isinstance(lost, bytes)
    store.delete(key)
    try:
        result = dev.tool("audit", "--json", "--findings-max", "1")
        assert result.returncode == ExitCode.NO, result.stdout + result.stderr
        report = json.loads(result.stdout)
        assert report["found"] == {"entry_missing": 1}
        assert len(report["findings"]) == 1
        for_people = dev.tool("audit", "--findings-max", "0")
        assert for_people.stdout.startswith("NOT clean")
        assert "1 more" in for_people.stdout
    finally:
        store.restore(key, 0, lost)
        store.close()


def test_a_worker_that_hangs_is_named_and_the_others_are_still_reported(dev: DevServer) -> None:
    hanging = dev.worker_pids()[0]
    os.kill(hanging, signal.SIGSTOP)
    try:
        status = answer(dev, "status", code=ExitCode.NO)
    finally:
        os.kill(hanging, signal.SIGCONT)
    first, second = status["workers"]
    assert any("worker 0 does not answer" in reason for reason in status["reasons"])
    assert first["pid"] == hanging
    assert first["silent_ms"] >= 1_000
    assert (first["connections"], first["slots"]) == (None, None)
    assert second["state"] == "ready"
    assert second["slots"] == "32-63"
    (store,) = status["stores"]
    assert store["used_bytes"] > 0, "the other worker knows the stores as well"
    eventually(lambda: is_ready(dev), what="it is back", timeout_seconds=20)
    assert answer(dev, "status")["workers"][0]["restarts"] in {0, 1}

"""What a service is given and cannot use: one clear line, the right exit code, and nothing lost.

A server that is away is waited for; a server that is wrong is refused. A full disk is a small file system of
this test, which only root may mount.
"""

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from redis import Redis

from qim.client import Client, MessageState, Timeout
from qim.clock import SystemClock
from qim.config import load_config
from qim.errors import ExitCode
from tests.process.service import REPOSITORY
from tests.services import StoreServer
from tests.services.dev_server import DevServer
from tests.waiting import eventually
from workers.devfolder import open_folder

pytestmark = pytest.mark.timeout(120)
DISK_BYTES = 8 * 1024 * 1024
MOUNT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")


@pytest.fixture
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration with every file it names; the store is whatever a test says."""
    with open_folder(tmp_path_factory.mktemp("c") / "dev", clock=SystemClock()) as folder:
        folder.prepare(address="127.0.0.1", port=0, workers=1)
        return folder.config


def qim(command: str, config: Path, store: str) -> list[str]:
    setting = f"redis.core=['{store}']"
    return [sys.executable, "-m", "workers", command, "--config", str(config), "--set", setting]


def run(command: str, config: Path, store: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        qim(command, config, store),
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@contextlib.contextmanager
def store_with(binary: str, folder: Path, settings: Mapping[str, str]) -> Iterator[StoreServer]:
    server = StoreServer(binary, folder, settings=settings)
    server.start()
    try:
        yield server
    finally:
        server.close()


# --- stores that cannot be used ---


def test_a_server_whose_store_is_away_waits_and_says_so(config: Path) -> None:
    process = subprocess.Popen(
        qim("serve", config, "redis://127.0.0.1:1"),
        cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    runtime = load_config(config).server.runtime_dir

    def status() -> subprocess.CompletedProcess[str]:
        program = "from qim.ctl.cli import main; main()"
        return subprocess.run(
            [sys.executable, "-c", program, "status", "--json", "--socket", f"{runtime}/control.sock"],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip

    try:
        eventually(lambda: "worker 0 waits" in status().stdout, what="the reason", timeout_seconds=20)
        answer = status()
        assert answer.returncode == ExitCode.NO
        told = json.loads(answer.stdout)
        assert told["ready"] is False
        assert any("127.0.0.1:1" in reason for reason in told["reasons"])
        (row,) = told["stores"]
        assert row["used_bytes"] is None
        assert "no worker can tell" in row["days_left_reason"]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == ExitCode.OK


def test_a_server_that_waits_for_its_store_says_so_in_a_sentence_on_a_terminal(config: Path) -> None:
    ours, terminal = pty.openpty()
    process = subprocess.Popen(
        qim("serve", config, "redis://127.0.0.1:1"),
        cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=terminal,
    )  # fmt: skip
    os.close(terminal)
    os.set_blocking(ours, False)
    seen = bytearray()

    def told() -> bool:
        with contextlib.suppress(BlockingIOError):
            seen.extend(os.read(ours, 65_536))
        return b"qim: waiting for a store (" in seen

    try:
        eventually(told, what="the sentence", timeout_seconds=20)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == ExitCode.OK
        os.close(ours)
    sentence = next(line for line in seen.decode().splitlines() if line.startswith("qim: waiting"))
    assert "127.0.0.1:1" in sentence
    assert "as soon as the store answers" in sentence


def test_a_port_in_use_is_refused_in_one_line(config: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        command = qim("serve", config, "redis://127.0.0.1:1")
        result = subprocess.run(
            [*command, "--set", f"gateway.port={port}"],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert result.returncode == ExitCode.CONFIG
    (line,) = result.stderr.splitlines()
    assert f"127.0.0.1 port {port} is in use" in line


def test_a_store_program_that_does_not_exist_is_refused_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "workers", "dev", "--data-dir", str(tmp_path / "dev"), "--port", "0"]
    result = subprocess.run(
        [*command, "--redis-server", str(tmp_path / "nothing")],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == ExitCode.CONFIG
    (line,) = result.stderr.splitlines()
    assert "--redis-server" in line
    assert str(tmp_path / "nothing") in line


def test_a_tool_whose_store_refuses_the_connection_ends_with_69(config: Path) -> None:
    for command in ("init", "audit"):
        result = run(command, config, "redis://127.0.0.1:1")
        assert result.returncode == ExitCode.UNREACHABLE
        (line,) = result.stderr.splitlines()
        assert "127.0.0.1:1" in line


def test_an_audit_beside_a_stopped_development_server_says_what_must_run(config: Path) -> None:
    place = config.parent / "run" / "store.sock"
    result = run("audit", config, f"unix://{place}")
    assert result.returncode == ExitCode.UNREACHABLE
    (line,) = result.stderr.splitlines()
    assert f"no store answers at unix://{place}" in line
    assert "make run" in line


def test_a_store_with_the_wrong_persistence_is_refused_with_the_command_that_mends_it(
    config: Path, valkey_binary: str, tmp_path: Path
) -> None:
    with store_with(valkey_binary, tmp_path / "store", {"appendfsync": "everysec"}) as store:
        for command in ("init", "serve"):
            result = run(command, config, store.url)
            assert result.returncode == ExitCode.CONFIG
            assert "appendfsync is 'everysec', must be 'always'" in result.stderr
            assert "CONFIG SET appendfsync always" in result.stderr


def test_a_store_that_wants_a_password_is_refused(config: Path, valkey_binary: str, tmp_path: Path) -> None:
    with store_with(valkey_binary, tmp_path / "store", {}) as store:
        with Redis(unix_socket_path=str(store.socket_path)) as client:
            client.config_set("requirepass", "secret")
        result = run("serve", config, store.url)
    assert result.returncode == ExitCode.CONFIG
    assert "NOAUTH" in result.stderr
    assert "secret" not in result.stderr


def test_a_store_that_was_never_initialised_names_the_command(
    config: Path, valkey_binary: str, tmp_path: Path
) -> None:
    with store_with(valkey_binary, tmp_path / "store", {}) as store:
        result = run("serve", config, store.url)
    assert result.returncode == ExitCode.CONFIG
    assert "qim init" in result.stderr


# --- disks ---


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"this container may not mount: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(4096))


@MOUNT
@pytest.mark.shows("F-36", "F-11", "C4")
def test_a_full_disk_stops_the_store_and_room_brings_everything_back_once(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    with small_disk(tmp_path_factory.mktemp("m") / "d", f"size={DISK_BYTES}") as disk:
        dev = DevServer(disk, output=tmp_path / "dev.out")
        try:
            dev.start()
            sender, peer = dev.new_user(), dev.new_user()
            with Client(
                f"127.0.0.1:{dev.port}", sender.token, ca=dev.certificate, data_dir=tmp_path / "sender"
            ) as client:
                client.send(peer.user, "before")
                fill(disk / "ballast")
                with pytest.raises(Timeout):
                    client.send(peer.user, "during" * 1_000, timeout=3)
                eventually(lambda: "is full" in dev.output(), what="the launcher says why")
                status = dev.status()
                assert status is not None
                assert "is not connected to unix:" in status["reasons"][0]
                (disk / "ballast").unlink()
                dev.until_ready()
                eventually(
                    lambda: (
                        [message.state for message in client.messages(peer.user)]
                        == [MessageState.STORED, MessageState.STORED]
                    ),
                    what="the queued message is acknowledged",
                    timeout_seconds=20,
                )
                seqs = [message.conversation_seq for message in client.history(peer.user).messages]
                assert seqs == [1, 2]
        finally:
            assert dev.stop() == ExitCode.OK


@MOUNT
@pytest.mark.parametrize(
    ("options", "words"), [("ro", "Read-only file system"), ("nr_inodes=1", "No space left")]
)
def test_a_data_folder_that_cannot_be_written_is_refused_in_one_line(
    tmp_path: Path, options: str, words: str
) -> None:
    with small_disk(tmp_path / "disk", options) as disk:
        result = subprocess.run(
            [sys.executable, "-m", "workers", "dev", "--data-dir", str(disk / "dev"), "--port", "0"],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert result.returncode == ExitCode.CONFIG
    (line,) = result.stderr.splitlines()
    assert words in line
    assert str(disk / "dev") in line

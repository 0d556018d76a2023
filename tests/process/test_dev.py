"""`qim dev` as a person starts it: real processes, real signals, real refusals."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from qim.ctl import protocol
from qim.errors import ControlError
from tests.process.service import REPOSITORY, is_alive
from tests.waiting import eventually

QIM = (sys.executable, "-m", "workers")
pytestmark = pytest.mark.timeout(120)


class Dev:
    """One `qim dev` in a folder of the test."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.output = folder.parent / f"{folder.name}.out"
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*QIM, "dev", "--data-dir", str(folder), "--port", "0", *arguments],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def until_serving(self) -> Self:
        def serving() -> bool:
            assert self.process.poll() is None, self.text()
            return "serving until Ctrl-C" in self.text()

        eventually(serving, what="qim dev serves", timeout_seconds=60)
        return self

    def status(self) -> dict[str, Any] | None:
        try:
            return protocol.call(self.folder / "run" / "control.sock", "status")
        except ControlError:
            return None

    def is_ready(self) -> bool:
        status = self.status()
        return status is not None and status["ready"]

    def pids(self) -> dict[str, int]:
        """Of the store, the supervisor and worker 0, as printed."""
        text = self.text()
        return {
            name: int(re.findall(rf"^{name} +pid (\d+)", text, re.MULTILINE)[-1])
            for name in ("store", "server", "worker 0")
        }


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A command that is expected to end soon."""
    return subprocess.run(
        [*QIM, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, **(environment or {})},
        check=False,
    )


def refusal(result: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line of a refusal."""
    assert result.returncode == code, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    """For tests that leave it as it is."""
    with Dev(tmp_path_factory.mktemp("shared") / "data", "--workers", "2") as dev:
        yield dev.until_serving()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Dev]:
    with Dev(tmp_path / "data", "--workers", "2") as dev:
        yield dev.until_serving()


def test_dev_says_what_it_started_and_ends_everything_in_order(serving: Dev) -> None:
    pids = serving.pids()
    assert all(is_alive(pid) for pid in pids.values())
    assert serving.is_ready()
    for word in ("TLS 1.3", "certificate", "qimctl status", "alice", "bob", "nothing is trimmed"):
        assert word in serving.text()
    serving.process.send_signal(signal.SIGINT)
    assert serving.process.wait(40) == 0
    assert not any(is_alive(pid) for pid in pids.values())
    assert not (serving.folder / "run").exists()
    log = [json.loads(line) for line in (serving.folder / "qim.log").read_text().splitlines()]
    stages = [line["stage"] for line in log if line["event"] == "drain_stage"]
    assert stages[0] == "notice"
    assert stages[-1] == "close"
    assert not [line for line in log if line["event"] in {"child_failed", "drain_deadline_missed"}]


def test_a_second_start_in_the_same_folder_is_refused_in_one_line(shared: Dev) -> None:
    line = refusal(run("dev", "--data-dir", str(shared.folder), "--port", "0"), 78)
    assert f"in use by process {shared.process.pid}" in line


def test_a_port_in_use_is_refused_in_one_line(shared: Dev, tmp_path: Path) -> None:
    status = shared.status()
    assert status is not None
    line = refusal(run("dev", "--data-dir", str(tmp_path / "other"), "--port", str(status["port"])), 78)
    assert "in use by another program" in line


@pytest.mark.parametrize("workers", ["0", "65"])
def test_an_impossible_number_of_workers_is_refused_naming_the_flag(tmp_path: Path, workers: str) -> None:
    result = run("dev", "--data-dir", str(tmp_path / "data"), "--port", "0", "--workers", workers)
    assert refusal(result, 78) == f"qim: --workers {workers}: allowed are 1 to 64"
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("demo", "--workers", "99"), 78),
        (("token", "alice", "--days", "many"), 2),
        (("audit", "--data-dir", "/nowhere"), 78),
    ],
)
def test_a_refusal_is_an_object_where_json_was_asked_for(arguments: tuple[str, ...], code: int) -> None:
    result = run(*arguments, "--json")
    line = refusal(result, code)
    told = json.loads(result.stdout)
    assert told == {"schema": 1, "error": line.removeprefix("qim: "), "code": code}


def test_killed_parts_come_back_and_the_service_is_ready_again(serving: Dev) -> None:
    pids = serving.pids()
    os.kill(pids["worker 0"], signal.SIGKILL)
    eventually(lambda: _restarts(serving, 0) == 1, what="the worker is back", timeout_seconds=20)
    eventually(serving.is_ready, what="the service is ready again", timeout_seconds=20)
    os.kill(pids["store"], signal.SIGKILL)
    eventually(lambda: "starting it again" in serving.text(), what="the store is started again")
    eventually(lambda: _store_answers(serving), what="the workers found the store again", timeout_seconds=20)
    eventually(serving.is_ready, what="all of them", timeout_seconds=20)


def test_a_store_killed_before_the_service_is_ready_is_started_again(tmp_path: Path) -> None:
    with Dev(tmp_path / "data") as dev:
        eventually(lambda: "init " in dev.text(), what="the store is initialised", timeout_seconds=30)
        os.kill(int(re.findall(r"^store +pid (\d+)", dev.text(), re.MULTILINE)[-1]), signal.SIGKILL)
        dev.until_serving()
        assert "starting it again" in dev.text()
        assert dev.is_ready()


def test_a_killed_launcher_leaves_nothing_behind_and_the_next_start_goes_on(serving: Dev) -> None:
    pids = serving.pids()
    serving.process.kill()
    serving.process.wait(10)
    with Dev(serving.folder, "--workers", "2") as again:
        eventually(lambda: again.text().count("serving until") == 2, what="served again", timeout_seconds=60)
        assert not any(is_alive(pid) for pid in pids.values())


def test_a_service_whose_store_was_deleted_is_not_begun_anew_without_a_word(serving: Dev) -> None:
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(40) == 0
    shutil.rmtree(serving.folder / "store")
    line = refusal(run("dev", "--data-dir", str(serving.folder), "--port", "0"), 78)
    assert f"{serving.folder / 'store'} is missing" in line
    assert "begin anew" in line


def test_another_number_of_workers_goes_on_with_the_same_data(tmp_path: Path) -> None:
    common = ("demo", "--data-dir", str(tmp_path / "data"), "--port", "0", "--json", "--workers")
    for run_number, workers in enumerate(("2", "1", "4"), start=1):
        result = run(*common, workers)
        assert result.returncode == 0, result.stderr
        checks = json.loads(result.stdout)["checks"]
        assert all(check["holds"] for check in checks)
        assert f"n = {run_number * 401}" in {check["seen"] for check in checks}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("thesis.txt", "text", "holds other files"),
        ("deployment", "prod", "belongs to deployment 'prod'"),
    ],
)
def test_a_folder_that_is_not_ours_is_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text(text)
    line = refusal(run("dev", "--data-dir", str(tmp_path / "data"), "--port", "0"), 78)
    assert words in line


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("/etc/passwd", "not a program"),
        ("/bin/false", "the embedded store ended with 1"),
    ],
)
def test_a_store_program_that_is_none_is_refused(tmp_path: Path, program: str, words: str) -> None:
    result = run("dev", "--data-dir", str(tmp_path / "data"), "--port", "0", "--redis-server", program)
    assert words in refusal(result, 78)


def test_a_store_program_of_another_machine_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "valkey-server"
    program.write_bytes(b"not for this machine")
    program.chmod(0o755)
    result = run("dev", "--data-dir", str(tmp_path / "data"), "--port", "0", "--redis-server", str(program))
    assert "Exec format error" in refusal(result, 78)


def test_dev_runs_on_the_redis_of_debian(tmp_path: Path, redis_binary: str) -> None:
    result = run("demo", "--data-dir", str(tmp_path / "data"), "--port", "0", "--redis-server", redis_binary)
    assert result.returncode == 0, result.stdout + result.stderr


# --- serve and the tools ---


def test_serve_refuses_bad_configurations_with_one_line_for_each_problem(tmp_path: Path) -> None:
    path = tmp_path / "qim.toml"
    path.write_text('[gateway]\nport = "many"\n[nowhere]\nx = 1\n')
    result = run("serve", "--config", str(path))
    assert result.returncode == 78
    lines = result.stderr.strip().splitlines()
    assert all(line.startswith("qim: ") for line in lines)
    assert any(f"{path}:2" in line and "gateway.port" in line for line in lines)
    assert any("nowhere" in line for line in lines)


def test_serve_refuses_to_run_without_assertions() -> None:
    result = subprocess.run(
        [sys.executable, "-O", "-m", "workers", "serve"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "python -O" in refusal(result, 78)


def test_a_second_service_in_the_same_runtime_folder_is_refused(shared: Dev) -> None:
    environment = {"QIM__GATEWAY__PORT": "0"}
    line = refusal(run("serve", "--config", str(shared.folder / "qim.toml"), environment=environment), 78)
    assert "in use by another qim" in line


def test_a_foreign_store_ends_the_service_with_65(shared: Dev, tmp_path: Path) -> None:
    environment = {
        "QIM__GATEWAY__PORT": "0",
        "QIM__SERVER__DEPLOYMENT": "other",
        "QIM__SERVER__RUNTIME_DIR": str(tmp_path / "run"),
    }
    result = run("serve", "--config", str(shared.folder / "qim.toml"), environment=environment)
    assert result.returncode == 65
    assert "must be 'qim 1 other 0 1'" in result.stderr


def test_help_is_quick_because_it_imports_nothing_heavy() -> None:
    heavy = ("pydantic", "uvloop", "jwt", "redis")
    code = f"import sys, workers.__main__; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_token_says_what_was_asked_and_refuses_nonsense(shared: Dev) -> None:
    folder = str(shared.folder)
    made = run("token", "alice", "--data-dir", folder, "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["user"] in shared.text()
    assert "--tenant" in refusal(run("token", "alice", "--data-dir", folder, "--tenant", "-1"), 78)


def _restarts(dev: Dev, worker: int) -> int:
    status = dev.status()
    return 0 if status is None else int(status["workers"][worker]["restarts"])


def _store_answers(dev: Dev) -> Sequence[Any]:
    status = dev.status()
    return [] if status is None else [row for row in status["stores"] if row["used_bytes"] is not None]

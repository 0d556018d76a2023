"""`qim` in this process: refusals are one line per problem with the right exit code, and help is quick."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qim.errors import ExitCode
from workers import __main__ as command

ROOT = Path(__file__).parents[3]
HELP_SECONDS_MAX = 0.3


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        command.main(list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No development server and no configuration of the host is near."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "DEFAULT_CONFIG", tmp_path / "none.toml")
    for name in [name for name in os.environ if name.startswith("QIM__")]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[gateway]\nport = 'many'\n", ("qim.toml:2", "gateway.port", "65535")),
        ("[gateway]\nprot = 7443\n", ("qim.toml:2", "gateway.prot", "port")),
        ("[log]\nlevel = 'loud'\n", ("qim.toml:2", "log.level", "info")),
        ("[gateway\n", ("qim.toml:1",)),
        ("[redis]\ncore = ['http://x']\n", ("qim.toml:2", "redis.core", "redis://host:port")),
    ],
    ids=["wrong type", "unknown key", "not allowed", "not TOML", "not a store"],
)
def test_a_bad_configuration_names_file_line_key_and_what_is_allowed(
    here: Path, capsys: pytest.CaptureFixture[str], text: str, words: tuple[str, ...]
) -> None:
    (here / "qim.toml").write_text(text)
    assert run("serve", "--config", str(here / "qim.toml")) == ExitCode.CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    for word in words:
        assert word in line


@pytest.mark.parametrize("name", ["absent.toml", "."])
def test_a_configuration_that_cannot_be_read_is_named(
    here: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run("serve", "--config", str(here / name)) == ExitCode.CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert str(here / name) in line


def test_a_bad_override_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", "--set", "nonsense") == ExitCode.CONFIG
    assert "--set wants section.key=value" in capsys.readouterr().err


def test_an_audit_of_stores_that_are_away_is_69(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = f"redis.core=['unix://{here}/none.sock']"
    assert run("audit", "--set", store) == ExitCode.UNREACHABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert "none.sock" in line


@pytest.mark.parametrize("tool", [("audit",), ("token", "alice")])
def test_a_folder_that_no_development_server_has_used_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], tool: tuple[str, ...]
) -> None:
    assert run(*tool, "--data-dir", str(here)) == ExitCode.CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert "no folder of qim dev" in line


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["nowhere"], "nowhere"), (["dev", "--port", "many"], "many"), (["token"], "user")],
)
def test_wrong_usage_is_one_line_and_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], word: str
) -> None:
    assert run(*arguments) == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert word in line


def test_the_version_is_one_object_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("version", "--json") == ExitCode.OK
    assert set(json.loads(capsys.readouterr().out)) == {"schema", "version", "protocol"}


@pytest.mark.parametrize("module", ["workers.__main__", "qim.ctl.cli"])
def test_help_is_there_at_once(module: str) -> None:
    # The best of several: what is measured is the command, not the neighbours of this machine.
    program = f"import sys; sys.argv = ['x', '--help']; from {module} import main; main()"
    assert min(_seconds_of(program) for _ in range(5)) < HELP_SECONDS_MAX


def _seconds_of(program: str) -> float:
    """Processor time: the time on the clock depends on what else runs here."""
    before = os.times()
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True, timeout=30)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_stops_early_gets_no_traceback(unbuffered: str) -> None:
    """`qim config show | head -1`: the pipe ends before the output does."""
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "workers", "config", "show"], stdout=writing, stderr=subprocess.PIPE,
        text=True, cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": unbuffered}, timeout=30, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (ExitCode.NO, "")

"""The README is true: its commands exist, its program runs, its configuration is accepted.

Cheap commands are run; of the others name, subcommand and options are checked by the parser that would read
them. The program is taken out of the README as it stands and run against a server of this test.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from cyclopts import App

from qim.config import load_config
from qim.ctl import cli
from qim.domain.guards import REQUIRED_SETTINGS
from tests.services.dev_server import DevServer
from workers import __main__ as server_cli

ROOT: Final = Path(__file__).parents[2]
TEXT: Final = (ROOT / "README.md").read_text(encoding="utf-8")
TOOLS: Final[dict[str, App]] = {"qim": server_cli.app, "qimctl": cli.app}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def commands() -> Iterator[list[str]]:
    for block in blocks("console"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def tool_commands() -> list[list[str]]:
    return [words for words in commands() if Path(words[0]).name in TOOLS]


def test_every_make_target_of_the_readme_exists_and_each_is_listed() -> None:
    made = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", made, re.MULTILINE)) - {"help", "setup"}
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", TEXT, re.MULTILINE))
    assert named == targets


@pytest.mark.parametrize("words", tool_commands(), ids=" ".join)
def test_every_command_of_the_readme_is_understood(words: list[str]) -> None:
    app = TOOLS[Path(words[0]).name]
    command, bound, unused = app.parse_args(words[1:], exit_on_error=False, print_error=False)[:3]
    assert callable(command)
    assert bound.args or bound.kwargs or len(words) <= 3
    assert not unused


def test_the_readme_names_every_command_of_operators() -> None:
    named = {word for words in tool_commands() if words[0].endswith("qimctl") for word in words[1:2]}
    assert {name for name in cli.app if not name.startswith("-")} - named == {"init"}


def test_a_command_that_does_not_exist_would_be_noticed() -> None:
    with pytest.raises(Exception, match="nowhere"):
        cli.app.parse_args(["nowhere"], exit_on_error=False, print_error=False)


def test_the_configuration_of_the_readme_is_accepted(tmp_path: Path) -> None:
    (text,) = blocks("toml")
    path = tmp_path / "qim.toml"
    path.write_text(text)
    config = load_config(path)
    assert config.server.deployment == tomllib.loads(text)["server"]["deployment"]


def test_the_store_settings_of_the_readme_are_those_that_the_server_demands() -> None:
    (block,) = [block for block in blocks("text") if block.startswith("appendonly")]
    assert dict(line.split() for line in block.splitlines()) == REQUIRED_SETTINGS


def test_every_path_of_the_readme_exists() -> None:
    named = set(re.findall(r"\]\(([^)h][^)]*)\)", TEXT))
    named |= set(re.findall(r"^\| `([a-z]+/)`", TEXT, re.MULTILINE)) | {
        "systemd/qim.service",
        "qim/client",
        "qim/ctl",
    }
    assert not [path for path in named if not (ROOT / path).exists()]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which `make run` serves, as far as programs can tell."""
    folder = tmp_path_factory.mktemp("r")
    with DevServer(folder, name=".qim-dev"):
        yield folder


def cheap_commands() -> list[list[str]]:
    """What only looks."""
    looks = {"status", "slots", "lag", "audit", "token", "show"}
    return [words for words in tool_commands() if words[0].endswith("qimctl") and looks & set(words)]


@pytest.mark.parametrize("words", cheap_commands(), ids=" ".join)
def test_commands_that_only_look_find_the_server_of_this_folder_by_themselves(
    served: Path, words: list[str]
) -> None:
    assert look(served, words[1:]).strip()
    assert json.loads(look(served, [*words[1:], "--json"]))["schema"] == 1


def look(folder: Path, arguments: list[str]) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", "from qim.ctl.cli import main; main()", *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr
    return ran.stdout


@pytest.mark.timeout(120)
def test_the_first_message_of_the_readme_arrives_also_a_second_time(served: Path, tmp_path: Path) -> None:
    (program,) = blocks("python")
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    for number in (1, 2):
        ran = subprocess.run(
            [sys.executable, "-c", program],
            cwd=served, env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert not ran.stderr
        assert ran.stdout.splitlines() == [
            f"acknowledged: message {number} of this conversation",
            "bob reads: hello bob",
        ]

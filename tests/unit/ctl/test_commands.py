"""Where qimctl looks for a server, and what it asks it."""

from pathlib import Path
from typing import Any

import pytest

from qim.ctl import commands
from qim.errors import ControlUnreachable, ExitCode


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, nothing named in the environment, nothing installed on the host."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(commands.SOCKET_VARIABLE, raising=False)
    installed = tmp_path / "host" / "control.sock"
    monkeypatch.setattr(commands, "SOCKET_PLACES", (commands.SOCKET_PLACES[0], installed))
    return tmp_path


def make(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_the_server_of_this_folder_is_found_without_a_word(here: Path) -> None:
    make(here / "host" / "control.sock")
    mine = make(here / ".qim-dev" / "run" / "control.sock")
    assert commands.control_socket(None) == mine


def test_the_server_of_the_host_is_found_where_this_folder_has_none(here: Path) -> None:
    installed = make(here / "host" / "control.sock")
    assert commands.control_socket(None) == installed


def test_every_place_is_named_when_nothing_runs(here: Path) -> None:
    (here / ".qim-dev").mkdir()
    with pytest.raises(ControlUnreachable, match=r"is qim running\? `make run`") as raised:
        commands.control_socket(None)
    assert ".qim-dev/run/control.sock" in str(raised.value)
    assert str(here / "host" / "control.sock") in str(raised.value)
    assert raised.value.exit_code == ExitCode.UNREACHABLE


def test_what_is_said_comes_before_what_is_found(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(here / ".qim-dev" / "run" / "control.sock")
    monkeypatch.setenv(commands.SOCKET_VARIABLE, "/named")
    assert commands.control_socket(None) == Path("/named")
    assert commands.control_socket(None, here / "other") == here / "other" / "run" / "control.sock"
    assert commands.control_socket(Path("given"), here / "other") == Path("given")


def test_a_folder_of_sockets_that_is_a_link_is_followed(here: Path) -> None:
    short = make(here / "short" / "control.sock")
    (here / "data").mkdir()
    (here / "data" / "run").symlink_to(short.parent)
    assert commands.control_socket(None, here / "data") == short


@pytest.mark.parametrize(
    ("ask", "name", "arguments"),
    [
        (lambda: commands.status(Path("s")), "status", {}),
        (lambda: commands.slots(Path("s")), "slots", {}),
        (lambda: commands.lag(Path("s")), "lag", {}),
        (lambda: commands.mailbox(Path("s"), "show"), "mailbox.show", {}),
        (lambda: commands.mailbox(Path("s"), "retry", slot=0), "mailbox.retry", {"slot": 0}),
        (
            lambda: commands.outbox(Path("s"), "skip", slot=3, offset=0),
            "outbox.skip",
            {"slot": 3, "offset": 0},
        ),
    ],
)
def test_a_command_travels_with_what_was_given_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, ask: Any, name: str, arguments: dict[str, int]
) -> None:
    sent: list[Any] = []

    def note(*call: Any) -> dict[str, int]:
        sent.append(call)
        return {"schema": 1}

    monkeypatch.setattr("qim.ctl.protocol.call", note)
    assert ask() == {"schema": 1}
    assert sent == [(Path("s"), name, arguments)]

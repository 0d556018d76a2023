"""`qimctl membership`: what travels to the server, and how a change can be repeated."""

import json
from pathlib import Path
from typing import Any

import pytest

from qim.ctl import cli
from qim.ctl.commands import SOCKET_VARIABLE
from qim.errors import ControlUnreachable, ExitCode

GROUP, ALICE, BOB, REQUEST = "99" * 16, "aa" * 16, "bb" * 16, "11" * 16
DONE = {
    "schema": 1, "group": GROUP, "request_id": REQUEST, "event_seq": 7, "member_count": 3,
    "membership_version": 2,
}  # fmt: skip
LISTED = {
    "schema": 1, "group": GROUP, "name": "\x1b[31mred", "owner": ALICE, "membership_version": 2, "total": 1,
    "next": None, "members": [{"user": ALICE, "joined_at": 0}],
}  # fmt: skip


class Server:
    """Stands in for the socket: notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answer: dict[str, Any] | Exception = DONE

    def __call__(self, _path: Path, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((command, arguments))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr("qim.ctl.protocol.call", server)
    monkeypatch.setenv(SOCKET_VARIABLE, "/nowhere")
    return server


def run(*arguments: str) -> int:
    code = cli.app(("membership", *arguments), result_action="return_value")
    assert isinstance(code, int)
    return code


@pytest.mark.parametrize("action", ["add", "remove"])
def test_a_change_travels_with_its_users_and_its_request_id(server: Server, action: str) -> None:
    assert run(action, GROUP, ALICE, BOB, "--tenant", "3", "--request-id", REQUEST) == ExitCode.OK
    assert server.asked == [
        (
            f"membership.{action}",
            {"tenant": 3, "group": GROUP, "users": [ALICE, BOB], "request_id": REQUEST},
        )
    ]


@pytest.mark.shows("X11")
def test_a_request_id_is_named_before_the_answer_so_that_a_lost_one_can_be_repeated(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = ControlUnreachable("no answer in time")
    assert run("add", GROUP, ALICE) == ExitCode.UNREACHABLE
    first = capsys.readouterr().err.split()
    run("add", GROUP, ALICE)
    second = capsys.readouterr().err.split()
    assert first[0] == "--request-id"
    assert first[1] == server.asked[0][1]["request_id"]
    assert len(bytes.fromhex(first[1])) == 16
    assert first[1] != second[1]


def test_json_is_the_answer_alone(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("add", GROUP, ALICE, "--json") == ExitCode.OK
    assert json.loads(capsys.readouterr().out) == DONE


def test_a_list_is_a_table_that_no_name_can_paint(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = LISTED
    assert run("list", GROUP, "--after", BOB, "--limit", "5") == ExitCode.OK
    assert server.asked == [("membership.list", {"tenant": 1, "group": GROUP, "after": BOB, "limit": 5})]
    output = capsys.readouterr().out
    assert ALICE in output
    assert "\x1b[31m" not in output

"""The command line of qimctl in this process: what it prints where, when it asks, and how it ends."""

import json
from pathlib import Path
from typing import Any

import pytest

from qim.ctl import cli
from qim.ctl.commands import SOCKET_VARIABLE
from qim.errors import ControlRefused, ExitCode

READY = {"schema": 1, "ready": True, "reasons": [], "workers": []}
STOPPED = {"schema": 1, "stopped": [{"slot": 3, "offset": 7, "reason": "wrong type"}]}
HEALTHY: dict[str, Any] = {"schema": 1, "stopped": []}


class Server:
    """Stands in for the socket: notes what it was asked, answers what the test says."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, _path: Path, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((command, arguments))
        answer = self.answers[command]
        if isinstance(answer, Exception):
            raise answer
        result: dict[str, Any] = answer
        return result


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr("qim.ctl.protocol.call", server)
    monkeypatch.setenv(SOCKET_VARIABLE, "/nowhere")
    return server


def run(*arguments: str) -> int:
    code = cli.app(arguments, result_action="return_value")
    assert isinstance(code, int)
    return code


def test_status_is_zero_when_ready_and_one_when_not(server: Server) -> None:
    server.answers["status"] = READY
    assert run("status") == ExitCode.OK
    server.answers["status"] = READY | {"ready": False, "reasons": ["worker 0 waits"]}
    assert run("status") == ExitCode.NO


def test_json_is_the_answer_itself_and_alone_on_standard_output(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers["status"] = READY
    run("status", "--json")
    output = capsys.readouterr()
    assert json.loads(output.out) == READY
    assert not output.err


def test_a_stopped_shard_makes_show_answer_no(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers["mailbox.show"] = STOPPED
    assert run("mailbox", "show") == ExitCode.NO
    assert "wrong type" in capsys.readouterr().out
    server.answers["mailbox.show"] = HEALTHY
    assert run("mailbox", "show") == ExitCode.OK


def test_an_unfinished_message_makes_outbox_show_answer_no(server: Server) -> None:
    server.answers["outbox.show"] = HEALTHY | {"unfinished": {"partition 3": "record is gone"}}
    assert run("outbox", "show") == ExitCode.NO
    server.answers["outbox.show"] = HEALTHY | {"unfinished": {}}
    assert run("outbox", "show") == ExitCode.OK


def test_nobody_there_is_69_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", "--socket", str(tmp_path / "none.sock")) == ExitCode.UNREACHABLE
    output = capsys.readouterr()
    assert not output.out
    assert len(output.err.splitlines()) == 1
    assert "is qim running?" in output.err


def test_a_refusal_passes_words_and_code_on(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    refusal = ControlRefused("there is no slot 64; slots are 0 to 63", exit_code=ExitCode.USAGE)
    server.answers["mailbox.retry"] = refusal
    assert run("mailbox", "retry", "64") == ExitCode.USAGE
    assert capsys.readouterr().err == "qimctl: there is no slot 64; slots are 0 to 63\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("mailbox", "retry", "64"), ExitCode.USAGE), (("mailbox", "skip", "3", "7"), ExitCode.NO)],
)
def test_a_refusal_is_an_object_where_json_was_asked_for(
    server: Server, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: ExitCode
) -> None:
    server.answers["mailbox.retry"] = ControlRefused("there is no slot 64", exit_code=ExitCode.USAGE)
    assert run(*arguments, "--json") == code
    output = capsys.readouterr()
    told = json.loads(output.out)
    assert set(told) == {"schema", "error", "code"}
    assert told["code"] == code
    assert output.err == f"qimctl: {told['error']}\n"


def test_wrong_usage_is_an_object_where_json_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["qimctl", "mailbox", "retry", "many", "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    assert json.loads(capsys.readouterr().out)["code"] == ExitCode.USAGE


def test_a_skip_without_terminal_and_yes_does_nothing(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("mailbox", "skip", "3", "7") == ExitCode.NO
    assert not server.asked
    assert "--yes" in capsys.readouterr().err


@pytest.mark.parametrize(("typed", "done"), [("y", True), ("Y ", True), ("", False), ("no", False)])
def test_a_skip_asks_naming_its_target(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed: str,
    done: bool,
) -> None:
    questions: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)

    def answer() -> str:
        questions.append(capsys.readouterr().err)
        return typed

    monkeypatch.setattr("builtins.input", answer)
    server.answers |= {"mailbox.skip": {"schema": 1, "skipped": True}, "mailbox.show": STOPPED}
    assert run("mailbox", "skip", "3", "7") == (ExitCode.OK if done else ExitCode.NO)
    assert "slot 3, offset 7" in questions[0]
    asked = [name for name, _ in server.asked]
    assert asked == ["mailbox.show", *(["mailbox.skip", "mailbox.show"] if done else [])]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("skip", "4", "7"), "slot 4 is not stopped"),
        (("skip", "3", "8"), "slot 3 stands at 7, not at 8"),
        (("redeliver", "3", "7"), "slot 3 has not passed 7 yet, it stands at 7"),
    ],
)
def test_nobody_is_asked_about_what_would_be_refused_anyway(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    why: str,
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda: pytest.fail("asked"))
    server.answers["mailbox.show"] = STOPPED
    assert run("mailbox", *arguments) == ExitCode.NO
    assert capsys.readouterr().err == f"qimctl: {why}\n"
    assert [name for name, _ in server.asked] == ["mailbox.show"]


def test_a_record_that_the_slot_has_passed_may_be_redelivered(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda: "y")
    server.answers |= {"mailbox.show": STOPPED, "mailbox.redeliver": {"schema": 1, "recipients": 1}}
    assert run("mailbox", "redeliver", "3", "6") == ExitCode.OK


def test_a_change_is_followed_by_a_look_at_the_state(server: Server) -> None:
    server.answers |= {"outbox.skip": {"schema": 1, "skipped": True}, "outbox.show": HEALTHY}
    assert run("outbox", "skip", "3", "7", "--yes") == ExitCode.OK
    assert server.asked == [("outbox.skip", {"slot": 3, "offset": 7}), ("outbox.show", {})]


def test_a_dry_run_looks_and_changes_nothing(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers["mailbox.show"] = STOPPED
    assert run("mailbox", "redeliver", "3", "7", "--dry-run") == ExitCode.OK
    assert server.asked == [("mailbox.show", {})]
    assert "would do: mailbox redeliver: slot 3, offset 7" in capsys.readouterr().err


def test_tools_without_a_server_are_started_with_their_words(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def start(*command: Any) -> int:
        started.append(command)
        return 1

    monkeypatch.setattr("qim.ctl.commands.run_server_tool", start)
    assert run("audit", "--json", "--data-dir", "x") == ExitCode.NO
    assert started == [("audit", ("--json", "--data-dir", "x"))]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["mailbox", "retry", "many"], "many"), (["mailbox", "retry"], "--slot"), (["nowhere"], "nowhere")],
)
def test_wrong_usage_is_one_line_and_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], word: str
) -> None:
    monkeypatch.setattr("sys.argv", ["qimctl", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert word in line

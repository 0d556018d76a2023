"""`python -m tests.checker`: what it prints and how it ends."""

import json
from pathlib import Path

import pytest

from tests.checker.__main__ import app
from tests.checker.generated import clean_run
from tests.checker.history import STORE_READS, Recorder
from tests.checker.mutators import SIXTEEN, AnyEvent, mutate


def _run_folder(folder: Path, events: list[AnyEvent]) -> Path:
    with (
        Recorder(folder / "stores.jsonl", holds="stores") as stores,
        Recorder(folder / "clients.jsonl") as clients,
    ):
        for event in events:
            (stores if isinstance(event, STORE_READS) else clients).write(event)
    return folder


def _call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app(list(arguments))
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_a_clean_run_ends_with_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _call(str(_run_folder(tmp_path, clean_run(2)))) == 0
    said = capsys.readouterr().out
    assert "clean" in said
    assert "deliveries" in said


def test_a_broken_run_ends_with_one_and_names_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _run_folder(tmp_path, mutate(SIXTEEN[6], clean_run(2), 2))
    assert _call(str(folder / "stores.jsonl"), str(folder / "clients.jsonl"), "--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert result["clean"] is False
    assert result["violations"]["corrupt"] >= 1


@pytest.mark.parametrize("arguments", [[], ["/nowhere/at-all.jsonl"]])
def test_a_history_that_is_not_there_ends_with_two(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _call(*arguments) == 2
    assert capsys.readouterr().err


def test_an_empty_folder_is_no_clean_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _call(str(tmp_path)) == 2
    assert "no *.jsonl files" in capsys.readouterr().err

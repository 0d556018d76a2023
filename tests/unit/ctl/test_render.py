"""What an operator sees: tables where they fit, lists where they do not, and no foreign escape sequence."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from qim.ctl import render


def shown(result: dict[str, Any], *, columns: int = 120) -> str:
    stream = io.StringIO()
    render.show(result, console=Console(file=stream, width=columns))
    return stream.getvalue()


def test_facts_come_first_then_one_table_per_list() -> None:
    lines = shown({"schema": 1, "rows": [{"slot": 3, "epoch": 2}], "ready": True}).splitlines()
    assert lines[0].split() == ["ready", "yes"]
    assert lines[1].strip() == "rows"
    assert lines[2].split() == ["slot", "┃", "epoch"]
    assert lines[4].split() == ["3", "│", "2"]


def test_the_schema_number_is_for_programs_only() -> None:
    assert "schema" not in shown({"schema": 1, "ready": False})


def test_several_reasons_stand_below_each_other() -> None:
    lines = shown({"reasons": ["worker 0 waits: the store is down", "worker 1 is starting"]}).splitlines()
    assert [line[:24].strip() for line in lines] == ["reasons", ""]
    assert lines[1].strip() == "worker 1 is starting"


def test_an_empty_list_says_none_instead_of_nothing() -> None:
    assert shown({"stopped": []}).split() == ["stopped", "none"]


def test_a_table_that_does_not_fit_becomes_a_list_of_its_rows() -> None:
    rows = [{"store": "unix:///a/long/path/to/the/store.sock", "roles": "core, mailbox", "evicted": 0}] * 2
    assert "┃" in shown({"stores": rows}, columns=100)
    narrow = shown({"stores": rows}, columns=50)
    assert "┃" not in narrow
    assert "stores, 2 of 2" in narrow
    assert narrow.count("unix:///a/long/path/to/the/store.sock") == 2


def test_a_token_or_a_path_is_never_wrapped() -> None:
    assert "x" * 300 in shown({"token": "x" * 300}, columns=80)


@pytest.mark.parametrize(
    ("key", "value", "cell"),
    [
        ("pid", 12345, "12345"),
        ("messages", 12345, "12,345"),
        ("used_bytes", 3_559_192, "3.4 MiB"),
        ("used_bytes", 12, "12 B"),
        ("loop_lag_ms", 1.2345, "1.23"),
        ("days_left", None, "–"),
        ("stopped", False, "no"),
        ("unfinished", {"partition 3": "gone"}, "partition 3 gone"),
        ("unfinished", {}, "–"),
    ],
)
def test_a_value_is_written_for_the_eye(key: str, value: object, cell: str) -> None:
    assert shown({key: value}).split(None, len(key.split("_")))[-1].strip() == cell


@pytest.mark.parametrize("evil", ["\x1b[2J", "\r", "\u202e", "\x9b31m", "\ue000"])
def test_foreign_text_cannot_repaint_the_terminal(evil: str) -> None:
    text = shown({"reasons": [f"a{evil}b"], "rows": [{"reason": f"a{evil}b"}]})
    assert evil not in text
    assert text.count(evil.encode("unicode_escape").decode()) == 2


def test_json_keeps_keys_order_and_exact_values() -> None:
    result = {"schema": 1, "days_left": 1.23456789, "rows": [{"slot": 1}], "by_slot": {3: 4}}
    text = render.to_json(result)
    assert json.loads(text) == {**result, "by_slot": {"3": 4}}
    assert list(json.loads(text)) == list(result)

"""`qim/docs/what-survives.md` is true: whatever it names to show a claim exists and runs where the page says.

The page is read by people who will type what stands there, so each test, make target and `qimctl` command is
looked up; each row has a number and each number has something that shows it. Whether the tests pass is the
business of `make test` and `make test-long`.
"""

import ast
import re
from functools import cache
from typing import Final

import pytest

from qim.ctl import cli
from tests.style.source_files import ROOT

PAGE: Final = "qim/docs/what-survives.md"
TEXT: Final = (ROOT / PAGE).read_text(encoding="utf-8")
NODE: Final = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`( †)?")
HEADING: Final = "## The commands that show it"


@cache
def functions_of(path: str) -> dict[str, bool]:
    """Test function → whether it is marked long, by itself or with its module."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    is_module_long = any(
        "pytest.mark.long" in ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)
    )
    return {
        node.name: is_module_long or any("mark.long" in ast.unparse(mark) for mark in node.decorator_list)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]


def wrong_nodes(text: str) -> list[str]:
    """Tests that do not exist, and † that stand where they should not or miss where they should."""
    wrong = []
    for path, name, mark in NODE.findall(text):
        known = functions_of(path) if (ROOT / path).is_file() else {}
        if name not in known:
            wrong.append(f"{path}::{name} does not exist")
        elif known[name] != bool(mark):
            wrong.append(f"{path}::{name} is {'' if known[name] else 'not '}marked long")
    return wrong


def test_every_test_that_the_page_names_exists_and_runs_where_it_says() -> None:
    assert len(NODE.findall(TEXT)) > 50
    assert TEXT.count("`tests/") == len(NODE.findall(TEXT))
    assert wrong_nodes(TEXT) == []


def test_every_make_target_that_the_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)`", TEXT))
    assert named
    assert named <= targets


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`qimctl ([a-z ]+)`", TEXT))))
def test_every_command_that_the_page_names_is_understood(command: str) -> None:
    found, _bound, unused = cli.app.parse_args(command, exit_on_error=False, print_error=False)[:3]
    assert callable(found)
    assert not unused


def test_every_row_is_shown_and_the_rows_are_numbered_in_their_order() -> None:
    events, shown = TEXT.split(HEADING + "\n")
    rows = numbers(events)
    assert rows == list(range(1, len(rows) + 1))
    beyond = [number for number in numbers(shown) if number not in rows]
    assert numbers(shown) == rows + beyond
    assert all(
        re.search(rf"\((?:\d+ to )?{number}\)|\({number} to", events) for number in (beyond[0], beyond[-1])
    )


def test_the_page_is_found_from_the_readme() -> None:
    assert f"({PAGE})" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_what_is_gone_is_seen() -> None:
    here = "tests/style/test_operators_page.py"
    assert wrong_nodes(f"`{here}::test_gone`") == [f"{here}::test_gone does not exist"]
    assert wrong_nodes("`tests/gone.py::test_x` †") == ["tests/gone.py::test_x does not exist"]
    assert wrong_nodes(f"`{here}::test_what_is_gone_is_seen` †") == [
        f"{here}::test_what_is_gone_is_seen is not marked long"
    ]

"""Every module says what it is and why it is like this; no file is a drawer for leftovers."""

import ast
import re

from tests.style.source_files import ROOT, python_sources, text_files

DOCSTRING_LINES_MAX = 40
"""The rule is 5 to 25; drawings, key lists and invariants belong there too and may need more."""
OPEN_PROMISES = re.compile(r"\b(" + "TO" + "DO|FIX" + "ME|X" + "XX|HA" + r"CK)\b")
MACHINE_TEXT = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users)/")
"""Paths of one person's machine. `/root` and homes never belong into a project that runs elsewhere."""


def test_every_module_opens_with_a_docstring() -> None:
    missing = [source.path for source in python_sources() if not ast.get_docstring(source.tree)]
    assert missing == []


def test_docstrings_of_the_product_explain_and_do_not_ramble() -> None:
    found = []
    for source in python_sources():
        text = ast.get_docstring(source.tree) or ""
        lines = text.count("\n") + 1
        if source.is_in("qim", "workers") and not (3 <= lines <= DOCSTRING_LINES_MAX):
            found.append(f"{source.path}: {lines} lines of module docstring")
    assert not found, "\n".join(found)


def test_no_module_is_named_for_leftovers() -> None:
    names = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}
    assert [source.path for source in python_sources() if source.path.rpartition("/")[2] in names] == []


def test_nothing_is_left_open() -> None:
    found = [f"{path}: {match[0]}" for path, text in text_files() for match in OPEN_PROMISES.finditer(text)]
    assert not found, "\n".join(found)


def test_no_path_of_a_machine_is_written_down() -> None:
    found = [f"{path}: {match[0]}" for path, text in text_files() for match in MACHINE_TEXT.finditer(text)]
    assert not found, "\n".join(found)


def test_the_top_level_holds_what_the_layout_names() -> None:
    folders = {"qim", "workers", "lua", "tuning", "loadtest", "tests", "systemd"}
    found = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert found - {"build", "dist"} <= folders

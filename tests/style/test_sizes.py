"""Sizes: a module has one subject and a function one thought; a script blocks its server and stays short."""

import ast

from tests.style.source_files import ROOT, functions, lines_of, python_sources

MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
NESTED_FUNCTION_LINES_MAX = 10
SCRIPT_LINES_MAX = 60
LONGER_SCRIPTS = {"commit_messages.lua": 115, "change_membership.lua": 120, "reserve_messages.lua": 80}
"""The first does in one step what three scripts do apart, the second moves version, snapshot, intervals and
the event of a change together; that is their point. The third also decides who may send to a group."""


def test_no_module_is_too_long() -> None:
    long = {source.path: source.text.count("\n") for source in python_sources()}
    assert {path: lines for path, lines in long.items() if lines > MODULE_LINES_MAX} == {}


def test_no_function_is_too_long() -> None:
    found = [
        f"{source.path}:{node.lineno} {node.name} has {lines_of(node)} lines"
        for source in python_sources()
        for node in functions(source.tree)
        if lines_of(node) > FUNCTION_LINES_MAX
    ]
    assert not found, "\n".join(found)


def test_no_nested_function_is_long() -> None:
    found = [
        f"{source.path}:{inner.lineno} {inner.name} in {outer.name} has {lines_of(inner)} lines"
        for source in python_sources()
        if not source.is_in("tests")
        for outer in functions(source.tree)
        for statement in outer.body
        for inner in functions(ast.Module(body=[statement], type_ignores=[]))
        if lines_of(inner) > NESTED_FUNCTION_LINES_MAX
    ]
    assert not found, "\n".join(found)


def test_no_script_is_too_long() -> None:
    long = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "lua").rglob("*.lua")}
    limits = dict.fromkeys(long, SCRIPT_LINES_MAX) | LONGER_SCRIPTS
    assert {name: lines for name, lines in long.items() if lines > limits[name]} == {}

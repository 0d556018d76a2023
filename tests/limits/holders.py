"""Finds every attribute that can hold a growing number of things: the queues, tables and buffers of the code.

What counts is an empty collection that an object makes for itself and that somebody may fill later. A
collection that is made with a `maxlen` says its bound itself. The adapters in memory are models of a store,
and a store is bounded by its memory, not by us.
"""

import ast
from collections.abc import Iterator
from typing import Final

from tests.style.source_files import Source, called_name, python_sources

GROWING_CALLS: Final = frozenset(
    {"deque", "asyncio.Queue", "set", "dict", "list", "defaultdict", "bytearray", "Inbox", "Counter"}
)
MODELS: Final = ("_memory.py",)


def holders() -> dict[str, str]:
    """`path Class.attribute` of each, with the line it stands at."""
    return {
        f"{source.path} {name}": f"{source.path}:{line}"
        for source in python_sources()
        if source.is_in("qim", "workers") and not source.path.endswith(MODELS)
        for name, line in holders_of(source)
    }


def holders_of(source: Source) -> Iterator[tuple[str, int]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            for statement in ast.walk(node):
                target, value = _assignment(statement)
                if target and value is not None and _is_growing(value):
                    yield f"{node.name}.{target}", statement.lineno  # type: ignore[attr-defined]  # a statement


def _assignment(node: ast.AST) -> tuple[str, ast.expr | None]:
    match node:
        case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name), value=value):
            return name, value
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value):
            return name, value
        case _:
            return "", None


def _is_growing(value: ast.expr) -> bool:
    match value:
        case ast.Dict(keys=[]) | ast.List(elts=[]):
            return True
        case ast.Call(args=args, keywords=keywords) if called_name(value) in GROWING_CALLS:
            is_bounded = any(keyword.arg == "maxlen" for keyword in keywords)
            return not is_bounded and (not args or called_name(value) == "Inbox")
        case _:
            return False

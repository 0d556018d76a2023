"""The project's own files, parsed once, for every style test.

Only files under version control's folders of the fixed layout are read; what a build or a run leaves behind
is not.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
CODE_FOLDERS: Final = ("qim", "workers", "loadtest", "tests")


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file."""

    path: str
    """From the root of the project, with forward slashes."""
    text: str
    tree: ast.Module

    def is_in(self, *folders: str) -> bool:
        return any(self.path == folder or self.path.startswith(f"{folder}/") for folder in folders)


@cache
def python_sources() -> tuple[Source, ...]:
    """Every Python file of the project."""
    found = []
    for folder in CODE_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            found.append(Source(path.relative_to(ROOT).as_posix(), text, ast.parse(text, filename=str(path))))
    return tuple(found)


@cache
def text_files() -> tuple[tuple[str, str], ...]:
    """Path and text of every file a reader of the project sees, except the licence and the pinned
    packages.
    """
    folders = (*CODE_FOLDERS, "lua", "tuning", "systemd", ".ci")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    paths += [
        path
        for path in ROOT.iterdir()
        if path.is_file() and path.name not in {"LICENSE", "requirements.lock"}
    ]
    found = []
    for path in sorted(paths):
        if "__pycache__" not in path.parts:
            try:
                found.append((path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")))
            except UnicodeDecodeError:
                continue
    return tuple(found)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from `def` to its end."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def called_name(node: ast.Call) -> str:
    """`time.time` for `time.time()`, `.create_task` behind anything else than a name."""
    match node.func:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            return f"{owner}.{name}"
        case ast.Attribute(attr=name):
            return f".{name}"
        case _:
            return ""

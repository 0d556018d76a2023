"""Who may import whom: the contracts of `pyproject.toml`, and the imports that one file alone may have."""

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest
from grimp import ImportGraph

from tests.style.only_contract import OnlyContract
from tests.style.source_files import ROOT, Source, python_sources

ONLY_IMPORTER = {
    # One loop implementation, chosen in one place: every role also runs on a stock loop.
    "uvloop": ("workers/worker.py", "loadtest", "tests"),
    # Time is passed in; the clock is where it comes from. Tests and generators measure real time.
    "time": ("qim/clock.py", "qim/ctl", "qim/client", "workers", "loadtest", "tests"),
    "pickle": (),
    "marshal": (),
    "shelve": (),
}


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _violations(source: Source) -> list[str]:
    found = []
    for module in _imported(source.tree):
        top = module.partition(".")[0]
        if top in ONLY_IMPORTER and not source.is_in(*ONLY_IMPORTER[top]):
            found.append(f"{source.path} imports {module}; only {ONLY_IMPORTER[top] or 'nobody'} may")
    return found


def test_import_contracts_are_kept() -> None:
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command as run; run()",
            "--no-cache",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def _contract_is_kept(imported: str) -> bool:
    graph = ImportGraph()
    for module in ("qim.wire", "qim.wire.frames", "qim.ids", imported):
        graph.add_module(module)
    graph.add_import(importer="qim.wire.frames", imported="qim.ids")
    graph.add_import(importer="qim.wire.frames", imported=imported)
    options = {"source_modules": ["qim.wire"], "allowed_modules": ["qim.wire", "qim.ids"]}
    contract = OnlyContract(name="wire", session_options={}, contract_options=options)
    return contract.check(graph, verbose=False).kept


def test_a_contract_refuses_what_its_row_does_not_name() -> None:
    assert _contract_is_kept("qim.wire.layout")
    assert _contract_is_kept("struct")
    assert not _contract_is_kept("qim.config")
    assert not _contract_is_kept("workers.writer")


def test_special_imports_stay_in_their_file() -> None:
    assert [line for source in python_sources() for line in _violations(source)] == []


@pytest.mark.parametrize("text", ["import pickle", "from uvloop import install", "import time"])
def test_a_special_import_elsewhere_is_seen(text: str) -> None:
    assert _violations(Source("qim/domain/x.py", text, ast.parse(text)))


def test_adapters_are_chosen_in_one_file() -> None:
    """Every role receives ports; only the wiring, the start guards and the store commands name a medium."""
    allowed = (
        "workers/wiring.py",
        "workers/guards.py",
        "workers/init.py",
        "workers/audit.py",
    )
    found = [
        f"{source.path} imports {module}"
        for source in python_sources()
        if source.is_in("workers") and not source.is_in(*allowed)
        for module in _imported(source.tree)
        if module.startswith("qim.adapters")
    ]
    assert not found, "\n".join(found)

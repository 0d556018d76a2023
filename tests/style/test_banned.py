"""Calls that are refused, each with the reason, and each with a proof that the check sees it."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.style.source_files import Source, called_name, functions, python_sources

HOT_ROLES = (
    "workers/gateway.py",
    "workers/connections.py",
    "workers/login.py",
    "workers/writer.py",
    "workers/commits.py",
    "workers/fanout.py",
    "workers/mailbox.py",
    "workers/shards.py",
    "workers/pushes.py",
    "workers/link.py",
)
START_FUNCTIONS = frozenset({"run", "start", "__init__", "drain"})
# The one polls with a deadline, the other behaves like a client that waits before it connects again.
SLEEPERS = ("tests/waiting.py", "tests/process/load.py", "tests/simulation")
"""In the simulation a sleep moves the clock: its time is a number."""


def _calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, called_name(node)


def hash_calls(source: Source) -> list[str]:
    """`hash()` differs from process to process; placement uses fixed hashes."""
    if not source.is_in("qim", "workers"):
        return []
    return [f"{source.path}:{node.lineno} hash()" for node, name in _calls(source.tree) if name == "hash"]


def clock_calls(source: Source) -> list[str]:
    """Wall time is read from the clock that is passed in; in `domain`, monotonic time too."""
    banned = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"}
    if source.is_in("qim/domain", "qim/wire"):
        banned |= {"time.monotonic", "time.monotonic_ns", "clock.now_ms", ".now_ms"}
    if source.is_in("qim/clock.py"):
        return []
    return [f"{source.path}:{node.lineno} {name}()" for node, name in _calls(source.tree) if name in banned]


def task_calls(source: Source) -> list[str]:
    """A task per message is the largest cost a role can add; tasks are made at its start only."""
    if not source.is_in(*HOT_ROLES):
        return []
    found = []
    for function in functions(source.tree):
        if function.name in START_FUNCTIONS:
            continue
        for node, name in _calls(function):
            if name.endswith(("create_task", "ensure_future", "run_in_executor", "to_thread")):
                found.append(f"{source.path}:{node.lineno} {name}() in {function.name}")
    return found


def query_strings(source: Source) -> list[str]:
    """A query to a shared store is constant and its values are bound; an f-string is how injections begin."""
    if not source.is_in("qim/adapters", "workers"):
        return []
    found = []
    for node, name in _calls(source.tree):
        queries = name.endswith((".execute", ".executemany", ".prepare", ".execute_async"))
        if queries and node.args and isinstance(node.args[0], ast.JoinedStr):
            found.append(f"{source.path}:{node.lineno} f-string in {name}()")
    return found


def sleeps_in_tests(source: Source) -> list[str]:
    """A test polls with a deadline or moves the clock. `sleep(0)` only lets the loop run and is allowed."""
    if not source.is_in("tests") or source.is_in(*SLEEPERS):
        return []
    found = []
    for node, name in _calls(source.tree):
        yields = bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
        if name in {"time.sleep", "asyncio.sleep", "sleep"} and not yields:
            found.append(f"{source.path}:{node.lineno} {name}()")
    return found


def broad_handlers(source: Source) -> list[str]:
    """`except Exception` stands at the top of a role, and says so beside it. Cleaning up and raising
    again is fine.
    """
    if not source.is_in("qim", "workers"):
        return []
    lines = source.text.splitlines()
    found = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler) or isinstance(node.body[-1], ast.Raise):
            continue
        if _is_broad(node.type) and not re.search(r"# noqa: \S+ - \w+", lines[node.lineno - 1]):
            found.append(f"{source.path}:{node.lineno} broad handler without its reason")
    return found


def _is_broad(caught: ast.expr | None) -> bool:
    return caught is None or (isinstance(caught, ast.Name) and caught.id in {"Exception", "BaseException"})


def bare_suppressions(source: Source) -> list[str]:
    """A suppression names its rule and gives its reason: on the same line, for a type also right above."""
    lint = re.compile(r"# noqa(?!: [A-Z]+[0-9]+(, ?[A-Z]+[0-9]+)* - \S)")
    types = re.compile(r"# type: ignore(?!\[[a-z-]+\] +# ?\S)")
    if source.path == "tests/style/test_banned.py":
        return []  # its samples are broken on purpose
    lines = ["", *source.text.splitlines()]
    return [
        f"{source.path}:{number} suppression without its reason"
        for number, line in enumerate(lines)
        if (lint.search(line) and source.is_in("qim", "workers", "loadtest"))
        or (types.search(line) and not lines[number - 1].lstrip().startswith("#"))
    ]


CHECKS = (
    hash_calls,
    clock_calls,
    task_calls,
    query_strings,
    sleeps_in_tests,
    broad_handlers,
    bare_suppressions,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_nothing_banned_is_used(check: object) -> None:
    assert callable(check)
    found = [line for source in python_sources() for line in check(source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("check", "path", "text"),
    [
        (hash_calls, "qim/domain/x.py", "hash('a')"),
        (clock_calls, "workers/x.py", "import time\ntime.time()"),
        (clock_calls, "qim/domain/x.py", "clock.now_ms()"),
        (task_calls, "workers/writer.py", "def on_send():\n    asyncio.create_task(work())"),
        (query_strings, "qim/adapters/x.py", "session.execute(f'select {a}')"),
        (sleeps_in_tests, "tests/unit/x.py", "asyncio.sleep(1)"),
        (broad_handlers, "workers/x.py", "try:\n    pass\nexcept Exception:\n    pass"),
        (bare_suppressions, "qim/x.py", "x = 1  # noqa"),
        (bare_suppressions, "tests/unit/x.py", "x: int = ''  # type: ignore[assignment]"),
    ],
)
def test_each_banned_thing_is_seen(check: object, path: str, text: str) -> None:
    assert callable(check)
    assert check(Source(path, text, ast.parse(text)))

"""The table of limits against the code: no constant, no collection and no test that the table does not
know.
"""

import ast
import re
from functools import cache

import pytest

from tests.limits.holders import holders, holders_of
from tests.limits.table import BOUNDS, HOLDERS, OTHERS, REASONS
from tests.style.source_files import Source, functions, python_sources

LIMITS = "qim/limits.py"
UNIT = re.compile(
    r"(^|_)(BYTES|MS|SECONDS?|DAYS|ENTRIES|RECORDS|MESSAGES|ITEMS|COMMANDS|REQUESTS|SESSIONS|CONNECTIONS?|KEYS"
    r"|ADDRESSES|TARGETS|RECIPIENTS|READS|RETRIES|QUERIES|BUCKETS|PERMITS|RATIO|HEADERS|BURST|USERS|MEMBERS)(_|$)"
)
WITHOUT_UNIT = {
    "SLOTS", "BUCKETS", "BUCKETS_PER_SLOT", "ROUTES_MAX", "PULLS_WAITING_MAX", "BATCHES_IN_FLIGHT_MAX",
    "FLAPPING_DEATHS", "RESTART_JITTER", "EPHEMERAL_LIFE_MS", "GROUP_SHARD_PARTS_MAX",
    "SNAPSHOTS_PER_PLAN_MAX",
}  # fmt: skip
"""Their name is the thing that is counted, or a share of one."""


@cache
def source_of(path: str) -> Source:
    return next(source for source in python_sources() if source.path == path)


def constants() -> dict[str, str]:
    """Name and the sentence below it, of every constant of the module of limits."""
    body = source_of(LIMITS).tree.body
    found = {}
    for at, node in enumerate(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            match body[at + 1 : at + 2]:
                case [ast.Expr(value=ast.Constant(value=str(words)))]:
                    found[node.target.id] = words
                case _:
                    found[node.target.id] = ""
    return found


def constant_named(bound: str) -> tuple[str, str]:
    """File and name of a bound of the table."""
    path, _, name = bound.rpartition(" ")
    return path or LIMITS, name


def test_every_constant_is_either_a_bound_or_something_else_by_name() -> None:
    listed = [name for path, name in map(constant_named, BOUNDS) if path == LIMITS]
    listed += [name for names in OTHERS.values() for name in names]
    assert sorted(listed) == sorted(constants())


def test_every_constant_says_its_unit() -> None:
    silent = [name for name in constants() if not UNIT.search(name) and name not in WITHOUT_UNIT]
    assert silent == []


def test_every_constant_has_its_reason_in_one_place() -> None:
    described = {name for name, words in constants().items() if words}
    assert constants().keys() - described == REASONS.keys(), "a reason is missing, or stands twice"


def test_every_constant_is_used_by_the_code() -> None:
    own = source_of(LIMITS).text
    code = "".join(source.text for source in python_sources() if source.is_in("qim", "workers")).replace(
        own, ""
    )
    unused = [name for name in constants() if not re.search(rf"\b{name}\b", code)]
    # A constant may also exist to explain another one.
    assert [name for name in unused if len(re.findall(rf"\b{name}\b", own)) < 2] == []


@pytest.mark.parametrize("bound", BOUNDS)
def test_each_bound_exists_and_is_filled_by_a_test(bound: str) -> None:
    path, name = constant_named(bound)
    assert re.search(rf"^{name}\b", source_of(path).text, re.MULTILINE), f"{path} has no {name}"
    assert BOUNDS[bound].when_full
    assert BOUNDS[bound].filled_by
    for test in BOUNDS[bound].filled_by:
        file, _, function = test.partition("::")
        names = {node.name for node in functions(source_of(f"tests/{file}").tree)}
        assert function in names, f"{file} has no {function}"


def test_every_growing_collection_has_what_bounds_it() -> None:
    found = holders()
    unknown = [f"{place} ({name})" for name, place in found.items() if name not in HOLDERS]
    assert not unknown, "say in tests/limits/table.py what bounds:\n" + "\n".join(unknown)
    gone = [name for name in HOLDERS if name not in found]
    assert not gone, gone


def test_what_bounds_a_collection_exists() -> None:
    code = "".join(source.text for source in python_sources() if source.is_in("qim", "workers"))
    named = {bound for bound in HOLDERS.values() if " " not in bound}
    assert [bound for bound in named if not re.search(rf"\b{bound}\b", code)] == []


def test_a_collection_without_a_bound_is_seen() -> None:
    text = (
        "class Role:\n"
        "    def __init__(self):\n"
        "        self.a = deque()\n"
        "        self.b: dict[int, int] = {}\n"
        "        self.c: asyncio.Queue[int] = asyncio.Queue()\n"
        "        self.d = deque(maxlen=3)\n"
        "        self.e = Inbox(items_max=3, bytes_max=0)\n"
        "        self.f = list(other)\n"
    )
    source = Source("workers/role.py", text, ast.parse(text))
    assert [name for name, _line in holders_of(source)] == ["Role.a", "Role.b", "Role.c", "Role.e"]

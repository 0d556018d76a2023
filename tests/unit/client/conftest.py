"""A fake server per test, and clients of its one user that are closed at the end."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from qim.client import AsyncClient
from tests.unit.client.fake_server import FakeServer, build_token

Enter = Callable[..., Any]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
def ca(server: FakeServer, tmp_path: Path) -> Path:
    path = tmp_path / "ca.pem"
    server.authority.cert_pem.write_to_path(str(path))
    return path


class Reader:
    """Collects the events of one client while the test goes on."""

    def __init__(self, client: AsyncClient) -> None:
        self.events: list[Any] = []
        self.failure: BaseException | None = None
        self._client = client
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async for event in self._client.events():
                self.events.append(event)
        except Exception as error:  # noqa: BLE001 - whatever ends the stream is what the test asks about
            self.failure = error

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def texts(self) -> list[str]:
        from qim.client import MessagesAdded

        return [message.text for event in self.of(MessagesAdded) for message in event.messages]


@pytest_asyncio.fixture
async def enter(server: FakeServer, ca: Path, tmp_path: Path) -> AsyncIterator[Enter]:
    """`client, reader = await enter()`; the same data directory unless told otherwise."""
    async with AsyncExitStack() as stack:

        async def build(
            *, data: str = "data", token: str | None = None, endpoint: str | None = None, **more: Any
        ) -> tuple[AsyncClient, Reader]:
            client = AsyncClient(
                endpoint or server.endpoint, token or build_token(), data_dir=tmp_path / data, ca=ca, **more
            )
            await stack.enter_async_context(client)
            reader = Reader(client)
            stack.push_async_callback(_join, reader)
            return client, reader

        yield build


async def _join(reader: Reader) -> None:
    reader.task.cancel()
    await asyncio.gather(reader.task, return_exceptions=True)

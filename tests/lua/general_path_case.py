"""What the tests of the three scripts of the general path share."""

from collections.abc import AsyncIterator

import pytest

from qim.adapters.mailbox_redis import RedisMailboxStore
from qim.adapters.redis_pipe import RedisPipe
from tests.lua.mailbox_case import open_store
from tests.services import StoreServer

Opened = tuple[RedisPipe, RedisMailboxStore]


@pytest.fixture
async def opened(store_server: StoreServer) -> AsyncIterator[Opened]:
    pipe, store = await open_store(store_server)
    yield pipe, store
    await pipe.close()


async def fill(pipe: RedisPipe) -> None:
    await pipe.command("CONFIG", "SET", "maxmemory", "1")


async def empty(pipe: RedisPipe) -> None:
    await pipe.command("CONFIG", "SET", "maxmemory", "0")

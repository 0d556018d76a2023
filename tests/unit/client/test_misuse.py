"""What a program does wrong with a client, and that it is told so before anything is sent."""

import pytest

from qim.limits import PAGE_ENTRIES_MAX
from qim.wire.layout import Op
from tests.unit.client.conftest import Enter
from tests.unit.client.fake_server import PEER, FakeServer


@pytest.mark.parametrize("limit", [0, -1])
async def test_a_limit_below_one_is_refused_before_anything_is_asked(
    server: FakeServer, enter: Enter, limit: int
) -> None:
    client, _ = await enter()
    for read in (client.history, client.messages):
        with pytest.raises(ValueError, match=f"limit is at least 1, not {limit}"):
            await read(PEER, limit=limit)
    assert not server.received(Op.PULL_HISTORY)


async def test_a_limit_above_a_page_asks_for_a_whole_page(server: FakeServer, enter: Enter) -> None:
    client, _ = await enter()
    await client.history(PEER, limit=PAGE_ENTRIES_MAX + 1)
    assert [request.limit for request in server.received(Op.PULL_HISTORY)] == [PAGE_ENTRIES_MAX]


async def test_a_client_that_is_entered_twice_says_so_and_goes_on(enter: Enter) -> None:
    client, _ = await enter()
    with pytest.raises(RuntimeError, match="entered once"):
        await client.__aenter__()
    await client.send(PEER, "goes on")

"""O13: a connection that is dead and looks alive, behind a proxy that holds the bytes and closes nothing.

Scaled: pings every second instead of 25, silence of 3 s instead of 33, on the client of 4 s; twenty messages
a tenth of a second apart instead of three; restored after 1 s and after 8 s instead of 10 s and 5 min. So the
short outage is below both limits and the long one above both, as in the case.
"""

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from qim.client import AsyncClient, transport
from qim.client.probe import Probe
from qim.errors import Replaced
from tests.faults.proxy import BOTH_WAYS, Direction, Faults, Proxy
from tests.field.figures import Figures
from tests.process.load import Account
from tests.rows.world import new_account, probe_of
from tests.services.dev_server import DevServer
from tests.waiting import eventually_async, happens, stays

pytestmark = pytest.mark.timeout(180)
PING_MS = 1_000
SERVER_SILENCE_MS = 3_000
CLIENT_SILENCE_SECONDS = 4.0
COUNT = 20
BETWEEN_SECONDS = 0.1
SLACK_SECONDS = 2.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    environment = {
        "QIM__GATEWAY__PING_INTERVAL_MS": str(PING_MS),
        "QIM__GATEWAY__SILENCE_MS_MAX": str(SERVER_SILENCE_MS),
    }
    with DevServer(tmp_path_factory.mktemp("d"), environment=environment) as server:
        yield server


@pytest.fixture
def proxy(server: DevServer) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", server.port)) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def quick_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "SILENCE_SECONDS_MAX", CLIENT_SILENCE_SECONDS)


def cursor_of(client: AsyncClient) -> int:
    with closing(sqlite3.connect(client.store_path)) as connection:
        return int(connection.execute("SELECT value FROM meta WHERE key = 'cursor'").fetchone()[0])


def connections(server: DevServer) -> int:
    """What the server counts as connected now; -1 while it does not say."""
    status = server.status()
    return int(status["connections"]) if status else -1


async def texts(client: AsyncClient, peer: Account) -> list[str]:
    return [message.text for message in await client.messages(peer.user, limit=1_000)]


async def pause(seconds: float) -> None:
    """Real time is the subject here: a limit of silence has to pass, or not to."""
    await stays(lambda: True, what="time passes", period_seconds=seconds)


async def say(server: DevServer, sender: Account, receiver: Account) -> list[str]:
    wanted = [f"while away {number}" for number in range(COUNT)]
    async with probe_of(server, sender) as probe:
        for text in wanted:
            await probe.send(receiver.user, text)
            await pause(BETWEEN_SECONDS)
    return wanted


@pytest.mark.long
@pytest.mark.shows("O13", "F-42", "K2", "K3")
@pytest.mark.parametrize(
    ("cut", "away_seconds"),
    [(BOTH_WAYS, 1.0), (BOTH_WAYS, 8.0), (frozenset[Direction]({"to_client"}), 8.0)],
    ids=["1 s", "8 s", "8 s, one way"],
)
async def test_a_device_behind_a_dead_line_moves_nothing_and_gets_everything_once(
    server: DevServer, proxy: Proxy, tmp_path: Path, figures: Figures,
    cut: frozenset[Direction], away_seconds: float,
) -> None:  # fmt: skip
    sender, receiver = new_account(server), new_account(server)
    before = connections(server)
    device = AsyncClient(f"127.0.0.1:{proxy.port}", receiver.token, ca=server.certificate, data_dir=tmp_path)
    async with device:
        async with probe_of(server, sender) as probe:
            await probe.send(receiver.user, "first")
        await eventually_async(lambda: has(device, sender, ["first"]), what="the line works")
        cursor = cursor_of(device)
        proxy.set(Faults(cut=cut))
        began = time.monotonic()
        talking = asyncio.create_task(say(server, sender, receiver))
        dropped = await until_dropped(server, before, began, away_seconds)
        wanted = ["first", *await talking]
        assert cursor_of(device) == cursor, "a position moved without the device"
        assert await texts(device, sender) == ["first"], "something came over a dead line"
        assert proxy.counters.held_bytes_to_client or proxy.counters.held_bytes_to_server
        proxy.heal()
        healed = time.monotonic()
        await eventually_async(
            lambda: has(device, sender, wanted), what="everything is here", timeout_seconds=30
        )
        back = time.monotonic() - healed
        await happens(lambda: connections(server) == before + 1, what="one connection and no other")
    figures.note("held", ", ".join(sorted(cut)))
    figures.note("seconds away", away_seconds)
    figures.note("the server dropped the dead connection after seconds", dropped)
    figures.note("complete after seconds", back)


async def has(client: AsyncClient, peer: Account, wanted: list[str]) -> bool:
    found = await texts(client, peer)
    assert len(found) == len(set(found)), "a message is here twice"
    return found == wanted


async def until_dropped(server: DevServer, before: int, began: float, away_seconds: float) -> float | str:
    """Stays away for so long, and notes when the server has given the connection up."""
    dropped: float | str = "not, the outage was shorter"
    limit = SERVER_SILENCE_MS / 1000 + SLACK_SECONDS
    if away_seconds > limit:
        # The sender's own connection comes and goes; the dead one is the one besides it.
        await happens(lambda: connections(server) <= before, what="it is dropped", timeout_seconds=30)
        dropped = time.monotonic() - began
        assert dropped <= max(limit, COUNT * BETWEEN_SECONDS * 2 + SLACK_SECONDS)
    await pause(max(0.0, away_seconds - (time.monotonic() - began)))
    return dropped


@pytest.mark.long
@pytest.mark.shows("O13")
async def test_the_late_end_of_an_old_socket_does_not_remove_the_new_session(
    server: DevServer, proxy: Proxy
) -> None:
    sender, receiver = new_account(server), new_account(server)
    old = Probe("127.0.0.1", proxy.port, server.certificate, token=receiver.token, device=receiver.device)
    async with old:
        proxy.set(Faults(cut=BOTH_WAYS))
        # The process of the device died and came back; its old socket still counts as online.
        async with probe_of(server, receiver, device=receiver.device) as new:
            proxy.heal()
            await old.closed()
            assert old.goaway is not None
            assert old.goaway.code == Replaced.code
            proxy.reset()
            async with probe_of(server, sender) as probe:
                await probe.send(receiver.user, "to the new one")
            await happens(lambda: len(new.pushed) == 1, what="the new session is still known")

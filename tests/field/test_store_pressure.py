"""O26: the local store of the SDK under load, killed, damaged, on a full and on a read-only disk.

Scaled: 300 messages a second received instead of 1,000, 25 kills instead of 100, on the disk of this machine;
a second process reads the same file and holds its write lock for a tenth of every second.
"""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qim.client import AsyncClient, MessageState, StoreError, StoreRebuilt, StoreTrouble
from qim.client.probe import text_message
from qim.wire.layout import Op
from tests.field.figures import Figures
from tests.process.load import Account
from tests.process.test_bad_input import MOUNT, fill, small_disk
from tests.rows.test_clients import Victim, feed, settle
from tests.rows.world import new_account, probe_of
from tests.services.dev_server import DevServer
from tests.waiting import eventually_async, happens, stays

pytestmark = pytest.mark.timeout(240)
SECONDS = 8.0
RECEIVED_PER_SECOND = 300
SENT_PER_SECOND = 50
KILLS = 25
DISK_BYTES = 2_000_000
NEIGHBOUR = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], timeout=30, isolation_level=None)
while True:
    connection.execute("SELECT count(*) FROM message").fetchone()
    connection.execute("BEGIN IMMEDIATE")
    time.sleep(0.1)
    connection.execute("COMMIT")
    print("held", flush=True)
    time.sleep(0.9)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    rates = {"QIM__LIMITS__SENDS_PER_SECOND": "10000", "QIM__LIMITS__SENDS_BURST": "10000"}
    with DevServer(tmp_path_factory.mktemp("d"), environment=rates) as server:
        yield server


def client_of(server: DevServer, account: Account, folder: Path) -> AsyncClient:
    return AsyncClient(f"127.0.0.1:{server.port}", account.token, ca=server.certificate, data_dir=folder)


async def flood(server: DevServer, sender: Account, receiver: Account, until: float) -> int:
    """At the rate of the case, in bundles of a thirtieth of a second."""
    sent, began = 0, time.monotonic()
    async with probe_of(server, sender) as probe:
        while time.monotonic() < until:
            due = int((time.monotonic() - began) * RECEIVED_PER_SECOND) - sent
            answers = [
                probe.post(Op.SEND_MESSAGE, text_message(receiver.user, f"in {sent + n}")) for n in range(due)
            ]
            sent += due
            for answer in answers:
                frame = await asyncio.wait_for(answer, 20)
                assert frame.opcode == Op.SEND_ACK
            await stays(lambda: True, what="the next bundle", period_seconds=1 / 30)
    return sent


async def send_on(client: AsyncClient, peer: Account, until: float) -> int:
    sent, began = 0, time.monotonic()
    while time.monotonic() < until:
        if sent < (time.monotonic() - began) * SENT_PER_SECOND:
            await client.send(peer.user, f"out {sent}")
            sent += 1
        else:
            await stays(lambda: True, what="the next send", period_seconds=1 / SENT_PER_SECOND)
    return sent


async def page_on(client: AsyncClient, peer: Account, until: float) -> int:
    pages = 0
    while time.monotonic() < until:
        page = await client.history(peer.user, before=random.Random(pages).randint(0, 500), limit=100)
        pages += len(page.messages) > 0
    return pages


async def troubles_of(client: AsyncClient, found: list[object]) -> None:
    async for event in client.events():
        found += [event] * isinstance(event, StoreTrouble | StoreRebuilt)


def start_neighbour(store: Path, held: Path) -> "subprocess.Popen[bytes]":
    with held.open("wb") as output:
        return subprocess.Popen([sys.executable, "-c", NEIGHBOUR, str(store)], stdout=output)


@pytest.mark.long
@pytest.mark.shows("O26", "K2")
async def test_receiving_sending_and_paging_at_once_beside_a_second_process_never_meets_a_lock(
    server: DevServer, pair: tuple[Account, Account], tmp_path: Path, figures: Figures
) -> None:
    account, peer = pair
    async with client_of(server, account, tmp_path) as client:
        troubles: list[object] = []
        noting = asyncio.create_task(troubles_of(client, troubles))
        neighbour = start_neighbour(client.store_path, tmp_path / "held")
        try:
            until = time.monotonic() + SECONDS
            received, sent, pages = await asyncio.gather(
                flood(server, peer, account, until),
                send_on(client, peer, until),
                page_on(client, peer, until),
            )

            async def is_complete() -> bool:
                return len(await client.messages(peer.user, limit=100_000)) == received + sent

            await eventually_async(is_complete, what="store and server agree", timeout_seconds=30)
        finally:
            neighbour.kill()
            neighbour.wait(10)
        noting.cancel()
        await asyncio.gather(noting, return_exceptions=True)
        assert troubles == []
        locks = (tmp_path / "held").read_text().count("held")
        assert locks, "the neighbour never held the lock"
        shown = await client.messages(peer.user, limit=100_000)
        async with probe_of(server, account) as probe:
            history = await probe.history(peer.user)
        assert [m.body for m in shown] == [entry.record.body for entry in history]
    figures.note("seconds", SECONDS)
    figures.note("received a second", received / SECONDS)
    figures.note("sent a second", sent / SECONDS)
    figures.note("pages of history read", pages)
    figures.note("times the neighbour held the lock", locks)


@pytest.mark.shows("O26", "K7")
async def test_another_account_in_the_same_process_sees_nothing_of_the_first(
    server: DevServer, pair: tuple[Account, Account], tmp_path: Path
) -> None:
    first, peer = pair
    second = new_account(server)
    async with client_of(server, first, tmp_path) as client:
        await client.send(peer.user, "of the first")
    async with client_of(server, second, tmp_path) as client:
        ack = await client.send(peer.user, "of the second")
        assert int(ack.conversation_seq) == 1
        assert [m.text for m in await client.messages(peer.user)] == ["of the second"]
        assert len(await client.conversations()) == 1


@pytest.mark.long
@pytest.mark.shows("O26", "F-37")
async def test_kills_at_random_moments_while_receiving_leave_a_sound_and_covered_store(
    server: DevServer, pair: tuple[Account, Account], tmp_path: Path, figures: Figures
) -> None:
    account, peer = pair
    victim, chance = Victim(server, account, peer, tmp_path / "victim"), random.Random(26)
    for _ in range(KILLS):
        wanted = len(victim.lines("told")) + chance.randint(1, 40)
        process = victim.start()
        await feed(server, peer, account, count=20)
        await happens(lambda n=wanted: len(victim.lines("told")) >= n, what="receiving", timeout_seconds=30)  # type: ignore[misc]  # bound in this turn of the loop
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait, 10)
        await victim.check_cursor()
    await settle(victim)
    figures.note("kills", KILLS)
    figures.note("messages told", len(victim.lines("told")))


# --- damage and disks ---------------------------------------------------------------------------------


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xff" * 4_096)


@pytest.mark.shows("O26")
@pytest.mark.parametrize("damage", [cut_short, overwrite_header])
async def test_a_damaged_store_is_set_aside_and_filled_again_by_the_server(
    server: DevServer, pair: tuple[Account, Account], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    account, peer = pair
    async with client_of(server, account, tmp_path) as client:
        await feed(server, peer, account, count=50)
        wanted = [f"fed {number}" for number in range(50)]
        await eventually_async(lambda: has(client, peer, wanted), what="all are here")
        path = client.store_path
    damage(path)
    async with client_of(server, account, tmp_path) as client:
        events = client.events()
        rebuilt = await asyncio.wait_for(anext(events), 10)
        assert isinstance(rebuilt, StoreRebuilt)
        assert Path(rebuilt.set_aside).exists()  # noqa: ASYNC240 - one look at a local file
        await eventually_async(lambda: has(client, peer, wanted), what="the server has filled it again")
        await client.send(peer.user, "goes on")


async def has(client: AsyncClient, peer: Account, wanted: list[str]) -> bool:
    return [m.text for m in await client.messages(peer.user, limit=1_000)] == wanted


@MOUNT
@pytest.mark.shows("O26", "F-36", "K1")
async def test_on_a_full_disk_a_send_is_refused_unsent_and_room_brings_it_back(
    server: DevServer, pair: tuple[Account, Account], tmp_path: Path
) -> None:
    account, peer = pair
    with small_disk(tmp_path / "disk", f"size={DISK_BYTES}") as disk:
        async with client_of(server, account, disk) as client:
            await client.send(peer.user, "before")
            fill(disk / "ballast")
            refused = 0
            for _ in range(40):
                with contextlib.suppress(StoreError):
                    await client.send(peer.user, "x" * 30_000, timeout=5)
                    continue
                refused += 1
            assert refused, "the disk was not full"
            (disk / "ballast").unlink()
            await client.wait_connected()
            await client.send(peer.user, "after")
            shown = await client.messages(peer.user, limit=1_000)
        async with probe_of(server, account) as probe:
            history = await probe.history(peer.user)
    assert len(history) == 42 - refused, "what was reported as not queued was sent, or the other way round"
    assert [m.body for m in shown if m.state is MessageState.STORED] == [e.record.body for e in history]


@MOUNT
@pytest.mark.shows("O26")
async def test_a_read_only_folder_is_a_clear_error(
    server: DevServer, pair: tuple[Account, Account], tmp_path: Path
) -> None:
    account, _ = pair
    with (
        small_disk(tmp_path / "disk", "ro") as disk,
        pytest.raises(StoreError, match=r"[Rr]ead-only|cannot|unable"),
    ):
        await client_of(server, account, disk).__aenter__()

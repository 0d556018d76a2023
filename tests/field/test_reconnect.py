"""O15: frames at and above the limit, and a restart that sends everybody away at once.

Scaled: 500 SDK clients instead of 5,000, in one process, of which some send all the time. The server asks
its clients back at about a hundred a second, so the spread grows with their number and the share of the
fullest second does not depend on it. After a crash nobody is asked for anything: the first attempt of an SDK
follows at once, so nearly all of them come back within one second. That is measured too, and only bounded by
nobody being lost and everybody being back in time.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from qim.client import AsyncClient, AuthError, MessageRejected, MessageState, Reconnected
from qim.client import client as sdk
from qim.client.errors import SdkError
from qim.client.probe import expect, text_message
from qim.errors import TooLarge, Unauthenticated
from qim.limits import FRAME_BODY_BYTES_MAX, MESSAGE_BODY_BYTES_MAX
from qim.records import MessageType
from qim.wire import bodies
from qim.wire.frames import Frame, build_frame
from qim.wire.layout import HEADER, PROTOCOL_VERSION, Op
from tests.field.figures import Figures
from tests.process.load import Account
from tests.rows.test_peers import memory_of, metric
from tests.rows.world import new_account, probe_of
from tests.services.dev_server import DevServer
from tests.waiting import happens, stays

pytestmark = pytest.mark.timeout(240)
CLIENTS = 500
TALKERS = 20
FULLEST_SECOND_MAX = 0.20
BACK_SECONDS_MAX = 60.0


def padded(peer: Account, size: int) -> bytes:
    """The body of a SEND_MESSAGE frame with exactly so many bytes."""
    model = msgspec.structs.replace(text_message(peer.user, ""), message_type=MessageType.CUSTOM)
    # The head of a byte string is three bytes longer at this length than at none.
    filling = size - len(bodies.encode_body(model)) - 3
    return bodies.encode_body(msgspec.structs.replace(model, body=bytes(filling)))


@pytest.mark.shows("O15", "F-45")
async def test_a_frame_at_the_limit_is_answered_and_one_above_ends_its_connection(
    server: DevServer, pair: tuple[Account, Account]
) -> None:
    sender, receiver = pair
    async with probe_of(server, sender) as probe:
        for size in (FRAME_BODY_BYTES_MAX - 1, FRAME_BODY_BYTES_MAX):
            raw = padded(receiver, size)
            assert len(raw) == size
            answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
            probe._answers[size] = answer
            probe.writer.write(build_frame(Op.SEND_MESSAGE, size, raw))
            frame = await asyncio.wait_for(answer, 10)
            assert expect(bodies.Error, bodies.decode_body(frame.opcode, frame.body)).code == TooLarge.code
        assert isinstance(await probe.send(receiver.user, "x" * MESSAGE_BODY_BYTES_MAX), bodies.SendAck)
    (worker,) = server.worker_pids()
    memory = memory_of(worker)
    for size in (FRAME_BODY_BYTES_MAX + 1, 10 * FRAME_BODY_BYTES_MAX, 2**32 - 1):
        async with probe_of(server, sender) as probe:
            probe.writer.write(HEADER.pack(PROTOCOL_VERSION, 0, Op.SEND_MESSAGE, 1, size) + bytes(10))
            await probe.closed()
            assert probe.goaway is not None
    assert memory_of(worker) - memory < 8 * 2**20, "a length that was announced was allocated"


@pytest.mark.shows("O15")
async def test_a_message_above_the_limit_is_failed_once_and_later_ones_flow(
    server: DevServer, pair: tuple[Account, Account], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = pair
    address = f"127.0.0.1:{server.port}"
    async with AsyncClient(address, sender.token, ca=server.certificate, data_dir=tmp_path) as client:
        with pytest.raises(MessageRejected, match="at most 65536"):
            await client.send(receiver.user, "x" * (MESSAGE_BODY_BYTES_MAX + 1))
        # An SDK that did not know the limit: then the server's word is the final one.
        monkeypatch.setattr(sdk, "MESSAGE_BODY_BYTES_MAX", FRAME_BODY_BYTES_MAX)
        with pytest.raises(MessageRejected) as refused:
            await client.send(receiver.user, "x" * (MESSAGE_BODY_BYTES_MAX + 1))
        assert refused.value.code == TooLarge.code
        frames = metric(server, "frames_in")
        await client.send(receiver.user, "after it")
        states = [message.state for message in await client.messages(receiver.user)]
        assert states == [MessageState.STORED, MessageState.FAILED]
    async with AsyncClient(address, sender.token, ca=server.certificate, data_dir=tmp_path) as client:
        await client.send(receiver.user, "after a restart")
        assert [m.text for m in (await client.history(receiver.user)).messages] == [
            "after it",
            "after a restart",
        ]
    assert metric(server, "frames_in") - frames < 20, "it was sent again and again"


@pytest.mark.shows("O15")
async def test_a_login_that_is_refused_for_good_is_not_repeated(server: DevServer, tmp_path: Path) -> None:
    account = new_account(server)
    signed, _, signature = account.token.rpartition(".")
    forged = f"{signed}.{signature[:-8]}AAAAAAAA"
    client = AsyncClient(f"127.0.0.1:{server.port}", forged, ca=server.certificate, data_dir=tmp_path)
    with pytest.raises(AuthError) as refused:
        await client.__aenter__()
    assert refused.value.code == Unauthenticated.code
    await happens(lambda: metric(server, "auth_refused"), what="the refusal is counted")
    await stays(lambda: metric(server, "auth_refused") == 1, what="one attempt", period_seconds=2)


@asynccontextmanager
async def crowd(server: DevServer, folder: Path) -> AsyncIterator[list[AsyncClient]]:
    """Many clients of different users, all connected."""
    async with AsyncExitStack() as stack:
        clients = []
        for number in range(CLIENTS):
            account = new_account(server)
            clients.append(
                await stack.enter_async_context(
                    AsyncClient(
                        f"127.0.0.1:{server.port}", account.token, ca=server.certificate,
                        data_dir=folder / str(number),
                    )
                )
            )  # fmt: skip
        yield clients


async def note_returns(client: AsyncClient, times: list[float]) -> None:
    with contextlib.suppress(SdkError):
        async for event in client.events():
            times += [time.monotonic()] * isinstance(event, Reconnected)


async def talk(client: AsyncClient, peer: AsyncClient, over: asyncio.Event) -> int:
    """Sends one message after the other; each is acknowledged in the end, whatever happens between."""
    count = 0
    while not over.is_set():
        await client.send(peer.user, f"{count}", timeout=BACK_SECONDS_MAX)
        count += 1
    return count


@pytest.mark.long
@pytest.mark.shows("O15")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["drained", "killed"])
async def test_after_a_restart_everybody_comes_back_spread_over_time(
    server: DevServer, tmp_path: Path, figures: Figures, how: signal.Signals
) -> None:
    async with crowd(server, tmp_path) as clients:
        times: list[list[float]] = [[] for _ in clients]
        noting = [
            asyncio.create_task(note_returns(client, found))
            for client, found in zip(clients, times, strict=True)
        ]
        over = asyncio.Event()
        talkers = [asyncio.create_task(talk(a, b, over)) for a, b in pairs(clients[:TALKERS])]
        (worker,) = server.worker_pids()
        began = time.monotonic()
        os.kill(worker, how)
        await happens(lambda: all(times), what="everybody is back", timeout_seconds=BACK_SECONDS_MAX)
        over.set()
        sent = await asyncio.gather(*talkers)
        for (sender, peer), count in zip(pairs(clients[:TALKERS]), sent, strict=True):
            page = await sender.history(peer.user, limit=300)
            assert page.head_seq == count, "a message was lost or doubled"
        for task in noting:
            task.cancel()
        await asyncio.gather(*noting, return_exceptions=True)
    returns = sorted(found[0] - began for found in times)
    buckets = Counter(int(at) for at in returns)
    fullest = max(buckets.values()) / CLIENTS
    figures.note("clients", CLIENTS)
    figures.note("messages sent meanwhile", sum(sent))
    figures.note("the first is back after seconds", returns[0])
    figures.note("the last is back after seconds", returns[-1])
    figures.note("back within each second", " ".join(str(buckets[n]) for n in range(int(returns[-1]) + 1)))
    figures.note("share of the fullest second", fullest)
    assert returns[-1] < BACK_SECONDS_MAX
    if how is signal.SIGTERM:
        assert fullest <= FULLEST_SECOND_MAX


def pairs(clients: list[AsyncClient]) -> list[tuple[AsyncClient, AsyncClient]]:
    return list(zip(clients[::2], clients[1::2], strict=True))

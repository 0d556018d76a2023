"""Owners that are paused, killed or crash: F-04, F-05, F-06 and F-07 on whole services.

What must hold: nothing is shown before it is durable; whoever was replaced writes nothing more; two owners
never live at once; a slot whose worker cannot start costs the others nothing.
"""

import asyncio
import json
import os
import signal
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis import Redis

from qim.adapters.redis_keys import OWNER, PENDING
from qim.client.probe import Probe, expect, text_message
from qim.domain.placement import Placement
from qim.ids import WorkerId
from qim.records import Kind
from qim.wire import bodies
from qim.wire.frames import Frame
from qim.wire.layout import Op
from tests.process.load import Account, Endpoint, Load
from tests.process.service import Service, is_alive
from tests.rows.deployment import deployment
from tests.rows.world import endpoint_of, judge, new_account, pair_within, redis_of
from tests.services import StoreServer
from tests.services.dev_server import DevServer
from tests.waiting import happens, stays

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]
MESSAGES = 20


def connect(endpoint: Endpoint, account: Account) -> Probe:
    return Probe(endpoint.host, endpoint.port, endpoint.ca, token=account.token, device=account.device)


def raw(store: StoreServer) -> Redis:
    return Redis(unix_socket_path=str(store.socket_path))


def epochs(store: Redis) -> dict[bytes, int]:
    owners: dict[bytes, bytes] = store.hgetall(OWNER)  # type: ignore[assignment]  # not the async client
    return {slot: struct.unpack_from(">Q", value)[0] for slot, value in owners.items()}


@pytest.fixture
def servers(valkey_binary: str, tmp_path: Path) -> Iterator[tuple[StoreServer, StoreServer]]:
    """Two servers: one for messages and mailboxes, one for the logs."""
    with ExitStack() as stack:
        found = []
        for name in ("core", "log"):
            server = StoreServer(valkey_binary, tmp_path / name)
            stack.callback(server.close)
            server.start()
            found.append(server)
        yield found[0], found[1]


async def seen(endpoint: Endpoint, account: Account, peer: bytes) -> tuple[list[int], int]:
    """The sequences in history, and the unread count; both read the visible head."""
    async with connect(endpoint, account) as probe:
        history = await probe.history(peer)
        mark = bodies.MarkRead(bodies.Target(Kind.DIRECT, peer), 0)  # type: ignore[arg-type]  # a plain number
        unread = expect(bodies.MarkReadAck, await probe.ask(Op.MARK_READ, mark)).unread
    return [entry.conversation_seq for entry in history], unread


@pytest.mark.shows("F-04", "X5", "C2")
async def test_what_is_recorded_but_not_durable_is_shown_to_nobody(
    servers: tuple[StoreServer, StoreServer], tmp_path: Path
) -> None:
    core, log = servers
    with deployment(tmp_path / "one", core, log=log) as service:
        await asyncio.to_thread(service.initialise)
        service.run_beside({"QIM__REDIS__COMMAND_TIMEOUT_MS": "2000"})
        one, other = service.account(), service.account()
        endpoint = service.endpoint
        load = Load(endpoint, [(one, other)])
        await load.run(messages_per_user=5)
        before = await seen(endpoint, other, one.user)
        assert before[0] == list(range(1, 11))
        os.kill(log.pid, signal.SIGSTOP)
        try:
            texts = {os.urandom(16): f"hidden {number}" for number in range(5)}
            async with connect(endpoint, one) as sender:
                answers = [
                    sender.post(Op.SEND_MESSAGE, text_message(other.user, text, cmid=cmid))
                    for cmid, text in texts.items()
                ]
                with raw(core) as store:
                    await happens(lambda: store.hlen(PENDING) == 5, what="five messages are RECORDED")
                for _ in range(6):
                    # Asked again and again, across the time-out of the store and the recoverer's attempts.
                    assert await seen(endpoint, other, one.user) == before
                    assert (await seen(endpoint, one, other.user))[0] == before[0]
                    await stays(
                        lambda: not any(is_acked(answer) for answer in answers), what="no ACK",
                        period_seconds=0.7,
                    )  # fmt: skip
        finally:
            os.kill(log.pid, signal.SIGCONT)
        for cmid, text in texts.items():
            one.bodies_sent[cmid] = text.encode()
        async with connect(endpoint, one) as sender:
            for cmid, text in texts.items():
                one.acks[cmid] = await until_acked(sender, other.user, text, cmid)
        assert sorted(one.acks[cmid].conversation_seq for cmid in texts) == list(range(11, 16))
        after = await seen(endpoint, other, one.user)
        assert after == (list(range(1, 16)), before[1] + 5)
        await load.verdict()


def is_acked(answer: asyncio.Future[Frame]) -> bool:
    return answer.done() and answer.exception() is None and answer.result().opcode == Op.SEND_ACK


async def until_acked(probe: Probe, peer: bytes, text: str, cmid: bytes) -> bodies.SendAck:
    """Repeats as a client does while it is told to come back."""
    async with asyncio.timeout(30):
        while True:
            answer = await probe.send(peer, text, cmid=cmid)
            if isinstance(answer, bodies.SendAck):
                return answer
            assert isinstance(answer, bodies.Error), answer
            assert 2000 <= answer.code < 3000, answer
            await stays(lambda: True, what="the pause it asked for", period_seconds=0.3)


@pytest.mark.shows("F-05", "C7", "M4")
async def test_an_owner_paused_past_its_replacement_writes_nothing_more(
    fresh_valkey: StoreServer, tmp_path: Path
) -> None:
    with (
        deployment(tmp_path / "old", fresh_valkey) as old,
        deployment(tmp_path / "new", fresh_valkey) as new,
        raw(fresh_valkey) as store,
    ):
        await asyncio.to_thread(old.initialise)
        new.trust(old)
        old.run_beside()
        pairs = [(old.account(), old.account()) for _ in range(2)]
        load = Load(old.endpoint, pairs)
        await load.run(messages_per_user=MESSAGES)
        (one, other), old_epochs = pairs[0], epochs(store)
        async with connect(old.endpoint, one) as paused:
            frozen = old.freeze()
            # In the socket of the sleeping owner: some of these go to the new owner too, some do not.
            texts = {os.urandom(16): f"asleep {number}" for number in range(10)}
            answers = {
                cmid: paused.post(Op.SEND_MESSAGE, text_message(other.user, text, cmid=cmid))
                for cmid, text in texts.items()
            }
            new.run_beside()
            assert epochs(store) == {slot: epoch + 1 for slot, epoch in old_epochs.items()}
            again = Load(new.endpoint, pairs)
            await again.run(messages_per_user=MESSAGES)
            repeated = list(texts)[:5]
            async with connect(new.endpoint, one) as sender:
                for cmid in repeated:
                    one.bodies_sent[cmid] = texts[cmid].encode()
                    one.acks[cmid] = await until_acked(sender, other.user, texts[cmid], cmid)
            taken = epochs(store)
            old.thaw(frozen)
            await happens(lambda: old.logged("child_fenced"), what="the old owner gives up")
            for answer in answers.values():
                assert not is_acked(answer), "an owner without its slots acknowledged"
        assert all(entry["exit_code"] == 75 for entry in old.logged("child_died"))
        assert epochs(store) == taken
        await again.run(messages_per_user=5)
        async with connect(new.endpoint, one) as sender:
            for cmid in list(texts)[5:]:
                ack = await until_acked(sender, other.user, texts[cmid], cmid)
                assert not ack.duplicate, "the old owner wrote a message after its replacement"
                one.bodies_sent[cmid], one.acks[cmid] = texts[cmid].encode(), ack
        await again.verdict()
        assert old.stop() == 0
        assert new.stop() == 0


@pytest.mark.shows("F-06", "M2", "M4")
async def test_a_killed_supervisor_takes_its_workers_along_and_the_next_owner_comes_alone(
    fresh_valkey: StoreServer, tmp_path: Path
) -> None:
    with (
        deployment(tmp_path / "old", fresh_valkey, workers=2) as old,
        deployment(tmp_path / "new", fresh_valkey, workers=2) as new,
        raw(fresh_valkey) as store,
    ):
        await asyncio.to_thread(old.initialise)
        new.trust(old)
        old.run_beside()
        pairs = [(old.account(), old.account()) for _ in range(2)]
        load = Load(old.endpoint, pairs)
        await load.run(messages_per_user=MESSAGES)
        before = epochs(store)
        talking = asyncio.create_task(load.run(messages_per_user=10 * MESSAGES))
        await happens(lambda: len(pairs[0][0].acks) > MESSAGES + 10, what="load is running")
        children = old.children()
        assert len(children) == 3
        os.kill(old.supervisor, signal.SIGKILL)
        await happens(
            lambda: not any(map(is_alive, children)), what="no child outlives it", timeout_seconds=2
        )
        assert not talking.done()
        await asyncio.to_thread(new.run_beside)
        assert epochs(store) == {slot: epoch + 1 for slot, epoch in before.items()}, "somebody came between"
        load.endpoint = new.endpoint
        await talking
        await load.verdict()
        assert new.stop() == 0


@pytest.mark.shows("F-07")
def test_a_child_that_crashes_at_start_twenty_times_backs_off_and_the_other_works_on(tmp_path: Path) -> None:
    pauses = [0, *(min(10 * 2**step, 160) for step in range(18)), 60_000]
    watch = {"backoff_ms": pauses, "listener_backoff_ms": 50}
    with Service(tmp_path, {"one": "crash", "two": "beat"}, watch=watch) as service:
        service.until_logged("child_died", restart_in_ms=60_000)
        deaths = [entry["restart_in_ms"] for entry in service.logged("child_died")]
        assert deaths == pauses
        assert len(deaths) == 20
        assert service.did("two", "started", generation=2) is None
        service.signal(signal.SIGTERM)
        assert service.ended() == 0


KILLS = 6
"""Of a real worker: their pauses last half a minute together, twenty would last six."""


@pytest.mark.shows("F-07", "M2")
async def test_a_worker_killed_at_every_start_costs_the_slots_of_the_other_nothing(tmp_path: Path) -> None:
    others = Placement(2, 1, 1).slots_of(WorkerId(0))
    with DevServer(tmp_path, workers=2) as server:
        pair = pair_within(server, lambda slot: slot in others)
        load = Load(endpoint_of(server), [pair])
        lost = (new_account(server), new_account(server))
        killed: list[int] = []
        for _ in range(KILLS):
            victim = await happens(
                lambda: next((pid for pid in second(server) if pid not in killed), 0),
                what="the worker is back", timeout_seconds=30,
            )  # fmt: skip
            server.kill(victim)
            killed.append(victim)
            await load.run(messages_per_user=10, seconds_max=20)
        pauses = [entry["restart_in_ms"] for entry in events(server, "child_died")]
        assert len(pauses) == KILLS
        assert pauses == sorted(pauses)
        assert pauses[0] == 0
        assert pauses[-1] >= 4_000
        server.until_ready()
        load = Load(endpoint_of(server), [pair, lost])
        await load.run(messages_per_user=10)
        await judge(server, load)
        with redis_of(server) as store:
            claimed = epochs(store)
        assert {claimed[b"%d" % slot] for slot in others} == {1}, "the living owner claimed again"


def second(server: DevServer) -> list[int]:
    status = server.status()
    rows = status["workers"] if status else []
    return [int(row["pid"]) for row in rows if row["worker"] == 1 and row["pid"]]


def events(server: DevServer, name: str) -> list[dict[str, int]]:
    lines = [line for line in server.log().splitlines() if line.startswith("{")]
    return [entry for line in lines if (entry := json.loads(line))["event"] == name]

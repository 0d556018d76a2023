"""O21 and O22 on a whole service: cut connections, forgotten scripts, a restarted and a full store.

Scaled: ten seconds of SCRIPT FLUSH ten times a second as in the case, twenty cut connections instead of a
minute of them, one filled store.
"""

import asyncio
import json
import random
import time
from pathlib import Path

import pytest
from redis import Redis

from qim.client.probe import expect
from qim.errors import ExitCode, ResourceExhausted
from qim.wire import bodies
from tests.faults.proxy import Proxy
from tests.field.figures import Figures
from tests.process.load import Endpoint, Load
from tests.rows.deployment import deployment
from tests.rows.world import build_load, judge, probe_of, redis_of
from tests.services import StoreServer
from tests.services.dev_server import DevServer
from tests.waiting import stays

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]
FLUSH_SECONDS = 10.0
BETWEEN_FLUSHES_SECONDS = 0.1
CUTS = 20


async def flush_again_and_again(store: Redis, until: float) -> int:
    flushes = 0
    while time.monotonic() < until:
        await asyncio.to_thread(store.script_flush)
        flushes += 1
        await stays(lambda: True, what="the next flush", period_seconds=BETWEEN_FLUSHES_SECONDS)
    return flushes


async def talk_until(load: Load, until: float) -> None:
    while time.monotonic() < until:
        await load.run(messages_per_user=20)


@pytest.mark.shows("O22", "C4", "C7")
async def test_a_store_that_forgets_its_scripts_and_restarts_costs_repeats_only(
    tmp_path: Path, figures: Figures
) -> None:
    with DevServer(tmp_path) as server:
        load = build_load(server)
        with redis_of(server) as store:
            store.script_flush()
            until = time.monotonic() + FLUSH_SECONDS
            flushes, _ = await asyncio.gather(flush_again_and_again(store, until), talk_until(load, until))
            workers = server.worker_pids()
        store_pid = server.store_pid()
        server.kill(store_pid)
        await load.run(messages_per_user=20)
        assert server.store_pid() != store_pid
        server.until_ready()
        assert server.worker_pids() == workers, "a worker did not survive it"
        await judge(server, load)
        messages = sum(len(account.acks) for pair in load.pairs for account in pair)
        repeats = sum(account.retries for pair in load.pairs for account in pair)
    figures.note("SCRIPT FLUSH", flushes)
    figures.note("messages acknowledged", messages)
    figures.note("sends repeated by clients", repeats)


@pytest.mark.shows("O21", "C4")
async def test_clients_that_cut_their_connection_at_random_settle_every_send_by_repeating_it(
    tmp_path: Path, figures: Figures
) -> None:
    with DevServer(tmp_path) as server, Proxy(("127.0.0.1", server.port)) as proxy:
        load = build_load(server)
        load.endpoint = Endpoint("127.0.0.1", proxy.port, server.certificate)
        chance, cuts = random.Random(21), 0
        talking = asyncio.create_task(talk_until(load, time.monotonic() + FLUSH_SECONDS))
        while not talking.done() and cuts < CUTS:
            await stays(lambda: True, what="some sends", period_seconds=chance.uniform(0.05, 0.6))
            cuts += await asyncio.to_thread(proxy.reset) > 0
        await talking
        assert cuts >= CUTS // 2, "hardly anything was cut"
        await judge(server, load)
        repeats = sum(account.retries for pair in load.pairs for account in pair)
        assert repeats, "nothing was under way when it was cut"
    figures.note("moments at which everything was cut", cuts)
    figures.note("sends repeated", repeats)


@pytest.mark.shows("O22", "F-12", "C3")
async def test_a_full_store_refuses_sends_serves_reads_and_goes_on_without_a_restart(
    tmp_path: Path, figures: Figures
) -> None:
    with DevServer(tmp_path) as server:
        load = build_load(server)
        await load.run(messages_per_user=20)
        one, other = load.pairs[0]
        with redis_of(server) as store:
            limit = str(store.config_get("maxmemory")["maxmemory"])
            store.config_set("maxmemory", int(store.info("memory")["used_memory"]) + 65_536)
            workers, refused, accepted = server.worker_pids(), 0, 0
            async with probe_of(server, one) as probe:
                while refused < 20:
                    answer = await probe.send(other.user, "x" * 4_000)
                    if isinstance(answer, bodies.SendAck):
                        accepted += 1
                        continue
                    error = expect(bodies.Error, answer)
                    assert error.code == ResourceExhausted.code
                    assert error.retry_after_ms > 0
                    refused += 1
                history = await probe.history(other.user)
                assert [int(e.conversation_seq) for e in history] == list(range(1, 41 + accepted))
                assert await probe.drain_mailbox()
            store.config_set("maxmemory", limit)

            async def is_taken() -> bool:
                async with probe_of(server, one) as probe:
                    return isinstance(await probe.send(other.user, "again"), bodies.SendAck)

            began = time.monotonic()
            while not await is_taken():
                assert time.monotonic() - began < 10
            seconds = time.monotonic() - began
            assert int(store.info("stats")["evicted_keys"]) == 0
        assert server.worker_pids() == workers
        await load.run(messages_per_user=20)
        await audited(server)
    figures.note("accepted before it was full", accepted)
    figures.note("refused with a time to come back", refused)
    figures.note("accepted again after seconds", seconds)


async def audited(server: DevServer) -> None:
    """Nothing half is left behind."""
    audit = await asyncio.to_thread(server.tool, "audit", "--json")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert json.loads(audit.stdout)["clean"]


@pytest.mark.shows("O22", "X8")
@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "allkeys-random", "noeviction"])
def test_the_service_starts_on_a_store_that_evicts_nothing_and_on_no_other(
    valkey_binary: str, tmp_path: Path, policy: str
) -> None:
    store = StoreServer(valkey_binary, tmp_path / "store")
    try:
        store.start()
        with deployment(tmp_path / "one", store) as service:
            service.initialise()
            with Redis(unix_socket_path=str(store.socket_path)) as raw:
                raw.config_set("maxmemory-policy", policy)
            service.start()
            assert service.process is not None
            if policy == "noeviction":
                service.until_ready()
                assert service.stop() == 0
                return
            assert service.process.wait(30) == ExitCode.CONFIG
            reasons = [entry["reason"] for entry in service.logged("start_refused")]
            assert any(f"maxmemory-policy is '{policy}', must be 'noeviction'" in text for text in reasons)
    finally:
        store.close()

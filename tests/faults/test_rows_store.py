"""Fault rows of the wires and of the store, on a whole service under load: short ones, for every change.

One service is shared; every test has users of its own, heals what it broke, and shows by counters that the
fault struck before it asks for the verdict.
"""

from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.faults.deployment import Proxied, Steady, build_load, judge, proxied_service, store_socket
from tests.faults.pausing import ask_store
from tests.faults.proxy import BOTH_WAYS, Direction, Faults
from tests.waiting import happens

FULL_ROUNDS = 2
FULL_ROUNDS_MAX = 6
"""A round counts when the store itself refused: the writer, which asks how full it is, may be quicker."""
HELD: Mapping[str, frozenset[Direction]] = {
    "both": BOTH_WAYS,
    "requests": frozenset({"to_server"}),
    "answers": frozenset({"to_client"}),
}
RESETS = 2

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    with proxied_service(tmp_path_factory.mktemp("rows")) as running:
        yield running


@pytest.fixture(autouse=True)
def healed(service: Proxied) -> Iterator[None]:
    """Whatever a failed test leaves behind must not fail the next one."""
    yield
    service.to_store.heal()
    service.to_gateway.heal()
    ask_store(store_socket(service.server), "CONFIG", "SET", "maxmemory", 0)


async def grows(count: Callable[[], int], *, what: str) -> None:
    """Returns when a counter has risen from where it is now."""
    before = count()
    await happens(lambda: count() > before, what=what)


@pytest.mark.shows("F-28", "C2", "C4", "C7")
@pytest.mark.parametrize("ways", HELD)
async def test_a_store_behind_a_cut_network_is_unknown_and_nothing_more(service: Proxied, ways: str) -> None:
    wire = service.to_store
    load = build_load(service.server)
    async with Steady(load) as steady:
        held = (wire.counters.held_bytes_to_server, wire.counters.held_bytes_to_client)
        wire.set(Faults(cut=HELD[ways]))
        await grows(lambda: wire.counters.connections, what="the workers gave the connection up")
        await steady.is_quiet()
        wire.heal()
        await steady.progresses()
    struck = (wire.counters.held_bytes_to_server > held[0], wire.counters.held_bytes_to_client > held[1])
    assert struck[1] if ways == "answers" else struck[0], "the cut held nothing"
    await judge(service.server, load)


@pytest.mark.shows("F-28", "C2", "C4", "C7")
async def test_a_store_connection_that_is_reset_leaves_nothing_half(service: Proxied) -> None:
    wire = service.to_store
    load = build_load(service.server)
    async with Steady(load) as steady:
        for _ in range(RESETS):
            assert wire.reset() > 0
            await steady.progresses()
    await judge(service.server, load)


@pytest.mark.shows("F-28", "C2", "C4", "C7")
async def test_an_answer_of_the_store_that_is_lost_makes_no_second_sequence(service: Proxied) -> None:
    wire = service.to_store
    load = build_load(service.server)
    async with Steady(load) as steady:
        for _ in range(RESETS):
            wire.set(Faults(swallow=True))
            await grows(lambda: wire.counters.swallowed_bytes, what="an answer is lost")
            wire.heal()
            await steady.progresses()
    await judge(service.server, load)


@pytest.mark.shows("F-30", "C4", "K1")
async def test_an_acknowledgement_that_is_lost_on_its_way_is_got_by_sending_again(service: Proxied) -> None:
    wire = service.to_gateway
    load = build_load(service.server, port=wire.port)
    async with Steady(load) as steady:
        for _ in range(RESETS):
            wire.set(Faults(swallow=True))
            await grows(lambda: wire.counters.resets, what="acknowledgements are lost")
            wire.heal()
            await steady.progresses()
    assert sum(account.retries for pair in load.pairs for account in pair) > 0
    await judge(service.server, load)


@pytest.mark.shows("F-12", "C3", "C7", "C11")
async def test_a_store_without_memory_refuses_before_its_first_write(service: Proxied) -> None:
    socket = store_socket(service.server)
    load = build_load(service.server)
    struck = 0
    async with Steady(load) as steady:
        for _ in range(FULL_ROUNDS_MAX):
            refused = refusals(service)
            ask_store(socket, "CONFIG", "SET", "maxmemory", 1)
            await steady.is_quiet()
            struck += refusals(service) > refused
            ask_store(socket, "CONFIG", "SET", "maxmemory", 0)
            await steady.progresses()
            if struck == FULL_ROUNDS:
                break
    assert struck == FULL_ROUNDS, "the store did not refuse"
    assert ask_store(socket, "INFO", "stats")["evicted_keys"] == 0
    await judge(service.server, load)


def refusals(service: Proxied) -> int:
    """How often the store said that it is out of memory."""
    errors = ask_store(store_socket(service.server), "INFO", "errorstats")
    return int(errors["errorstat_OOM"]["count"]) if "errorstat_OOM" in errors else 0

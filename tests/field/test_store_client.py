"""O21 and O22 at the client of the store: cancelled calls, and scripts that the server forgot.

Ten connections with a round trip of 50 ms through a proxy, a thousand callers that give up at random. The
case runs for a minute; here each part runs until so many calls were made, a few seconds.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial

import pytest

from qim.adapters.lua_scripts import LuaScripts
from qim.adapters.redis_pipe import RedisPipe
from qim.clock import SystemClock
from qim.errors import StoreError
from tests.faults.proxy import Faults, Proxy
from tests.field.figures import Figures
from tests.services import StoreServer
from tests.waiting import happens

pytestmark = pytest.mark.timeout(120)
CONNECTIONS = 10
CALLERS = 1_000
ROUNDS = 30
ONE_WAY_MS = 25.0
GIVE_UP_SECONDS_MAX = 0.1
TIGHT_TIMEOUT_MS = 130
SLOW_ONE_WAY_MS = 100.0
"""Every third round: the round trip is then longer than the time limit, which the case wants near it."""
PATIENT_SECONDS_MAX = 0.3
"""In the round behind a slow one, so that somebody still waits when late answers come."""
SCRIPTS = LuaScripts(
    {
        "own_value": b"return redis.call('GET', KEYS[1])",
        "count_once": b"if redis.call('HSETNX', KEYS[1], ARGV[1], 1) == 1 then redis.call('INCR', KEYS[2])"
        b" end return ARGV[1]",
    }
)


@pytest.fixture
def proxy(fresh_valkey: StoreServer) -> Iterator[Proxy]:
    with Proxy(fresh_valkey.socket_path) as proxy:
        yield proxy


@pytest.fixture
async def pool(proxy: Proxy) -> AsyncIterator["Pool"]:
    """Makes the connections of a pool behind the proxy."""
    async with AsyncExitStack() as stack:

        async def build(*, timeout_ms: int) -> list[RedisPipe]:
            made = []
            for _ in range(CONNECTIONS):
                pipe = RedisPipe(
                    f"redis://127.0.0.1:{proxy.port}",
                    clock=SystemClock(),
                    scripts=SCRIPTS,
                    timeout_ms=timeout_ms,
                )
                await pipe.connect()
                stack.push_async_callback(pipe.close)
                made.append(pipe)
            for number in range(CALLERS):
                await made[0].command("SET", f"key {number}", f"value {number}")
            proxy.set(Faults(latency_ms=ONE_WAY_MS))
            return made

        yield build


class Tally:
    """What became of the calls."""

    def __init__(self) -> None:
        self.answered = self.given_up = self.failed = 0

    async def call(
        self,
        issue: Callable[[], "asyncio.Future[object]"],
        wanted: object,
        chance: random.Random,
        seconds_max: float,
    ) -> None:
        """One caller: waits for a random time, then gives up by cancelling its future."""
        future = issue()
        try:
            async with asyncio.timeout(chance.uniform(0, seconds_max)):
                answer = await future
        except TimeoutError:
            self.given_up += 1
        except StoreError:
            self.failed += 1
        else:
            self.answered += 1
            assert answer == wanted, "the answer of another caller"


def in_flight(pipes: list[RedisPipe]) -> int:
    return sum(len(pipe._connection._waiting) for pipe in pipes if pipe._connection is not None)


Issue = Callable[[RedisPipe, int], "asyncio.Future[object]"]
Pool = Callable[..., Awaitable[list[RedisPipe]]]
KINDS: dict[str, Issue] = {
    "commands": lambda pipe, number: pipe.command("GET", f"key {number}"),
    "scripts": lambda pipe, number: pipe.script("own_value", [f"key {number}".encode()]),
}


@pytest.mark.shows("O21")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("timeout_ms", [5_000, TIGHT_TIMEOUT_MS])
async def test_no_answer_ever_reaches_another_caller(
    proxy: Proxy, pool: Pool, kind: str, timeout_ms: int, figures: Figures
) -> None:
    pipes = await pool(timeout_ms=timeout_ms)
    chance, tally = random.Random(21), Tally()
    is_tight = timeout_ms == TIGHT_TIMEOUT_MS
    for number in range(ROUNDS):
        is_behind_slow = is_tight and number % 3 == 0
        if is_tight:
            if not is_behind_slow:
                await settle(proxy, pipes)
            proxy.set(Faults(latency_ms=SLOW_ONE_WAY_MS if number % 3 == 2 else ONE_WAY_MS))
        await call_all(
            pipes, kind, tally, chance, PATIENT_SECONDS_MAX if is_behind_slow else GIVE_UP_SECONDS_MAX
        )
    if is_tight:
        await settle(proxy, pipes)
        assert sum(pipe.reconnects for pipe in pipes), "no time limit struck"
    await happens(lambda: in_flight(pipes) == 0, what="nothing is in use")
    for pipe in pipes:
        assert await pipe.command("PING") == b"PONG"
    assert tally.answered
    assert tally.given_up
    figures.note("calls", CALLERS * ROUNDS)
    figures.note("answered, each with its own value", tally.answered)
    figures.note("given up", tally.given_up)
    figures.note("ended with their connection", tally.failed)
    figures.note("connections thrown away", sum(pipe.reconnects for pipe in pipes))


async def call_all(
    pipes: list[RedisPipe], kind: str, tally: Tally, chance: random.Random, seconds_max: float
) -> None:
    """Every caller once, at the same time, each over a connection by chance."""

    def issue(number: int) -> "asyncio.Future[object]":
        return KINDS[kind](chance.choice(pipes), number)

    await asyncio.gather(
        *(
            tally.call(partial(issue, number), f"value {number}".encode(), chance, seconds_max)
            for number in range(CALLERS)
        )
    )


async def settle(proxy: Proxy, pipes: list[RedisPipe]) -> None:
    """A quick line again, until every connection that was thrown away has been replaced."""
    proxy.heal()
    await happens(
        lambda: all(pipe.is_connected for pipe in pipes) and in_flight(pipes) == 0, what="the pool is whole"
    )


@pytest.mark.shows("O22", "O21")
async def test_a_script_forgotten_in_the_middle_of_a_pipeline_runs_once_and_its_neighbours_too(
    fresh_valkey: StoreServer, figures: Figures
) -> None:
    pipe = RedisPipe(fresh_valkey.url, clock=SystemClock(), scripts=SCRIPTS)
    await pipe.connect()
    calls = 300
    try:
        answers = []
        for number in range(calls):
            # One write: plain, flush, script, plain. The script is missing where it stands.
            answers += [
                pipe.command("INCR", "before"),
                pipe.command("SCRIPT", "FLUSH"),
                pipe.script("count_once", [b"seen", b"counted"], [b"%d" % number]),
                pipe.command("INCR", "after"),
            ]
        replies = await asyncio.gather(*answers)
        assert replies[2::4] == [b"%d" % number for number in range(calls)]
        assert replies[0::4] == replies[3::4] == list(range(1, calls + 1))
        counts = [await pipe.command("GET", key) for key in ("before", "counted", "after")]
        assert counts == [b"%d" % calls] * 3
        assert pipe.reconnects == 0
    finally:
        await pipe.close()
    figures.note("scripts that were missing", calls)

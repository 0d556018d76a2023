"""What the roles cost per message in Python alone, by batch size, on memory adapters.

The time spent inside the adapters is measured and taken away, so what is printed is what the code of the
role, the planners and the codec cost. `QIM_BENCH_PROFILE=1` prints the most expensive functions too.
"""

import asyncio
import cProfile
import gc
import os
import pstats
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from qim.domain.presence import Session
from qim.ids import MailboxSeq, Offset, SlotId, WorkerId
from qim.wire.layout import Op
from tests.unit.workers.rig import ALICE, ALL_SLOTS, BOB, DEVICE, SESSION, TENANT, Rig, build_send, shard_of
from workers.request import Request

pytestmark = pytest.mark.bench

MESSAGES = 4_096
SIZES = (1, 4, 16, 64)
USED = (SlotId(0), shard_of(ALICE), shard_of(BOB))
"""The memory reader looks at each of its partitions in each pass; that is not what is measured here."""


@pytest.fixture(autouse=True)
def no_distance_between_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a role does is measured here, not how long it rests; the loops below would count that as work."""
    monkeypatch.setattr("workers.writer.WRITER_PASS_INTERVAL_MS", 0)
    monkeypatch.setattr("workers.fanout.FANOUT_PASS_INTERVAL_MS", 0)


class Timed:
    """Passes calls on and adds up the time they take."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._inner, name)
        if not callable(inner):
            return inner

        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - started

        return call


class Nobody:
    """An origin that drops its answers and counts them."""

    def __init__(self) -> None:
        self.answers = 0

    def reply(self, request: Request, frame: bytes) -> None:
        self.answers += 1


async def _rig() -> Rig:
    rig = await Rig().prepare()
    for name in ("commits", "mailboxes", "outbox", "dispatch"):
        setattr(rig, name, Timed(getattr(rig, name).inner))
    rig.all_commits, rig.all_mailboxes = [rig.commits], [rig.mailboxes]
    return rig


def _requests(rig: Rig, origin: Nobody, first: int, count: int) -> list[Request]:
    now = rig.clock.monotonic()
    requests = []
    for number in range(first, first + count):
        body = build_send(number, body=b"x" * 128)
        request = Request(
            origin=origin, handle=1, generation=1, request_id=number, opcode=Op.SEND_MESSAGE, tenant=TENANT,
            user=ALICE, device=DEVICE, session=SESSION, body=body, arrived=now,
        )  # fmt: skip
        requests.append(request)
    return requests


async def _measure(name: str, size: int, adapters: list[Timed], work: Callable[[], Awaitable[None]]) -> None:
    profile = cProfile.Profile() if os.environ.get("QIM_BENCH_PROFILE") else None
    gc.collect()
    before = sum(adapter.seconds for adapter in adapters)
    started = time.thread_time()
    if profile:
        profile.enable()
    await work()
    if profile:
        profile.disable()
    spent = time.thread_time() - started
    inside = sum(adapter.seconds for adapter in adapters) - before
    role, adapter = (1e6 * seconds / MESSAGES for seconds in (spent - inside, inside))
    print(f"{name:8} batch {size:3}: {role:6.1f} us role, {adapter:6.1f} us memory adapters")  # noqa: T201 - a measurement
    if profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(18)


async def _until(reached: Callable[[], bool]) -> None:
    while not reached():
        await asyncio.sleep(0)


@pytest.mark.parametrize("size", SIZES)
async def test_cost_of_the_writer(size: int) -> None:
    rig = await _rig()
    writer = rig.roles().writer
    origin = Nobody()
    batches = [_requests(rig, origin, first, size) for first in range(0, MESSAGES, size)]

    async def work() -> None:
        for number, batch in enumerate(batches, start=1):
            for request in batch:
                writer.submit(request)
            wanted = number * size
            while origin.answers < wanted:
                await asyncio.sleep(0)

    async with rig.running(writer):
        await _measure("writer", size, [rig.commits, rig.outbox], work)
    assert origin.answers == MESSAGES


async def _filled_outbox(rig: Rig) -> list[bytes]:
    writer = rig.roles().writer
    origin = Nobody()
    async with rig.running(writer):
        for request in _requests(rig, origin, 0, MESSAGES):
            writer.submit(request)
        await _until(lambda: origin.answers == MESSAGES)
    home = rig.placement.home_partition(WorkerId(0))
    return [record.data for record in await rig.outbox.read(home, Offset(0), records_max=MESSAGES)]


@pytest.mark.parametrize("size", SIZES)
async def test_cost_of_the_fanout(size: int) -> None:
    source = await _filled_outbox(await _rig())
    rig = await _rig()
    fanout = rig.roles(slots=USED).fanout
    home = rig.placement.home_partition(WorkerId(0))

    async def work() -> None:
        for first in range(0, MESSAGES, size):
            await rig.outbox.append([(home, record) for record in source[first : first + size]])
            wanted = first + size - 1
            while fanout._reached.get(home, -1) < wanted:  # stored positions come later
                await asyncio.sleep(0)

    async with rig.running(fanout):
        await _until(lambda: len(fanout.positions) == len(USED))
        await _measure("fanout", size, [rig.commits, rig.outbox, rig.dispatch], work)


@pytest.mark.parametrize("size", SIZES)
async def test_cost_of_the_mailbox(size: int) -> None:
    first_rig = await _rig()
    await _filled_outbox(first_rig)
    fanout = first_rig.roles(slots=USED).fanout
    home = first_rig.placement.home_partition(WorkerId(0))
    async with first_rig.running(fanout):
        await _until(lambda: fanout.positions.get(home) == MESSAGES - 1)
    shards = [slot for slot, mark in (await first_rig.dispatch.watermarks(ALL_SLOTS)).items() if mark.high]
    source = {
        slot: [record.data for record in await first_rig.dispatch.read(slot, Offset(0), records_max=MESSAGES)]
        for slot in shards
    }
    rig = await _rig()
    rig.presence.sessions = {
        user: [Session(0, number, 1, TENANT, user, DEVICE, SESSION)]  # type: ignore[arg-type]  # any worker
        for number, user in enumerate((ALICE, BOB))
    }
    mailbox = rig.roles(slots=USED).mailbox

    async def work() -> None:
        for first in range(0, MESSAGES, size):
            await rig.dispatch.append(
                [(slot, data) for slot in shards for data in source[slot][first : first + size]]
            )
            wanted = MailboxSeq(first + size)
            while any(mailbox.watermarks[slot] < wanted for slot in shards):
                await asyncio.sleep(0)

    async with rig.running(mailbox):
        await _until(lambda: len(mailbox.positions) == len(USED))
        await _measure("mailbox", size, [rig.mailboxes, rig.dispatch], work)
    assert len(rig.pusher.pushed) == 2 * MESSAGES

"""E2a and E2b: the medium dies under load, by kill -9 or by loss of power; what was acknowledged is read
again.

A child appends without pause, several calls in flight, and reports each task before it is sent and when its
offset is known: that is the acknowledgement. The strike comes at a random number of acknowledgements, so it
falls anywhere into a call. Each time the acknowledged tasks are read at their places. After the last kill all
of them are read once more, because a later death must not take what an earlier one had left.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from random import Random
from typing import Final

from blake3 import blake3

from qim.errors import StoreError
from qim.ids import Offset, SlotId
from tests.matrix.media import Host, Parts
from tests.matrix.processes import Child, Report, Reporter
from tests.matrix.verdict import Outcome
from tests.matrix.work import ACKED, SENT, read_all

PARTITIONS: Final = 8
LANES: Final = 4
BATCH_TASKS_MAX: Final = 16
KILLS: Final = 50
POWER_LOSSES: Final = 20

Acked = dict[SlotId, dict[int, int]]
"""Partition → offset → number of the task that was acknowledged there."""


def record_of(number: int) -> bytes:
    return b"%d:" % number + blake3(b"%d" % number).digest(64 + number % 128)


def partition_of(number: int) -> SlotId:
    return SlotId(number * 7 % PARTITIONS * 8)


async def _produce(host: Host, reporter: Reporter, numbers: Iterator[int], random: Random) -> None:
    async with host.open() as parts, asyncio.TaskGroup() as tasks:
        for _lane in range(LANES):
            tasks.create_task(_produce_lane(parts, reporter, numbers, random))


async def _produce_lane(parts: Parts, reporter: Reporter, numbers: Iterator[int], random: Random) -> None:
    while True:
        batch = [next(numbers) for _task in range(random.randint(1, BATCH_TASKS_MAX))]
        reporter.tell([(SENT, number, 0, 0) for number in batch])
        try:
            offsets = await parts.outbox.append(
                [(partition_of(number), record_of(number)) for number in batch]
            )
        except StoreError:
            return
        if None in offsets:
            return
        acked = zip(batch, offsets, strict=True)
        reporter.tell([(ACKED, number, partition_of(number), offset or 0) for number, offset in acked])
        await asyncio.sleep(0)


def kill_under_load(host: Host, *, tasks: int, strikes: int = KILLS, seed: int = 0) -> Outcome:
    """E2a."""
    host.start()
    return _Kills(host, tasks=tasks, strikes=strikes, seed=seed).run()


class _Kills:
    """Rounds of load, death, restart and reading."""

    def __init__(self, host: Host, *, tasks: int, strikes: int, seed: int) -> None:
        self._host = host
        self._tasks = tasks
        self._random = Random(seed)
        self._acked: Acked = defaultdict(dict)
        self._next_number = 0
        self._outcome = Outcome(strikes_wanted=strikes)

    def run(self) -> Outcome:
        outcome = self._outcome
        for strikes_left in range(outcome.strikes_wanted, 0, -1):
            due = self._tasks - outcome.tasks
            # On the average a share of what is still due, at the last strike all of it.
            wanted = due if strikes_left == 1 else self._random.randint(1, max(1, 2 * due // strikes_left))
            self._check(self._one_round(max(1, wanted)))
        self._check(self._acked)
        return outcome

    def _one_round(self, wanted: int) -> Acked:
        child = Child(partial(_load, self._host, self._next_number, self._random.random()))
        alive = child.read_until_told(ACKED, wanted)
        self._host.kill9()
        child.kill9()
        self._host.start()
        self._next_number += child.counts[SENT]
        self._outcome.tasks += child.counts[ACKED]
        self._outcome.strikes += alive
        self._outcome.count("unanswered at the strike", child.counts[SENT] - child.counts[ACKED])
        acked = _places(child.reports)
        for partition, offsets in acked.items():
            doubled = offsets.keys() & self._acked[partition].keys()
            self._outcome.violated("an offset was given twice", times=len(doubled))
            self._acked[partition].update(offsets)
        return acked

    def _check(self, acked: Acked) -> None:
        asyncio.run(_read(self._host, acked, self._outcome))


def lose_power_under_load(host: Host, *, tasks: int, strikes: int = POWER_LOSSES, seed: int = 0) -> Outcome:
    """E2b: one run, and the image of its disk at random moments; each is started and read.

    A moment is taken behind the acknowledgements that were read until then, so all of them must be in its
    image.
    """
    outcome = Outcome(tasks=tasks, strikes_wanted=strikes)
    random = Random(seed)
    host.start(is_watched=True)
    child = Child(partial(_load, host, 0, random.random()))
    moments: list[tuple[int, int]] = []
    for wanted in (*sorted(random.randint(1, tasks) for _strike in range(strikes - 1)), tasks):
        outcome.strikes += child.read_until_told(ACKED, wanted)
        told = len(child.reports)
        moments.append((host.moment(), told))
    host.kill9()
    child.kill9()
    outcome.tasks = child.counts[ACKED]
    for moment, told in moments:
        image = host.after_power_loss(moment)
        try:
            image.start()
            asyncio.run(_read(image, _places(child.reports[:told]), outcome))
        finally:
            image.close()
    return outcome


def _places(reports: Sequence[Report]) -> Acked:
    acked: Acked = defaultdict(dict)
    for report in reports:
        if report.kind == ACKED:
            acked[SlotId(report.second)][report.third] = report.first
    return acked


async def _read(host: Host, acked: Acked, outcome: Outcome) -> None:
    async with host.open() as parts:
        for partition, offsets in acked.items():
            first = min(offsets)
            records = await read_all(parts.outbox, partition, first=first)
            found = {record.offset: record.data for record in records}
            lost = sum(found.get(Offset(offset)) != record_of(number) for offset, number in offsets.items())
            outcome.violated("an acknowledged task cannot be read at its place", times=lost)
            outcome.expect(
                [*found] == [*range(first, first + len(records))], f"partition {partition} has a hole"
            )


def _load(host: Host, first: int, seed: float, reporter: Reporter) -> None:
    asyncio.run(_produce(host, reporter, count(first), Random(seed)))

"""E4: a consumer stands still until the log has dropped what it needs. It must be told, never skip in
silence.

Consumers of eight partitions stop in the middle. In half of them the log is then cut above their place, as a
retention rule or an operator's hand would, past the guard that qim's own trimming has. On coming back, a
reader says "out of window" for each of those, by name, and hands out not one record behind the hole; the
other partitions are read to their ends. The fan-out stops exactly those partitions, keeps their stored
places, and delivers the rest. The way out is explicit: whoever sends a reader to the log's first record gets
everything that is left, without a hole. `E4-emptied` is the same where the cut left nothing at all.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from qim.errors import OffsetOutOfRange
from qim.ids import Offset, SlotId
from qim.ports import Watermarks
from tests.matrix.media import Host, Medium, Parts, prepare
from tests.matrix.verdict import Outcome
from tests.matrix.work import build_fanout, claim_of, outbox_record, running, take_slots
from tests.waiting import happens
from workers.failpoints import Failpoints
from workers.fanout import GROUP

PARTITIONS: Final = tuple(SlotId(number * 8) for number in range(8))
VICTIMS: Final = PARTITIONS[:4]
UNHURT: Final = PARTITIONS[4:]
APPEND_RECORDS: Final = 32
SILENCE_SECONDS_MAX: Final = 5
"""A reader that is going to speak does so within two sweeps of the log, a second each."""
READ_SECONDS_MAX: Final = 60


def stop_past_retention(medium: Medium, host: Host, *, tasks: int, emptied: bool = False) -> Outcome:
    """E4."""
    host.start()
    outcome = Outcome(tasks=tasks, strikes_wanted=len(VICTIMS))
    asyncio.run(_stop_past_retention(medium, host, outcome, emptied=emptied))
    return outcome


async def _stop_past_retention(medium: Medium, host: Host, outcome: Outcome, *, emptied: bool) -> None:
    await prepare(host)
    async with host.open() as parts:
        await take_slots(parts, claim_of(1))
        ends = await _append(parts, outcome.tasks)
        positions = {slot: Offset(end // 3) for slot, end in ends.items()}
        await parts.commits.store_positions(GROUP, positions)
        if medium.guards_consumers:
            await _trim_beyond(parts, outcome, positions, ends)
        await parts.cut_outbox(
            {slot: ends[slot] if emptied else Offset(ends[slot] * 2 // 3) for slot in VICTIMS}
        )
    # Another process: nothing of what the first had in memory helps it.
    async with host.open() as parts:
        await take_slots(parts, claim_of(2))
        marks = await parts.outbox.watermarks(PARTITIONS)
        outcome.strikes = sum(marks[slot].low > positions[slot] + 1 for slot in VICTIMS)
        await _read_on(parts, outcome, positions, ends)
        await _read_what_is_left(parts, outcome, marks)
        await _fan_out(parts, outcome, positions, ends)


async def _append(parts: Parts, tasks: int) -> dict[SlotId, Offset]:
    ends = dict.fromkeys(PARTITIONS, Offset(0))
    for start in range(0, tasks, APPEND_RECORDS):
        numbers = range(start, min(start + APPEND_RECORDS, tasks))
        records = [(PARTITIONS[number % len(PARTITIONS)], outbox_record(number)) for number in numbers]
        offsets = await parts.outbox.append(records)
        for (slot, _data), offset in zip(records, offsets, strict=True):
            assert offset is not None
            ends[slot] = Offset(offset + 1)
    return ends


async def _trim_beyond(
    parts: Parts, outcome: Outcome, positions: dict[SlotId, Offset], ends: dict[SlotId, Offset]
) -> None:
    """The log's own trimming is told a bound that is far too high, and must stay below every consumer."""
    await parts.outbox.trim(ends)
    marks = await parts.outbox.watermarks(PARTITIONS)
    for slot, mark in marks.items():
        outcome.expect(mark.low <= positions[slot], f"trimming took what the consumer of {slot} still needs")


async def _read_on(
    parts: Parts, outcome: Outcome, positions: dict[SlotId, Offset], ends: dict[SlotId, Offset]
) -> None:
    reader = parts.outbox.open_reader(positions)
    told: set[SlotId] = set()
    reached = dict(positions)
    try:
        while told < set(VICTIMS) or any(reached[slot] + 1 < ends[slot] for slot in UNHURT):
            async with asyncio.timeout(SILENCE_SECONDS_MAX):
                try:
                    batch = await reader.next_batch(records_max=512, bytes_max=4_194_304)
                except OffsetOutOfRange as error:
                    lost = SlotId(error.partition or 0)
                    told.add(lost)
                    reader.pause(lost)
                    continue
            for record in batch:
                is_next = record.offset == reached[record.partition] + 1
                outcome.expect(is_next, f"partition {record.partition} goes on at {record.offset} in silence")
                reached[record.partition] = record.offset
    except TimeoutError:
        untold = sorted(set(VICTIMS) - told)
        outcome.violated(f"partitions {untold} are out of window, and a reader of them waits in silence")
    await reader.close()
    outcome.expect(told <= set(VICTIMS), f"told of {sorted(told)}")
    outcome.figures["told"] = len(told)
    outcome.figures["read on"] = sum(reached[slot] - positions[slot] for slot in UNHURT)


async def _read_what_is_left(parts: Parts, outcome: Outcome, marks: Mapping[SlotId, Watermarks]) -> None:
    """The explicit way out, at the first record that is left."""
    starts = {slot: Offset(marks[slot].low - 1) for slot in VICTIMS}
    wanted = sum(marks[slot].high - marks[slot].low for slot in VICTIMS)
    reader = parts.outbox.open_reader(starts)
    reached = dict(starts)
    found = 0
    async with asyncio.timeout(READ_SECONDS_MAX):
        while found < wanted:
            for record in await reader.next_batch(records_max=512, bytes_max=4_194_304):
                outcome.expect(record.offset == reached[record.partition] + 1, "what is left has a hole")
                reached[record.partition] = record.offset
                found += 1
    await reader.close()
    outcome.figures["left"] = found


async def _fan_out(
    parts: Parts, outcome: Outcome, positions: dict[SlotId, Offset], ends: dict[SlotId, Offset]
) -> None:
    fanout = build_fanout(parts, Failpoints())

    def is_through() -> bool:
        return all(fanout.positions.get(slot, -1) + 1 == ends[slot] for slot in UNHURT)

    async with running(fanout):
        await happens(
            is_through, what="the partitions that nothing happened to are delivered", timeout_seconds=120
        )
    outcome.expect(fanout.stopped.keys() == set(VICTIMS), f"stopped are {sorted(fanout.stopped)}")
    stored = await parts.commits.load_positions(GROUP, VICTIMS)
    kept = all(stored[slot] == positions[slot] for slot in VICTIMS)
    outcome.expect(kept, "the place of a stopped partition has moved")

"""Trimming: only what is old and finished by everybody, and never the record at a consumer's position."""

import pytest

from qim.adapters.commitlog_memory import MemoryCommitLog
from qim.clock import ManualClock
from qim.errors import StoreUnknown
from qim.ids import Offset, SlotId
from tests.unit.workers.rig import Faulty
from workers.retention import Retention

SLOT = SlotId(3)
HOUR_MS = 3_600_000


class Setting:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.log = Faulty(MemoryCommitLog(self.clock))
        self.positions: dict[SlotId, Offset] = {}
        self.retention = Retention(
            name="outbox",
            slots=[SLOT],
            commit_log=self.log,
            positions=lambda: self.positions,
            clock=self.clock,
        )

    async def append(self, count: int) -> None:
        await self.log.append([(SLOT, b"record")] * count)

    async def low(self) -> int:
        marks = await self.log.watermarks([SLOT])
        return int(marks[SLOT].low)


@pytest.fixture
def setting() -> Setting:
    return Setting()


async def test_a_record_is_trimmed_an_hour_after_it_was_seen_and_the_last_finished_one_stays(
    setting: Setting,
) -> None:
    await setting.append(10)
    setting.positions[SLOT] = Offset(9)
    assert await setting.retention.trim_once() == {}
    setting.clock.advance(milliseconds=HOUR_MS // 2)
    await setting.append(10)
    setting.positions[SLOT] = Offset(19)
    assert await setting.retention.trim_once() == {}
    setting.clock.advance(milliseconds=HOUR_MS // 2)
    assert await setting.retention.trim_once() == {SLOT: 10}
    setting.clock.advance(milliseconds=HOUR_MS)
    assert await setting.retention.trim_once() == {SLOT: 19}
    assert await setting.low() == 19


async def test_a_consumer_that_stands_still_holds_its_partition(setting: Setting) -> None:
    await setting.append(10)
    setting.positions[SLOT] = Offset(4)
    await setting.retention.trim_once()
    setting.clock.advance(milliseconds=3 * HOUR_MS)
    assert await setting.retention.trim_once() == {SLOT: 4}


async def test_without_a_known_position_nothing_is_trimmed(setting: Setting) -> None:
    await setting.append(10)
    await setting.retention.trim_once()
    setting.clock.advance(milliseconds=3 * HOUR_MS)
    assert await setting.retention.trim_once() == {}
    assert await setting.low() == 0


async def test_a_step_of_the_wall_clock_trims_nothing(setting: Setting) -> None:
    await setting.append(10)
    setting.positions[SLOT] = Offset(9)
    await setting.retention.trim_once()
    setting.clock.step_wall(milliseconds=10 * HOUR_MS)
    assert await setting.retention.trim_once() == {}


async def test_a_failure_waits_for_the_next_round(setting: Setting) -> None:
    await setting.append(10)
    setting.positions[SLOT] = Offset(9)
    await setting.retention.trim_once()
    setting.clock.advance(milliseconds=HOUR_MS)
    setting.log.fail("trim", StoreUnknown())
    assert await setting.retention.trim_once() == {}
    assert await setting.retention.trim_once() == {SLOT: 9}

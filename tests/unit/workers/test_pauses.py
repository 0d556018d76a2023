"""A stopped shard goes on when an operator says so, whatever else was waited for."""

from typing import Any, cast

import pytest

from qim.clock import ManualClock
from qim.errors import PartitionStopped
from qim.ids import MailboxSeq, Offset, SlotId
from qim.metrics import Metrics
from qim.ports import MailboxStore
from workers.pauses import Pauses
from workers.shard_state import Shard

SLOT = SlotId(3)


class NotingReader:
    """Says which partitions go on."""

    def __init__(self) -> None:
        self.went_on: list[SlotId] = []

    def pause(self, partition: SlotId) -> None:
        """Nothing is read here anyway."""

    def seek(self, partition: SlotId, position: Offset) -> None:
        """Nothing is read here anyway."""

    def resume(self, partition: SlotId) -> None:
        self.went_on.append(partition)


def _held(clock: ManualClock) -> tuple[Pauses, Shard, NotingReader]:
    """A shard whose back-off is over in a moment."""
    shard = Shard(SLOT, base=MailboxSeq(1), watermark=MailboxSeq(5))
    pauses = Pauses(
        slots=[SLOT], shards={SLOT: shard}, store=cast(MailboxStore, None), clock=clock, metrics=Metrics(),
        on_fatal=lambda slot: None,
    )  # fmt: skip
    reader = NotingReader()
    pauses.attach(cast(Any, reader))
    pauses.fail(shard, "its store was away")
    pauses.settle(shard)
    clock.advance(milliseconds=60_000)
    return pauses, shard, reader


async def test_a_shard_whose_back_off_is_over_goes_on() -> None:
    pauses, shard, reader = _held(ManualClock())
    await pauses.resume_due()
    assert (reader.went_on, shard.held) == ([SLOT], False)


@pytest.mark.shows("X9")
async def test_a_shard_that_stops_during_its_back_off_does_not_go_on_by_itself() -> None:
    pauses, shard, reader = _held(ManualClock())
    pauses.stop_reading(PartitionStopped("the log jumps", partition=SLOT))
    await pauses.resume_due()
    assert (reader.went_on, shard.held) == ([], True)

"""The serial path of the mailbox: records that no fused call may carry, one at a time per shard.

A record comes here because it names more than 16 recipients, because the store says that its dispatch was
begun here before (OPEN), or because a fused run failed without naming the culprit. The general path:

    begin_dispatch     fixes digest and day; changes no entry and not W
    append_entries     up to 64 recipients a call, all calls at once
    finish_dispatch    completion and W in one step, **only after every append has returned DONE**

Whatever fails on the way, there is no finish and W stays: the shard is held and comes back, and every step
may be repeated. A few lanes share the shards that need them; inside a shard everything is strictly in order.
Full: a shard queues 128 records, then its partition is paused; 64 permits bound the calls of all lanes.
"""

import asyncio
from typing import Final

from structlog import get_logger

from qim.domain import mailbox as rules
from qim.errors import StoreBroken, StoreRefused, StoreUnknown
from qim.ids import MailboxSeq
from qim.limits import APPEND_ENTRIES_MAX, BATCHES_IN_FLIGHT_MAX, MAILBOX_PERMITS
from qim.ports import MailboxStore, MailboxWrite, Materialised
from workers.failpoints import Failpoints
from workers.pauses import Pauses
from workers.pushes import Pushes
from workers.shard_state import Delivery, Shard
from workers.shards import Shards

log = get_logger()

LANES: Final = BATCHES_IN_FLIGHT_MAX


class Serial:
    """The lanes of one mailbox instance."""

    def __init__(
        self,
        *,
        shards: Shards,
        pauses: Pauses,
        pushes: Pushes,
        store: MailboxStore,
        failpoints: Failpoints,
    ) -> None:
        self._shards = shards
        self._pauses = pauses
        self._pushes = pushes
        self._store = store
        self._failpoints = failpoints
        self._permits = asyncio.Semaphore(MAILBOX_PERMITS)

    async def run_lane(self) -> None:
        """Until cancelled."""
        while True:
            for shard in await self._pauses.serial.take(1):
                await self.serve(shard)

    async def serve(self, shard: Shard) -> None:
        """Finishes the queue of a shard, or stops at the first record that does not finish."""
        while shard.queue and not shard.held:
            await self._step(shard, shard.queue[0])
        self._pauses.served(shard)

    async def _step(self, shard: Shard, delivery: Delivery) -> None:
        write = delivery.write
        try:
            outcome = await self._materialise(write, shard.watermark)
        except (StoreUnknown, StoreRefused) as error:
            self._pauses.fail(shard, str(error))
            return
        except StoreBroken as error:
            self._pauses.stop(shard, shard.offset_of(write.mailbox_seq), write.dispatch_id, str(error))
            return
        if not outcome.is_passed:
            self._pauses.note_refused(shard, delivery, outcome)
            return
        if shard.queue:
            shard.queue.popleft()
        shard.sent = write.mailbox_seq
        shard.alone = False
        self._shards.note_passed([delivery])
        self._failpoints.hit("mailbox.finished")
        await self._pushes.tell([delivery], [outcome])
        self._failpoints.hit("mailbox.pushed")

    async def _materialise(self, write: MailboxWrite, watermark: MailboxSeq) -> Materialised:
        if rules.is_fusable(write):
            (outcome,) = await self._store.materialise({write.slot: watermark}, [write])
            if outcome is not Materialised.OPEN:
                return outcome
        return await self._general(write, watermark)

    async def _general(self, write: MailboxWrite, watermark: MailboxSeq) -> Materialised:
        begun = await self._store.begin_dispatch(write, watermark)
        self._failpoints.hit("mailbox.begun")
        if begun.outcome is Materialised.OPEN:
            outcome = await self._append(write, begun.day)
            self._failpoints.hit("mailbox.entries")
            if outcome is not Materialised.DONE:
                return outcome
        elif begun.outcome is not Materialised.DONE:
            return begun.outcome
        outcome = await self._store.finish_dispatch(write, watermark)
        if begun.outcome is Materialised.DONE and outcome is Materialised.DONE:
            return Materialised.PASSED  # final before: here, or at an earlier place
        return outcome

    async def _append(self, write: MailboxWrite, day: int) -> Materialised:
        recipients = write.recipients
        async with self._permits:
            calls = [
                self._store.append_entries(write, day, recipients[start : start + APPEND_ENTRIES_MAX])
                for start in range(0, len(recipients), APPEND_ENTRIES_MAX)
            ]
            # Every answer is read, also behind a failed one: a held shard must have nothing in flight.
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            if outcome is not Materialised.DONE:
                return outcome
        return Materialised.DONE

    async def skip(self, shard: Shard, write: MailboxWrite) -> Materialised:
        """Finishes a record as skipped: no entries, W moves. An operator has named it."""
        outcome = await self._store.finish_dispatch(write, shard.watermark, skipped=True)
        if outcome is Materialised.DONE:
            shard.watermark = write.mailbox_seq
        return outcome

"""Five ways to break the program on purpose, for the simulation only: it must find each of them.

A mutant is a patch of a class for the time of a run, by name. Each removes one thing that the promises rest
on, and all but the first do no harm until something fails at the right moment.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

from qim.adapters.commits_memory import MemoryCommitStore
from qim.adapters.mailbox_memory import DONE, MemoryMailboxStore, Progress
from qim.adapters.ownership_memory import done
from qim.ids import MailboxSeq, SlotId
from qim.ports import MailboxWrite, Materialised, Reservation, ReserveResult
from tests.simulation.faults import SentEpochs
from workers.commits import Commits
from workers.fanout import GROUP, Fanout
from workers.shards import Run, Shards


@contextmanager
def acknowledged_before_the_append() -> Iterator[None]:
    """The client is told before the Outbox has the record."""
    publish = Commits.publish

    async def eager(self: Commits, recorded: list[Any]) -> Any:
        for sending in recorded:
            self._settle_requests(sending)
        return await publish(self, recorded)

    with mock.patch.object(Commits, "publish", eager):
        yield


def _move_only(
    store: Any, expected: Mapping[SlotId, MailboxSeq], writes: Sequence[MailboxWrite]
) -> "asyncio.Future[list[Materialised]]":
    """The half of `materialise` that moves W and notes the completion."""
    answers = []
    off = {slot for slot, belief in expected.items() if belief != store._watermark_of(slot)}
    for write in writes:
        belief = MailboxSeq(-1) if write.slot in off else store._watermark_of(write.slot)
        refusal = store._refusal(write, belief)
        if refusal is None:
            day = store._turn_day(write.slot)
            if write.dispatch_id not in store._progress_of(write):
                store._note_progress(write, Progress(write.digest, "f", day))
            store._move(write)
        answers.append(DONE if refusal is None else refusal)
    return done(answers)


def _put_only(store: Any, writes: Sequence[MailboxWrite]) -> "asyncio.Future[None]":
    """The half that writes the entries; an entry that is there already stays where it is."""
    for write in writes:
        held = {name.user for name, box in store.state.boxes.items() if write.entry in box}
        store._put(write, [user for user in write.recipients if user not in held], store._today())
    return done(None)


@contextmanager
def w_moved_before_the_entries() -> Iterator[None]:
    """The watermark moves in one command, the entries follow in another."""

    def call(self: Shards, deliveries: list[Any]) -> Run:
        expected: dict[SlotId, MailboxSeq] = {}
        writes = []
        for delivery in deliveries:
            write = delivery.write
            writes.append(write)
            shard = self.shards[write.slot]
            shard.in_flight += 1
            offset = write.mailbox_seq - shard.base
            expected.setdefault(write.slot, MailboxSeq(write.mailbox_seq - 1 if offset else 0))
        store: Any = self._store
        moved = store.move_only(expected, writes)
        store.put_only(writes).add_done_callback(_forget)
        return Run(deliveries, moved)

    moving = mock.patch.object(MemoryMailboxStore, "move_only", _move_only, create=True)
    putting = mock.patch.object(MemoryMailboxStore, "put_only", _put_only, create=True)
    with moving, putting, mock.patch.object(Shards, "_call", call):
        yield


@contextmanager
def position_stored_before_the_work() -> Iterator[None]:
    """The fan-out stores how far it is when it has planned, not when its records are durable."""
    plan = Fanout._plan

    def hasty(self: Fanout, batch: Any, snapshots: Any) -> Any:
        dispatches, reached = plan(self, batch, snapshots)
        for instance, slots in self._by_instance(tuple(reached)).items():
            stored: Any = self._stores[instance].store_positions(
                GROUP, {slot: reached[slot] for slot in slots}
            )
            stored.add_done_callback(_forget)
        return dispatches, reached

    with mock.patch.object(Fanout, "_plan", hasty):
        yield


@contextmanager
def epoch_not_checked() -> Iterator[None]:
    """Whoever was an owner once may write for ever."""
    with mock.patch.object(SentEpochs, "_is_stale", return_value=False):
        yield


@contextmanager
def duplicate_not_recognised() -> Iterator[None]:
    """A message that was committed before is taken for a new one."""
    judge = MemoryCommitStore.judge

    def forgetful(self: MemoryCommitStore, item: Reservation) -> ReserveResult | None:
        committed = self.state.committed.pop(item.key, None)
        known = judge(self, item)
        if committed is not None and known is not None:
            self.state.committed[item.key] = committed
        return known

    with mock.patch.object(MemoryCommitStore, "judge", forgetful):
        yield


def _forget(answer: "asyncio.Future[Any]") -> None:
    if not answer.cancelled():
        answer.exception()


MUTANTS: Final[dict[str, Callable[[], Any]]] = {
    "acknowledged-before-the-append": acknowledged_before_the_append,
    "w-moved-before-the-entries": w_moved_before_the_entries,
    "position-stored-before-the-work": position_stored_before_the_work,
    "epoch-not-checked": epoch_not_checked,
    "duplicate-not-recognised": duplicate_not_recognised,
}

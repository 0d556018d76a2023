"""Commits in one step on a server that holds the conversations and the Outbox: one script, one flush.

`lua/commit_messages.lua` does for a run what `reserve_messages`, `append_log` and `mark_committed` do one
after the other, in one atomic step; so nothing is ever RECORDED here, and a lost answer leaves nothing to
recover: the repeat gets the coordinates or a sequence. What it may not decide (a conversation with messages
that are RECORDED from before, a partition that contradicts its counter) comes back as TWO_STEPS, and nothing
was written.

It owns no state. It uses the epochs of the commit store and hands what it appended to the log, whose readers
take it from memory. Runs, errors and "full" are as in `commits_redis`.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from qim.adapters import redis_keys as keys
from qim.adapters.commitlog_redis import RedisCommitLog
from qim.adapters.commits_redis import (
    RedisCommitStore,
    ScriptRun,
    concatenate,
    full_decoder,
    reserve_result,
    script_runs,
)
from qim.adapters.redis_answers import Answers
from qim.adapters.redis_pipe import Argument
from qim.clock import Clock
from qim.ids import SEQ_MAX, Offset, SlotId
from qim.limits import CLOCK_SKEW_MS_MAX, IDEMPOTENCY_WINDOW_MS
from qim.ports import Reservation, Reserved, ReserveResult
from qim.records import fill_outbox_frame

_SCRIPT: Final = "commit_messages"


class RedisOneStepCommits:
    """`OneStepCommits` of the port."""

    def __init__(self, store: RedisCommitStore, outbox: RedisCommitLog, clock: Clock) -> None:
        assert store.pipe is outbox.pipe, "one step needs one server"
        self._store = store
        self._outbox = outbox
        self._clock = clock

    def commit(self, items: Sequence[Reservation], partition: SlotId) -> asyncio.Future[list[ReserveResult]]:
        runs = list(script_runs(items))
        answers = Answers(len(runs), concatenate)
        hour = self._clock.now_ms() // keys.HOUR_MS - 1
        for at, run in enumerate(runs):
            script_keys, arguments = self._call(run, partition, hour)
            on_reply = answers.part(at, self._decoder(run, partition), full_decoder(run))
            self._outbox.pipe.submit_script(_SCRIPT, script_keys, arguments, on_reply)
        return answers.future

    def _call(
        self, run: Sequence[Reservation], partition: SlotId, hour: int
    ) -> tuple[list[bytes], list[Argument]]:
        places = ScriptRun(self._store.epochs)
        heads, collects = places.reservation_heads(run)
        script_keys = [
            keys.OWNER, keys.PENDING, keys.LOG_SEEN, self._outbox.counters, self._outbox.keys[partition],
            keys.hour_key(hour), keys.hour_key(hour + 1), keys.hour_key(hour + 2),
            *map(keys.conversation_key, places.conversations),
            *map(keys.record_key, places.conversations),
            *(keys.committed_key(item.key) for item in run),
            *places.group_keys(),
            *collects,
        ]  # fmt: skip
        arguments: list[Argument] = [
            len(run), len(places.conversations), len(places.slots), CLOCK_SKEW_MS_MAX, SEQ_MAX,
            IDEMPOTENCY_WINDOW_MS, hour, keys.SLOT_FIELDS[partition],
            *places.owner_arguments(),
            *heads,
            *(item.outbox_frame for item in run),
            *(item.record for item in run),
            *places.group_arguments(),
        ]  # fmt: skip
        return script_keys, arguments

    def _decoder(
        self, run: Sequence[Reservation], partition: SlotId
    ) -> Callable[[list[Any]], list[ReserveResult]]:
        def decode(reply: list[Any]) -> list[ReserveResult]:
            first, *codes = reply
            answered = zip(codes, run, strict=True)
            results = [reserve_result(code, item, Reserved.DURABLE) for code, item in answered]
            self._note_appended(partition, Offset(first), run, results)
            return results

        return decode

    def _note_appended(
        self, partition: SlotId, first: Offset, run: Sequence[Reservation], results: Sequence[ReserveResult]
    ) -> None:
        records = [
            fill_outbox_frame(item.outbox_frame, seq=result.seq, record_bytes=item.record)
            for item, result in zip(run, results, strict=True)
            if result.outcome is Reserved.DURABLE
        ]
        if records:
            self._outbox.note_appended({partition: (first, records)})

"""Mailboxes and watermarks of one mailbox instance, over Redis; the keys are listed in `mailbox_keys`.

Every decision is made in the scripts; this adapter groups, packs and maps. The state here is two caches that
may be wrong without harm: the current day of each shard (a script refuses keys of another day and names the
right one), and the mailbox keys that this process has given their expiry already (a forgotten one gets it
again). A key is remembered only when the script said that it wrote it, so no key is left without expiry.

**When a day turns**, the calls in flight are refused unwritten. Each refused call turns the days and issues
itself again, in the order of the replies. A call that was issued in between may find the gap which a refused
one left; it sees that a day has turned since, and issues itself again too, behind the other. So the caller
notices nothing, and W still moves in order.

A call holds the records of one hour, because an hour has one DP hash; a run across the hour is two calls.
When the server dies, everything in flight is StoreUnknown; the caller loads the shards and repeats.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from qim.adapters.mailbox_calls import FusedCall, answer_of, answers_of, split_by_hour
from qim.adapters.mailbox_keys import (
    WATERMARKS,
    day_hash_key,
    mailbox_key,
    pack_day,
    pack_state,
    progress_key,
    unpack_state_or_none,
)
from qim.adapters.redis_answers import Answers
from qim.adapters.redis_keys import OWNER, SLOT_FIELDS
from qim.adapters.redis_ownership import RedisOwnership
from qim.adapters.redis_pipe import OnReply, RedisPipe
from qim.clock import Clock
from qim.errors import RecordCorrupt, StoreBroken, StoreError
from qim.ids import DispatchId, MailboxSeq, Millis, SlotId, TenantId, UserId
from qim.limits import (
    DAY_MS,
    DISPATCH_PROGRESS_LIFE_MS,
    EPHEMERAL_KEY_LIFE_MS,
    EPHEMERAL_LIFE_MS,
    MAILBOX_DAYS,
    MAILBOX_KEY_LIFE_MS,
    MAILBOX_KEYS_REMEMBERED_MAX,
    SLOTS,
)
from qim.ports import Begun, MailboxPage, MailboxPageQuery, MailboxWrite, Materialised, ShardState
from qim.records import decode_entry

TURNS_MAX: Final = 8
"""Repeats of one call because a day turned; one is usual, so many mean that the store contradicts itself."""


class RedisMailboxStore(RedisOwnership):
    """`MailboxStore` of the port, on one pipe."""

    def __init__(self, pipe: RedisPipe, clock: Clock) -> None:
        super().__init__(pipe)
        self._clock = clock
        self._days = [0] * SLOTS
        self._turns = 0
        self._keys_with_expiry: dict[bytes, None] = {}

    # --- shards ---

    def initialise_shards(
        self, bases: Mapping[SlotId, MailboxSeq], log_identity: bytes
    ) -> asyncio.Future[None]:
        """Day 0 stands until the first record turns it, so no clock of ours enters the store."""
        states = {
            slot: pack_state(ShardState(MailboxSeq(0), base, 0, log_identity, DispatchId(b"")))
            for slot, base in bases.items()
        }
        commands = [(b"HSETNX", WATERMARKS, SLOT_FIELDS[slot], state) for slot, state in states.items()]
        answers: Answers[None] = Answers(len(commands), lambda _replies: None)
        for at, command in enumerate(commands):
            self.pipe.submit(command, answers.part(at, int))
        return answers.future

    def load_shards(self, slots: Sequence[SlotId]) -> asyncio.Future[dict[SlotId, ShardState]]:
        def decode(reply: list[bytes | None]) -> dict[SlotId, ShardState]:
            # A value that is no state is left out like one that is missing: its shard stays closed, alone.
            found = zip(slots, map(unpack_state_or_none, reply), strict=True)
            states = {slot: state for slot, state in found if state is not None}
            for slot, state in states.items():
                self._days[slot] = max(self._days[slot], state.day)
            return states

        parts = 1 if slots else 0
        answers: Answers[dict[SlotId, ShardState]] = Answers(parts, lambda found: found[0] if found else {})
        if slots:
            fields = [SLOT_FIELDS[slot] for slot in slots]
            self.pipe.submit((b"HMGET", WATERMARKS, *fields), answers.part(0, decode))
        return answers.future

    # --- the fused path ---

    def materialise(
        self, expected: Mapping[SlotId, MailboxSeq], writes: Sequence[MailboxWrite]
    ) -> asyncio.Future[list[Materialised]]:
        letters = [""] * len(writes)
        calls = split_by_hour(expected, writes, letters)
        answers: Answers[list[Materialised]] = Answers(len(calls), lambda _: answers_of(writes, letters))
        for at, call in enumerate(calls):
            call.on_done = answers.part(at, call.note)
            self._issue_fused(call)
        return answers.future

    def _issue_fused(self, call: FusedCall) -> None:
        keys = call.entry_keys(self._days)
        arguments = call.arguments(self._days, self.epochs, keys, self._keys_with_expiry)
        turns = self._turns
        self.pipe.submit_script(
            "materialise_dispatches",
            [OWNER, WATERMARKS, progress_key(Millis(call.reserved_at)), *keys],
            arguments,
            lambda reply: self._on_fused(call, reply, keys=keys, turns=turns),
        )

    def _on_fused(self, call: FusedCall, reply: object, *, keys: Sequence[bytes], turns: int) -> None:
        if isinstance(reply, StoreError):
            call.on_done(reply)
        elif isinstance(reply, list):
            self._turn_days(call.slots, today=reply[0], stored=reply[1:])
            self._repeat(call, lambda: self._issue_fused(call))
        elif not isinstance(reply, bytes) or len(reply) != call.records:
            call.on_done(None)  # does not decode
        elif b"G" in reply and turns != self._turns:
            self._repeat(call, lambda: self._issue_fused(call))
        else:
            self._remember_keys(call.written_keys(reply, keys))
            call.on_done(reply)

    def _repeat(self, call: "FusedCall | _Begin", issue: Callable[[], None]) -> None:
        call.repeats += 1
        if call.repeats > TURNS_MAX:
            call.on_done(StoreBroken("the day of a shard does not settle"))
        else:
            issue()

    def _turn_days(self, slots: Sequence[SlotId], *, today: int, stored: Sequence[int]) -> None:
        """Issued before the repeat, which so meets the new day; repeating it changes nothing."""
        self._turns += 1
        for slot, day in zip(slots, stored, strict=True):
            if day < today:
                self.pipe.submit_script(
                    "turn_day",
                    [OWNER, WATERMARKS, day_hash_key(slot)],
                    [SLOT_FIELDS[slot], self.epochs[slot], MAILBOX_DAYS],
                    lambda _reply: None,  # the repeat behind it finds out what became of it
                )
            self._days[slot] = max(day, today)

    def _remember_keys(self, keys: Sequence[bytes]) -> None:
        remembered = self._keys_with_expiry
        remembered.update(dict.fromkeys(keys))
        while len(remembered) > MAILBOX_KEYS_REMEMBERED_MAX:
            del remembered[next(iter(remembered))]

    # --- the general path ---

    def begin_dispatch(self, write: MailboxWrite, expected: MailboxSeq) -> asyncio.Future[Begun]:
        begin = _Begin(write, expected)
        self._issue_begin(begin)
        return begin.future

    def _issue_begin(self, begin: "_Begin") -> None:
        write, turns = begin.write, self._turns
        self.pipe.submit_script(
            "begin_dispatch",
            [OWNER, WATERMARKS, progress_key(write.reserved_at)],
            [*self._identity_of(write, begin.expected), DISPATCH_PROGRESS_LIFE_MS],
            lambda reply: self._on_begun(begin, reply, turns=turns),
        )

    def _on_begun(self, begin: "_Begin", reply: Any, *, turns: int) -> None:  # noqa: ANN401 - decoded here
        if isinstance(reply, list) and reply[0] == b"T":
            self._turn_days([begin.write.slot], today=reply[1], stored=[reply[2]])
            self._repeat(begin, lambda: self._issue_begin(begin))
        elif isinstance(reply, list) and reply[0] == b"G" and turns != self._turns:
            self._repeat(begin, lambda: self._issue_begin(begin))
        else:
            begin.on_done(reply)

    def append_entries(
        self, write: MailboxWrite, day: int, recipients: Sequence[UserId]
    ) -> asyncio.Future[Materialised]:
        answers: Answers[Materialised] = Answers(1, _only)
        keys = [
            mailbox_key(write.slot, write.tenant, user, day=day, ephemeral=write.ephemeral)
            for user in recipients
        ]
        marks = bytes(48 if key in self._keys_with_expiry else 49 for key in keys)
        life = EPHEMERAL_KEY_LIFE_MS if write.ephemeral else MAILBOX_KEY_LIFE_MS

        def decode(reply: bytes) -> Materialised:
            if reply == b"D":
                self._remember_keys(keys)
            return answer_of(reply.decode())

        self.pipe.submit_script(
            "append_entries",
            [OWNER, progress_key(write.reserved_at), *keys],
            [
                SLOT_FIELDS[write.slot], self.epochs[write.slot], write.mailbox_seq, write.dispatch_id,
                write.digest, pack_day(day), write.entry, (day + 1) * DAY_MS + life, marks,
            ],
            answers.part(0, decode),
        )  # fmt: skip
        return answers.future

    def finish_dispatch(
        self, write: MailboxWrite, expected: MailboxSeq, *, skipped: bool = False
    ) -> asyncio.Future[Materialised]:
        answers: Answers[Materialised] = Answers(1, _only)
        outcome = "s" if skipped else "f"
        self.pipe.submit_script(
            "finish_dispatch",
            [OWNER, WATERMARKS, progress_key(write.reserved_at)],
            [*self._identity_of(write, expected), outcome, DISPATCH_PROGRESS_LIFE_MS],
            answers.part(0, lambda reply: answer_of(reply.decode())),
        )
        return answers.future

    def _identity_of(self, write: MailboxWrite, expected: MailboxSeq) -> tuple[bytes | int, ...]:
        slot = write.slot
        epoch = self.epochs[slot]
        return (SLOT_FIELDS[slot], epoch, expected, write.mailbox_seq, write.dispatch_id, write.digest)

    # --- reading ---

    def read_mailbox(self, queries: Sequence[MailboxPageQuery]) -> asyncio.Future[list[MailboxPage]]:
        oldest = Millis(self._clock.now_ms() - EPHEMERAL_LIFE_MS)
        answers: Answers[list[MailboxPage]] = Answers(len(queries), list)
        for at, query in enumerate(queries):
            on_done = answers.part(at, lambda reply: _page_of(reply, oldest_ephemeral=oldest))
            self._issue_read(query, on_done, repeats=0)
        return answers.future

    def _issue_read(self, query: MailboxPageQuery, on_done: OnReply, *, repeats: int) -> None:
        slot, day = query.slot, self._days[query.slot]
        keys = [
            mailbox_key(slot, query.tenant, query.user, day=max(0, one), ephemeral=ephemeral)
            for one in range(day - MAILBOX_DAYS, day + 1)
            for ephemeral in (False, True)
        ]

        def on_reply(reply: object) -> None:
            if isinstance(reply, list) and len(reply) == 1 and repeats < TURNS_MAX:
                self._days[slot] = reply[0]
                self._issue_read(query, on_done, repeats=repeats + 1)
            else:
                on_done(reply)

        self.pipe.submit_script(
            "read_mailbox",
            [WATERMARKS, day_hash_key(slot), *keys],
            [
                SLOT_FIELDS[slot], day, query.after, query.entries_max, query.bytes_max,
                query.held_through, query.held_count,
            ],
            on_reply,
        )  # fmt: skip

    def holds_entry(
        self, tenant: TenantId, user: UserId, slot: SlotId, entry: bytes, reserved_at: Millis
    ) -> asyncio.Future[bool]:
        """A shard's day may lie before the record's by the skew of a clock, and after it by any delay."""
        newest = max(self._clock.now_ms() // DAY_MS, self._days[slot]) + 1
        oldest = max(reserved_at // DAY_MS - 1, newest - MAILBOX_DAYS - 3)
        keys = [
            mailbox_key(slot, tenant, user, day=day, ephemeral=ephemeral)
            for day in range(oldest, newest + 1)
            for ephemeral in (False, True)
        ]
        answers: Answers[bool] = Answers(len(keys), any)
        for at, key in enumerate(keys):
            self.pipe.submit((b"ZSCORE", key, entry), answers.part(at, lambda score: score is not None))
        return answers.future


class _Begin:
    """One begin_dispatch and its repeats when a day turned."""

    def __init__(self, write: MailboxWrite, expected: MailboxSeq) -> None:
        self.write = write
        self.expected = expected
        self.repeats = 0
        answers: Answers[Begun] = Answers(1, _only)
        self.future = answers.future
        self.on_done = answers.part(0, lambda pair: Begun(answer_of(pair[0].decode()), int(pair[1])))


def _only(parts: list[Any]) -> Any:  # noqa: ANN401 - `Answers` names the type
    return parts[0]


def _page_of(reply: list[Any], *, oldest_ephemeral: Millis) -> MailboxPage:
    """`covered, more, rebuild, newest, kinds, (seq, entry) …`; over ephemeral ones are left out."""
    covered, more, rebuild, newest, kinds = reply[:5]
    entries = zip(reply[5::2], reply[6::2], kinds.decode(), strict=True)
    kept = tuple(
        (MailboxSeq(int(seq)), entry)
        for seq, entry, kind in entries
        if kind == "m" or _reserved_at(entry) > oldest_ephemeral
    )
    return MailboxPage(kept, MailboxSeq(int(covered)), bool(more), bool(rebuild), MailboxSeq(int(newest)))


def _reserved_at(entry: bytes) -> Millis:
    try:
        return decode_entry(entry).record.reserved_at
    except RecordCorrupt as error:
        raise ValueError(str(error)) from error

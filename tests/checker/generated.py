"""A correct run, made up: what clients and stores would have recorded of a server that keeps its promises.

It has what makes real histories hard to judge: attempts whose outcome nobody knows (committed or not),
client processes that die with a request open and go on under another name, repeats that return the old
coordinates, refusals, an Outbox in another order than the sequences, records that stand in a log twice after
a retry, pages of all sizes, pages that confirm what a push brought, samples between the steps, faults that
strike and heal.

One seed gives one history. Nothing here knows the checker: the mutators break such a history in one place,
and the checker must call the clean one clean and the broken one broken.
"""

import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from msgspec.structs import replace

from qim.errors import Conflict, ResourceExhausted
from tests.checker.history import (
    Device,
    Dispatch,
    Event,
    Fact,
    Fault,
    Held,
    History,
    Mailbox,
    Outbox,
    Progress,
    Pull,
    Push,
    Pushed,
    Read,
    Sample,
    Send,
    Shard,
    Shown,
    StoreRead,
    digest_of,
)

SHARDS: Final = 4
BASES: Final = (1, 7, 100, 5_000)
STEP_NS: Final = 1_000_000


def name_of(word: str) -> str:
    """An id as long as a real one."""
    return digest_of(word.encode()) + digest_of(word[::-1].encode())


@dataclass
class _User:
    name: str
    shard: int
    seqs: list[int] = field(default_factory=list)
    entries: list[Shown] = field(default_factory=list)


@dataclass
class _Device:
    user: _User
    name: str
    process: str
    cursor: int = 0


@dataclass
class _Conversation:
    name: str
    parties: tuple[_User, _User]
    partition: int
    records: list[Outbox] = field(default_factory=list)
    by_message: dict[tuple[str, str], Outbox] = field(default_factory=dict)
    """(sender, client_message_id) → record"""
    marks: dict[str, int] = field(default_factory=dict)


@dataclass
class _Attempt:
    """A message under way in this step; `fate` is what its sender will learn."""

    send: Send
    fate: str
    conversation: _Conversation


class CorrectRun:
    """Call `events()` to its end, then `store_reads()`."""

    def __init__(
        self, seed: int, *, users: int = 6, devices: int = 2, steps: int = 12, sends: int = 5, page: int = 4
    ) -> None:
        self._random = random.Random(seed)
        self._steps, self._sends, self._page = steps, sends, page
        self._t = 1_000
        self._operations = count(1)
        self._names = count(1)
        self._users = [_User(name_of(f"user {n}"), n % SHARDS) for n in range(users)]
        self._conversations = [
            _Conversation(
                name_of(f"conversation {a} {b}"), (self._users[a], self._users[b]), (a + b) % SHARDS
            )
            for a in range(users)
            for b in (a + 1, a + 2)
            if b < users
        ]
        self._devices = [
            _Device(user, name_of(f"device {n} of {user.name}"), f"client-{n}-{place}")
            for place, user in enumerate(self._users)
            for n in range(devices)
        ]
        self._outbox: list[Outbox] = []
        self._ends = [0] * SHARDS
        self._dispatches: list[Dispatch] = []
        self._log_ends = [0] * SHARDS
        self._known: set[str] = set()
        self._unknown: list[_Attempt] = []
        self._acknowledged: list[tuple[_Attempt, Send]] = []
        self._samples: list[Sample] = []
        self._facts: list[Fact] = []

    # --- the run ---

    def events(self) -> Iterator[Event]:
        for step in range(self._steps):
            if self._random.random() < 0.1 or step == 1:
                yield Fault(self._now(), "harness", "strike", "kill", "store")
                yield Fault(self._now(), "harness", "heal", "kill", "store")
            yield from self._send_some()
            for device in self._devices:
                if self._random.random() < 0.7:
                    yield from self._pull(device)
            yield from self._read_histories()
            self._sample()
        yield from self._finish()

    def _now(self) -> int:
        self._t += STEP_NS
        return self._t

    def _send_some(self) -> Iterator[Event]:
        attempts = [self._attempt() for _ in range(self._sends)]
        for attempt in attempts:
            yield attempt.send
        self._sample()
        reached = [a for a in attempts if a.fate in {"ok", "unknown", "died"}]
        self._random.shuffle(reached)
        first_place = {user.name: len(user.seqs) for user in self._users}
        self._commit(reached)
        self._sample()
        for attempt in attempts:
            if attempt.fate == "died":
                self._restart(attempt.send.process)
            else:
                yield self._answer(attempt)
        for device in self._devices:
            yield from self._push(device, first_place[device.user.name])

    def _attempt(self) -> _Attempt:
        chance = self._random.random()
        if self._unknown and chance < 0.2:
            again = self._unknown.pop(self._random.randrange(len(self._unknown)))
            return self._new_attempt(again.conversation, again.send, "ok")
        if self._acknowledged and chance < 0.3:
            again, _ = self._random.choice(self._acknowledged)
            fate = "conflict" if chance < 0.22 else "ok"
            return self._new_attempt(again.conversation, again.send, fate)
        conversation = self._random.choice(self._conversations)
        fate = self._random.choices(
            ["ok", "unknown", "unknown, not done", "died", "refused"], [80, 6, 4, 4, 6]
        )[0]
        return self._new_attempt(conversation, None, fate)

    def _new_attempt(self, conversation: _Conversation, again: Send | None, fate: str) -> _Attempt:
        number = next(self._names)
        if again is None:
            user = self._random.choice(conversation.parties).name
            message, body = name_of(f"message {number}"), digest_of(b"body %d" % number)
        else:
            user, message, body = again.user, again.client_message_id, again.body
        if fate == "conflict":
            body = digest_of(b"other body %d" % number)
        process = self._random.choice([d.process for d in self._devices if d.user.name == user])
        send = Send(
            self._now(), process, "invoke", next(self._operations), user, conversation.name, message, body
        )
        return _Attempt(send, fate, conversation)

    def _answer(self, attempt: _Attempt) -> Send:
        asked = attempt.send
        answer = replace(asked, t=self._now(), type="ok")
        if attempt.fate == "ok":
            record = attempt.conversation.by_message[asked.user, asked.client_message_id]
            answer.message_id, answer.seq = record.message_id, record.seq
            answer.reserved_at = record.reserved_at
            self._acknowledged.append((attempt, answer))
        elif attempt.fate.startswith("unknown"):
            answer.type = "info"
            self._unknown.append(attempt)
        else:
            answer.type = "fail"
            answer.code = Conflict.code if attempt.fate == "conflict" else ResourceExhausted.code
        return answer

    def _restart(self, process: str) -> None:
        for device in self._devices:
            if device.process == process:
                device.process = f"{process}+"

    # --- the server ---

    def _commit(self, attempts: list[_Attempt]) -> None:
        appended = [
            self._reserve(attempt)
            for attempt in attempts
            if (attempt.send.user, attempt.send.client_message_id) not in attempt.conversation.by_message
        ]
        self._random.shuffle(appended)
        for record in appended:
            for _ in range(1 + (self._random.random() < 0.05)):  # a reply was lost, the same bytes again
                self._append(record)
        for record in appended:
            for _ in range(1 + (self._random.random() < 0.05)):
                self._dispatch(record)

    def _reserve(self, attempt: _Attempt) -> Outbox:
        send, conversation = attempt.send, attempt.conversation
        seq = len(conversation.records) + 1
        record = Outbox(
            partition=conversation.partition, offset=-1, conversation=conversation.name, seq=seq,
            parties=(conversation.parties[0].name, conversation.parties[1].name), sender=send.user,
            client_message_id=send.client_message_id, message_id=name_of(f"id {send.client_message_id}"),
            body=send.body, entry=digest_of(f"{conversation.name} {seq}".encode()),
            reserved_at=self._t // 1_000_000,
        )  # fmt: skip
        conversation.records.append(record)
        conversation.by_message[send.user, send.client_message_id] = record
        conversation.marks[send.user] = seq
        self._facts.append(
            Fact("committed", conversation.name, send.user, send.client_message_id, record.message_id, seq)
        )
        return record

    def _append(self, record: Outbox) -> None:
        offset = self._ends[record.partition]
        self._ends[record.partition] += 1
        self._outbox.append(replace(record, offset=offset))

    def _dispatch(self, record: Outbox) -> None:
        shards: dict[int, list[_User]] = {}
        for user in self._users:
            if user.name in record.parties:
                shards.setdefault(user.shard, []).append(user)
        for shard, users in shards.items():
            offset = self._log_ends[shard]
            self._log_ends[shard] += 1
            dispatch_id = f"{record.conversation[:16]}-{record.seq}-{shard}"
            names = tuple(user.name for user in users)
            self._dispatches.append(
                Dispatch(shard, offset, dispatch_id, record.conversation, record.seq, names, record.entry)
            )
            shown = Shown(BASES[shard] + offset, record.conversation, record.seq, record.entry)
            is_repeat = dispatch_id in self._known
            self._known.add(dispatch_id)
            for user in () if is_repeat else users:
                user.seqs.append(shown.mailbox_seq)
                user.entries.append(shown)

    def _watermark(self, shard: int) -> int:
        return BASES[shard] + self._log_ends[shard] - 1 if self._log_ends[shard] else 0

    def _sample(self) -> None:
        marks = [(shard, self._watermark(shard)) for shard in range(SHARDS)]
        self._samples.append(Sample(self._now(), "sampler", marks, list(enumerate(self._ends))))

    # --- what devices see ---

    def _push(self, device: _Device, first: int) -> Iterator[Event]:
        user = device.user
        events = []
        for place in range(first, len(user.seqs)):
            shown = user.entries[place]
            previous = user.seqs[place - 1] if place and self._random.random() < 0.9 else 0
            events.append(Pushed(previous, *shown))
        if events and self._random.random() < 0.8:
            yield Push(self._now(), device.process, user.name, device.name, events)

    def _pull(self, device: _Device, *, limit: int = 0) -> Iterator[Event]:
        user, limit = device.user, limit or self._random.randint(1, self._page)
        start = bisect_right(user.seqs, device.cursor)
        held_count = self._random.randint(0, min(2, len(user.seqs) - start))
        ask = Pull(
            self._now(), device.process, "invoke", next(self._operations), user.name, device.name,
            device.cursor, user.seqs[start + held_count - 1] if held_count else 0, held_count,
        )  # fmt: skip
        yield ask
        begin = start + held_count
        entries = user.entries[begin : begin + limit]
        more = begin + limit < len(user.seqs)
        covered = entries[-1].mailbox_seq if more else max(self._watermark(user.shard), device.cursor)
        device.cursor = covered
        yield replace(ask, t=self._now(), type="ok", entries=entries, covered_through=covered, more=more)

    def _read_histories(self) -> Iterator[Event]:
        for conversation in self._random.sample(self._conversations, 2):
            user = self._random.choice(conversation.parties)
            head = len(conversation.records)
            yield from self._history(conversation, user, before=self._random.choice([0, head, head // 2]))
            yield from self._history(conversation, user, after=self._random.randint(1, head + 1))
            yield from self._mark(conversation, user, wanted=self._random.randint(0, head + 2))

    def _history(
        self,
        conversation: _Conversation,
        user: _User,
        *,
        before: int = 0,
        after: int = 0,
        final: bool = False,
    ) -> Iterator[Event]:
        head = len(conversation.records)
        low, high = (after + 1, head) if after else (1, min(before - 1, head) if before else head)
        if not final:
            low, high = (low, min(high, low + 2)) if after else (max(low, high - 2), high)
        seqs = range(high, low - 1, -1)
        more = bool(seqs) and (high < head if after else low > 1)
        ask = History(
            self._now(), "reader", "invoke", next(self._operations), user.name, conversation.name, before,
            after, final=final,
        )  # fmt: skip
        yield ask
        entries = [(seq, conversation.records[seq - 1].entry) for seq in seqs]
        yield replace(
            ask, t=self._now(), type="ok", entries=entries, earliest=min(1, head), head=head, more=more
        )

    def _mark(
        self, conversation: _Conversation, user: _User, *, wanted: int, final: bool = False
    ) -> Iterator[Event]:
        head = len(conversation.records)
        mark = max(conversation.marks.get(user.name, 0), min(wanted, head))
        conversation.marks[user.name] = mark
        ask = Read(
            self._now(), "reader", "invoke", next(self._operations), user.name, conversation.name, wanted,
            final=final,
        )  # fmt: skip
        yield ask
        yield replace(ask, t=self._now(), type="ok", read_seq=mark, unread=head - mark)

    # --- the end ---

    def _finish(self) -> Iterator[Event]:
        for attempt in self._unknown[::2]:  # some repeat until they know, some never do
            again = self._new_attempt(attempt.conversation, attempt.send, "ok")
            yield again.send
            self._commit([again])
            yield self._answer(again)
        self._sample()
        for device in self._devices:
            while device.cursor < self._watermark(device.user.shard):
                yield from self._pull(device, limit=256)
            held = [Held(shown.conversation, shown.seq, shown.entry) for shown in device.user.entries]
            yield Device(self._now(), device.process, device.user.name, device.name, device.cursor, held)
        for conversation in self._conversations:
            for user in conversation.parties:
                yield from self._history(conversation, user, final=True)
                yield from self._mark(conversation, user, wanted=0, final=True)

    def store_reads(self) -> Iterator[StoreRead]:
        yield from self._samples
        yield from self._outbox
        yield from self._dispatches
        yield from self._facts
        for shard in range(SHARDS):
            yield Shard(shard, BASES[shard], self._watermark(shard))
        for user in self._users:
            yield Mailbox(user.name, user.entries)
        for dispatch_id in sorted(self._known):
            yield Progress(dispatch_id, "f")


def clean_run(seed: int) -> list[Event | StoreRead]:
    """A small correct history."""
    run = CorrectRun(seed)
    return [*run.events(), *run.store_reads()]

"""The calls of the fused script: which records go together, how they are packed, what the letters mean.

    plan:  shards u16 ‖ records u16
           per shard   epoch 8 ‖ W expected u64 ‖ first mailbox_seq u64 ‖ day u32 ‖ records u16
           per record  recipients u8 ‖ ephemeral u8 ‖ marks u16

An argument of a script costs about half a microsecond on the server whatever its size, so the numbers of all
shards and records travel in one packed argument. A mark says which recipients' keys get their expiry.

A call holds the records of one hour (one DP hash) and, of each shard, consecutive records only. Where the
caller's records jump, the rest of that shard is answered GAP without being sent: W is contiguous.
"""

import struct
from collections.abc import Container, Mapping, Sequence
from typing import Final

import msgspec

from qim.adapters.mailbox_keys import final_progress, mailbox_key
from qim.adapters.redis_keys import HOUR_MS, SLOT_FIELDS
from qim.adapters.redis_pipe import OnReply
from qim.ids import MailboxSeq, SlotId
from qim.limits import (
    DISPATCH_PROGRESS_LIFE_MS,
    EPHEMERAL_KEY_LIFE_MS,
    FUSED_RECIPIENTS_MAX,
    MAILBOX_KEY_LIFE_MS,
)
from qim.ports import MailboxWrite, Materialised

_COUNTS = struct.Struct(">HH")
_SHARD = struct.Struct(">8sQQIH")
_RECORD = struct.Struct(">BBH")
assert FUSED_RECIPIENTS_MAX == 16, "the marks of a record are 16 bits"
_WRITTEN: Final = ord("D")
_LIVES: Final = (DISPATCH_PROGRESS_LIFE_MS, MAILBOX_KEY_LIFE_MS, EPHEMERAL_KEY_LIFE_MS)

_ANSWERS: Final = {
    "D": Materialised.DONE,
    "d": Materialised.DONE,
    "R": Materialised.REPEAT,
    "P": Materialised.PASSED,
    "S": Materialised.STALE_OWNER,
    "G": Materialised.GAP,
    "M": Materialised.MISMATCH,
    "O": Materialised.OPEN,
    "B": Materialised.BEHIND,
}


def answer_of(letter: str) -> Materialised:
    """Raises KeyError for a letter that no script answers."""
    return _ANSWERS[letter]


class ShardRun(msgspec.Struct, frozen=True):
    """Consecutive records of one shard inside a call."""

    slot: SlotId
    expected: MailboxSeq
    items: list[tuple[int, MailboxWrite]]
    """Index in the caller's sequence, and the record."""


class FusedCall:
    """One call of the script, with its repeats when a day turned."""

    def __init__(self, runs: Sequence[ShardRun], letters: list[str]) -> None:
        self.slots = [run.slot for run in runs]
        self.reserved_at = runs[0].items[0][1].reserved_at
        self.repeats = 0
        self.on_done: OnReply = lambda _reply: None
        self._runs = runs
        self._letters = letters
        self._places = [index for run in runs for index, _ in run.items]
        self._writes = [write for run in runs for _, write in run.items]

    @property
    def records(self) -> int:
        return len(self._writes)

    def entry_keys(self, days: Sequence[int]) -> list[bytes]:
        return [
            mailbox_key(write.slot, write.tenant, user, day=days[write.slot], ephemeral=write.ephemeral)
            for write in self._writes
            for user in write.recipients
        ]

    def arguments(
        self,
        days: Sequence[int],
        epochs: Sequence[bytes],
        keys: Sequence[bytes],
        remembered: Container[bytes],
    ) -> list[bytes | int]:
        """`keys` are those of `entry_keys`; a key that is not remembered gets its expiry in this call."""
        plan = [_COUNTS.pack(len(self._runs), len(self._writes))]
        for run in self._runs:
            slot, items = run.slot, run.items
            first = items[0][1].mailbox_seq
            plan.append(_SHARD.pack(epochs[slot], run.expected, first, days[slot], len(items)))
        at = 0
        for write in self._writes:
            recipients = len(write.recipients)
            marks = 0
            for bit in range(recipients):
                if keys[at + bit] not in remembered:
                    marks |= 1 << bit
            plan.append(_RECORD.pack(recipients, write.ephemeral, marks))
            at += recipients
        return [
            *_LIVES,
            b"".join(plan),
            *[SLOT_FIELDS[slot] for slot in self.slots],
            *[write.dispatch_id for write in self._writes],
            *[final_progress(write.digest, days[write.slot]) for write in self._writes],
            *[write.entry for write in self._writes],
        ]

    def written_keys(self, answers: bytes, keys: Sequence[bytes]) -> list[bytes]:
        """Keys of the records that the script wrote in this very call."""
        written: list[bytes] = []
        at = 0
        for letter, write in zip(answers, self._writes, strict=True):
            end = at + len(write.recipients)
            if letter == _WRITTEN:
                written.extend(keys[at:end])
            at = end
        return written

    def note(self, answers: bytes) -> None:
        """Puts the letters at the caller's places; raises KeyError for an unknown one."""
        text = answers.decode()
        for letter in set(text):
            answer_of(letter)
        letters = self._letters
        for index, letter in zip(self._places, text, strict=True):
            letters[index] = letter


def answers_of(writes: Sequence[MailboxWrite], letters: Sequence[str]) -> list[Materialised]:
    """One answer per record; behind a refused record of its shard, in whichever call that was, is BEHIND."""
    answers = []
    refused: set[SlotId] = set()
    for write, letter in zip(writes, letters, strict=True):
        answer = answer_of(letter)
        if write.slot in refused and answer is not Materialised.STALE_OWNER:
            answer = Materialised.BEHIND
        elif not answer.is_passed:
            refused.add(write.slot)
        answers.append(answer)
    return answers


def split_by_hour(
    expected: Mapping[SlotId, MailboxSeq], writes: Sequence[MailboxWrite], letters: list[str]
) -> list[FusedCall]:
    """The calls of one run, in the order in which they must be issued."""
    waiting = _consecutive(expected, writes, letters)
    if len({write.reserved_at // HOUR_MS for write in writes}) == 1:
        runs = [ShardRun(slot, watermark, items) for slot, (watermark, items) in waiting.items()]
        return [FusedCall(runs, letters)]
    calls = []
    while waiting:
        hour = min(_hour(items[0][1]) for _, items in waiting.values())
        runs = []
        for slot, (watermark, items) in list(waiting.items()):
            count = next((at for at, (_, write) in enumerate(items) if _hour(write) != hour), len(items))
            if count:
                runs.append(ShardRun(slot, watermark, items[:count]))
                waiting[slot] = (items[count - 1][1].mailbox_seq, items[count:])
            if count == len(items):
                del waiting[slot]
        calls.append(FusedCall(runs, letters))
    return calls


def _consecutive(
    expected: Mapping[SlotId, MailboxSeq], writes: Sequence[MailboxWrite], letters: list[str]
) -> dict[SlotId, tuple[MailboxSeq, list[tuple[int, MailboxWrite]]]]:
    """Records per slot; what jumps, and all behind it, is answered here."""
    waiting: dict[SlotId, tuple[MailboxSeq, list[tuple[int, MailboxWrite]]]] = {}
    jumped: set[SlotId] = set()
    for index, write in enumerate(writes):
        assert 0 < len(write.recipients) <= FUSED_RECIPIENTS_MAX
        slot = write.slot
        known = waiting.get(slot)
        if known is None:
            waiting[slot] = (expected[slot], [(index, write)])
        elif slot in jumped or write.mailbox_seq != known[1][-1][1].mailbox_seq + 1:
            jumped.add(slot)
            letters[index] = "G"
        else:
            known[1].append((index, write))
    return waiting


def _hour(write: MailboxWrite) -> int:
    return write.reserved_at // HOUR_MS

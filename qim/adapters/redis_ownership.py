"""Owner epochs of one instance over Redis; the commit store and the mailbox store both inherit from it.

The adapter remembers the epochs of its last successful claim and packs them for every script that changes
state. A slot that was never claimed has epoch 0, which no owner ever holds, so its items are answered
STALE_OWNER. When another process takes a slot over, nothing here notices: the scripts do, item by item.
"""

import asyncio
from typing import Any, Final

from qim.adapters.redis_answers import Answers
from qim.adapters.redis_keys import OWNER, SLOT_FIELDS, pack_epoch
from qim.adapters.redis_pipe import RedisPipe
from qim.ids import Epoch, SlotId
from qim.limits import CLAIM_FRESH_MS, SLOTS
from qim.ports import ClaimRefusal, ClaimResult, SlotClaim

_UNCLAIMED: Final = pack_epoch(0)


class RedisOwnership:
    """`SlotOwnership` of the port, on one pipe."""

    def __init__(self, pipe: RedisPipe) -> None:
        self.pipe = pipe
        self.epochs = [_UNCLAIMED] * SLOTS
        """Packed epoch per slot, ready to be an argument of a script."""

    def claim(self, claim: SlotClaim) -> asyncio.Future[ClaimResult]:
        mode = "refresh" if claim.is_refresh else "claim"
        answers: Answers[ClaimResult] = Answers(1, lambda parts: self._remember(parts[0]))
        on_reply = answers.part(0, lambda reply: _decode_claim(claim, reply))
        self.pipe.submit_script("claim_slot", [OWNER], _arguments(mode, claim), on_reply)
        return answers.future

    def _remember(self, result: ClaimResult) -> ClaimResult:
        for slot, epoch in result.epochs.items():
            self.epochs[slot] = pack_epoch(epoch)
        return result

    def release(self, claim: SlotClaim) -> asyncio.Future[None]:
        return self.pipe.script("claim_slot", [OWNER], _arguments("release", claim))


def _arguments(mode: str, claim: SlotClaim) -> list[bytes | str | int]:
    return [
        mode, claim.boot, claim.supervisor, claim.placement, claim.label,
        int(claim.take_over), CLAIM_FRESH_MS,
        *(SLOT_FIELDS[slot] for slot in claim.slots),
    ]  # fmt: skip


def _decode_claim(claim: SlotClaim, reply: list[Any]) -> ClaimResult:
    """`[1, epoch …]` in the order of the slots, or `[0, slot, reason, label, …]`."""
    if reply[0] == 1:
        epochs = {slot: Epoch(epoch) for slot, epoch in zip(claim.slots, reply[1:], strict=True)}
        return ClaimResult(epochs, ())
    refusals = tuple(
        ClaimRefusal(SlotId(int(reply[at])), reply[at + 1].decode(), reply[at + 2].decode(errors="replace"))
        for at in range(1, len(reply), 3)
    )
    return ClaimResult({}, refusals)

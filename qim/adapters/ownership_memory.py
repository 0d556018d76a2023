"""Owner epochs in memory, by the same rules as `claim_slot`; the memory stores inherit from it.

Several memory stores may stand for one instance (one per worker of a simulation): they share the table, each
keeps the epochs of its own last claim. So a stale owner exists here as it does on a server.
"""

import asyncio
from typing import NamedTuple, TypeVar

from qim.clock import Clock
from qim.ids import BootId, Epoch, Millis, SlotId
from qim.limits import CLAIM_FRESH_MS
from qim.ports import ClaimRefusal, ClaimResult, SlotClaim

T = TypeVar("T")


class Owner(NamedTuple):
    """What an instance knows of the owner of one slot."""

    epoch: Epoch
    boot: BootId
    supervisor: bytes
    placement: bytes
    stamp: Millis
    is_released: bool
    label: str


class MemoryOwnership:
    """`SlotOwnership` of the port; `owners` is the table of the instance."""

    def __init__(self, clock: Clock, owners: dict[SlotId, Owner]) -> None:
        self.clock = clock
        self._owners = owners
        self._epochs: dict[SlotId, Epoch] = {}

    def claim(self, claim: SlotClaim) -> asyncio.Future[ClaimResult]:
        now = self.clock.now_ms()
        held = ((slot, self._owners.get(slot)) for slot in claim.slots)
        refusals = tuple(
            ClaimRefusal(slot, reason, owner.label if owner else "")
            for slot, owner in held
            if (reason := _refusal(claim, owner, now))
        )
        if refusals:
            return done(ClaimResult({}, refusals))
        for slot in claim.slots:
            epoch = _next_epoch(claim, self._owners.get(slot))
            self._owners[slot] = Owner(
                epoch, claim.boot, claim.supervisor, claim.placement, now, False, claim.label
            )
            self._epochs[slot] = epoch
        return done(ClaimResult({slot: self._epochs[slot] for slot in claim.slots}, ()))

    def release(self, claim: SlotClaim) -> asyncio.Future[None]:
        for slot in claim.slots:
            owner = self._owners.get(slot)
            if owner is not None and owner.boot == claim.boot:
                self._owners[slot] = owner._replace(is_released=True)
        return done(None)

    def _is_stale(self, slot: SlotId) -> bool:
        owner = self._owners.get(slot)
        return owner is None or owner.epoch != self._epochs.get(slot)


def _next_epoch(claim: SlotClaim, owner: Owner | None) -> Epoch:
    if owner is None:
        return Epoch(1)
    return owner.epoch if owner.boot == claim.boot else Epoch(owner.epoch + 1)


def _refusal(claim: SlotClaim, owner: Owner | None, now: Millis) -> str:
    if claim.is_refresh:
        is_ours = owner is not None and owner.boot == claim.boot and not owner.is_released
        return "" if is_ours else "lost"
    if owner is None:
        return ""
    same_side = owner.boot == claim.boot or owner.supervisor == claim.supervisor
    if same_side or claim.take_over or owner.is_released:
        return ""
    if now - owner.stamp < CLAIM_FRESH_MS:
        return "fresh"
    return "placement" if owner.placement != claim.placement else ""


def done(value: T) -> asyncio.Future[T]:
    """An answer that is there already."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future

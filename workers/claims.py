"""Ownership of a worker's slots: claimed at the start, refreshed every 3 s, released at the end.

One claim per instance and role, all under the boot id of this process. A claim that meets a fresh stamp of
another supervisor waits a little longer than a stamp stays fresh: if that owner is dead the stamp gets old,
if it lives it is stamped again and the refusal is final. So a service that was killed and started at once
begins by itself after ten seconds, and two living ones never share a slot.

What was granted once is only refreshed from then on, and a refresh takes nothing from another owner: one that
is carried out late, when the successor has claimed already, does not take the slots back. Its refusal means
that somebody took a slot over: `StaleOwner`, and the process ends with 75. A store that is away is no such
sign; its scripts check the epoch at every write anyway, and the refresh is repeated when it is back.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from structlog import get_logger

from qim.clock import Clock
from qim.errors import StaleOwner, StoreRefused, StoreUnknown
from qim.ids import Epoch, SlotId
from qim.limits import CLAIM_FRESH_MS, CLAIM_INTERVAL_MS
from qim.ports import ClaimRefusal, ClaimResult, SlotClaim, SlotOwnership

RETRY_SECONDS: Final = 0.5
FRESH: Final = "fresh"
LOST: Final = "lost"

log = get_logger()


class Owned(NamedTuple):
    """Some slots on one instance."""

    name: str
    store: SlotOwnership
    slots: tuple[SlotId, ...]


class Claims:
    """The claims of one worker process."""

    def __init__(self, owned: Sequence[Owned], *, claim: SlotClaim, clock: Clock) -> None:
        """`claim` carries who we are; its slots are set per instance."""
        self._owned = tuple(part for part in owned if part.slots)
        self._claim = claim
        self._clock = clock
        self.epochs: dict[str, dict[SlotId, Epoch]] = {}
        """By instance, as granted; a refresh never changes them."""

    async def claim_all(self, on_wait: Callable[[str], None]) -> None:
        """Returns when every slot is ours; raises StaleOwner when another owner lives.

        `on_wait` is told what is waited for, each time.
        """
        patience = self._clock.monotonic() + CLAIM_FRESH_MS / 1000 + 2 * RETRY_SECONDS
        for part in self._owned:
            while refusals := await self._claim_part(part):
                if self._clock.monotonic() >= patience or any(each.reason != FRESH for each in refusals):
                    raise StaleOwner(_describe(part, refusals[0]))
                on_wait(f"{part.name}: slot {refusals[0].slot} was just stamped by {refusals[0].label}")
                await asyncio.sleep(RETRY_SECONDS)

    async def keep(self) -> None:
        """Refreshes until cancelled; raises StaleOwner when a slot was lost."""
        while True:
            await asyncio.sleep(CLAIM_INTERVAL_MS / 1000)
            await self.refresh()

    async def refresh(self) -> None:
        """One round; a store that is away is asked again in the next one."""
        for part in self._owned:
            try:
                refusals = await self._claim_part(part)
            except (StoreUnknown, StoreRefused):
                continue
            if refusals:
                raise StaleOwner(_describe(part, refusals[0]))

    async def release(self) -> None:
        """Lets any placement claim the slots at once. What cannot be released gets old by itself."""
        calls = [part.store.release(self._claim._replace(slots=part.slots)) for part in self._owned]
        await asyncio.gather(*(_quietly(call) for call in calls))

    async def _claim_part(self, part: Owned) -> tuple[ClaimRefusal, ...]:
        claim = self._claim._replace(slots=part.slots, is_refresh=part.name in self.epochs)
        result: ClaimResult = await part.store.claim(claim)
        if not result.refusals:
            self.epochs[part.name] = result.epochs
        return result.refusals


def owned_slots(
    name: str, stores: Sequence[SlotOwnership], *, slots: Sequence[SlotId], instances: Sequence[int]
) -> list[Owned]:
    """What of `slots` lies on each instance; `instances` names the instance of each slot."""
    return [
        Owned(
            f"{name} {number}",
            store,
            tuple(slot for slot, instance in zip(slots, instances, strict=True) if instance == number),
        )
        for number, store in enumerate(stores)
    ]


async def _quietly(call: Awaitable[None]) -> None:
    try:
        await call
    except (StoreUnknown, StoreRefused):
        log.warning("claim_not_released")


def _describe(part: Owned, refusal: ClaimRefusal) -> str:
    if refusal.reason == LOST:
        return f"{part.name}: slot {refusal.slot} is not ours any more"
    if refusal.reason == FRESH:
        return (
            f"{part.name}: slot {refusal.slot} belongs to a living service on {refusal.label}; stop it first"
        )
    return (
        f"{part.name}: slot {refusal.slot} was last owned under another number of workers or instances by"
        f" {refusal.label}, and not released; start with the former numbers and stop politely, or take over"
        " by qim serve --take-over when that supervisor is surely dead"
    )

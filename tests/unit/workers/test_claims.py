"""Claims of slots on a memory store: who may own what, and how a loss is noticed."""

import asyncio

import pytest

from qim.adapters.commits_memory import CommitState, MemoryCommitStore
from qim.clock import ManualClock
from qim.errors import StaleOwner
from qim.ids import BootId, SlotId
from qim.limits import CLAIM_FRESH_MS
from qim.ports import SlotClaim
from workers.claims import Claims, owned_slots

WAITS: list[str] = []
SLOTS = (SlotId(0), SlotId(1), SlotId(63))


class World:
    """One store and one clock that several owners share."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.state = CommitState()

    def claims(self, name: str, *, supervisor: str = "", placement: bytes = b"p" * 16) -> Claims:
        store = MemoryCommitStore(self.clock, self.state)
        claim = SlotClaim(
            slots=(),
            boot=BootId(name.encode().ljust(16)),
            supervisor=(supervisor or name).encode().ljust(16),
            label=f"host-of-{name}",
            placement=placement,
        )
        owned = owned_slots("core instance", [store], slots=SLOTS, instances=[0, 0, 0])
        return Claims(owned, claim=claim, clock=self.clock)


async def until_done(world: World, work: "asyncio.Future[None]") -> None:
    """Lets the loop run and the clock move until the work has ended."""
    while not work.done():
        world.clock.advance(milliseconds=500)
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is moved by hand, so the pauses between two tries must not wait for the real one."""
    monkeypatch.setattr("workers.claims.RETRY_SECONDS", 0.0)


async def test_a_first_claim_gets_epoch_one_and_a_repeat_the_same() -> None:
    claims = World().claims("a")
    await claims.claim_all(WAITS.append)
    await claims.refresh()
    assert claims.epochs == {"core instance 0": dict.fromkeys(SLOTS, 1)}


async def test_a_restarted_worker_of_the_same_supervisor_takes_over_at_once() -> None:
    world = World()
    await world.claims("a", supervisor="s").claim_all(WAITS.append)
    successor = world.claims("b", supervisor="s")
    await successor.claim_all(WAITS.append)
    assert successor.epochs["core instance 0"][SLOTS[0]] == 2


async def test_the_slots_of_a_dead_service_are_ours_when_its_stamp_is_old() -> None:
    world = World()
    await world.claims("a").claim_all(WAITS.append)
    successor = world.claims("b")
    began = world.clock.monotonic()
    await until_done(world, asyncio.ensure_future(successor.claim_all(WAITS.append)))
    assert world.clock.monotonic() - began <= CLAIM_FRESH_MS / 1000 + 1
    assert WAITS[-1] == "core instance 0: slot 0 was just stamped by host-of-a"
    assert successor.epochs["core instance 0"][SLOTS[0]] == 2


async def test_the_slots_of_a_living_service_are_refused_by_name() -> None:
    world = World()
    owner = world.claims("a")
    await owner.claim_all(WAITS.append)
    attempt = asyncio.ensure_future(world.claims("b").claim_all(WAITS.append))
    while not attempt.done():
        world.clock.advance(milliseconds=500)
        await owner.refresh()
        await asyncio.sleep(0)
    with pytest.raises(StaleOwner, match="belongs to a living service on host-of-a"):
        attempt.result()


async def test_an_owner_that_was_replaced_is_told_at_its_next_refresh() -> None:
    world = World()
    owner = world.claims("a")
    await owner.claim_all(WAITS.append)
    world.clock.advance(milliseconds=CLAIM_FRESH_MS + 1)
    await world.claims("b").claim_all(WAITS.append)
    with pytest.raises(StaleOwner):
        await owner.refresh()


async def test_a_late_refresh_of_a_predecessor_leaves_the_slots_to_their_owner() -> None:
    world = World()
    predecessor = world.claims("a", supervisor="s")
    await predecessor.claim_all(WAITS.append)
    owner = world.claims("b", supervisor="s")
    await owner.claim_all(WAITS.append)
    with pytest.raises(StaleOwner, match="slot 0 is not ours any more"):
        await predecessor.refresh()
    await owner.refresh()
    assert owner.epochs["core instance 0"][SLOTS[0]] == 2


async def test_a_slot_that_was_taken_and_released_meanwhile_is_lost_too() -> None:
    world = World()
    owner = world.claims("a")
    await owner.claim_all(WAITS.append)
    world.clock.advance(milliseconds=CLAIM_FRESH_MS + 1)
    other = world.claims("b")
    await other.claim_all(WAITS.append)
    await other.release()
    with pytest.raises(StaleOwner, match="slot 0 is not ours any more"):
        await owner.refresh()


async def test_released_slots_go_to_another_placement_at_once() -> None:
    world = World()
    owner = world.claims("a")
    await owner.claim_all(WAITS.append)
    await owner.release()
    await world.claims("b", placement=b"q" * 16).claim_all(WAITS.append)


async def test_slots_that_were_not_released_are_refused_to_another_placement() -> None:
    world = World()
    await world.claims("a").claim_all(WAITS.append)
    world.clock.advance(milliseconds=CLAIM_FRESH_MS + 1)
    with pytest.raises(StaleOwner, match="another number of workers or instances"):
        await world.claims("b", placement=b"q" * 16).claim_all(WAITS.append)

"""`claim_slot` on real servers: who gets which epoch, who is refused, and that a claim is all or nothing."""

import pytest

from qim.adapters import redis_keys as keys
from qim.adapters.redis_ownership import RedisOwnership
from qim.adapters.redis_pipe import RedisPipe
from qim.errors import StoreBroken
from qim.ids import SlotId
from qim.ports import ClaimRefusal
from tests.lua.commit_calls import CLOCK, claim_of, opened_pipe, picture, plant
from tests.services import StoreServer

ONE, TWO = SlotId(5), SlotId(63)
OTHER_SUPERVISOR = b"t" * 16
OTHER_MAP = b"q" * 16
STAMP_AT = 56


async def make_old(pipe: RedisPipe, slot: SlotId, *, age_ms: int) -> None:
    """Sets the stamp back, as time would."""
    value = await pipe.command("HGET", keys.OWNER, slot)
    stamp = (CLOCK.now_ms() - age_ms).to_bytes(8, "big")
    await pipe.command("HSET", keys.OWNER, slot, value[:STAMP_AT] + stamp + value[STAMP_AT + 8 :])


async def test_the_first_claim_starts_at_epoch_one_and_a_repeat_keeps_it(store_server: StoreServer) -> None:
    async with opened_pipe(store_server) as pipe:
        ownership = RedisOwnership(pipe)
        claim = claim_of(slots=[ONE, TWO])
        assert (await ownership.claim(claim)).epochs == {ONE: 1, TWO: 1}
        await make_old(pipe, ONE, age_ms=60_000)
        assert (await ownership.claim(claim)).epochs == {ONE: 1, TWO: 1}
        value = await pipe.command("HGET", keys.OWNER, ONE)
        assert abs(int.from_bytes(value[STAMP_AT : STAMP_AT + 8], "big") - CLOCK.now_ms()) < 5_000
        assert value[64:] == b"\x00host-1"


async def test_another_process_of_the_same_supervisor_takes_over_at_once(store_server: StoreServer) -> None:
    async with opened_pipe(store_server) as pipe:
        await RedisOwnership(pipe).claim(claim_of(slots=[ONE]))
        result = await RedisOwnership(pipe).claim(claim_of(b"c" * 16, slots=[ONE, TWO]))
        assert result.epochs == {ONE: 2, TWO: 1}
        moved = claim_of(b"d" * 16, slots=[ONE], placement=OTHER_MAP)
        assert (await RedisOwnership(pipe).claim(moved)).epochs == {ONE: 3}


async def test_a_fresh_stamp_of_another_supervisor_refuses_the_whole_claim(store_server: StoreServer) -> None:
    async with opened_pipe(store_server) as pipe:
        await RedisOwnership(pipe).claim(claim_of(slots=[ONE]))
        before = await picture(pipe)
        stranger = claim_of(b"c" * 16, slots=[TWO, ONE], supervisor=OTHER_SUPERVISOR)
        result = await RedisOwnership(pipe).claim(stranger)
        assert result == ({}, (ClaimRefusal(ONE, "fresh", "host-1"),))
        assert await picture(pipe) == before


async def test_an_old_stamp_lets_another_supervisor_in_with_the_same_map_only(
    store_server: StoreServer,
) -> None:
    async with opened_pipe(store_server) as pipe:
        await RedisOwnership(pipe).claim(claim_of(slots=[ONE]))
        await make_old(pipe, ONE, age_ms=9_000)
        stranger = claim_of(b"c" * 16, slots=[ONE], supervisor=OTHER_SUPERVISOR)
        assert (await RedisOwnership(pipe).claim(stranger)).refusals[0].reason == "fresh"
        await make_old(pipe, ONE, age_ms=11_000)
        other_map = stranger._replace(placement=OTHER_MAP)
        assert (await RedisOwnership(pipe).claim(other_map)).refusals[0].reason == "placement"
        assert (await RedisOwnership(pipe).claim(stranger)).epochs == {ONE: 2}


@pytest.mark.parametrize("way", ["released", "taken over"])
async def test_a_release_or_the_operators_word_opens_a_slot_to_anybody(
    store_server: StoreServer, way: str
) -> None:
    async with opened_pipe(store_server) as pipe:
        claim = claim_of(slots=[ONE])
        await RedisOwnership(pipe).claim(claim)
        if way == "released":
            await RedisOwnership(pipe).release(claim)
        stranger = claim_of(
            b"c" * 16,
            slots=[ONE],
            supervisor=OTHER_SUPERVISOR,
            placement=OTHER_MAP,
            take_over=way == "taken over",
        )
        assert (await RedisOwnership(pipe).claim(stranger)).epochs == {ONE: 2}


@pytest.mark.parametrize("way", ["another owner", "no owner", "released"])
async def test_a_refresh_of_slots_that_are_not_ours_any_more_changes_nothing(
    store_server: StoreServer, way: str
) -> None:
    async with opened_pipe(store_server) as pipe:
        ownership = RedisOwnership(pipe)
        ours = claim_of(slots=[TWO, ONE], take_over=True)
        await ownership.claim(ours)
        if way == "another owner":
            await RedisOwnership(pipe).claim(claim_of(b"c" * 16, slots=[ONE]))
        elif way == "no owner":
            await pipe.command("HDEL", keys.OWNER, ONE)
        else:
            await ownership.release(ours._replace(slots=(ONE,)))
        before = await picture(pipe)
        result = await ownership.claim(ours._replace(is_refresh=True))
        assert result == ({}, (ClaimRefusal(ONE, "lost", "" if way == "no owner" else "host-1"),))
        assert await picture(pipe) == before


async def test_a_refresh_of_what_is_ours_keeps_the_epoch_and_renews_the_stamp(
    store_server: StoreServer,
) -> None:
    async with opened_pipe(store_server) as pipe:
        ownership = RedisOwnership(pipe)
        await ownership.claim(claim_of(slots=[ONE]))
        await make_old(pipe, ONE, age_ms=60_000)
        assert (await ownership.claim(claim_of(slots=[ONE], is_refresh=True))).epochs == {ONE: 1}
        stranger = claim_of(b"c" * 16, slots=[ONE], supervisor=OTHER_SUPERVISOR)
        assert (await ownership.claim(stranger)).refusals[0].reason == "fresh"


async def test_a_release_by_a_former_owner_changes_nothing(store_server: StoreServer) -> None:
    async with opened_pipe(store_server) as pipe:
        await RedisOwnership(pipe).claim(claim_of(slots=[ONE]))
        await RedisOwnership(pipe).claim(claim_of(b"c" * 16, slots=[ONE]))
        before = await picture(pipe)
        await RedisOwnership(pipe).release(claim_of(slots=[ONE, TWO]))
        assert await picture(pipe) == before


async def test_a_wrong_type_under_owner_is_refused_before_any_write(store_server: StoreServer) -> None:
    async with opened_pipe(store_server) as pipe:
        await plant(pipe, keys.OWNER)
        before = await picture(pipe)
        with pytest.raises(StoreBroken):
            await RedisOwnership(pipe).claim(claim_of())
        assert await picture(pipe) == before


async def test_a_full_server_can_still_be_claimed_and_released(store_server: StoreServer) -> None:
    async with opened_pipe(store_server) as pipe:
        await pipe.command("CONFIG", "SET", "maxmemory", "1mb")
        try:
            assert len((await RedisOwnership(pipe).claim(claim_of())).epochs) == 64
            await RedisOwnership(pipe).release(claim_of())
        finally:
            await pipe.command("CONFIG", "SET", "maxmemory", "0")

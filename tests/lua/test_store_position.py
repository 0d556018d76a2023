"""`store_position` on real servers: positions rise only, and a missing one stays missing."""

import pytest

from qim.adapters import redis_keys as keys
from qim.errors import StoreBroken
from qim.ids import SEQ_MAX, Offset, SlotId
from tests.lua.commit_calls import opened_store, picture, plant
from tests.services import StoreServer

ONE, TWO, THREE = SlotId(1), SlotId(2), SlotId(63)


async def test_positions_rise_and_a_lower_one_changes_nothing(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        assert await store.load_positions("fanout", [ONE, TWO]) == {}
        await store.store_positions("fanout", {ONE: Offset(0), TWO: Offset(SEQ_MAX - 1)})
        before = await picture(pipe)
        await store.store_positions("fanout", {ONE: Offset(-1), TWO: Offset(7)})
        await store.store_positions("fanout", {})
        assert await picture(pipe) == before
        await store.store_positions("fanout", {ONE: Offset(3), TWO: Offset(SEQ_MAX)})
        assert await store.load_positions("fanout", [ONE, TWO, THREE]) == {ONE: 3, TWO: SEQ_MAX}
        assert await store.load_positions("archiver", [ONE]) == {}


async def test_a_wrong_type_is_refused_before_any_write(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        await plant(pipe, keys.position_key("fanout"))
        before = await picture(pipe)
        with pytest.raises(StoreBroken):
            await store.store_positions("fanout", {ONE: Offset(5)})
        assert await picture(pipe) == before


@pytest.mark.shows("X9")
async def test_a_position_that_is_no_number_counts_as_absent_and_holds_up_no_other(
    store_server: StoreServer,
) -> None:
    async with opened_store(store_server) as (store, pipe):
        await pipe.command("HSET", keys.position_key("fanout"), ONE, "garbage", TWO, 3)
        assert await store.load_positions("fanout", [ONE, TWO]) == {TWO: 3}
        await store.store_positions("fanout", {ONE: Offset(7), TWO: Offset(8)})
        assert await store.load_positions("fanout", [ONE, TWO]) == {ONE: 7, TWO: 8}


async def test_a_full_server_still_takes_positions(store_server: StoreServer) -> None:
    async with opened_store(store_server) as (store, pipe):
        await pipe.command("CONFIG", "SET", "maxmemory", "1mb")
        try:
            await store.store_positions("fanout", {ONE: Offset(5)})
        finally:
            await pipe.command("CONFIG", "SET", "maxmemory", "0")
        assert await store.load_positions("fanout", [ONE]) == {ONE: 5}

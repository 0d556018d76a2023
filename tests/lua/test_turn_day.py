"""turn_day on real servers: the day only goes forward, and the floor is never folded away."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from qim.adapters.mailbox_keys import WATERMARKS, day_hash_key, pack_state, unpack_state
from qim.adapters.mailbox_redis import RedisMailboxStore
from qim.adapters.redis_keys import OWNER, pack_epoch
from qim.adapters.redis_pipe import RedisPipe
from qim.errors import StoreBroken
from qim.ids import DispatchId, MailboxSeq
from qim.limits import MAILBOX_DAYS
from qim.ports import MailboxPage, ShardState
from tests.lua.mailbox_case import IDENTITY, OTHER, SLOT, contents, open_store, query_of, today
from tests.services import StoreServer

DAYS = day_hash_key(SLOT)
Opened = tuple[RedisPipe, RedisMailboxStore]


@pytest.fixture
async def opened(store_server: StoreServer) -> AsyncIterator[Opened]:
    pipe, store = await open_store(store_server)
    yield pipe, store
    await pipe.close()


async def stand(
    pipe: RedisPipe, *, watermark: int, days_ago: int, noted: dict[int, int] | None = None
) -> None:
    """Puts the shard where it would stand after quiet days; `noted` is days ago → last mailbox_seq."""
    day = today() - days_ago
    state = ShardState(MailboxSeq(watermark), MailboxSeq(1), day, IDENTITY, DispatchId(b"d" * 16))
    await pipe.command("HSET", WATERMARKS, SLOT, pack_state(state))
    for ago, seq in (noted or {}).items():
        await pipe.command("HSET", DAYS, today() - ago, seq)


async def turn(pipe: RedisPipe, *, epoch: bytes = pack_epoch(1)) -> Any:
    return await pipe.script("turn_day", [OWNER, WATERMARKS, DAYS], [int(SLOT), epoch, MAILBOX_DAYS])


@pytest.mark.shows("M9")
async def test_a_turn_notes_where_the_old_day_ended_and_is_safe_to_repeat(opened: Opened) -> None:
    pipe, _ = opened
    await stand(pipe, watermark=9, days_ago=2)
    assert await turn(pipe) == today()
    before = await contents(pipe)
    assert before[DAYS] == {b"%d" % (today() - 2): b"9"}
    assert unpack_state(before[WATERMARKS][b"%d" % SLOT]) == ShardState(
        MailboxSeq(9), MailboxSeq(1), today(), IDENTITY, DispatchId(b"d" * 16)
    )
    assert await turn(pipe) == today()
    assert await contents(pipe) == before


@pytest.mark.shows("M9")
async def test_a_day_that_is_ahead_of_the_clock_is_left_alone(opened: Opened) -> None:
    pipe, _ = opened
    await stand(pipe, watermark=9, days_ago=-1)
    before = await contents(pipe)
    assert await turn(pipe) == today() + 1
    assert await contents(pipe) == before


@pytest.mark.shows("M9")
async def test_of_the_days_too_old_only_the_newest_stays(opened: Opened) -> None:
    pipe, _ = opened
    await stand(pipe, watermark=90, days_ago=1, noted={30: 10, 9: 20, 8: 30, 7: 40, 3: 50})
    await turn(pipe)
    noted = (await contents(pipe))[DAYS]
    assert noted == {
        b"%d" % (today() - ago): seq for ago, seq in {8: b"30", 7: b"40", 3: b"50", 1: b"90"}.items()
    }


@pytest.mark.shows("M9")
async def test_a_cursor_below_the_floor_must_rebuild_and_one_at_the_floor_need_not(opened: Opened) -> None:
    pipe, store = opened
    await stand(pipe, watermark=90, days_ago=0, noted={8: 30, 7: 40})
    pages = await store.read_mailbox([query_of(after=29), query_of(after=30), query_of()])
    rebuild = MailboxPage((), MailboxSeq(90), False, True, MailboxSeq(0))
    assert pages == [rebuild, rebuild._replace(rebuild=False), rebuild]


@pytest.mark.shows("M9")
async def test_a_shard_that_was_quiet_for_longer_than_the_days_kept_has_its_floor_at_w(
    opened: Opened,
) -> None:
    pipe, store = opened
    await stand(pipe, watermark=90, days_ago=MAILBOX_DAYS + 1)
    for _ in range(2):
        pages = await store.read_mailbox([query_of(after=89), query_of(after=90)])
        assert [page.rebuild for page in pages] == [True, False]
        await turn(pipe)
    await pipe.command("DEL", DAYS)
    await stand(pipe, watermark=90, days_ago=MAILBOX_DAYS)
    assert not (await store.read_mailbox([query_of(after=89)]))[0].rebuild


async def test_a_stale_owner_and_an_unknown_shard_turn_nothing(opened: Opened) -> None:
    pipe, _ = opened
    await stand(pipe, watermark=9, days_ago=2)
    before = await contents(pipe)
    assert await turn(pipe, epoch=pack_epoch(0)) == b"STALE_OWNER"
    assert await contents(pipe) == before
    await pipe.command("HDEL", WATERMARKS, int(SLOT))
    assert await turn(pipe) == 0
    assert await pipe.command("HEXISTS", WATERMARKS, int(OTHER)) == 1


async def test_a_wrong_type_is_refused_before_the_first_write(opened: Opened) -> None:
    pipe, _ = opened
    await stand(pipe, watermark=9, days_ago=2)
    await pipe.command("SET", DAYS, "not a hash")
    before = await contents(pipe)
    with pytest.raises(StoreBroken):
        await turn(pipe)
    assert await contents(pipe) == before


async def test_a_full_server_still_turns_the_day(opened: Opened) -> None:
    pipe, _ = opened
    await stand(pipe, watermark=9, days_ago=2)
    await pipe.command("CONFIG", "SET", "maxmemory", "1")
    try:
        assert await turn(pipe) == today()
    finally:
        await pipe.command("CONFIG", "SET", "maxmemory", "0")

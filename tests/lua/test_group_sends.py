"""Sends to a group on real servers: who may send, and for which members, is decided with the sequence.

Both ways to COMMITTED are asked the same: `reserve_messages`, and `commit_messages` where one server holds
the Outbox too.
"""

from collections.abc import Awaitable, Callable, Sequence

import pytest
from msgspec import structs

from qim.adapters import redis_keys as keys
from qim.adapters.commitlog_redis import RedisCommitLog
from qim.adapters.commits_one_step_redis import RedisOneStepCommits
from qim.adapters.commits_redis import RedisCommitStore
from qim.adapters.redis_pipe import RedisPipe
from qim.errors import StoreBroken
from qim.ids import BucketId, Millis, Seq, SlotId
from qim.limits import CLOCK_SKEW_MS_MAX
from qim.ports import Reservation, Reserved, ReserveResult
from qim.records import OUTBOX_FRAME_BYTES
from tests.lua.commit_calls import (
    BOB,
    CLOCK,
    key_of,
    opened_other,
    picture,
    plant,
    reservation,
)
from tests.lua.group_calls import (
    CAROL,
    JOIN,
    LEAVE,
    SUFFIX,
    change_and_finish,
    change_one,
    opened_groups,
    plan,
    send_of,
)
from tests.services import StoreServer

Send = Callable[[Sequence[Reservation]], Awaitable[list[ReserveResult]]]
Way = Callable[[RedisCommitStore, RedisPipe], Send]
HOME = SlotId(1)
SENT = {Reserved.NEW, Reserved.DURABLE}


def _framed(item: Reservation) -> Reservation:
    frame = b"\x02\x02\x00" + bytes([item.key.bucket])
    return structs.replace(item, outbox_frame=frame.ljust(OUTBOX_FRAME_BYTES, b"f"))


def _two_steps(store: RedisCommitStore, _pipe: RedisPipe) -> Send:
    return store.reserve


def _one_step(store: RedisCommitStore, pipe: RedisPipe) -> Send:
    one_step = RedisOneStepCommits(store, RedisCommitLog(pipe, "outbox"), CLOCK)
    return lambda items: one_step.commit([*map(_framed, items)], HOME)


@pytest.fixture(params=[_two_steps, _one_step], ids=["two_steps", "one_step"])
def way(request: pytest.FixtureRequest) -> Way:
    chosen: Way = request.param
    return chosen


@pytest.mark.shows("G1", "G2", "C7")
async def test_a_send_gets_its_sequence_at_the_version_it_was_planned_with(
    store_server: StoreServer, way: Way
) -> None:
    async with opened_groups(store_server) as (groups, store, pipe):
        send = way(store, pipe)
        first = await send([send_of(1, 1), send_of(2, 1, sender=BOB)])
        assert {result.outcome for result in first} <= SENT
        assert [result.seq for result in first] == [1, 2]
        if way is _one_step:
            await change_and_finish(groups, store, JOIN, [CAROL])
            (result,) = await send([send_of(3, 2, sender=CAROL)])
            assert (result.outcome, result.seq) == (Reserved.DURABLE, 4)


@pytest.mark.shows("G1", "A4", "X16", "F-49")
async def test_a_send_of_another_version_is_refused_and_consumes_no_sequence(
    store_server: StoreServer, way: Way
) -> None:
    async with opened_groups(store_server) as (groups, store, pipe):
        send = way(store, pipe)
        await change_and_finish(groups, store, JOIN, [CAROL])
        before = await picture(pipe)
        for version in (1, 3, 2**40):
            (result,) = await send([send_of(1, version)])
            assert result == ReserveResult(Reserved.MEMBERSHIP_CHANGED, Seq(0), Millis(0), b"")
        assert await picture(pipe) == before
        (result,) = await send([send_of(1, 2)])
        assert result.outcome in SENT
        assert result.seq == 2


@pytest.mark.shows("G12", "X16")
async def test_who_is_not_in_the_group_may_not_send_whatever_version_is_named(
    store_server: StoreServer, way: Way
) -> None:
    async with opened_groups(store_server) as (groups, store, pipe):
        send = way(store, pipe)
        await change_and_finish(groups, store, LEAVE, [BOB])
        before = await picture(pipe)
        results = await send(
            [send_of(1, 2, sender=BOB), send_of(2, 1, sender=BOB), send_of(3, 2, sender=CAROL)]
        )
        assert results == [ReserveResult(Reserved.NOT_MEMBER, Seq(0), Millis(0), b"")] * 3
        nowhere = send_of(4, 1)
        nowhere = structs.replace(nowhere, key=nowhere.key._replace(bucket=BucketId(200)))
        assert await send([nowhere]) == [ReserveResult(Reserved.NOT_MEMBER, Seq(0), Millis(0), b"")]
        assert await picture(pipe) == before


@pytest.mark.shows("C4", "G1")
async def test_a_known_message_is_known_whatever_happened_to_the_members(
    store_server: StoreServer, way: Way
) -> None:
    async with opened_groups(store_server) as (groups, store, pipe):
        send = way(store, pipe)
        (first,) = await send([send_of(1, 1, sender=BOB)])
        await change_one(groups, await plan(groups, LEAVE, [BOB]))
        known, twin, new, other = await send(
            [
                send_of(1, 1, sender=BOB),
                send_of(1, 2, sender=BOB),
                send_of(2, 2, sender=BOB),
                structs.replace(send_of(1, 2, sender=BOB), identity=b"o" * 36),
            ]
        )
        assert {known.outcome, twin.outcome} <= {Reserved.RECORDED, Reserved.COMMITTED}
        assert known.seq == twin.seq == first.seq
        assert new.outcome is Reserved.NOT_MEMBER
        assert other.outcome is Reserved.CONFLICT


@pytest.mark.shows("X16")
async def test_direct_messages_and_groups_share_a_run_and_do_not_meet(
    store_server: StoreServer, way: Way
) -> None:
    async with opened_groups(store_server) as (_, store, pipe):
        send = way(store, pipe)
        direct = [
            reservation(key_of(number, bucket=BucketId(200)), expires_at=9_999_999_999_990 + number)
            for number in range(2)
        ]
        group = send_of(3, 1, expires_at=9_999_999_999_999)
        refused = send_of(4, 7, expires_at=9_999_999_999_999)
        results = await send([direct[0], group, refused, direct[1]])
        assert [result.seq for result in results] == [1, 1, 0, 2]
        assert results[2].outcome is Reserved.MEMBERSHIP_CHANGED
        here, there = b"msghistorygc:{b041}", b"msghistorygc:{b200}"
        assert (await picture(pipe))[here] == ([SUFFIX[7:] + b"1", b"9999999999999"], -1)
        assert await pipe.command("ZCARD", there) == 2


@pytest.mark.shows("X16", "F-05")
async def test_a_stale_owner_and_a_wrong_clock_are_told_to_groups_too(
    store_server: StoreServer, way: Way
) -> None:
    async with opened_groups(store_server) as (_, store, pipe):
        send = way(store, pipe)
        (result,) = await send([send_of(1, 1, reserved_at=CLOCK.now_ms() + CLOCK_SKEW_MS_MAX + 2_000)])
        assert result.outcome is Reserved.CLOCK
        async with opened_other(store_server):
            pass
        before = await picture(pipe)
        (result,) = await send([send_of(1, 1)])
        assert result.outcome is Reserved.STALE_OWNER
        assert await picture(pipe) == before


@pytest.mark.shows("C3", "X16")
@pytest.mark.parametrize("key", [b"grp:" + SUFFIX, b"grpmember:" + SUFFIX])
async def test_a_wrong_type_under_a_key_of_the_group_is_refused_before_any_write(
    store_server: StoreServer, way: Way, key: bytes
) -> None:
    async with opened_groups(store_server) as (_, store, pipe):
        send = way(store, pipe)
        await plant(pipe, key)
        before = await picture(pipe)
        with pytest.raises(StoreBroken):
            await send([reservation(key_of(2, bucket=BucketId(200))), send_of(1, 1)])
        assert await picture(pipe) == before


@pytest.mark.shows("G3")
async def test_a_send_behind_an_unfinished_event_takes_two_steps_and_the_next_sequence(
    store_server: StoreServer,
) -> None:
    async with opened_groups(store_server) as (groups, store, pipe):
        await change_one(groups, await plan(groups, JOIN, [CAROL]))
        (result,) = await _one_step(store, pipe)([send_of(1, 2)])
        assert result.outcome is Reserved.TWO_STEPS
        (result,) = await store.reserve([send_of(1, 2)])
        assert (result.outcome, result.seq) == (Reserved.NEW, Seq(2))


async def test_a_run_of_direct_messages_asks_for_nothing_of_groups(store_server: StoreServer) -> None:
    async with opened_groups(store_server) as (_, store, _pipe):
        direct = [reservation(key_of(1))]
        script_keys, arguments = store._reserve_call(direct)
        assert len(script_keys) == 5
        assert len(arguments) == 5 + 2 + 2
        grouped, _ = store._reserve_call([structs.replace(direct[0], membership_version=1)])
        assert grouped == [*script_keys, keys.group_key(SUFFIX), keys.member_key(SUFFIX)]

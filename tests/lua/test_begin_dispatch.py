"""begin_dispatch on real servers: digest and day are fixed once; no entry, no move of W."""

import asyncio

import pytest

from qim.adapters.mailbox_keys import WATERMARKS, day_hash_key, pack_day, pack_state, progress_key
from qim.errors import StoreBroken
from qim.ids import DispatchId, MailboxSeq
from qim.limits import DISPATCH_PROGRESS_LIFE_MS
from qim.ports import Begun, Materialised, ShardState
from tests.lua.general_path_case import Opened, empty, fill, opened
from tests.lua.mailbox_case import IDENTITY, SLOT, claim_of, contents, today, write_of

__all__ = ["opened"]

W0 = MailboxSeq(0)
OPEN = Begun(Materialised.OPEN, today())
HOSTILE = b"{s05}:\0\r\n"


@pytest.mark.shows("M3")
async def test_a_begin_fixes_digest_and_day_and_is_safe_to_repeat(opened: Opened) -> None:
    pipe, store = opened
    write = write_of(1, name=HOSTILE)
    assert await store.begin_dispatch(write, W0) == OPEN
    before = await contents(pipe)
    key = progress_key(write.reserved_at)
    assert before[key] == {write.dispatch_id: write.digest + b"o" + pack_day(today())}
    assert 0 < await pipe.command("PTTL", key) <= DISPATCH_PROGRESS_LIFE_MS
    assert await store.begin_dispatch(write, W0) == OPEN
    assert await contents(pipe) == before


@pytest.mark.shows("M9")
async def test_a_begin_turns_the_day_first_and_a_replay_keeps_the_day_of_the_begin(opened: Opened) -> None:
    pipe, store = opened
    yesterday = ShardState(MailboxSeq(1), MailboxSeq(1), today() - 1, IDENTITY, DispatchId(b"d" * 16))
    await pipe.command("HSET", WATERMARKS, int(SLOT), pack_state(yesterday))
    calls = [store.begin_dispatch(write_of(2, name=name), MailboxSeq(1)) for name in (b"one", b"two")]
    assert await asyncio.gather(*calls) == [OPEN, OPEN]
    assert await pipe.command("HGETALL", day_hash_key(SLOT)) == [b"%d" % (today() - 1), b"1"]
    old = write_of(2, name=b"old")
    value = old.digest + b"o" + pack_day(today() - 1)
    await pipe.command("HSET", progress_key(old.reserved_at), old.dispatch_id, value)
    assert await store.begin_dispatch(old, MailboxSeq(1)) == Begun(Materialised.OPEN, today() - 1)


@pytest.mark.shows("M6")
async def test_another_digest_stale_owner_and_gap_write_nothing(opened: Opened) -> None:
    pipe, store = opened
    await store.begin_dispatch(write_of(1), W0)
    before = await contents(pipe)
    other = await store.begin_dispatch(write_of(1, digest=b"another8"), W0)
    assert other.outcome is Materialised.MISMATCH
    assert (await store.begin_dispatch(write_of(2), W0)).outcome is Materialised.GAP
    assert await contents(pipe) == before
    await store.claim(claim_of(b"newer"))
    store.epochs[SLOT] = b"\0" * 7 + b"\1"
    assert (await store.begin_dispatch(write_of(1), W0)).outcome is Materialised.STALE_OWNER


@pytest.mark.parametrize("victim", [b"owner", WATERMARKS, b"progress"])
async def test_a_wrong_type_is_refused_before_the_first_write(opened: Opened, victim: bytes) -> None:
    pipe, store = opened
    write = write_of(1)
    await pipe.command("SET", progress_key(write.reserved_at) if victim == b"progress" else victim, "text")
    before = await contents(pipe)
    with pytest.raises(StoreBroken):
        await store.begin_dispatch(write, W0)
    assert (await contents(pipe)).keys() == before.keys()


async def test_a_full_server_still_begins(opened: Opened) -> None:
    pipe, store = opened
    await fill(pipe)
    try:
        assert await store.begin_dispatch(write_of(1), W0) == OPEN
    finally:
        await empty(pipe)

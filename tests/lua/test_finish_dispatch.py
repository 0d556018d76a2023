"""finish_dispatch on real servers: completion and W in one step, or neither."""

import pytest

from qim.adapters.mailbox_keys import WATERMARKS, pack_day, progress_key, unpack_state
from qim.adapters.mailbox_redis import RedisMailboxStore
from qim.adapters.redis_pipe import RedisPipe
from qim.errors import StoreBroken
from qim.ids import MailboxSeq
from qim.ports import MailboxWrite, Materialised
from tests.lua.general_path_case import Opened, empty, fill, opened
from tests.lua.mailbox_case import SLOT, claim_of, contents, today, write_of

__all__ = ["opened"]

W0 = MailboxSeq(0)
DONE = Materialised.DONE


async def watermark(pipe: RedisPipe) -> int:
    return unpack_state(await pipe.command("HGET", WATERMARKS, int(SLOT))).watermark


async def progress(pipe: RedisPipe, write: MailboxWrite) -> bytes | None:
    value: bytes | None = await pipe.command("HGET", progress_key(write.reserved_at), write.dispatch_id)
    return value


async def begin(store: RedisMailboxStore, write: MailboxWrite) -> None:
    assert (await store.begin_dispatch(write, W0)).outcome is Materialised.OPEN


@pytest.mark.shows("M3", "M4")
async def test_a_finish_is_completion_and_w_together_and_is_safe_to_repeat(opened: Opened) -> None:
    pipe, store = opened
    write = write_of(1, name=b"{s05}:\0\r\n")
    await begin(store, write)
    assert await store.finish_dispatch(write, W0) is DONE
    before = await contents(pipe)
    assert await progress(pipe, write) == write.digest + b"f" + pack_day(today())
    assert unpack_state(before[WATERMARKS][b"%d" % SLOT]).dispatch_id == write.dispatch_id
    assert await store.finish_dispatch(write, W0) is DONE
    assert await contents(pipe) == before


@pytest.mark.shows("M4", "M6", "F-05")
async def test_not_begun_another_digest_gap_and_stale_owner_move_nothing(opened: Opened) -> None:
    pipe, store = opened
    assert await store.finish_dispatch(write_of(1), W0) is Materialised.GAP
    await begin(store, write_of(1))
    before = await contents(pipe)
    assert await store.finish_dispatch(write_of(1, digest=b"another8"), W0) is Materialised.MISMATCH
    assert await store.finish_dispatch(write_of(1), MailboxSeq(1)) is Materialised.GAP
    assert await store.finish_dispatch(write_of(2), W0) is Materialised.GAP
    assert await contents(pipe) == before
    await store.claim(claim_of(b"newer"))
    store.epochs[SLOT] = b"\0" * 7 + b"\1"
    assert await store.finish_dispatch(write_of(1), W0) is Materialised.STALE_OWNER
    assert await watermark(pipe) == 0


@pytest.mark.shows("X9")
async def test_a_skip_passes_a_record_and_keeps_what_is_known_of_it(opened: Opened) -> None:
    pipe, store = opened
    await begin(store, write_of(1))
    assert await store.finish_dispatch(write_of(1), W0, skipped=True) is DONE
    assert await progress(pipe, write_of(1)) == b"digest 8s" + pack_day(today())
    foreign = write_of(2, name=b"5-1", digest=b"another8")
    assert await store.finish_dispatch(foreign, MailboxSeq(1), skipped=True) is DONE
    assert await progress(pipe, foreign) == b"digest 8s" + pack_day(today())
    assert await store.finish_dispatch(write_of(3), MailboxSeq(2), skipped=True) is DONE
    assert await progress(pipe, write_of(3)) == b"digest 8s" + pack_day(today())
    assert await watermark(pipe) == 3


@pytest.mark.parametrize("victim", ["owner", "mboxw", "progress"])
async def test_a_wrong_type_is_refused_before_the_first_write(opened: Opened, victim: str) -> None:
    pipe, store = opened
    write = write_of(1)
    await begin(store, write)
    key = {"owner": b"owner", "mboxw": WATERMARKS, "progress": progress_key(write.reserved_at)}[victim]
    await pipe.command("SET", key, "text")
    before = await contents(pipe)
    with pytest.raises(StoreBroken):
        await store.finish_dispatch(write, W0)
    assert await contents(pipe) == before


async def test_a_full_server_still_finishes(opened: Opened) -> None:
    pipe, store = opened
    await begin(store, write_of(1))
    await fill(pipe)
    try:
        assert await store.finish_dispatch(write_of(1), W0) is DONE
    finally:
        await empty(pipe)

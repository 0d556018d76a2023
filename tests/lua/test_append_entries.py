"""append_entries on real servers: the entries of a begun dispatch, each once, all or none of a call."""

import pytest

from qim.adapters.mailbox_keys import mailbox_key, progress_key
from qim.adapters.redis_pipe import RedisPipe
from qim.errors import StoreBroken
from qim.ids import MailboxSeq, UserId
from qim.limits import APPEND_ENTRIES_MAX, DAY_MS, MAILBOX_KEY_LIFE_MS
from qim.ports import Materialised
from tests.lua.general_path_case import Opened, empty, fill, opened
from tests.lua.mailbox_case import (
    ANN,
    BEN,
    HOSTILE_USER,
    SLOT,
    TENANT,
    claim_of,
    contents,
    today,
    write_of,
)

__all__ = ["opened"]

W0 = MailboxSeq(0)
DONE = Materialised.DONE


def box(user: UserId) -> bytes:
    return mailbox_key(SLOT, TENANT, user, day=today(), ephemeral=False)


async def score(pipe: RedisPipe, user: UserId, entry: bytes) -> bytes | None:
    found: bytes | None = await pipe.command("ZSCORE", box(user), entry)
    return found


@pytest.mark.shows("M7")
async def test_a_call_of_the_largest_size_is_written_once_and_repeats_in_any_order(opened: Opened) -> None:
    pipe, store = opened
    users = [UserId(bytes([n]) * 16) for n in range(APPEND_ENTRIES_MAX - 1)] + [HOSTILE_USER]
    write = write_of(1, entry=b"\0{s05}:\r\n")
    begun = await store.begin_dispatch(write, W0)
    assert await store.append_entries(write, begun.day, users) is DONE
    before = await contents(pipe)
    assert await store.append_entries(write, begun.day, users[::-1]) is DONE
    assert await contents(pipe) == before
    assert await score(pipe, HOSTILE_USER, write.entry) == b"1"
    assert await pipe.command("PEXPIRETIME", box(users[3])) == (today() + 1) * DAY_MS + MAILBOX_KEY_LIFE_MS


@pytest.mark.shows("M6")
async def test_what_was_not_begun_or_differs_or_is_stale_writes_nothing(opened: Opened) -> None:
    pipe, store = opened
    write = write_of(1)
    assert await store.append_entries(write, today(), [ANN]) is Materialised.GAP
    begun = await store.begin_dispatch(write, W0)
    other = write_of(1, digest=b"another8")
    assert await store.append_entries(other, begun.day, [ANN]) is Materialised.MISMATCH
    assert await store.append_entries(write, begun.day + 1, [ANN]) is Materialised.GAP
    await store.claim(claim_of(b"newer"))
    store.epochs[SLOT] = b"\0" * 7 + b"\1"
    assert await store.append_entries(write, begun.day, [ANN]) is Materialised.STALE_OWNER
    assert await pipe.command("EXISTS", box(ANN)) == 0


async def test_a_finished_dispatch_takes_no_more_entries(opened: Opened) -> None:
    pipe, store = opened
    write = write_of(1)
    begun = await store.begin_dispatch(write, W0)
    await store.append_entries(write, begun.day, [ANN])
    await store.finish_dispatch(write, W0)
    assert await store.append_entries(write, begun.day, [BEN]) is DONE
    assert await pipe.command("EXISTS", box(BEN)) == 0
    await store.materialise({SLOT: MailboxSeq(1)}, [write_of(2, users=(BEN,))])
    assert await pipe.command("PTTL", box(BEN)) > 0, "a key that was not written is not remembered"


@pytest.mark.parametrize("victim", ["owner", "progress", "last mailbox"])
async def test_a_wrong_type_is_refused_before_the_first_write(opened: Opened, victim: str) -> None:
    pipe, store = opened
    write = write_of(1)
    begun = await store.begin_dispatch(write, W0)
    key = {"owner": b"owner", "progress": progress_key(write.reserved_at), "last mailbox": box(BEN)}[victim]
    await pipe.command("SET", key, "text")
    with pytest.raises(StoreBroken):
        await store.append_entries(write, begun.day, [ANN, BEN])
    assert await pipe.command("EXISTS", box(ANN)) == 0


async def test_a_full_server_still_takes_entries(opened: Opened) -> None:
    pipe, store = opened
    write = write_of(1)
    begun = await store.begin_dispatch(write, W0)
    await fill(pipe)
    try:
        assert await store.append_entries(write, begun.day, [ANN]) is DONE
    finally:
        await empty(pipe)
    assert await score(pipe, ANN, write.entry) == b"1"

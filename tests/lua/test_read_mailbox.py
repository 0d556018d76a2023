"""read_mailbox on real servers: days in order, kinds merged, bounds kept, nothing written.

What a page must hold is in the contract of the port; here is what only a server can show.
"""

import pytest

from qim.adapters.mailbox_keys import WATERMARKS, day_hash_key, mailbox_key, pack_state
from qim.adapters.redis_pipe import RedisPipe
from qim.errors import StoreBroken
from qim.ids import DispatchId, MailboxSeq
from qim.limits import BATCH_BYTES_MAX, MAILBOX_DAYS
from qim.ports import ShardState
from tests.lua.general_path_case import Opened, empty, fill, opened
from tests.lua.mailbox_case import (
    ANN,
    HOSTILE_USER,
    IDENTITY,
    SLOT,
    TENANT,
    contents,
    query_of,
    seqs_of,
    today,
    write_of,
)

__all__ = ["opened"]


async def lay_out(pipe: RedisPipe, days: dict[int, list[int]], *, entry_bytes: int = 20) -> None:
    """Entries of ANN by days ago → mailbox_seqs; W is the last one, each day's end is noted."""
    last = 0
    for ago, seqs in sorted(days.items(), reverse=True):
        key = mailbox_key(SLOT, TENANT, ANN, day=today() - ago, ephemeral=False)
        for seq in seqs:
            await pipe.command("ZADD", key, seq, (b"%d " % seq).ljust(entry_bytes, b"x"))
        last = max(seqs)
        if ago:
            await pipe.command("HSET", day_hash_key(SLOT), today() - ago, last)
    state = ShardState(MailboxSeq(last), MailboxSeq(1), today() - min(days), IDENTITY, DispatchId(b"d" * 16))
    await pipe.command("HSET", WATERMARKS, int(SLOT), pack_state(state))


@pytest.mark.shows("M9")
async def test_a_page_runs_over_all_kept_days_in_order_and_over_no_older_one(opened: Opened) -> None:
    pipe, store = opened
    await lay_out(pipe, {MAILBOX_DAYS + 1: [3, 4], MAILBOX_DAYS: [5, 6], 2: [9], 1: [12, 13], 0: [15]})
    (page,) = await store.read_mailbox([query_of(after=4)])
    assert [seq for seq, _ in page.entries] == [5, 6, 9, 12, 13, 15]
    assert (page.rebuild, page.newest, page.covered_through) == (False, 15, 15)
    assert (await store.read_mailbox([query_of(after=3)]))[0].rebuild
    (held,) = await store.read_mailbox([query_of(after=4, held_through=12, held_count=4)])
    assert (held.entries, held.covered_through, held.more) == ((), 12, True)
    assert await seqs_of(store, after=9, entries_max=2) == [12, 13]


async def test_the_newest_entry_is_found_however_old_it_is(opened: Opened) -> None:
    pipe, store = opened
    await lay_out(pipe, {6: [5], 0: [40]})
    other = mailbox_key(SLOT, TENANT, ANN, day=today(), ephemeral=False)
    await pipe.command("DEL", other)
    (page,) = await store.read_mailbox([query_of(after=39)])
    assert (page.newest, page.covered_through, page.more) == (5, 40, False)


async def test_large_entries_fill_a_page_to_its_bytes_and_no_further(opened: Opened) -> None:
    pipe, store = opened
    await lay_out(pipe, {1: list(range(1, 40)), 0: list(range(40, 80))}, entry_bytes=60_000)
    seen: list[int] = []
    after = 0
    more = True
    while more:
        (page,) = await store.read_mailbox([query_of(after=after, bytes_max=BATCH_BYTES_MAX)])
        assert sum(len(entry) for _, entry in page.entries) <= BATCH_BYTES_MAX
        seen += [seq for seq, _ in page.entries]
        after, more = page.covered_through, page.more
    assert seen == list(range(1, 80))


async def test_a_page_is_read_from_a_new_day_without_anybody_having_turned_it(opened: Opened) -> None:
    pipe, store = opened
    await lay_out(pipe, {1: [3]})
    assert await seqs_of(store) == [3]
    store._days[SLOT] = today() - 400
    assert await seqs_of(store) == [3]


async def test_reading_writes_nothing_even_for_names_with_separators(opened: Opened) -> None:
    pipe, store = opened
    await store.materialise({SLOT: MailboxSeq(0)}, [write_of(1, users=(HOSTILE_USER,))])
    before = await contents(pipe)
    assert await seqs_of(store, HOSTILE_USER) == [1]
    assert await seqs_of(store) == []
    assert await contents(pipe) == before


@pytest.mark.parametrize("victim", ["mboxw", "days", "mailbox"])
async def test_a_wrong_type_is_an_error_and_not_an_empty_page(opened: Opened, victim: str) -> None:
    pipe, store = opened
    key = {
        "mboxw": WATERMARKS,
        "days": day_hash_key(SLOT),
        "mailbox": mailbox_key(SLOT, TENANT, ANN, day=today(), ephemeral=True),
    }[victim]
    await pipe.command("SET", key, "text")
    with pytest.raises(StoreBroken):
        await seqs_of(store)


async def test_a_full_server_can_be_read(opened: Opened) -> None:
    pipe, store = opened
    await store.materialise({SLOT: MailboxSeq(0)}, [write_of(1)])
    await fill(pipe)
    try:
        assert await seqs_of(store) == [1]
    finally:
        await empty(pipe)

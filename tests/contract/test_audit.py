"""The orphan audit on a real server: what it finds, and that large entries are asked for in portions."""

import asyncio
import gc
from typing import Final

import pytest
from msgspec import structs

from qim.adapters import redis_pipe
from qim.adapters.audit_redis import ASKED_BYTES_MAX, RedisMailboxAudit
from qim.adapters.mailbox_keys import mailbox_key
from qim.adapters.mailbox_redis import RedisMailboxStore
from qim.adapters.redis_pipe import RedisPipe
from qim.clock import SystemClock
from qim.errors import StoreRefused
from qim.ids import MailboxSeq, Millis, UserId
from qim.ports import MailboxWrite
from qim.records import Dispatch, parse_dispatch_record
from tests.lua.mailbox_case import ANN, BEN, IDENTITY, SLOT, claim_of, open_pipe, today
from tests.services import StoreServer
from tests.unit.workers.rig import build_dispatches

ENTRY_BYTES: Final = 65_536
DISPATCHES: Final = 24


def dispatch_of(number: int) -> Dispatch:
    dispatch = parse_dispatch_record(build_dispatches(seq=number)[0][1])
    header = dispatch.header._replace(reserved_at=Millis(SystemClock().now_ms()))
    entry = number.to_bytes(4, "big") * (ENTRY_BYTES // 4)
    return structs.replace(dispatch, header=header, shard=SLOT, recipients=(ANN, BEN), entry=entry)


async def materialised(pipe: RedisPipe) -> list[Dispatch]:
    """Dispatches with their entries in the mailboxes of both recipients."""
    await pipe.command("FLUSHALL")
    store = RedisMailboxStore(pipe, SystemClock())
    await store.claim(claim_of())
    await store.initialise_shards({SLOT: MailboxSeq(1)}, IDENTITY)
    dispatches = [dispatch_of(number) for number in range(1, DISPATCHES + 1)]
    for seq, one in enumerate(dispatches, 1):
        header = one.header
        write = MailboxWrite(
            SLOT, MailboxSeq(seq), one.dispatch_id, b"digest 8", header.reserved_at, header.tenant,
            one.recipients, one.entry, header.ephemeral,
        )  # fmt: skip
        (answer,) = await store.materialise({SLOT: MailboxSeq(seq - 1)}, [write])
        assert answer.is_passed
    return dispatches


def key_of(dispatch: Dispatch, user: UserId, day: int) -> bytes:
    return mailbox_key(SLOT, dispatch.header.tenant, user, day=day, ephemeral=dispatch.header.ephemeral)


@pytest.mark.shows("C11")
async def test_many_large_entries_are_asked_for_in_portions_that_fit(
    valkey_server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = await open_pipe(valkey_server)
    dispatches = await materialised(pipe)
    lost, doubled = dispatches[3], dispatches[20]
    await pipe.command("ZREM", key_of(lost, BEN, today()), lost.entry)
    await pipe.command("ZADD", key_of(doubled, ANN, today() + 1), 21, doubled.entry)
    # All questions together are three times as large.
    monkeypatch.setattr(redis_pipe, "STORE_UNSENT_BYTES_MAX", ASKED_BYTES_MAX + ENTRY_BYTES)
    assert 3 * ASKED_BYTES_MAX < DISPATCHES * 2 * 3 * ENTRY_BYTES
    findings = await RedisMailboxAudit(pipe).entries(dispatches)
    assert [(finding.kind, finding.where.split()[-1]) for finding in findings] == [
        ("entry_missing", BEN.hex()), ("entry_doubled", ANN.hex()),
    ]  # fmt: skip
    await pipe.close()


async def test_a_store_that_goes_away_ends_the_audit_and_no_answer_is_left_unread(
    valkey_server: StoreServer,
) -> None:
    unread: list[str] = []
    pipe = await open_pipe(valkey_server)
    dispatches = await materialised(pipe)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: unread.append(context["message"]))
    await pipe.close()
    with pytest.raises(StoreRefused):
        await RedisMailboxAudit(pipe).entries(dispatches)
    gc.collect()
    assert unread == []

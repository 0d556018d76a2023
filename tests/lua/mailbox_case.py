"""What the tests of the mailbox scripts share: a claimed store on a flushed server, and records to write."""

import asyncio
from typing import Any, Final

from qim.adapters.lua_scripts import LuaScripts
from qim.adapters.mailbox_redis import RedisMailboxStore
from qim.adapters.redis_pipe import RedisPipe
from qim.clock import SystemClock
from qim.ids import (
    BootId,
    ClientMessageId,
    ConversationId,
    DeviceId,
    DispatchId,
    MailboxSeq,
    MessageId,
    Millis,
    Seq,
    SlotId,
    TenantId,
    UserId,
)
from qim.limits import DAY_MS
from qim.ports import MailboxPageQuery, MailboxStore, MailboxWrite, SlotClaim
from qim.records import MessageRecord, build_entry, encode_record
from tests.services import StoreServer

TENANT: Final = TenantId(7)
IDENTITY: Final = b"log identity 16b"
SLOT: Final = SlotId(5)
OTHER: Final = SlotId(41)
HOSTILE_USER: Final = UserId(b"{s05}:\0\r\n}{:*?" + b"\xff\xfe")
ANN: Final = UserId(b"a" * 16)
BEN: Final = UserId(b"b" * 16)
assert len(HOSTILE_USER) == 16


def claim_of(boot: bytes = b"boot", slots: tuple[SlotId, ...] = (SLOT, OTHER)) -> SlotClaim:
    return SlotClaim(
        slots, BootId(boot.ljust(16, b".")), b"supervisor".ljust(16, b"."), "host", b"p" * 16, True
    )


def write_of(
    seq: int,
    *,
    slot: SlotId = SLOT,
    name: bytes = b"",
    digest: bytes = b"digest 8",
    users: tuple[UserId, ...] = (ANN,),
    entry: bytes = b"",
    reserved_at: int | None = None,
    ephemeral: bool = False,
) -> MailboxWrite:
    """A record whose dispatch id and entry follow from its number, unless they are given."""
    now = SystemClock().now_ms()
    dispatch = DispatchId((name or b"%d-%d" % (slot, seq)).ljust(16, b"."))
    at = Millis(now if reserved_at is None else reserved_at)
    body = entry or b"entry %d of %d" % (seq, slot)
    return MailboxWrite(slot, MailboxSeq(seq), dispatch, digest, at, TENANT, users, body, ephemeral)


def query_of(user: UserId = ANN, *, after: int = 0, slot: SlotId = SLOT, **limits: int) -> MailboxPageQuery:
    values: dict[str, Any] = {
        "entries_max": 300,
        "bytes_max": 196_608,
        "held_through": 0,
        "held_count": 0,
        **limits,
    }
    return MailboxPageQuery(TENANT, user, slot, MailboxSeq(after), **values)


def ephemeral_entry(*, reserved_at: int, seq: int = 1) -> bytes:
    """A real Entry: a reader looks into ephemeral ones."""
    none = b"\0" * 16
    record = MessageRecord(
        1, TENANT, ConversationId(none), 1, none * 2, MessageId(none), ANN, DeviceId(none),
        ClientMessageId(none), 1, "", b"gone tomorrow", 1, Millis(reserved_at), 0,
    )  # fmt: skip
    return build_entry(Seq(seq), encode_record(record))


async def seqs_of(store: MailboxStore, user: UserId = ANN, **query: int) -> list[int]:
    (page,) = await store.read_mailbox([query_of(user, **query)])  # type: ignore[arg-type]  # plain values stand for ids
    return [seq for seq, _ in page.entries]


def today() -> int:
    return SystemClock().now_ms() // DAY_MS


async def open_pipe(server: StoreServer) -> RedisPipe:
    pipe = RedisPipe(server.url, clock=SystemClock(), scripts=LuaScripts.load())
    await pipe.connect()
    return pipe


async def open_store(
    server: StoreServer, *, slots: tuple[SlotId, ...] = (SLOT, OTHER), base: int = 1
) -> tuple[RedisPipe, RedisMailboxStore]:
    """A flushed server, initialised shards, claimed."""
    pipe = await open_pipe(server)
    await pipe.command("FLUSHALL")
    store = RedisMailboxStore(pipe, SystemClock())
    await store.claim(claim_of(slots=slots))
    await store.initialise_shards({slot: MailboxSeq(base) for slot in slots}, IDENTITY)
    return pipe, store


async def contents(pipe: RedisPipe) -> dict[bytes, Any]:
    """Every key with its content; the two states of a store are equal when these are."""
    keys = await pipe.command("KEYS", "*")
    types = await asyncio.gather(*(pipe.command("TYPE", key) for key in keys))
    found: dict[bytes, Any] = {}
    for key, kind in zip(keys, types, strict=True):
        match kind:
            case b"hash":
                flat = await pipe.command("HGETALL", key)
                found[key] = dict(zip(flat[::2], flat[1::2], strict=True))
            case b"zset":
                found[key] = tuple(await pipe.command("ZRANGE", key, 0, -1, "WITHSCORES"))
            case b"stream":
                found[key] = repr(await pipe.command("XRANGE", key, "-", "+"))
            case _:
                found[key] = await pipe.command("DUMP", key)
    return found

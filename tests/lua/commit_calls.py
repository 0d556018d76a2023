"""What the tests of the commit scripts share: a store on a flushed server, items, and a picture of all keys.

`picture` reads every key with its expiry, so that "nothing was written" is one comparison. `plant` puts a
value of the wrong type under a key. The ids contain bytes that a careless key or protocol would trip over.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from qim.adapters.commits_redis import RedisCommitStore
from qim.adapters.lua_scripts import LuaScripts
from qim.adapters.redis_pipe import RedisPipe
from qim.clock import SystemClock
from qim.ids import (
    BootId,
    BucketId,
    ClientMessageId,
    ConversationId,
    Millis,
    Offset,
    Seq,
    SlotId,
    TenantId,
    UserId,
)
from qim.ports import Commit, HistoryQuery, MessageKey, Reservation, ReserveResult, SlotClaim
from tests.services import StoreServer

SCRIPTS = LuaScripts.load()
CLOCK = SystemClock()
AWKWARD = b"{}:\x00\r\n\xff{b001}"
TENANT = TenantId(7)
BUCKET = BucketId(41)
SLOT = SlotId(10)
ALICE = UserId(b"alice" + AWKWARD[:11])
BOB = UserId(b"bob" + AWKWARD)
CONVERSATION = ConversationId(b"cnv" + AWKWARD)
ALL_SLOTS = tuple(SlotId(slot) for slot in range(64))


def claim_of(
    boot: bytes = b"b" * 16,
    *,
    slots: Sequence[SlotId] = ALL_SLOTS,
    supervisor: bytes = b"s" * 16,
    placement: bytes = b"p" * 16,
    take_over: bool = False,
    is_refresh: bool = False,
) -> SlotClaim:
    return SlotClaim(tuple(slots), BootId(boot), supervisor, "host-1", placement, take_over, is_refresh)


def key_of(
    number: int = 1,
    *,
    conversation: ConversationId = CONVERSATION,
    sender: UserId = ALICE,
    bucket: BucketId = BUCKET,
) -> MessageKey:
    cmid = ClientMessageId(b"\r\n:{\x00}" + number.to_bytes(10, "big"))
    return MessageKey(bucket, TENANT, conversation, sender, cmid)


def reservation(
    key: MessageKey | None = None,
    *,
    text: bytes = b"hello",
    reserved_at: int | None = None,
    expires_at: int = 0,
) -> Reservation:
    """The identity follows the text, as the digest of a real message follows its body."""
    key = key or key_of()
    now = CLOCK.now_ms() if reserved_at is None else reserved_at
    record = b"record\r\n\x00" + text
    return Reservation(key, text.ljust(36, b"."), record, Millis(now), Millis(expires_at))


def commit_of(
    item: Reservation, result: ReserveResult, *, offset: int = 5, partition: int = 3, control: bool = False
) -> Commit:
    return Commit(
        item.key, item.identity, result.seq, result.reserved_at, control, SlotId(partition), Offset(offset)
    )


def history_of(
    *,
    before: int = 0,
    after: int = 0,
    entries_max: int = 50,
    bytes_max: int = 100_000,
    conversation: ConversationId = CONVERSATION,
) -> HistoryQuery:
    return HistoryQuery(TENANT, conversation, BUCKET, Seq(before), Seq(after), entries_max, bytes_max)


@asynccontextmanager
async def opened_pipe(server: StoreServer, *, is_flushed: bool = True) -> AsyncIterator[RedisPipe]:
    pipe = RedisPipe(server.url, clock=CLOCK, scripts=SCRIPTS)
    await pipe.connect()
    if is_flushed:
        await pipe.command("CONFIG", "SET", "maxmemory", "0")
        await pipe.command("FLUSHALL")
    try:
        yield pipe
    finally:
        await pipe.close()


@asynccontextmanager
async def opened_store(server: StoreServer) -> AsyncIterator[tuple[RedisCommitStore, RedisPipe]]:
    """A store that owns every slot of an empty instance."""
    async with opened_pipe(server) as pipe:
        store = RedisCommitStore(pipe, CLOCK)
        await store.claim(claim_of())
        yield store, pipe


READERS: dict[bytes, tuple[str | int, ...]] = {
    b"hash": ("HGETALL",),
    b"string": ("GET",),
    b"list": ("LRANGE", 0, -1),
    b"zset": ("ZRANGE", 0, -1, "WITHSCORES"),
    b"stream": ("XRANGE", "-", "+"),
}


async def picture(pipe: RedisPipe) -> dict[bytes, tuple[Any, int]]:
    """Every key: its value and its expiry. Not DUMP, whose bytes change when a table is reorganised."""
    found = {}
    for name in await pipe.command("KEYS", "*"):
        kind = await pipe.command("TYPE", name)
        reader, *limits = READERS[kind]
        value = await pipe.command(reader, name, *limits)
        if kind == b"hash":
            value = dict(zip(value[::2], value[1::2], strict=True))
        found[name] = (value, await pipe.command("PEXPIRETIME", name))
    return found


async def plant(pipe: RedisPipe, key: bytes) -> None:
    """A value of a type that no script expects under any of its keys."""
    await pipe.command("DEL", key)
    await pipe.command("XADD", key, "1-1", "wrong", "type")


async def reserve_one(store: RedisCommitStore, item: Reservation) -> ReserveResult:
    (result,) = await store.reserve([item])
    return result


async def send_all(store: RedisCommitStore, items: Sequence[Reservation]) -> list[Seq]:
    """Reserves and commits, for tests that only need messages to be there."""
    results = await store.reserve(items)
    await store.mark_committed([commit_of(item, result) for item, result in zip(items, results, strict=True)])
    return [result.seq for result in results]


@asynccontextmanager
async def opened_other(
    server: StoreServer, *, slots: Sequence[SlotId] = ALL_SLOTS
) -> AsyncIterator[RedisCommitStore]:
    """Another worker of the same supervisor, which takes the slots over."""
    async with opened_pipe(server, is_flushed=False) as pipe:
        other = RedisCommitStore(pipe, CLOCK)
        await other.claim(claim_of(b"c" * 16, slots=slots))
        yield other

"""The mailbox scripts against the memory store: any calls, takeovers and kills give the same answers.

Each rule does the same to a real server and to the model and compares the answers; the end compares all keys.
A kill ends the server without warning and starts it on its file again: what was answered must be there, and
the adapter starts with empty caches. The second property holds the fused path to the general one, byte for
byte.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from qim.adapters.mailbox_keys import (
    WATERMARKS,
    day_hash_key,
    mailbox_key,
    pack_day,
    pack_state,
    progress_key,
)
from qim.adapters.mailbox_memory import MailboxState, MemoryMailboxStore
from qim.adapters.mailbox_redis import RedisMailboxStore
from qim.adapters.redis_pipe import RedisPipe
from qim.clock import SystemClock
from qim.ids import MailboxSeq, Millis, SlotId, UserId
from qim.ports import ClaimResult, MailboxStore, MailboxWrite, Materialised
from tests.lua.mailbox_case import (
    ANN,
    BEN,
    HOSTILE_USER,
    IDENTITY,
    OTHER,
    SLOT,
    claim_of,
    contents,
    ephemeral_entry,
    open_pipe,
    query_of,
    today,
    write_of,
)
from tests.services import StoreServer

USERS = (ANN, BEN, HOSTILE_USER)
NOW = SystemClock().now_ms()
HOUR = 3_600_000

slots = st.sampled_from((SLOT, OTHER))
digests = st.sampled_from((b"digest 1", b"digest 1", b"digest 1", b"digest\0\n"))
names = st.integers(0, 12).map(lambda n: b"{d%d}:\0\n" % n)
audiences = st.sets(st.sampled_from(USERS), min_size=1).map(lambda users: tuple(sorted(users)))
steps = st.sampled_from((0, 0, 0, 0, 1, -1))
"""How far the caller's belief is off; mostly not at all."""


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    """The parts of a record that do not depend on where the shard stands."""
    name = draw(names)
    return {
        "name": name,
        "digest": draw(digests),
        "users": draw(audiences),
        "ephemeral": draw(st.booleans()),
        "entry": ephemeral_entry(reserved_at=NOW, seq=name[2]),
        "reserved_at": NOW - HOUR * draw(st.sampled_from((0, 0, 1))),
    }


class Side:
    """A store and the store of a process that took its slots over, or lost them."""

    def __init__(self, make: Callable[[], MailboxStore]) -> None:
        self.stores = [make(), make()]

    async def claim(self, which: int, boot: int) -> None:
        await self.stores[which].claim(claim_of(b"boot %d" % boot))

    async def refresh(self, which: int, boot: int) -> ClaimResult:
        return await self.stores[which].claim(claim_of(b"boot %d" % boot)._replace(is_refresh=True))


class MailboxMachine(RuleBasedStateMachine):
    def __init__(self, server: StoreServer) -> None:
        super().__init__()
        self.server = server
        self.runner = asyncio.Runner()
        self.boots = [0, 1]
        self.model_state = MailboxState()
        self.model = Side(lambda: MemoryMailboxStore(SystemClock(), self.model_state))
        self.pipe: RedisPipe = self.runner.run(open_pipe(server))
        self.runner.run(self._prepare())

    async def _prepare(self) -> None:
        await self.pipe.command("FLUSHALL")
        self.real = Side(lambda: RedisMailboxStore(self.pipe, SystemClock()))
        for side in (self.real, self.model):
            await side.claim(0, 0)
            bases = {SLOT: MailboxSeq(1), OTHER: MailboxSeq(40)}
            await side.stores[0].initialise_shards(bases, IDENTITY)

    def both(self, which: int, call: Callable[[MailboxStore], Awaitable[Any]]) -> Any:
        """Does the same to both sides and compares the answers."""

        async def one(store: MailboxStore) -> Any:
            return await call(store)

        real = self.runner.run(one(self.real.stores[which]))
        model = self.runner.run(one(self.model.stores[which]))
        assert real == model
        return real

    def next_of(self, slot: SlotId) -> tuple[int, int]:
        shard = self.model_state.shards[slot]
        return shard.watermark, max(shard.watermark + 1, shard.base)

    def placed(self, slot: SlotId, off: int, parts: dict[str, Any]) -> tuple[MailboxSeq, MailboxWrite]:
        watermark, first = self.next_of(slot)
        return MailboxSeq(max(0, watermark + off)), write_of(max(1, first + off), slot=slot, **parts)

    @rule(
        which=st.integers(0, 1),
        off=steps,
        hours_ago=st.sampled_from((0, 0, 1)),
        runs=st.dictionaries(slots, st.lists(records(), max_size=4)),
    )
    def materialise(
        self, which: int, off: int, hours_ago: int, runs: dict[SlotId, list[dict[str, Any]]]
    ) -> None:
        # One hour per call: records of several hours are several calls of the script, as the contract suite
        # shows; each of them is as strict as the one call here.
        for one in (one for items in runs.values() for one in items):
            one["reserved_at"] = NOW - HOUR * hours_ago
        writes = []
        expected = {}
        for slot, items in runs.items():
            watermark, first = self.next_of(slot)
            expected[slot] = MailboxSeq(max(0, watermark + off))
            writes += [write_of(max(1, first + off) + at, slot=slot, **one) for at, one in enumerate(items)]
        self.both(which, lambda store: store.materialise(expected, writes))

    @rule(which=st.integers(0, 1), slot=slots, off=steps, parts=records())
    def begin(self, which: int, slot: SlotId, off: int, parts: dict[str, Any]) -> None:
        expected, write = self.placed(slot, off, parts)
        self.both(which, lambda store: store.begin_dispatch(write, expected))

    @rule(which=st.integers(0, 1), slot=slots, parts=records())
    def append(self, which: int, slot: SlotId, parts: dict[str, Any]) -> None:
        _, write = self.placed(slot, 0, parts)
        self.both(which, lambda store: store.append_entries(write, today(), write.recipients))

    @rule(which=st.integers(0, 1), slot=slots, off=steps, parts=records(), skipped=st.booleans())
    def finish(self, which: int, slot: SlotId, off: int, parts: dict[str, Any], skipped: bool) -> None:
        expected, write = self.placed(slot, off, parts)
        self.both(which, lambda store: store.finish_dispatch(write, expected, skipped=skipped))

    @rule(slot=slots, parts=records())
    def general_path(self, slot: SlotId, parts: dict[str, Any]) -> None:
        expected, write = self.placed(slot, 0, parts)
        begun = self.both(0, lambda store: store.begin_dispatch(write, expected))
        if begun.outcome is Materialised.OPEN:
            self.both(0, lambda store: store.append_entries(write, begun.day, write.recipients))
        self.both(0, lambda store: store.finish_dispatch(write, expected))

    @rule(
        user=st.sampled_from(USERS),
        slot=slots,
        after=st.integers(0, 60),
        held_through=st.integers(0, 60),
        held_count=st.integers(0, 4),
        entries_max=st.integers(1, 20),
        bytes_max=st.sampled_from((1, 400, 10_000)),
    )
    def read(self, user: UserId, **query: Any) -> None:
        self.both(0, lambda store: store.read_mailbox([query_of(user, **query)]))

    @rule(which=st.integers(0, 1))
    def take_over(self, which: int) -> None:
        self.boots[which] = max(self.boots) + 1
        for side in (self.real, self.model):
            self.runner.run(side.claim(which, self.boots[which]))

    @rule(which=st.integers(0, 1))
    def refresh(self, which: int) -> None:
        real, model = (
            self.runner.run(side.refresh(which, self.boots[which])) for side in (self.real, self.model)
        )
        assert real == model

    @rule(slot=slots, days=st.integers(1, 9))
    def age(self, slot: SlotId, days: int) -> None:
        """As if the shard had been quiet since that many days."""
        shard = self.model_state.shards[slot]._replace(day=today() - days)
        self.model_state.shards[slot] = shard

        async def write() -> None:
            await self.pipe.command("HSET", WATERMARKS, slot, pack_state(shard))

        self.runner.run(write())

    @rule()
    def kill(self) -> None:
        """The server dies and comes back; both processes begin again with the epochs they had."""
        self.server.kill9()
        self.server.restart()

        async def reconnect() -> None:
            await self.pipe.close()
            self.pipe = await open_pipe(self.server)
            epochs = [store.epochs for store in self.real.stores]  # type: ignore[attr-defined]  # not in the port
            self.real = Side(lambda: RedisMailboxStore(self.pipe, SystemClock()))
            for store, known in zip(self.real.stores, epochs, strict=True):
                store.epochs = known  # type: ignore[attr-defined]  # not in the port

        self.runner.run(reconnect())

    def teardown(self) -> None:
        try:
            found = self.runner.run(contents(self.pipe))
            found.pop(b"owner")
            expected = expected_contents(self.model_state)
            differing = {key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)}
            details = [(key, found.get(key), expected.get(key)) for key in differing]
            assert not details, details[0]
        finally:
            self.runner.run(self.pipe.close())
            self.runner.close()


def expected_contents(state: MailboxState) -> dict[bytes, Any]:
    """The keys that a server must hold when the model holds this."""
    expected: dict[bytes, Any] = {
        WATERMARKS: {b"%d" % slot: pack_state(shard) for slot, shard in state.shards.items()}
    }
    for slot, days in state.days.items():
        if days:
            expected[day_hash_key(slot)] = {b"%d" % day: b"%d" % seq for day, seq in days.items()}
    for hour, dispatches in state.progress.items():
        if dispatches:
            expected[progress_key(Millis(hour * HOUR))] = {
                dispatch: one.digest + one.state.encode() + pack_day(one.day)
                for dispatch, one in dispatches.items()
            }
    for name, box in state.boxes.items():
        key = mailbox_key(name.slot, name.tenant, name.user, day=name.day, ephemeral=name.ephemeral)
        ordered = sorted((seq, entry) for entry, seq in box.items())
        expected[key] = tuple(part for seq, entry in ordered for part in (entry, b"%d" % seq))
    return expected


@pytest.mark.shows("M3", "M4", "M6", "M7", "M9", "F5")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["valkey", "redis"])
def test_any_order_of_calls_takeovers_and_kills_equals_the_model(
    request: pytest.FixtureRequest, name: str
) -> None:
    server: StoreServer = request.getfixturevalue(f"fresh_{name}")
    run_state_machine_as_test(
        lambda: MailboxMachine(server),  # type: ignore[arg-type]  # a factory is documented to do
        settings=settings(
            max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    assert server.kills > 0, "no example killed the server"


@pytest.mark.shows("M8")
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(items=st.lists(records(), min_size=1, max_size=8))
def test_the_fused_and_the_general_path_leave_the_same_bytes(
    store_server: StoreServer, items: list[dict[str, Any]]
) -> None:
    writes = [write_of(seq, **parts) for seq, parts in enumerate(items, 1)]

    async def fused(store: RedisMailboxStore) -> None:
        await store.materialise({SLOT: MailboxSeq(0)}, writes)

    async def general(store: RedisMailboxStore) -> None:
        for write in writes:
            before = MailboxSeq(write.mailbox_seq - 1)
            begun = await store.begin_dispatch(write, before)
            if begun.outcome is Materialised.OPEN:
                for user in reversed(write.recipients):
                    await store.append_entries(write, begun.day, [user])
            if begun.outcome in {Materialised.OPEN, Materialised.DONE}:
                await store.finish_dispatch(write, before)

    async def state_after(path: Callable[[RedisMailboxStore], Awaitable[None]]) -> dict[bytes, Any]:
        pipe = await open_pipe(store_server)
        await pipe.command("FLUSHALL")
        store = RedisMailboxStore(pipe, SystemClock())
        await store.claim(claim_of())
        await store.initialise_shards({SLOT: MailboxSeq(1)}, IDENTITY)
        await path(store)
        state = await contents(pipe)
        state.pop(b"owner")
        for key in list(state):
            if key.startswith((b"mbox:", b"mboxe:")):
                state[b"expires " + key] = await pipe.command("PEXPIRETIME", key)
        await pipe.close()
        return state

    assert asyncio.run(state_after(fused)) == asyncio.run(state_after(general))

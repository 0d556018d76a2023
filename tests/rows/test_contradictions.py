"""Rows in which somebody's hand contradicts the data: positions, digests, key types, unreadable records.

F-31, F-32, F-33 and F-34 on `qim dev` under load. What stands still must do so alone and loudly, with its
watermark where it was; what replays must add nothing; an operator's word ends it, and nothing else does.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from qim.adapters.commitlog_redis import LogName, counter_key
from qim.adapters.mailbox_keys import mailbox_key, unpack_state
from qim.ids import Offset, SlotId
from qim.records import parse_dispatch_record
from tests.process.load import Account, Load
from tests.process.test_operator import qimctl
from tests.rows.world import (
    TENANT,
    build_load,
    endpoint_of,
    judge,
    log_of,
    pair_within,
    probe_of,
    redis_of,
    shard_of,
    slots_of,
    stopped_slots,
    watermark_of,
)
from tests.services.dev_server import DevServer
from tests.waiting import happens, stays

pytestmark = pytest.mark.timeout(150)
MESSAGES = 40


def dispatched(server: DevServer) -> int:
    """How many dispatch records were ever appended, over all partitions."""
    with redis_of(server) as store:
        counters: dict[bytes, bytes] = store.hgetall(counter_key("dispatch"))
    return sum(int(value) for value in counters.values())


def logged(server: DevServer, event: str) -> list[dict[str, Any]]:
    lines = [line for line in server.log().splitlines() if line.startswith("{")]
    return [entry for line in lines if (entry := json.loads(line))["event"] == event]


@pytest.mark.shows("F-31", "F4", "M7")
async def test_a_position_set_back_by_hand_delivers_everything_again_and_nobody_notices(
    tmp_path: Path,
) -> None:
    with DevServer(tmp_path) as server:
        load = build_load(server)
        await load.run(messages_per_user=MESSAGES)
        await load.verdict()
        before = dispatched(server)
        one, other = load.pairs[0]
        async with probe_of(server, one) as probe:
            mailbox = await probe.drain_mailbox()
        (victim,) = server.worker_pids()
        with redis_of(server) as store:
            # In this order: an owner that lives would store its own position once more.
            server.kill(victim)
            store.delete("logpos:fanout")
        await happens(lambda: victim not in server.worker_pids(), what="another worker", timeout_seconds=20)
        server.until_ready()
        messages = sum(len(account.acks) for pair in load.pairs for account in pair)
        await happens(
            lambda: dispatched(server) >= before + messages, what="the replay has struck", timeout_seconds=20
        )
        async with probe_of(server, one) as probe:
            assert await probe.drain_mailbox() == mailbox, "a replay moved or added an entry"
        await load.run(messages_per_user=5)
        await judge(server, load)
        assert other.acks


async def other_digest(server: DevServer, slot: SlotId) -> bytes:
    """A dispatch record of that shard once more, with the same id and another digest."""
    async with log_of(server, "dispatch") as log:
        (record, *_) = await log.read(slot, Offset(0), records_max=1)
    digest = parse_dispatch_record(record.data).header.dispatch_digest
    forged = record.data.replace(digest, bytes(8), 1)
    assert parse_dispatch_record(forged).dispatch_id == parse_dispatch_record(record.data).dispatch_id
    return forged


async def append(server: DevServer, name: LogName, slot: SlotId, record: bytes) -> Offset:
    async with log_of(server, name) as log:
        (offset,) = await log.append([(slot, record)])
    assert offset is not None
    return offset


async def until_stopped(server: DevServer, slot: SlotId) -> dict[str, Any]:
    await happens(lambda: int(slot) in stopped_slots(server), what=f"slot {slot} stands still")
    return stopped_slots(server)[int(slot)]


@pytest.mark.long
@pytest.mark.shows("F-32", "M6", "X9")
async def test_a_known_dispatch_id_with_another_digest_stops_its_shard_alone(tmp_path: Path) -> None:
    with DevServer(tmp_path) as server:
        struck = pair_within(server, lambda _: True)
        slot = shard_of(struck[0])
        spared = pair_within(server, lambda found: found not in {slot, shard_of(struck[1])})
        load = Load(endpoint_of(server), [struck, spared])
        await load.run(messages_per_user=MESSAGES)
        await load.verdict()
        offset = await append(server, "dispatch", slot, await other_digest(server, slot))
        row = await until_stopped(server, slot)
        assert "another digest" in row["reason"]
        stood = watermark_of(server, slot)
        await load.run(messages_per_user=MESSAGES)
        assert set(stopped_slots(server)) == {int(slot)}
        assert watermark_of(server, slot) == stood, "W passed a record that contradicts itself"
        await Load(endpoint_of(server), [spared]).verdict()
        assert qimctl(server, "mailbox", "skip", str(int(slot)), str(int(offset)), "--yes").returncode == 0
        await happens(lambda: not stopped_slots(server), what="the shard goes on")
        assert [entry["offset"] for entry in logged(server, "record_skipped")] == [offset]
        await load.verdict()


@pytest.mark.shows("F-33", "M5", "X9")
async def test_a_broken_mailbox_of_one_user_holds_its_shard_and_a_retry_converges(tmp_path: Path) -> None:
    with DevServer(tmp_path) as server:
        struck = pair_within(server, lambda _: True)
        slot = shard_of(struck[0])
        spared = pair_within(server, lambda found: found not in {slot, shard_of(struck[1])})
        load = Load(endpoint_of(server), [struck, spared])
        await load.run(messages_per_user=5)
        await load.verdict()
        day = unpack_state(watermark_of(server, slot)).day
        key = mailbox_key(slot, TENANT, struck[0].user, day=day, ephemeral=False)  # type: ignore[arg-type]  # plain bytes
        with redis_of(server) as store:
            assert store.rename(key, "aside")
            store.set(key, "not a mailbox")
            stood = watermark_of(server, slot)
            await load.run(messages_per_user=MESSAGES)
            row = await until_stopped(server, slot)
            assert "WRONGTYPE" in row["reason"]
            assert watermark_of(server, slot) == stood, "a record was finished without its entry"
            await Load(endpoint_of(server), [spared]).verdict()
            await stays(lambda: int(slot) in stopped_slots(server), what="it does not go on by itself")
            store.delete(key)
            store.rename("aside", key)
        assert qimctl(server, "mailbox", "retry", str(int(slot))).returncode == 0
        await happens(lambda: not stopped_slots(server), what="the retry converges")
        await judge(server, load)


POISON = {
    "bytes": b"\xff" * 40,
    "version": b"\x63" + bytes(300),
    "empty": b"",
    "size": bytes(4) + b"x" * 1_000_000,
}


@pytest.mark.long
@pytest.mark.shows("F-34", "M5", "X9")
@pytest.mark.parametrize("name", ["dispatch", "outbox"])
async def test_a_poison_record_stops_its_partition_until_an_operator_skips_it(
    name: LogName, tmp_path: Path
) -> None:
    with DevServer(tmp_path) as server:
        struck, spared = await pairs_apart(server)
        load = Load(endpoint_of(server), [struck, spared])
        await load.run(messages_per_user=5)
        await load.verdict()
        # The only worker's home partition takes all Outbox records; a shard of one user takes its own.
        slot = SlotId(0) if name == "outbox" else shard_of(struck[0])
        role, tool = ("fanout", "outbox") if name == "outbox" else ("mailbox", "mailbox")
        skipped = []
        for poison in POISON.values():
            offset = await append(server, name, slot, poison)
            await load.run(messages_per_user=5)
            row = await until_stopped(server, slot)
            assert role in row["reason"]
            if name == "dispatch":
                await Load(endpoint_of(server), [spared]).verdict()
            wrong = qimctl(server, tool, "skip", str(int(slot)), str(offset + 1), "--yes")
            assert wrong.returncode == 1, "another record than the one named was skipped"
            assert qimctl(server, tool, "skip", str(int(slot)), str(int(offset)), "--yes").returncode == 0
            await happens(lambda: not stopped_slots(server), what="it goes on")
            skipped.append(offset)
        await load.verdict()
        assert [entry["offset"] for entry in logged(server, "record_skipped")] == skipped
        assert len(logged(server, "slot_stopped")) == len(POISON)


async def pairs_apart(server: DevServer) -> tuple[tuple[Account, Account], tuple[Account, Account]]:
    """Two pairs that share no slot, the first away from the home partition of the Outbox."""
    struck = pair_within(server, lambda slot: slot != 0)
    taken = slots_of(*struck)
    return struck, pair_within(server, lambda slot: slot not in taken)

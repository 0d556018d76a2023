"""X8: every start-up guard that concerns the embedded default, broken once; printed as a table with `-s`.

Each row breaks one thing on a real server and asks what a worker asks before it claims its slots. The refusal
must name the setting, the value found and the value wanted, on one line, with the exit code that tells a
service manager not to try again.
"""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from qim.adapters.redis_keys import IDENTITY, LOG_SEEN
from qim.domain.fanout import shard_of
from qim.domain.guards import REQUIRED_SETTINGS, Retentions
from qim.domain.placement import Placement
from qim.domain.writer import plan_send
from qim.errors import ExitCode, GuardRefused
from qim.ids import DeviceId, Millis, Seq, SlotId, TenantId, UserId
from qim.limits import BUCKETS, BUCKETS_PER_SLOT, DAY_MS, SLOTS
from qim.records import Kind, build_outbox_record
from tests.field.figures import Figures
from tests.process.test_guards import config_of, in_thread, stores_of
from tests.services import StoreServer
from workers.forkable import assert_forkable
from workers.guards import check_outbox, check_retention
from workers.wiring import Stores

Break = Callable[[Stores], Awaitable[object]]


def set_to(setting: str, value: str) -> Break:
    return lambda stores: stores.instances[0].pipe.command("CONFIG", "SET", setting, value)


def identity(role: str, value: str) -> Break:
    return lambda stores: stores.instances[0].pipe.command("HSET", IDENTITY, role, value)


def lost(role: str) -> Break:
    return lambda stores: stores.instances[0].pipe.command("HDEL", IDENTITY, role)


async def be_a_replica(stores: Stores) -> None:
    await stores.instances[0].pipe.command("REPLICAOF", "127.0.0.1", "1")


async def have_an_older_log(stores: Stores) -> None:
    await stores.instances[0].pipe.command("HSET", LOG_SEEN, "0", "5")


async def be_behind_the_outbox(stores: Stores) -> None:
    """The Outbox holds sequence 7 of a conversation of which the store knows nothing."""
    one, other = UserId(b"a" * 16), UserId(b"b" * 16)
    plan = plan_send(
        tenant=TenantId(1), sender=one, device=DeviceId(b"d" * 16), target_kind=Kind.DIRECT, target=other,
        client_message_id=b"c" * 16, message_type=1, custom_type="", body=b"x", retention_class=0,
        now_ms=Millis(1),
    )  # fmt: skip
    record = build_outbox_record(
        bucket=plan.route.bucket, seq=Seq(7), record=plan.record, record_bytes=plan.record_bytes,
        identity=plan.identity,
    )  # fmt: skip
    await stores.outbox.append([(SlotId(plan.route.bucket // BUCKETS_PER_SLOT), record)])


class Row(NamedTuple):
    name: str
    breaks: Break
    words: str
    code: ExitCode = ExitCode.CONFIG


FOREIGN = ExitCode.FOREIGN_STORE
ROWS = [
    Row("appendonly", set_to("appendonly", "no"), "appendonly is 'no', must be 'yes'"),
    Row("appendfsync", set_to("appendfsync", "everysec"), "appendfsync is 'everysec', must be 'always'"),
    Row(
        "no-appendfsync-on-rewrite", set_to("no-appendfsync-on-rewrite", "yes"),
        "no-appendfsync-on-rewrite is 'yes', must be 'no'",
    ),
    Row(
        "maxmemory-policy", set_to("maxmemory-policy", "volatile-lru"),
        "maxmemory-policy is 'volatile-lru', must be 'noeviction'",
    ),
    Row("role", be_a_replica, "its role is 'slave', must be 'master'"),
    *(
        Row(f"{role} identity lost", lost(role), f"as {role} is missing, must be 'qim 1 test 0 1'")
        for role in ("core", "mailbox", "log")
    ),
    Row("another deployment", identity("core", "qim 1 other 0 1"), "is 'qim 1 other 0 1', must be", FOREIGN),
    Row("another number", identity("mailbox", "qim 1 test 1 1"), "is 'qim 1 test 1 1', must be", FOREIGN),
    Row("another count", identity("log", "qim 1 test 0 2"), "is 'qim 1 test 0 2', must be", FOREIGN),
    Row("another format", identity("core", "qim 2 test 0 1"), "is 'qim 2 test 0 1', must be", FOREIGN),
    Row("store behind its Outbox", be_behind_the_outbox, "stands at sequence 0, the Outbox holds 7", FOREIGN),
    Row("log behind its store", have_an_older_log, "ends at -1, but core instance 0 has committed", FOREIGN),
]  # fmt: skip


@pytest.fixture
async def stores(fresh_valkey: StoreServer) -> AsyncIterator[Stores]:
    """Connected to an initialised server, on which every guard passes."""
    assert await in_thread(config_of(fresh_valkey))
    made = stores_of(config_of(fresh_valkey))
    await made.connect()
    await ask(made)
    yield made
    await made.close()


async def ask(stores: Stores) -> None:
    """What a worker asks before it serves."""
    await stores.check()
    await check_outbox(
        stores=stores.commits, outbox=stores.outbox, placement=Placement(1, 1, 1),
        slots=[SlotId(slot) for slot in range(SLOTS)],
    )  # fmt: skip


@pytest.mark.shows("X8", "F-09")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_each_guard_of_a_store_refuses_the_start(row: Row, stores: Stores, figures: Figures) -> None:
    await row.breaks(stores)
    with pytest.raises(GuardRefused) as refused:
        await ask(stores)
    text = str(refused.value)
    assert row.words in text
    assert "\n" not in text
    assert refused.value.exit_code == row.code
    figures.note(row.name, f"exit {int(row.code)}: {text}")


@pytest.mark.shows("X8")
async def test_a_setting_that_only_a_start_fixes_is_refused_too(
    valkey_binary: str, tmp_path: Path, figures: Figures
) -> None:
    server = StoreServer(valkey_binary, tmp_path / "store", settings={"io-threads": "2"})
    server.start()
    stores = stores_of(config_of(server))
    try:
        await stores.connect()
        with pytest.raises(GuardRefused, match="io-threads is '2', must be '1'") as refused:
            await stores.check()
    finally:
        await stores.close()
        server.close()
    figures.note("io-threads", f"exit {int(refused.value.exit_code)}: {refused.value}")
    tested = {row.name for row in ROWS} | {"io-threads"}
    assert set(REQUIRED_SETTINGS) <= tested, "a setting that is demanded is never broken"


RETENTIONS = {
    "log_ms": (Retentions(log_ms=3_599_999), "log_ms is 3599999, must be at least 3600000"),
    "trim_interval_ms": (Retentions(trim_interval_ms=3_600_001), "is 3600000, must be at least 3600001"),
    "mailbox_key_ms": (Retentions(mailbox_key_ms=8 * DAY_MS - 1), "must be at least 691200000"),
    "mailbox_ms": (Retentions(mailbox_ms=9 * DAY_MS), "is 777600000, must be at least 864000000"),
    "ephemeral_key_ms": (Retentions(ephemeral_key_ms=DAY_MS - 1), "must be at least 86400000"),
    "dispatch_progress_ms": (
        Retentions(dispatch_progress_ms=7 * DAY_MS), "is 604800000, must be at least 608400000",
    ),
}  # fmt: skip


@pytest.mark.shows("X8")
@pytest.mark.parametrize("name", RETENTIONS)
def test_each_inequality_of_retention_refuses_the_start(name: str, figures: Figures) -> None:
    broken, words = RETENTIONS[name]
    with pytest.raises(GuardRefused) as refused:
        check_retention(broken)
    assert words in str(refused.value)
    assert refused.value.exit_code == ExitCode.CONFIG
    figures.note(name, f"exit {int(refused.value.exit_code)}: {refused.value}")


@pytest.mark.shows("X8")
def test_what_is_kept_by_default_passes() -> None:
    check_retention(Retentions())


@pytest.mark.shows("X8")
async def test_no_loop_and_no_connection_may_exist_before_a_fork() -> None:
    with pytest.raises(AssertionError, match=r"loop|threads"):
        assert_forkable()


@pytest.mark.shows("X8")
def test_a_connected_client_before_a_fork_is_refused_by_its_peer() -> None:
    one, other = socket.socketpair()
    with one, other, pytest.raises(AssertionError, match=r"connections before a fork|threads before a fork"):
        assert_forkable()


@pytest.mark.shows("X8")
def test_every_worker_counts_64_shards_and_256_buckets_and_another_map_has_another_digest() -> None:
    assert (SLOTS, BUCKETS, BUCKETS_PER_SLOT * SLOTS) == (64, 256, 256)
    maps = {Placement(workers, core, 1).digest() for workers in (1, 2, 4) for core in (1, 2)}
    assert len(maps) == 6
    assert shard_of(TenantId(1), UserId(b"u" * 16)) < SLOTS

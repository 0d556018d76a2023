"""The start-up guards and `init` against real servers: each wrong setting, role and identity."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from qim.adapters.lua_scripts import LuaScripts
from qim.adapters.redis_keys import IDENTITY, LOG_SEEN, OWNER
from qim.clock import SystemClock
from qim.config import Config, RedisConfig, Secret, ServerConfig
from qim.errors import ExitCode, GuardRefused, StoreRefused
from qim.ids import SlotId
from qim.metrics import Metrics
from tests.services import StoreServer
from workers.guards import check_outbox
from workers.init import initialise
from workers.wiring import Stores, wire


def config_of(server: StoreServer, *, deployment: str = "test") -> Config:
    return Config(server=ServerConfig(deployment=deployment), redis=RedisConfig(core=(server.url,)))


def stores_of(config: Config) -> Stores:
    return wire(
        config,
        workers=1,
        scripts=LuaScripts.load(),
        clock=SystemClock(),
        metrics=Metrics(),
        password=Secret.none(),
    )


async def checked(server: StoreServer, config: Config | None = None) -> None:
    stores = stores_of(config or config_of(server))
    try:
        await stores.connect()
        await stores.check()
    finally:
        await stores.close()


async def command(server: StoreServer, *arguments: str | bytes) -> object:
    stores = stores_of(config_of(server))
    try:
        await stores.connect()
        return await stores.instances[0].pipe.command(*arguments)
    finally:
        await stores.close()


@pytest.fixture
def initialised(fresh_valkey: StoreServer) -> StoreServer:
    written = initialise(config_of(fresh_valkey), password=Secret.none())
    assert [line.rpartition(": ")[2] for line in written] == ["core 0 of 1", "mailbox 0 of 1", "log 0 of 1"]
    return fresh_valkey


async def test_an_initialised_store_passes_every_guard(initialised: StoreServer) -> None:
    await checked(initialised)


def test_init_on_debian_redis_passes_and_repeats(fresh_redis: StoreServer) -> None:
    assert initialise(config_of(fresh_redis), password=Secret.none())
    assert initialise(config_of(fresh_redis), password=Secret.none()) == []


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("appendonly", "no", "CONFIG SET appendonly yes"),
        ("appendfsync", "everysec", "CONFIG SET appendfsync always"),
        ("no-appendfsync-on-rewrite", "yes", "CONFIG SET no-appendfsync-on-rewrite no"),
        ("maxmemory-policy", "allkeys-lru", "CONFIG SET maxmemory-policy noeviction"),
        ("io-threads", "2", "write 'io-threads 1' into its configuration file"),
    ],
)
async def test_a_wrong_setting_is_refused_with_its_remedy(
    valkey_binary: str, tmp_path: Path, setting: str, value: str, remedy: str
) -> None:
    server = StoreServer(valkey_binary, tmp_path / "store", settings={setting: value})
    server.start()
    try:
        with pytest.raises(GuardRefused) as refused:
            await checked(server)
    finally:
        server.close()
    text = str(refused.value)
    assert refused.value.exit_code == ExitCode.CONFIG
    assert f"{setting} is '{value}', must be '" in text
    assert remedy in text
    assert server.url in text
    assert "\n" not in text


async def test_a_replica_is_refused(fresh_valkey: StoreServer) -> None:
    await command(fresh_valkey, "REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(GuardRefused, match="its role is 'slave', must be 'master'"):
        await checked(fresh_valkey)


async def test_a_store_that_came_up_empty_is_refused(fresh_valkey: StoreServer) -> None:
    with pytest.raises(GuardRefused, match="identity as core is missing") as refused:
        await checked(fresh_valkey)
    assert refused.value.exit_code == ExitCode.CONFIG
    assert "qim init" in str(refused.value)


async def test_a_store_of_another_deployment_is_foreign(initialised: StoreServer) -> None:
    with pytest.raises(GuardRefused, match="'qim 1 test 0 1', must be 'qim 1 other 0 1'") as refused:
        await checked(initialised, config_of(initialised, deployment="other"))
    assert refused.value.exit_code == ExitCode.FOREIGN_STORE


async def test_another_number_of_instances_is_foreign(initialised: StoreServer) -> None:
    more = replace(config_of(initialised), redis=RedisConfig(core=(initialised.url, "unix:///nowhere")))
    stores = stores_of(more)
    await stores.instances[0].pipe.connect()
    try:
        with pytest.raises(GuardRefused, match="must be 'qim 1 test 0 2'") as refused:
            await stores.instances[0].check()
    finally:
        await stores.close()
    assert refused.value.exit_code == ExitCode.FOREIGN_STORE


async def test_a_user_who_may_not_read_settings_is_told_so(initialised: StoreServer) -> None:
    await command(initialised, "ACL", "SETUSER", "default", "-config|get")
    with pytest.raises(GuardRefused, match="allow its user to"):
        await checked(initialised)


# --- init ---


def test_init_refuses_the_store_of_another_deployment(initialised: StoreServer) -> None:
    with pytest.raises(GuardRefused) as refused:
        initialise(config_of(initialised, deployment="other"), password=Secret.none())
    assert refused.value.exit_code == ExitCode.FOREIGN_STORE


def test_init_refuses_wrong_settings_before_it_writes(valkey_binary: str, tmp_path: Path) -> None:
    server = StoreServer(valkey_binary, tmp_path / "store", settings={"appendfsync": "everysec"})
    server.start()
    try:
        with pytest.raises(GuardRefused, match="appendfsync"):
            initialise(config_of(server), password=Secret.none())
        server.stop()
        server.settings["appendfsync"] = "always"
        server.start()
        assert len(initialise(config_of(server), password=Secret.none())) == 3, "nothing was written before"
    finally:
        server.close()


async def test_init_refuses_a_store_with_strange_data(fresh_valkey: StoreServer) -> None:
    await command(fresh_valkey, "SET", "somebody", "else")
    with pytest.raises(GuardRefused, match="holds 1 keys and no identity") as refused:
        await in_thread(config_of(fresh_valkey))
    assert refused.value.exit_code == ExitCode.FOREIGN_STORE


async def test_init_goes_on_where_it_was_cut_off(initialised: StoreServer) -> None:
    await command(initialised, "HDEL", IDENTITY, "core")
    assert [line.rpartition(": ")[2] for line in await in_thread(config_of(initialised))] == ["core 0 of 1"]


async def test_init_does_not_hide_a_lost_identity_once_workers_have_served(initialised: StoreServer) -> None:
    await command(initialised, "HSET", OWNER, "0", "somebody")
    await command(initialised, "HDEL", IDENTITY, "mailbox")
    with pytest.raises(GuardRefused, match="has lost its data") as refused:
        await in_thread(config_of(initialised))
    assert refused.value.exit_code == ExitCode.FOREIGN_STORE


def test_init_of_a_server_that_is_down_says_so(valkey_binary: str, tmp_path: Path) -> None:
    server = StoreServer(valkey_binary, tmp_path / "store")
    with pytest.raises(StoreRefused):
        initialise(config_of(server), password=Secret.none())


async def in_thread(config: Config) -> list[str]:
    """`initialise` has a loop of its own."""
    import asyncio

    return await asyncio.to_thread(initialise, config, password=Secret.none())


# --- behind its Outbox ---


async def test_a_log_older_than_its_store_is_refused(initialised: StoreServer) -> None:
    await command(initialised, "HSET", LOG_SEEN, "0", "5")
    with pytest.raises(GuardRefused, match="the log is an older copy"):
        await outbox_checked(initialised)


async def test_an_untouched_store_is_not_behind(initialised: StoreServer) -> None:
    await outbox_checked(initialised)


async def outbox_checked(server: StoreServer) -> None:
    config = config_of(server)
    stores = stores_of(config)
    try:
        await stores.connect()
        from qim.domain.placement import Placement

        await check_outbox(
            stores=stores.commits,
            outbox=stores.outbox,
            placement=Placement(1, 1, 1),
            slots=[SlotId(slot) for slot in range(64)],
        )
    finally:
        await stores.close()


def test_settings_of_the_test_server_are_the_demanded_ones() -> None:
    from qim.domain.guards import REQUIRED_SETTINGS
    from tests.services.store_server import DURABLE_SETTINGS

    shared: Mapping[str, str] = {name: DURABLE_SETTINGS[name] for name in REQUIRED_SETTINGS}
    assert shared == REQUIRED_SETTINGS

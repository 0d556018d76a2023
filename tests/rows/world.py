"""What the rows share: users whose place is known, raw store and logs of a running service, the verdict."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis import Redis

from qim.adapters.commitlog_redis import LogName, RedisCommitLog
from qim.adapters.lua_scripts import LuaScripts
from qim.adapters.redis_pipe import RedisPipe
from qim.client.probe import Probe
from qim.clock import SystemClock
from qim.ctl import protocol
from qim.domain.placement import (
    bucket_of_conversation,
    direct_conversation,
    shard_of_user,
    slot_of_bucket,
)
from qim.errors import ControlError
from qim.ids import SlotId, TenantId
from tests.process.load import Account, Endpoint, Load, resend_all
from tests.services.dev_server import DevServer, User

TENANT = TenantId(1)


def endpoint_of(server: DevServer) -> Endpoint:
    return Endpoint("127.0.0.1", server.port, server.certificate)


def probe_of(server: DevServer, user: User | Account, *, device: bytes | None = None) -> Probe:
    return Probe("127.0.0.1", server.port, server.certificate, token=user.token, device=device)


def new_account(server: DevServer) -> Account:
    user = server.new_user()
    return Account(user.user, user.token)


def build_load(server: DevServer, *, pairs: int = 2, lanes: int = 4) -> Load:
    accounts = [(new_account(server), new_account(server)) for _ in range(pairs)]
    return Load(endpoint_of(server), accounts, lanes=lanes)


def shard_of(account: Account | User) -> SlotId:
    return shard_of_user(TENANT, account.user)  # type: ignore[arg-type]  # an account holds plain bytes


def slots_of(one: Account, other: Account) -> set[SlotId]:
    """Every slot that a message between the two touches: its conversation's and both mailboxes'."""
    conversation = direct_conversation(TENANT, one.user, other.user)  # type: ignore[arg-type]  # plain bytes
    home = slot_of_bucket(bucket_of_conversation(TENANT, conversation))
    return {home, shard_of(one), shard_of(other)}


def pair_within(server: DevServer, is_wanted: Callable[[SlotId], bool]) -> tuple[Account, Account]:
    """Two users whose messages touch wanted slots only."""
    while True:
        one, other = new_account(server), new_account(server)
        if all(is_wanted(slot) for slot in slots_of(one, other)):
            return one, other


def redis_of(server: DevServer) -> Redis:
    """The embedded store itself, as a second opinion and as the hand that breaks things."""
    facts = json.loads((server.folder / "dev.json").read_text())
    return Redis(unix_socket_path=facts["store_socket"])


@asynccontextmanager
async def log_of(server: DevServer, name: LogName) -> AsyncIterator[RedisCommitLog]:
    """One of the two logs, opened by a stranger who may append what the service never would."""
    facts = json.loads((server.folder / "dev.json").read_text())
    pipe = RedisPipe(f"unix://{facts['store_socket']}", clock=SystemClock(), scripts=LuaScripts.load())
    await pipe.connect()
    try:
        yield RedisCommitLog(pipe, name)
    finally:
        await pipe.close()


def watermark_of(server: DevServer, slot: SlotId) -> bytes:
    """W and everything that stands beside it, as it is stored."""
    with redis_of(server) as store:
        value = store.hget("mboxw", str(int(slot)))
    assert isinstance(value, bytes)
    return value


def stopped_slots(server: DevServer) -> dict[int, dict[str, Any]]:
    """What `qimctl slots` says stands still; empty while nothing answers."""
    facts = json.loads((server.folder / "dev.json").read_text())
    try:
        rows = protocol.call(Path(facts["control_socket"]), "slots", timeout_seconds=5.0)["slots"]
    except ControlError:
        return {}
    return {row["slot"]: row for row in rows if row["stopped"]}


async def judge(server: DevServer, load: Load) -> None:
    """The verdict, every acknowledgement asked for again, the verdict again, the audit of the raw keys."""
    await load.verdict()
    for one, other in load.pairs:
        await resend_all(load.endpoint, one, other)
        await resend_all(load.endpoint, other, one)
    await load.verdict()
    audit = server.tool("audit", "--json")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert json.loads(audit.stdout)["clean"]

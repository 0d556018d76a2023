"""Configuration → adapters. The only file that chooses a medium.

One connection per worker and server: where core, mailbox and log share a server they share its pipe, so the
calls of all roles leave in one write per pass. Adapters are made after the fork, inside the running loop, and
connect when `connect` is called; until then nothing is sent.

A second medium of a port is one more arm of a `match` here and nothing else anywhere.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple
from urllib.parse import quote, urlsplit, urlunsplit

from qim.adapters.audit_redis import RedisCommitAudit, RedisMailboxAudit
from qim.adapters.commitlog_redis import RedisCommitLog
from qim.adapters.commits_one_step_redis import RedisOneStepCommits
from qim.adapters.commits_redis import RedisCommitStore
from qim.adapters.lua_scripts import LuaScripts
from qim.adapters.mailbox_redis import RedisMailboxStore
from qim.adapters.membership_redis import RedisMemberships
from qim.adapters.redis_facts import StoreFacts, fetch_facts, fetch_memory, write_identity
from qim.adapters.redis_keys import IDENTITY
from qim.adapters.redis_pipe import RedisPipe
from qim.clock import Clock
from qim.config import Config, Secret
from qim.domain.guards import REQUIRED_SETTINGS, ExpectedIdentity
from qim.domain.placement import Placement
from qim.errors import GuardRefused, StoreBroken, StoreUnfit
from qim.ids import SlotId
from qim.limits import SLOTS
from qim.metrics import Metrics
from workers.audiences import Audiences
from workers.audit import AuditedStores
from workers.guards import check_identities, check_settings

CORE: Final = "core"
MAILBOX: Final = "mailbox"
LOG: Final = "log"

Scripts = LuaScripts
"""What `load_scripts` gives, for whoever hands it on and names no medium."""


class Instance(NamedTuple):
    """One server, in all the roles that it has for us."""

    where: str
    """Its address without a password, for messages."""
    pipe: RedisPipe
    expected: tuple[ExpectedIdentity, ...]

    async def facts(self) -> StoreFacts:
        """What the guards need to know; raises GuardRefused when the server does not let us ask."""
        try:
            return await fetch_facts(self.pipe.command, REQUIRED_SETTINGS)
        except (StoreUnfit, StoreBroken) as error:
            raise GuardRefused(
                f"{self.where}: {error}; qim reads CONFIG GET, INFO and the hash {IDENTITY.decode()} at"
                " start: allow its user to"
            ) from error

    async def identify(self, identity: ExpectedIdentity) -> None:
        """For `init`: from now on the server is this one."""
        await write_identity(self.pipe.command, field=identity.field, value=identity.value)

    async def check(self) -> None:
        """The start-up guards; raises GuardRefused."""
        facts = await self.facts()
        check_settings(facts, where=self.where)
        check_identities(facts, self.expected, where=self.where)

    async def memory(self) -> dict[str, object]:
        """What the server holds, held when empty, and may hold: the host's memory if it has no limit."""
        memory = await fetch_memory(self.pipe.command)
        return {
            "store": self.where,
            "roles": ", ".join(identity.role for identity in self.expected),
            "used_bytes": memory.used_bytes,
            "empty_bytes": memory.empty_bytes,
            "max_bytes": memory.limit_bytes or memory.host_bytes,
            "max_is": "maxmemory" if memory.limit_bytes else "memory of the host",
            "evicted": memory.evicted,
        }


class Stores:
    """Every adapter of one process."""

    def __init__(
        self,
        instances: Sequence[Instance],
        *,
        commits: Sequence[RedisCommitStore],
        mailboxes: Sequence[RedisMailboxStore],
        outbox: RedisCommitLog,
        dispatch: RedisCommitLog,
        one_step: Mapping[int, RedisOneStepCommits],
    ) -> None:
        self.instances = tuple(instances)
        self.commits = tuple(commits)
        """By core instance."""
        self.memberships = tuple(RedisMemberships(store) for store in commits)
        """By core instance, on the epochs of its commit store."""
        self.mailboxes = tuple(mailboxes)
        """By mailbox instance."""
        self.outbox = outbox
        self.dispatch = dispatch
        self.one_step = dict(one_step)
        """By core instance: those that hold the logs too."""

    async def connect(self) -> None:
        """Connects what is not connected; StoreRefused while a server is down, StoreUnfit if refused."""
        for instance in self.instances:
            if not instance.pipe.is_connected:
                await instance.pipe.connect()

    async def check(self) -> None:
        """The start-up guards of every server; raises GuardRefused."""
        for instance in self.instances:
            await instance.check()

    def on_connected(self, callback: Callable[[], None]) -> None:
        """Called after each connection to a server but the first."""
        for instance in self.instances:
            instance.pipe.on_connected.append(callback)

    @property
    def away(self) -> list[str]:
        """Servers without a connection now; who was never connected counts too."""
        return [instance.where for instance in self.instances if not instance.pipe.is_connected]

    async def create_logs(self) -> bytes:
        """For `init`: gives both logs an identity where they have none; that of the dispatch log."""
        for commit_log in (self.outbox, self.dispatch):
            await commit_log.create_identity(os.urandom(16))
        return await self.dispatch.identity()

    async def messages(self) -> int:
        """How many records the Outbox has ever taken; of the messages at most the repeats more."""
        marks = await self.outbox.watermarks([SlotId(slot) for slot in range(SLOTS)])
        return sum(mark.high for mark in marks.values())

    async def close(self) -> None:
        await asyncio.gather(self.outbox.close(), self.dispatch.close())
        await asyncio.gather(*(instance.pipe.close() for instance in self.instances))


def load_scripts() -> LuaScripts:
    """Read before the fork, so that no child depends on files."""
    return LuaScripts.load()


def wire(
    config: Config, *, workers: int, scripts: LuaScripts, clock: Clock, metrics: Metrics, password: Secret
) -> Stores:
    """The adapters of this process; must be called inside its running loop."""
    core, mailbox, log = config.redis.core, config.mailbox_urls, config.log_url
    pipes = {
        url: RedisPipe(
            with_password(url, password),
            clock=clock,
            scripts=scripts,
            metrics=metrics,
            timeout_ms=config.redis.command_timeout_ms,
        )
        for url in dict.fromkeys((*core, *mailbox, log))
    }
    expected = expected_identities(config)
    commits = [RedisCommitStore(pipes[url], clock) for url in core]
    # Only this worker appends to the Outbox partitions it reads; dispatches come from every worker.
    outbox = RedisCommitLog(pipes[log], "outbox", clock=clock, consumers_here=log in core)
    return Stores(
        [Instance(url, pipe, expected[url]) for url, pipe in pipes.items()],
        commits=commits,
        mailboxes=[RedisMailboxStore(pipes[url], clock) for url in mailbox],
        outbox=outbox,
        dispatch=RedisCommitLog(
            pipes[log],
            "dispatch",
            shared=workers > 1,
            url=with_password(log, password),
            clock=clock,
            consumers_here=log in mailbox,
        ),
        one_step={
            number: RedisOneStepCommits(commits[number], outbox, clock)
            for number, url in enumerate(core)
            if url == log and config.redis.commit_in_one_step
        },
    )


def wire_audit(config: Config, *, clock: Clock, password: Secret) -> tuple[Stores, AuditedStores]:
    """The same servers as the audit reads them: raw keys, not scripts."""
    stores = wire(
        config, workers=1, scripts=load_scripts(), clock=clock, metrics=Metrics(), password=password
    )
    pipes = {instance.where: instance.pipe for instance in stores.instances}
    placement = Placement(1, len(config.redis.core), len(config.mailbox_urls))
    return stores, AuditedStores(
        placement=placement,
        commits=stores.commits,
        commit_audits=[RedisCommitAudit(pipes[url], now_ms=clock.now_ms()) for url in config.redis.core],
        mailboxes=stores.mailboxes,
        mailbox_audits=[RedisMailboxAudit(pipes[url]) for url in config.mailbox_urls],
        outbox=stores.outbox,
        dispatch=stores.dispatch,
        audiences=Audiences(placement=placement, memberships=stores.memberships),
    )


def expected_identities(config: Config) -> dict[str, tuple[ExpectedIdentity, ...]]:
    """Who each server must be, by its address: one server may have several roles."""
    deployment = config.server.deployment
    found: dict[str, list[ExpectedIdentity]] = {}
    for role, urls in ((CORE, config.redis.core), (MAILBOX, config.mailbox_urls), (LOG, (config.log_url,))):
        for number, url in enumerate(urls):
            found.setdefault(url, []).append(ExpectedIdentity(role, deployment, number, len(urls)))
    return {url: tuple(identities) for url, identities in found.items()}


def with_password(url: str, password: Secret) -> str:
    """The address as the pipe wants it. The configuration never holds the password itself."""
    if not password:
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f":{quote(password.reveal().decode(), safe='')}@{parts.netloc}"))

"""A device: the SDK as an application holds it, on a database that outlives its process.

Everything of `qim.client` runs here but two things: the socket, for which the loop stands in, and the writer
thread of the store, whose transactions run on the loop instead, with a delay, on SQLite in memory. A
transaction that was not committed when the process is killed never happened; a commit may fail. A device that
is started again is a new client on the old database.
"""

import asyncio
import base64
import json
import sqlite3
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from qim.client import schema
from qim.client.account import Endpoint, Secret, read_account
from qim.client.client import AsyncClient
from qim.client.engine import Engine, Identity
from qim.client.errors import SdkError, StoreUnavailable
from qim.client.store import Store, _report
from qim.clock import Clock
from qim.ids import DeviceId, TenantId, UserId
from qim.records import MessageRecord, build_entry, encode_record
from tests.checker.history import Held, digest_of

ENDPOINT: Final = Endpoint("qim", 7443)
COMMIT_SECONDS_MAX: Final = 0.02


def build_token(tenant: TenantId, user: UserId, device: DeviceId) -> str:
    claims = {"tenant": tenant, "sub": user.hex(), "aud": "qim", "dev": device.hex()}
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"header.{body}.signature"


def open_database(device: DeviceId, *, ordinal: int) -> sqlite3.Connection:
    """An empty one, with the identity that chance would have given it."""
    connection = _SPARE.pop() if _SPARE else _make_database()
    connection.executemany(
        "INSERT INTO meta VALUES (?, ?)",
        [("device_id", device), ("ordinal", ordinal), ("cursor", 0), ("login", 0)],
    )
    return connection


def give_back(connection: sqlite3.Connection) -> None:
    """To be emptied for a later run: its tables and its prepared statements cost more than a short run."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")
    for table in _tables():
        connection.execute(f"DELETE FROM {table}")
    _SPARE.append(connection)


_SPARE: Final[list[sqlite3.Connection]] = []
"""Empty databases of earlier runs of this process; as many as one run had devices."""


def _make_database() -> sqlite3.Connection:
    connection = sqlite3.connect(
        ":memory:", isolation_level=None, check_same_thread=False, cached_statements=256
    )
    schema.migrate(connection, Path("memory"))
    return connection


@cache
def _tables() -> tuple[str, ...]:
    found = _make_database().execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    return tuple(name for (name,) in found)


class CommitFaults:
    """How often a commit of this device fails."""

    def __init__(self, rng: Random, share: float) -> None:
        self.rng = rng
        self.share = share
        self.struck = 0

    def strikes(self) -> bool:
        hit = self.share > 0 and self.rng.random() < self.share
        self.struck += hit
        return hit


class _LoopWaker:
    """Stands where the store's writer thread waits: a notice sets the timer of the next transaction."""

    def __init__(self, notice: Callable[[], None]) -> None:
        self.notify = notice

    def __enter__(self) -> None:
        """Nothing to lock: there is one thread."""

    def __exit__(self, *_: object) -> None:
        """Nothing to unlock."""


class LoopStore(Store):
    """The local store without its thread."""

    def __init__(
        self, connection: sqlite3.Connection, *, me: UserId, clock: Clock, faults: CommitFaults
    ) -> None:
        super().__init__(Path("memory"), me=me, clock=clock)
        self._connection = connection
        self._faults = faults
        self._timer: asyncio.TimerHandle | None = None
        waker: Any = _LoopWaker(self._plan_transaction)
        self._wake = waker

    def _plan_transaction(self) -> None:
        if self._timer is None:
            pause = self._faults.rng.uniform(0.000_1, COMMIT_SECONDS_MAX)
            self._timer = self._loop.call_later(pause, self._commit)

    def _commit(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        batch = self._take()
        assert batch is not None
        if self._faults.strikes():
            for step in batch:
                step.error = StoreUnavailable("the disk is full, says the schedule")
        else:
            self._run_transaction(self._connection, batch)
        _report(batch)
        if self._waiting:
            self._plan_transaction()

    async def close(self) -> None:
        """As the thread would: what waits is run, then nothing more is taken."""
        while self._waiting:
            self._commit()
        self._is_closing = True


class Client(AsyncClient):
    """The application's client, made of the parts that the simulation brings."""

    def __init__(self, store: LoopStore, token: str, *, clock: Clock, rng: Random) -> None:
        # The parent's own beginning reads certificates and asks the system for chance; both are given here.
        self._endpoint = ENDPOINT
        self._token = Secret(token)
        self._account = read_account(self._token)
        self._server_name = None
        self._client_name = "simulation"
        self._clock = clock
        self.store_path = Path("memory")
        self._engine: Engine | None = None
        self._local = store
        self._rng = rng

    async def begin(self) -> None:
        """As entering the client does."""
        identity = Identity(ENDPOINT, None, self._account, "simulation", "0")
        tls: Any = None
        engine = Engine(
            identity, self._token, store=self._local, tls=tls, clock=self._clock, jitter=self._rng
        )
        self._engine = engine
        await engine.start()
        engine.check_alive()

    @property
    def engine(self) -> Engine:
        return self._running

    @property
    def is_quiet(self) -> bool:
        """Connected, drained, nothing unacknowledged, nothing that a pull would be due for."""
        work = self._running.work
        return (
            self._running.fatal is None
            and work.transport is not None
            and work._chain.is_drained
            and not work._outgoing.count
            and not work._open
            and not work._helpers
            and not self._local._waiting
        )


class Stored(NamedTuple):
    """What the database of a device holds at the end."""

    cursor: int
    held: list[Held]
    unsent: int
    doubled: int


def read_database(connection: sqlite3.Connection, tenant: TenantId, me: UserId) -> Stored:
    """Rebuilds the entries as they travelled, so that they can be compared with the log byte for byte."""
    held = []
    rows = connection.execute(
        "SELECT m.*, c.kind, c.target FROM message m JOIN conversation c USING (conversation_id)"
        " ORDER BY conversation_id, conversation_seq"
    )
    for row in rows:
        peer = bytes(row[13])
        record = MessageRecord(
            version=1, tenant=tenant, conversation_id=row[0], kind=row[12],
            parties=min(me, peer) + max(me, peer), message_id=row[2], sender=row[3], sender_device=row[4],
            client_message_id=row[5], message_type=row[6], custom_type=row[7], body=row[8],
            retention_class=row[9], reserved_at=row[10], membership_version=0,
        )  # fmt: skip
        held.append(Held(row[0].hex(), row[1], digest_of(build_entry(row[1], encode_record(record)))))
    cursor = connection.execute("SELECT value FROM meta WHERE key = 'cursor'").fetchone()[0]
    unsent = connection.execute("SELECT count(*) FROM pending").fetchone()[0]
    total, distinct = connection.execute(
        "SELECT count(*), count(DISTINCT message_id) FROM message"
    ).fetchone()
    return Stored(cursor, held, unsent, total - distinct)


__all__ = [
    "Client",
    "CommitFaults",
    "LoopStore",
    "SdkError",
    "Stored",
    "build_token",
    "give_back",
    "open_database",
]

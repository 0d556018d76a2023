"""The order inside the writer thread of the local store: commit first, then the result."""

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from qim.client import schema
from qim.client.store import Store
from qim.clock import SystemClock
from qim.ids import DeviceId
from tests.unit.client.store_writer import ME, queue
from tests.waiting import happens, stays


class HeldConnection:
    """Passes everything on, but holds back the COMMIT behind the first message that is queued."""

    def __init__(self, inner: sqlite3.Connection) -> None:
        self._inner = inner
        self.has_message = False
        self.waits = threading.Event()
        self.may_commit = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        if statement.startswith("INSERT INTO pending"):
            self.has_message = True
        if self.has_message and statement == "COMMIT":
            self.waits.set()
            assert self.may_commit.wait(10)
        return self._inner.execute(statement, *arguments)


@pytest.mark.shows("K1")
async def test_a_result_is_told_only_after_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[HeldConnection] = []
    original = schema.open_store

    def open_held(path: Path) -> Any:
        connection, rebuilt = original(path)
        held.append(HeldConnection(connection))
        return held[0], rebuilt

    monkeypatch.setattr(schema, "open_store", open_held)
    store, _ = await Store.open(tmp_path / "me.db", me=ME, clock=SystemClock())
    try:
        queued = asyncio.ensure_future(queue(store, DeviceId(bytes(16))))
        await happens(held[0].waits.is_set, what="the commit is under way")
        await stays(lambda: not queued.done(), what="nothing is told yet", period_seconds=0.05)
        held[0].may_commit.set()
        identity = await queued
        assert (await store.load(bound_device=None)).pending[-1].client_message_id == identity
    finally:
        held[0].may_commit.set()
        await store.close()

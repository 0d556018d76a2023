"""The local store on a real disk: what a commit promises, what a kill leaves, how damage is mended."""

# ruff: noqa: ASYNC240, ASYNC221 - the test does to the file what a disk or a user would; nothing else runs meanwhile

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
import pytest_asyncio

from qim.client import schema
from qim.client.errors import StoreDamaged, StoreUnavailable
from qim.client.model import MessageState, StoreRebuilt, Target
from qim.client.steps import Echo, Incoming, RebuildItem, StoreSteps
from qim.client.store import ORDINAL_BLOCK, Store
from qim.client.sync import Gap
from qim.clock import ManualClock, SystemClock
from qim.ids import ConversationId, MailboxSeq, Millis, Seq
from qim.wire.bodies import SendAck
from tests.unit.client.store_writer import CONVERSATION, ME, PEER, build_message, queue
from tests.waiting import eventually

TARGET = Target(1, PEER)


async def open_store(path: Path) -> tuple[Store, StoreRebuilt | None]:
    return await Store.open(path, me=ME, clock=SystemClock())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "scope" / "7" / "me.db"


@pytest_asyncio.fixture
async def store(path: Path) -> AsyncIterator[Store]:
    opened, rebuilt = await open_store(path)
    assert rebuilt is None
    yield opened
    await opened.close()


def cursor_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT value FROM meta WHERE key = 'cursor'").fetchone()[0])


@pytest.mark.shows("K2", "F-37")
async def test_messages_and_cursor_are_one_transaction(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = StoreSteps._set_meta

    def fail(steps: StoreSteps, key: str, value: int | bytes) -> None:
        if key == "cursor":
            raise sqlite3.OperationalError("disk I/O error")
        original(steps, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(StoreSteps, "_set_meta", fail)
        with pytest.raises(StoreUnavailable):
            await store.apply(Incoming(messages=[build_message(1)], cursor=MailboxSeq(9)))
    assert await store.messages(TARGET, before=Seq(0), limit=9) == []
    assert cursor_of(path) == 0
    await store.apply(Incoming(messages=[build_message(1)], cursor=MailboxSeq(9)))
    assert len(await store.messages(TARGET, before=Seq(0), limit=9)) == 1
    assert cursor_of(path) == 9


@pytest.mark.shows("K3")
async def test_pushes_are_stored_without_touching_the_cursor(store: Store, path: Path) -> None:
    await store.apply(Incoming(messages=[build_message(1)], cursor=MailboxSeq(9)))
    applied = await store.apply(Incoming(messages=[build_message(2), build_message(2)]))
    assert [message.conversation_seq for message in applied.added] == [2]
    assert cursor_of(path) == 9


async def test_a_message_is_stored_once_and_shown_in_order_of_its_sequence(store: Store) -> None:
    await store.apply(Incoming(messages=[build_message(3), build_message(1)]))
    applied = await store.apply(Incoming(messages=[build_message(1), build_message(2)]))
    assert [message.conversation_seq for message in applied.added] == [2]
    shown = await store.messages(TARGET, before=Seq(0), limit=9)
    assert [message.conversation_seq for message in shown] == [1, 2, 3]
    assert [m.conversation_seq for m in await store.messages(TARGET, before=Seq(3), limit=1)] == [2]


@pytest.mark.shows("K4")
async def test_pending_is_released_by_the_acknowledgement_and_by_the_own_message(store: Store) -> None:
    loaded = await store.load(bound_device=None)
    first, second = await queue(store, loaded.device_id), await queue(store, loaded.device_id)
    ack = SendAck(first, CONVERSATION, Seq(1), build_message(1).message_id, Millis(5), False)
    applied = await store.apply(
        Incoming(acks=[ack], messages=[build_message(2, sender=ME, cmid=second, body=b"out")])
    )
    assert [done.client_message_id for done, _ in applied.acknowledged] == [first, second]
    assert (await store.load(bound_device=None)).pending == []
    assert [m.reserved_at for m in await store.messages(TARGET, before=Seq(0), limit=9)] == [5, 2]


@pytest.mark.shows("K6")
async def test_an_own_message_of_other_content_does_not_release_the_row_of_a_copy(store: Store) -> None:
    loaded = await store.load(bound_device=None)
    cmid = await queue(store, loaded.device_id, b"mine")
    applied = await store.apply(Incoming(messages=[build_message(1, sender=ME, cmid=cmid, body=b"theirs")]))
    assert applied.acknowledged == []
    assert [row.client_message_id for row in (await store.load(bound_device=None)).pending] == [cmid]


async def test_an_echo_is_held_only_if_its_message_is_here(store: Store) -> None:
    here, missing = Echo(CONVERSATION, Seq(1)), Echo(CONVERSATION, Seq(2))
    applied = await store.apply(Incoming(messages=[build_message(1, sender=ME)], echoes=[here, missing]))
    assert applied.missing_echoes == {missing}


@pytest.mark.shows("K6", "F-38")
async def test_messages_queued_around_a_renewal_are_kept_under_the_counter_of_their_place(
    store: Store,
) -> None:
    """All at once, so that one transaction would take them together."""
    device = (await store.load(bound_device=None)).device_id
    before = asyncio.ensure_future(queue(store, device))
    await asyncio.sleep(0)
    renewal = asyncio.ensure_future(store.renew_identity(is_device_bound=False))
    await asyncio.sleep(0)
    after = [asyncio.ensure_future(queue(store, device)) for _ in range(ORDINAL_BLOCK + 1)]
    renewed, *cmids = await asyncio.gather(renewal, before, *after)
    assert renewed != device
    pending = (await store.load(bound_device=None)).pending
    ordinal_of: dict[bytes, int] = {row.client_message_id: row.ordinal for row in pending}
    assert ordinal_of.keys() == set(cmids)
    old, *new = (ordinal_of[cmid] for cmid in cmids)
    assert all(abs(ordinal - old) > 2 * ORDINAL_BLOCK for ordinal in new), "the old counter was used again"


@pytest.mark.shows("K6", "F-37")
async def test_ordinals_are_reserved_before_use_and_never_again_after_a_rollback(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = await store.load(bound_device=None)
    used: list[int] = []
    original = StoreSteps.insert_pending

    def insert(steps: StoreSteps, row: object) -> None:
        used.append(row.ordinal)  # type: ignore[attr-defined]  # a pending row
        with closing(sqlite3.connect(path)) as other:
            reserved = other.execute("SELECT value FROM meta WHERE key = 'ordinal'").fetchone()[0]
        assert used[-1] < reserved
        if len(used) == 2:
            raise sqlite3.OperationalError("disk I/O error")
        original(steps, row)  # type: ignore[arg-type]  # a pending row

    monkeypatch.setattr(StoreSteps, "insert_pending", insert)
    for attempt in range(ORDINAL_BLOCK + 5):
        try:
            await queue(store, loaded.device_id)
        except StoreUnavailable:
            assert attempt == 1
    assert len(used) == len(set(used)) == ORDINAL_BLOCK + 5


@pytest.mark.shows("K6")
async def test_two_handles_on_one_file_never_share_an_ordinal_and_never_see_a_lock(path: Path) -> None:
    (one, _), (two, _) = await open_store(path), await open_store(path)
    device = (await one.load(bound_device=None)).device_id
    assert (await two.load(bound_device=None)).device_id == device
    cmids = await asyncio.gather(*(queue(store, device) for _ in range(150) for store in (one, two)))
    assert len(set(cmids)) == 300
    await asyncio.gather(*(store.close() for store in (one, two)))


async def test_many_openings_of_a_new_file_at_once_all_succeed(path: Path) -> None:
    opened = await asyncio.gather(*(open_store(path) for _ in range(8)))
    devices = {(await store.load(bound_device=None)).device_id for store, _ in opened}
    assert (len(devices), [rebuilt for _, rebuilt in opened if rebuilt]) == (1, [])
    await asyncio.gather(*(store.close() for store, _ in opened))


async def test_another_process_on_the_same_file_is_waited_for_not_reported(
    path: Path, tmp_path: Path
) -> None:
    store, _ = await open_store(path)
    device = (await store.load(bound_device=None)).device_id
    writer = start_writer(path, tmp_path / "promises")
    try:
        eventually(lambda: promises(tmp_path), what="the other process writes")
        for number in range(1_000_000, 1_000_300):
            await store.apply(Incoming(messages=[build_message(number)]))
            if number % 10 == 0:
                await queue(store, device)
                assert await store.messages(TARGET, before=Seq(0), limit=50)
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()
    cmids = [row.client_message_id.hex() for row in (await store.load(bound_device=None)).pending]
    assert len(cmids) == len(set(cmids))
    await store.close()


def start_writer(path: Path, promised: Path) -> "subprocess.Popen[bytes]":
    root = Path(__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.unit.client.store_writer", str(path), str(promised)], cwd=root
    )


def promises(tmp_path: Path) -> list[list[str]]:
    file = tmp_path / "promises"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.shows("K1", "K2", "K6", "F-37")
async def test_kill_nine_leaves_a_sound_file_whose_cursor_is_covered_and_whose_rows_are_kept(
    path: Path, tmp_path: Path
) -> None:
    chance = random.Random(7)
    for _ in range(5):
        before = len(promises(tmp_path))
        target = before + chance.randint(1, 40)
        writer = start_writer(path, tmp_path / "promises")
        eventually(lambda wanted=target: len(promises(tmp_path)) >= wanted, what="progress")  # type: ignore[misc]  # bound in this turn of the loop
        writer.send_signal(signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
        store, rebuilt = await open_store(path)
        assert rebuilt is None
        loaded = await store.load(bound_device=None)
        stored = await store.messages(TARGET, before=Seq(0), limit=1_000_000)
        seqs = [message.conversation_seq for message in stored if message.state is MessageState.STORED]
        assert seqs == list(range(1, int(loaded.cursor) + 1))
        kept = [row.client_message_id.hex() for row in loaded.pending]
        assert {cmid for _, cmid in promises(tmp_path)} <= set(kept)
        assert len(kept) == len(set(kept))
        await store.close()
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


async def filled(path: Path) -> tuple[bytes, list[bytes]]:
    store, _ = await open_store(path)
    loaded = await store.load(bound_device=None)
    cmids = [await queue(store, loaded.device_id) for _ in range(5)]
    page = [build_message(number, body=b"b" * 3_000) for number in range(1, 400)]
    await store.apply(Incoming(messages=page, cursor=MailboxSeq(400)))
    await store.close()
    return loaded.device_id, [bytes(cmid) for cmid in cmids]


@pytest.mark.shows("K6")
async def test_a_truncated_file_is_set_aside_and_its_unsent_messages_are_kept(path: Path) -> None:
    device, cmids = await filled(path)
    os.truncate(path, path.stat().st_size // 2)
    store, rebuilt = await open_store(path)
    assert rebuilt is not None
    assert (rebuilt.unsent_kept, rebuilt.unsent_complete) == (5, True)
    assert Path(rebuilt.set_aside).exists()
    loaded = await store.load(bound_device=None)
    assert [bytes(row.client_message_id) for row in loaded.pending] == cmids
    assert (loaded.cursor, loaded.device_id) == (0, device)
    later = await queue(store, loaded.device_id)
    assert bytes(later) not in cmids
    await store.close()
    _, again = reopened = await open_store(path)
    assert again is None
    await reopened[0].close()


async def test_an_overwritten_header_is_set_aside_and_the_unsent_messages_behind_it_are_kept(
    path: Path,
) -> None:
    device, cmids = await filled(path)
    with path.open("r+b") as file:
        file.write(b"\xff" * 4_096)
    store, rebuilt = await open_store(path)
    assert rebuilt is not None
    assert (rebuilt.unsent_kept, rebuilt.unsent_complete) == (5, True)
    loaded = await store.load(bound_device=None)
    assert ([bytes(row.client_message_id) for row in loaded.pending], loaded.device_id) == (cmids, device)
    await store.close()
    assert sorted(file.name for file in path.parent.iterdir()) == ["me.db", "me.db.damaged-1"]


async def test_unsent_messages_that_cannot_be_read_are_reported(path: Path) -> None:
    device, _ = await filled(path)
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    store, rebuilt = await open_store(path)
    assert rebuilt is not None
    assert (rebuilt.unsent_kept, rebuilt.unsent_complete) == (0, False)
    loaded = await store.load(bound_device=None)
    assert loaded.device_id != device
    await queue(store, loaded.device_id)
    await store.close()


@pytest.mark.shows("O13")
async def test_the_time_of_the_last_log_in_survives_damage(path: Path) -> None:
    await filled(path)
    store, _ = await open_store(path)
    before = await store.next_login()
    await store.close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2 // 4_096 * 4_096)
        file.write(b"\xff" * 4_096)
    schema.mark_damaged(path)
    store, rebuilt = await Store.open(path, me=ME, clock=ManualClock(now_ms=1_000))
    assert rebuilt is not None
    assert await store.next_login() == before + 1
    await store.close()


async def test_a_file_that_is_no_database_at_all_is_set_aside(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("these are my notes")
    store, rebuilt = await open_store(path)
    assert rebuilt is not None
    assert Path(rebuilt.set_aside).read_text() == "these are my notes"
    await store.close()


async def test_damage_while_open_ends_the_store_and_the_next_opening_mends_it(path: Path) -> None:
    _, cmids = await filled(path)
    store, _ = await open_store(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        # Every page but the first ones, where the outgoing rows lie.
        file.seek(12 * 4_096)
        file.write(b"\xff" * (size - 12 * 4_096))
    with pytest.raises(StoreDamaged, match="open it again"):
        await store.messages(TARGET, before=Seq(400), limit=400)
    with pytest.raises(StoreDamaged):
        await store.conversations()
    await store.close()
    mended, rebuilt = await open_store(path)
    assert rebuilt is not None
    kept = [bytes(row.client_message_id) for row in (await mended.load(bound_device=None)).pending]
    assert (kept == cmids) or not rebuilt.unsent_complete
    await mended.close()


async def test_a_crash_between_the_renames_of_a_rebuild_loses_no_unsent_row(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, cmids = await filled(path)
    os.truncate(path, path.stat().st_size // 2)
    original = Path.rename

    def crash(self: Path, target: Path) -> Path:
        if self.name.endswith(".new"):
            raise OSError("killed here")
        return original(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crash)
        with pytest.raises(StoreUnavailable, match="killed here"):
            await open_store(path)
    assert not path.exists()
    store, _ = await open_store(path)
    assert [bytes(row.client_message_id) for row in (await store.load(bound_device=None)).pending] == cmids
    await store.close()


OPEN_AS_NOBODY = """
import asyncio, os, sys
from pathlib import Path
from qim.client.store import Store
from qim.client.errors import StoreUnavailable
from qim.clock import SystemClock
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
try:
    asyncio.run(Store.open(Path(sys.argv[1]), me=b"m" * 16, clock=SystemClock()))
except StoreUnavailable as error:
    print(error)
"""


@pytest.mark.parametrize("is_new", [True, False])
async def test_a_directory_that_is_not_writable_is_a_clear_error(tmp_path: Path, is_new: bool) -> None:
    # Below /tmp by hand: the folders of pytest are closed to other users, who must be able to look here.
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp())
    try:
        path = folder / "me.db" if not is_new else folder / "new" / "me.db"
        if not is_new:
            store, _ = await open_store(path)
            await store.close()
            path.chmod(0o444)
        folder.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", OPEN_AS_NOBODY, str(path)],
            cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)
    assert str(path) in done.stdout, done.stderr
    assert any(word in done.stdout for word in ("permission", "Permission", "not permitted", "not writable"))


async def test_a_file_of_a_newer_version_is_refused_and_left_alone(path: Path) -> None:
    store, _ = await open_store(path)
    await store.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version=99")
    with pytest.raises(StoreUnavailable, match=r"newer version \(schema 99"):
        await open_store(path)
    assert [file.name for file in path.parent.iterdir() if "damaged" in file.name] == []


async def test_a_crash_between_schema_steps_continues(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = await open_store(path)
    await store.close()
    monkeypatch.setattr(schema, "STEPS", (*schema.STEPS, "CREATE TABLE later (x INTEGER)"))
    store, rebuilt = await open_store(path)
    assert rebuilt is None
    await store.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone()[0] == 2
        assert connection.execute("SELECT count(*) FROM later").fetchone()[0] == 0


@pytest.mark.shows("K2")
async def test_a_rebuild_sets_cursor_and_gaps_in_one_transaction_and_pages_close_them(store: Store) -> None:
    await store.apply(Incoming(messages=[build_message(n) for n in (1, 2, 3)], cursor=MailboxSeq(10)))
    item = RebuildItem(CONVERSATION, TARGET, Seq(9), Seq(4), Millis(1))
    await store.rebuild(cursor=MailboxSeq(77), items=[item])
    assert (await store.load(bound_device=None)).cursor == 77
    assert await store.gaps(TARGET) == [Gap(Seq(3), Seq(9))]
    newest = [build_message(number) for number in (8, 9)]
    await store.apply_history(
        target=TARGET, conversation_id=CONVERSATION, messages=newest, page=Gap(Seq(7), Seq(9))
    )
    assert await store.gaps(TARGET) == [Gap(Seq(3), Seq(7))]
    await store.apply_history(
        target=TARGET, conversation_id=CONVERSATION, messages=[], page=Gap(Seq(0), Seq(7))
    )
    assert await store.gaps(TARGET) == []


@pytest.mark.shows("M9")
async def test_a_push_that_came_before_the_rebuild_hides_no_hole_from_it(store: Store) -> None:
    await store.apply(Incoming(messages=[build_message(n) for n in (1, 2, 3)], cursor=MailboxSeq(10)))
    await store.apply(Incoming(messages=[build_message(n) for n in (7, 9)]))
    item = RebuildItem(CONVERSATION, TARGET, Seq(9), Seq(4), Millis(1))
    await store.rebuild(cursor=MailboxSeq(77), items=[item])
    assert sorted(await store.gaps(TARGET)) == [Gap(Seq(3), Seq(6)), Gap(Seq(7), Seq(8))]


@pytest.mark.shows("M9")
async def test_what_lies_before_the_first_message_of_a_conversation_is_a_gap_for_history(
    store: Store,
) -> None:
    await store.apply(Incoming(messages=[build_message(6)]))
    await store.apply(Incoming(messages=[build_message(7)]))
    assert await store.gaps(TARGET) == [Gap(Seq(0), Seq(5))]
    page = [build_message(number) for number in range(1, 6)]
    await store.apply_history(
        target=TARGET, conversation_id=CONVERSATION, messages=page, page=Gap(Seq(0), Seq(5))
    )
    assert await store.gaps(TARGET) == []
    assert len(await store.messages(TARGET, before=Seq(0), limit=9)) == 7


async def test_a_conversation_that_is_seen_from_its_begin_has_no_gap(store: Store) -> None:
    await store.apply(Incoming(messages=[build_message(1), build_message(3)]))
    assert await store.gaps(TARGET) == []


async def test_reading_lowers_unread_and_own_messages_are_never_unread(store: Store) -> None:
    await store.apply(Incoming(messages=[build_message(1), build_message(2), build_message(3)]))
    [conversation] = await store.conversations()
    assert conversation.unread == 3
    [conversation] = await store.set_read([(CONVERSATION, Seq(1)), (ConversationId(bytes(16)), Seq(9))])
    assert conversation.unread == 2
    await store.apply(Incoming(messages=[build_message(4, sender=ME)]))
    [conversation] = await store.conversations()
    assert (conversation.unread, conversation.read_seq) == (0, 4)


async def test_a_failed_row_stays_visible_is_not_loaded_and_may_be_discarded(store: Store) -> None:
    device = (await store.load(bound_device=None)).device_id
    cmid = await queue(store, device)
    assert not await store.discard(cmid)
    message = await store.end_pending(cmid, state=MessageState.FAILED, failure="refused", code=1002)
    assert message is not None
    assert (message.state, message.failure, message.failure_code) == (MessageState.FAILED, "refused", 1002)
    assert (await store.load(bound_device=None)).pending == []
    assert await store.discard(cmid)
    assert await store.messages(TARGET, before=Seq(0), limit=9) == []


async def test_a_closed_store_refuses_and_leaves_one_file(path: Path) -> None:
    store, _ = await open_store(path)
    await store.close()
    with pytest.raises(StoreUnavailable, match="is closed"):
        await store.conversations()
    assert [file.name for file in path.parent.iterdir()] == ["me.db"]
    assert path.stat().st_mode & 0o777 == 0o600

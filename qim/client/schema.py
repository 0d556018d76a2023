"""The local file: its tables, its schema steps, and what happens when it is damaged.

    meta          device_id, ordinal (next free one), cursor, login (time of the last one)
    conversation  one row per known conversation, with read mark and target
    message       one row per (conversation_id, conversation_seq)
    pending       the outgoing messages without an acknowledgement; the failed ones too
    gap           (after_seq, head_seq] of a conversation that only history can fill

`user_version` counts the schema steps; each step and its number are one transaction, so a crash between
two steps continues where it was. A file of a newer version is refused, never written.

A stop is unclean when a write-ahead log lies beside the file (the last clean close removes it), when the
size contradicts the header, or when the file was found damaged while open. Then `PRAGMA quick_check` runs
before anything else. A damaged file is set aside under a name of its own, never deleted. Its unsent rows
are read from both ends as far as they can be and go into the new file with their identities; everything
else comes back from the server, because the new cursor is 0.

Ordinals start at a random number below 2^62 and then count up. A file that lost its counter, or a second
file of the same device, therefore does not meet an ordinal that was used before.
"""

import secrets
import shutil
import sqlite3
import struct
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from qim.client.errors import StoreUnavailable
from qim.ids import ID_BYTES, DeviceId

BUSY_TIMEOUT_MS: Final = 10_000
"""How long one statement waits for another process before our own patience counts."""
OPEN_ATTEMPTS_MAX: Final = 100
OPEN_PAUSE_SECONDS: Final = 0.05

STEPS: Final = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value ANY) WITHOUT ROWID;
    CREATE TABLE conversation (
      conversation_id BLOB PRIMARY KEY, kind INTEGER NOT NULL, target BLOB NOT NULL,
      head_seq INTEGER NOT NULL DEFAULT 0, read_seq INTEGER NOT NULL DEFAULT 0,
      last_activity INTEGER NOT NULL DEFAULT 0
    ) WITHOUT ROWID;
    CREATE INDEX conversation_target ON conversation (kind, target);
    CREATE TABLE message (
      conversation_id BLOB NOT NULL, conversation_seq INTEGER NOT NULL, message_id BLOB NOT NULL,
      sender BLOB NOT NULL, sender_device BLOB NOT NULL, client_message_id BLOB NOT NULL,
      message_type INTEGER NOT NULL, custom_type TEXT NOT NULL, body BLOB NOT NULL,
      retention_class INTEGER NOT NULL, reserved_at INTEGER NOT NULL, own INTEGER NOT NULL
    );
    CREATE UNIQUE INDEX message_seq ON message (conversation_id, conversation_seq);
    CREATE TABLE pending (
      ordinal INTEGER PRIMARY KEY, client_message_id BLOB NOT NULL UNIQUE,
      kind INTEGER NOT NULL, target BLOB NOT NULL, message_type INTEGER NOT NULL, custom_type TEXT NOT NULL,
      body BLOB NOT NULL, retention_class INTEGER NOT NULL, first_sent_at INTEGER NOT NULL DEFAULT 0,
      state INTEGER NOT NULL, failure TEXT NOT NULL DEFAULT '', failure_code INTEGER NOT NULL DEFAULT 0
    );
    CREATE TABLE gap (
      conversation_id BLOB NOT NULL, after_seq INTEGER NOT NULL, head_seq INTEGER NOT NULL,
      PRIMARY KEY (conversation_id, after_seq)
    ) WITHOUT ROWID;
    """,
)
PENDING_COLUMNS: Final = (
    "ordinal, client_message_id, kind, target, message_type, custom_type, body, retention_class,"
    " first_sent_at, state, failure, failure_code"
)
PAGE_BYTES: Final = 4_096
_HEADER = struct.Struct(">16s H 10x I")
_MAGIC = b"SQLite format 3\x00"


class Rebuilt(NamedTuple):
    """What became of a damaged file."""

    set_aside: Path
    rows: list[tuple[Any, ...]]
    complete: bool
    device_id: DeviceId | None
    login: int
    """The time of the last log-in; 0 where it could not be read."""


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file itself is bad, as against busy, full or not writable."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def explain(error: BaseException, path: Path) -> str:
    """A sentence for a person: which file, what happened, what helps."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    remedies = {
        sqlite3.SQLITE_FULL: "the disk is full; free some space",
        sqlite3.SQLITE_READONLY: "it is not writable; check the permissions of the file and its directory",
        sqlite3.SQLITE_CANTOPEN: "it cannot be opened; check the permissions of its directory",
        sqlite3.SQLITE_IOERR: "the disk reported an error",
        sqlite3.SQLITE_BUSY: "another process keeps it locked",
    }
    return f"local store {path}: {remedies.get(code, error)}"


def open_store(path: Path) -> tuple[sqlite3.Connection, Rebuilt | None]:
    """Opens or creates the file, mends it if needed. Raises StoreUnavailable with the reason."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        rebuilt = _set_aside_if_damaged(path)
        return _open_patiently(path), rebuilt
    except (OSError, sqlite3.Error) as error:
        raise StoreUnavailable(explain(error, path)) from error


def _open_patiently(path: Path) -> sqlite3.Connection:
    # While a new file turns to its write-ahead log SQLite answers "locked" at once instead of waiting.
    for _ in range(OPEN_ATTEMPTS_MAX):
        try:
            return _open_current(path, None)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            threading.Event().wait(OPEN_PAUSE_SECONDS)
    return _open_current(path, None)


def mark_damaged(path: Path) -> None:
    """Makes the next opening check the file, whatever its header says."""
    with suppress(OSError):
        _check_mark(path).touch()


def _open_current(path: Path, rebuilt: Rebuilt | None) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None, check_same_thread=False
    )
    try:
        path.chmod(0o600)
        connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode=WAL")
        # A queued message must survive the machine, not only the process: FULL syncs the log at each commit.
        connection.execute("PRAGMA synchronous=FULL")
        migrate(connection, path)
        connection.execute("BEGIN IMMEDIATE")
        _fill_meta(connection, rebuilt)
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Runs the missing steps, each with its number in one transaction."""
    while True:
        connection.execute("BEGIN IMMEDIATE")
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        if version >= len(STEPS):
            connection.execute("ROLLBACK")
            break
        for statement in STEPS[version].split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version={version + 1}")
        connection.execute("COMMIT")
    if version > len(STEPS):
        raise StoreUnavailable(
            f"local store {path} was written by a newer version (schema {version}; known: {len(STEPS)})"
        )


def first_ordinal() -> int:
    """Where a counter begins; see the module docstring."""
    return secrets.randbits(62)


def new_device_id() -> DeviceId:
    return DeviceId(secrets.token_bytes(ID_BYTES))


def _fill_meta(connection: sqlite3.Connection, rebuilt: Rebuilt | None) -> None:
    device_id = rebuilt.device_id if rebuilt and rebuilt.device_id else new_device_id()
    fresh = {"device_id": device_id, "ordinal": first_ordinal(), "cursor": 0}
    fresh["login"] = rebuilt.login if rebuilt else 0
    connection.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?)", fresh.items())
    if rebuilt:
        marks = ",".join("?" * len(PENDING_COLUMNS.split(",")))
        connection.executemany(
            f"INSERT OR IGNORE INTO pending ({PENDING_COLUMNS}) VALUES ({marks})",  # noqa: S608 - constants
            rebuilt.rows,
        )


def _check_mark(path: Path) -> Path:
    return path.with_name(path.name + ".check")


def _set_aside_if_damaged(path: Path) -> Rebuilt | None:
    """Salvage, build the new file under another name, then swap: a crash in between loses no unsent row."""
    successor = path.with_name(path.name + ".new")
    if not path.exists() and successor.exists():
        # The crash came between two renames; the old log must not be taken for the new file's.
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        successor.rename(path)
    if not path.exists() or not _was_stopped_uncleanly(path) or _passes_check(path):
        _check_mark(path).unlink(missing_ok=True)
        return None
    mark_damaged(path)
    aside = _free_name(path)
    rebuilt = _salvage(path, aside)
    for suffix in ("", "-wal", "-shm"):
        successor.with_name(successor.name + suffix).unlink(missing_ok=True)
    _open_current(successor, rebuilt).close()
    for suffix in ("", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    successor.rename(path)
    _check_mark(path).unlink(missing_ok=True)
    return rebuilt


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return aside


def _was_stopped_uncleanly(path: Path) -> bool:
    if path.with_name(path.name + "-wal").exists() or _check_mark(path).exists():
        return True
    size = path.stat().st_size
    if size == 0:
        return False
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return True
    magic, page_bytes, pages = _HEADER.unpack(header)
    return bool(magic != _MAGIC or pages * (65_536 if page_bytes == 1 else page_bytes) != size)


def _passes_check(path: Path) -> bool:
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_MS / 1000)) as connection:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
    except sqlite3.DatabaseError as error:
        if is_damage(error):
            return False
        raise


def _salvage(path: Path, aside: Path) -> Rebuilt:
    rebuilt = _read_unsent(path, aside)
    if rebuilt.complete or rebuilt.rows:
        return rebuilt
    # Nothing could be read. The first page of every file of this schema says the same, so with a fresh one in
    # front a file whose header was overwritten often reads on. Tried on a copy; the damaged file stays.
    patched = aside.with_name(aside.name + ".patched")
    fresh = aside.with_name(aside.name + ".fresh")
    try:
        _open_current(fresh, None).close()
        shutil.copyfile(path, patched)
        with fresh.open("rb") as first, patched.open("r+b") as file:
            file.write(first.read(PAGE_BYTES))
        return _read_unsent(patched, aside)
    finally:
        for file_made in (patched, fresh):
            for suffix in ("", "-wal", "-shm"):
                file_made.with_name(file_made.name + suffix).unlink(missing_ok=True)


def _read_unsent(path: Path, aside: Path) -> Rebuilt:
    rows: dict[int, tuple[Any, ...]] = {}
    complete = True
    device_id: DeviceId | None = None
    login = 0
    with closing(sqlite3.connect(path)) as connection:
        # With this, SQLite also reads a file that is shorter than its header says; nothing is written.
        connection.execute("PRAGMA writable_schema=ON")
        for direction in ("ASC", "DESC"):
            try:
                for row in connection.execute(
                    f"SELECT {PENDING_COLUMNS} FROM pending ORDER BY ordinal {direction}"  # noqa: S608 - constants
                ):
                    rows[row[0]] = row
            except sqlite3.Error:
                complete = False
        with suppress(sqlite3.Error):
            found = connection.execute("SELECT value FROM meta WHERE key = 'device_id'").fetchone()
            device_id = DeviceId(bytes(found[0])) if found and len(found[0]) == ID_BYTES else None
        with suppress(sqlite3.Error):
            found = connection.execute("SELECT value FROM meta WHERE key = 'login'").fetchone()
            login = found[0] if found and isinstance(found[0], int) else 0
    return Rebuilt(aside, [row for _, row in sorted(rows.items())], complete, device_id, login)

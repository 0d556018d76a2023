"""Logs: the shape of a line, what never appears in it, and a reader that stalls."""

import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from qim.clock import ManualClock
from qim.errors import Conflict
from qim.ids import ConversationId, TenantId, UserId
from qim.logsetup import (
    EVENTS,
    LINE_BYTES_MAX,
    LineSink,
    Repeats,
    configure_logging,
    conversation_ref,
    set_reference_key,
    user_ref,
)
from tests.waiting import eventually


class Reader:
    """The read end of a pipe that serves as standard error."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.read_end, False)

    def text(self) -> str:
        found = b""
        try:
            while chunk := os.read(self.read_end, 1 << 20):
                found += chunk
        except BlockingIOError:
            pass
        return found.decode()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text().splitlines()]

    def close(self) -> None:
        os.close(self.read_end)
        os.close(self.write_end)


@pytest.fixture
def reader() -> Iterator[Reader]:
    handlers, level = logging.root.handlers, logging.root.level
    pipe = Reader()
    yield pipe
    pipe.close()
    structlog.reset_defaults()
    logging.root.handlers = handlers
    logging.root.setLevel(level)


def _configure(reader: Reader, **changes: Any) -> LineSink:
    settings: dict[str, Any] = {
        "level": "info",
        "process": "worker",
        "worker": 3,
        "descriptor": reader.write_end,
        "environ": {},
        "clock": ManualClock(now_ms=1_700_000_000_123),
    }
    return configure_logging(**(settings | changes))


def test_a_line_is_json_with_time_level_event_and_place(reader: Reader) -> None:
    _configure(reader)
    structlog.get_logger().info("worker_started", slot=7)
    assert reader.lines() == [
        {
            "ts": "2023-11-14T22:13:20.123Z",
            "level": "info",
            "event": "worker_started",
            "slot": 7,
            "process": "worker",
            "worker": 3,
            "pid": os.getpid(),
        }
    ]


def test_a_changed_level_reaches_loggers_that_exist(reader: Reader) -> None:
    _configure(reader, level="warning")
    log = structlog.get_logger()
    log.info("worker_started")
    _configure(reader, level="debug")
    log.debug("worker_ready")
    assert [line["event"] for line in reader.lines()] == ["worker_ready"]


def test_ids_bodies_and_tokens_never_appear(reader: Reader) -> None:
    _configure(reader)
    structlog.get_logger().info("frame_refused", token="canary", body="canary", user="canary", peer=b"canary")
    text = reader.text()
    assert "canary" not in text
    assert json.loads(text)["peer"] == "<6 bytes>"


def test_an_error_is_logged_by_class_and_place_without_its_text(reader: Reader) -> None:
    _configure(reader)
    try:
        raise Conflict("canary")
    except Conflict:
        structlog.get_logger().exception("role_stopped")
    (line,) = reader.lines()
    assert (line["error"], line["code"], line["retryable"], line["level"]) == (
        "Conflict",
        1004,
        False,
        "error",
    )
    assert "test_logsetup.py" in line["stack"][0]
    assert "canary" not in json.dumps(line)


def test_the_journal_gets_its_priority_and_others_do_not(reader: Reader) -> None:
    _configure(reader, environ={"JOURNAL_STREAM": "8:1"}, level="debug")
    log = structlog.get_logger()
    for level in ("debug", "info", "warning", "error"):
        getattr(log, level)("worker_slow")
    assert [line[:4] for line in reader.text().splitlines()] == ["<7>{", "<6>{", "<4>{", "<3>{"]


def test_the_console_format_is_for_people(reader: Reader) -> None:
    _configure(reader, log_format="console")
    structlog.get_logger().info("service_ready", port=7443)
    text = reader.text()
    assert "service_ready" in text
    assert not text.startswith("{")


def test_libraries_log_into_the_same_lines(reader: Reader) -> None:
    _configure(reader)
    logging.getLogger("some.library").warning("x" * 1000)
    logging.getLogger("some.library").debug("quiet")
    (line,) = reader.lines()
    assert (line["event"], line["library"], line["level"], len(line["text"])) == (
        "library_logged",
        "some.library",
        "warning",
        300,
    )


def test_a_full_pipe_drops_and_counts_instead_of_waiting(reader: Reader) -> None:
    fcntl.fcntl(reader.write_end, fcntl.F_SETPIPE_SZ, 4096)
    sink = LineSink(reader.write_end)
    for _ in range(10):
        sink.write(b"x" * 1000)
    assert sink.dropped > 0
    assert os.get_blocking(reader.write_end), (
        "the flag is shared with other processes and must not be touched"
    )
    dropped = sink.dropped
    assert reader.text().count("\n") == 10 - dropped
    sink.write(b"again")
    assert (sink.dropped, reader.text()) == (dropped, "again\n")


@pytest.mark.shows("F-36")
def test_a_full_disk_costs_lines_and_not_the_service() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        sink = LineSink(descriptor)
        sink.write(b"one")
        sink.write(b"two")
        assert sink.dropped == 2
    finally:
        os.close(descriptor)


def test_a_line_that_a_full_disk_cut_does_not_run_into_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    sink = LineSink(descriptor)
    whole = os.write
    monkeypatch.setattr(os, "write", lambda target, data: whole(target, data[:3]))
    sink.write(b"first")
    monkeypatch.undo()
    sink.write(b"second")
    sink.write(b"third")
    os.close(descriptor)
    assert path.read_bytes() == b"fir\nsecond\nthird\n"
    assert sink.dropped == 1


def test_a_reader_that_has_gone_costs_lines_and_not_the_service() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        sink = LineSink(writer)
        sink.write(b"nobody reads this")
        assert sink.dropped == 1
    finally:
        os.close(writer)


def test_a_line_longer_than_a_pipe_takes_at_once_is_cut(reader: Reader) -> None:
    LineSink(reader.write_end).write(b"x" * 10_000)
    assert len(reader.text()) == LINE_BYTES_MAX


def test_a_full_socket_drops_whole_lines_and_never_mixes_them() -> None:
    ours, theirs = socket.socketpair()
    sink = LineSink(ours.fileno())
    line = b"y" * 50_000
    while sink.dropped < 3:
        sink.write(line)
    received = bytearray()
    theirs.setblocking(False)

    def drained() -> bool:
        try:
            while chunk := theirs.recv(1 << 20):
                received.extend(chunk)
        except BlockingIOError:
            return True
        return False

    eventually(drained, what="the socket is empty")
    sink.write(b"end")
    drained()
    parts = bytes(received).split(b"\n")
    assert parts[-2:] == [b"end", b""]
    assert set(parts[:-2]) == {line}
    sink.close()
    ours.close()
    theirs.close()


def test_references_compare_within_a_key_and_differ_between_kinds_tenants_and_keys() -> None:
    user = b"u" * 16
    set_reference_key(b"one")
    first = user_ref(TenantId(1), UserId(user))
    assert len(first) == 16
    assert first == user_ref(TenantId(1), UserId(user))
    assert first != user_ref(TenantId(2), UserId(user))
    assert first != conversation_ref(TenantId(1), ConversationId(user))
    set_reference_key(b"two")
    assert first != user_ref(TenantId(1), UserId(user))
    set_reference_key(b"one")
    assert first == user_ref(TenantId(1), UserId(user))
    set_reference_key(b"")


def test_repeats_are_logged_at_once_and_then_counted_per_interval() -> None:
    repeats = Repeats(interval_ms=10)
    assert [repeats.count(now_ms=now) for now in (0, 1, 9, 10, 11, 30)] == [1, 0, 0, 3, 0, 2]


def test_events_are_words_of_noun_and_verb_with_a_meaning() -> None:
    assert list(EVENTS) == sorted(EVENTS)
    assert all(event.replace("_", "").isalpha() and event.islower() for event in EVENTS)
    assert all(meaning.endswith(".") for meaning in EVENTS.values())

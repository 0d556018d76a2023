"""Logs: one JSON line per event on standard error, from a closed list of events.

An event is a fixed word (noun, then past verb) with fields; values never become part of the word, so a search
finds every occurrence and a test finds every use. No line carries an id, a body, a token or the text of a
peer: `user_ref` and `conversation_ref` give keyed digests that compare equal within one key and say nothing
without it, raw bytes are shown as their length, and an exception as its class, its fields in our error tree
and where it was raised.

Nothing per message is logged above DEBUG. Something that repeats is counted by `Repeats` and logged once per
10 s.

A log reader that stalls must never stop a worker. `LineSink` therefore writes only what fits without waiting:
to a socket (the journal) with a flag on each send, to a pipe after asking whether a line fits. It never makes
the descriptor itself non-blocking, because that flag would be shared with every process that holds it. What
does not fit is dropped and counted; the worker publishes the count. On a terminal the lines are for people,
elsewhere JSON.
"""

import logging
import os
import select
import socket
import stat
import sys
import traceback
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any, Final

import orjson
import structlog
from blake3 import blake3

from qim.clock import Clock, SystemClock
from qim.errors import ClientError
from qim.ids import ConversationId, TenantId, UserId

EVENTS: Final[Mapping[str, str]] = {
    "child_died": "A child ended unexpectedly; it is started again after the named delay.",
    "child_ended": "A child ended as it was asked to.",
    "child_failed": "A child stopped on an error that is a defect; the stack says where.",
    "child_fenced": "A child stopped because a newer owner took one of its slots.",
    "child_flapping": "A child died so often that the service reports itself as not ready.",
    "child_forked": "A child was started.",
    "claim_not_released": "A slot could not be given back at the end; its next owner takes it anyway.",
    "config_needs_restart": "Changed keys that a reload cannot take over wait for a restart.",
    "config_reload_refused": "A changed configuration was not taken over; the old one stays.",
    "config_reloaded": "A changed configuration was taken over.",
    "connection_slow": "Connections were closed because their clients did not read.",
    "control_failed": "A command on the control socket failed on a defect; the caller was told.",
    "descriptor_limit_raised": "This process may open more files than it was started with.",
    "dispatch_append_unknown": "A dispatch batch has an unknown outcome; it is repeated as it was.",
    "drain_deadline_missed": "A child did not stop in time and was killed.",
    "drain_finished": "Everything accepted is finished or left for the next start to recover.",
    "drain_hurried": "A second signal cut the stop short.",
    "drain_stage": "The stop entered its next stage.",
    "drain_started": "The service was asked to stop.",
    "drain_unfinished": "A role reached the end of its time with work that the next start recovers.",
    "frame_refused": "Connections were closed because of broken frames.",
    "library_logged": "A library wrote to its own logger.",
    "link_broken": "A link carried a frame that no worker sends; it is cut.",
    "link_lost": "The link to another worker ended; it is made again.",
    "link_overrun": "A peer took nothing for too long; the link is cut, its open requests are unknown.",
    "link_refused": "Another worker runs with a different map or version; the two do not talk.",
    "link_up": "The link to another worker carries frames.",
    "listener_refused": "A listening socket could not be opened.",
    "log_not_trimmed": "A log could not be trimmed; it grows until the next try succeeds.",
    "log_read_failed": "A log could not be read; the reader tries again from its position.",
    "log_retention": "How long the logs keep what every consumer has finished; a rebuild covers that only.",
    "members_not_loaded": "The store with the members of a group did not answer; the fan-out waits for it.",
    "outbox_append_unknown": "An Outbox batch has an unknown outcome; the recoverer finishes it.",
    "outbox_broken": "An Outbox partition takes nothing; sends are refused until it does, reads go on.",
    "pending_unfinishable": "The recoverer cannot finish a half-done message; an operator is needed.",
    "position_not_stored": "A position could not be stored; the batch will be repeated without harm.",
    "processors_kept_awake": "Idle processors spin as long as this server runs (server.keep_awake).",
    "record_redelivered": "A skipped record was delivered again because an operator said so.",
    "record_skipped": "A record was skipped because an operator said so.",
    "recoverer_could_not_read": "The recoverer could not read what is pending; it tries again.",
    "role_not_opened": "A role could not read where it stands; it asks again until its store answers.",
    "role_stopped": "A role stopped on an error that it must not survive.",
    "service_halted": "A child ended for a reason that a restart cannot mend; the service stops.",
    "service_ready": "Every worker serves.",
    "shard_held": "A shard waits for its store and tries again; the others go on.",
    "shard_retried": "A stopped shard tries its record again because an operator said so.",
    "slot_resumed": "A stopped slot goes on because an operator said so.",
    "slot_stopped": "A slot holds contradicting data and waits for an operator; the others go on.",
    "snapshot_missing": "The members of a group at a version are not there; what needs them stops its slot.",
    "start_refused": "A start-up check said no; the reason names the setting and the remedy.",
    "store_lost": "The connection to a store ended; what was in flight is unknown and will be repeated.",
    "store_reached": "A store answers again.",
    "supervisor_paused": "The supervisor woke late: the whole host was paused, nobody is judged this round.",
    "watchdog_withheld": "The service manager was not told that all is well, because it is not.",
    "worker_fenced": "This worker stopped because a newer owner took one of its slots.",
    "worker_killed": "A child was killed by somebody else, often for want of memory.",
    "worker_ready": "This worker serves its slots.",
    "worker_silent": "A worker's loop did not beat for seconds and is being replaced.",
    "worker_slow": "A worker's loop did not beat for a second.",
    "worker_started": "This worker begins to prepare its slots.",
    "worker_waiting": "A worker waits for a store before it can serve.",
}
"""Every event that may be logged, and what it means to an operator."""

LEVELS: Final[Mapping[str, int]] = {"debug": 10, "info": 20, "warning": 30, "error": 40}
JOURNAL_PRIORITIES: Final[Mapping[str, int]] = {
    "debug": 7,
    "info": 6,
    "warning": 4,
    "error": 3,
    "critical": 3,
}
NEVER_LOGGED: Final = frozenset(
    {"body", "client_message_id", "conversation", "device", "password", "token", "user"}
)
LINE_BYTES_MAX: Final = 4096
"""A pipe takes at most this much in one piece (PIPE_BUF), and then never half of it."""
STACK_FRAMES_MAX: Final = 16
"""The innermost ones; they fit into a line together with the fields."""
PENDING_BYTES_MAX: Final = 1_048_576
LIBRARY_TEXT_CHARACTERS_MAX: Final = 300
REPEAT_INTERVAL_MS: Final = 10_000
REFERENCE_BYTES: Final = 8

Fields = MutableMapping[str, Any]


class LineSink:
    """Writes whole lines to a descriptor without ever waiting for its reader."""

    def __init__(self, descriptor: int) -> None:
        mode = os.fstat(descriptor).st_mode
        self.dropped = 0
        self._descriptor = descriptor
        self._is_pipe = stat.S_ISFIFO(mode)
        self._socket = socket.socket(fileno=os.dup(descriptor)) if stat.S_ISSOCK(mode) else None
        self._pending = b""
        self._is_cut = False
        """The last line that was begun has no end yet: the disk became full in its middle."""
        if self._socket is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PENDING_BYTES_MAX)

    def write(self, line: bytes) -> None:
        """Writes the line, or counts it as dropped."""
        if self._socket is not None:
            self._send(self._socket, line + b"\n")
        elif not self._is_pipe:
            self._write(line + b"\n")
        elif self._fits():
            self._write(line[: LINE_BYTES_MAX - 1] + b"\n")
        else:
            self.dropped += 1

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _write(self, line: bytes) -> None:
        """A full disk or a reader that has gone costs lines, never the service."""
        data = b"\n" + line if self._is_cut else line
        try:
            written = os.write(self._descriptor, data)
        except OSError:
            written = 0
        if written < len(data):
            self.dropped += 1
        if written:
            self._is_cut = written < len(data)

    def _fits(self) -> bool:
        poller = select.poll()
        poller.register(self._descriptor, select.POLLOUT)
        return any(event & select.POLLOUT for _descriptor, event in poller.poll(0))

    def _send(self, stream: socket.socket, line: bytes) -> None:
        """A half-sent line goes first the next time, so that lines never mix."""
        try:
            if self._pending:
                self._pending = self._pending[stream.send(self._pending, socket.MSG_DONTWAIT) :]
            if self._pending:
                self.dropped += 1
                return
            self._pending = line[stream.send(line, socket.MSG_DONTWAIT) :]
        except OSError:
            self.dropped += 1


class SinkLogger:
    """The last link of the chain: takes the finished line."""

    def __init__(self, sink: LineSink) -> None:
        self._sink = sink

    def msg(self, line: bytes | str) -> None:
        self._sink.write(line.encode(errors="replace") if isinstance(line, str) else line)

    debug = info = warning = error = critical = exception = msg


class Repeats:
    """Counts something that repeats and says once per interval how often it happened. Time is passed in."""

    def __init__(self, interval_ms: int = REPEAT_INTERVAL_MS) -> None:
        self._interval_ms = interval_ms
        self._count = 0
        self._quiet_until_ms: int | None = None

    def count(self, *, now_ms: int) -> int:
        """The number to log now, or 0 for "not yet". The first occurrence is logged at once."""
        self._count += 1
        if self._quiet_until_ms is not None and now_ms < self._quiet_until_ms:
            return 0
        self._quiet_until_ms = now_ms + self._interval_ms
        counted, self._count = self._count, 0
        return counted


_reference_key = os.urandom(32)


def set_reference_key(secret: bytes) -> None:
    """Makes references comparable between restarts; without a secret they compare within one start only."""
    global _reference_key  # noqa: PLW0603 - one key per process, set once before fork, read by every log line
    _reference_key = (
        blake3(secret, derive_key_context="qim log references v1").digest() if secret else os.urandom(32)
    )


def user_ref(tenant: TenantId, user: UserId) -> str:
    """A reference to a user for logs and tools."""
    return _reference(b"u", tenant, user)


def conversation_ref(tenant: TenantId, conversation: ConversationId) -> str:
    """A reference to a conversation for logs and tools."""
    return _reference(b"c", tenant, conversation)


def _reference(kind: bytes, tenant: int, identifier: bytes) -> str:
    return blake3(kind + tenant.to_bytes(4) + identifier, key=_reference_key).hexdigest(REFERENCE_BYTES)


def configure_logging(
    *,
    level: str,
    log_format: str = "auto",
    process: str,
    worker: int | None = None,
    descriptor: int = 2,
    environ: Mapping[str, str] | None = None,
    clock: Clock | None = None,
) -> LineSink:
    """Sets the whole process up; called once after each fork and again when the level changes."""
    environ = os.environ if environ is None else environ
    sink = LineSink(descriptor)
    on_terminal = os.isatty(descriptor)
    console = log_format == "console" or (log_format == "auto" and on_terminal)
    renderer = (
        structlog.dev.ConsoleRenderer(colors=on_terminal and not environ.get("NO_COLOR"))
        if console
        else _JsonRenderer(journal=bool(environ.get("JOURNAL_STREAM")))
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            _Stamp(clock or SystemClock(), process=process, worker=worker),
            _hide_content,
            _describe_error,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=lambda *_arguments: SinkLogger(sink),
        # Not cached: a changed level must reach loggers that exist already, and nothing hot logs.
        cache_logger_on_first_use=False,
    )
    logging.root.handlers = [_LibraryBridge()]
    logging.root.setLevel(max(LEVELS[level], LEVELS["info"]))
    return sink


class _Stamp:
    """Adds when and where."""

    def __init__(self, clock: Clock, *, process: str, worker: int | None) -> None:
        self._clock = clock
        self._where: dict[str, object] = {"process": process, "pid": os.getpid()}
        if worker is not None:
            self._where["worker"] = worker

    def __call__(self, _logger: object, _method: str, event: Fields) -> Fields:
        now = datetime.fromtimestamp(self._clock.now_ms() / 1000, tz=UTC)
        return {"ts": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"), **event, **self._where}


def _hide_content(_logger: object, _method: str, event: Fields) -> Fields:
    """Raw bytes are ids or bodies, and some fields are never logged whatever they hold."""
    for key, value in event.items():
        if key in NEVER_LOGGED:
            event[key] = "***"
        elif isinstance(value, bytes | bytearray | memoryview):
            event[key] = f"<{len(value)} bytes>"
    return event


def _describe_error(_logger: object, _method: str, event: Fields) -> Fields:
    """An exception becomes its class, our fields and its place; its text may quote a peer and stays out."""
    info = event.pop("exc_info", None)
    error = sys.exc_info()[1] if info is True else info[1] if isinstance(info, tuple) else info
    if isinstance(error, BaseException):
        event["error"] = type(error).__name__
        if isinstance(error, ClientError):
            event.update(code=error.code, retryable=error.retryable)
        frames = traceback.extract_tb(error.__traceback__)[-STACK_FRAMES_MAX:]
        event["stack"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    return event


class _JsonRenderer:
    """One line of JSON, with the priority that the journal reads in front of it."""

    def __init__(self, *, journal: bool) -> None:
        self._journal = journal

    def __call__(self, _logger: object, method: str, event: Fields) -> bytes:
        line = orjson.dumps(event, default=lambda value: type(value).__name__, option=orjson.OPT_NON_STR_KEYS)
        return b"<%d>%b" % (JOURNAL_PRIORITIES.get(method, 6), line) if self._journal else line


class _LibraryBridge(logging.Handler):
    """Brings what libraries log into the same lines."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger()
        text = record.getMessage()[:LIBRARY_TEXT_CHARACTERS_MAX]
        log.log(
            max(LEVELS["info"], min(record.levelno, LEVELS["error"])),
            "library_logged",
            library=record.name,
            text=text,
            exc_info=record.exc_info,
        )

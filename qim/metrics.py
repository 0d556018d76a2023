"""The closed catalogue of metrics, and the plain counters that the roles add to.

Every metric is one field of `Metrics`: its name, kind, unit and meaning stand beside it, and nothing else is
ever counted. Hot loops write `metrics.writer_commits += n`: no lookup, no label, no lock, because one thread
of one process owns the object. Once a second the worker publishes a snapshot into its part of the shared
page; whoever reads the page renders it. So a worker that hangs is still reported, and rendering never costs a
worker loop time.

A snapshot is a fixed run of doubles, in the order of the fields (exact for whole numbers below 2^53):

    0        8          16         24                                24 + 8·n    32 + 8·n
    ┌────────┬──────────┬──────────┬─────────────────────────────────┬───────────┐
    │ layout │ sequence │ checksum │ n doubles: counters, gauges,    │ sequence  │
    │ u64    │ u64      │ u64      │ histograms, one per slot, …     │ u64       │
    └────────┴──────────┴──────────┴─────────────────────────────────┴───────────┘

`layout` is a digest of the catalogue: a reader of another version sees nothing rather than nonsense. The
sequence before and after differ while a snapshot is being written; with the checksum a torn read is always
seen and is simply read again a second later. When the writer dies, its last snapshot stays.
"""

import struct
import zlib
from dataclasses import dataclass, field, fields
from math import ceil
from typing import Annotated, Final, Literal, get_args, get_origin, get_type_hints

from blake3 import blake3

from qim.limits import SLOTS

Kind = Literal["counter", "gauge", "histogram"]

HISTOGRAM_BOUNDS_SECONDS: Final[tuple[float, ...]] = tuple(0.00025 * 2**step for step in range(16))
"""0.25 ms, doubling, up to 8.192 s, then infinity: one ratio everywhere makes quantiles equally exact
everywhere.
"""

SCRIPTS: Final[tuple[str, ...]] = (
    "claim_slot",
    "reserve_messages",
    "commit_messages",
    "mark_committed",
    "read_pending",
    "read_history",
    "mark_read",
    "materialise_dispatches",
    "begin_dispatch",
    "append_entries",
    "finish_dispatch",
    "read_mailbox",
    "append_log",
    "trim_log",
    "store_position",
    "turn_day",
    "create_group",
    "change_membership",
)


@dataclass(frozen=True, slots=True)
class Series:
    """What one field of `Metrics` is called outside, and what it means."""

    name: str
    kind: Kind
    meaning: str
    unit: str = ""
    labels: str = ""
    """Fixed labels of this field, as they are rendered; `slot` and `script` are added by the shape of
    the field.
    """


class Histogram:
    """Counts per bound and a sum. The bound is found by the length of an integer, without a search."""

    __slots__ = ("counts", "total_seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(HISTOGRAM_BOUNDS_SECONDS) + 1)
        self.total_seconds = 0.0

    def observe(self, seconds: float, *, times: int = 1) -> None:
        """Counts one duration, or the same one for a whole batch."""
        steps = ceil(seconds * 4000.0)
        index = (steps - 1).bit_length() if steps > 1 else 0
        self.counts[index if index < len(self.counts) else -1] += times
        self.total_seconds += seconds * times


def _per_slot() -> list[int]:
    return [0] * SLOTS


def _per_script() -> dict[str, Histogram]:
    return {script: Histogram() for script in SCRIPTS}


@dataclass(slots=True, eq=False)
class Metrics:
    """Everything that one process counts."""

    # --- process -------------------------------------------------------------------------------------
    loop_lag: Annotated[
        Histogram,
        Series("qim_worker_loop_lag_seconds", "histogram", "How late the loop's heartbeat timer fired."),
    ] = field(default_factory=Histogram)
    gc_pause: Annotated[
        Histogram, Series("qim_worker_gc_pause_seconds", "histogram", "Pauses of the garbage collector.")
    ] = field(default_factory=Histogram)
    rss_bytes: Annotated[int, Series("qim_worker_rss_bytes", "gauge", "Resident memory.", "bytes")] = 0
    cpu_seconds: Annotated[
        float,
        Series("qim_worker_cpu_seconds_total", "counter", "Processor time, user and system.", "seconds"),
    ] = 0.0
    log_dropped: Annotated[
        int, Series("qim_log_dropped_total", "counter", "Log lines dropped because nobody read the pipe.")
    ] = 0

    # --- gateway -------------------------------------------------------------------------------------
    connections: Annotated[int, Series("qim_gateway_connections", "gauge", "Open client connections.")] = 0
    accepts: Annotated[int, Series("qim_gateway_accepts_total", "counter", "Accepted connections.")] = 0
    handshake: Annotated[
        Histogram,
        Series("qim_gateway_handshake_seconds", "histogram", "From accept to a finished TLS handshake."),
    ] = field(default_factory=Histogram)
    frames_in: Annotated[
        int, Series("qim_gateway_frames_total", "counter", "Frames read.", labels='direction="in"')
    ] = 0
    frames_out: Annotated[
        int, Series("qim_gateway_frames_total", "counter", "Frames written.", labels='direction="out"')
    ] = 0
    bytes_in: Annotated[
        int, Series("qim_gateway_bytes_total", "counter", "Bytes read, decrypted.", "bytes", 'direction="in"')
    ] = 0
    bytes_out: Annotated[
        int,
        Series(
            "qim_gateway_bytes_total", "counter", "Bytes written, before TLS.", "bytes", 'direction="out"'
        ),
    ] = 0
    send_queue_bytes: Annotated[
        int, Series("qim_gateway_send_queue_bytes", "gauge", "Bytes that wait for slow clients.", "bytes")
    ] = 0
    slow_disconnects: Annotated[
        int,
        Series(
            "qim_slow_consumer_disconnects_total", "counter", "Connections closed because they did not read."
        ),
    ] = 0
    auth_refused: Annotated[
        int, Series("qim_auth_failures_total", "counter", "Tokens refused.", labels='reason="token"')
    ] = 0
    auth_late: Annotated[
        int, Series("qim_auth_failures_total", "counter", "No sign-in in time.", labels='reason="timeout"')
    ] = 0
    protocol_errors: Annotated[
        int, Series("qim_gateway_protocol_errors_total", "counter", "Connections closed for a broken frame.")
    ] = 0
    shed_rate: Annotated[
        int, Series("qim_requests_shed_total", "counter", "Refused: rate limit.", labels='reason="rate"')
    ] = 0
    shed_queue: Annotated[
        int,
        Series(
            "qim_requests_shed_total", "counter", "Refused: a role's queue is full.", labels='reason="queue"'
        ),
    ] = 0
    shed_connections: Annotated[
        int,
        Series(
            "qim_requests_shed_total",
            "counter",
            "Refused: too many connections.",
            labels='reason="connections"',
        ),
    ] = 0
    link_unavailable: Annotated[
        int, Series("qim_link_unavailable_total", "counter", "Requests whose owner could not be reached.")
    ] = 0
    link_pushes_dropped: Annotated[
        int,
        Series(
            "qim_link_pushes_dropped_total", "counter", "Pushes dropped at a full link; a pull brings them."
        ),
    ] = 0

    # --- path ----------------------------------------------------------------------------------------
    message_ack: Annotated[
        Histogram, Series("qim_message_ack_seconds", "histogram", "From a read SEND to its written SEND_ACK.")
    ] = field(default_factory=Histogram)
    message_delivery: Annotated[
        Histogram, Series("qim_message_delivery_seconds", "histogram", "From the reserved time to the push.")
    ] = field(default_factory=Histogram)
    writer_batches: Annotated[
        int, Series("qim_role_batch_size_count", "counter", "Passes of the writer.", labels='role="writer"')
    ] = 0
    writer_batch_messages: Annotated[
        int, Series("qim_role_batch_size_sum", "counter", "Messages in them.", labels='role="writer"')
    ] = 0
    fanout_batches: Annotated[
        int, Series("qim_role_batch_size_count", "counter", "Passes of the fan-out.", labels='role="fanout"')
    ] = 0
    fanout_batch_messages: Annotated[
        int, Series("qim_role_batch_size_sum", "counter", "Records in them.", labels='role="fanout"')
    ] = 0
    mailbox_batches: Annotated[
        int, Series("qim_role_batch_size_count", "counter", "Passes of the mailbox.", labels='role="mailbox"')
    ] = 0
    mailbox_batch_messages: Annotated[
        int, Series("qim_role_batch_size_sum", "counter", "Records in them.", labels='role="mailbox"')
    ] = 0
    writer_pass: Annotated[
        Histogram,
        Series("qim_role_pass_seconds", "histogram", "One pass of the writer.", labels='role="writer"'),
    ] = field(default_factory=Histogram)
    fanout_pass: Annotated[
        Histogram,
        Series("qim_role_pass_seconds", "histogram", "One pass of the fan-out.", labels='role="fanout"'),
    ] = field(default_factory=Histogram)
    mailbox_pass: Annotated[
        Histogram,
        Series("qim_role_pass_seconds", "histogram", "One pass of the mailbox.", labels='role="mailbox"'),
    ] = field(default_factory=Histogram)
    writer_queue: Annotated[
        int,
        Series("qim_role_queue_depth", "gauge", "Messages waiting for the writer.", labels='role="writer"'),
    ] = 0
    mailbox_queue: Annotated[
        int,
        Series("qim_role_queue_depth", "gauge", "Records waiting for the mailbox.", labels='role="mailbox"'),
    ] = 0

    # --- writer, fan-out, mailbox --------------------------------------------------------------------
    writer_commits: Annotated[
        int, Series("qim_writer_commits_total", "counter", "Messages committed, each counted once.")
    ] = 0
    writer_duplicates: Annotated[
        int, Series("qim_writer_duplicates_total", "counter", "Repeats that got the first answer again.")
    ] = 0
    writer_conflicts: Annotated[
        int, Series("qim_writer_conflicts_total", "counter", "Repeats with other content, refused.")
    ] = 0
    writer_unknown: Annotated[
        int,
        Series(
            "qim_writer_unknown_total", "counter", "Messages whose outcome the client must ask for again."
        ),
    ] = 0
    writer_recovered: Annotated[
        int,
        Series("qim_writer_recovered_total", "counter", "Half-done messages that the recoverer finished."),
    ] = 0
    writer_membership_events: Annotated[
        int,
        Series("qim_writer_membership_events_total", "counter", "Changes of members, an event each."),
    ] = 0
    writer_membership_retries: Annotated[
        int,
        Series(
            "qim_writer_membership_retry_total",
            "counter",
            "Messages and changes planned anew because the members of their group had changed.",
        ),
    ] = 0
    fanout_dispatches: Annotated[
        int, Series("qim_fanout_dispatches_total", "counter", "Dispatch records appended.")
    ] = 0
    mailbox_entries: Annotated[
        int, Series("qim_mailbox_entries_total", "counter", "Mailbox entries that became visible.")
    ] = 0
    mailbox_pulls: Annotated[int, Series("qim_mailbox_pulls_total", "counter", "Mailbox pages read.")] = 0
    pushes: Annotated[
        int, Series("qim_mailbox_pushes_total", "counter", "Pushes handed to a connection.")
    ] = 0

    # --- cursors, one number per slot ----------------------------------------------------------------
    fanout_lag: Annotated[
        list[int],
        Series(
            "qim_slot_lag_records", "gauge", "Outbox records not yet dispatched.", labels='consumer="fanout"'
        ),
    ] = field(default_factory=_per_slot)
    mailbox_lag: Annotated[
        list[int],
        Series(
            "qim_slot_lag_records", "gauge", "Dispatches not yet in mailboxes.", labels='consumer="mailbox"'
        ),
    ] = field(default_factory=_per_slot)
    watermark: Annotated[
        list[int], Series("qim_slot_watermark", "gauge", "Newest mailbox sequence that is complete.")
    ] = field(default_factory=_per_slot)
    watermark_moved_ms: Annotated[
        list[int],
        Series(
            "qim_slot_watermark_moved_timestamp_ms",
            "gauge",
            "When it last moved, wall clock.",
            "milliseconds",
        ),
    ] = field(default_factory=_per_slot)
    slot_stopped: Annotated[
        list[int], Series("qim_slot_stopped", "gauge", "1: refuses to go on until an operator decides.")
    ] = field(default_factory=_per_slot)

    # --- stores --------------------------------------------------------------------------------------
    redis_script: Annotated[
        dict[str, Histogram],
        Series("qim_redis_command_seconds", "histogram", "From a script's call to its answer."),
    ] = field(default_factory=_per_script)
    redis_unknown: Annotated[
        int, Series("qim_redis_errors_total", "counter", "Outcome unknown.", labels='reason="unknown"')
    ] = 0
    redis_refused: Annotated[
        int, Series("qim_redis_errors_total", "counter", "Proved no.", labels='reason="refused"')
    ] = 0
    redis_broken: Annotated[
        int,
        Series("qim_redis_errors_total", "counter", "An answer that must not be.", labels='reason="broken"'),
    ] = 0
    redis_reconnects: Annotated[
        int, Series("qim_redis_reconnects_total", "counter", "Connections made again after a loss.")
    ] = 0

    def snapshot(self, *, sequence: int = 1) -> bytes:
        """The bytes for the shared page. The caller raises the sequence each time."""
        body = _BODY.pack(*self._values())
        return b"".join((_HEAD.pack(_LAYOUT, sequence, zlib.crc32(body)), body, _TAIL.pack(sequence)))

    def _values(self) -> list[float]:
        values: list[float] = []
        for name in CATALOGUE:
            value = getattr(self, name)
            if isinstance(value, Histogram):
                values += (*value.counts, value.total_seconds)
            elif isinstance(value, list):
                values += value
            elif isinstance(value, dict):
                for histogram in value.values():
                    values += (*histogram.counts, histogram.total_seconds)
            else:
                values.append(value)
        return values


def _list_series() -> dict[str, tuple[Series, type]]:
    hints = get_type_hints(Metrics, include_extras=True)
    found = {}
    for part in fields(Metrics):
        shape, series = get_args(hints[part.name])
        found[part.name] = (series, get_origin(shape) or shape)
    return found


CATALOGUE: Final = _list_series()
"""Field → its series and its shape, in the order of the snapshot."""

_HISTOGRAM_DOUBLES: Final = len(HISTOGRAM_BOUNDS_SECONDS) + 2
_DOUBLES: Final = {Histogram: _HISTOGRAM_DOUBLES, list: SLOTS, dict: len(SCRIPTS) * _HISTOGRAM_DOUBLES}
_HEAD: Final = struct.Struct("<QQQ")
_BODY: Final = struct.Struct(f"<{sum(_DOUBLES.get(shape, 1) for _series, shape in CATALOGUE.values())}d")
_TAIL: Final = struct.Struct("<Q")
_LAYOUT: Final = int.from_bytes(
    blake3(
        repr([(name, series, shape.__name__) for name, (series, shape) in CATALOGUE.items()]).encode()
    ).digest(8)
)
SNAPSHOT_BYTES: Final = _HEAD.size + _BODY.size + _TAIL.size
"""Room that one process needs in the shared page."""

HistogramValue = dict[str, list[float] | float]
Value = float | list[float] | HistogramValue | dict[str, HistogramValue]


def read_snapshot(data: bytes | memoryview) -> dict[str, Value]:
    """Field → value; empty if nothing was published yet, another version wrote it, or the read was torn.

    A histogram is `{"counts": […], "sum": seconds}`; a field per slot is a list; one per script is a
    dictionary.
    """
    if len(data) < SNAPSHOT_BYTES:
        return {}
    layout, sequence, checksum = _HEAD.unpack_from(data, 0)
    body = data[_HEAD.size : _HEAD.size + _BODY.size]
    (sequence_after,) = _TAIL.unpack_from(data, _HEAD.size + _BODY.size)
    if layout != _LAYOUT or sequence != sequence_after or checksum != zlib.crc32(body):
        return {}
    return _unpack(list(_BODY.unpack(body)))


def _unpack(values: list[float]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    at = 0
    for name, (_series, shape) in CATALOGUE.items():
        part = values[at : at + _DOUBLES.get(shape, 1)]
        at += len(part)
        if shape is Histogram:
            found[name] = _histogram(part)
        elif shape is list:
            found[name] = part
        elif shape is dict:
            runs = (
                part[start : start + _HISTOGRAM_DOUBLES] for start in range(0, len(part), _HISTOGRAM_DOUBLES)
            )
            found[name] = dict(zip(SCRIPTS, map(_histogram, runs), strict=True))
        else:
            found[name] = part[0]
    return found


def _histogram(part: list[float]) -> HistogramValue:
    return {"counts": part[:-1], "sum": part[-1]}


def quantile(counts: list[float] | list[int], share: float) -> float:
    """Upper bound in seconds of the bucket that holds the share (0.99: P99); infinite in the last, 0
    if empty.
    """
    wanted = share * sum(counts)
    if wanted <= 0:
        return 0.0
    seen = 0.0
    for bound, count in zip((*HISTOGRAM_BOUNDS_SECONDS, float("inf")), counts, strict=True):
        seen += count
        if seen >= wanted:
            return bound
    return float("inf")

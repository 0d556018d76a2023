"""Every limit and every growing collection, each with what bounds it and the test that fills it.

`BOUNDS` are the limits of queues, tables, caches and windows: what may wait or be remembered. For each it
says what full means, and names the tests that fill it; those show that what is full says so, loses nothing
that it took, and serves again afterwards. `OTHERS` are the remaining constants of `qim/limits.py`, sorted by
what they are: a time, a rate, the size of one thing, how much one step takes, or the fixed shape of the map.
`HOLDERS` are the collections themselves, as `holders.py` finds them in the code, each with the bound that
keeps it small.
"""

from typing import Final, NamedTuple


class Bound(NamedTuple):
    """One limit of what may wait or be remembered."""

    when_full: str
    filled_by: tuple[str, ...]
    """`path::test`, below tests/."""


ROLES = "limits/test_roles.py::"
STORES = "limits/test_stores.py::"
CACHES = "limits/test_caches.py::"
CLIENT = "limits/test_client.py::"
GATEWAY = "unit/workers/test_gateway_defences.py::"
LINK = "unit/workers/test_link.py::"
WRITER = "unit/workers/test_writer.py::"

BOUNDS: Final[dict[str, Bound]] = {
    # --- a client connection ---
    "UNANSWERED_REQUESTS_MAX": Bound(
        "disconnect: the peer sends without reading",
        ("unit/test_gateway_rules.py::test_a_peer_is_slow_above_its_bounds_and_not_at_them",
         f"{ROLES}test_a_connection_with_too_many_open_requests_is_cut_and_its_user_served_again"),
    ),
    "UNSENT_BYTES_MAX": Bound(
        "disconnect: the peer does not read; a pull recovers what a push did not bring",
        ("unit/test_gateway_rules.py::test_a_peer_is_slow_above_its_bounds_and_not_at_them",
         f"{GATEWAY}test_a_client_that_does_not_read_is_cut_at_its_bytes_and_others_go_on"),
    ),
    "CONNECTIONS_PER_ADDRESS_MAX": Bound(
        "refuse the newcomer", ("unit/test_gateway_rules.py::test_the_last_place_is_given_and_no_more",)
    ),
    "RATE_BUCKETS_MAX": Bound(
        "forget full buckets, then the oldest: sends fail open",
        (f"{CACHES}test_a_crowd_of_senders_is_remembered_up_to_the_bound_and_each_may_send",),
    ),
    "FAILED_LOGIN_ADDRESSES_MAX": Bound(
        "further addresses share one bucket: credentials fail closed",
        (f"{CACHES}test_a_crowd_of_failing_addresses_shares_a_bucket_and_is_forgotten_later",),
    ),
    "ROUTES_MAX": Bound(
        "forget what was not used for longest",
        (f"{CACHES}test_owners_are_remembered_up_to_the_bound_and_found_again",),
    ),
    # --- writer ---
    "WRITER_WAITING_MESSAGES_MAX": Bound(
        "reject with RESOURCE_EXHAUSTED before any side effect",
        (f"{ROLES}test_a_full_writer_refuses_the_next_and_commits_all_that_it_took",),
    ),
    "BATCHES_IN_FLIGHT_MAX": Bound(
        "wait: nothing more is taken from the inbox or the log",
        (f"{ROLES}test_a_writer_has_four_passes_in_flight_and_no_more",
         f"{ROLES}test_a_fan_out_has_four_appends_in_flight_and_no_more",
         f"{ROLES}test_a_mailbox_has_four_batches_in_flight_and_no_more"),
    ),
    "UNFINISHABLE_MESSAGES_MAX": Bound(
        "the slot of a further one stops: sends to it are refused, the recoverer leaves it alone",
        (f"{ROLES}test_messages_that_cannot_be_finished_are_noted_up_to_the_bound_then_their_slot_stops_alone",),
    ),
    "PAIR_CACHE_ENTRIES_MAX": Bound(
        "forget the oldest", (f"{CACHES}test_pairs_are_remembered_up_to_the_bound_and_found_again",)
    ),
    "GROUP_REQUESTS_WAITING_MAX": Bound(
        "reject with RESOURCE_EXHAUSTED before any side effect",
        ("unit/workers/test_group_changes.py::test_too_many_changes_of_a_lane_are_refused_and_the_others_are_done",
         "unit/workers/test_group_reads.py::test_too_many_reads_are_refused_and_the_others_are_answered"),
    ),
    "GROUP_CACHE_ENTRIES_MAX": Bound(
        "forget the oldest",
        (f"{CACHES}test_groups_are_remembered_up_to_the_bound_and_found_again",
         f"{CACHES}test_versions_are_remembered_up_to_the_bound_and_learnt_again"),
    ),
    "USER_CACHE_ENTRIES_MAX": Bound(
        "forget the oldest", (f"{CACHES}test_users_are_remembered_up_to_the_bound_and_found_again",)
    ),
    # --- groups ---
    "SNAPSHOT_USERS_REMEMBERED_MAX": Bound(
        "forget the oldest",
        ("unit/workers/test_audiences.py::test_members_are_remembered_up_to_the_bound_and_asked_for_again",),
    ),
    "GROUP_MEMBERS_MAX": Bound(
        "the change is refused with FAILED_PRECONDITION",
        ("unit/test_group_rules.py::test_a_group_grows_to_its_bound_and_no_further",),
    ),
    # --- mailbox ---
    "MAILBOX_QUEUE_RECORDS_MAX": Bound(
        "pause that partition only",
        ("unit/workers/test_mailbox_bounds.py::test_a_shard_in_trouble_queues_128_records_and_no_more",),
    ),
    "MAILBOX_PERMITS": Bound(
        "wait: the lane keeps its record",
        (f"{ROLES}test_the_general_path_has_no_more_calls_in_flight_than_permits",),
    ),
    "PULLS_WAITING_MAX": Bound(
        "reject with RESOURCE_EXHAUSTED",
        (f"{ROLES}test_a_full_mailbox_refuses_the_next_pull_and_answers_all_that_it_took",),
    ),
    "HEADERS_REMEMBERED_MAX": Bound(
        "forget the oldest", (f"{CACHES}test_headers_are_remembered_up_to_the_bound_and_read_again",)
    ),
    "MAILBOX_KEYS_REMEMBERED_MAX": Bound(
        "forget: a key gets its expiry once more",
        (f"{STORES}test_mailbox_keys_are_remembered_up_to_the_bound",),
    ),
    # --- links between workers ---
    "LINK_UNSENT_BYTES_MAX": Bound(
        "requests are answered UNAVAILABLE, pushes are dropped",
        (f"{LINK}test_a_full_link_refuses_requests_and_drops_pushes_but_keeps_what_it_took",),
    ),
    "LINK_REPLY_BYTES_MAX": Bound(
        "the link is cut, which settles everything on it",
        ("unit/workers/test_link.py::test_answers_that_nobody_takes_end_the_link",),
    ),
    # --- presence ---
    "PRESENCE_SESSIONS_MAX": Bound(
        "the log-in is refused with RESOURCE_EXHAUSTED",
        ("unit/test_presence_rules.py::test_a_full_table_refuses_newcomers_and_keeps_who_is_there",
         "unit/workers/test_presence.py::test_a_full_table_sends_the_newcomer_away"),
    ),
    "PRESENCE_SESSIONS_PER_USER_MAX": Bound(
        "the log-in is refused with RESOURCE_EXHAUSTED",
        (f"{CACHES}test_a_user_has_so_many_devices_and_a_place_that_gets_free_is_given_again",),
    ),
    # --- stores ---
    "LOG_TAIL_BYTES_MAX": Bound(
        "the oldest goes, its reader fetches it from the server",
        (f"{STORES}test_a_reader_behind_a_full_tail_gets_every_record",),
    ),
    "LOG_READ_BYTES_MAX": Bound(
        "fewer entries are fetched, of fewer partitions at once, in turn",
        (f"{STORES}test_what_a_reader_fetches_ahead_weighs_no_more_than_a_batch",
         f"{STORES}test_entries_larger_than_the_bound_are_read_one_by_one_and_no_partition_starves"),
    ),
    "STORE_INFLIGHT_COMMANDS_MAX": Bound(
        "refused before anything is written",
        (f"{STORES}test_a_pipe_with_too_many_commands_refuses_the_next_and_goes_on",),
    ),
    "STORE_UNSENT_BYTES_MAX": Bound(
        "refused before anything is written",
        (f"{STORES}test_a_pipe_with_too_many_bytes_refuses_the_next_and_goes_on",),
    ),
    "STORE_MEMORY_RATIO_MAX": Bound(
        "new messages are refused with RESOURCE_EXHAUSTED, the rest goes on",
        (f"{WRITER}test_a_store_above_four_fifths_of_its_memory_refuses_new_messages_only",),
    ),
    # --- bounds that stand beside their queue ---
    "qim/client/work.py PENDING_MAX": Bound(
        "StoreUnavailable, nothing is queued",
        (f"{CLIENT}test_a_full_outgoing_queue_refuses_the_next_message_and_takes_one_for_each_that_left",),
    ),
    "qim/client/work.py ASKED_MAX": Bound(
        "RateLimited, nothing is sent",
        (f"{CLIENT}test_too_many_questions_are_refused_and_taken_again_when_some_are_answered",),
    ),
    "qim/client/work.py RECENT_MAX": Bound(
        "forget the oldest: the store recognises it",
        (f"{CLIENT}test_recent_messages_are_remembered_up_to_the_bound",),
    ),
    "qim/client/outgoing.py WINDOW": Bound(
        "wait for an acknowledgement",
        (f"{CLIENT}test_the_window_is_filled_and_opens_by_one_with_each_acknowledgement",),
    ),
    "qim/client/transport.py ARRIVED_BYTES_MAX": Bound(
        "the socket is not read until the work has caught up",
        (f"{CLIENT}test_a_client_that_is_behind_stops_reading_and_loses_nothing",),
    ),
    "qim/client/store.py STEPS_WAITING_MAX": Bound(
        "StoreUnavailable, the step is not taken",
        (f"{CLIENT}test_a_store_with_too_many_steps_refuses_the_next_and_runs_all_that_it_took",),
    ),
    "qim/client/events.py EVENTS_WAITING_MAX": Bound(
        "the oldest is dropped, and the reader is told",
        ("unit/client/test_blocking.py::test_a_reader_that_does_not_read_loses_the_oldest_events_and_is_told",),
    ),
    "qim/client/sync.py UNCOVERED_MAX": Bound(
        "pushes are forgotten, a pull brings them",
        (f"{CLIENT}test_too_many_pushes_beyond_the_cursor_are_forgotten_and_pulled",),
    ),
    "qim/logsetup.py PENDING_BYTES_MAX": Bound(
        "lines are dropped and counted",
        ("unit/test_logsetup.py::test_a_full_pipe_drops_and_counts_instead_of_waiting",),
    ),
    "workers/control.py CONNECTIONS_MAX": Bound(
        "the newcomer is closed", ("unit/test_control.py::test_connections_above_the_maximum_are_closed",)
    ),
}  # fmt: skip

TIME, RATE, SIZE, STEP, SHAPE = "time", "rate", "size of one thing", "taken by one step", "shape of the map"

OTHERS: Final[dict[str, tuple[str, ...]]] = {
    SHAPE: ("SLOTS", "BUCKETS", "BUCKETS_PER_SLOT", "FLAPPING_DEATHS"),
    RATE: (
        "SENDS_PER_SECOND", "SENDS_BURST", "FAILED_LOGINS_BURST", "FAILED_LOGINS_PER_SECOND",
        "SHARED_SENDS_PER_SECOND", "SHARED_SENDS_BURST", "RESTART_JITTER",
    ),
    SIZE: (
        "FRAME_HEADER_BYTES", "FRAME_BODY_BYTES_MAX", "MESSAGE_BODY_BYTES_MAX", "CUSTOM_TYPE_BYTES_MAX",
        "TOKEN_BYTES_MAX", "CLIENT_NAME_BYTES_MAX", "BATCH_BYTES_MAX", "PAGE_ENTRIES_MAX",
        "READ_BUFFER_BYTES", "LINK_BODY_BYTES_MAX", "LINK_PUSH_TARGETS_MAX", "FUSED_RECIPIENTS_MAX",
        "CONTROL_MESSAGE_BYTES_MAX", "GROUP_NAME_BYTES_MAX", "CHANGE_USERS_MAX", "BROADCAST_MEMBERS_MAX",
        "PART_RECIPIENTS_MAX", "GROUP_SHARD_PARTS_MAX",
    ),
    STEP: (
        "WRITER_BATCH_MESSAGES_MAX", "WRITER_BATCH_BYTES_MAX", "SCRIPT_RUN_ITEMS_MAX",
        "HISTORY_QUERIES_PER_CALL_MAX", "FANOUT_BATCH_RECORDS_MAX", "MAILBOX_BATCH_RECORDS_MAX",
        "FUSED_RUN_ENTRIES_MAX", "APPEND_ENTRIES_MAX", "PRESENCE_READS_MAX", "MEMBER_ENTRIES_PER_CALL_MAX",
        "MEMBER_READS_MAX", "MEMBERSHIP_RETRIES_MAX", "GROUP_READS_AT_ONCE_MAX", "SNAPSHOTS_PER_PLAN_MAX",
        "DISPATCH_BYTES_MAX",
    ),
    TIME: (
        "TLS_HANDSHAKE_TIMEOUT_MS", "AUTH_TIMEOUT_MS", "PING_INTERVAL_MS", "CONNECTION_SILENCE_MS_MAX",
        "TOKEN_EXPIRY_GRACE_MS", "TLS_SHUTDOWN_TIMEOUT_MS", "FRAME_TIMEOUT_MS", "RECONNECT_SPREAD_MS_MAX",
        "RECONNECT_SPREAD_MS_PER_CONNECTION", "WRITER_PASS_INTERVAL_MS", "CLOCK_SKEW_MS_MAX",
        "RECOVER_INTERVAL_MS", "RECOVER_AGE_MS", "IDEMPOTENCY_WINDOW_MS", "ROLE_BACKOFF_MS",
        "COMPANY_WAIT_MS", "ECHO_WAIT_MS", "FANOUT_PASS_INTERVAL_MS", "FANOUT_POSITION_INTERVAL_MS",
        "MAILBOX_DAYS", "DAY_MS",
        "MAILBOX_KEY_LIFE_MS", "EPHEMERAL_LIFE_MS", "EPHEMERAL_KEY_LIFE_MS", "DISPATCH_PROGRESS_LIFE_MS",
        "ADMIN_REQUEST_LIFE_MS", "GROUP_SNAPSHOT_LIFE_MS",
        "CLAIM_INTERVAL_MS", "CLAIM_FRESH_MS", "LINK_RETRY_MS_MIN", "LINK_RETRY_MS_MAX",
        "LINK_HELLO_TIMEOUT_MS", "LOG_RETENTION_MS", "LOG_TRIM_INTERVAL_MS", "LOG_SWEEP_INTERVAL_MS",
        "STORE_TIMEOUT_MS", "STORE_RECONNECT_SECONDS", "REQUEST_DEADLINE_MS", "HEARTBEAT_INTERVAL_MS",
        "HEARTBEAT_SLOW_MS", "HEARTBEAT_ABORT_MS", "HEARTBEAT_KILL_MS", "RESTART_BACKOFF_SECONDS",
        "RESTART_CALM_MS", "FLAPPING_WINDOW_MS", "DRAIN_DEADLINE_MS", "SWEEP_INTERVAL_MS",
    ),
}  # fmt: skip

REASONS: Final[dict[str, str]] = {
    "SLOTS": "partitions of a log and shards of the mailboxes; a power of two that 64 workers can share",
    "BUCKETS": "of commits; what may move between instances together",
    "BUCKETS_PER_SLOT": "so that slots and buckets have one owner",
    "FRAME_HEADER_BYTES": "as it is drawn in the layout of the wire",
    "CUSTOM_TYPE_BYTES_MAX": "a name, not a body",
    "TOKEN_BYTES_MAX": "several times a signed token with its claims",
    "CLIENT_NAME_BYTES_MAX": "for an operator's eyes",
    "PAGE_ENTRIES_MAX": "short messages on a page; long ones end it by bytes",
    "SENDS_PER_SECOND": "stands with SENDS_BURST",
    "FAILED_LOGINS_BURST": "stands with FAILED_LOGINS_PER_SECOND",
    "SHARED_SENDS_PER_SECOND": "stands with SHARED_SENDS_BURST",
    "RECONNECT_SPREAD_MS_MAX": "stands with RECONNECT_SPREAD_MS_PER_CONNECTION",
    "DAY_MS": "milliseconds of a day",
    "MAILBOX_KEY_LIFE_MS": "the days that can be read, and two more for a clock that is behind",
    "EPHEMERAL_KEY_LIFE_MS": "an hour longer than what it holds",
    "LINK_RETRY_MS_MIN": "stands with LINK_RETRY_MS_MAX",
    "STORE_INFLIGHT_COMMANDS_MAX": "many times what all roles of a worker have in flight",
    "FLAPPING_DEATHS": "stands with FLAPPING_WINDOW_MS",
}
"""Of constants that have no sentence of their own in `qim/limits.py`."""

PER_SLOT = "SLOTS"
OF_CODE = "as many as the code has"
HOLDERS: Final[dict[str, str]] = {
    # --- adapters ---
    "qim/adapters/commitlog_cursor.py Cursor.buffer": "LOG_READ_BYTES_MAX",
    "qim/adapters/commitlog_reader.py RedisLogReader._stale": PER_SLOT,
    "qim/adapters/commitlog_reader.py RedisLogReader._ends": PER_SLOT,
    "qim/adapters/commitlog_tail.py LogTail._ages": "LOG_TAIL_BYTES_MAX",
    "qim/adapters/commitlog_tail.py LogTail._chunks": "LOG_TAIL_BYTES_MAX",
    "qim/adapters/commitlog_tail.py LogTail._watchers": OF_CODE,
    "qim/adapters/commitlog_tail.py LogTail.ends": PER_SLOT,
    "qim/adapters/commits_redis.py ScriptRun._groups": "SCRIPT_RUN_ITEMS_MAX",
    "qim/adapters/commits_redis.py ScriptRun.conversations": "SCRIPT_RUN_ITEMS_MAX",
    "qim/adapters/commits_redis.py ScriptRun.slots": PER_SLOT,
    "qim/adapters/mailbox_redis.py RedisMailboxStore._keys_with_expiry": "MAILBOX_KEYS_REMEMBERED_MAX",
    "qim/adapters/redis_answers.py Answers._errors": "STORE_INFLIGHT_COMMANDS_MAX",
    "qim/adapters/redis_pipe.py RedisPipe.on_connected": OF_CODE,
    "qim/adapters/redis_pipe.py _Connection._unwritten": "STORE_UNSENT_BYTES_MAX",
    "qim/adapters/redis_pipe.py _Connection._waiting": "STORE_INFLIGHT_COMMANDS_MAX",
    # --- client ---
    "qim/client/events.py EventStream._waiting": "EVENTS_WAITING_MAX",
    "qim/client/outgoing.py Outgoing._checking": "PENDING_MAX",
    "qim/client/outgoing.py Outgoing._in_flight": "WINDOW",
    "qim/client/outgoing.py Outgoing._waiting": "PENDING_MAX",
    "qim/client/probe.py Probe._answers": "of tools only: one that is awaited at a time",
    "qim/client/probe.py Probe.pushed": "of tools only: as long as one check",
    "qim/client/store.py Store._ordinals": "STEPS_PER_TRANSACTION_MAX",
    "qim/client/store.py Store._waiting": "STEPS_WAITING_MAX",
    "qim/client/sync.py Chain._early": "UNCOVERED_MAX",
    "qim/client/sync.py Chain._seqs": "UNCOVERED_MAX",
    "qim/client/transport.py Transport._out": "WINDOW",
    "qim/client/transport.py Transport.arrived": "ARRIVED_BYTES_MAX",
    "qim/client/work.py Work._helpers": "PENDING_MAX",
    "qim/client/work.py Work._late_echoes": "WINDOW",
    "qim/client/work.py Work._open": "ASKED_MAX",
    "qim/client/work.py Work._recent": "RECENT_MAX",
    "qim/client/work.py Work._recent_order": "RECENT_MAX",
    "qim/client/work.py Work._waiters": "PENDING_MAX",
    # --- deciding ---
    "qim/domain/gateway.py Deadlines._heap": "connections_max",
    "qim/domain/gateway.py FailedLogins._buckets": "FAILED_LOGIN_ADDRESSES_MAX",
    "qim/domain/gateway.py RateTable._buckets": "RATE_BUCKETS_MAX",
    "qim/domain/presence.py PresenceTable._users": "PRESENCE_SESSIONS_MAX",
    "qim/domain/presence.py _User.sessions": "PRESENCE_SESSIONS_PER_USER_MAX",
    "qim/wire/connection.py ClientConnection._open": "UNANSWERED_REQUESTS_MAX",
    "qim/wire/frames.py FrameSplitter._residue": "FRAME_BODY_BYTES_MAX",
    # --- workers ---
    "workers/claims.py Claims.epochs": OF_CODE,
    "workers/client_socket.py ClientSocket._frames": "UNSENT_BYTES_MAX",
    "workers/client_socket.py ClientSocket._pushes": "UNSENT_BYTES_MAX",
    "workers/commits.py Commits.in_flight": "BATCHES_IN_FLIGHT_MAX",
    "workers/connections.py ConnectionTable._free": "connections_max",
    "workers/connections.py ConnectionTable._sockets": "connections_max",
    "workers/control.py ControlServer._connections": "CONNECTIONS_MAX",
    "workers/demo.py Checks.results": OF_CODE,
    "workers/failpoints.py Failpoints.hits": OF_CODE,
    "workers/fanout.py Fanout._issued": "BATCHES_IN_FLIGHT_MAX",
    "workers/fanout.py Fanout._planned": PER_SLOT,
    "workers/fanout.py Fanout._reached": PER_SLOT,
    "workers/fanout.py Fanout._tasks": OF_CODE,
    "workers/fanout.py Fanout.positions": PER_SLOT,
    "workers/fanout.py Fanout.stopped": PER_SLOT,
    "workers/gateway.py Gateway._of_address": "connections_max",
    "workers/gateway.py Gateway.congested": "connections_max",
    "workers/group_reads.py GroupReads._inbox": "GROUP_REQUESTS_WAITING_MAX",
    "workers/group_versions.py GroupVersions.known": "GROUP_CACHE_ENTRIES_MAX",
    "workers/inbox.py Inbox._items": "items_max",
    "workers/inbox.py Inbox._takers": OF_CODE,
    "workers/link.py LinkStream._frames": "LINK_REPLY_BYTES_MAX",
    "workers/link.py LinkStream._open": "UNANSWERED_REQUESTS_MAX",
    "workers/link.py Links._streams": PER_SLOT,
    "workers/link.py Links._unnamed": "LINK_HELLO_TIMEOUT_MS",
    "workers/mailbox.py Mailbox._instances": PER_SLOT,
    "workers/mailbox.py Mailbox._loops": OF_CODE,
    "workers/missed.py Missed._given_up": "one per record that an operator skips",
    "workers/missed.py Missed._places": PER_SLOT,
    "workers/missed.py Missed.broken": PER_SLOT,
    "workers/company.py Company._waiting": "tasks",
    "workers/outbound.py Outbound._marked": "connections_max",
    "workers/outbound.py Outbound._patient": "connections_max",
    "workers/pauses.py Pauses._waiting": PER_SLOT,
    "workers/pauses.py Pauses.serial": PER_SLOT,
    "workers/presence.py Presence._unknown": "PRESENCE_SESSIONS_MAX",
    "workers/pulls.py Pulls._inbox": "PULLS_WAITING_MAX",
    "workers/roles.py Roles._tasks": OF_CODE,
    "workers/router.py OwnerCache._old": "ROUTES_MAX",
    "workers/router.py OwnerCache._young": "ROUTES_MAX",
    "workers/sending.py Sending.requests": "UNANSWERED_REQUESTS_MAX",
    "workers/shard_state.py Shard.doubtful": "BATCHES_IN_FLIGHT_MAX",
    "workers/shard_state.py Shard.queue": "MAILBOX_QUEUE_RECORDS_MAX",
    "workers/shards.py Shards._issued": "BATCHES_IN_FLIGHT_MAX",
    "workers/shards.py Shards.shards": PER_SLOT,
    "workers/shards.py Shards.unopened": PER_SLOT,
    "workers/stops.py Stops.slots": PER_SLOT,
    "workers/stops.py Stops.unfinishable": "UNFINISHABLE_MESSAGES_MAX",
    "workers/worker.py Worker._away": OF_CODE,
    "workers/writer.py Writer._instances": PER_SLOT,
    "workers/writer.py _Instance.inbox": "WRITER_WAITING_MESSAGES_MAX",
}
"""Collection → what bounds it: a constant, a parameter of its class, or words where neither exists."""

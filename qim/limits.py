"""Every bound of qim: its unit, its reason, and assertions that tie it to its neighbours.

What "full" means is written at each queue: *wait* (the source is told to slow down), *reject* (the
client gets RESOURCE_EXHAUSTED and repeats) or *disconnect*. Nothing is dropped after an ACK.
"""

from typing import Final

# --- the map -----------------------------------------------------------------------------------------
SLOTS: Final = 64
BUCKETS: Final = 256
BUCKETS_PER_SLOT: Final = 4
assert SLOTS * BUCKETS_PER_SLOT == BUCKETS

# --- the wire ----------------------------------------------------------------------------------------
FRAME_HEADER_BYTES: Final = 12
FRAME_BODY_BYTES_MAX: Final = 262_144
"""Refused from the header alone. Four times the largest message body, so a full batch always fits."""
MESSAGE_BODY_BYTES_MAX: Final = 65_536
"""Larger in a legal frame: TOO_LARGE on that request, the connection lives."""
CUSTOM_TYPE_BYTES_MAX: Final = 128
TOKEN_BYTES_MAX: Final = 4_096
CLIENT_NAME_BYTES_MAX: Final = 128
BATCH_BYTES_MAX: Final = 196_608
"""A reply batch or push frame ends here (192 KiB), with `more`."""
PAGE_ENTRIES_MAX: Final = 300
assert MESSAGE_BODY_BYTES_MAX * 2 < BATCH_BYTES_MAX < FRAME_BODY_BYTES_MAX

# --- a client connection -----------------------------------------------------------------------------
TLS_HANDSHAKE_TIMEOUT_MS: Final = 5_000
"""Python would wait a minute; a handshake takes a few round trips, and a stranger must not hold a socket."""
AUTH_TIMEOUT_MS: Final = 10_000
"""From the handshake on; long enough for a phone that first has to fetch a token."""
PING_INTERVAL_MS: Final = 25_000
"""Told to clients in AUTH_ACK; the common translators of addresses keep an idle connection for 30 s."""
CONNECTION_SILENCE_MS_MAX: Final = 33_000
"""25 s until the next ping and 8 s for it to arrive; then the connection is dead."""
TOKEN_EXPIRY_GRACE_MS: Final = 60_000
"""Behind the end of its token, for a client that renews it late or whose clock is behind."""
UNANSWERED_REQUESTS_MAX: Final = 1_024
"""Per connection; above it SLOW_CONSUMER: the peer sends without reading."""
UNSENT_BYTES_MAX: Final = 1_048_576
"""Per connection, counted in bytes; above it SLOW_CONSUMER. Pull recovers what a push did not bring."""
SENDS_PER_SECOND: Final = 100
SENDS_BURST: Final = 1_000
"""Per user and per connection. A person never meets it; a queue that was filled offline leaves in one go."""
FAILED_LOGINS_BURST: Final = 3
FAILED_LOGINS_PER_SECOND: Final = 0.17
"""Per address: three mistakes at once, then ten a minute. Verifying a signature is the dear part."""
ECHO_WAIT_MS: Final = 1_000
"""An echo waits for something to travel with, and nobody waits for it. At 200 ms half of them still left
alone when everybody said five things a second, and a write is the dearest step."""
READ_BUFFER_BYTES: Final = 262_144
"""One buffer per worker, shared by all its sockets; a read is parsed before the next begins."""
TLS_SHUTDOWN_TIMEOUT_MS: Final = 2_000
"""A peer that does not read its farewell is cut after this; until then it still holds its unsent bytes."""
FRAME_TIMEOUT_MS: Final = 10_000
"""From the first byte of a frame to its last: a trickled header times out, 256 KiB need 26 KB/s."""
CONNECTIONS_PER_ADDRESS_MAX: Final = 8_192
"""Per worker. Far above an office behind one address, below what fills a worker's table."""
SHARED_SENDS_PER_SECOND: Final = 20_000
SHARED_SENDS_BURST: Final = 40_000
"""Per tenant and per address: a backstop beyond what one worker carries, quotas below are an operator's."""
RATE_BUCKETS_MAX: Final = 65_536
"""Per kind and worker; full buckets leave first, then the oldest: sends fail open."""
FAILED_LOGIN_ADDRESSES_MAX: Final = 16_384
"""Addresses with recent failures; further ones share one bucket: credentials fail closed."""
ROUTES_MAX: Final = 65_536
"""(tenant, user, peer) → owner, and user → owner; two hashes saved per message, about 20 MiB when full."""
RECONNECT_SPREAD_MS_MAX: Final = 20_000
RECONNECT_SPREAD_MS_PER_CONNECTION: Final = 10
"""A drained worker asks its clients back at about 100 per second: a TLS handshake costs a millisecond."""
assert FRAME_TIMEOUT_MS < CONNECTION_SILENCE_MS_MAX
assert PING_INTERVAL_MS < CONNECTION_SILENCE_MS_MAX
assert FRAME_BODY_BYTES_MAX + FRAME_HEADER_BYTES < UNSENT_BYTES_MAX

# --- writer ------------------------------------------------------------------------------------------
WRITER_WAITING_MESSAGES_MAX: Final = 4_096
"""Per worker; full: reject. About half a second of work at the highest rate ever measured here."""
WRITER_BATCH_MESSAGES_MAX: Final = 512
"""Of one pass: eight runs of a script, a few milliseconds of the store."""
WRITER_PASS_INTERVAL_MS: Final = 5
"""From the begin of a small pass to that of the next: at 1,000 messages a second it makes passes of five."""
COMPANY_WAIT_MS: Final = WRITER_PASS_INTERVAL_MS
"""How long a small batch of fan-out or mailbox waits for the next pass of the writer to travel with."""
WRITER_BATCH_BYTES_MAX: Final = 4_194_304
"""64 messages of the largest size, and the one that goes over it: what one write to the store may weigh."""
SCRIPT_RUN_ITEMS_MAX: Final = 64
"""Items per script call: a script blocks its server, 64 items take less than a millisecond."""
BATCHES_IN_FLIGHT_MAX: Final = 4
"""Per role and instance, in order. One hides the round trip of the other; more only add memory."""
CLOCK_SKEW_MS_MAX: Final = 10_000
"""Between a worker and its store; above it new messages are refused, so that their times stay in order."""
RECOVER_INTERVAL_MS: Final = 1_000
"""A message that was left half-done is finished within a few seconds; an empty look costs one command."""
RECOVER_AGE_MS: Final = 2_000
"""Pending for longer and not in flight here: the recoverer finishes it."""
UNFINISHABLE_MESSAGES_MAX: Final = 256
"""Named to the operator, per instance: more than he reads one by one. Full: the next one's slot stops."""
IDEMPOTENCY_WINDOW_MS: Final = 7_200_000
"""From COMMITTED on a repeat gets the same coordinates; later the SDK asks history instead of repeating."""
assert WRITER_BATCH_MESSAGES_MAX <= WRITER_WAITING_MESSAGES_MAX
assert RECOVER_AGE_MS < IDEMPOTENCY_WINDOW_MS

HISTORY_QUERIES_PER_CALL_MAX: Final = 8
"""Of history and mailbox pages in one call: each may carry a whole batch of bytes."""
PAIR_CACHE_ENTRIES_MAX: Final = 65_536
"""Pairs of users whose conversation a worker remembers; about 20 MB when full. A miss costs three hashes."""
GROUP_CACHE_ENTRIES_MAX: Final = 16_384
"""Groups whose place, and whose version, a worker remembers; a forgotten version costs a refused attempt."""
USER_CACHE_ENTRIES_MAX: Final = 65_536
"""Users whose shard a worker remembers; a miss costs one hash."""
ROLE_BACKOFF_MS: Final = (20, 50, 100, 250, 500, 1_000, 2_000)
"""How long a role waits before it repeats what a store refused or left open; the last one repeats."""

# --- fanout ------------------------------------------------------------------------------------------
FANOUT_PASS_INTERVAL_MS: Final = 25
"""Pause after a small batch: five passes of the writer share what fan-out and mailbox cost per batch."""
FANOUT_POSITION_INTERVAL_MS: Final = 100
"""How often positions are stored: so much a restart dispatches again, for a quarter of the calls."""
FANOUT_BATCH_RECORDS_MAX: Final = 512
"""As many as a pass of the writer: the fan-out must not fall behind it."""
PART_RECIPIENTS_MAX: Final = 4_096
"""Of one dispatch record: 64 KB of recipients, as much as the largest body, and 64 calls of the mailbox."""
GROUP_SHARD_PARTS_MAX: Final = 128
"""Of one message and shard: a part number is a byte, and its highest bit marks what was redelivered."""
SNAPSHOTS_PER_PLAN_MAX: Final = 16
"""Groups whose members are asked for at once: with 20,000 members each, 5 MB of an answer."""
SNAPSHOT_USERS_REMEMBERED_MAX: Final = 262_144
"""Members at the versions used last, per process, about 15 MB: an active group is read once per version."""
DISPATCH_BYTES_MAX: Final = 8_388_608
"""Of one append with groups, or one record: 64 shards hold a body 64 times, a direct message only twice."""

# --- mailbox -----------------------------------------------------------------------------------------
MAILBOX_BATCH_RECORDS_MAX: Final = 512
"""Of one read; cut into runs of a script."""
MAILBOX_QUEUE_RECORDS_MAX: Final = 128
"""Per shard; full: only that partition is paused."""
MAILBOX_PERMITS: Final = 64
"""Calls of the general path in flight over all shards of a worker."""
PULLS_WAITING_MAX: Final = 4_096
"""PULL_MAILBOX requests per worker and mailbox instance; full: reject."""
FUSED_RECIPIENTS_MAX: Final = 16
"""Of a record in a fused run; the marks of a record are 16 bits of its packed argument."""
FUSED_RUN_ENTRIES_MAX: Final = 64
"""As SCRIPT_RUN_ITEMS_MAX, counted in entries: each is one sorted-set insert."""
APPEND_ENTRIES_MAX: Final = 64
"""The same for one call of the general path."""
MAILBOX_DAYS: Final = 7
"""Days a mailbox is kept for cursors; the keys live two days longer."""
DAY_MS: Final = 86_400_000
MAILBOX_KEY_LIFE_MS: Final = (MAILBOX_DAYS + 2) * DAY_MS
EPHEMERAL_LIFE_MS: Final = DAY_MS
"""Of a message of the class `ephemeral`; nobody is given an older one."""
EPHEMERAL_KEY_LIFE_MS: Final = EPHEMERAL_LIFE_MS + 3_600_000
HEADERS_REMEMBERED_MAX: Final = 4_096
"""Per process, about 4 MB: routing headers of the messages between fan-out and mailbox."""
MAILBOX_KEYS_REMEMBERED_MAX: Final = 16_384
"""Per process, about 3 MB: mailbox days whose expiry is set. A forgotten one is set again for 2 µs."""
DISPATCH_PROGRESS_LIFE_MS: Final = 8 * DAY_MS
"""Longer than mailboxes are kept: a replay within their life still finds that it was done."""
assert FUSED_RECIPIENTS_MAX <= FUSED_RUN_ENTRIES_MAX

# --- groups ------------------------------------------------------------------------------------------
CHANGE_USERS_MAX: Final = 500
"""Named by one change or by CREATE_GROUP: 5 ms of the store, 15 in a group of 20,000; an event of 8 KB."""
BROADCAST_MEMBERS_MAX: Final = 500
"""Above it only those affected are told of a change: in a large group people come and go all day."""
GROUP_REQUESTS_WAITING_MAX: Final = 1_024
"""Changes per lane, and reads, that wait at a writer; full: reject. That is seconds of work."""
GROUP_READS_AT_ONCE_MAX: Final = 32
"""Of a writer: their pages weigh six MiB, and one connection to the store carries them all."""
GROUP_MEMBERS_MAX: Final = GROUP_SHARD_PARTS_MAX * PART_RECIPIENTS_MAX
"""No change makes a group larger: all members might live in one shard, whose parts have so many numbers."""
GROUP_NAME_BYTES_MAX: Final = 256
"""A line on a screen; the group's hash is read for every change."""
ADMIN_REQUEST_LIFE_MS: Final = DAY_MS
"""An operator who repeats a change within it gets the first result, whatever happened to the members."""
GROUP_SNAPSHOT_LIFE_MS: Final = DISPATCH_PROGRESS_LIFE_MS + DAY_MS
"""From its replacement on: the longest time until the last replay of a record that names the version."""
MEMBER_ENTRIES_PER_CALL_MAX: Final = 1_024
"""Of one HMGET: half a millisecond of the server."""
MEMBERSHIP_RETRIES_MAX: Final = 3
"""What a change of members overtakes, a message or a change, is planned anew so often; then 2004."""
MEMBER_READS_MAX: Final = 3
"""A page of members that a change overtakes is read again so often; then the client is told to repeat."""
assert CHANGE_USERS_MAX < GROUP_MEMBERS_MAX
assert CHANGE_USERS_MAX * 16 + 32 < MESSAGE_BODY_BYTES_MAX
assert (CHANGE_USERS_MAX + BROADCAST_MEMBERS_MAX) * 20 < MESSAGE_BODY_BYTES_MAX

# --- slots and ownership -----------------------------------------------------------------------------
CLAIM_INTERVAL_MS: Final = 3_000
"""Two refreshes may be lost before a stamp is old."""
CLAIM_FRESH_MS: Final = 10_000
"""A stamp of another supervisor younger than this is refused: its owner may live."""
assert CLAIM_INTERVAL_MS * 3 < CLAIM_FRESH_MS

# --- links between workers ---------------------------------------------------------------------------
LINK_UNSENT_BYTES_MAX: Final = 8_388_608
"""Per peer; full: requests to it are answered UNAVAILABLE, pushes to it are dropped (pull recovers)."""
LINK_BODY_BYTES_MAX: Final = FRAME_BODY_BYTES_MAX + 4_096
"""A link frame holds one client frame and says whose it is."""
LINK_PUSH_TARGETS_MAX: Final = 4_096
"""Sessions named in one PUSH; more become several frames."""
assert LINK_PUSH_TARGETS_MAX * 25 + MESSAGE_BODY_BYTES_MAX * 2 < LINK_BODY_BYTES_MAX < LINK_UNSENT_BYTES_MAX

LINK_REPLY_BYTES_MAX: Final = 2 * LINK_UNSENT_BYTES_MAX
"""Answers and announcements may use twice as much; then the link is cut, which settles everything on it."""
LINK_RETRY_MS_MIN: Final = 50
LINK_RETRY_MS_MAX: Final = 2_000
"""The first retry follows after 50 ms, because a peer is usually back at once; then it doubles up to this."""
LINK_HELLO_TIMEOUT_MS: Final = 5_000
"""Both ends are on one host; a peer that is silent for so long hangs."""

# --- presence ----------------------------------------------------------------------------------------
PRESENCE_SESSIONS_MAX: Final = 1_000_000
"""Per owner; full: a log-in is refused with RESOURCE_EXHAUSTED. About 400 bytes each."""
PRESENCE_SESSIONS_PER_USER_MAX: Final = 32
"""Devices of one user that are connected at once; one more is refused with RESOURCE_EXHAUSTED."""
PRESENCE_READS_MAX: Final = 256
"""Users whose newest entry is read in one call."""

# --- the Redis log -----------------------------------------------------------------------------------
LOG_TAIL_BYTES_MAX: Final = 16_777_216
"""Per process: what was just appended is served from memory; older records are fetched."""
LOG_READ_BYTES_MAX: Final = 4_194_304
"""Of one batch of a reader, as much as a batch of the writer."""
LOG_RETENTION_MS: Final = 3_600_000
"""What every consumer has finished is kept for so long: for an operator who redelivers, and for the audit."""
LOG_TRIM_INTERVAL_MS: Final = 30_000
"""How much longer than that it may be."""
LOG_SWEEP_INTERVAL_MS: Final = 1_000
"""How often a reader compares its positions with the log's ends, for records that strangers appended."""

# --- stores ------------------------------------------------------------------------------------------
STORE_TIMEOUT_MS: Final = 5_000
"""Of one command on the pipe; then the connection is closed and everything in flight is unknown."""
STORE_MEMORY_RATIO_MAX: Final = 0.8
"""Of maxmemory; above it new messages are refused, so that what was accepted can be finished."""
STORE_INFLIGHT_COMMANDS_MAX: Final = 4_096
STORE_UNSENT_BYTES_MAX: Final = 67_108_864
"""Packed commands that the socket has not taken; full: refused. Four batches of the writer fit four times."""
STORE_RECONNECT_SECONDS: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Pauses before each attempt; the last one repeats."""
REQUEST_DEADLINE_MS: Final = 8_000
"""Oldest request a role still answers with a result; the client is told DEADLINE_EXCEEDED then."""
assert STORE_TIMEOUT_MS < REQUEST_DEADLINE_MS

# --- processes ---------------------------------------------------------------------------------------
HEARTBEAT_INTERVAL_MS: Final = 250
"""Four beats a second: cheap, and a second of silence is four missed ones."""
HEARTBEAT_SLOW_MS: Final = 1_000
"""Only logged: a long collection or a busy host may take so much."""
HEARTBEAT_ABORT_MS: Final = 5_000
"""SIGABRT prints where the loop hangs; its clients have waited for five seconds by then."""
HEARTBEAT_KILL_MS: Final = 7_000
"""Two seconds later, because a stopped process takes no other signal."""
RESTART_BACKOFF_SECONDS: Final = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""The first death is repaired at once, a crash loop costs at most two starts a minute."""
RESTART_JITTER: Final = 0.2
"""Share of the pause: workers that died together do not come back together."""
RESTART_CALM_MS: Final = 60_000
"""Ready for so long counts as well: the pauses begin anew."""
FLAPPING_DEATHS: Final = 5
FLAPPING_WINDOW_MS: Final = 60_000
"""Five deaths within it are told as flapping."""
DRAIN_DEADLINE_MS: Final = 25_000
"""Of a whole stop, below what the unit file allows (`TimeoutStopSec`)."""
SWEEP_INTERVAL_MS: Final = 100
"""Deadline lists are swept at this pace: one timer per process, none per request."""
assert SWEEP_INTERVAL_MS * 2 <= ECHO_WAIT_MS
CONTROL_MESSAGE_BYTES_MAX: Final = 4_194_304
"""The answers of 64 workers to the longest command fit many times."""
assert HEARTBEAT_INTERVAL_MS < HEARTBEAT_SLOW_MS < HEARTBEAT_ABORT_MS < HEARTBEAT_KILL_MS

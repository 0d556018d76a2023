"""What the gateway decides: who is let in, how fast, when a peer is too slow or silent, who gets a request.

The twin `workers/gateway.py` owns the sockets and asks here. Nothing in this module knows a socket or a
clock; monotonic time comes in as seconds.

Rates are token buckets: a bucket holds up to `burst` tokens and gains `per_second`. One read of a socket may
bring many messages; they are charged once, together, against the buckets of the connection, its user, its
tenant and its address, and the scarcest bucket decides how many of them pass. The others are answered
RESOURCE_EXHAUSTED with the time after which one more would pass. State of the tables, and what full means:

    RateTable      key → bucket, bounded; a bucket that is full again says nothing and leaves first. When all
                   are in use the oldest leaves: sends fail open
    FailedLogins   address → bucket of failures; when the table is full of fresh failures, further addresses
                   share one bucket: credentials fail closed
    Deadlines      one heap for the deadlines of all connections; an entry is a reminder to look, the truth is
                   in the connection. So hearing from a peer costs an assignment, not a timer

Addresses count per IPv4 address and per /64 of IPv6, because one customer owns a whole /64.
"""

import heapq
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final, Generic, NamedTuple, TypeVar

from qim import limits
from qim.errors import AuthRequired, ClientError, HeartbeatLost, SlowConsumer, Unauthenticated
from qim.ids import TenantId, UserId

K = TypeVar("K")


class Destination(Enum):
    """Who answers a request."""

    CONVERSATION = "conversation"
    """The owner of the slot that holds the conversation's bucket."""
    USER = "user"
    """The owner of the user's mailbox shard."""
    GATEWAY = "gateway"
    """The connection's own worker."""
    UNSUPPORTED = "unsupported"
    """Part of the protocol, not of this server."""


DESTINATIONS: Final[Mapping[str, Destination]] = {
    "AUTH": Destination.GATEWAY,
    "PING": Destination.GATEWAY,
    "PONG": Destination.GATEWAY,
    "SEND_MESSAGE": Destination.CONVERSATION,
    "PULL_HISTORY": Destination.CONVERSATION,
    "MARK_READ": Destination.CONVERSATION,
    "PULL_MAILBOX": Destination.USER,
    "SESSION_LIST_REQ": Destination.UNSUPPORTED,
    "CREATE_GROUP": Destination.CONVERSATION,
    "PULL_MEMBERS": Destination.CONVERSATION,
    "LEAVE_GROUP": Destination.CONVERSATION,
}
"""By the name of the opcode: numbers belong to the wire, and rules do not import it."""


class Rate(NamedTuple):
    per_second: float
    burst: float


class GatewayLimits(NamedTuple):
    """The bounds that an operator may set; defaults and reasons are in `limits`."""

    connections_max: int = 10_000
    connections_per_address_max: int = limits.CONNECTIONS_PER_ADDRESS_MAX
    auth_timeout_ms: int = limits.AUTH_TIMEOUT_MS
    ping_interval_ms: int = limits.PING_INTERVAL_MS
    silence_ms_max: int = limits.CONNECTION_SILENCE_MS_MAX
    frame_timeout_ms: int = limits.FRAME_TIMEOUT_MS
    unanswered_requests_max: int = limits.UNANSWERED_REQUESTS_MAX
    unsent_bytes_max: int = limits.UNSENT_BYTES_MAX
    sends: Rate = Rate(limits.SENDS_PER_SECOND, limits.SENDS_BURST)
    """Per connection and per user."""
    shared_sends: Rate = Rate(limits.SHARED_SENDS_PER_SECOND, limits.SHARED_SENDS_BURST)
    """Per tenant and per address."""
    failed_logins: Rate = Rate(limits.FAILED_LOGINS_PER_SECOND, limits.FAILED_LOGINS_BURST)


# --- rates -------------------------------------------------------------------------------------------


class TokenBucket:
    """Tokens as of a moment; both numbers change only together."""

    __slots__ = ("_burst", "_filled_at", "_per_second", "_tokens")

    def __init__(self, rate: Rate, now_seconds: float) -> None:
        self._per_second, self._burst = rate
        self._tokens = rate.burst
        self._filled_at = now_seconds

    def available(self, now_seconds: float) -> float:
        """Tokens after refilling up to now."""
        elapsed = now_seconds - self._filled_at
        if elapsed > 0:
            tokens = self._tokens + elapsed * self._per_second
            # Runs four times per read of a socket, and a comparison costs a third of a call of min().
            self._tokens = tokens if tokens < self._burst else self._burst  # noqa: FURB136 - see above
            self._filled_at = now_seconds
        return self._tokens

    def charge(self, count: int) -> None:
        """Takes tokens that `available` has just shown."""
        self._tokens -= count

    def is_full(self, now_seconds: float) -> bool:
        return self.available(now_seconds) >= self._burst

    def wait_ms(self, now_seconds: float) -> int:
        """Until one token is there; 0 when it is there already."""
        missing = 1.0 - self.available(now_seconds)
        return 0 if missing <= 0 else int(missing / self._per_second * 1000) + 1


class SendQuotas:
    """The four buckets that a send is charged to."""

    def __init__(self, bounds: GatewayLimits) -> None:
        self._of_connection = bounds.sends
        self._of_user: RateTable[tuple[TenantId, UserId]] = RateTable(bounds.sends)
        self._of_tenant: RateTable[TenantId] = RateTable(bounds.shared_sends)
        self._of_address: RateTable[bytes] = RateTable(bounds.shared_sends)

    def buckets(
        self, tenant: TenantId, user: UserId, address: bytes, now_seconds: float
    ) -> tuple[TokenBucket, ...]:
        """A connection keeps them: connection, user, tenant, address."""
        return (
            TokenBucket(self._of_connection, now_seconds),
            self._of_user.bucket((tenant, user), now_seconds),
            self._of_tenant.bucket(tenant, now_seconds),
            self._of_address.bucket(address, now_seconds),
        )


def grant(buckets: Sequence[TokenBucket], wanted: int, now_seconds: float) -> int:
    """How many of `wanted` pass all buckets; they are charged to each."""
    granted = wanted
    for bucket in buckets:
        available = bucket.available(now_seconds)
        if available < granted:
            granted = int(available)
    if granted:
        for bucket in buckets:
            bucket.charge(granted)
    return granted


def retry_after_ms(buckets: Sequence[TokenBucket], now_seconds: float) -> int:
    """When one more would pass them all."""
    return max(bucket.wait_ms(now_seconds) for bucket in buckets)


class RateTable(Generic[K]):
    """Shared buckets by key, bounded."""

    def __init__(self, rate: Rate, *, buckets_max: int = limits.RATE_BUCKETS_MAX) -> None:
        self._rate = rate
        self._buckets_max = buckets_max
        self._buckets: dict[K, TokenBucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def bucket(self, key: K, now_seconds: float) -> TokenBucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self._buckets_max:
                self._make_room(now_seconds)
            bucket = self._buckets[key] = TokenBucket(self._rate, now_seconds)
        return bucket

    def _make_room(self, now_seconds: float) -> None:
        in_use = {key: bucket for key, bucket in self._buckets.items() if not bucket.is_full(now_seconds)}
        # An eighth at once, so that a crowded table is not walked for each newcomer.
        surplus = len(in_use) - self._buckets_max * 7 // 8
        for key in list(in_use)[: max(surplus, 0)]:
            del in_use[key]
        self._buckets = in_use


class FailedLogins:
    """How often an address may present a token that is refused."""

    def __init__(self, rate: Rate, *, addresses_max: int = limits.FAILED_LOGIN_ADDRESSES_MAX) -> None:
        self._rate = rate
        self._addresses_max = addresses_max
        self._buckets: dict[bytes, TokenBucket] = {}
        self._crowd: TokenBucket | None = None

    def wait_ms(self, address: bytes, now_seconds: float) -> int:
        """0: the address may try. Otherwise its token is not even looked at: verifying is the dear part."""
        bucket = self._find(address)
        return 0 if bucket is None else bucket.wait_ms(now_seconds)

    def note_failure(self, address: bytes, now_seconds: float) -> None:
        bucket = self._buckets.get(address) or self._add(address, now_seconds)
        if bucket.available(now_seconds) >= 1:
            bucket.charge(1)

    def _find(self, address: bytes) -> TokenBucket | None:
        bucket = self._buckets.get(address)
        if bucket is None and len(self._buckets) >= self._addresses_max:
            return self._crowd
        return bucket

    def _add(self, address: bytes, now_seconds: float) -> TokenBucket:
        # With every failure of the crowd, which are few: a table that was full once gets room again.
        if len(self._buckets) >= self._addresses_max:
            self._buckets = {a: b for a, b in self._buckets.items() if not b.is_full(now_seconds)}
        if len(self._buckets) >= self._addresses_max:
            self._crowd = self._crowd or TokenBucket(self._rate, now_seconds)
            return self._crowd
        bucket = self._buckets[address] = TokenBucket(self._rate, now_seconds)
        return bucket


def address_key(host: str) -> bytes:
    """What counts as one address: an IPv4 address, or the first 64 bits of an IPv6 one."""
    if ":" not in host:
        return host.encode()
    if host.startswith("::ffff:") and "." in host:
        return host[7:].encode()
    head, _, tail = host.partition("%")[0].partition("::")
    groups = head.split(":") if head else []
    if "::" in host:
        after = tail.split(":") if tail else []
        groups += ["0"] * (8 - len(groups) - len(after)) + after
    return ":".join(group.lstrip("0") or "0" for group in groups[:4]).encode()


# --- connections -------------------------------------------------------------------------------------


def may_connect(bounds: GatewayLimits, *, open_connections: int, of_address: int) -> bool:
    """Whether one more connection is admitted; both counts are without it."""
    return open_connections < bounds.connections_max and of_address < bounds.connections_per_address_max


def is_slow(bounds: GatewayLimits, *, unsent_bytes: int, unanswered: int) -> bool:
    """Whether a peer takes too little: bytes it has not read, or answers it has not waited for."""
    return unsent_bytes > bounds.unsent_bytes_max or unanswered > bounds.unanswered_requests_max


NEVER: Final = float("inf")


class ConnectionTimes(NamedTuple):
    """What decides when a connection is over, monotonic seconds."""

    connected_at: float
    heard_at: float
    frame_begun_at: float
    """NEVER: no frame is incomplete."""
    token_ends_at: float
    """NEVER: not authenticated yet."""


def next_deadline(bounds: GatewayLimits, times: ConnectionTimes) -> tuple[float, type[ClientError], str]:
    """The moment at which the connection ends if nothing changes, and why it would."""
    if times.token_ends_at == NEVER:
        at = times.connected_at + bounds.auth_timeout_ms / 1000
        return at, AuthRequired, "no AUTH in time"
    silent_at = times.heard_at + bounds.silence_ms_max / 1000
    frame_at = times.frame_begun_at + bounds.frame_timeout_ms / 1000
    first = min(silent_at, frame_at, times.token_ends_at)
    if first == times.token_ends_at:
        return first, Unauthenticated, "token expired"
    return first, HeartbeatLost, "silent" if first == silent_at else "a frame took too long"


def token_end(*, now_seconds: float, now_ms: int, expires_at_ms: int) -> float:
    """Monotonic end of a session, so that a later step of the wall clock changes nothing."""
    return now_seconds + (expires_at_ms - now_ms + limits.TOKEN_EXPIRY_GRACE_MS) / 1000


class Deadlines:
    """Reminders for connections, earliest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def remind(self, at: float, handle: int, generation: int) -> None:
        heapq.heappush(self._heap, (at, handle, generation))

    def due(self, now_seconds: float) -> list[tuple[float, int, int]]:
        """Takes out every reminder up to now: (when, handle, generation)."""
        heap = self._heap
        taken = []
        while heap and heap[0][0] <= now_seconds:
            taken.append(heapq.heappop(heap))
        return taken


def slow_consumer(*, unsent_bytes: int, unanswered: int) -> SlowConsumer:
    return SlowConsumer(f"{unsent_bytes} bytes unread, {unanswered} requests unanswered")


def reconnect_after_ms(index: int, count: int) -> int:
    """When the `index`-th of `count` drained clients should come back: evenly, slower for more clients."""
    assert 0 <= index < count
    spread = min(limits.RECONNECT_SPREAD_MS_MAX, limits.RECONNECT_SPREAD_MS_PER_CONNECTION * count)
    return spread * index // count

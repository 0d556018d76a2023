"""What the gateway decides: rates, slow and silent peers, destinations, the way back after a drain."""

import pytest

from qim import limits
from qim.domain.gateway import (
    DESTINATIONS,
    NEVER,
    ConnectionTimes,
    Deadlines,
    Destination,
    FailedLogins,
    GatewayLimits,
    Rate,
    RateTable,
    SendQuotas,
    TokenBucket,
    address_key,
    grant,
    is_slow,
    may_connect,
    next_deadline,
    reconnect_after_ms,
    retry_after_ms,
    token_end,
)
from qim.errors import AuthRequired, HeartbeatLost, Unauthenticated
from qim.ids import TenantId, UserId
from qim.wire.layout import CLIENT_OPS

BOUNDS = GatewayLimits()
TENANT = TenantId(1)
ALICE, BOB = UserId(b"a" * 16), UserId(b"b" * 16)


def test_every_opcode_of_a_client_has_a_destination() -> None:
    assert set(DESTINATIONS) == {op.name for op in CLIENT_OPS}


def test_a_message_goes_to_its_conversation_and_a_pull_to_its_user() -> None:
    assert DESTINATIONS["SEND_MESSAGE"] is Destination.CONVERSATION
    assert DESTINATIONS["PULL_MAILBOX"] is Destination.USER


def test_a_burst_passes_and_the_next_message_does_not() -> None:
    bucket = TokenBucket(Rate(10, 3), 0.0)
    assert grant([bucket], 5, 0.0) == 3
    assert grant([bucket], 1, 0.0) == 0


def test_tokens_come_back_with_time_and_never_above_the_burst() -> None:
    bucket = TokenBucket(Rate(10, 3), 0.0)
    grant([bucket], 3, 0.0)
    assert grant([bucket], 3, 0.2) == 2
    assert grant([bucket], 9, 100.0) == 3


def test_a_clock_that_stands_still_gives_no_tokens() -> None:
    bucket = TokenBucket(Rate(10, 1), 5.0)
    grant([bucket], 1, 5.0)
    assert grant([bucket], 1, 4.0) == 0


def test_the_scarcest_bucket_decides_and_all_are_charged_the_same() -> None:
    wide, narrow = TokenBucket(Rate(1, 10), 0.0), TokenBucket(Rate(1, 4), 0.0)
    assert grant([wide, narrow], 6, 0.0) == 4
    assert wide.available(0.0) == 6


def test_a_refusal_charges_nobody() -> None:
    wide, empty = TokenBucket(Rate(1, 10), 0.0), TokenBucket(Rate(1, 1), 0.0)
    empty.charge(1)
    assert grant([wide, empty], 2, 0.0) == 0
    assert wide.available(0.0) == 10


def test_after_the_told_wait_one_more_passes() -> None:
    bucket = TokenBucket(Rate(3, 1), 0.0)
    grant([bucket], 1, 0.0)
    wait_ms = retry_after_ms([bucket], 0.0)
    assert grant([bucket], 1, wait_ms / 1000) == 1


def test_two_connections_share_the_bucket_of_their_user_and_not_their_own() -> None:
    quotas = SendQuotas(BOUNDS._replace(sends=Rate(1, 5)))
    one = quotas.buckets(TENANT, ALICE, b"x", 0.0)
    other = quotas.buckets(TENANT, ALICE, b"x", 0.0)
    assert grant(one, 4, 0.0) == 4
    assert grant(other, 4, 0.0) == 1


@pytest.mark.shows("F-41")
def test_one_user_at_the_limit_leaves_another_alone() -> None:
    quotas = SendQuotas(BOUNDS._replace(sends=Rate(1, 5)))
    grant(quotas.buckets(TENANT, ALICE, b"x", 0.0), 50, 0.0)
    assert grant(quotas.buckets(TENANT, BOB, b"x", 0.0), 5, 0.0) == 5


def test_a_full_rate_table_forgets_full_buckets_first() -> None:
    table: RateTable[int] = RateTable(Rate(1, 2), buckets_max=8)
    used = table.bucket(0, 0.0)
    used.charge(2)
    for key in range(1, 20):
        table.bucket(key, 0.0)
    assert len(table) <= 8
    assert table.bucket(0, 0.0) is used


def test_a_rate_table_full_of_used_buckets_forgets_the_oldest() -> None:
    table: RateTable[int] = RateTable(Rate(0.001, 2), buckets_max=8)
    for key in range(100):
        table.bucket(key, 0.0).charge(2)
    assert len(table) <= 8
    assert table.bucket(99, 0.0).available(0.0) == 0


def test_an_address_may_fail_three_times_and_then_waits() -> None:
    failed = FailedLogins(Rate(0.17, 3))
    for _ in range(3):
        assert failed.wait_ms(b"x", 0.0) == 0
        failed.note_failure(b"x", 0.0)
    wait_ms = failed.wait_ms(b"x", 0.0)
    assert 5_000 < wait_ms < 7_000
    assert failed.wait_ms(b"x", wait_ms / 1000) == 0


def test_the_failures_of_one_address_do_not_stop_another() -> None:
    failed = FailedLogins(Rate(0.17, 1))
    failed.note_failure(b"x", 0.0)
    assert failed.wait_ms(b"y", 0.0) == 0


def test_a_crowd_of_failing_addresses_shares_one_allowance() -> None:
    failed = FailedLogins(Rate(0.001, 1), addresses_max=4)
    for number in range(6):
        failed.note_failure(b"%d" % number, 0.0)
    assert failed.wait_ms(b"new", 0.0) > 0


def test_old_failures_make_room_for_new_addresses() -> None:
    failed = FailedLogins(Rate(1, 1), addresses_max=4)
    for number in range(4):
        failed.note_failure(b"%d" % number, 0.0)
    failed.note_failure(b"new", 100.0)
    assert failed.wait_ms(b"new", 100.0) > 0
    assert failed.wait_ms(b"other", 100.0) == 0


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("192.0.2.7", b"192.0.2.7"),
        ("::ffff:192.0.2.7", b"192.0.2.7"),
        ("2001:db8:0:1:aaaa::7", b"2001:db8:0:1"),
        ("2001:db8::7", b"2001:db8:0:0"),
        ("2001:0db8:0000:0001::", b"2001:db8:0:1"),
        ("fe80::1%eth0", b"fe80:0:0:0"),
        ("::1", b"0:0:0:0"),
    ],
)
def test_an_address_is_an_ipv4_address_or_a_64_of_ipv6(host: str, key: bytes) -> None:
    assert address_key(host) == key


def test_the_last_place_is_given_and_no_more() -> None:
    bounds = BOUNDS._replace(connections_max=2, connections_per_address_max=2)
    assert may_connect(bounds, open_connections=1, of_address=1)
    assert not may_connect(bounds, open_connections=2, of_address=0)
    assert not may_connect(bounds, open_connections=1, of_address=2)


@pytest.mark.shows("F-40")
def test_a_peer_is_slow_above_its_bounds_and_not_at_them() -> None:
    assert not is_slow(
        BOUNDS, unsent_bytes=limits.UNSENT_BYTES_MAX, unanswered=limits.UNANSWERED_REQUESTS_MAX
    )
    assert is_slow(BOUNDS, unsent_bytes=limits.UNSENT_BYTES_MAX + 1, unanswered=0)
    assert is_slow(BOUNDS, unsent_bytes=0, unanswered=limits.UNANSWERED_REQUESTS_MAX + 1)


def test_before_the_log_in_only_the_time_for_it_counts() -> None:
    at, error, _ = next_deadline(BOUNDS, ConnectionTimes(5.0, 9.0, NEVER, NEVER))
    assert (at, error) == (15.0, AuthRequired)


def test_a_silent_connection_ends_a_ping_and_eight_seconds_after_it_was_heard() -> None:
    at, error, _ = next_deadline(BOUNDS, ConnectionTimes(0.0, 100.0, NEVER, 1_000.0))
    assert (at, error) == (133.0, HeartbeatLost)


def test_a_trickled_frame_ends_before_the_silence_does() -> None:
    at, error, reason = next_deadline(BOUNDS, ConnectionTimes(0.0, 109.0, 100.0, 1_000.0))
    assert (at, error, reason) == (110.0, HeartbeatLost, "a frame took too long")


def test_a_talkative_connection_ends_with_its_token() -> None:
    at, error, _ = next_deadline(BOUNDS, ConnectionTimes(0.0, 999.0, NEVER, 1_000.0))
    assert (at, error) == (1_000.0, Unauthenticated)


def test_a_token_ends_a_minute_after_its_expiry() -> None:
    assert token_end(now_seconds=7.0, now_ms=1_000, expires_at_ms=31_000) == 7.0 + 30.0 + 60.0


def test_reminders_come_due_in_order_and_once() -> None:
    deadlines = Deadlines()
    for at in (3.0, 1.0, 2.0):
        deadlines.remind(at, int(at), 0)
    assert deadlines.due(2.0) == [(1.0, 1, 0), (2.0, 2, 0)]
    assert deadlines.due(2.0) == []
    assert len(deadlines) == 1


def test_drained_clients_come_back_spread_out() -> None:
    waits = [reconnect_after_ms(index, 5_000) for index in range(5_000)]
    in_one_second = max(sum(second == wait // 1000 for wait in waits) for second in range(20))
    assert max(waits) < limits.RECONNECT_SPREAD_MS_MAX
    assert in_one_second <= 0.2 * len(waits)


def test_a_lone_client_comes_back_at_once() -> None:
    assert reconnect_after_ms(0, 1) == 0

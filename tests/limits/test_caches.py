"""What is remembered for speed or for fairness, filled past its bound: it stays small, and nothing becomes
wrong.
"""

from qim.adapters.commitlog_tail import LogTail
from qim.domain import fanout, presence, writer
from qim.domain.gateway import FailedLogins, Rate, RateTable
from qim.domain.placement import direct_conversation, group_conversation, shard_of_user
from qim.domain.presence import Outcome, PresenceTable, Session
from qim.ids import ConversationId, DeviceId, GroupId, Offset, SessionId, SlotId, TenantId, UserId, WorkerId
from qim.limits import (
    FAILED_LOGIN_ADDRESSES_MAX,
    GROUP_CACHE_ENTRIES_MAX,
    HEADERS_REMEMBERED_MAX,
    LOG_TAIL_BYTES_MAX,
    PAIR_CACHE_ENTRIES_MAX,
    PRESENCE_SESSIONS_PER_USER_MAX,
    RATE_BUCKETS_MAX,
    ROUTES_MAX,
    USER_CACHE_ENTRIES_MAX,
)
from qim.records import _read_header, parse_header
from tests.unit.workers.group_calls import PLACE, create_group
from tests.unit.workers.rig import Rig, build_outbox
from workers.group_versions import GroupVersions
from workers.router import OwnerCache

TENANT = TenantId(7)
BEYOND = 100


def user(number: int) -> UserId:
    return UserId(number.to_bytes(16, "big"))


def group(number: int) -> GroupId:
    return GroupId(user(number))


def test_users_are_remembered_up_to_the_bound_and_found_again() -> None:
    shard_of = fanout.shard_of
    shard_of.cache_clear()
    for number in range(USER_CACHE_ENTRIES_MAX + BEYOND):
        shard_of(TENANT, user(number))
    assert shard_of.cache_info().currsize == USER_CACHE_ENTRIES_MAX
    assert shard_of(TENANT, user(0)) == shard_of_user(TENANT, user(0))
    shard_of.cache_clear()


def test_pairs_are_remembered_up_to_the_bound_and_found_again() -> None:
    route = writer.route_direct
    route.cache_clear()
    for number in range(PAIR_CACHE_ENTRIES_MAX + BEYOND):
        route(TENANT, user(0), user(number))
    assert route.cache_info().currsize == PAIR_CACHE_ENTRIES_MAX
    found = route(TENANT, user(0), user(0)).conversation
    assert found == direct_conversation(TENANT, user(0), user(0))
    route.cache_clear()


def test_groups_are_remembered_up_to_the_bound_and_found_again() -> None:
    route = writer.route_group
    route.cache_clear()
    for number in range(GROUP_CACHE_ENTRIES_MAX + BEYOND):
        route(TENANT, group(number))
    assert route.cache_info().currsize == GROUP_CACHE_ENTRIES_MAX
    assert route(TENANT, group(0)).conversation == group_conversation(TENANT, group(0))
    route.cache_clear()


async def test_versions_are_remembered_up_to_the_bound_and_learnt_again() -> None:
    rig = await Rig().prepare()
    await create_group(rig)
    versions = GroupVersions(rig.memberships)
    versions.note(PLACE.conversation, 5)
    for number in range(GROUP_CACHE_ENTRIES_MAX + BEYOND):
        versions.note(ConversationId(group(number)), number)
    assert len(versions.known) == GROUP_CACHE_ENTRIES_MAX
    assert PLACE.conversation not in versions.known
    assert await versions.refresh([PLACE]) == set()
    assert versions.known[PLACE.conversation] == 1
    assert len(versions.known) == GROUP_CACHE_ENTRIES_MAX


def test_headers_are_remembered_up_to_the_bound_and_read_again() -> None:
    first = build_outbox(seq=1)
    header = parse_header(first)
    for seq in range(2, HEADERS_REMEMBERED_MAX + BEYOND):
        parse_header(build_outbox(seq=seq))
    assert _read_header.cache_info().currsize == HEADERS_REMEMBERED_MAX
    assert parse_header(first) == header


def test_owners_are_remembered_up_to_the_bound_and_found_again() -> None:
    cache: OwnerCache[int] = OwnerCache(ROUTES_MAX)
    for number in range(2 * ROUTES_MAX):
        cache.put(number, WorkerId(number % 2))
        assert len(cache) <= ROUTES_MAX
    assert cache.get(0) is None
    cache.put(0, WorkerId(0))
    assert cache.get(0) == WorkerId(0)


def test_a_crowd_of_senders_is_remembered_up_to_the_bound_and_each_may_send() -> None:
    table: RateTable[int] = RateTable(Rate(1, 2))
    for number in range(RATE_BUCKETS_MAX + BEYOND):
        bucket = table.bucket(number, 0.0)
        assert bucket.available(0.0) == 2
        bucket.charge(1)
        assert len(table) <= RATE_BUCKETS_MAX
    assert table.bucket(RATE_BUCKETS_MAX + BEYOND - 1, 0.0).available(0.0) == 1, "the newest is remembered"


def test_a_crowd_of_failing_addresses_shares_a_bucket_and_is_forgotten_later() -> None:
    logins = FailedLogins(Rate(0.1, 1))
    for number in range(FAILED_LOGIN_ADDRESSES_MAX + BEYOND):
        logins.note_failure(b"%d" % number, 0.0)
    assert len(logins._buckets) == FAILED_LOGIN_ADDRESSES_MAX
    assert logins.wait_ms(b"0", 0.0) > 0
    assert logins.wait_ms(b"a newcomer", 0.0) > 0, "a full table lets nobody in for nothing"
    assert logins.wait_ms(b"a newcomer", 11.0) == 0
    logins.note_failure(b"a newcomer", 11.0)
    assert len(logins._buckets) == 1


def session(number: int) -> Session:
    device, name = DeviceId(number.to_bytes(16, "big")), SessionId(number.to_bytes(16, "big"))
    return Session(WorkerId(0), number, 1, TENANT, user(1), device, name)


def test_a_user_has_so_many_devices_and_a_place_that_gets_free_is_given_again() -> None:
    table = PresenceTable()
    for number in range(PRESENCE_SESSIONS_PER_USER_MAX):
        assert table.announce(session(number), repeated=False).outcome is Outcome.REGISTERED
    one_more = session(PRESENCE_SESSIONS_PER_USER_MAX)
    assert table.announce(one_more, repeated=False).outcome is Outcome.FULL
    assert len(table.sessions_of(TENANT, user(1))) == PRESENCE_SESSIONS_PER_USER_MAX
    table.withdraw(TENANT, user(1), session(0).session)
    assert table.announce(one_more, repeated=False).outcome is Outcome.REGISTERED
    assert presence.UNKNOWN == 0


def test_a_tail_whose_reader_keeps_up_remembers_nothing() -> None:
    tail = LogTail(bytes_max=LOG_TAIL_BYTES_MAX)
    slot, appends = SlotId(0), 10_000
    tail.watch([slot], lambda _grown: None)
    for offset in range(appends):
        tail.add(slot, Offset(offset), [b"record"])
        assert len(tail.chunks_at(slot, Offset(offset))) == 1
    assert tail._bytes == 0
    assert len(tail._ages) < appends // 2

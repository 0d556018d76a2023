"""Presence at the owner: few questions for a wave of log-ins, no waiting for a broken store, a bound."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Self, cast

from qim.domain.placement import Placement, shard_of_user
from qim.domain.presence import PresenceTable, Session
from qim.errors import ClientError, GoingAway, Replaced, ResourceExhausted, StoreRefused
from qim.ids import DeviceId, MailboxSeq, SessionId, TenantId, UserId, WorkerId
from qim.limits import PRESENCE_READS_MAX
from qim.ports import MailboxPage, MailboxPageQuery, MailboxStore
from tests.waiting import happens
from workers.presence import Presence

TENANT = TenantId(1)


def session(number: int, *, login: int = 1, worker: int = 0) -> Session:
    user = UserId(number.to_bytes(16, "big"))
    name = SessionId(login.to_bytes(6, "big") + bytes(10))
    return Session(WorkerId(worker), number, login, TENANT, user, DeviceId(b"d" * 16), name)


class Answers:
    """Notes what the gateways are told."""

    def __init__(self) -> None:
        self.newest: dict[int, MailboxSeq] = {}
        self.closed: list[tuple[Session, ClientError]] = []

    def announced(self, session: Session, newest: MailboxSeq) -> None:
        self.newest[session.handle] = newest

    def close_session(self, session: Session, error: ClientError) -> None:
        self.closed.append((session, error))


class Store:
    """Answers with the user's own number, once it is allowed to."""

    def __init__(self) -> None:
        self.asked: list[list[MailboxPageQuery]] = []
        self.allowed = asyncio.Event()
        self.failing = False

    def read_mailbox(self, queries: Sequence[MailboxPageQuery]) -> Awaitable[list[MailboxPage]]:
        self.asked.append(list(queries))
        return self._read(queries)

    async def _read(self, queries: Sequence[MailboxPageQuery]) -> list[MailboxPage]:
        await self.allowed.wait()
        if self.failing:
            raise StoreRefused("not connected")
        numbers = [MailboxSeq(int.from_bytes(query.user, "big")) for query in queries]
        return [MailboxPage((), MailboxSeq(0), more=False, rebuild=True, newest=n) for n in numbers]


class Owner:
    """One presence role with its loop, on as many stores as wanted."""

    def __init__(self, *, instances: int = 1, table: PresenceTable | None = None) -> None:
        self.stores = [Store() for _ in range(instances)]
        self.answers = Answers()
        self.placement = Placement(workers=1, core_instances=1, mailbox_instances=instances)
        self.presence = Presence(
            placement=self.placement,
            mailboxes=[cast("MailboxStore", store) for store in self.stores],
            answers=self.answers,
            table=table,
        )

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self.presence.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        for store in self.stores:
            store.allowed.set()
        await self.presence.drain(0)
        await self._running


async def test_a_wave_of_log_ins_is_one_question() -> None:
    async with Owner() as owner:
        for number in range(100):
            owner.presence.announce(session(number), repeated=False)
        owner.stores[0].allowed.set()
        await happens(lambda: len(owner.answers.newest) == 100, what="all are answered")
        assert [len(asked) for asked in owner.stores[0].asked] == [100]
        assert owner.answers.newest[42] == 42


async def test_a_question_is_bounded() -> None:
    async with Owner() as owner:
        owner.stores[0].allowed.set()
        for number in range(PRESENCE_READS_MAX + 1):
            owner.presence.announce(session(number), repeated=False)
        await happens(lambda: len(owner.answers.newest) == PRESENCE_READS_MAX + 1, what="all are answered")
        assert [len(asked) for asked in owner.stores[0].asked] == [PRESENCE_READS_MAX, 1]


async def test_each_instance_is_asked_for_its_own_users_at_the_same_time() -> None:
    async with Owner(instances=2) as owner:
        for number in range(50):
            owner.presence.announce(session(number), repeated=False)
        await happens(
            lambda: all(store.asked for store in owner.stores), what="both are asked before any answers"
        )
        for instance, store in enumerate(owner.stores):
            (asked,) = store.asked
            slots = [shard_of_user(TENANT, query.user) for query in asked]
            assert [query.slot for query in asked] == slots
            assert {owner.placement.mailbox_instance_of(slot) for slot in slots} == {instance}


async def test_a_session_is_registered_before_the_store_answers() -> None:
    async with Owner() as owner:
        one = session(7)
        owner.presence.announce(one, repeated=False)
        assert owner.presence.sessions_of(TENANT, one.user) == [one]
        assert owner.answers.newest == {}
        await happens(lambda: owner.stores[0].asked, what="asked")
        assert owner.presence.advance(TENANT, one.user, MailboxSeq(9)) == 0
        owner.stores[0].allowed.set()
        await happens(lambda: owner.answers.newest, what="answered")
        assert owner.answers.newest == {7: 9}
        assert owner.presence.advance(TENANT, one.user, MailboxSeq(12)) == 9


async def test_a_known_user_is_answered_at_once() -> None:
    async with Owner() as owner:
        owner.stores[0].allowed.set()
        owner.presence.announce(session(7), repeated=False)
        await happens(lambda: owner.answers.newest, what="answered")
        owner.answers.newest.clear()
        owner.presence.announce(session(7), repeated=True)
        assert owner.answers.newest == {7: 7}
        assert len(owner.stores[0].asked) == 1


async def test_a_store_that_refuses_is_answered_for_with_not_known_and_asked_again() -> None:
    async with Owner() as owner:
        store = owner.stores[0]
        store.failing = True
        store.allowed.set()
        owner.presence.announce(session(7), repeated=False)
        await happens(lambda: owner.answers.newest, what="answered")
        assert owner.answers.newest == {7: 0}
        store.failing = False
        owner.presence.announce(session(7), repeated=True)
        await happens(lambda: owner.answers.newest == {7: 7}, what="answered from the store")


async def test_a_replaced_session_is_closed_and_its_withdrawal_changes_nothing() -> None:
    async with Owner() as owner:
        old, new = session(7, login=1), session(7, login=2, worker=1)
        owner.presence.announce(old, repeated=False)
        owner.presence.announce(new, repeated=False)
        ((closed, error),) = owner.answers.closed
        assert (closed, error.code) == (old, Replaced.code)
        owner.presence.withdraw(TENANT, old.user, old.session)
        assert owner.presence.sessions_of(TENANT, old.user) == [new]


async def test_the_ping_of_a_replaced_session_is_sent_away() -> None:
    async with Owner() as owner:
        old, new = session(7, login=1), session(7, login=2)
        owner.presence.announce(new, repeated=False)
        owner.presence.announce(old, repeated=True)
        ((closed, error),) = owner.answers.closed
        assert (closed, error.code) == (old, Replaced.code)
        assert owner.presence.sessions_of(TENANT, old.user) == [new]


async def test_who_was_ended_on_the_word_of_a_clock_is_asked_to_come_again() -> None:
    async with Owner() as owner:
        faster, overtaken = session(7, login=2, worker=1), session(7, login=1)
        owner.presence.announce(faster, repeated=False)
        owner.presence.announce(overtaken, repeated=False)
        ((closed, error),) = owner.answers.closed
        assert (closed, error.code) == (faster, GoingAway.code)
        assert owner.presence.sessions_of(TENANT, faster.user) == [overtaken]


async def test_a_full_table_sends_the_newcomer_away() -> None:
    async with Owner(table=PresenceTable(sessions_max=1)) as owner:
        owner.presence.announce(session(1), repeated=False)
        owner.presence.announce(session(2), repeated=False)
        ((closed, error),) = owner.answers.closed
        assert (closed, error.code) == (session(2), ResourceExhausted.code)
        assert error.retry_after_ms > 0


async def test_a_lost_gateway_takes_its_sessions_along() -> None:
    async with Owner() as owner:
        owner.presence.announce(session(1, worker=1), repeated=False)
        owner.presence.announce(session(2, worker=2), repeated=False)
        owner.presence.drop_worker(WorkerId(1))
        assert len(owner.presence) == 1


async def test_after_the_drain_nobody_waits() -> None:
    async with Owner() as owner:
        await owner.presence.drain(0)
        owner.presence.announce(session(7), repeated=False)
        assert owner.answers.newest == {7: 0}

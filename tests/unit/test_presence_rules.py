"""The presence table: who replaces whom, what a withdrawal may remove, what `previous` may claim."""

import pytest

from qim.domain.presence import Announcement, Outcome, PresenceTable, Session
from qim.ids import DeviceId, MailboxSeq, SessionId, TenantId, UserId, WorkerId

TENANT = TenantId(1)
ALICE, BOB = UserId(b"a" * 16), UserId(b"b" * 16)
PHONE, TABLET = DeviceId(b"p" * 16), DeviceId(b"t" * 16)


def session(
    number: int, *, user: UserId = ALICE, device: DeviceId = PHONE, worker: int = 0, noise: int = 0
) -> Session:
    """Sessions with a larger number logged in later, by the clock of their device."""
    name = SessionId(number.to_bytes(6, "big") + bytes([noise]) * 10)
    return Session(WorkerId(worker), number, number, TENANT, user, device, name)


def test_a_registered_session_is_where_pushes_go() -> None:
    table = PresenceTable()
    assert table.announce(session(1), repeated=False) == Announcement(Outcome.REGISTERED)
    assert table.sessions_of(TENANT, ALICE) == [session(1)]
    assert table.sessions_of(TENANT, BOB) == []
    assert table.sessions_of(TenantId(2), ALICE) == []


def test_two_devices_of_one_user_live_side_by_side() -> None:
    table = PresenceTable()
    table.announce(session(1), repeated=False)
    assert table.announce(session(2, device=TABLET), repeated=False).ended is None
    assert len(table.sessions_of(TENANT, ALICE)) == 2


def test_a_later_log_in_of_a_device_replaces_the_earlier() -> None:
    table = PresenceTable()
    table.announce(session(1), repeated=False)
    assert table.announce(session(2, worker=3), repeated=False) == Announcement(
        Outcome.REGISTERED, session(1)
    )
    assert table.sessions_of(TENANT, ALICE) == [session(2, worker=3)]
    assert len(table) == 1


def test_a_log_in_counts_even_when_the_wall_clock_has_stepped_back() -> None:
    table = PresenceTable()
    table.announce(session(5), repeated=False)
    assert table.announce(session(2), repeated=False) == Announcement(Outcome.REGISTERED, session(5), False)
    assert table.sessions_of(TENANT, ALICE) == [session(2)]


def test_the_ping_of_a_replaced_session_does_not_throw_out_its_successor() -> None:
    table = PresenceTable()
    table.announce(session(2), repeated=False)
    assert table.announce(session(1), repeated=True) == Announcement(Outcome.REFUSED, session(1))
    assert table.sessions_of(TENANT, ALICE) == [session(2)]


@pytest.mark.shows("O13")
def test_what_is_announced_again_does_not_throw_out_a_log_in_whatever_the_clocks_say() -> None:
    """A dead connection at a gateway whose clock is ahead; the device is back through another one."""
    table = PresenceTable()
    table.announce(session(1, worker=1), repeated=False)
    dead = session(9, worker=2)
    assert table.announce(dead, repeated=True) == Announcement(Outcome.REFUSED, dead, is_sure=False)
    assert table.sessions_of(TENANT, ALICE) == [session(1, worker=1)]


@pytest.mark.shows("O13")
@pytest.mark.parametrize(("before", "is_sure"), [(3, True), (4, False), (5, False)])
@pytest.mark.parametrize("worker", [1, 2])
def test_a_log_in_whose_order_is_not_sure_ends_nobody_for_good(
    before: int, is_sure: bool, worker: int
) -> None:
    """It may have lain unread, even at the gateway of the other one; equal times say nothing."""
    table = PresenceTable()
    held = session(before, worker=1, noise=255)
    table.announce(held, repeated=False)
    answer = table.announce(session(4, worker=worker), repeated=False)
    assert answer == Announcement(Outcome.REGISTERED, held, is_sure)


@pytest.mark.shows("O13")
@pytest.mark.parametrize("is_told", [True, False], ids=["its end was lost", "its gateway was away"])
def test_a_living_session_that_an_overtaken_log_in_pushed_out_is_not_ended_for_good(is_told: bool) -> None:
    table = PresenceTable()
    living, overtaken = session(5, worker=1), session(4, worker=2)
    table.announce(living, repeated=False)
    if not is_told:
        table.drop_worker(WorkerId(1))
    table.announce(overtaken, repeated=False)
    assert table.announce(living, repeated=True) == Announcement(Outcome.REFUSED, living, is_sure=False)


@pytest.mark.parametrize("is_dropped", [True, False])
def test_what_is_remembered_of_a_session_goes_with_it(is_dropped: bool) -> None:
    """The user stays in the table with another device, and devices come and go."""
    table = PresenceTable()
    table.announce(session(1, device=TABLET), repeated=False)
    table.announce(session(2, worker=1), repeated=True)
    assert table._users[TENANT, ALICE].again == {PHONE}
    if is_dropped:
        table.drop_worker(WorkerId(1))
    else:
        table.withdraw(TENANT, ALICE, session(2).session)
    assert table._users[TENANT, ALICE].again is None


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_after_the_owner_was_lost_the_later_session_stays_and_the_other_comes_again(
    order: tuple[int, int],
) -> None:
    table = PresenceTable()
    answers = [table.announce(session(number), repeated=True) for number in order]
    assert table.sessions_of(TENANT, ALICE) == [session(2)]
    assert (answers[1].ended, answers[1].is_sure) == (session(1), False)


def test_a_repeated_announcement_changes_nothing() -> None:
    table = PresenceTable()
    table.announce(session(1), repeated=False)
    assert table.announce(session(1), repeated=True) == Announcement(Outcome.REGISTERED)
    assert len(table) == 1


@pytest.mark.shows("F-42", "O13")
def test_the_late_end_of_an_old_session_does_not_remove_the_new_one() -> None:
    table = PresenceTable()
    table.announce(session(1), repeated=False)
    table.announce(session(2), repeated=False)
    assert not table.withdraw(TENANT, ALICE, session(1).session)
    assert table.sessions_of(TENANT, ALICE) == [session(2)]


def test_a_withdrawn_session_is_gone_and_the_table_empty() -> None:
    table = PresenceTable()
    table.announce(session(1), repeated=False)
    assert table.withdraw(TENANT, ALICE, session(1).session)
    assert not table.withdraw(TENANT, ALICE, session(1).session)
    assert table.sessions_of(TENANT, ALICE) == []
    assert len(table) == 0


def test_a_lost_gateway_takes_only_its_own_sessions_along() -> None:
    table = PresenceTable()
    table.announce(session(1, worker=1), repeated=False)
    table.announce(session(2, device=TABLET, worker=2), repeated=False)
    table.announce(session(3, user=BOB, worker=1), repeated=False)
    assert table.drop_worker(WorkerId(1)) == 2
    assert table.sessions_of(TENANT, ALICE) == [session(2, device=TABLET, worker=2)]
    assert len(table) == 1


def test_a_full_table_refuses_newcomers_and_keeps_who_is_there() -> None:
    table = PresenceTable(sessions_max=1)
    table.announce(session(1), repeated=False)
    assert table.announce(session(2, user=BOB), repeated=False).outcome is Outcome.FULL
    assert table.announce(session(3), repeated=False).outcome is Outcome.REGISTERED


def test_one_user_cannot_fill_the_table_with_devices() -> None:
    table = PresenceTable(sessions_per_user_max=1)
    table.announce(session(1), repeated=False)
    assert table.announce(session(2, device=TABLET), repeated=False).outcome is Outcome.FULL
    assert table.announce(session(3, user=BOB), repeated=False).outcome is Outcome.REGISTERED


def known(newest: int) -> PresenceTable:
    table = PresenceTable()
    table.announce(session(1), repeated=False)
    table.learn(TENANT, ALICE, MailboxSeq(newest), stay=table.stay_of(TENANT, ALICE))
    return table


@pytest.mark.shows("M10")
def test_entries_of_a_known_user_form_an_unbroken_chain() -> None:
    table = known(10)
    assert table.advance(TENANT, ALICE, MailboxSeq(12)) == 10
    assert table.advance(TENANT, ALICE, MailboxSeq(15)) == 12
    assert table.newest(TENANT, ALICE) == 15


def test_the_first_entry_before_the_store_has_answered_claims_no_predecessor() -> None:
    table = PresenceTable()
    table.announce(session(1), repeated=False)
    assert table.newest(TENANT, ALICE) is None
    assert table.advance(TENANT, ALICE, MailboxSeq(12)) == 0
    assert table.advance(TENANT, ALICE, MailboxSeq(15)) == 12


def test_a_late_answer_of_the_store_does_not_turn_the_chain_back() -> None:
    table = PresenceTable()
    table.announce(session(1), repeated=False)
    table.advance(TENANT, ALICE, MailboxSeq(12))
    assert table.learn(TENANT, ALICE, MailboxSeq(9), stay=table.stay_of(TENANT, ALICE)) == 12
    assert table.advance(TENANT, ALICE, MailboxSeq(15)) == 12


def test_an_entry_that_the_store_had_already_counted_breaks_the_chain() -> None:
    table = known(12)
    assert table.advance(TENANT, ALICE, MailboxSeq(12)) == 0
    assert table.advance(TENANT, ALICE, MailboxSeq(15)) == 12


def test_an_answer_from_before_the_user_left_is_not_remembered() -> None:
    table = PresenceTable()
    table.announce(session(1), repeated=False)
    asked_during = table.stay_of(TENANT, ALICE)
    table.drop_worker(WorkerId(0))
    table.advance(TENANT, ALICE, MailboxSeq(12))
    table.announce(session(1), repeated=True)
    assert table.learn(TENANT, ALICE, MailboxSeq(9), stay=asked_during) == 9
    assert table.newest(TENANT, ALICE) is None


def test_an_empty_mailbox_is_known_to_be_empty() -> None:
    assert known(0).newest(TENANT, ALICE) == 0


def test_an_offline_user_has_no_chain() -> None:
    table = known(10)
    table.withdraw(TENANT, ALICE, session(1).session)
    assert table.newest(TENANT, ALICE) is None
    assert table.advance(TENANT, ALICE, MailboxSeq(12)) == 0
    table.announce(session(2), repeated=False)
    assert table.newest(TENANT, ALICE) is None

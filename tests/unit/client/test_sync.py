"""What the client decides about pushes, pulls, reconnects, gaps and old messages, under a manual clock."""

import pytest

from qim.client.model import Target
from qim.client.outgoing import ANSWER_SECONDS_MAX, Outgoing, PendingRow
from qim.client.sync import (
    HELD_PUSHES,
    HELD_SECONDS,
    HOLE_WAIT_SECONDS,
    RESEND_AGE_MS,
    UNCOVERED_MAX,
    Chain,
    Gap,
    Pull,
    Pushed,
    Reconnect,
    SeenPage,
    Verdict,
    is_aged,
    judge_page,
    subtract_page,
)
from qim.ids import ClientMessageId, MailboxSeq, Millis, Seq


def push(previous: int, seq: int, *, held: bool = True) -> Pushed:
    return Pushed(MailboxSeq(previous), MailboxSeq(seq), held)


def drained(cursor: int) -> Chain:
    chain = Chain(MailboxSeq(cursor))
    chain.on_login()
    assert chain.take_pull(0.0) == Pull(MailboxSeq(cursor))
    page(chain, cursor, now=0.0)
    return chain


def page(chain: Chain, covered: int, *, now: float, more: bool = False, entries: int = 1) -> None:
    chain.on_page(covered_through=MailboxSeq(covered), more=more, entries=entries, now=now)


@pytest.mark.shows("K1")
def test_login_pulls_first_and_is_drained_only_by_the_last_page() -> None:
    chain = Chain(MailboxSeq(10))
    chain.on_login()
    assert not chain.is_drained
    assert chain.take_pull(0.0) == Pull(MailboxSeq(10))
    page(chain, 40, now=0.0, more=True)
    steps = [chain.is_drained]
    assert chain.take_pull(0.0) == Pull(MailboxSeq(40))
    page(chain, 55, now=0.0)
    assert [*steps, chain.is_drained] == [False, True]
    assert chain.take_pull(0.0) is None


def test_only_one_pull_is_open() -> None:
    chain = Chain(MailboxSeq(10))
    chain.on_login()
    assert chain.take_pull(0.0) is not None
    chain.on_newest(MailboxSeq(99))
    assert chain.take_pull(0.0) is None


@pytest.mark.shows("K3")
def test_pushes_never_move_the_cursor() -> None:
    chain = drained(100)
    chain.on_pushes([push(90, 103), push(103, 106)], now=0.0)
    assert chain.cursor == 100
    assert chain.take_pull(1.0) is None


def test_an_unbroken_chain_is_named_as_held_after_ten_seconds() -> None:
    chain = drained(100)
    chain.on_pushes([push(90, 103), push(103, 106)], now=1.0)
    assert chain.next_deadline() == 1.0 + HELD_SECONDS
    assert chain.take_pull(0.9 + HELD_SECONDS) is None
    assert chain.take_pull(1.0 + HELD_SECONDS) == Pull(MailboxSeq(100), MailboxSeq(106), 2)


def test_an_unbroken_chain_is_named_as_held_after_sixty_four_pushes() -> None:
    chain = drained(100)
    chain.on_pushes([push(100 + n, 101 + n) for n in range(HELD_PUSHES - 1)], now=1.0)
    assert chain.take_pull(1.0) is None
    chain.on_pushes([push(99 + HELD_PUSHES, 100 + HELD_PUSHES)], now=1.0)
    assert chain.take_pull(1.0) == Pull(MailboxSeq(100), MailboxSeq(100 + HELD_PUSHES), HELD_PUSHES)


def test_a_chain_goes_on_behind_the_page_that_covered_its_beginning() -> None:
    chain = drained(100)
    chain.on_pushes([push(90, 103), push(103, 106), push(106, 109)], now=0.0)
    page(chain, 104, now=2.0)
    assert chain.cursor == 104
    assert chain.take_pull(2.0 + HELD_SECONDS) == Pull(MailboxSeq(104), MailboxSeq(109), 2)


@pytest.mark.parametrize("arrives", [True, False])
def test_more_behind_what_is_held_is_awaited_as_a_push_before_it_is_fetched(arrives: bool) -> None:
    chain = drained(100)
    chain.on_pushes([push(90, 103)], now=0.0)
    assert chain.take_pull(HELD_SECONDS) == Pull(MailboxSeq(100), MailboxSeq(103), 1)
    page(chain, 103, now=20.0, more=True, entries=0)
    assert (chain.cursor, chain.take_pull(20.0)) == (103, None)
    if arrives:
        chain.on_pushes([push(103, 106)], now=20.1)
    assert chain.take_pull(20.0 + HOLE_WAIT_SECONDS) == (None if arrives else Pull(MailboxSeq(103)))


def test_a_hole_waits_300_ms_and_then_pulls_plainly() -> None:
    chain = drained(100)
    chain.on_pushes([push(90, 103), push(106, 109)], now=1.0)
    assert chain.next_deadline() == 1.0 + HOLE_WAIT_SECONDS
    assert chain.take_pull(1.0 + HOLE_WAIT_SECONDS - 0.01) is None
    assert chain.take_pull(1.0 + HOLE_WAIT_SECONDS) == Pull(MailboxSeq(100))


def test_a_late_push_closes_its_hole_without_a_pull() -> None:
    chain = drained(100)
    chain.on_pushes([push(106, 109)], now=1.0)
    chain.on_pushes([push(90, 103)], now=1.1)
    chain.on_pushes([push(103, 106)], now=1.2)
    assert chain.take_pull(1.0 + 2 * HOLE_WAIT_SECONDS) is None
    assert chain.take_pull(1.0 + HELD_SECONDS) == Pull(MailboxSeq(100), MailboxSeq(109), 3)


@pytest.mark.parametrize(
    "broken", [push(0, 103), push(90, 103, held=False)], ids=["previous-0", "echo-unknown"]
)
def test_an_unknown_previous_or_an_unknown_echo_breaks_the_chain(broken: Pushed) -> None:
    chain = drained(100)
    chain.on_pushes([broken, push(103, 106)], now=1.0)
    assert chain.take_pull(1.0 + HOLE_WAIT_SECONDS) == Pull(MailboxSeq(100))


def test_an_echo_whose_acknowledgement_follows_within_the_wait_keeps_the_chain() -> None:
    chain = drained(100)
    chain.on_pushes([push(90, 103, held=False)], now=1.0)
    chain.on_pushes([push(90, 103)], now=1.1)
    assert chain.take_pull(1.0 + HOLE_WAIT_SECONDS) is None
    assert chain.take_pull(1.0 + HELD_SECONDS) == Pull(MailboxSeq(100), MailboxSeq(103), 1)


def test_a_previous_inside_the_chain_is_a_contradiction_and_is_pulled() -> None:
    chain = drained(100)
    chain.on_pushes([push(90, 103), push(90, 106)], now=1.0)
    assert chain.take_pull(1.0 + HOLE_WAIT_SECONDS) == Pull(MailboxSeq(100))


def test_a_repeated_push_counts_once() -> None:
    chain = drained(100)
    chain.on_pushes([push(90, 103), push(90, 103)], now=1.0)
    assert chain.take_pull(1.0 + HELD_SECONDS) == Pull(MailboxSeq(100), MailboxSeq(103), 1)


def test_a_newest_above_what_came_pulls_and_one_that_came_does_not() -> None:
    chain = drained(100)
    chain.on_pushes([push(90, 103)], now=0.0)
    chain.on_newest(MailboxSeq(103))
    assert chain.take_pull(0.0) is None
    chain.on_newest(MailboxSeq(104))
    assert chain.take_pull(0.0) == Pull(MailboxSeq(100))


def test_too_many_uncovered_pushes_are_forgotten_and_pulled() -> None:
    chain = drained(100)
    chain.on_pushes([push(5000 + n, 5002 + n) for n in range(0, 2 * UNCOVERED_MAX + 4, 2)], now=0.0)
    assert chain.take_pull(0.0) == Pull(MailboxSeq(100))


def test_a_refused_pull_is_due_again_and_a_rebuild_reads_what_came_after_it() -> None:
    chain = Chain(MailboxSeq(10))
    chain.on_login()
    chain.take_pull(0.0)
    chain.on_pull_refused()
    assert chain.take_pull(0.0) == Pull(MailboxSeq(10))
    chain.on_rebuilt(MailboxSeq(500))
    assert not chain.is_drained
    assert chain.take_pull(0.0) == Pull(MailboxSeq(500))


# --- reconnecting


def test_the_first_attempt_after_a_calm_connection_is_at_once() -> None:
    reconnect = Reconnect()
    reconnect.on_end(lived_seconds=60.0)
    assert reconnect.delay_seconds(hint_ms=0, jitter=0.99) == 0.0


def test_failures_back_off_exponentially_with_full_jitter_up_to_thirty_seconds() -> None:
    reconnect = Reconnect()
    ceilings = []
    for _ in range(10):
        reconnect.on_end(lived_seconds=0.0)
        assert reconnect.delay_seconds(hint_ms=0, jitter=0.0) == 0.0
        ceilings.append(reconnect.delay_seconds(hint_ms=0, jitter=1.0))
    assert ceilings == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]


@pytest.mark.shows("O15")
def test_the_hint_of_the_server_is_the_least_and_is_spread() -> None:
    reconnect = Reconnect()
    reconnect.on_end(lived_seconds=60.0)
    assert reconnect.delay_seconds(hint_ms=4_000, jitter=0.0) == 4.0
    assert reconnect.delay_seconds(hint_ms=4_000, jitter=0.5) == 6.0


# --- outgoing


def row(ordinal: int, *, first_sent_at: int = 1_000) -> PendingRow:
    cmid = ClientMessageId(ordinal.to_bytes(16, "big"))
    return PendingRow(ordinal, cmid, Target(1, bytes(16)), 1, "", b"", 0, Millis(first_sent_at))


def take(
    outgoing: Outgoing, *, now: float = 0.0, server_now: int = 2_000, is_drained: bool = True
) -> list[int]:
    sends, _ = outgoing.take_sends(now=now, server_now=Millis(server_now), is_drained=is_drained)
    return [sent.ordinal for sent in sends]


@pytest.mark.shows("K1")
def test_rows_go_out_in_order_and_only_after_the_mailbox_was_drained() -> None:
    outgoing = Outgoing()
    outgoing.add(row(2))
    outgoing.add(row(1))
    assert take(outgoing, is_drained=False) == []
    assert take(outgoing) == [1, 2]
    assert take(outgoing) == []


@pytest.mark.shows("K1")
def test_a_lost_connection_brings_every_row_back_under_its_identity() -> None:
    outgoing = Outgoing()
    outgoing.add(row(1))
    outgoing.add(row(2))
    take(outgoing)
    outgoing.on_disconnected()
    outgoing.remove(row(1).client_message_id)
    assert take(outgoing) == [2]


def test_a_retryable_refusal_holds_the_later_rows_too() -> None:
    outgoing = Outgoing()
    outgoing.add(row(1))
    take(outgoing)
    outgoing.on_retryable(row(1).client_message_id, retry_after_ms=700, now=1.0, jitter=0.5)
    outgoing.add(row(2))
    assert take(outgoing, now=1.6) == []
    assert outgoing.next_deadline(is_drained=True) == pytest.approx(1.7)
    assert take(outgoing, now=1.7) == [1, 2]


def test_a_row_without_an_answer_goes_out_again() -> None:
    outgoing = Outgoing()
    outgoing.add(row(1))
    assert take(outgoing, now=0.0) == [1]
    assert take(outgoing, now=ANSWER_SECONDS_MAX - 0.1) == []
    assert take(outgoing, now=ANSWER_SECONDS_MAX) == [1]


def test_a_row_of_110_minutes_is_looked_up_instead_of_resent() -> None:
    outgoing = Outgoing()
    outgoing.add(row(1, first_sent_at=1_000))
    sends, checks = outgoing.take_sends(now=0.0, server_now=Millis(1_000 + RESEND_AGE_MS), is_drained=True)
    assert (sends, [check.ordinal for check in checks]) == ([], [1])
    outgoing.on_absent(row(1).client_message_id, server_now=Millis(1_000 + RESEND_AGE_MS))
    assert take(outgoing, server_now=1_001 + RESEND_AGE_MS) == [1]


def test_age_counts_from_the_first_frame_and_never_sent_is_never_old() -> None:
    assert is_aged(first_sent_at=Millis(1), server_now=Millis(1 + RESEND_AGE_MS))
    assert not is_aged(first_sent_at=Millis(2), server_now=Millis(1 + RESEND_AGE_MS))
    assert not is_aged(first_sent_at=Millis(0), server_now=Millis(9 * RESEND_AGE_MS))


FIRST_SENT = 10_000_000
HOUR = 3_600_000


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (SeenPage(True, Millis(0), Seq(1), Seq(9), more=True), Verdict.FOUND),
        (SeenPage(False, Millis(FIRST_SENT - 60_000), Seq(5), Seq(9), more=True), Verdict.ABSENT),
        (SeenPage(False, Millis(FIRST_SENT - 5_000), Seq(1), Seq(9), more=True), Verdict.READ_ON),
        (SeenPage(False, Millis(FIRST_SENT + 5), Seq(1), Seq(9), more=False), Verdict.ABSENT),
        (SeenPage(False, Millis(FIRST_SENT + 5), Seq(4), Seq(9), more=False), Verdict.UNKNOWN),
        (SeenPage(False, Millis(0), Seq(0), Seq(0), more=False), Verdict.ABSENT),
        (SeenPage(False, Millis(0), Seq(10), Seq(9), more=False), Verdict.UNKNOWN),
    ],
)
def test_history_proves_presence_or_absence_or_nothing(seen: SeenPage, verdict: Verdict) -> None:
    judged = judge_page(
        seen, first_sent_at=Millis(FIRST_SENT), retention_class=0, server_now=Millis(FIRST_SENT + 2 * HOUR)
    )
    assert judged is verdict


def test_an_ephemeral_message_past_its_life_cannot_be_proved_absent() -> None:
    seen = SeenPage(False, Millis(1), Seq(1), Seq(9), more=False)
    late, early = Millis(FIRST_SENT + 24 * HOUR), Millis(FIRST_SENT + 2 * HOUR)
    sent = Millis(FIRST_SENT)
    assert judge_page(seen, first_sent_at=sent, retention_class=1, server_now=late) is Verdict.UNKNOWN
    assert judge_page(seen, first_sent_at=sent, retention_class=1, server_now=early) is Verdict.ABSENT


@pytest.mark.parametrize(
    ("first", "last", "rest"),
    [
        (11, 20, []),
        (1, 99, []),
        (16, 20, [(10, 15)]),
        (11, 15, [(15, 20)]),
        (13, 15, [(10, 12), (15, 20)]),
        (21, 30, [(10, 20)]),
        (1, 10, [(10, 20)]),
    ],
)
def test_a_page_takes_its_range_out_of_a_gap(first: int, last: int, rest: list[tuple[int, int]]) -> None:
    assert subtract_page(Gap(Seq(10), Seq(20)), first=Seq(first), last=Seq(last)) == rest

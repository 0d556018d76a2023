"""A generated user keeps the rules of a real client: when it pulls, what it holds, what it reports."""

from typing import Any

from loadtest.user import (
    GAP_SECONDS,
    HELD_PUSHES_MAX,
    HELD_SECONDS_MAX,
    SILENT_SECONDS_MAX,
    User,
    build_body,
    make_account,
    parse_body,
)
from qim.errors import GoingAway, ResourceExhausted, Unauthenticated
from qim.ids import (
    ClientMessageId,
    ConversationId,
    MailboxSeq,
    MessageId,
    Millis,
    Seq,
    SessionId,
    TenantId,
    UserId,
)
from qim.records import Entry, MessageRecord, build_entry, encode_record
from qim.wire.bodies import (
    AuthAck,
    PullMailbox,
    SendAck,
    build_echo_entry,
    build_error,
    build_goaway,
    build_mailbox_batch,
    build_message,
    build_push,
    decode_body,
)
from qim.wire.frames import Frame, FrameSplitter
from qim.wire.layout import Op

ME, PARTNER = make_account(1, 0), make_account(1, 1)
CONVERSATION = ConversationId(b"c" * 16)


class Report:
    """A sink that keeps everything it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def on_ready(self, user: User) -> None:
        self.seen.append(("ready",))

    def on_accepted(self, user: User, number: int, ack: SendAck) -> None:
        self.seen.append(("accepted", number))

    def on_refused(self, user: User, number: int, code: int) -> None:
        self.seen.append(("refused", number, code))

    def on_entry(self, user: User, mailbox_seq: int, entry: Entry, *, pushed: bool) -> None:
        self.seen.append(("entry", mailbox_seq, pushed))

    def on_echo(self, user: User, seq: int) -> None:
        self.seen.append(("echo", seq))

    def on_ended(self, user: User, code: int) -> None:
        self.seen.append(("ended", code))


def one(data: bytes) -> Frame:
    (frame,) = FrameSplitter().feed(data)
    return frame


def entry_of(sender: UserId) -> bytes:
    record = MessageRecord(
        1, TenantId(1), CONVERSATION, 1, ME.user + PARTNER.user, MessageId(bytes(16)), sender, ME.device,
        ClientMessageId(bytes(16)), 2, "", build_body(1, 5, 64), 0, Millis(0), 0,
    )  # fmt: skip
    return build_entry(Seq(3), encode_record(record))


def covered(
    frame: Frame, through: int, entries: tuple[tuple[int, bytes], ...] = (), more: bool = False
) -> bytes:
    return build_mailbox_batch(
        frame.request_id,
        entries=[(MailboxSeq(seq), data) for seq, data in entries],
        covered_through=MailboxSeq(through),
        more=more,
        rebuild=False,
    )


def logged_in(through: int = 100) -> tuple[User, Report]:
    report = Report()
    user = User(ME, PARTNER.user, index=0, run=1, sink=report, body_size=64)
    frame = one(user.log_in("token"))
    ack = AuthAck(ME.user, SessionId(bytes(16)), Millis(0), 25_000, {}, MailboxSeq(0))
    pull = one(user.receive(build_message(Op.AUTH_ACK, frame.request_id, ack), 0.0))
    assert user.receive(covered(pull, through), 0.0) == b""
    assert report.seen == [("ready",)]
    return user, report


def pushes(user: User, *events: tuple[int, int], at: float = 0.0) -> None:
    for previous, seq in events:
        (data,) = build_push([(previous, seq, entry_of(PARTNER.user))])
        assert user.receive(data, at) == b""


def pull_of(data: bytes) -> PullMailbox:
    body = decode_body(Op.PULL_MAILBOX, one(data).body)
    assert isinstance(body, PullMailbox)
    return body


def test_user_is_ready_after_the_first_pull_and_its_last_page() -> None:
    report = Report()
    user = User(ME, PARTNER.user, index=0, run=1, sink=report, body_size=64)
    frame = one(user.log_in("token"))
    ack = AuthAck(ME.user, SessionId(bytes(16)), Millis(0), 25_000, {}, MailboxSeq(0))
    pull = one(user.receive(build_message(Op.AUTH_ACK, frame.request_id, ack), 0.0))
    again = user.receive(covered(pull, 7, ((7, entry_of(PARTNER.user)),), more=True), 0.0)
    assert pull_of(again) == PullMailbox(MailboxSeq(7), 300)
    assert report.seen == [("entry", 7, False)]
    user.receive(covered(one(again), 9), 0.0)
    assert report.seen[-1] == ("ready",)


def test_body_names_its_message() -> None:
    assert parse_body(build_body(7, 9, 128)) == (7, 9)
    assert len(build_body(7, 9, 128)) == 128
    assert parse_body(b"short") == (0, 0)


def test_answers_are_reported_by_message_number() -> None:
    user, report = logged_in()
    first, second = one(user.send(41, 0.0)), one(user.send(42, 0.0))
    sent = decode_body(first.opcode, first.body)
    ack = SendAck(sent.client_message_id, CONVERSATION, Seq(1), MessageId(bytes(16)), Millis(1), False)
    user.receive(
        build_error(second.request_id, ResourceExhausted(retry_after_ms=5))
        + build_message(Op.SEND_ACK, first.request_id, ack),
        0.0,
    )
    assert report.seen[1:] == [("refused", 42, 2002), ("accepted", 41)]


def test_entries_of_the_partner_and_echoes_are_told_apart_and_own_copies_are_not_deliveries() -> None:
    user, report = logged_in()
    echo = build_echo_entry(Seq(4), CONVERSATION)
    events = [(1, 101, entry_of(PARTNER.user)), (101, 102, echo), (102, 103, entry_of(ME.user))]
    for data in build_push(events):
        user.receive(data, 0.0)
    assert report.seen[1:] == [("entry", 101, True), ("echo", 4)]


def test_unbroken_chain_is_pulled_as_held_when_it_is_long() -> None:
    user, _ = logged_in(through=100)
    pushes(user, (90, 101), *((100 + n, 101 + n) for n in range(1, HELD_PUSHES_MAX - 1)))
    assert user.due_frame(1.0) == b""
    pushes(user, (100 + HELD_PUSHES_MAX - 1, 100 + HELD_PUSHES_MAX))
    assert pull_of(user.due_frame(1.0)) == PullMailbox(
        MailboxSeq(100), 300, MailboxSeq(100 + HELD_PUSHES_MAX), HELD_PUSHES_MAX
    )
    assert user.due_frame(1.0) == b""


def test_unbroken_chain_is_pulled_as_held_when_it_is_old() -> None:
    user, _ = logged_in(through=100)
    pushes(user, (100, 101), at=5.0)
    assert user.due_frame(5.0 + HELD_SECONDS_MAX - 0.1) == b""
    frame = user.due_frame(5.0 + HELD_SECONDS_MAX)
    assert pull_of(frame) == PullMailbox(MailboxSeq(100), 300, MailboxSeq(101), 1)


def test_gap_and_unknown_previous_lead_to_a_plain_pull_after_a_moment() -> None:
    for event in ((105, 106), (0, 101)):
        user, _ = logged_in(through=100)
        pushes(user, event, at=1.0)
        assert user.due_frame(1.0 + GAP_SECONDS - 0.01) == b""
        assert pull_of(user.due_frame(1.0 + GAP_SECONDS)) == PullMailbox(MailboxSeq(100), 300)


def test_push_during_a_pull_stays_held_when_the_page_does_not_cover_it() -> None:
    user, _ = logged_in(through=100)
    pushes(user, (100, 101))
    pull = one(user.due_frame(HELD_SECONDS_MAX))
    pushes(user, (101, 102), at=20.0)
    user.receive(covered(pull, 101), 20.0)
    frame = user.due_frame(20.0 + HELD_SECONDS_MAX)
    assert pull_of(frame) == PullMailbox(MailboxSeq(101), 300, MailboxSeq(102), 1)


def test_silent_user_pings() -> None:
    user, _ = logged_in()
    assert user.due_frame(SILENT_SECONDS_MAX - 1) == b""
    assert one(user.due_frame(SILENT_SECONDS_MAX)).opcode == Op.PING
    assert user.due_frame(SILENT_SECONDS_MAX + 1) == b""


def test_refused_pull_is_tried_again() -> None:
    user, _ = logged_in(through=100)
    pushes(user, (100, 101))
    pull = one(user.due_frame(HELD_SECONDS_MAX))
    user.receive(build_error(pull.request_id, ResourceExhausted()), 12.0)
    assert user.due_frame(12.1) == b""
    assert pull_of(user.due_frame(12.0 + GAP_SECONDS)) == PullMailbox(MailboxSeq(100), 300)


def test_end_of_the_connection_is_reported_with_its_code() -> None:
    user, report = logged_in()
    user.receive(build_goaway(GoingAway()), 0.0)
    assert report.seen[-1] == ("ended", 3001)
    assert not user.is_ready
    refused = User(ME, PARTNER.user, index=0, run=1, sink=report, body_size=64)
    frame = one(refused.log_in("token"))
    refused.receive(build_error(frame.request_id, Unauthenticated()), 0.0)
    assert report.seen[-1] == ("ended", 1001)


def test_accounts_of_a_run_differ_from_each_other_and_from_other_runs() -> None:
    accounts = {make_account(run, number) for run in (1, 2) for number in range(50)}
    assert len({account.user for account in accounts}) == 100

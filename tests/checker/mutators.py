"""Ways to break a clean history in one place, each with the check that must see it.

A checker that finds nothing may be blind. Every mutator takes a history that is clean and a source of chance,
and returns a copy with one lie in it: the sixteen of the contract first, then one for each further thing that
the checks claim to see. The original is not touched. Groups do not exist yet, so "wrong audience" is a third
user of a direct message, "leaked history" a page for a stranger, and "unread ± 1" the answer to a read mark.
"""

import random
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias, TypeVar

from msgspec.structs import replace

from tests.checker.check import RECOVERY_SECONDS_MAX
from tests.checker.history import (
    Device,
    Dispatch,
    Event,
    Fact,
    Fault,
    History,
    Mailbox,
    Outbox,
    Progress,
    Pull,
    Push,
    Read,
    Sample,
    Send,
    Shard,
    Shown,
    StoreRead,
)

AnyEvent: TypeAlias = Event | StoreRead
E = TypeVar("E", bound=AnyEvent)
OTHER: Final = "0" * 16


class Copy:
    """A copy of a history that can be changed; events are replaced, never edited."""

    def __init__(self, events: Sequence[AnyEvent], chance: random.Random) -> None:
        self.events = list(events)
        self.chance = chance

    def all(self, kind: type[E], test: Callable[[E], bool] = lambda _: True) -> list[E]:
        return [event for event in self.events if isinstance(event, kind) and test(event)]

    def pick(self, kind: type[E], test: Callable[[E], bool] = lambda _: True) -> E:
        return self.chance.choice(self.all(kind, test))

    def swap(self, old: AnyEvent, new: AnyEvent) -> None:
        place = next(at for at, event in enumerate(self.events) if event is old)
        self.events[place] = new

    def drop(self, test: Callable[[AnyEvent], bool]) -> None:
        self.events = [event for event in self.events if not test(event)]

    # --- what several mutators need ---

    def last_seq(self, conversation: str) -> int:
        return max(record.seq for record in self.all(Outbox, lambda r: r.conversation == conversation))

    def acknowledged(self, *, attempts: int = 0) -> Send:
        """An acknowledgement; of a message with so many attempts, if that is given."""
        counts: dict[str, int] = {}
        for send in self.all(Send, lambda send: send.type == "invoke"):
            counts[send.client_message_id] = counts.get(send.client_message_id, 0) + 1
        return self.pick(
            Send, lambda s: s.type == "ok" and (not attempts or counts[s.client_message_id] == attempts)
        )

    def page(self, *, more: bool = False) -> Pull:
        return self.pick(Pull, lambda p: p.type == "ok" and bool(p.entries) and (p.more or not more))

    def stranger_to(self, conversation: str) -> str:
        parties = next(r.parties for r in self.all(Outbox) if r.conversation == conversation)
        return self.chance.choice(
            [mailbox.user for mailbox in self.all(Mailbox) if mailbox.user not in parties]
        )

    def append(self, record: Outbox) -> None:
        end = max(r.offset for r in self.all(Outbox, lambda r: r.partition == record.partition)) + 1
        self.events.append(replace(record, offset=end))

    def change_entry(self, page: Pull, change: Callable[[Shown], list[Shown]]) -> None:
        """Puts the changed entries in the place of one."""
        place = self.chance.randrange(len(page.entries))
        entries = [*page.entries[:place], *change(page.entries[place]), *page.entries[place + 1 :]]
        self.swap(page, replace(page, entries=entries))


# --- the sixteen -------------------------------------------------------------------------------------


def drop_acknowledged_record(copy: Copy) -> None:
    ack = copy.acknowledged()
    copy.drop(lambda e: isinstance(e, Outbox | Fact) and e.client_message_id == ack.client_message_id)


def reuse_a_sequence(copy: Copy) -> None:
    record = copy.pick(Outbox)
    copy.append(replace(record, entry=OTHER, client_message_id=OTHER, body=OTHER))


def commit_twice(copy: Copy) -> None:
    record = copy.pick(Outbox)
    copy.append(replace(record, seq=copy.last_seq(record.conversation) + 1, entry=OTHER))


def lose_a_delivery(copy: Copy) -> None:
    copy.change_entry(copy.page(), lambda _: [])


def double_a_delivery(copy: Copy) -> None:
    copy.change_entry(copy.page(), lambda shown: [shown, shown])


def deliver_to_a_stranger(copy: Copy) -> None:
    page = copy.page()
    foreign = copy.pick(Outbox, lambda record: page.user not in record.parties)
    entry = Shown(page.covered_through, foreign.conversation, foreign.seq, foreign.entry)
    copy.swap(page, replace(page, entries=[*page.entries, entry]))


def corrupt_a_delivery(copy: Copy) -> None:
    copy.change_entry(copy.page(), lambda shown: [shown._replace(entry=OTHER)])


def jump_a_cursor(copy: Copy) -> None:
    """A page claims to cover one entry more than it holds."""
    page = copy.page(more=True)
    mailbox = next(m for m in copy.all(Mailbox) if m.user == page.user)
    following = next(s.mailbox_seq for s in mailbox.entries if s.mailbox_seq > page.covered_through)
    copy.swap(page, replace(page, covered_through=following, more=False))


def widen_an_audience(copy: Copy) -> None:
    dispatch = copy.pick(Dispatch)
    stranger = copy.stranger_to(dispatch.conversation)
    copy.swap(dispatch, replace(dispatch, recipients=(*dispatch.recipients, stranger)))


def shorten_a_history(copy: Copy) -> None:
    """By the record that the request asked for first: without the last one it would be a shorter page."""
    page = copy.pick(History, lambda page: bool(page.entries))
    copy.swap(page, replace(page, entries=page.entries[:-1] if page.after else page.entries[1:]))


def leak_a_history(copy: Copy) -> None:
    page = copy.pick(History, lambda page: bool(page.entries))
    copy.swap(page, replace(page, user=copy.stranger_to(page.conversation)))


def miscount_unread(copy: Copy) -> None:
    answer = copy.pick(Read, lambda read: read.final and read.type == "ok")
    copy.swap(answer, replace(answer, unread=(answer.unread or 0) + copy.chance.choice([-1, 1])))


def show_what_was_refused(copy: Copy) -> None:
    ack = copy.acknowledged(attempts=1)
    copy.swap(ack, replace(ack, type="fail", code=1004))


def swap_in_real_time(copy: Copy) -> None:
    """A message that was sent after another was acknowledged has the lower sequence."""
    late = copy.pick(Send, lambda send: send.type == "ok" and send.seq > 1)
    early = copy.pick(Outbox, lambda r: r.conversation == late.conversation and r.seq < late.seq)
    for send in copy.all(Send, lambda send: send.client_message_id == early.client_message_id):
        copy.swap(send, replace(send, t=send.t + late.t))


def acknowledge_wrongly(copy: Copy) -> None:
    ack = copy.acknowledged(attempts=1)
    if copy.chance.random() < 0.5:
        copy.swap(ack, replace(ack, seq=ack.seq + 1))
    else:
        copy.swap(ack, replace(ack, message_id=OTHER))


def leave_a_hole(copy: Copy) -> None:
    record = copy.pick(Outbox, lambda record: record.seq < copy.last_seq(record.conversation))
    copy.drop(
        lambda e: isinstance(e, Outbox) and (e.conversation, e.seq) == (record.conversation, record.seq)
    )


# --- one for each further thing that the checks claim to see ------------------------------------------


def change_a_repeated_answer(copy: Copy) -> None:
    ack = copy.acknowledged()
    ask = replace(ack, t=ack.t + 1, type="invoke", operation=-1, seq=0, message_id="", reserved_at=0)
    copy.events += [ask, replace(ack, t=ack.t + 2, operation=-1, seq=ack.seq + 1)]


def acknowledge_early(copy: Copy) -> None:
    ack = copy.acknowledged(attempts=1)
    asked = next(s for s in copy.all(Send) if s.operation == ack.operation and s.type == "invoke")
    copy.swap(ack, replace(ack, t=asked.t + 1))


def show_a_page_early(copy: Copy) -> None:
    page = copy.page()
    copy.swap(page, replace(page, t=1))


def push_before_the_watermark(copy: Copy) -> None:
    push = copy.pick(Push)
    shard = next(d.partition for d in copy.all(Dispatch) if push.user in d.recipients)
    first = min(event.mailbox_seq for event in push.events)
    copy.events.append(Sample(push.t + 1, "sampler", [(shard, first - 1)]))


def show_history_early(copy: Copy) -> None:
    page = copy.pick(History, lambda page: bool(page.entries))
    copy.swap(page, replace(page, t=1))


def deliver_what_nobody_wrote(copy: Copy) -> None:
    copy.change_entry(copy.page(), lambda shown: [shown._replace(seq=1_000_000)])


def commit_what_nobody_sent(copy: Copy) -> None:
    record = copy.pick(Outbox)
    copy.drop(lambda e: isinstance(e, Send) and e.client_message_id == record.client_message_id)


def lose_an_entry_of_a_mailbox(copy: Copy) -> None:
    mailbox = copy.pick(Mailbox, lambda mailbox: bool(mailbox.entries))
    copy.swap(mailbox, replace(mailbox, entries=mailbox.entries[:-1]))


def lose_a_dispatch(copy: Copy) -> None:
    dispatch = copy.pick(Dispatch)
    copy.drop(lambda e: isinstance(e, Dispatch) and e.dispatch_id == dispatch.dispatch_id)


def push_to_a_wrong_place(copy: Copy) -> None:
    push = copy.pick(Push)
    wrong = push.events[0]._replace(mailbox_seq=push.events[0].mailbox_seq + 1_000)
    copy.swap(push, replace(push, events=[wrong, *push.events[1:]]))


def hide_the_entry_before(copy: Copy) -> None:
    """A push names an entry before it that is not the one before it."""
    mailboxes = {mailbox.user: [s.mailbox_seq for s in mailbox.entries] for mailbox in copy.all(Mailbox)}
    push = copy.pick(Push, lambda push: push.events[-1].mailbox_seq in mailboxes[push.user][2:])
    seqs, last = mailboxes[push.user], push.events[-1]
    earlier = seqs[seqs.index(last.mailbox_seq) - 2]
    copy.swap(push, replace(push, events=[*push.events[:-1], last._replace(previous=earlier)]))


def stop_reading(copy: Copy) -> None:
    """A device never asks for its newest entries."""
    page = copy.page()
    copy.drop(lambda e: isinstance(e, Pull) and e.device == page.device and e.t >= page.t - 1_000_000)


def leave_one_pending(copy: Copy) -> None:
    fact = copy.pick(Fact)
    copy.swap(fact, replace(fact, state="pending"))


def forget_a_fact(copy: Copy) -> None:
    fact = copy.pick(Fact)
    copy.drop(lambda event: event is fact)


def deny_a_party(copy: Copy) -> None:
    page = copy.pick(History, lambda page: page.type == "ok" and bool(page.entries))
    denied = replace(page, type="fail", code=1002, entries=[], head=0, earliest=0, more=False)
    copy.swap(page, denied)


def let_a_mark_fall(copy: Copy) -> None:
    answer = copy.pick(Read, lambda read: read.final and read.type == "ok" and read.read_seq > 0)
    copy.swap(answer, replace(answer, read_seq=answer.read_seq - 1, unread=(answer.unread or 0) + 1))


def let_a_watermark_fall(copy: Copy) -> None:
    sample = copy.pick(Sample, lambda sample: any(mark for _, mark in sample.watermarks))
    raised = [(shard, mark + 100_000) for shard, mark in sample.watermarks]
    copy.swap(sample, replace(sample, watermarks=raised))


def move_a_watermark_early(copy: Copy) -> None:
    progress = copy.pick(Progress)
    copy.swap(progress, replace(progress, state="o"))


def skip_without_a_word(copy: Copy) -> None:
    progress = copy.pick(Progress)
    copy.swap(progress, replace(progress, state="s"))


def stop_a_shard(copy: Copy) -> None:
    shard = copy.pick(Shard, lambda shard: shard.watermark > 0)
    copy.swap(shard, replace(shard, watermark=shard.watermark - 1))


def take_a_cursor_from_a_push(copy: Copy) -> None:
    page = copy.page()
    copy.swap(page, replace(page, after=page.after + 1 if page.after else 10**9))


def store_a_wrong_cursor(copy: Copy) -> None:
    device = copy.pick(Device)
    copy.swap(device, replace(device, cursor=device.cursor + 1))


def hold_twice(copy: Copy) -> None:
    device = copy.pick(Device, lambda device: bool(device.held))
    held = device.held or []
    copy.swap(device, replace(device, held=[*held, held[0]]))


def hold_too_little(copy: Copy) -> None:
    device = copy.pick(Device, lambda device: bool(device.held))
    copy.swap(device, replace(device, held=(device.held or [])[1:]))


def never_recover(copy: Copy) -> None:
    end = max(send.t for send in copy.all(Send))
    ask = copy.pick(Send, lambda send: send.type == "invoke")
    later = end + int((RECOVERY_SECONDS_MAX + 1) * 1e9)
    copy.events += [Fault(end, "harness", "heal", "kill"), replace(ask, t=later, operation=-1)]


class Mutator(NamedTuple):
    change: Callable[[Copy], None]
    seen_by: str


SIXTEEN: Final = (
    Mutator(drop_acknowledged_record, "lost-ack"),
    Mutator(reuse_a_sequence, "inconsistent-seq"),
    Mutator(commit_twice, "duplicate-commit"),
    Mutator(lose_a_delivery, "mailbox"),
    Mutator(double_a_delivery, "mailbox"),
    Mutator(deliver_to_a_stranger, "mailbox"),
    Mutator(corrupt_a_delivery, "corrupt"),
    Mutator(jump_a_cursor, "mailbox"),
    Mutator(widen_an_audience, "audience"),
    Mutator(shorten_a_history, "history-interval"),
    Mutator(leak_a_history, "history-interval"),
    Mutator(miscount_unread, "session"),
    Mutator(show_what_was_refused, "failed-visible"),
    Mutator(swap_in_real_time, "realtime"),
    Mutator(acknowledge_wrongly, "ack-mismatch"),
    Mutator(leave_a_hole, "seq-gap"),
)

MORE: Final = (
    Mutator(change_a_repeated_answer, "unstable-ack"),
    Mutator(acknowledge_early, "early-visible"),
    Mutator(show_a_page_early, "early-visible"),
    Mutator(push_before_the_watermark, "early-visible"),
    Mutator(show_history_early, "early-visible"),
    Mutator(deliver_what_nobody_wrote, "phantom"),
    Mutator(commit_what_nobody_sent, "phantom"),
    Mutator(lose_an_entry_of_a_mailbox, "mailbox"),
    Mutator(lose_a_dispatch, "mailbox"),
    Mutator(push_to_a_wrong_place, "mailbox"),
    Mutator(hide_the_entry_before, "mailbox"),
    Mutator(stop_reading, "mailbox"),
    Mutator(leave_one_pending, "liveness"),
    Mutator(forget_a_fact, "duplicate-commit"),
    Mutator(deny_a_party, "history-interval"),
    Mutator(let_a_mark_fall, "session"),
    Mutator(let_a_watermark_fall, "watermark"),
    Mutator(move_a_watermark_early, "watermark"),
    Mutator(skip_without_a_word, "watermark"),
    Mutator(stop_a_shard, "liveness"),
    Mutator(take_a_cursor_from_a_push, "client"),
    Mutator(store_a_wrong_cursor, "client"),
    Mutator(hold_twice, "client"),
    Mutator(hold_too_little, "client"),
    Mutator(never_recover, "liveness"),
)


def mutate(mutator: Mutator, events: Sequence[AnyEvent], seed: int) -> list[AnyEvent]:
    copy = Copy(events, random.Random(seed))
    mutator.change(copy)
    return copy.events

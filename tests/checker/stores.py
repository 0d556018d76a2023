"""Checks of the stores among themselves: logs, facts, mailboxes, watermarks.

The Outbox is the truth, so nothing that it says can be lost or wrong; it can only contradict itself, or what
follows from it. Each function is one linear pass. Repeats in both logs are no fault as long as they repeat
the same bytes under the same identity.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from qim.limits import IDEMPOTENCY_WINDOW_MS
from tests.checker.history import Dispatch, Outbox, Shown
from tests.checker.truth import StoreReads, Truth, UserMailbox, first_dispatches
from tests.checker.verdict import Figures, Findings


def check_stores(truth: Truth, reads: StoreReads, findings: Findings, figures: Figures) -> None:
    _check_outbox(truth, reads, findings, figures)
    _check_sequences(truth, findings)
    _check_dispatches(truth, reads, findings, figures)
    _check_deliveries(truth, reads, findings)
    if reads.facts:
        _check_facts(truth, reads, findings)
    for user in truth.mailboxes.keys() | reads.mailboxes.keys():
        _check_mailbox(truth, user, reads.mailboxes.get(user, []), findings)
    _check_watermarks(truth, reads, findings)
    _check_samples(truth, reads, findings)


def where_of(record: Outbox | Dispatch | Shown) -> str:
    return f"{record.conversation} seq {record.seq}"


# --- Outbox ------------------------------------------------------------------------------------------


def _check_outbox(truth: Truth, reads: StoreReads, findings: Findings, figures: Figures) -> None:
    for record in reads.outbox:
        conversation = truth.conversations[record.conversation]
        first = conversation.records[record.seq]
        if first is not record:
            figures.outbox_repeats += 1
            if first.entry != record.entry:
                findings.add(
                    "inconsistent-seq", where_of(record), f"entries {first.entry} and {record.entry}"
                )
        message = truth.messages[record.conversation, record.sender, record.client_message_id]
        apart_ms = abs(record.reserved_at - message.reserved_at)
        if message.seq != record.seq and apart_ms <= IDEMPOTENCY_WINDOW_MS:
            detail = f"message {record.client_message_id} has sequence {message.seq} too"
            findings.add("duplicate-commit", where_of(record), detail)
        if record.parties != conversation.parties or record.sender not in record.parties:
            detail = f"sender {record.sender}, parties {record.parties} and {conversation.parties}"
            findings.add("audience", where_of(record), detail)
    figures.records = len(reads.outbox) - figures.outbox_repeats


def _check_sequences(truth: Truth, findings: Findings) -> None:
    for name, conversation in truth.conversations.items():
        holes = conversation.last - len(conversation.records)
        if holes or min(conversation.records) < 1:
            first = len(conversation.entries) + 1
            findings.add("seq-gap", f"{name} seq {first}", f"{holes} of 1…{conversation.last} are missing")


def _check_facts(truth: Truth, reads: StoreReads, findings: Findings) -> None:
    """Each record has its fact, each fact its record; afterwards nothing is pending."""
    unknown = dict(truth.messages)
    for fact in reads.facts:
        key = (fact.conversation, fact.sender, fact.client_message_id)
        where = f"{fact.conversation} seq {fact.seq}"
        unknown.pop(key, None)
        record = truth.messages.get(key)
        if fact.state == "pending":
            findings.add("liveness", where, "nobody finished this message")
        elif record is None:
            findings.add("lost-ack", where, "committed, and not in the Outbox")
        elif (record.seq, record.message_id) != (fact.seq, fact.message_id):
            findings.add("inconsistent-seq", where, f"the Outbox has this message under {record.seq}")
    for record in unknown.values():
        findings.add(
            "duplicate-commit", where_of(record), "no commit fact: a repeat would be a second message"
        )


# --- dispatch log ------------------------------------------------------------------------------------


def _check_dispatches(truth: Truth, reads: StoreReads, findings: Findings, figures: Figures) -> None:
    first: dict[str, Dispatch] = {}
    for dispatch in reads.dispatches:
        record = truth.record_at(dispatch.conversation, dispatch.seq)
        if record is None:
            findings.add("phantom", where_of(dispatch), "dispatched, and not in the Outbox")
        else:
            _check_dispatch(truth, dispatch, record, findings)
        known = first.setdefault(dispatch.dispatch_id, dispatch)
        if known is not dispatch:
            figures.dispatch_repeats += 1
            if _identity(known) != _identity(dispatch):
                findings.add("corrupt", where_of(dispatch), "a repeated dispatch with other content")


def _check_dispatch(truth: Truth, dispatch: Dispatch, record: Outbox, findings: Findings) -> None:
    if record.entry != dispatch.entry:
        findings.add("corrupt", where_of(dispatch), f"dispatched as {dispatch.entry}, is {record.entry}")
    strangers = set(dispatch.recipients).difference(record.parties)
    if strangers:
        findings.add("audience", where_of(dispatch), f"dispatched to {sorted(strangers)}")
    for user in dispatch.recipients:
        if mailbox_of(truth, user).shard not in {-1, dispatch.partition}:
            findings.add("mailbox", where_of(dispatch), f"{user} has entries in two shards")


def _identity(dispatch: Dispatch) -> tuple[object, ...]:
    return (dispatch.partition, dispatch.conversation, dispatch.seq, dispatch.recipients, dispatch.entry)


def _check_deliveries(truth: Truth, reads: StoreReads, findings: Findings) -> None:
    """Every record went to both of its parties, once."""
    expected: Counter[str] = Counter()
    for conversation in truth.conversations.values():
        for user in set(conversation.parties):
            expected[user] += len(conversation.records)
    # Strangers and unknown records are reported elsewhere: the right size without doubles is complete.
    if any(_distinct(truth, user) != (count, count) for user, count in expected.items()):
        _explain_deliveries(truth, reads, findings)


def _distinct(truth: Truth, user: str) -> tuple[int, int]:
    """Entries that a mailbox must hold, and how many messages these are."""
    entries = mailbox_of(truth, user).entries
    return len(entries), len({(shown[1], shown[2]) for shown in entries})


def _explain_deliveries(truth: Truth, reads: StoreReads, findings: Findings) -> None:
    delivered: dict[tuple[str, int], list[str]] = {}
    for dispatch in first_dispatches(reads.dispatches):
        delivered.setdefault((dispatch.conversation, dispatch.seq), []).extend(dispatch.recipients)
    for record in _true_records(truth):
        users = delivered.get((record.conversation, record.seq), [])
        if len(users) != len(set(users)):
            findings.add("mailbox", where_of(record), f"dispatched twice to one of {sorted(users)}")
        missing = set(record.parties).difference(users)
        if missing:
            findings.add("mailbox", where_of(record), f"lost: never dispatched to {sorted(missing)}")


def _true_records(truth: Truth) -> Iterator[Outbox]:
    for conversation in truth.conversations.values():
        yield from conversation.records.values()


# --- mailboxes and watermarks ------------------------------------------------------------------------


def _check_mailbox(truth: Truth, user: str, held: list[Shown], findings: Findings) -> None:
    mailbox = truth.mailboxes.get(user)
    expected = mailbox.entries if mailbox else []
    if held != expected:
        explain(truth, user, held, expected, findings, f"mailbox of {user}")


def explain(
    truth: Truth, user: str, found: list[Shown], expected: list[Shown], findings: Findings, where: str
) -> None:
    """Says what is wrong with entries that are not the expected ones."""
    seqs = [shown.mailbox_seq for shown in found]
    if any(later <= earlier for earlier, later in pairwise(seqs)):
        findings.add("mailbox", where, "mailbox sequences do not rise")
    wanted = {shown.mailbox_seq: shown for shown in expected}
    seen: set[tuple[str, int]] = set()
    for shown in found:
        if (shown.conversation, shown.seq) in seen:
            findings.add("mailbox", where, f"doubled: {where_of(shown)}")
        elif shown != wanted.pop(shown.mailbox_seq, None):
            _explain_entry(truth, user, Shown(*shown), findings, where)
        seen.add((shown.conversation, shown.seq))
    for shown in wanted.values():
        if (shown.conversation, shown.seq) not in seen:
            findings.add("mailbox", where, f"lost: {where_of(shown)} at {shown.mailbox_seq}")


def _explain_entry(truth: Truth, user: str, shown: Shown, findings: Findings, where: str) -> None:
    record = truth.record_at(shown.conversation, shown.seq)
    if record is None:
        findings.add("phantom", where, f"{where_of(shown)} is not in the Outbox")
    elif record.entry != shown.entry:
        findings.add("corrupt", where, f"{where_of(shown)} has entry {shown.entry}, is {record.entry}")
    elif user not in record.parties:
        findings.add("mailbox", where, f"foreign: {where_of(shown)}")
    else:
        findings.add(
            "mailbox", where, f"{where_of(shown)} does not stand at {shown.mailbox_seq} in this range"
        )


def _check_watermarks(truth: Truth, reads: StoreReads, findings: Findings) -> None:
    """At the end W stands at the last record of each partition, and everything at or below it is finished."""
    last = {dispatch.partition: dispatch.offset for dispatch in reads.dispatches}
    skipped = {skip.dispatch_id for skip in reads.skips}
    for partition, offset in last.items():
        shard = reads.shards.get(partition)
        if shard is None:
            findings.add("watermark", f"shard {partition}", "has records and no state")
        elif shard.watermark < shard.base + offset:
            detail = f"stuck at {shard.watermark} before {shard.base + offset}"
            findings.add("liveness", f"shard {partition}", detail)
    for shard in reads.shards.values():
        end = shard.base + last.get(shard.shard, -1)
        if shard.watermark > end and shard.watermark:
            findings.add("watermark", f"shard {shard.shard}", f"W {shard.watermark} beyond the log's {end}")
    for dispatch in reads.dispatches if reads.progress else ():
        shard = reads.shards.get(dispatch.partition)
        if shard is None or shard.base + dispatch.offset > shard.watermark:
            continue
        state = reads.progress.get(dispatch.dispatch_id, "missing")
        if state != ("s" if dispatch.dispatch_id in skipped else "f"):
            findings.add("watermark", where_of(dispatch), f"W has passed it in the state {state}")


def _check_samples(truth: Truth, reads: StoreReads, findings: Findings) -> None:
    for shard, (_, marks) in truth.samples.watermarks.items():
        final = reads.shards.get(shard)
        line = [*marks, final.watermark if final else 0]
        for earlier, later in pairwise(line):
            if later < earlier:
                findings.add("watermark", f"shard {shard}", f"W fell from {earlier} to {later}")


def mailbox_of(truth: Truth, user: str) -> UserMailbox:
    """Empty for a user to whom nothing was ever dispatched."""
    return truth.mailboxes.get(user) or UserMailbox(shard=-1)

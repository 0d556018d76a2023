"""Checks of history pages and read marks: what a party sees of a conversation.

For direct messages the interval is 1…head for both parties and nothing for anybody else. A page is right when
it is an unbroken piece of the true conversation that begins where the request said and ends where `more`
says. A read mark is right when it never falls, never passes the conversation, and is not above what the user
asked for or sent; after the last event it is exact, and so is the unread count.
"""

from dataclasses import dataclass, field

from qim.errors import PermissionDenied
from tests.checker.history import History, Read
from tests.checker.truth import Conversation, Truth
from tests.checker.verdict import Figures, Findings


@dataclass(slots=True)
class Marks:
    """The read marks of one user in one conversation."""

    wanted_max: int = 0
    unanswered: dict[tuple[str, int], int] = field(default_factory=dict)
    """Operation → what it wanted: it may have been done, even later."""
    answers: list[tuple[int, int, Read]] = field(default_factory=list)
    """(asked, answered, answer)"""


class ConversationChecks:
    """Takes pages and marks one by one; `finish` judges marks in the order of time."""

    def __init__(self, truth: Truth, findings: Findings, figures: Figures) -> None:
        self._truth = truth
        self._findings = findings
        self._figures = figures
        self._asked: dict[tuple[str, int], int] = {}
        self._marks: dict[tuple[str, str], Marks] = {}
        self._heads: dict[str, list[tuple[int, int, int]]] = {}

    # --- history ---

    def on_history(self, page: History) -> None:
        self._figures.operations["history"][page.type] += 1
        where = f"history of {page.conversation} for {page.user}"
        if page.type == "invoke":
            self._asked[page.process, page.operation] = page.t
            return
        asked_at = self._asked.pop((page.process, page.operation), page.t)
        conversation = self._truth.conversations.get(page.conversation)
        is_party = conversation is not None and page.user in conversation.parties
        if page.type == "fail" and is_party and page.code == PermissionDenied.code:
            self._findings.add("history-interval", where, "denied to a party")
        if page.type != "ok":
            return
        if page.entries and not is_party:
            self._findings.add("history-interval", where, f"{len(page.entries)} records leaked to a stranger")
        elif conversation is not None and is_party:
            self._check_page(page, conversation, where)
            self._heads.setdefault(page.conversation, []).append((asked_at, page.t, page.head))
        elif page.head:
            self._findings.add("history-interval", where, f"head {page.head} of nothing")

    def _check_page(self, page: History, conversation: Conversation, where: str) -> None:
        add = self._findings.add
        seqs = [seq for seq, _ in page.entries]
        if page.head > conversation.last:
            add("history-interval", where, f"head {page.head} above the last sequence {conversation.last}")
        if page.final and page.head != conversation.last:
            add("history-interval", where, f"head {page.head} at the end, is {conversation.last}")
        if seqs and page.entries != conversation.entries[seqs[-1] - 1 : seqs[0]][::-1]:
            add("history-interval", where, f"{seqs[0]}…{seqs[-1]} is not a piece of the log")
        if not _begins_and_ends_right(page, seqs):
            detail = f"{seqs[:1]}…{seqs[-1:]} for before {page.before}, after {page.after}, head {page.head}"
            add("history-interval", where, f"does not begin or end where it must: {detail}")
        shown_to = min(max(page.head, *seqs, 0), len(conversation.durable))
        if shown_to and conversation.durable[shown_to - 1] > page.t:
            add("early-visible", where, f"{shown_to} was shown before its record was in the Outbox")

    # --- read marks ---

    def on_read(self, event: Read) -> None:
        self._figures.operations["read"][event.type] += 1
        operation = (event.process, event.operation)
        marks = self._marks.setdefault((event.conversation, event.user), Marks())
        marks.wanted_max = max(marks.wanted_max, event.wanted)
        if event.type == "invoke":
            self._asked[operation] = event.t
            marks.unanswered[operation] = event.wanted
            return
        asked_at = self._asked.pop(operation, event.t)
        if event.type != "info":
            marks.unanswered.pop(operation, None)
        if event.type == "ok":
            marks.answers.append((asked_at, event.t, event))

    def finish(self) -> None:
        sent_last: dict[tuple[str, str], int] = {}
        for record in self._truth.messages.values():
            key = (record.conversation, record.sender)
            sent_last[key] = max(sent_last.get(key, 0), record.seq)
        for key, marks in self._marks.items():
            conversation = self._truth.conversations.get(key[0])
            self._check_marks(key, marks, conversation.last if conversation else 0, sent_last.get(key, 0))
        for name, heads in self._heads.items():
            if fall := _first_fall(heads):
                self._findings.add("history-interval", f"history of {name}", f"head fell {fall}")

    def _check_marks(self, key: tuple[str, str], marks: Marks, last: int, sent: int) -> None:
        where = f"read mark of {key[1]} in {key[0]}"
        top = max(min(marks.wanted_max, last), sent)
        told = max([sent, *(answer.read_seq for _, _, answer in marks.answers if not answer.final)])
        possible = max([told, *(min(wanted, last) for wanted in marks.unanswered.values())])
        for _, _, answer in marks.answers:
            if answer.read_seq > top:
                self._findings.add(
                    "session", where, f"{answer.read_seq}, and nobody asked for more than {top}"
                )
            unread = answer.unread
            is_possible = unread is None or 0 <= unread <= max(0, last - answer.read_seq)
            if not is_possible or (answer.final and unread not in {None, last - answer.read_seq}):
                self._findings.add("session", where, f"{unread} unread after {answer.read_seq} of {last}")
            if answer.final and not told <= answer.read_seq <= max(possible, min(answer.wanted, last)):
                self._findings.add("session", where, f"{answer.read_seq} at the end, is {told}")
        if fall := _first_fall([(asked, ended, answer.read_seq) for asked, ended, answer in marks.answers]):
            self._findings.add("session", where, f"fell {fall}")


def _begins_and_ends_right(page: History, seqs: list[int]) -> bool:
    """The first and the last sequence of a page follow from the request, the head and `more`."""
    if page.after:
        if not seqs:
            return page.after >= page.head
        return seqs[-1] == page.after + 1 and page.more == (seqs[0] < page.head)
    newest = min(page.before - 1, page.head) if page.before else page.head
    if not seqs:
        return newest <= 0
    return seqs[0] == newest and page.more == (seqs[-1] > 1) and page.earliest <= 1


def _first_fall(spans: list[tuple[int, int, int]]) -> str:
    """(asked, answered, value): a value that is lower than one answered before it was asked for."""
    answered = sorted((ended, value) for _, ended, value in spans)
    place, highest = 0, 0
    for asked, _, value in sorted(spans):
        while place < len(answered) and answered[place][0] < asked:
            highest = max(highest, answered[place][1])
            place += 1
        if value < highest:
            return f"from {highest} to {value}"
    return ""

"""The matrix itself: small with every change, whole in the long run; and proof that each experiment can
fail.
"""

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import structs

from qim.adapters.commitlog_memory import MemoryCommitLog
from qim.adapters.mailbox_memory import MemoryMailboxStore
from qim.clock import SystemClock
from qim.ids import BootId, DispatchId, Offset, SlotId, UserId
from qim.ports import MailboxWrite, SlotClaim
from tests.matrix import fencing, retention
from tests.matrix.__main__ import main
from tests.matrix.experiments import EXPERIMENTS, TASKS, run_cell
from tests.matrix.media import MEDIA, Medium, MemoryHost, Parts, RedisHost
from tests.matrix.verdict import Outcome, Verdict, judge, render

SMALL_TASKS = 300
SLOW = {"E4-emptied"}
"""Waits for a word that does not come; part of the long form only."""
BY_NAME = {medium.name: medium for medium in MEDIA}


SHOWS = {"E1": ("C2", "C3", "C7"), "E2a": ("C10",), "E2b": ("C10",), "E3": ("F4", "M7")}
"""Guarantees that a medium keeps where it passes."""


def cells(*, leave_out: set[str]) -> list[Any]:
    found = []
    for medium in MEDIA:
        for name in EXPERIMENTS.keys() - leave_out - medium.not_asked.keys():
            marks = () if name in medium.fails else (pytest.mark.shows(*SHOWS.get(name, ())),)
            found.append(pytest.param(medium, name, id=f"{medium.name}-{name}", marks=marks))
    return sorted(found, key=lambda cell: str(cell.id))


@pytest.mark.parametrize(("medium", "name"), cells(leave_out=SLOW))
def test_each_medium_meets_its_claim(medium: Medium, name: str) -> None:
    cell = run_cell(medium, name, tasks=SMALL_TASKS)
    assert cell.meets_claim, render([cell])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("medium", "name"), cells(leave_out=set()))
def test_each_medium_meets_its_claim_with_ten_thousand_tasks(medium: Medium, name: str) -> None:
    cell = run_cell(medium, name, tasks=TASKS)
    assert cell.meets_claim, render([cell])


# --- every experiment can fail -----------------------------------------------------------------------


class ForgettingMailboxes(MemoryMailboxStore):
    """Takes every dispatch for a new one."""

    _made = 0

    def _progress_of(self, write: MailboxWrite) -> dict[DispatchId, Any]:
        return {}

    def _put(self, write: MailboxWrite, recipients: Iterable[UserId], day: int) -> None:
        # A mailbox is a set of entries, so a doubled one shows only when it is another one.
        ForgettingMailboxes._made += 1
        super()._put(structs.replace(write, entry=write.entry + b"%d" % self._made), recipients, day)


class SkippingLog(MemoryCommitLog):
    """Goes on at what is left, and says nothing."""

    def open_reader(self, positions: Mapping[SlotId, Offset]) -> Any:
        lows = {slot: Offset(self.partition(slot).low - 1) for slot in positions}
        return super().open_reader({slot: max(at, lows[slot]) for slot, at in positions.items()})


class ForgettingHost(MemoryHost):
    """The memory medium in front of stores that double what is repeated."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Parts]:
        async with super().open() as parts:
            yield parts._replace(mailboxes=ForgettingMailboxes(SystemClock(), self._mailboxes))


class SkippingHost(MemoryHost):
    """The memory medium with a log that skips."""

    def start(self, *, is_watched: bool = False) -> None:
        super().start()
        self._outbox = SkippingLog(SystemClock(), identity=b"a skipping log..")


class UnfencedHost(RedisHost):
    """The streams with owners that all call themselves the same, so that no epoch ever rises."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Parts]:
        async with super().open() as parts:
            for store in (parts.commits, parts.mailboxes):
                claim = store.claim

                def same(asked: SlotClaim, claim: Any = claim) -> Any:
                    return claim(asked._replace(boot=BootId(b"b" * 16), supervisor=b"s" * 16))

                vars(store)["claim"] = same
            yield parts


@pytest.mark.parametrize(
    ("name", "medium", "finding"),
    [
        ("E3", Medium("forgetting", "", ForgettingHost, outlives_processes=False), "a mailbox differs"),
        (
            "E4",
            Medium("skipping", "", SkippingHost, outlives_processes=False, guards_consumers=False),
            "partition",
        ),
        ("E7", Medium("unfenced", "", UnfencedHost), "reserve: a write"),
        ("E1", Medium("memory that claims", "", MemoryHost), "an ACK was sent before"),
        ("E2a", Medium("memory that claims", "", MemoryHost), "an acknowledged task"),
        ("E2b", Medium("memory that claims", "", MemoryHost), "an acknowledged task"),
    ],
)
def test_a_medium_that_breaks_its_promise_fails(
    name: str, medium: Medium, finding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "SILENCE_SECONDS_MAX", 1)  # memory answers at once or never
    monkeypatch.setattr(fencing, "AHEAD_TASKS", 300)  # an owner that nobody stops does all it has to do
    cell = run_cell(medium, name, tasks=SMALL_TASKS)
    assert cell.verdict == "FAIL", render([cell])
    assert cell.outcome.findings[0].startswith(finding), render([cell])


@pytest.mark.parametrize(
    ("strikes", "violations", "claimed", "verdict"),
    [
        (1, 0, True, "pass"),
        (1, 1, True, "FAIL"),
        (1, 1, False, "fails as claimed"),
        (1, 0, False, "passes unclaimed"),
        (0, 0, True, "not struck"),
        (0, 1, False, "not struck"),
    ],
)
def test_a_verdict_needs_a_fault_that_struck(
    strikes: int, violations: int, claimed: bool, verdict: Verdict
) -> None:
    outcome = Outcome(strikes=strikes, violations=violations)
    assert judge(outcome, claimed=claimed) == verdict


def test_the_command_prints_the_cells_that_were_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--tasks", "40", "E2a"]) == 0
    found = {cell["medium"]: cell["verdict"] for cell in json.loads(capsys.readouterr().out)}
    assert found == {"redis-streams": "pass", "everysec": "not applicable", "memory": "fails as claimed"}


def test_the_command_fails_where_a_claim_does_not_hold(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    claims_too_much = Medium("memory that claims", "", MemoryHost, outlives_processes=False)
    monkeypatch.setattr("tests.matrix.__main__.MEDIA", (claims_too_much,))
    assert main(["--tasks", "40", "E2a"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_an_unknown_experiment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["E99"])
    assert "no experiment E99" in capsys.readouterr().err

"""The checker can fail: clean histories are clean, each broken one is caught by the check that it breaks."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.checker.check import check, judge
from tests.checker.generated import clean_run
from tests.checker.history import (
    Dispatch,
    FileHistory,
    HistoryUnreadable,
    MemoryHistory,
    Pull,
    Push,
    Pushed,
    Recorder,
    Send,
    Shard,
    Shown,
    digest_of,
    type_of_error,
)
from tests.checker.mutators import MORE, SIXTEEN, AnyEvent, Copy, Mutator, mutate
from tests.checker.verdict import CHECKS

SEEDS = range(20)
events_of = cache(clean_run)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_clean_history_is_clean(seed: int) -> None:
    assert check(MemoryHistory(events_of(seed))) == []


@pytest.mark.parametrize("mutator", [*SIXTEEN, *MORE], ids=lambda mutator: mutator.change.__name__)
def test_a_broken_history_is_caught_by_the_check_it_breaks(mutator: Mutator) -> None:
    missed = [
        seed
        for seed in SEEDS
        if mutator.seen_by not in judge(MemoryHistory(mutate(mutator, events_of(seed), seed))).counts
    ]
    assert not missed, f"{mutator.seen_by} was not reported for the seeds {missed}"


def test_there_are_sixteen_mutators_of_the_contract() -> None:
    assert len({mutator.change for mutator in SIXTEEN}) == 16


def test_every_check_is_broken_by_some_mutator() -> None:
    assert {mutator.seen_by for mutator in (*SIXTEEN, *MORE)} == set(CHECKS)


def test_the_clean_histories_hold_what_makes_real_ones_hard() -> None:
    figures = [judge(MemoryHistory(events_of(seed))).figures for seed in SEEDS]
    assert sum(figure.outbox_repeats for figure in figures)
    assert sum(figure.dispatch_repeats for figure in figures)
    for outcome in ("ok", "fail", "info"):
        assert sum(figure.operations["send"][outcome] for figure in figures)
    died = sum(f.operations["send"]["invoke"] - f.operations["send"].total() // 2 for f in figures)
    assert died > 0, "no client died with a request open"
    assert all(figure.faults and figure.first_ok_seconds for figure in figures)


def _push_a_repeat(seed: int) -> list[AnyEvent]:
    """A device is told again of an entry, where a retry has left a repeated dispatch; empty without one."""
    copy = Copy(events_of(seed), random.Random(seed))
    firsts: dict[str, Dispatch] = {}
    repeats = copy.all(Dispatch, lambda one: firsts.setdefault(one.dispatch_id, one) is not one)
    if not repeats:
        return []
    repeat = repeats[-1]
    (base,) = (shard.base for shard in copy.all(Shard) if shard.shard == repeat.partition)
    push = copy.all(Push, lambda push: push.user in repeat.recipients)[-1]
    again = Pushed(0, base + repeat.offset, repeat.conversation, repeat.seq, repeat.entry)
    copy.swap(push, replace(push, events=[*push.events, again]))
    return copy.events


def test_a_push_at_the_place_of_a_repeated_dispatch_is_seen() -> None:
    verdicts = [judge(MemoryHistory(events)) for events in map(_push_a_repeat, SEEDS) if events]
    assert len(verdicts) > len(SEEDS) // 2
    assert all("mailbox" in verdict.counts for verdict in verdicts)


def test_a_mutator_leaves_the_clean_history_alone() -> None:
    for mutator in (*SIXTEEN, *MORE):
        mutate(mutator, events_of(3), 3)
    assert check(MemoryHistory(events_of(3))) == []


def _rebuilt(entries_kept: slice, change: Callable[[Shown], Shown]) -> list[str]:
    """The checks that a page with `rebuild` and these entries violates."""
    copy = Copy(events_of(4), random.Random(4))
    page = copy.page()
    kept = [change(entry) for entry in page.entries[entries_kept]]
    copy.swap(page, replace(page, entries=kept, rebuild=True))
    return sorted(judge(MemoryHistory(copy.events)).counts)


def test_a_page_that_says_rebuild_may_lack_what_is_gone() -> None:
    assert _rebuilt(slice(1, None), lambda shown: shown) == []


def test_a_page_that_says_rebuild_shows_nothing_wrong_all_the_same() -> None:
    assert _rebuilt(slice(0, 1), lambda shown: shown._replace(entry="0" * 16)) == ["corrupt"]


def _confirmed(*, held_too_many: int = 0, covered_too_far: int = 0) -> list[str]:
    """What a page violates that shows nothing, confirms what the device holds and says that there is more."""
    copy = Copy(events_of(4), random.Random(4))
    page = copy.pick(Pull, lambda pull: pull.type == "ok" and len(pull.entries) > 1 and not pull.held_count)
    before = next(at for at, event in enumerate(copy.events) if event is page)
    held = page.entries[: len(page.entries) // 2]
    through = held[-1].mailbox_seq
    asked = replace(page, held_through=through, held_count=len(held) + held_too_many)
    confirms = replace(asked, entries=[], covered_through=through + covered_too_far, more=True)
    rest = replace(page, after=confirms.covered_through, entries=page.entries[len(held) :])
    copy.events[before : before + 1] = [confirms, rest]
    return sorted(judge(MemoryHistory(copy.events)).counts)


def test_a_page_that_only_confirms_what_is_held_may_say_that_there_is_more() -> None:
    assert _confirmed() == []


def test_a_page_that_confirms_what_is_not_there_is_seen() -> None:
    assert _confirmed(held_too_many=1) == ["mailbox"]


def test_a_page_without_entries_that_ends_elsewhere_and_says_more_is_seen() -> None:
    assert _confirmed(covered_too_far=1) == ["mailbox"]


# --- files -------------------------------------------------------------------------------------------


def _write(folder: Path, events: list[AnyEvent]) -> FileHistory:
    """One file per process, as a live run writes them."""
    paths: dict[str, Path] = {}
    for event in events:
        process = getattr(event, "process", "stores") if type(event).__name__ != "Sample" else "stores"
        path = paths.setdefault(process, folder / f"{process}.jsonl")
        with Recorder(path, holds="stores" if process == "stores" else "events") as recorder:
            recorder.write(event)
    return FileHistory([*paths.values()])


def test_files_are_judged_like_the_list_they_came_from(tmp_path: Path) -> None:
    verdict = judge(_write(tmp_path, events_of(1)))
    assert verdict.clean, verdict.violations
    assert verdict.figures == judge(MemoryHistory(events_of(1))).figures


def test_a_broken_history_is_caught_in_files_too(tmp_path: Path) -> None:
    broken = mutate(SIXTEEN[3], events_of(1), 1)
    assert "mailbox" in judge(_write(tmp_path, broken)).counts


def test_a_line_that_a_kill_cut_short_never_happened(tmp_path: Path) -> None:
    path = tmp_path / "client.jsonl"
    with Recorder(path) as recorder:
        recorder.write(Send(1, "client", "invoke", 1, "a", "ab", "m", digest_of(b"x")))
    with path.open("ab") as file:
        file.write(b'["send",2,"client","ok",1,"a","ab","m')
    assert len(list(FileHistory([path]).events())) == 1


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "client.jsonl"
    with Recorder(path) as recorder:
        recorder.write(Send(1, "client", "invoke", 1, "a", "ab", "m", digest_of(b"x")))
    with path.open("ab") as file:
        file.write(b'["send",2]\n')
    with pytest.raises(HistoryUnreadable, match=r"client\.jsonl, line 3"):
        list(FileHistory([path]).events())


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"a": 1}\n')
    with pytest.raises(HistoryUnreadable, match="no head"):
        FileHistory([path])


@pytest.mark.parametrize(
    ("code", "outcome"),
    [(1003, "fail"), (1004, "fail"), (2001, "info"), (2002, "fail"), (2003, "info"), (3001, "info")],
)
def test_only_a_proved_no_is_a_fail(code: int, outcome: str) -> None:
    assert type_of_error(code) == outcome


def test_the_same_seed_makes_the_same_history() -> None:
    assert clean_run(5) == clean_run(5)
    assert clean_run(5) != clean_run(6)

"""Every mutant fits the code as it is, names tests that exist and ids that those show; some are really run.

All of them are run by `make mutants`. Here each answer of the runner is met once: caught, survived, does not
apply, no verdict. A runner that calls everything caught would prove nothing.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.ids_table import REQUIRED_IDS
from tests.mutants.__main__ import choose, conclude, format_row
from tests.mutants.catalogue import ALL, WITHOUT_MUTANT, unproved_ids
from tests.mutants.model import (
    Change,
    DoesNotApplyError,
    Mutant,
    Report,
    Verdict,
    find_unfit,
    judge,
    without_parameters,
)
from tests.mutants.runner import ControlError, Result, base_copy, check_control, run_mutants
from tests.mutants.tree import ROOT
from tests.mutants.witness import find_strays

KNOWN_ID = re.compile(r"(?:[ACFGHKMOSTX]\d{1,2}|F-\d\d)\Z")
CHEAP = ("one-server-in-two-files", "cut-header-unchecked", "w-over-a-gap")
TEST = "tests/unit/client/test_account.py::test_one_server_written_in_several_ways_is_one_scope"
every_mutant = pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)


@cache
def marks_by_test(path: str) -> dict[str, set[str]]:
    """Test function → ids of its `shows` marks."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {
        node.name: set(_shown(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def _shown(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for decorator in function.decorator_list:
        match decorator:
            case ast.Call(func=ast.Attribute(attr="shows"), args=arguments):
                yield from (str(item.value) for item in arguments if isinstance(item, ast.Constant))
            case _:
                continue


def made(*changes: Change, tests: tuple[str, ...] = (TEST,), ids: tuple[str, ...] = ("K7",)) -> Mutant:
    return Mutant("made-here", "nothing", ids, tests, changes)


# --- the catalogue -----------------------------------------------------------------------------------


@every_mutant
def test_it_fits_the_code_as_it_is(mutant: Mutant) -> None:
    assert mutant.changes
    broken: dict[str, str] = {}
    for change in mutant.changes:
        text = broken.get(change.path) or (ROOT / change.path).read_text(encoding="utf-8")
        broken[change.path] = change.apply_to(text)
        assert broken[change.path] != text
    for path, text in broken.items():
        if path.endswith(".py"):
            ast.parse(text, filename=path)


@every_mutant
def test_its_tests_exist_and_show_its_ids(mutant: Mutant) -> None:
    shown: set[str] = set()
    for test in mutant.tests:
        path, _, name = without_parameters(test).partition("::")
        assert name in marks_by_test(path), f"no such test: {test}"
        shown |= marks_by_test(path)[name]
    assert set(mutant.ids) <= shown
    assert all(KNOWN_ID.match(proof_id) for proof_id in mutant.ids)


def test_names_are_single_and_every_sentence_ends() -> None:
    names = [mutant.name for mutant in ALL]
    assert sorted(set(names)) == sorted(names)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in names)
    assert all(mutant.breaks.endswith(".") for mutant in ALL)


def test_every_required_id_is_turned_red_or_says_why_it_cannot_be() -> None:
    assert unproved_ids(ALL) == []
    assert set(WITHOUT_MUTANT) <= set(REQUIRED_IDS)
    assert unproved_ids([]) == [proof_id for proof_id in REQUIRED_IDS if proof_id not in WITHOUT_MUTANT]


# --- the runner --------------------------------------------------------------------------------------


def test_cheap_mutants_are_caught_and_harmless_or_broken_ones_are_not() -> None:
    harmless = made(
        Change("qim/client/account.py", "DEFAULT_PORT: Final = 7443", "DEFAULT_PORT: Final = 7_443")
    )
    outdated = made(Change("qim/client/account.py", "what never stood there", ""))
    crashing = made(
        Change("qim/client/account.py", "    return data_dir / scope", "    return nowhere / scope")
    )
    cheap = choose(CHEAP)
    with base_copy() as (base, folder):
        check_control(base, cheap)
        assert not Path(folder / "base" / ".git").exists()
        mutants = [*cheap, harmless, outdated._replace(name="outdated"), crashing._replace(name="crashing")]
        results = {result.mutant.name: result for result in run_mutants(base, folder, mutants, jobs=2)}
    assert {name: results[name].verdict for name in CHEAP} == dict.fromkeys(CHEAP, Verdict.CAUGHT)
    assert results["made-here"].verdict is Verdict.SURVIVED
    assert results["outdated"].verdict is Verdict.NO_MATCH
    assert results["crashing"].verdict is Verdict.UNDECIDED
    assert "nowhere" in results["crashing"].detail
    is_good, words = conclude(list(results.values()))
    assert not is_good
    assert words.startswith("3 of 6 mutants were caught; not caught: ")
    assert "still green" in format_row(results["made-here"])


def test_a_named_test_that_is_not_green_without_the_mutant_ends_the_run(tmp_path: Path) -> None:
    with base_copy() as (base, _folder):
        (base / "tests" / "unit" / "test_red.py").write_text("def test_red() -> None:\n    assert False\n")
        with pytest.raises(ControlError, match=r"not green on the unbroken code:\ntests/unit/test_red"):
            check_control(base, [made(tests=("tests/unit/test_red.py::test_red",))])


def test_code_that_came_from_elsewhere_than_the_copy_is_seen(tmp_path: Path) -> None:
    assert find_strays(ROOT.resolve()) == []
    assert str(Path(sys.modules["tests.ids_table"].__file__ or "").resolve()) in find_strays(tmp_path)
    verdict, detail = judge(made(), Report(failed={TEST}, strays=["elsewhere.py"]))
    assert (verdict, detail) == (Verdict.UNDECIDED, "not the copy was tested: elsewhere.py")


def test_every_named_test_must_fail_and_show_every_id() -> None:
    other = "tests/unit/x.py::test_other"
    two = made(tests=(f"{TEST}[one]", other), ids=("K7", "C1"))
    shows = {TEST: ["K7"], other: ["C1"]}
    assert judge(two, Report(failed={TEST, other}, shows=shows))[0] is Verdict.CAUGHT
    assert judge(two, Report(failed={TEST}, passed={other}, shows=shows))[1] == f"still green: {other}"
    assert judge(two, Report(failed={TEST, other}, shows={}))[1] == "no failed test shows C1, K7"
    assert judge(two, Report(failed={TEST}, unusable={other}))[0] is Verdict.UNDECIDED
    assert judge(two, Report(failed={TEST}))[0] is Verdict.UNDECIDED


def test_a_test_that_passes_and_fails_or_is_skipped_is_no_control() -> None:
    assert find_unfit(Report(passed={TEST}), [f"{TEST}[one]", TEST]) == []
    assert find_unfit(Report(passed={TEST}, failed={TEST}), [TEST]) == [TEST]
    assert find_unfit(Report(unusable={TEST}), [TEST]) == [TEST]


def test_a_change_applies_to_one_place_or_says_why_not(tmp_path: Path) -> None:
    assert Change("x.py", "a", "b").apply_to("1 a 2") == "1 b 2"
    for text, count in (("b", 0), ("a a", 2)):
        with pytest.raises(DoesNotApplyError, match=f"x.py: .* stands there {count} times"):
            Change("x.py", "a", "b").apply_to(text)
    (tmp_path / "x.py").write_text("a")
    with pytest.raises(DoesNotApplyError, match="no such file"):
        made(Change("x.py", "a", "b"), Change("y.py", "a", "b")).apply(tmp_path)
    assert (tmp_path / "x.py").read_text() == "a", "nothing is written when one change does not apply"


def test_a_run_of_all_mutants_is_good_only_when_each_required_id_turned_red() -> None:
    caught = [Result(mutant, Verdict.CAUGHT, "", 0.0) for mutant in ALL]
    assert conclude(caught)[0]
    quick = [result for result in caught if not result.mutant.is_long]
    assert conclude(quick)[0]
    assert "long ones left out" in conclude(quick)[1]
    assert "left out" not in conclude(quick[1:])[1], "a run of some says nothing of the rest"
    survived = [caught[0]._replace(verdict=Verdict.SURVIVED), *caught[1:]]
    assert not conclude(survived)[0]
    with pytest.raises(SystemExit):
        choose(["nobody"])

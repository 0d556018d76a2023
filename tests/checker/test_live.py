"""The live run: what its clients remember after a kill, and the whole of it once."""

import io
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from tests.checker.history import Pull, Recorder, Send, Shown, digest_of
from tests.checker.live import Outcome, as_result, print_outcome
from tests.checker.live_clients import Plan
from tests.checker.live_load import Repair, weigh
from tests.checker.live_memory import ClientOrder, DeviceOrder, Memory, conversations_of, recall
from tests.checker.verdict import Figures, Verdict
from tests.services.dev_server import REPOSITORY
from workers.audit import Report

ME, PEER, DEVICE = "0a" * 16, "0b" * 16, "0d" * 16


def _order(folder: Path, process: str) -> ClientOrder:
    device = DeviceOrder(ME, "", DEVICE, [PEER], sends_per_second=1.0)
    return ClientOrder(1, "", 1, process, str(folder), 7, [device])


CONVERSATION = conversations_of(_order(Path(), "client-0.0"), _order(Path(), "client-0.0").devices[0])[PEER]


def _write_send(recorder: Recorder, number: int, *ends: str) -> None:
    send = Send(number, "client-0.0", "invoke", number, ME, CONVERSATION, f"m{number}", digest_of(b"x"))
    recorder.write(send)
    for end in ends:
        send.type, send.seq = end, 9  # type: ignore[assignment]  # an end
        recorder.write(send)


def _write_page(recorder: Recorder, *, through: int) -> None:
    page = Pull(5, "client-0.0", "ok", 9, ME, DEVICE, 0, entries=[Shown(4, CONVERSATION, 9, "e")])
    page.covered_through = through
    recorder.write(page)


def test_a_killed_client_goes_on_with_its_cursor_and_its_unanswered_messages(tmp_path: Path) -> None:
    with Recorder(tmp_path / "client-0.0.jsonl") as first:
        _write_send(first, 0, "ok")
        _write_send(first, 1, "info")
        _write_send(first, 2)
        _write_send(first, 0, "ok")  # repeated
        _write_page(first, through=17)
    (memory,) = recall(_order(tmp_path, "client-0.1"))
    assert memory.cursor == 17
    assert set(memory.unanswered) == {"m1", "m2"}
    assert set(memory.acknowledged) == {("m0", PEER)}
    assert memory.made == 3


def test_a_client_that_was_never_killed_remembers_nothing(tmp_path: Path) -> None:
    assert recall(_order(tmp_path, "client-0.0")) == [Memory()]


def test_what_a_process_noted_at_its_begin_stands_for_all_histories_before(tmp_path: Path) -> None:
    with Recorder(tmp_path / "client-0.0.jsonl") as first:
        _write_send(first, 0, "ok")
        _write_send(first, 1)
        _write_page(first, through=17)
    recall(_order(tmp_path, "client-0.1"))
    with Recorder(tmp_path / "client-0.1.jsonl") as second:
        _write_send(second, 1, "ok")
        _write_send(second, 2)
    from_all = recall(_order(tmp_path, "client-0.2"))
    (tmp_path / "client-0.2.memory").unlink()  # killed before it was there: the one before it counts
    (tmp_path / "client-0.0.jsonl").unlink()
    (memory,) = recall(_order(tmp_path, "client-0.2"))
    assert [memory] == from_all
    assert (memory.cursor, set(memory.unanswered), memory.made) == (17, {"m2"}, 3)


@pytest.mark.parametrize(
    ("is_named", "faults", "is_told"), [(False, 1, False), (True, 1, True), (False, 0, True)]
)
def test_a_run_folder_is_named_only_when_it_is_still_there(
    tmp_path: Path, *, is_named: bool, faults: int, is_told: bool
) -> None:
    verdict = Verdict([], Counter(), Figures(faults=Counter({"kill worker": faults})))
    plan = Plan(60.0, 7, 200.0, 5.0, 2)
    load = weigh(range(0, 10**9, 10**6), began_ns=0, ended_ns=10**9, rate=1_000.0)
    outcome = Outcome(verdict, Report(), {}, [], {}, {}, load, 9, plan, tmp_path, is_named)
    stream = io.StringIO()
    print_outcome(outcome, Console(file=stream, width=80))
    assert (f"run folder {tmp_path}" in stream.getvalue()) is is_told
    assert as_result(outcome)["folder"] == (str(tmp_path) if is_told else "")
    assert outcome.is_kept is is_told


@pytest.mark.parametrize(("rate", "is_good"), [(1_000.0, True), (1_200.0, False)])
def test_a_run_that_did_not_carry_its_load_does_not_pass(
    tmp_path: Path, *, rate: float, is_good: bool
) -> None:
    verdict = Verdict([], Counter(), Figures(faults=Counter({"kill worker": 1})))
    load = weigh(range(0, 10**9, 10**6), began_ns=0, ended_ns=10**9, rate=rate)
    outcome = Outcome(
        verdict, Report(), {}, [], {}, {}, load, 9, Plan(60.0, 7, rate, 5.0, 2), tmp_path, is_named=True
    )
    stream = io.StringIO()
    print_outcome(outcome, Console(file=stream, width=80))
    assert outcome.is_good is is_good
    assert ("NOT CARRIED" in stream.getvalue()) is not is_good
    assert as_result(outcome)["load"]["accepted_per_second"] == 1_000.0


def test_the_time_in_which_nobody_was_acknowledged_is_told() -> None:
    moments = [*range(0, 10**9, 10**8), *range(3 * 10**9, 4 * 10**9, 10**8), 9 * 10**9]
    load = weigh(
        moments, began_ns=0, ended_ns=4 * 10**9, rate=10.0,
        repairs=[Repair("kill store", 2.0), Repair("kill store", 1.0)], client_cpu_seconds=0.002,
    )  # fmt: skip
    assert (load.accepted, load.accepted_per_second, load.carried) == (20, 5.0, 0.5)
    assert load.silent_seconds == load.silent_seconds_max == pytest.approx(2.1)
    assert load.seconds_below_half == 2
    assert load.repair_seconds == {"kill store": [2.0, 1.0]}
    assert load.client_cpu_us_per_message == pytest.approx(100.0)


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.shows("F-01", "F-08", "F-37", "F-39", "C2", "C4", "C7", "F4", "M4", "M7")
def test_a_live_run_with_random_faults_is_clean(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.checker.live",
        "--seconds",
        "30",
        "--kill-every",
        "2",
        "--seed",
        "11",
    ]
    done = subprocess.run(
        [*command, "--json", "--folder", str(tmp_path)],
        cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["clean"]
    assert result["load"]["is_carried"]
    assert result["audit"]["clean"]
    assert sum(result["faults"].values()) >= 3
    assert result["operations"]["send"]["info"] > 0, "no outcome was unknown: the faults did no harm"
    assert result["deliveries"] > 1_000

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
from tests.checker.live import Outcome, Plan, as_result, print_outcome
from tests.checker.live_client import ClientOrder, DeviceClient, DeviceOrder, history_files, remember
from tests.checker.verdict import Figures, Verdict
from tests.services.dev_server import REPOSITORY
from workers.audit import Report

ME, PEER, DEVICE = "0a" * 16, "0b" * 16, "0d" * 16


def _client(folder: Path, process: str) -> DeviceClient:
    order = ClientOrder(
        1, "", 1, process, str(folder), 7, [DeviceOrder(ME, "", DEVICE, [PEER], sends_per_second=1.0)]
    )
    return DeviceClient(order, 0, Recorder(folder / f"{process}.jsonl"))


def test_a_killed_client_goes_on_with_its_cursor_and_its_unanswered_messages(tmp_path: Path) -> None:
    first = _client(tmp_path, "client-0.0")
    conversation = first.conversations[PEER]
    for number, end in enumerate(("ok", "info", "")):
        send = Send(number, "client-0.0", "invoke", number, ME, conversation, f"m{number}", digest_of(b"x"))
        first.recorder.write(send)
        if end:
            send.type, send.seq = end, 9  # type: ignore[assignment]  # both are types of an end
            first.recorder.write(send)
    page = Pull(5, "client-0.0", "ok", 9, ME, DEVICE, 0, entries=[Shown(4, conversation, 9, "e")])
    page.covered_through = 17
    first.recorder.write(page)
    first.recorder.close()

    second = _client(tmp_path, "client-0.1")
    remember([second], history_files(tmp_path, "client-0.1"))
    assert second.memory.cursor == 17
    assert set(second.memory.unanswered) == {"m1", "m2"}
    assert second.memory.acknowledged == [("m0", PEER)]
    second.recorder.close()


def test_a_client_that_was_never_killed_remembers_nothing(tmp_path: Path) -> None:
    client = _client(tmp_path, "client-0.0")
    remember([client], history_files(tmp_path, "client-0.0"))
    assert (client.memory.cursor, client.memory.unanswered) == (0, {})
    client.recorder.close()


@pytest.mark.parametrize(
    ("is_named", "faults", "is_told"), [(False, 1, False), (True, 1, True), (False, 0, True)]
)
def test_a_run_folder_is_named_only_when_it_is_still_there(
    tmp_path: Path, *, is_named: bool, faults: int, is_told: bool
) -> None:
    verdict = Verdict([], Counter(), Figures(faults=Counter({"kill worker": faults})))
    plan = Plan(60.0, 7, 200.0, 5.0, 2)
    outcome = Outcome(verdict, Report(), {}, {}, 9, plan, tmp_path, is_named)
    stream = io.StringIO()
    print_outcome(outcome, Console(file=stream, width=80))
    assert (f"run folder {tmp_path}" in stream.getvalue()) is is_told
    assert as_result(outcome)["folder"] == (str(tmp_path) if is_told else "")
    assert outcome.is_kept is is_told


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
    assert result["audit"]["clean"]
    assert sum(result["faults"].values()) >= 3
    assert result["operations"]["send"]["info"] > 0, "no outcome was unknown: the faults did no harm"
    assert result["deliveries"] > 1_000

"""The checker judges 2 million deliveries within 30 seconds and 2 GiB, on one core."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.checker.generated import CorrectRun
from tests.checker.history import Recorder

DELIVERIES: Final = 2_000_000
SECONDS_MAX: Final = 30.0
BYTES_MAX: Final = 2 << 30

MEASURED: Final = """
import json, resource, sys, time
from pathlib import Path
from tests.checker.check import judge
from tests.checker.history import FileHistory, files_of
began = time.process_time()
verdict = judge(FileHistory(files_of(Path(sys.argv[1]))))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([time.process_time() - began, peak, verdict.figures.deliveries, verdict.clean]))
"""


def write_large_run(folder: Path, *, steps: int) -> None:
    """A file per client process, and one for the stores."""
    run = CorrectRun(1, users=16, devices=3, steps=steps, sends=64, page=256)
    recorders: dict[str, Recorder] = {}
    for event in run.events():
        name = event.process.rstrip("+")  # a client that died goes on in the file of the first one
        recorder = recorders.get(name)
        if recorder is None:
            recorder = recorders[name] = Recorder(folder / f"{name}.jsonl")
        recorder.write(event)
    with Recorder(folder / "stores.jsonl", holds="stores") as stores:
        for read in run.store_reads():
            stores.write(read)
    for recorder in recorders.values():
        recorder.close()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_million_deliveries_are_judged_in_time_and_memory(tmp_path: Path) -> None:
    write_large_run(tmp_path, steps=4_800)
    command = [sys.executable, "-c", MEASURED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, peak, deliveries, is_clean = json.loads(done.stdout)
    measured = f"{deliveries:,} deliveries, {seconds:.1f} s of one core, {peak / 2**20:,.0f} MiB"
    assert is_clean
    assert deliveries >= DELIVERIES, measured
    assert seconds <= SECONDS_MAX, measured
    assert peak <= BYTES_MAX, measured
    sys.stdout.write(measured + "\n")

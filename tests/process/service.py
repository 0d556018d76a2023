"""Runs `supervised.py` for one test: starts it, reads what it said, ends it by its pid."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from tests.waiting import eventually

REPOSITORY: Final = Path(__file__).parents[2]
QUICK: Final[Mapping[str, Any]] = {
    "tick_ms": 20, "slow_ms": 300, "abort_ms": 600, "kill_ms": 900, "late_ms": 400, "drain_ms": 5_000,
}  # fmt: skip
"""Shortened limits: the order of the measures is what is tested, their length is a constant."""


class Service:
    """One run of the tiny service."""

    def __init__(
        self,
        folder: Path,
        children: Mapping[str, str],
        *,
        watch: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.folder = folder
        plan = folder / "plan.json"
        plan.write_text(json.dumps({"children": children, "watch": {**QUICK, **(watch or {})}, **options}))
        self._errors = (folder / "log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.process.supervised", str(plan)],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            env={**os.environ, **(environment or {})},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._errors.close()

    def go(self) -> None:
        (self.folder / "go").touch()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self, *, timeout_seconds: float = 10.0) -> int:
        """Waits for the end and gives the exit code."""
        return self.process.wait(timeout_seconds)

    # --- what children did ---

    def said(self) -> list[dict[str, Any]]:
        path = self.folder / "said"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def did(self, child: str, what: str, *, generation: int = 1) -> dict[str, Any] | None:
        for line in self.said():
            if (line["child"], line["what"], line["generation"]) == (child, what, generation):
                return line
        return None

    def until_did(self, child: str, what: str, *, generation: int = 1) -> dict[str, Any]:
        found = eventually(
            lambda: self.did(child, what, generation=generation), what=f"{child} of {generation} did {what}"
        )
        assert found is not None
        return found

    def pid_of(self, child: str, *, generation: int = 1) -> int:
        return int(self.until_did(child, "started", generation=generation)["pid"])

    # --- what the supervisor logged ---

    def log_text(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def logged(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        found = []
        for line in self.log_text().splitlines():
            if not line.startswith("{"):
                continue
            entry = json.loads(line)
            if entry["event"] == event and fields.items() <= entry.items():
                found.append(entry)
        return found

    def until_logged(self, event: str, **fields: Any) -> dict[str, Any]:
        return eventually(lambda: self.logged(event, **fields), what=f"{event} {fields} logged")[0]

    def until_ready(self) -> None:
        self.until_logged("service_ready")


def is_alive(pid: int) -> bool:
    """A zombie is not alive."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"

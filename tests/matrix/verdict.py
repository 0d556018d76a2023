"""What an experiment found, what its medium claims, and the table of both."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

FINDINGS_KEPT_MAX: Final = 5
"""Examples per cell; their number is counted in full."""

Verdict = Literal["pass", "fails as claimed", "FAIL", "passes unclaimed", "not struck", "not applicable"]

MEETS_CLAIM: Final[frozenset[Verdict]] = frozenset({"pass", "fails as claimed", "not applicable"})


@dataclass
class Outcome:
    """What one experiment saw on one medium."""

    tasks: int = 0
    strikes: int = 0
    """How often the fault really happened; an experiment whose fault never struck shows nothing."""
    strikes_wanted: int = 1
    figures: dict[str, int | float | str] = field(default_factory=dict)
    violations: int = 0
    findings: list[str] = field(default_factory=list)

    def violated(self, finding: str, *, times: int = 1) -> None:
        """Notes something that the medium must not do."""
        if times:
            self.violations += times
            if len(self.findings) < FINDINGS_KEPT_MAX:
                self.findings.append(finding if times == 1 else f"{finding} ({times} times)")

    def expect(self, holds: bool, finding: str) -> None:
        self.violated(finding, times=0 if holds else 1)

    def count(self, figure: str, amount: int) -> None:
        known = self.figures.get(figure, 0)
        assert isinstance(known, int)
        self.figures[figure] = known + amount


@dataclass(frozen=True)
class Cell:
    """One place of the table."""

    medium: str
    experiment: str
    verdict: Verdict
    seconds: float
    outcome: Outcome
    reason: str = ""
    """Why the experiment was not asked."""

    @property
    def meets_claim(self) -> bool:
        return self.verdict in MEETS_CLAIM

    def as_dict(self) -> dict[str, object]:
        return {
            "medium": self.medium,
            "experiment": self.experiment,
            "verdict": self.verdict,
            "meets_claim": self.meets_claim,
            "tasks": self.outcome.tasks,
            "strikes": self.outcome.strikes,
            "violations": self.outcome.violations,
            "findings": self.outcome.findings,
            "figures": self.outcome.figures,
            "reason": self.reason,
            "seconds": round(self.seconds, 2),
        }


def judge(outcome: Outcome, *, claimed: bool) -> Verdict:
    """`claimed`: the medium says that it passes."""
    if outcome.strikes < outcome.strikes_wanted:
        return "not struck"
    if outcome.violations:
        return "FAIL" if claimed else "fails as claimed"
    return "pass" if claimed else "passes unclaimed"


def render(cells: Sequence[Cell]) -> str:
    """The table, for people."""
    rows = [("medium", "experiment", "verdict", "tasks", "strikes", "bad", "seconds", "figures")]
    rows += [
        (
            cell.medium, cell.experiment, cell.verdict, str(cell.outcome.tasks), str(cell.outcome.strikes),
            str(cell.outcome.violations), f"{cell.seconds:.1f}", _figures(cell),
        )
        for cell in cells
    ]  # fmt: skip
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]) - 1)]
    lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]
    for cell in cells:
        lines += [f"  {cell.medium} {cell.experiment}: {finding}" for finding in cell.outcome.findings]
    return "\n".join(lines)


def _figures(cell: Cell) -> str:
    if cell.reason:
        return cell.reason
    return ", ".join(f"{name} {value}" for name, value in cell.outcome.figures.items())

"""What an audit says: to people, to a terminal and to a file."""

import io

from rich.console import Console

from qim.adapters.audit_redis import Finding
from workers.audit import Report
from workers.audit_command import describe, make_progress


def test_a_clean_report_says_what_was_walked() -> None:
    report = Report()
    report.walked["outbox_records"] = 12_345
    assert describe(report.as_result()).splitlines() == ["clean", "  walked     12,345  outbox records"]


def test_findings_beyond_the_maximum_are_counted_and_not_kept() -> None:
    report = Report(findings_max=2)
    report.note([Finding("gap", f"conversation {number}") for number in range(3)])
    report.note([Finding("entry_missing", "user 00")])
    assert len(report.findings) == 2
    lines = describe(report.as_result()).splitlines()
    assert lines[0] == "NOT clean"
    assert "  gap: conversation 1" in lines
    assert "  gap: conversation 2" not in lines
    assert lines[-1] == "  and 2 more; --findings-max lists them"


def test_a_place_cannot_repaint_the_terminal() -> None:
    report = Report()
    report.note([Finding("gap", "\x1b[2J")])
    assert "\x1b" not in describe(report.as_result())


def test_a_terminal_gets_a_bar_also_before_there_is_a_rate_and_a_file_gets_none() -> None:
    for is_terminal in (True, False):
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=is_terminal, width=100)
        with make_progress(console) as progress:
            bar = progress.add_task("Outbox", total=10)
            progress.refresh()
            progress.advance(bar, 10)
        assert ("Outbox" in stream.getvalue()) is is_terminal

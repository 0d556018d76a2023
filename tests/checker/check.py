"""The checker: one pass over the reads of the stores, one over the events, and a verdict.

    check(history)      list of violations, empty for a clean run
    judge(history)      the same with figures

Pure: a history goes in, a verdict comes out. The stores are read first and stay in memory as lists
(`truth.py`); the events of the clients stream past them. Time and memory grow with the messages, and with the
deliveries only by what it takes to read them.
"""

import gc
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, Final

from tests.checker.conversations import ConversationChecks
from tests.checker.history import Device, Fault, History, Pull, Push, Read, RunHistory, Send
from tests.checker.sends import SendChecks
from tests.checker.shown import ShownChecks
from tests.checker.stores import check_stores
from tests.checker.truth import build_truth, sort_reads
from tests.checker.verdict import Figures, Findings, Verdict, Violation

RECOVERY_SECONDS_MAX: Final = 30.0
"""After a healing somebody's message is acknowledged within this time."""


def check(history: RunHistory) -> list[Violation]:
    return judge(history).violations


def judge(history: RunHistory, *, recovery_seconds_max: float = RECOVERY_SECONDS_MAX) -> Verdict:
    # Millions of containers live until the end: the collector would walk them again and again for nothing.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _judge(history, recovery_seconds_max)
    finally:
        if was_enabled:
            gc.enable()


def _judge(history: RunHistory, recovery_seconds_max: float) -> Verdict:
    findings, figures = Findings(), Figures()
    reads = sort_reads(history.store_reads())
    truth = build_truth(reads)
    check_stores(truth, reads, findings, figures)
    del reads  # the truth holds what the events are compared with
    sends = SendChecks(truth, findings, figures.operations["send"])
    shown = ShownChecks(truth, findings, figures)
    conversations = ConversationChecks(truth, findings, figures)
    faults: list[Fault] = []
    handlers: dict[type[object], Callable[[Any], None]] = {
        Send: sends.on_send,
        Pull: shown.on_pull,
        Push: shown.on_push,
        Device: shown.on_device,
        History: conversations.on_history,
        Read: conversations.on_read,
        Fault: faults.append,
    }
    for event in history.events():
        handlers[type(event)](event)
    sends.finish()
    figures.accepted_at = sends.first_moments()
    shown.finish()
    conversations.finish()
    _check_liveness(faults, sends, findings, figures, recovery_seconds_max)
    return Verdict(findings.kept, findings.counts, figures)


def _check_liveness(
    faults: list[Fault], sends: SendChecks, findings: Findings, figures: Figures, recovery_seconds_max: float
) -> None:
    moments = sorted(sends.ok_moments)
    for fault in sorted(faults, key=lambda fault: fault.t):
        if fault.phase == "strike":
            figures.faults[fault.what] += 1
            continue
        after = bisect_right(moments, fault.t)
        where = f"{fault.what} {fault.target}".strip()
        if after == len(moments):
            if sends.sent_last_at > fault.t + recovery_seconds_max * 1e9:
                findings.add("liveness", where, "nothing was acknowledged after it had healed")
            continue
        seconds = (moments[after] - fault.t) / 1e9
        figures.first_ok_seconds.append(seconds)
        if seconds > recovery_seconds_max:
            findings.add("liveness", where, f"the first acknowledgement came after {seconds:.1f} s")

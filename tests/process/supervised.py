"""A tiny service on the real supervisor: `python -m tests.process.supervised PLAN.json`.

The plan names children by what they do; the real signals, forks, pages and pipes are used, only the work of a
child is trivial. Every line of output is one JSON object: the supervisor's log on standard error (as in
service), what children did appended to the file `said` of the plan.

    beat            beats, drains stage by stage when told
    deaf            beats, ignores the drain
    block           beats, then blocks its loop for ever in Python code once the file `go` exists
    crash           ends with 70 at once
    exit:CODE       ends with CODE once the file `go` exists
    wait            stays in state waiting until the file `go` exists, then beats
    thread          (not a child) the supervisor starts a thread first, so the fork must be refused
"""

import json
import logging
import os
import selectors
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from qim.clock import SystemClock
from qim.domain.supervisor import ChildState, Stage, WatchLimits
from workers.child import ChildContext, ChildEntry
from workers.heartbeat import HeartbeatPage
from workers.listeners import Listeners
from workers.notify import Notifier
from workers.supervisor import ChildPlan, Supervisor

CLOCK = SystemClock()


class TinyChild:
    """Stands in for a worker: a loop that stamps and obeys the page."""

    def __init__(self, behaviour: str, folder: Path) -> None:
        self.behaviour = behaviour
        self.folder = folder

    def __call__(self, context: ChildContext) -> int:
        self.say(context, "started", environment=[name for name in os.environ if name == "NOTIFY_SOCKET"])
        signal.signal(signal.SIGTERM, lambda *_: self.say(context, "nudged"))
        signal.signal(signal.SIGHUP, lambda *_: self.say(context, "reloaded"))
        if self.behaviour == "crash":
            return 70
        state = ChildState.WAITING if self.behaviour == "wait" else ChildState.READY
        context.record.set_state(state, now_ns=now_ns())
        return self.beat(context)

    def beat(self, context: ChildContext) -> int:
        done = Stage.NONE
        with selectors.DefaultSelector() as selector:
            while True:
                context.record.stamp(now_ns())
                if self.is_told_to_go():
                    code = self.go(context)
                    if code is not None:
                        return code
                wanted = context.record.stage_wanted
                if wanted > done and self.behaviour != "deaf":
                    done = wanted
                    self.say(context, f"stage {wanted.name}")
                    context.record.report_done(wanted)
                    if wanted is Stage.CLOSE:
                        return 0
                selector.select(0.01)

    def go(self, context: ChildContext) -> int | None:
        kind, _, argument = self.behaviour.partition(":")
        if kind == "block":
            self.say(context, "blocked")
            while True:
                pass
        if kind == "exit":
            return int(argument)
        if kind == "wait" and context.record.state is ChildState.WAITING:
            context.record.set_state(ChildState.READY, now_ns=now_ns())
        return None

    def is_told_to_go(self) -> bool:
        return (self.folder / "go").exists()

    def say(self, context: ChildContext, what: str, **fields: Any) -> None:
        line = {"child": context.name, "pid": os.getpid(), "generation": context.generation, "what": what}
        with (self.folder / "said").open("a") as said:
            said.write(json.dumps(line | fields) + "\n")


def now_ns() -> int:
    return int(CLOCK.monotonic() * 1e9)


def main(plan: Mapping[str, Any], folder: Path) -> int:
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    children = plan["children"]
    listeners = Listeners(address="127.0.0.1", port=0, count=len(children), backlog=8)
    listeners.open_all()
    if plan.get("thread"):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    supervisor = Supervisor(
        [
            ChildPlan(name=name, entry=entry(behaviour, folder), listens=True, ends_last=name == "admin")
            for name, behaviour in children.items()
        ],
        page=HeartbeatPage(children=len(children), snapshot_bytes=64),
        listeners=listeners,
        notifier=Notifier.from_environment(os.environ),
        clock=CLOCK,
        jitter=lambda: 0.5,
        watch=WatchLimits(**plan.get("watch", {})),
        on_reload=(lambda: None) if plan.get("reload") else None,
    )
    return supervisor.run()


def entry(behaviour: str, folder: Path) -> ChildEntry:
    return TinyChild(behaviour, folder)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    sys.exit(main(json.loads(path.read_text()), path.parent))

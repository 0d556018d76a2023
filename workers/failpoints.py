"""Named steps of the message path at which a test may strike.

`QIM_FAILPOINTS="writer.reserved=exit@3,mailbox.finished=pause:2000"` names steps and what happens there:

    exit       the process ends at once with 137, as after kill -9: nothing is flushed, nobody is told
    raise      FailpointStruck, which no role catches: the in-process twin of exit
    pause:ms   the whole process stands still, as a stopped one would

`@n` strikes at the n-th hit only, otherwise at every one. Before it acts, a point writes its line to the file
of `QIM_FAILPOINTS_LOG`: a fault test must be able to show that the fault happened. With such a file a point
with `@n` strikes once in the life of the file: a worker that is forked again does not end at the same step
for ever.

A role hits a point once per batch. Without `test.failpoints` in the configuration the roles hold an object
without active points, and a hit costs one look-up in an empty dictionary. The environment alone does nothing.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from time import sleep
from typing import Final, Literal, NamedTuple

from qim.errors import ConfigError

ENVIRONMENT: Final = "QIM_FAILPOINTS"
LOG_ENVIRONMENT: Final = "QIM_FAILPOINTS_LOG"
KILLED: Final = 137

NAMES: Final = frozenset(
    {
        "writer.taken", "writer.reserved", "writer.appended", "writer.marked", "writer.acknowledged",
        "writer.changed",
        "fanout.planned", "fanout.appended", "fanout.stored",
        "mailbox.taken", "mailbox.begun", "mailbox.entries", "mailbox.finished", "mailbox.pushed",
    }
)  # fmt: skip


class FailpointStruck(Exception):
    """A point with `raise` was reached. Not a QimError: nothing may handle it."""


class Action(NamedTuple):
    """What happens at a point."""

    kind: Literal["exit", "raise", "pause"]
    pause_ms: int = 0
    at_hit: int = 0
    """Strikes at this hit only; 0 = at every one."""


class Failpoints:
    """The active points of one process and how often each was hit."""

    def __init__(self, active: Mapping[str, Action] | None = None, *, log_file: Path | None = None) -> None:
        self._active = dict(active or {})
        self._log_file = log_file
        self.hits: dict[str, int] = {}
        """Of active points only."""

    def hit(self, name: str) -> None:
        """Called by the roles between two steps."""
        action = self._active.get(name)
        if action is not None:
            self._strike(name, action)

    def _strike(self, name: str, action: Action) -> None:
        hits = self.hits[name] = self.hits.get(name, 0) + 1
        if action.at_hit not in {0, hits}:
            return
        line = f"failpoint_hit {name}\n"
        if self._log_file is not None:
            if action.at_hit and self._log_file.exists() and line in self._log_file.read_text():
                return
            with self._log_file.open("a") as log:
                log.write(line)
        match action.kind:
            case "exit":
                os._exit(KILLED)
            case "raise":
                raise FailpointStruck(name)
            case "pause":
                # The process must stand still, so this blocks on purpose.
                sleep(action.pause_ms / 1000)


def parse_failpoints(text: str) -> dict[str, Action]:
    """Reads the text of the environment variable; raises ConfigError with every mistake."""
    actions: dict[str, Action] = {}
    problems = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, what = part.partition("=")
        action = _parse_action(what)
        if name not in NAMES:
            problems.append(f"{ENVIRONMENT}: no failpoint {name!r}; allowed: {', '.join(sorted(NAMES))}")
        elif action is None:
            problems.append(f"{ENVIRONMENT}: {name} wants exit, raise or pause:<ms>, and @<hit> behind it")
        else:
            actions[name] = action
    if problems:
        raise ConfigError(problems)
    return actions


def failpoints_from_environment(environ: Mapping[str, str], *, enabled: bool) -> Failpoints:
    """The points of this process; none unless the configuration enables them."""
    if not enabled:
        return Failpoints()
    log_file = environ.get(LOG_ENVIRONMENT)
    active = parse_failpoints(environ.get(ENVIRONMENT, ""))
    return Failpoints(active, log_file=Path(log_file) if log_file else None)


def _parse_action(text: str) -> Action | None:
    what, _, hit = text.partition("@")
    kind, _, amount = what.partition(":")
    if (hit and not hit.isdecimal()) or (amount and not amount.isdecimal()):
        return None
    at_hit = int(hit or 0)
    match kind:
        case "exit" | "raise" if not amount:
            return Action(kind, at_hit=at_hit)
        case "pause" if amount:
            return Action("pause", pause_ms=int(amount), at_hit=at_hit)
        case _:
            return None

"""What a store must be before qim writes to it: its settings, its role, its identity.

Pure: the facts are fetched by `workers/guards.py`. Each refusal is one line that names the setting, the value
found, the value wanted and what mends it, and all refusals of a store are reported together.

Why these settings: with `everysec` an acknowledged write sits in process memory for up to two seconds and a
plain kill loses it; with `no-appendfsync-on-rewrite yes` the same holds during every rewrite; an eviction
would delete messages to make room; a replica answers reads from yesterday and refuses writes.

The identity is one field per role in the hash `qim:identity` of each instance, written once by `qim init`:

    core, mailbox, log  →  "qim 1 <deployment> <number> <count>"

It makes three accidents visible: a store of another deployment, two instances swapped in the configuration,
and a server that came up empty. The first two are foreign (65), the third is refused as not initialised (78).

`Retentions` are facts about qim itself: what ends before something that hangs on it loses messages days on.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from qim import limits
from qim.errors import ExitCode, GuardRefused

FORMAT_VERSION: Final = 1
REQUIRED_SETTINGS: Final[Mapping[str, str]] = {
    "appendonly": "yes",
    "appendfsync": "always",
    "no-appendfsync-on-rewrite": "no",
    "maxmemory-policy": "noeviction",
    "io-threads": "1",
}
LOG_RETENTION_MS_MIN: Final = 3_600_000
"""The trimmer of the Redis log never passes a consumer, so an hour for people is enough."""
FIXED_AT_START: Final = frozenset({"io-threads"})
"""No command changes these while the server runs."""


class ExpectedIdentity(NamedTuple):
    """Who an instance must be in one role."""

    role: str
    deployment: str
    number: int
    instances: int
    """How many there are of this role; the map of slots hangs on it."""

    @property
    def field(self) -> bytes:
        return self.role.encode()

    @property
    def value(self) -> bytes:
        return f"qim {FORMAT_VERSION} {self.deployment} {self.number} {self.instances}".encode()


def find_wrong_settings(found: Mapping[str, str], *, tool: str) -> list[str]:
    """A line per setting that must be another; `tool` is the command line that reaches the server."""
    lines = []
    for setting, wanted in REQUIRED_SETTINGS.items():
        value = found.get(setting)
        if value == wanted:
            continue
        shown = "not known to this server" if value is None else f"'{value}'"
        lines.append(f"{setting} is {shown}, must be '{wanted}'; {_remedy(setting, wanted, tool)}")
    return lines


def find_wrong_role(role: str) -> list[str]:
    """A line when the server is not a master."""
    if role == "master":
        return []
    return [f"its role is '{role}', must be 'master'; name the master in the configuration, never a replica"]


def judge_identity(expected: ExpectedIdentity, found: bytes | None) -> GuardRefused | None:
    """The refusal, or None where the instance is who it must be."""
    if found == expected.value:
        return None
    wanted = expected.value.decode()
    if found is None:
        return GuardRefused(
            f"its identity as {expected.role} is missing, must be '{wanted}'; a new store: run qim init."
            " A store that was in use before has lost its data: restore it from its own disk",
            exit_code=ExitCode.CONFIG,
        )
    return GuardRefused(
        f"its identity as {expected.role} is '{found.decode(errors='replace')}', must be '{wanted}';"
        " it belongs to another deployment or stands at another place: correct the configuration",
        exit_code=ExitCode.FOREIGN_STORE,
    )


class Retentions(NamedTuple):
    """How long things are kept, in milliseconds; what outlives what is a matter of lost messages."""

    log_ms: int = limits.LOG_RETENTION_MS
    trim_interval_ms: int = limits.LOG_TRIM_INTERVAL_MS
    mailbox_ms: int = limits.MAILBOX_DAYS * limits.DAY_MS
    mailbox_key_ms: int = limits.MAILBOX_KEY_LIFE_MS
    ephemeral_ms: int = limits.EPHEMERAL_LIFE_MS
    ephemeral_key_ms: int = limits.EPHEMERAL_KEY_LIFE_MS
    dispatch_progress_ms: int = limits.DISPATCH_PROGRESS_LIFE_MS


def find_broken_retention(kept: Retentions) -> list[str]:
    """A line per inequality that does not hold: what it is, what it must be, and what breaks otherwise."""
    rules = (
        ("log_ms", LOG_RETENTION_MS_MIN, "an operator could not redeliver what a consumer has passed"),
        ("log_ms", kept.trim_interval_ms, "a log would be trimmed below what it must keep"),
        ("mailbox_key_ms", kept.mailbox_ms + limits.DAY_MS, "a cursor of a kept day would meet a hole"),
        ("ephemeral_key_ms", kept.ephemeral_ms, "a message would be gone before its time is over"),
        (
            "dispatch_progress_ms", kept.log_ms + kept.mailbox_ms,
            "a replay of what the log still holds would deliver twice",
        ),
    )  # fmt: skip
    return [
        f"retention {name} is {getattr(kept, name)}, must be at least {wanted}: {harm}"
        for name, wanted, harm in rules
        if getattr(kept, name) < wanted
    ]


def _remedy(setting: str, wanted: str, tool: str) -> str:
    if setting in FIXED_AT_START:
        return f"write '{setting} {wanted}' into its configuration file and restart it"
    return f"run: {tool} CONFIG SET {setting} {wanted} and {tool} CONFIG REWRITE"

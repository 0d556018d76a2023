"""Puts a tool around a server: a program of the same behaviour that starts the server with the tool.

`qim dev --redis-server` and `StoreServer` take the path of a server. What they get here is a script of a few
lines that replaces itself with the real one, so the process id is the server's own and every signal reaches
it. The environment of a tool concerns the server alone, and settings that are added stand behind the others:
the last one of a name counts.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_wrapper(
    path: Path,
    binary: str,
    *,
    before: Sequence[str] = (),
    shell: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    settings: Mapping[str, str] | None = None,
) -> Path:
    """`before` is put in front of the command, `shell` are lines that run first."""
    variables = [f"{name}={value}" for name, value in (environment or {}).items()]
    command = shlex.join(["exec", *before, "env", *variables, binary])
    added = [part for name, value in (settings or {}).items() for part in (f"--{name}", value)]
    path.write_text("\n".join(["#!/bin/sh", *shell, f'{command} "$@" {shlex.join(added)}', ""]))
    path.chmod(0o700)
    return path

"""What a type cannot say about a configuration: rules for values, rules between keys, and the files it names.

`contradictions` is pure and runs with every reading; it yields the key and the problem, and its caller adds
where the value came from and what is allowed. `check_files` looks at the disk and runs before a start and in
`config check`. Secrets are read here and nowhere else, from a file that nobody else may read, into a `Secret`
that prints as stars. No text of this module quotes a value: a password may stand where an address should.
"""

import ipaddress
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from qim.config import Config, Secret
from qim.errors import ConfigError
from qim.limits import SLOTS

CLAIM_CHARACTERS_MAX: Final = 256
SECRET_FILE_MODE_REFUSED: Final = stat.S_IRWXO | stat.S_IWGRP
"""Others must not read a secret; the service's group may, so that a key can be renewed without a restart."""
RUNTIME_DIR_BYTES_MAX: Final = 80
"""Leaves room for the longest socket name under it in the 107 bytes of a Unix socket address."""

_NAME = re.compile(r"[a-z0-9-]{1,64}")


def contradictions(config: Config) -> Iterator[tuple[str, str]]:
    """Key and problem of every rule that a type cannot say, and of every rule between keys."""
    yield from _broken_values(config)
    yield from _broken_references(config)
    yield from _broken_urls(config)
    yield from _broken_pairs(config)


def _broken_values(config: Config) -> Iterator[tuple[str, str]]:
    if not _NAME.fullmatch(config.server.deployment):
        yield "server.deployment", "not a name"
    for name, path in (("data_dir", config.server.data_dir), ("runtime_dir", config.server.runtime_dir)):
        if not path.startswith("/"):
            yield f"server.{name}", "not an absolute path"
    if len(os.fsencode(config.server.runtime_dir)) > RUNTIME_DIR_BYTES_MAX:
        yield "server.runtime_dir", "too long for the sockets below it"
    if not _is_address(config.gateway.address):
        yield "gateway.address", "not an address"
    for key, text in (("auth.issuer", config.auth.issuer), ("auth.audience", config.auth.audience)):
        if not 1 <= len(text) <= CLAIM_CHARACTERS_MAX:
            yield key, "too short or too long"


def _broken_references(config: Config) -> Iterator[tuple[str, str]]:
    if not config.tls.certificate_file.startswith("/"):
        yield "tls.certificate_file", "not an absolute path"
    if not (config.tls.key_file.startswith("/") or is_secret_reference(config.tls.key_file)):
        yield "tls.key_file", "not a path"
    if any(not key_id or not path.startswith("/") for key_id, path in config.auth.keys.items()):
        yield "auth.keys", "not an absolute path"
    for key, text in (
        ("redis.password", config.redis.password),
        ("log.reference_key", config.log.reference_key),
    ):
        if text and not is_secret_reference(text):
            yield key, "a secret is never written down here, only where it lies"


def _broken_urls(config: Config) -> Iterator[tuple[str, str]]:
    for key, urls in (("redis.core", config.redis.core), ("redis.mailbox", config.mailbox_urls)):
        if not 1 <= len(urls) <= SLOTS:
            yield key, f"{len(urls)} instances"
        if len(set(urls)) != len(urls):
            yield key, "the same instance twice"
    for key, urls in (
        ("redis.core", config.redis.core),
        ("redis.mailbox", config.redis.mailbox),
        ("redis.log", (config.redis.log,) if config.redis.log else ()),
    ):
        for problem in filter(None, map(url_problem, urls)):
            yield key, problem


def url_problem(url: str) -> str | None:
    """Why a store address cannot be used; None if it can. Never quotes it: somebody may have put a
    password in.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "not an address"
    if parts.password is not None or parts.username is not None:
        return "a password belongs into redis.password, as a reference"
    if parts.scheme == "unix":
        return None if parts.path.startswith("/") and not parts.netloc else "a socket needs an absolute path"
    if parts.scheme != "redis":
        return "unknown kind of address"
    if not parts.hostname or port is None or parts.path not in {"", "/"} or parts.query:
        return "needs host and port and nothing else"
    return None


def _broken_pairs(config: Config) -> Iterator[tuple[str, str]]:
    if config.gateway.ping_interval_ms >= config.gateway.silence_ms_max:
        yield (
            "gateway.silence_ms_max",
            "must exceed gateway.ping_interval_ms, or every client is dead before its ping",
        )
    if config.limits.sends_burst < config.limits.sends_per_second:
        yield "limits.sends_burst", "must be at least limits.sends_per_second"
    if (
        config.server.cpus
        and config.server.workers != "auto"
        and len(config.server.cpus) < config.server.workers
    ):
        yield "server.cpus", "fewer CPUs than server.workers"
    if len(set(config.server.cpus)) != len(config.server.cpus):
        yield "server.cpus", "the same CPU twice"


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


# --- secrets and files ----------------------------------------------------------------------------------


def is_secret_reference(text: str) -> bool:
    kind, _, rest = text.partition(":")
    return (kind == "credential" and bool(rest) and "/" not in rest) or (
        kind == "file" and rest.startswith("/")
    )


def resolve_reference(text: str, *, environ: Mapping[str, str]) -> Path:
    """The file that a reference or a plain path names; `ConfigError` if no credentials were handed over."""
    kind, _, rest = text.partition(":")
    if kind == "credential":
        folder = environ.get("CREDENTIALS_DIRECTORY")
        if not folder:
            raise ConfigError(
                [f"credential {rest}: CREDENTIALS_DIRECTORY is not set; is this started by systemd?"]
            )
        return Path(folder, rest)
    return Path(rest if kind == "file" else text)


def read_secret(text: str, *, environ: Mapping[str, str]) -> Secret:
    """What the reference names, without the line end; empty for an empty reference."""
    if not text:
        return Secret.none()
    path = resolve_reference(text, environ=environ)
    problems = file_problems(path, secret=True)
    if problems:
        raise ConfigError(problems)
    return Secret(path.read_bytes().rstrip(b"\r\n"))


def file_problems(path: Path, *, secret: bool) -> list[str]:
    """Why a file cannot serve: absent, unreadable, or a secret that others can read."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return [f"{path}: {error.strerror}"]
    if not stat.S_ISREG(mode):
        return [f"{path}: not a file"]
    if not os.access(path, os.R_OK):
        return [f"{path}: not readable by this user"]
    if secret and mode & SECRET_FILE_MODE_REFUSED:
        return [f"{path}: readable or writable by others; run: chmod 0400 {path}"]
    return []


def check_files(config: Config, *, environ: Mapping[str, str]) -> list[str]:
    """Problems of every file that the configuration names, all of them, each with its key."""
    wanted = [
        ("tls.certificate_file", config.tls.certificate_file, False),
        ("tls.key_file", config.tls.key_file, True),
    ]
    wanted += [(f"auth.keys.{key_id}", path, False) for key_id, path in config.auth.keys.items()]
    wanted += [
        ("redis.password", config.redis.password, True),
        ("log.reference_key", config.log.reference_key, True),
    ]
    problems = []
    for key, text, secret in wanted:
        if text:
            try:
                found = file_problems(resolve_reference(text, environ=environ), secret=secret)
            except ConfigError as error:
                found = list(error.problems)
            problems += [f"{config.origins.get(key, 'default')}: {key}: {problem}" for problem in found]
    if not config.auth.keys:
        problems.append(
            "auth.keys: none is configured, so no client could sign in; allowed: a table of absolute paths"
        )
    return problems

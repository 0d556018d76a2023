"""What a reload takes over without a restart, and how it reaches the children.

The supervisor reads and checks the whole configuration again; only when all of it is good does it write the
accepted part to `reload.json` in the runtime folder, in one atomic rename, and signal the children. They read
that file and nothing else, so a half-edited configuration never reaches them. A new start removes the file.

Hot are the log level and the certificate with its key; ticket keys stay, because the certificate is loaded
into the living context. Everything else needs a restart, and the supervisor says so in its log.
"""

import json
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from qim.config import Config
from qim.config_checks import resolve_reference
from workers.listeners import build_tls_context, load_certificate

FILE_NAME: Final = "reload.json"


class Reload(NamedTuple):
    """The hot part of a configuration."""

    level: str
    certificate_file: Path
    key_file: Path

    def load_certificate(self, context: ssl.SSLContext) -> None:
        """New handshakes use it from now on."""
        load_certificate(context, certificate_file=self.certificate_file, key_file=self.key_file)

    def make_context(self) -> ssl.SSLContext:
        """A fresh context; raises ConfigError when the files do not serve."""
        return build_tls_context(certificate_file=self.certificate_file, key_file=self.key_file)


def reload_of(config: Config, environ: Mapping[str, str]) -> Reload:
    """The hot part of this configuration."""
    key_file = resolve_reference(config.tls.key_file, environ=environ)
    return Reload(config.log.level, Path(config.tls.certificate_file), key_file)


def write_reload(config: Config, reload: Reload) -> None:
    """For the supervisor: the children see the old file or the new one, never half of it."""
    path = _path(config)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps([reload.level, str(reload.certificate_file), str(reload.key_file)]))
    fresh.replace(path)


def read_reload(config: Config) -> Reload:
    """For a child: what was accepted last, or what it was started with."""
    try:
        level, certificate_file, key_file = json.loads(_path(config).read_text())
    except FileNotFoundError:
        return reload_of(config, os.environ)
    return Reload(level, Path(certificate_file), Path(key_file))


def forget_reload(config: Config) -> None:
    """At a start: the configuration itself holds from now on."""
    _path(config).unlink(missing_ok=True)


def _path(config: Config) -> Path:
    return Path(config.server.runtime_dir, FILE_NAME)

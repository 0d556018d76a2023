"""The Lua scripts: read once, known by name, called by digest.

One file is one operation. An installed package carries them in `qim/_lua`, a checkout in `lua/` beside the
package; the packaged copy wins, so that an installation never depends on what lies around it. The digest is
computed here as the server computes it, over the exact bytes of the file, and compared with the server's
answer at each connection. Nothing is read after `load`, so a worker can load before it forks.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from qim.errors import ConfigError

_PACKAGED: Final = Path(__file__).resolve().parent.parent / "_lua"
_CHECKOUT: Final = _PACKAGED.parent.parent / "lua"


class LuaScripts:
    """Texts and digests of all scripts; immutable."""

    def __init__(self, texts: Mapping[str, bytes]) -> None:
        self._texts = dict(texts)
        self._digests = {
            name: hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()
            for name, text in texts.items()
        }

    @classmethod
    def load(cls, folder: Path | None = None) -> "LuaScripts":
        """Reads every `*.lua`; raises ConfigError when the installation has none."""
        chosen = folder or (_PACKAGED if _PACKAGED.is_dir() else _CHECKOUT)
        texts = {path.stem: path.read_bytes() for path in sorted(chosen.glob("*.lua"))}
        if not texts:
            raise ConfigError(
                [f"{chosen}: no Lua scripts; the installation is incomplete, install qim again"]
            )
        return cls(texts)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._texts)

    def text(self, name: str) -> bytes:
        return self._texts[name]

    def sha(self, name: str) -> bytes:
        """Hexadecimal SHA-1, the name that EVALSHA wants."""
        return self._digests[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

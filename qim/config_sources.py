"""Reading the configuration: the layers, the check and the messages of `qim.config.load_config`.

Each layer is a nested dictionary with the origin of every key beside it. The settings library merges the
layers, first one wins, and builds the frozen tree; its errors are turned into our own lines, because its own
texts quote the refused input, which could be a secret, and do not know the file and line.

The library's environment reader is not used: it ignores a misspelt section, folds the case of key ids and
stops at the first value it cannot decode. Ours compares every `QIM__` name with the tree. Errors of syntax
end the reading of their layer only, so that one run shows the problems of all layers. This module holds no
state; only the supervisor and the tools import it, because the checker costs a fifth of a second.
"""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Final, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Interval
from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from qim.config import SECTIONS, Config, Key
from qim.config_checks import contradictions
from qim.errors import ConfigError

ENVIRONMENT_PREFIX: Final = "QIM__"

_KEY_LINE = re.compile(r"""^\s*([A-Za-z0-9_\-."']+)\s*=""")
_TABLE_LINE = re.compile(r"""^\s*\[([A-Za-z0-9_\-."']+)\]""")


@dataclass(slots=True)
class Layer:
    """Nested values and, for every dotted key of them, where it was said."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def put(self, dotted: str, value: object, origin: str) -> None:
        """Sets one key, making the tables above it."""
        target = self.values
        *above, last = dotted.split(".")
        for part in above:
            if not isinstance(target.get(part), dict):
                target[part] = {}
            target = target[part]
        target[last] = value
        self.origins[dotted] = origin


class LayerSource(PydanticBaseSettingsSource):
    """Hands one finished layer to the settings library, which merges and checks."""

    def __init__(self, settings: type[BaseSettings], layer: Layer) -> None:
        super().__init__(settings)
        self.layer = layer

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002 - asked for by the library
        return self.layer.values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self.layer.values


def read_layers(
    path: Path | None,
    *,
    profile: Mapping[str, object],
    profile_name: str,
    overrides: Mapping[str, object],
    environ: Mapping[str, str],
) -> Config:
    """The body of `load_config`; see there."""
    layers = [
        _mapping_layer(overrides, origin="command line"),
        _environment_layer(environ),
        _file_layer(path),
        _mapping_layer(profile, origin=f"profile {profile_name}".strip()),
    ]
    origins: dict[str, str] = {}
    for layer in reversed(layers):
        origins |= layer.origins
    problems = [problem for layer in layers for problem in layer.problems]
    config, refused = _check(layers)
    problems += [_line(key, origins) for key in refused]
    problems += [_line(key, origins, text) for key, text in contradictions(config) if key not in refused]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return replace(config, origins=origins)


# --- layers ------------------------------------------------------------------------------------------


def _mapping_layer(values: Mapping[str, object], *, origin: str) -> Layer:
    layer = Layer()
    for dotted, value in values.items():
        if value is None:
            continue
        if (problem := unknown_key(dotted)) is not None:
            layer.problems.append(f"{origin}: {problem}")
        else:
            layer.put(dotted, value, origin)
    return layer


def _environment_layer(environ: Mapping[str, str]) -> Layer:
    layer = Layer()
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX):
            dotted = _dotted_of_variable(name)
            if (problem := unknown_key(dotted)) is not None:
                layer.problems.append(f"{name}: {problem}")
            else:
                layer.put(dotted, _decode_text(dotted, environ[name]), name)
    return layer


def _dotted_of_variable(name: str) -> str:
    """`QIM__AUTH__KEYS__Main` → `auth.keys.Main`: sections and keys fold case, a key id keeps it."""
    parts = name.removeprefix(ENVIRONMENT_PREFIX).split("__", 2)
    return ".".join([part.lower() for part in parts[:2]] + parts[2:])


def _decode_text(dotted: str, text: str) -> object:
    """A list in a variable is written with commas; everything else the checker converts."""
    if dotted in KEYS and get_origin(KEYS[dotted].kind) is tuple:
        return [item.strip() for item in text.split(",") if item.strip()]
    return text


def _file_layer(path: Path | None) -> Layer:
    layer = Layer()
    if path is None:
        return layer
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line (\d+)", str(error))
        layer.problems.append(f"{path}{f':{place[1]}' if place else ''}: not valid TOML: {error}")
    except UnicodeDecodeError as error:
        layer.problems.append(f"{path}: not UTF-8 text at byte {error.start}")
    except OSError as error:
        layer.problems.append(f"{path}: cannot be read: {error.strerror}")
    else:
        lines = lines_of_keys(text)
        for dotted, value in _leaves(values):
            place_of_key = f"{path}:{lines[dotted]}" if dotted in lines else str(path)
            if (problem := unknown_key(dotted)) is not None:
                layer.problems.append(f"{place_of_key}: {problem}")
            else:
                layer.put(dotted, value, place_of_key)
    return layer


def _leaves(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, Mapping) and dotted not in KEYS:
            if not value and dotted not in SECTIONS:
                yield dotted, value
            yield from _leaves(value, f"{dotted}.")
        else:
            yield dotted, value


def lines_of_keys(text: str) -> dict[str, int]:
    """Line of each dotted key. The TOML parser of the standard library does not tell, and a line finds
    a mistake.
    """
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if found := _TABLE_LINE.match(line):
            table = _unquote(found[1])
            lines.setdefault(table, number)
        elif found := _KEY_LINE.match(line):
            lines.setdefault(f"{table}.{_unquote(found[1])}".lstrip("."), number)
    return lines


def _unquote(name: str) -> str:
    return name.replace('"', "").replace("'", "")


# --- the tree as a list of keys ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key of the tree: its type, and what a person needs to know."""

    kind: Any
    key: Key
    allowed: str


def _list_keys() -> dict[str, KeyEntry]:
    keys: dict[str, KeyEntry] = {}
    for section, tree in get_type_hints(Config, include_extras=True).items():
        if section in SECTIONS:
            for name, hint in get_type_hints(tree, include_extras=True).items():
                found = [part for part in getattr(hint, "__metadata__", ()) if isinstance(part, Key)]
                if found:
                    kind = get_args(hint)[0]
                    keys[f"{section}.{name}"] = KeyEntry(kind, found[0], found[0].allowed or _allowed(hint))
    return keys


def _allowed(hint: Any) -> str:  # noqa: ANN401 - a type hint has no narrower type
    """What a type and its bounds allow, in words."""
    if get_origin(hint) in {Union, UnionType}:
        return " or ".join(_allowed(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(f'"{word}"' for word in get_args(hint))
    if get_origin(hint) is Annotated:
        kind, *marks = get_args(hint)
        bounds = next((mark for mark in marks if isinstance(mark, Interval)), None)
        return f"{_allowed(kind)} from {bounds.ge} to {bounds.le}" if bounds else _allowed(kind)
    return {bool: "true or false", int: "a whole number", float: "a number"}.get(hint, "text")


KEYS: Final[Mapping[str, KeyEntry]] = _list_keys()


def changes_for_restart(running: Config, fresh: Config) -> list[str]:
    """Keys that differ and that no reload takes over, in the order of the tree."""
    return [
        dotted
        for dotted, entry in KEYS.items()
        if not entry.key.hot and _value_of(running, dotted) != _value_of(fresh, dotted)
    ]


def _value_of(config: Config, dotted: str) -> object:
    section, _, name = dotted.partition(".")
    value: object = getattr(getattr(config, section), name)
    return value


def key_of(dotted: str) -> str:
    """The key a dotted path belongs to: itself, or the table or list it lies in."""
    while dotted and dotted not in KEYS:
        dotted = dotted.rpartition(".")[0]
    return dotted


def unknown_key(dotted: str) -> str | None:
    """Why there is no such key, with the nearest that exists; None if there is one."""
    owner = key_of(dotted)
    if owner and (owner == dotted or get_origin(KEYS[owner].kind) is Mapping):
        return None
    section, _, name = dotted.partition(".")
    if section in SECTIONS and not name:
        return f"{dotted}: is a section, write [{section}] and its keys below it"
    if section not in SECTIONS:
        near = _nearest(section, SECTIONS)
        return f"{dotted}: there is no section [{section}]{near}; sections: {', '.join(SECTIONS)}"
    names = [known.partition(".")[2] for known in KEYS if known.startswith(f"{section}.")]
    return f"{dotted}: there is no such key{_nearest(name, names)}; keys of [{section}]: {', '.join(names)}"


def _nearest(word: str, words: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, words, n=1)
    return f", did you mean {near[0]}?" if near else ""


# --- checks -------------------------------------------------------------------------------------------


class Loaded(BaseSettings):
    """The root that the settings library fills; our layers take the place of its own sources."""

    model_config = SettingsConfigDict(extra="forbid", hide_input_in_errors=True)
    layers: ClassVar[list[Layer]] = []

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *_ours: object, **_theirs: object
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return tuple(LayerSource(settings_cls, layer) for layer in cls.layers)


def _check(layers: Sequence[Layer]) -> tuple[Config, list[str]]:
    """The tree and the keys whose values were refused; those have their defaults in the tree.

    Going on with defaults is what allows every problem to be found in one run. The caller refuses to
    start anyway.
    """
    try:
        return _build(layers), []
    except ValidationError as error:
        # Only the places are taken: the texts and the context of the library quote the input.
        places = [".".join(str(part) for part in found["loc"]) for found in error.errors(include_input=False)]
    refused = list(dict.fromkeys(key_of(place) for place in places))
    assert all(refused), places
    for layer in layers:
        for key in refused:
            section, _, name = key.partition(".")
            layer.values.get(section, {}).pop(name, None)
    return _build(layers), refused


def _build(layers: Sequence[Layer]) -> Config:
    hints = get_type_hints(Config, include_extras=True)
    parts: Any = {section: (hints[section], hints[section]()) for section in SECTIONS}
    root = create_model("Root", __base__=Loaded, **parts)
    root.layers = list(layers)
    loaded = root()
    return Config(**{section: getattr(loaded, section) for section in SECTIONS})


def _line(key: str, origins: Mapping[str, str], problem: str = "not allowed") -> str:
    origin = next((place for path, place in origins.items() if key_of(path) == key), "default")
    return f"{origin}: {key}: {problem}; allowed: {KEYS[key].allowed}"

"""Tuning profiles: what a host of a given size gets, and why.

A profile is a TOML file in `tuning/profiles/`. Each setting carries its reason and its source, so that an
operator can judge it; a size file extends another and holds only what differs. `load_profile("auto")` takes
the largest size that fits the CPUs this process may use: the affinity mask (which a cpuset narrows) and the
quota of its control group, never the CPUs of the host.

What `qim serve` uses now is here: defaults for the configuration, the CPU plan, the environment that glibc
reads at exec, and the interpreter's switch interval. A profile is the weakest layer above the defaults;
whatever a person wrote anywhere wins. Nothing here changes the host.

The decisions (`resolve`, `plan_cpus`, `choose_size`) are pure; `read_host` and `load_profile` read files. A
bad profile raises `ConfigError` with every problem: file, key and what is allowed.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from qim.errors import ConfigError
from qim.limits import SLOTS

AUTO: Final = "auto"
MODES: Final = ("exact", "at_least", "one_of")
SEVERITIES: Final = ("fatal", "warning")
CONDITIONS: Final = (
    "always",
    "redis_local",
    "broker_local",
    "scylla_local",
    "numa",
    "single_queue_nic",
    "load_generator",
)
SETTING_FIELDS: Final = frozenset({"key", "want", "mode", "severity", "why", "source", "when"})
FAMILIES: Final = ("config.", "env.MALLOC_", "interpreter.switch_interval_us")
EXTENDS_DEPTH_MAX: Final = 4
LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})

_PACKAGED: Final = Path(__file__).parents[1] / "_tuning" / "profiles"
_REPOSITORY: Final = Path(__file__).parents[2] / "tuning" / "profiles"


@dataclass(frozen=True, slots=True)
class Host:
    """The CPUs that this process may use, and its share of them if there is a quota."""

    cpus: tuple[int, ...]
    quota: float | None = None

    @property
    def usable(self) -> int:
        """Whole CPUs worth of work that can really run at once."""
        return len(self.cpus) if self.quota is None else max(1, min(len(self.cpus), int(self.quota)))


@dataclass(frozen=True, slots=True)
class Setting:
    """One entry of a profile."""

    key: str
    want: Any
    mode: str
    severity: str
    why: str
    source: str
    when: str

    @property
    def value(self) -> object:
        """What is set: the first of several allowed values."""
        return self.want[0] if self.mode == "one_of" else self.want


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Where the loops run. The two sets are disjoint unless there are no CPUs to spare."""

    workers: tuple[int, ...]
    housekeeping: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """A resolved profile: plain values for the supervisor."""

    name: str
    settings: tuple[Setting, ...]
    workers: int
    plan: CpuPlan
    config: Mapping[str, object]
    """Dotted configuration keys and their defaults, for `load_config`."""
    environment: Mapping[str, str]
    switch_interval_seconds: float

    def missing_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Variables that must be set before exec. What a person has set is left alone."""
        return {name: value for name, value in self.environment.items() if name not in environ}


def load_profile(name: str, *, host: Host, redis_local: bool = False, folder: Path | None = None) -> Profile:
    """Reads, checks and resolves a profile by name; `auto` chooses by the usable CPUs."""
    folder = folder or profile_folder()
    known = list_profiles(folder)
    chosen = choose_size(known, usable=host.usable) if name == AUTO else name
    if chosen not in known:
        raise ConfigError([f"profile {name}: there is no such profile; allowed: {', '.join([AUTO, *known])}"])
    layers = _read_layers(folder, chosen)
    conditions = {"always", "redis_local"} if redis_local else {"always"}
    return resolve(chosen, layers, host=host, conditions=conditions)


def resolve(name: str, layers: Sequence[Sequence[Setting]], *, host: Host, conditions: set[str]) -> Profile:
    """Later layers beat earlier ones; within a layer an entry with a condition beats one without."""
    chosen: dict[str, Setting] = {}
    for layer in layers:
        for setting in sorted(layer, key=lambda entry: entry.when != "always"):
            if setting.when in conditions:
                chosen[setting.key] = setting
    config = {
        key.removeprefix("config."): entry.value for key, entry in chosen.items() if key.startswith("config.")
    }
    workers = min(int(str(config.get("server.workers", 1))), SLOTS, len(host.cpus))
    config["server.workers"] = workers
    interval = chosen.get("interpreter.switch_interval_us")
    return Profile(
        name=name,
        settings=tuple(chosen.values()),
        workers=workers,
        plan=plan_cpus(host.cpus, workers=workers),
        config=config,
        environment={
            key.removeprefix("env."): str(entry.value)
            for key, entry in chosen.items()
            if key.startswith("env.")
        },
        switch_interval_seconds=float(str(interval.value)) / 1e6 if interval else 0.005,
    )


def plan_cpus(cpus: Sequence[int], *, workers: int) -> CpuPlan:
    """Workers get the highest allowed CPUs: devices usually interrupt the lowest. With none to spare
    all are shared.
    """
    ordered = tuple(sorted(cpus))
    pinned = tuple(ordered[-1 - (index % len(ordered))] for index in range(workers))
    spare = tuple(cpu for cpu in ordered if cpu not in pinned)
    return CpuPlan(workers=tuple(reversed(pinned)), housekeeping=spare or ordered)


def choose_size(known: Sequence[str], *, usable: int) -> str:
    """The largest size that fits, `base` for a single CPU."""
    sizes = sorted(int(name[:-1]) for name in known if name.endswith("c") and name[:-1].isdigit())
    fitting = [size for size in sizes if size <= usable]
    return f"{fitting[-1]}c" if fitting else "base"


def are_stores_local(urls: Sequence[str]) -> bool:
    """Whether any store shares this host's CPUs, by its address."""
    parts = [urlsplit(url) for url in urls]
    return any(part.scheme == "unix" or part.hostname in LOCAL_HOSTS for part in parts)


# --- files ------------------------------------------------------------------------------------------------


def profile_folder() -> Path:
    """The profiles of the installed package; of the repository in an editable install, which has no
    packaged files.
    """
    return _PACKAGED if _PACKAGED.is_dir() else _REPOSITORY


def list_profiles(folder: Path) -> list[str]:
    """Names in the order of size."""
    names = [path.stem for path in folder.glob("*.toml")]
    return sorted(names, key=lambda name: (len(name), name) if name != "base" else (0, name))


def read_host(*, root: Path = Path("/"), affinity: Sequence[int] | None = None) -> Host:
    """The CPUs of this process. `root` lets a test stand in for the control group files."""
    cpus = tuple(sorted(os.sched_getaffinity(0) if affinity is None else affinity))
    return Host(cpus, _quota_v2(root / "sys/fs/cgroup/cpu.max") or _quota_v1(root / "sys/fs/cgroup/cpu"))


def _quota_v2(path: Path) -> float | None:
    try:
        quota, period = path.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        period = int((folder / "cpu.cfs_period_us").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 else None


def _read_layers(folder: Path, name: str) -> list[list[Setting]]:
    """The profile and what it extends, the most general first."""
    layers: list[list[Setting]] = []
    problems: list[str] = []
    next_name: str | None = name
    while next_name is not None:
        path = folder / f"{next_name}.toml"
        if len(layers) >= EXTENDS_DEPTH_MAX:
            raise ConfigError([f"{path}: extends goes in a circle or deeper than {EXTENDS_DEPTH_MAX}"])
        values = _read_toml(path)
        settings, found = _parse(path, values)
        layers.insert(0, settings)
        problems += found
        next_name = values.get("extends")
    if problems:
        raise ConfigError(problems)
    return layers


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: not valid TOML: {error}"]) from error


def _parse(path: Path, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
    problems = [
        f"{path}: {name}: there is no such key; allowed: extends, setting"
        for name in values.keys() - {"extends", "setting"}
    ]
    settings = []
    for number, entry in enumerate(values.get("setting", []), start=1):
        found = _entry_problems(entry)
        problems += [
            f"{path}: setting {number} ({entry.get('key', 'no key')}): {problem}" for problem in found
        ]
        if not found:
            settings.append(Setting(**entry))
    return settings, problems


def _entry_problems(entry: Mapping[str, Any]) -> list[str]:
    if entry.keys() != SETTING_FIELDS:
        wrong = ", ".join(sorted(entry.keys() ^ SETTING_FIELDS))
        return [f"missing or unknown: {wrong}; allowed: {', '.join(sorted(SETTING_FIELDS))}"]
    problems = [
        f"{name}: not allowed; allowed: {', '.join(allowed)}"
        for name, allowed in (("mode", MODES), ("severity", SEVERITIES), ("when", CONDITIONS))
        if entry[name] not in allowed
    ]
    key = str(entry["key"])
    if not key.startswith(FAMILIES):
        problems.append(f"key: not allowed; allowed: {', '.join(f'{family}…' for family in FAMILIES)}")
    if (entry["mode"] == "one_of") != isinstance(entry["want"], list):
        problems.append("want: a list goes with one_of, and only with it")
    elif _is_number_key(key) and not _is_positive(entry["want"]):
        problems.append("want: not allowed; allowed: a whole number from 1")
    return problems


def _is_number_key(key: str) -> bool:
    return key.startswith(("env.", "interpreter.")) or key == "config.server.workers"


def _is_positive(want: object) -> bool:
    values = want if isinstance(want, list) else [want]
    return bool(values) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 1 for value in values
    )

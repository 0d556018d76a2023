"""Tuning profiles: the shipped ones are sound, the choice follows the allowed CPUs, mistakes are named."""

from collections.abc import Callable
from pathlib import Path

import pytest

from qim.config import load_config
from qim.ctl.tune import (
    Host,
    are_stores_local,
    choose_size,
    list_profiles,
    load_profile,
    plan_cpus,
    profile_folder,
    read_host,
)
from qim.errors import ConfigError

ENTRY = {
    "key": '"config.server.workers"',
    "want": "2",
    "mode": '"exact"',
    "severity": '"warning"',
    "why": '"x"',
    "source": '"x"',
    "when": '"always"',
}


def _entry(**changes: str) -> str:
    return "[[setting]]\n" + "".join(f"{name} = {value}\n" for name, value in (ENTRY | changes).items())


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        (tmp_path / f"{name}.toml").write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize("name", list_profiles(profile_folder()))
@pytest.mark.parametrize("redis_local", [False, True])
def test_every_shipped_profile_gives_a_valid_configuration(name: str, redis_local: bool) -> None:
    profile = load_profile(name, host=Host(tuple(range(64))), redis_local=redis_local)
    config = load_config(None, profile=profile.config, profile_name=profile.name)
    assert config.server.workers == profile.workers == len(profile.plan.workers)
    assert config.origins["server.workers"] == f"profile {name}"
    assert set(profile.environment) == {
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_TRIM_THRESHOLD_",
        "MALLOC_ARENA_MAX",
    }
    assert profile.switch_interval_seconds == pytest.approx(0.0002)
    assert all(setting.why and setting.source for setting in profile.settings)


def test_two_cpus_run_one_worker_beside_a_local_store_and_two_without() -> None:
    host = Host((0, 1))
    assert load_profile("auto", host=host, redis_local=True).workers == 1
    assert load_profile("auto", host=host, redis_local=False).workers == 2


def test_auto_follows_the_usable_cpus_and_not_those_of_the_host() -> None:
    known = list_profiles(profile_folder())
    assert known[0] == "base"
    assert [choose_size(known, usable=n) for n in (1, 2, 3, 4, 7, 8, 200)] == [
        "base",
        "2c",
        "2c",
        "4c",
        "4c",
        "8c",
        "64c",
    ]
    assert load_profile("auto", host=Host(tuple(range(64)), quota=2.5)).name == "2c"
    assert load_profile("auto", host=Host((5,))).workers == 1


def test_a_profile_never_plans_more_workers_than_cpus() -> None:
    profile = load_profile("8c", host=Host((3, 4)))
    assert profile.workers == 2
    assert profile.config["server.workers"] == 2


def test_workers_take_the_highest_allowed_cpus_and_housekeeping_the_rest() -> None:
    plan = plan_cpus((1, 3, 5, 7), workers=3)
    assert plan.workers == (3, 5, 7)
    assert plan.housekeeping == (1,)
    crowded = plan_cpus((2, 3), workers=3)
    assert set(crowded.workers) <= {2, 3}
    assert crowded.housekeeping == (2, 3)


def test_environment_that_a_person_set_is_left_alone() -> None:
    profile = load_profile("base", host=Host((0,)))
    assert profile.missing_environment({"MALLOC_ARENA_MAX": "8"}) == {
        "MALLOC_MMAP_THRESHOLD_": "262144",
        "MALLOC_TRIM_THRESHOLD_": "268435456",
    }


def test_stores_are_local_by_their_address() -> None:
    assert are_stores_local(["redis://10.0.0.1:6379", "unix:///run/redis.sock"])
    assert are_stores_local(["redis://[::1]:6379"])
    assert not are_stores_local(["redis://10.0.0.1:6379"])


def test_quota_is_read_from_both_kinds_of_control_groups(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    (group / "cpu").mkdir(parents=True)
    assert read_host(root=tmp_path, affinity=[1, 0]) == Host((0, 1), None)
    (group / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (group / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert read_host(root=tmp_path, affinity=[0]).quota is None
    (group / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    assert read_host(root=tmp_path, affinity=[0, 1]).usable == 1
    (group / "cpu.max").write_text("250000 100000\n")
    assert read_host(root=tmp_path, affinity=[0, 1, 2]).usable == 2
    assert read_host().cpus


def test_a_condition_beats_always_and_a_size_beats_its_base(write: Callable[[str, str], Path]) -> None:
    write("base", _entry(want="1") + _entry(want="3", when='"redis_local"'))
    folder = write("2c", 'extends = "base"\n' + _entry(want="[2, 4]", mode='"one_of"'))
    host = Host((0, 1, 2, 3))
    assert load_profile("base", host=host, redis_local=True, folder=folder).workers == 3
    assert load_profile("2c", host=host, redis_local=False, folder=folder).workers == 2


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="profile 3c: there is no such profile; allowed: auto, base, 2c, 4c"
    ):
        load_profile("3c", host=Host((0,)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[setting\n", "not valid TOML"),
        ("extend = 'base'\n", "extend: there is no such key; allowed: extends, setting"),
        ('extends = "none"\n', "none.toml: cannot be read: No such file"),
        ('extends = "2c"\n', "extends goes in a circle"),
        (
            _entry(want='"many"'),
            r"setting 1 \(config.server.workers\): want: not allowed; allowed: a whole number",
        ),
        (_entry(want="true"), "want: not allowed; allowed: a whole number from 1"),
        (_entry(want="0"), "want: not allowed; allowed: a whole number from 1"),
        (_entry(want="[1]"), "want: a list goes with one_of"),
        (_entry(mode='"about"'), "mode: not allowed; allowed: exact, at_least, one_of"),
        (_entry(severity='"bad"'), "severity: not allowed; allowed: fatal, warning"),
        (_entry(when='"never"'), "when: not allowed; allowed: always, redis_local"),
        (_entry(key='"sysctl.x"'), "key: not allowed; allowed: config"),
        (_entry(extra="1"), "missing or unknown: extra"),
        ('[[setting]]\nkey = "env.MALLOC_X"\n', "missing or unknown: mode, severity"),
    ],
)
def test_a_bad_profile_is_refused_by_name(
    write: Callable[[str, str], Path], text: str, expected: str
) -> None:
    folder = write("2c", text)
    with pytest.raises(ConfigError, match=expected):
        load_profile("2c", host=Host((0, 1)), folder=folder)


def test_a_wrong_configuration_value_of_a_profile_is_named_with_the_profile() -> None:
    with pytest.raises(
        ConfigError, match=r"profile 2c: gateway.backlog: not allowed; allowed: a whole number"
    ):
        load_config(None, profile={"gateway.backlog": "x"}, profile_name="2c")

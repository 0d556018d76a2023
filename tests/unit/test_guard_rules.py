"""What the start-up guards decide, and that every refusal says what to do."""

import pytest

from qim.domain.guards import (
    REQUIRED_SETTINGS,
    ExpectedIdentity,
    find_wrong_role,
    find_wrong_settings,
    judge_identity,
)
from qim.errors import ExitCode

CORE = ExpectedIdentity("core", "shop", 1, 4)


def test_the_demanded_settings_pass() -> None:
    assert find_wrong_settings(REQUIRED_SETTINGS, tool="redis-cli") == []


@pytest.mark.shows("C10")
@pytest.mark.parametrize("setting", REQUIRED_SETTINGS)
def test_each_setting_is_named_with_found_wanted_and_remedy(setting: str) -> None:
    (line,) = find_wrong_settings({**REQUIRED_SETTINGS, setting: "other"}, tool="redis-cli -p 1")
    assert line.startswith(f"{setting} is 'other', must be '{REQUIRED_SETTINGS[setting]}'; ")
    assert "redis-cli -p 1 CONFIG SET" in line or "configuration file" in line


def test_all_wrong_settings_are_reported_together() -> None:
    assert len(find_wrong_settings({}, tool="redis-cli")) == len(REQUIRED_SETTINGS)


def test_only_a_master_is_accepted() -> None:
    assert find_wrong_role("master") == []
    assert "must be 'master'" in find_wrong_role("slave")[0]


def test_the_right_identity_passes() -> None:
    assert judge_identity(CORE, b"qim 1 shop 1 4") is None


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (None, ExitCode.CONFIG),
        (b"qim 1 other 1 4", ExitCode.FOREIGN_STORE),
        (b"qim 1 shop 2 4", ExitCode.FOREIGN_STORE),
        (b"qim 1 shop 1 8", ExitCode.FOREIGN_STORE),
        (b"qim 2 shop 1 4", ExitCode.FOREIGN_STORE),
        (b"\xff", ExitCode.FOREIGN_STORE),
    ],
)
def test_any_other_identity_is_refused_with_its_exit_code(found: bytes | None, code: ExitCode) -> None:
    refusal = judge_identity(CORE, found)
    assert refusal is not None
    assert refusal.exit_code == code
    assert "must be 'qim 1 shop 1 4'" in str(refusal)

"""Tokens from the command line: what was ordered is what the server reads, and nonsense makes none."""

from dataclasses import replace
from pathlib import Path

import pytest

from qim.clock import ManualClock
from qim.config import AuthConfig, Config, load_config
from qim.errors import ConfigError
from qim.limits import DAY_MS
from qim.tokens import TokenVerifier, generate_key_pair
from workers.devfolder import user_id, write_private
from workers.token import DAYS_MAX, TokenOrder, make_token

HEX = "00112233445566778899aabbccddeeff"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Two keys are believed; the second one is ours."""
    keys = {}
    for kid in ("old", "new"):
        private, public = generate_key_pair()
        write_private(tmp_path / f"{kid}.private.pem", private)
        write_private(tmp_path / f"{kid}.pem", public)
        keys[kid] = str(tmp_path / f"{kid}.pem")
    return replace(load_config(None), auth=AuthConfig(issuer="login", audience="chat", keys=keys))


@pytest.fixture
def order(tmp_path: Path) -> TokenOrder:
    key = tmp_path / "new.private.pem"
    return TokenOrder(user="alice", tenant=7, device=None, days=30, key=key, kid=None)


def verifier(config: Config, clock: ManualClock) -> TokenVerifier:
    keys = {kid: Path(path).read_bytes() for kid, path in config.auth.keys.items()}
    return TokenVerifier(keys, issuer="login", audience="chat", clock=clock)


def test_a_server_with_this_configuration_believes_the_token(config: Config, order: TokenOrder) -> None:
    clock = ManualClock()
    made = make_token(replace(order, device=HEX.upper()), config, clock=clock)
    identity = verifier(config, clock).verify(made["token"])
    assert identity.tenant == made["tenant"] == 7
    assert identity.user == user_id("alice") == bytes.fromhex(made["user"])
    assert identity.device == bytes.fromhex(HEX)
    assert made["device"] == HEX
    assert identity.expires_at_ms == clock.now_ms() + 30 * DAY_MS == made["expires_at_ms"]
    assert made["kid"] == "new"


def test_the_id_of_the_key_is_found_by_the_key_itself_unless_it_is_named(
    config: Config, order: TokenOrder, tmp_path: Path
) -> None:
    old = replace(order, key=tmp_path / "old.private.pem")
    assert make_token(old, config, clock=ManualClock())["kid"] == "old"
    assert make_token(replace(old, kid="third"), config, clock=ManualClock())["kid"] == "third"


def test_a_key_that_no_server_believes_needs_its_id(
    config: Config, order: TokenOrder, tmp_path: Path
) -> None:
    write_private(tmp_path / "stranger.pem", generate_key_pair()[0])
    with pytest.raises(ConfigError, match="--kid"):
        make_token(replace(order, key=tmp_path / "stranger.pem"), config, clock=ManualClock())


def test_an_id_is_taken_as_it_is_and_a_name_as_the_development_server_does(
    config: Config, order: TokenOrder
) -> None:
    assert make_token(replace(order, user=HEX), config, clock=ManualClock())["user"] == HEX
    assert make_token(order, config, clock=ManualClock())["user"] == user_id("alice").hex()


def test_every_problem_of_an_order_is_named_at_once(
    config: Config, order: TokenOrder, tmp_path: Path
) -> None:
    bad = replace(order, user="Alice!", tenant=-1, device="12", days=DAYS_MAX + 1, key=tmp_path / "none.pem")
    with pytest.raises(ConfigError) as refused:
        make_token(bad, config, clock=ManualClock())
    named = [problem.split(":")[0] for problem in refused.value.problems]
    assert named == ["--key", "--user", "--tenant", "--device", "--days"]


def test_a_key_that_others_can_read_is_refused_with_the_command_that_mends_it(
    config: Config, order: TokenOrder
) -> None:
    order.key.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 0400"):
        make_token(order, config, clock=ManualClock())


def test_a_public_key_signs_nothing(config: Config, order: TokenOrder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not an Ed25519 private key"):
        make_token(replace(order, key=tmp_path / "new.pem"), config, clock=ManualClock())

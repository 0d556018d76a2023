"""Tokens: what is believed, and that every refusal looks the same."""

import base64
import json
from typing import Any

import jwt
import pytest

from qim.clock import ManualClock
from qim.errors import ConfigError, Unauthenticated
from qim.ids import DeviceId, Millis, TenantId, UserId
from qim.tokens import REFUSED, TokenVerifier, generate_key_pair, mint_token, public_half

USER = UserId(bytes(range(16)))
DEVICE = DeviceId(b"d" * 16)
PRIVATE, PUBLIC = generate_key_pair()
STRANGER, _ = generate_key_pair()
CLOCK = ManualClock(now_ms=1_000_000_000_000)


def verifier() -> TokenVerifier:
    return TokenVerifier({"k1": PUBLIC}, issuer="qim", audience="qim", clock=CLOCK)


def minted(**changes: Any) -> str:
    values: dict[str, Any] = {
        "private_key_pem": PRIVATE, "kid": "k1", "tenant": TenantId(7), "user": USER,
        "expires_at_ms": Millis(CLOCK.now_ms() + 60_000), "issuer": "qim", "audience": "qim",
    }  # fmt: skip
    values.update(changes)
    return mint_token(**values)


def signed(claims: dict[str, Any], *, key: Any = PRIVATE, algorithm: str = "EdDSA", kid: str = "k1") -> str:
    return jwt.encode(claims, key, algorithm=algorithm, headers={"kid": kid})


def claims(**changes: Any) -> dict[str, Any]:
    base = {
        "iss": "qim", "aud": "qim", "tenant": 7, "sub": USER.hex(), "exp": CLOCK.now_ms() // 1000 + 60,
    }  # fmt: skip
    return {name: value for name, value in (base | changes).items() if value is not None}


def unsigned() -> str:
    def part(value: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    return f"{part({'alg': 'none', 'kid': 'k1'})}.{part(claims())}."


def broken_signature() -> str:
    content, _, signature = minted().rpartition(".")
    return f"{content}.{'B' if signature[0] == 'A' else 'A'}{signature[1:]}"


def test_a_minted_token_gives_its_identity() -> None:
    identity = verifier().verify(minted(device=DEVICE))
    assert identity == (7, USER, DEVICE, CLOCK.now_ms() + 60_000)


def test_a_token_without_a_device_is_good_for_any() -> None:
    assert verifier().verify(minted()).device is None


@pytest.mark.shows("F-47")
@pytest.mark.parametrize(
    "token",
    [
        pytest.param(minted(expires_at_ms=Millis(CLOCK.now_ms())), id="expired"),
        pytest.param(minted(audience="other"), id="audience"),
        pytest.param(minted(issuer="other"), id="issuer"),
        pytest.param(minted(kid="k2"), id="unknown key id"),
        pytest.param(minted(private_key_pem=STRANGER), id="foreign key"),
        pytest.param(signed(claims(), key="s" * 32, algorithm="HS256"), id="other algorithm"),
        pytest.param(unsigned(), id="no algorithm"),
        # Its first character: the last one carries bits that do not count.
        pytest.param(broken_signature(), id="broken signature"),
        pytest.param(signed(claims(tenant=-1)), id="negative tenant"),
        pytest.param(signed(claims(tenant=2**32)), id="tenant too large"),
        pytest.param(signed(claims(tenant="7")), id="tenant of another type"),
        pytest.param(signed(claims(tenant=True)), id="tenant is a truth value"),
        pytest.param(signed(claims(sub="00")), id="short user"),
        pytest.param(signed(claims(sub="z" * 32)), id="user is not hexadecimal"),
        pytest.param(signed(claims(sub="00 " * 10 + "00")), id="user with spaces"),
        pytest.param(signed(claims(dev="00")), id="short device"),
        pytest.param(signed(claims(exp=None)), id="no end"),
        pytest.param(signed(claims(exp=1e300)), id="end is not a whole number"),
        pytest.param(signed(claims(tenant=None)), id="no tenant"),
        pytest.param("", id="empty"),
        pytest.param("a.b.c", id="garbage"),
        pytest.param("é.\x00.\n", id="not ascii"),
        pytest.param("x" * 5_000, id="too long"),
        pytest.param(base64.urlsafe_b64encode(b"[" * 3_000).decode() + ".e30.e30", id="nested deeply"),
    ],
)
def test_every_refused_token_gets_the_same_answer(token: str) -> None:
    with pytest.raises(Unauthenticated) as refused:
        verifier().verify(token)
    assert str(refused.value) == REFUSED
    assert refused.value.__cause__ is None


def test_a_key_that_is_not_ed25519_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"auth.keys.k1: not an Ed25519 public key"):
        TokenVerifier({"k1": PRIVATE}, issuer="qim", audience="qim", clock=CLOCK)
    with pytest.raises(ConfigError, match="not an Ed25519 private key"):
        minted(private_key_pem=PUBLIC)


def test_the_public_half_belongs_to_its_private_key() -> None:
    assert public_half(PRIVATE) == PUBLIC

"""Connection tokens: made by an operator or a log-in service, believed by the gateway.

A token is a JWT signed with Ed25519 (`alg` EdDSA, never chosen by the token). Its header names the key
(`kid`), its claims name who connects:

    iss, aud   must equal the configured ones
    tenant     unsigned 32-bit number
    sub        user id, 32 hexadecimal digits
    dev        optional device id, 32 hexadecimal digits; when present, AUTH must name this device
    exp        seconds since 1970; a token without an end is refused

There is one refusal for everything: expired, foreign key, wrong audience, broken bytes and unknown user
are the same `Unauthenticated` with the same text, so that nobody learns which part was right. The verifier
keeps no state besides its public keys; a new set of keys is a new verifier, swapped by whoever owns it.
Verification costs about a tenth of a millisecond and happens once per connection, behind the limit for
failed log-ins.

Time comes from a clock that is passed in, not from the library's own, so that expiry can be tested.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from qim.clock import Clock
from qim.errors import ConfigError, Unauthenticated
from qim.ids import ID_BYTES, DeviceId, Millis, TenantId, UserId
from qim.limits import TOKEN_BYTES_MAX

ALGORITHM: Final = "EdDSA"
TENANT_MAX: Final = 2**32 - 1
REFUSED: Final = "token refused"
_REQUIRED: Final = ["exp", "aud", "iss", "sub", "tenant"]


class Identity(NamedTuple):
    """Who a token speaks for. The only source of tenant and user in the whole server."""

    tenant: TenantId
    user: UserId
    device: DeviceId | None
    """None: the token is good for any device of the user."""
    expires_at_ms: Millis


class TokenVerifier:
    """Checks tokens against a fixed set of public keys."""

    def __init__(self, keys: Mapping[str, bytes], *, issuer: str, audience: str, clock: Clock) -> None:
        """`keys` maps key ids to PEM text; raises ConfigError when one is not an Ed25519 public key."""
        self._keys = {kid: _load_public_key(kid, pem) for kid, pem in keys.items()}
        self._issuer = issuer
        self._audience = audience
        self._clock = clock

    def verify(self, token: str) -> Identity:
        """The identity, or `Unauthenticated` with the same text whatever was wrong."""
        if len(token) > TOKEN_BYTES_MAX:
            raise Unauthenticated(REFUSED)
        try:
            key = self._keys[jwt.get_unverified_header(token)["kid"]]
            claims = jwt.decode(
                token,
                key,
                algorithms=[ALGORITHM],
                audience=self._audience,
                issuer=self._issuer,
                # Both times are compared with our own clock below.
                options={"require": _REQUIRED, "verify_exp": False, "verify_iat": False, "verify_nbf": False},
            )
            identity = _parse_claims(claims)
        except (jwt.PyJWTError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
            # `from None`: the chain would carry parts of the token into a log.
            raise Unauthenticated(REFUSED) from None
        if identity.expires_at_ms <= self._clock.now_ms():
            raise Unauthenticated(REFUSED)
        return identity


def mint_token(
    private_key_pem: bytes,
    kid: str,
    *,
    tenant: TenantId,
    user: UserId,
    expires_at_ms: Millis,
    issuer: str,
    audience: str,
    device: DeviceId | None = None,
) -> str:
    """A signed token. Raises ConfigError when the key is not an Ed25519 private key."""
    claims: dict[str, Any] = {
        "iss": issuer,
        "aud": audience,
        "tenant": tenant,
        "sub": user.hex(),
        "exp": expires_at_ms // 1000,
    }
    if device is not None:
        claims["dev"] = device.hex()
    return jwt.encode(claims, _load_private_key(private_key_pem), algorithm=ALGORITHM, headers={"kid": kid})


def generate_key_pair() -> tuple[bytes, bytes]:
    """A new signing key: private and public half, both PEM."""
    private = Ed25519PrivateKey.generate()
    return (
        private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
    )


def public_half(private_key_pem: bytes) -> bytes:
    """The public key of a private one, PEM; raises ConfigError when it is not an Ed25519 private key."""
    public = _load_private_key(private_key_pem).public_key()
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _parse_claims(claims: Mapping[str, Any]) -> Identity:
    tenant, expires = claims["tenant"], claims["exp"]
    if type(tenant) is not int or not 0 <= tenant <= TENANT_MAX or type(expires) is not int:
        raise ValueError("claims of the wrong type")
    device = claims.get("dev")
    return Identity(
        TenantId(tenant),
        UserId(_parse_id(claims["sub"])),
        None if device is None else DeviceId(_parse_id(device)),
        Millis(expires * 1000),
    )


def _parse_id(text: str) -> bytes:
    # `fromhex` forgives spaces between digits; the length check does not.
    if len(text) != ID_BYTES * 2:
        raise ValueError("not an id")
    value = bytes.fromhex(text)
    if len(value) != ID_BYTES:
        raise ValueError("not an id")
    return value


def _load_public_key(kid: str, pem: bytes) -> Ed25519PublicKey:
    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError([f"auth.keys.{kid}: not an Ed25519 public key in PEM form"]) from None
    return key


def _load_private_key(pem: bytes) -> Ed25519PrivateKey:
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(["the signing key is not an Ed25519 private key in PEM form"]) from None
    return key

"""`qim token`: makes a connection token with a private key.

Whoever holds the key can speak as anybody, so it lies with the log-in service and never on a server; only its
owner may be able to read the file, otherwise it is refused. Nothing is asked of a running server: the public
half in its configuration is what makes a token good.

    the key   --key, else token-key.pem of the data folder of `qim dev`
    its id    --kid, else the id under which the configuration names the public half of this very key
    the user  32 hexadecimal digits, or a name, which is the user of that name in `qim dev`

Every problem of an order is reported at once; a token is made only when there is none. It has no state.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from qim.clock import Clock
from qim.config import Config
from qim.config_checks import file_problems
from qim.errors import ConfigError
from qim.ids import DeviceId, Millis, TenantId, UserId
from qim.limits import DAY_MS
from qim.tokens import TENANT_MAX, mint_token, public_half
from workers.devfolder import user_id

HEXADECIMAL_ID: Final = re.compile(r"[0-9a-fA-F]{32}")
NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")
DAYS_MAX: Final = 3_650
"""Ten years; more is a mistake, and a token cannot be called back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOrder:
    """What a token shall say, as the command line gives it."""

    user: str
    tenant: int
    device: str | None
    days: int
    key: Path
    kid: str | None
    """None: found by the key itself."""


def make_token(order: TokenOrder, config: Config, *, clock: Clock) -> dict[str, Any]:
    """The token and what it says; raises ConfigError for whatever it cannot say."""
    problems = [f"--key: {problem}" for problem in file_problems(order.key, secret=True)]
    problems += _wrong_words(order)
    if problems:
        raise ConfigError(problems)
    private_key = order.key.read_bytes()
    kid = order.kid or _find_key_id(private_key, config)
    user = parse_user(order.user)
    expires_at_ms = Millis(clock.now_ms() + order.days * DAY_MS)
    token = mint_token(
        private_key,
        kid,
        tenant=TenantId(order.tenant),
        user=user,
        device=None if order.device is None else DeviceId(bytes.fromhex(order.device)),
        expires_at_ms=expires_at_ms,
        issuer=config.auth.issuer,
        audience=config.auth.audience,
    )
    return {
        "schema": 1,
        "token": token,
        "kid": kid,
        "tenant": order.tenant,
        "user": user.hex(),
        "device": None if order.device is None else order.device.lower(),
        "expires_at_ms": expires_at_ms,
    }


def parse_user(text: str) -> UserId:
    """An id, or a name as `qim dev` uses it."""
    return UserId(bytes.fromhex(text)) if HEXADECIMAL_ID.fullmatch(text) else user_id(text)


def _wrong_words(order: TokenOrder) -> list[str]:
    problems = []
    if not HEXADECIMAL_ID.fullmatch(order.user) and not NAME.fullmatch(order.user):
        problems.append("--user: allowed: 32 hexadecimal digits, or a name of 1 to 32 of a-z, 0-9 and -")
    if not 0 <= order.tenant <= TENANT_MAX:
        problems.append(f"--tenant: allowed: 0 to {TENANT_MAX}")
    if order.device is not None and not HEXADECIMAL_ID.fullmatch(order.device):
        problems.append("--device: allowed: 32 hexadecimal digits")
    if not 1 <= order.days <= DAYS_MAX:
        problems.append(f"--days: allowed: 1 to {DAYS_MAX}")
    return problems


def _find_key_id(private_key: bytes, config: Config) -> str:
    public = public_half(private_key)
    for kid, path in config.auth.keys.items():
        try:
            if Path(path).read_bytes().strip() == public.strip():
                return kid
        except OSError:
            # A key that this user cannot read cannot be compared; another may still be the one.
            continue
    raise ConfigError(
        ["--kid: the configuration names no public half of this key; give the id that the server knows it by"]
    )

"""Who this client is and where its file lies: endpoint, tenant, user, device.

    <data dir>/<blake3 of the canonical endpoint, 16 hex>/<tenant>/<user>.db

The same server written in two ways is the same scope: the host is lower-cased, an address is written in its
shortest form, the default port is filled in. Another server, tenant or user is another file, so an account
switch cannot show anything of the account before. The user and the tenant are read from the token's claims
without believing them: they only choose a file, and the server's answer to AUTH must name the same user.
The token itself is kept in one object whose repr hides it; it is never part of a path or a log line.
"""

import base64
import binascii
import ipaddress
import os
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from blake3 import blake3

from qim.client.errors import AuthError
from qim.client.model import parse_id
from qim.errors import Unauthenticated
from qim.ids import ClientMessageId, DeviceId, TenantId, UserId
from qim.limits import TOKEN_BYTES_MAX

DEFAULT_PORT: Final = 7443
_SCOPE_DOMAIN = b"qim.endpoint.v1"
_CMID_DOMAIN = b"qim.cmid.v1"
TENANT_MAX: Final = 2**32 - 1


class Endpoint(NamedTuple):
    """A server address in its one canonical form."""

    host: str
    port: int

    def canonical(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"qim://{host}:{self.port}"


class Secret:
    """A token that does not print itself."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        # A file that a shell wrote ends with a newline, which no token holds.
        self._value = value.strip()

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "Secret(hidden)"


class Account(NamedTuple):
    """Whose file it is, as the token claims."""

    tenant: TenantId
    user: UserId
    bound_device: DeviceId | None


class _Claims(msgspec.Struct):
    tenant: int
    sub: str
    dev: str | None = None


def parse_endpoint(text: str) -> Endpoint:
    """Accepts `host`, `host:port`, `[v6]:port`, each with or without `qim://`. Raises ValueError."""
    rest = text.strip().removeprefix("qim://").removesuffix("/")
    if rest.startswith("["):
        host, bracket, port = rest[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise ValueError(f"not an endpoint: {text!r}; write [address]:port")
        port = port[1:]
    elif rest.count(":") > 1:
        host, port = rest, ""
    else:
        host, _, port = rest.partition(":")
    if not host or any(mark in host for mark in "/@ "):
        raise ValueError(f"not an endpoint: {text!r}; write host:port")
    number = int(port) if port.isascii() and port.isdigit() else 0 if port else DEFAULT_PORT
    if not 0 < number < 65_536:
        raise ValueError(f"not a port in {text!r}; use 1 to 65535")
    return Endpoint(_canonical_host(host), number)


def _canonical_host(host: str) -> str:
    try:
        return ipaddress.ip_address(host).compressed
    except ValueError:
        return host.lower().removesuffix(".")


def read_account(token: Secret) -> Account:
    """The claims that choose the file. Raises AuthError for something that is no token at all."""
    parts = token.reveal().split(".")
    try:
        if len(parts) != 3 or len(token.reveal()) > TOKEN_BYTES_MAX:
            raise ValueError("not three parts")
        payload = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        claims = msgspec.json.decode(payload, type=_Claims)
        if not 0 <= claims.tenant <= TENANT_MAX:
            raise ValueError("tenant out of range")
        user = UserId(parse_id(claims.sub))
        device = DeviceId(parse_id(claims.dev)) if claims.dev else None
        return Account(TenantId(claims.tenant), user, device)
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        # The cause is cut off: its text could carry a piece of the token.
        raise AuthError(
            "the token is not a qim token: it must be a JWT with `tenant` and `sub`",
            code=Unauthenticated.code,
        ) from None


def default_data_dir() -> Path:
    """Where an application's data belong on this system."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "qim"


def store_path(data_dir: Path, endpoint: Endpoint, account: Account) -> Path:
    scope = blake3(_SCOPE_DOMAIN + endpoint.canonical().encode()).hexdigest()[:16]
    return data_dir / scope / str(account.tenant) / f"{account.user.hex()}.db"


def client_message_id(device_id: DeviceId, ordinal: int) -> ClientMessageId:
    """The identity of a send; the ordinal is never used twice on a device."""
    return ClientMessageId(blake3(_CMID_DOMAIN + device_id + ordinal.to_bytes(8, "big")).digest(16))

"""The configuration: one frozen, typed tree, read once by the supervisor before it forks.

`load_config` puts the layers on top of each other (first wins: command-line flags, environment
`QIM__SECTION__KEY`, the file, the tuning profile, defaults), checks the result and returns plain values.
Workers get the finished tree and never look a setting up by its name, so importing this module stays cheap:
the checker is imported inside `load_config` only, in the supervisor and the tools.

All problems are reported at once as `ConfigError`, each with where it came from (file and line, variable,
flag), the key and what is allowed. No problem ever quotes the value that was found: it could be a secret in
the wrong place. Secrets are never values at all; a key names where one lies (`credential:NAME` or
`file:/path`).

Every key is declared once, as a field below, with its type, its bounds and one paragraph of `Key` text. That
text is the manual: error messages and the reference page are made from it. Units come last in a key's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from annotated_types import Interval

from qim import limits

STRICT: Final[dict[str, object]] = {"extra": "forbid", "hide_input_in_errors": True}
"""Unknown keys are errors, and the checker must not print what it refused."""


@dataclass(frozen=True, slots=True)
class Key:
    """What a person needs to know about one key."""

    text: str
    allowed: str = ""
    """In words, where the type and its bounds do not say it."""
    hot: bool = False
    """Taken over by a reload (`workers/reload.py`); everything else needs a restart."""


NAME_RULE: Final = "1 to 64 of a-z, 0-9 and -"
SECRET_RULE: Final = "credential:NAME or file:/absolute/path"  # noqa: S105 - says where a secret lies
URL_RULE: Final = "unix:///absolute/path or redis://host:port"

Milliseconds = Annotated[int, Interval(ge=1, le=3_600_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Who this server is and what it runs."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    deployment: Annotated[
        str,
        Key(
            "Name of the deployment. It is written into every store, and a store of another name is refused.",
            NAME_RULE,
        ),
    ] = "qim"
    data_dir: Annotated[
        str, Key("Folder for what must survive a restart and lies in no store.", "an absolute path")
    ] = "/var/lib/qim"
    runtime_dir: Annotated[
        str,
        Key(
            "Folder for sockets. Short: a Unix socket path ends at 107 bytes.",
            "an absolute path of at most 80 bytes",
        ),
    ] = "/run/qim"
    workers: Annotated[
        Annotated[int, Interval(ge=1, le=limits.SLOTS)] | Literal["auto"],
        Key(
            "Worker processes. `auto`: what the tuning profile gives for the CPUs this process may use.",
            '"auto" or 1 to 64',
        ),
    ] = "auto"
    cpus: Annotated[
        tuple[Annotated[int, Interval(ge=0, le=4095)], ...],
        Key(
            "CPUs to pin the workers to, in order. Empty: chosen among the allowed CPUs.",
            "a list of CPU numbers",
        ),
    ] = ()
    pin: Annotated[
        bool,
        Key("Whether each worker's loop keeps to one CPU. Off where it shares the CPUs with the store."),
    ] = True
    keep_awake: Annotated[
        bool,
        Key(
            "Whether idle CPUs spin instead of sleeping while the server runs. A light load then costs a "
            "tenth less processor time per message, and the host more electricity. Needs to write "
            "/dev/cpu_dma_latency; under systemd with the drop-in keep-awake.conf."
        ),
    ] = False
    drain_timeout_ms: Annotated[
        Milliseconds, Key("Time for a polite stop; what is unfinished then, the next start recovers.")
    ] = limits.DRAIN_DEADLINE_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """The certificate that clients see. TLS 1.3 is the only protocol and cannot be switched off."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    certificate_file: Annotated[
        str, Key("PEM file with the certificate and its chain.", "an absolute path", hot=True)
    ] = "/etc/qim/tls/cert.pem"
    key_file: Annotated[
        str,
        Key(
            "The private key, PEM. ECDSA P-256 makes the cheapest handshakes.",
            f"an absolute path, {SECRET_RULE}",
            hot=True,
        ),
    ] = "/etc/qim/tls/key.pem"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The public listener and what one connection may cost."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    address: Annotated[str, Key("Address to listen on.", "an IPv4 or IPv6 address")] = "0.0.0.0"  # noqa: S104 - a messaging server is there to be reached
    port: Annotated[
        Annotated[int, Interval(ge=0, le=65535)],
        Key("TCP port for clients. 0 lets the kernel choose, for tests."),
    ] = 7443
    backlog: Annotated[
        Annotated[int, Interval(ge=1, le=65535)],
        Key("Connections that may wait to be accepted, per worker; the kernel's net.core.somaxconn cuts it."),
    ] = 4096
    connections_max: Annotated[
        Annotated[int, Interval(ge=1, le=1_000_000)],
        Key("Connections per worker; further ones are told to come back later. About 40 KiB of memory each."),
    ] = 10_000
    handshake_timeout_ms: Annotated[
        Milliseconds, Key("TLS handshakes that take longer are cut: a half-open connection costs memory.")
    ] = limits.TLS_HANDSHAKE_TIMEOUT_MS
    auth_timeout_ms: Annotated[Milliseconds, Key("Time for the first frame, which must be AUTH.")] = (
        limits.AUTH_TIMEOUT_MS
    )
    ping_interval_ms: Annotated[Milliseconds, Key("How often clients are asked to ping.")] = (
        limits.PING_INTERVAL_MS
    )
    silence_ms_max: Annotated[
        Milliseconds, Key("A connection silent for longer is dead. Must exceed ping_interval_ms.")
    ] = limits.CONNECTION_SILENCE_MS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """Which connection tokens are believed. The algorithm is EdDSA and cannot be chosen."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    issuer: Annotated[str, Key("Required `iss` of a token.", "1 to 256 characters")] = "qim"
    audience: Annotated[str, Key("Required `aud` of a token.", "1 to 256 characters")] = "qim"
    keys: Annotated[
        Mapping[str, str],
        Key(
            "Key id → PEM file with an Ed25519 public key. Two ids at once allow a change of keys.",
            "a table of absolute paths",
        ),
    ] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConfig:
    """The store instances. Slot s lives on instance s · count // 64, so the counts are part of the
    deployment.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    core: Annotated[
        tuple[str, ...], Key("Instances with commit facts and hot history.", f"a list of 1 to 64: {URL_RULE}")
    ] = ("redis://127.0.0.1:6379",)
    mailbox: Annotated[
        tuple[str, ...],
        Key("Instances with mailboxes. Empty: the core instances.", f"a list of 0 to 64: {URL_RULE}"),
    ] = ()
    log: Annotated[str, Key("Instance with both logs. Empty: the first core instance.", URL_RULE)] = ""
    password: Annotated[
        str, Key("Where the password of all instances lies; empty if they ask for none.", SECRET_RULE)
    ] = field(default="", repr=False)
    commit_in_one_step: Annotated[
        bool,
        Key(
            "Whether a core instance that also holds the logs reserves, appends and commits in one script."
            " False: always in two steps, as with a log elsewhere."
        ),
    ] = True
    command_timeout_ms: Annotated[
        Milliseconds,
        Key(
            "A command without an answer for so long has an unknown outcome and ends its connection; an"
            " attempt to connect gets as long."
        ),
    ] = limits.STORE_TIMEOUT_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Rates that one peer may use, counted per worker. Above them: RESOURCE_EXHAUSTED with a time to
    come back.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    sends_per_second: Annotated[
        Annotated[float, Interval(ge=0.001, le=1_000_000)],
        Key("Messages per user and per connection."),
    ] = limits.SENDS_PER_SECOND
    sends_burst: Annotated[
        Annotated[int, Interval(ge=1, le=1_000_000)], Key("Messages at once after a pause.")
    ] = limits.SENDS_BURST
    failed_logins_per_second: Annotated[
        Annotated[float, Interval(ge=0.001, le=1_000)], Key("Refused tokens per address.")
    ] = limits.FAILED_LOGINS_PER_SECOND
    failed_logins_burst: Annotated[
        Annotated[int, Interval(ge=1, le=10_000)], Key("Refused tokens at once per address.")
    ] = limits.FAILED_LOGINS_BURST
    unanswered_requests_max: Annotated[
        Annotated[int, Interval(ge=1, le=65_536)],
        Key("Requests of one connection without an answer; above it the connection is closed as slow."),
    ] = limits.UNANSWERED_REQUESTS_MAX
    unsent_bytes_max: Annotated[
        Annotated[int, Interval(ge=limits.FRAME_BODY_BYTES_MAX * 2, le=1_073_741_824)],
        Key("Bytes waiting for one connection; above it the connection is closed as slow."),
    ] = limits.UNSENT_BYTES_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is logged, and how."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Key("Least level that is written.", hot=True)
    ] = "info"
    format: Annotated[
        Literal["auto", "json", "console"],
        Key("`auto` is console on a terminal and JSON lines everywhere else."),
    ] = "auto"
    reference_key: Annotated[
        str,
        Key(
            "Secret that turns user ids into references. Empty: a new one at each start.",
            SECRET_RULE,
        ),
    ] = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TestConfig:
    """Switches that only tests turn on."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT
    __test__: ClassVar[bool] = False

    failpoints: Annotated[
        bool,
        Key("Whether named failpoints on the message path act. Never in production: they end processes."),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole tree. Equal trees mean equal behaviour; `origins` says where each value came from."""

    server: ServerConfig = field(default_factory=ServerConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    redis: RedisConfig = field(default_factory=RedisConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    test: TestConfig = field(default_factory=TestConfig)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def mailbox_urls(self) -> tuple[str, ...]:
        """The mailbox instances, which are the core instances unless named."""
        return self.redis.mailbox or self.redis.core

    @property
    def log_url(self) -> str:
        """The instance of both logs, which is the first core instance unless named."""
        return self.redis.log or self.redis.core[0]


class Secret:
    """A secret that shows itself only when asked; everything that prints it prints stars."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def __repr__(self) -> str:
        return "***"

    def reveal(self) -> bytes:
        return self._value

    @classmethod
    def none(cls) -> Self:
        return cls(b"")

    def __bool__(self) -> bool:
        return bool(self._value)


def load_config(
    path: Path | None,
    *,
    profile: Mapping[str, object] | None = None,
    profile_name: str = "",
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Reads and checks everything; raises `ConfigError` with every problem.

    `path` None means no file. `profile` and `overrides` map dotted keys to values; the caller read the
    profile, and the command line made the overrides. `environ` is usually `os.environ`, and None means
    none.
    """
    from qim.config_sources import read_layers  # noqa: PLC0415 - keeps the checker out of the workers' imports

    return read_layers(
        path,
        profile=profile or {},
        profile_name=profile_name,
        overrides=overrides or {},
        environ=environ or {},
    )


def describe(config: Config) -> list[tuple[str, str, str]]:
    """Every key with its value as text and its origin, in the order of the tree. Secrets are only
    named, never read.
    """
    rows = []
    for section in SECTIONS:
        tree = getattr(config, section)
        for key in fields(tree):
            dotted = f"{section}.{key.name}"
            rows.append((dotted, _text_of(getattr(tree, key.name)), _origin_of(dotted, config.origins)))
    return rows


def _origin_of(dotted: str, origins: Mapping[str, str]) -> str:
    """The origins of a key and, for a table, of its parts."""
    found = [origin for key, origin in origins.items() if key == dotted or key.startswith(f"{dotted}.")]
    return ", ".join(dict.fromkeys(found)) or "default"


def _text_of(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={item}" for name, item in value.items())
    return str(value)


SECTIONS: Final[tuple[str, ...]] = tuple(part.name for part in fields(Config) if part.name != "origins")

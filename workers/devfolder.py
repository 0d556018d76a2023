"""The data folder of `qim dev`: who may use it, and the files that a person would have to make by hand.

    lock              locked while a launcher, its store or its server lives; holds the launcher's process id
    deployment        marks the folder as ours and names the deployment
    store/            what the embedded store keeps
    initialised       the store has got its identity: from now on it is never begun anew without being told
    run               sockets; where their paths would exceed 107 bytes, a link to a private folder in /tmp
    dev.json          what runs now and where, for tools: addresses, files, users, sockets, process ids
    certificate.pem   self-signed, ECDSA P-256, for localhost; made again before it ends
    key.pem           its key
    token-key.pem     Ed25519, signs connection tokens; token-public.pem is what the server believes
    qim.toml          the configuration that the supervisor is started with
    qim.log           what the service logs

A folder that holds other things is refused, so that a mistyped path does no harm. So is one whose store has
gone while the rest is there: an empty service would look like lost messages. Disk full, not writable and
locked by another launcher are one-line errors.
"""

import fcntl
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from time import sleep
from typing import Any, Final

from blake3 import blake3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from qim.clock import Clock
from qim.errors import ConfigError
from qim.ids import UserId
from qim.tokens import generate_key_pair

DEPLOYMENT: Final = "qim-dev"
DEFAULT_FOLDER: Final = ".qim-dev"
KEY_ID: Final = "dev"
CERTIFICATE_DAYS: Final = 365
RENEW_DAYS: Final = 14
ORPHAN_SECONDS_MAX: Final = 25.0
"""A store and a server whose launcher was killed need so long at most to end."""
POLL_SECONDS: Final = 0.1
RUN_PREFIX: Final = "qim-"
ANNOUNCEMENT: Final = "dev.json"
INITIALISED: Final = "initialised"
STORE_FILES: Final = "**/appendonly.aof*"
"""Inside `store/`; made by the store itself at its first start, in a folder of their own."""
OWN_FILES: Final = frozenset({"store", "qim.toml", "token-key.pem", INITIALISED})
"""Whoever has one of them and no `deployment` has lost that file, or copied only a part."""
LONGEST_SOCKET: Final = "control-63.sock"
"""Of all names in the folder of sockets; a name that fits is not enough, the longest must."""


class DevFolder:
    """The folder of one launcher. Made by `open_folder` only, which holds the lock."""

    def __init__(self, path: Path, *, lock: int, run: Path, clock: Clock) -> None:
        self.path = path
        self.lock = lock
        self.run = run
        """Where sockets are; gone when the launcher ends."""
        self._clock = clock

    @property
    def store(self) -> Path:
        return self.path / "store"

    @property
    def store_socket(self) -> Path:
        return self.run / "store.sock"

    @property
    def certificate(self) -> Path:
        return self.path / "certificate.pem"

    @property
    def token_key(self) -> Path:
        return self.path / "token-key.pem"

    @property
    def config(self) -> Path:
        return self.path / "qim.toml"

    @property
    def log(self) -> Path:
        return self.path / "qim.log"

    @property
    def control_socket(self) -> Path:
        return self.run / "control.sock"

    def token_file(self, name: str) -> Path:
        """Where the token of a user of this folder is kept."""
        return self.path / f"{name}.token"

    def mark_initialised(self) -> None:
        """Written after the first `init`, not before: a first start that failed may be repeated."""
        if not (self.path / INITIALISED).exists():
            write_private(self.path / INITIALISED, b"")

    def announce(self, facts: Mapping[str, Any]) -> None:
        """Writes `dev.json`, whole or not at all; it exists only while the service is ready."""
        write_private(self.path / ANNOUNCEMENT, json.dumps({"schema": 1, **facts}, indent=2).encode() + b"\n")

    def prepare(self, *, address: str, port: int, workers: int | None) -> None:
        """Makes what is missing and writes the configuration."""
        self._make_certificate()
        token_public = self.path / "token-public.pem"
        if not (self.token_key.exists() and token_public.exists()):
            private, public = generate_key_pair()
            write_private(self.token_key, private)
            write_private(token_public, public)
        write_private(self.config, self._config_text(address, port, workers).encode())

    def _config_text(self, address: str, port: int, workers: int | None) -> str:
        lines = [
            "# Written by `qim dev` at each start; changes are lost.",
            "[server]",
            f'deployment = "{DEPLOYMENT}"',
            f'data_dir = "{self.path}"',
            f'runtime_dir = "{self.run}"',
            "pin = false",
            "drain_timeout_ms = 6000",
            *([] if workers is None else [f"workers = {workers}"]),
            "[gateway]",
            f'address = "{address}"',
            f"port = {port}",
            "[tls]",
            f'certificate_file = "{self.certificate}"',
            f'key_file = "{self.path / "key.pem"}"',
            "[auth.keys]",
            f'{KEY_ID} = "{self.path / "token-public.pem"}"',
            "[redis]",
            f'core = ["unix://{self.store_socket}"]',
            "[log]",
            'format = "json"',
        ]
        return "\n".join(lines) + "\n"

    def _make_certificate(self) -> None:
        now = datetime.fromtimestamp(self._clock.now_ms() / 1000, tz=UTC)
        if self.certificate.exists() and (self.path / "key.pem").exists():
            try:
                present = x509.load_pem_x509_certificate(self.certificate.read_bytes())
            except ValueError:
                problem = f"{self.certificate}: not a certificate in PEM form; remove it to get a new one"
                raise ConfigError([problem]) from None
            if present.not_valid_after_utc > now + timedelta(days=RENEW_DAYS):
                return
        key, certificate = make_certificate(now)
        write_private(self.path / "key.pem", key)
        write_private(self.certificate, certificate)


@contextmanager
def open_folder(path: Path, *, clock: Clock) -> Iterator[DevFolder]:
    """Locks the folder for this process; raises ConfigError when it cannot be used."""
    # Resolved only where it goes up: a link that a person has typed is the name that they know.
    path = path.resolve() if ".." in path.parts else path.absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_foreign(path)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError([f"data folder {path}: {error.strerror}"]) from error
    try:
        _take_lock(path, lock, clock)
        _refuse_without_store(path)
        run = _occupy(path, lock)
        try:
            yield DevFolder(path, lock=lock, run=run, clock=clock)
        finally:
            (path / ANNOUNCEMENT).unlink(missing_ok=True)
            _remove_run(path / "run")
    finally:
        os.close(lock)


def _occupy(path: Path, lock: int) -> Path:
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        write_private(path / "deployment", f"{DEPLOYMENT}\n".encode())
        return _make_run(path)
    except OSError as error:
        raise ConfigError([f"data folder {path}: {error.strerror}"]) from error


def _refuse_foreign(path: Path) -> None:
    if (path / "deployment").exists() or not any(path.iterdir()):
        if (path / "deployment").exists():
            name = (path / "deployment").read_text().strip()
            # An empty marker was cut off by a full disk before it was written.
            if name not in {DEPLOYMENT, ""}:
                raise ConfigError(
                    [f"data folder {path}: belongs to deployment {name[:64]!r}; choose another"]
                )
        return
    strange = [entry.name for entry in path.iterdir() if entry.name != "lock"]
    if OWN_FILES.intersection(strange):
        remedy = f"`echo {DEPLOYMENT} > {path / 'deployment'}` brings it back"
        raise ConfigError(
            [f"data folder {path}: looks like one of qim dev, but its file `deployment` is missing; {remedy}"]
        )
    if strange:
        raise ConfigError(
            [f"data folder {path}: holds other files ({strange[0][:64]}); choose an empty folder"]
        )


def _refuse_without_store(path: Path) -> None:
    """Beginning anew beside old keys and tokens would hide that every message is gone."""
    store = path / "store"
    if (path / INITIALISED).exists() and not any(store.glob(STORE_FILES)):
        lost = "holds no append-only file" if store.exists() else "is missing"
        remedy = "bring it back, or remove the whole data folder to begin anew, or choose another: --data-dir"
        raise ConfigError([f"data folder {path}: it has been in use, but {store} {lost}; {remedy}"])


def _take_lock(path: Path, lock: int, clock: Clock) -> None:
    """Waits for store and server whose launcher is dead; refuses while the launcher lives."""
    began = clock.monotonic()
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
        alive = owner.isdigit() and Path(f"/proc/{owner}").exists()
        if alive or clock.monotonic() - began > ORPHAN_SECONDS_MAX:
            who = f"by process {owner}" if alive else "by processes whose launcher is gone"
            raise ConfigError([f"data folder {path}: in use {who}; stop it first, or choose --data-dir"])
        sleep(POLL_SECONDS)


def _make_run(path: Path) -> Path:
    """The folder of sockets: inside the data folder where that is possible, in /tmp otherwise."""
    run = path / "run"
    # Left by a killed launcher: its sockets are dead and nothing it announced runs, as the lock proves.
    (path / ANNOUNCEMENT).unlink(missing_ok=True)
    _remove_run(run)
    run.mkdir(mode=0o700)
    if _can_hold_sockets(run):
        return run
    run.rmdir()
    elsewhere = Path(tempfile.mkdtemp(prefix=RUN_PREFIX))
    run.symlink_to(elsewhere)
    return elsewhere


def _remove_run(run: Path) -> None:
    if run.is_symlink():
        # Only what this module has made: somebody else's link must not cost them a folder.
        if run.resolve().name.startswith(RUN_PREFIX):
            shutil.rmtree(run.resolve(), ignore_errors=True)
        run.unlink()
    else:
        shutil.rmtree(run, ignore_errors=True)


def _can_hold_sockets(run: Path) -> bool:
    """Tried, not computed: besides long paths there are shared folders that hold no sockets at all."""
    probe = run / LONGEST_SOCKET
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(probe))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def user_id(name: str) -> UserId:
    """The same user for a name at every start, so that conversations go on."""
    return UserId(blake3(f"qim dev user {name}".encode()).digest(16))


def write_private(path: Path, data: bytes) -> None:
    """All of the file or none, readable by this user only; raises ConfigError when the disk says no."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from error


def make_certificate(now: datetime) -> tuple[bytes, bytes]:
    """Key and self-signed certificate for localhost, PEM. ECDSA P-256 makes the cheapest handshakes."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "qim dev")])
    names: list[x509.GeneralName] = [x509.DNSName("localhost")]
    names += [x509.IPAddress(ip_address(text)) for text in ("127.0.0.1", "::1")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # A day back, for clients whose clock is behind.
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=CERTIFICATE_DAYS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return (
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        certificate.public_bytes(serialization.Encoding.PEM),
    )

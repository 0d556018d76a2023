"""The public listening sockets: one per worker on one port, and the TLS context behind them.

The supervisor binds them with SO_REUSEPORT before the first fork and keeps its own copies open for its whole
life: the kernel spreads new connections over them, and those queued at the socket of a dead worker wait there
for its successor instead of being reset. Each child closes the sockets of its siblings. A worker that stays
down for longer loses its socket (`close`), so that the kernel stops choosing it, and gets a new one before it
is forked again (`open`).

The TLS context is made before the fork as well: session tickets are sealed with keys that live in it, so a
client may resume on any worker. TLS 1.3 only, ALPN `qim/1` only.
"""

import errno
import socket
import ssl
from pathlib import Path
from typing import Final

from qim.errors import ConfigError

ALPN: Final = "qim/1"


class Listeners:
    """One slot per worker; a slot holds an open socket or nothing."""

    def __init__(self, *, address: str, port: int, count: int, backlog: int) -> None:
        self._address = address
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._backlog = backlog
        self.port = port
        self._sockets: list[socket.socket | None] = [None] * count

    def open_all(self) -> None:
        """Binds every slot; with port 0 the kernel's choice for the first holds for all.

        SO_REUSEPORT would let a second service of the same user share the port silently, so the first socket
        is bound once without it. Raises ConfigError naming address and port.
        """
        self._refuse_taken_port()
        for slot in range(len(self._sockets)):
            self.open(slot)

    def open(self, slot: int) -> None:
        """Binds one slot again; does nothing where a socket is open."""
        if self._sockets[slot] is not None:
            return
        listener = socket.socket(self._family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind((self._address, self.port))
            listener.listen(self._backlog)
        except OSError as error:
            listener.close()
            raise ConfigError([self._describe(error)]) from error
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._sockets[slot] = listener

    def close(self, slot: int) -> None:
        """New connections go to the other workers from now on; those queued here are reset."""
        listener, self._sockets[slot] = self._sockets[slot], None
        if listener is not None:
            listener.close()

    def close_all(self) -> None:
        for slot in range(len(self._sockets)):
            self.close(slot)

    def keep_only(self, slot: int | None) -> socket.socket | None:
        """For a child: closes what belongs to its siblings and returns its own socket."""
        for other in range(len(self._sockets)):
            if other != slot:
                self.close(other)
        return None if slot is None else self._sockets[slot]

    def _refuse_taken_port(self) -> None:
        if self.port == 0:
            return
        with socket.socket(self._family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._address, self.port))
                probe.listen(1)
            except OSError as error:
                raise ConfigError([self._describe(error)]) from error

    def _describe(self, error: OSError) -> str:
        where = f"{self._address} port {self.port}"
        match error.errno:
            case errno.EADDRINUSE:
                return f"gateway.port: {where} is in use by another program; stop it or choose another port"
            case errno.EACCES:
                return f"gateway.port: {where} needs more rights than this process has; use 1024 or above"
            case errno.EADDRNOTAVAIL:
                return f"gateway.address: {self._address} is not an address of this host"
            case _:
                return f"gateway.address: cannot listen on {where}: {error.strerror or error}"


def build_tls_context(*, certificate_file: Path, key_file: Path) -> ssl.SSLContext:
    """The server context; raises ConfigError naming the file that cannot be used."""
    for key, path in (("tls.certificate_file", certificate_file), ("tls.key_file", key_file)):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError([f"{key}: cannot read {path}: {error.strerror}"]) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    load_certificate(context, certificate_file=certificate_file, key_file=key_file)
    return context


def load_certificate(context: ssl.SSLContext, *, certificate_file: Path, key_file: Path) -> None:
    """Into a living context; its ticket keys stay. Raises ConfigError, and then nothing has changed."""
    try:
        # A failed load leaves the context without a usable key, so it is tried on a throw-away first.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate_file, key_file, password="")
        context.load_cert_chain(certificate_file, key_file, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or "not a certificate chain with its key in PEM form"
        raise ConfigError([f"tls: {certificate_file} and {key_file} do not fit: {reason}"]) from error

"""Messages to the service manager: READY, STATUS, WATCHDOG, STOPPING, RELOADING, EXTEND_TIMEOUT_USEC.

The protocol is one datagram per message to the socket named in `NOTIFY_SOCKET`; a name that starts with `@`
is abstract, in no file system. Nobody answers. Without the variable every call is a no-op, so callers never
ask.

Only the supervisor speaks (`NotifyAccess=main`); children are forked without the variable. A full queue or a
manager that has gone away must not stop the service: the socket does not block, and what cannot be sent is
counted and dropped. A lost WATCHDOG is followed by the next one within half the period.
"""

import os
import socket
from collections.abc import Mapping
from typing import Final, Self

STATUS_BYTES_MAX: Final = 512
"""The manager shows one line; a longer one would only be cut there."""


class Notifier:
    """Speaks for one process; owns one datagram socket, or nothing."""

    def __init__(self, address: str = "", *, watchdog_usec: int = 0) -> None:
        self.watchdog_usec = watchdog_usec
        """Longest time between two WATCHDOG messages; 0: nobody waits for them."""
        self.dropped = 0
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """A watchdog meant for another process (`WATCHDOG_PID`) is not ours to feed."""
        mine = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        period = environ.get("WATCHDOG_USEC", "0")
        return cls(
            environ.get("NOTIFY_SOCKET", ""), watchdog_usec=int(period) if mine and period.isdigit() else 0
        )

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={_one_line(status)}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={_one_line(status)}")

    def watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def stopping(self, status: str) -> None:
        self._send(f"STOPPING=1\nSTATUS={_one_line(status)}")

    def reloading(self, *, monotonic_usec: int) -> None:
        """READY must follow; the time lets the manager tell an old READY from the new one."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={monotonic_usec}")

    def extend_timeout(self, *, usec: int) -> None:
        """The start or stop in progress may take so much longer from now."""
        self._send(f"EXTEND_TIMEOUT_USEC={usec}")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto(message.encode(), self._address)
        except OSError:
            self.dropped += 1


def _one_line(text: str) -> str:
    return " ".join(text.split()).encode()[:STATUS_BYTES_MAX].decode(errors="ignore")

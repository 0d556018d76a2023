"""Is it safe to fork? One thread, no event loop, no client connection.

A thread does not survive a fork, but what it held does: locks stay locked for ever. A client connection
would be shared by two processes that both believe to be alone on it. A producer made in the parent silently
sends nothing in the child. So the supervisor asserts this before every fork: a breach is our own mistake,
found at the first start and not in the first incident.

Sockets are judged by the process's own table of descriptors: connected stream sockets that are not one of
the standard three. Listening and datagram sockets are the supervisor's own business.
"""

import asyncio
import os
import socket
import threading
from pathlib import Path

STANDARD_DESCRIPTORS = 3


def assert_forkable() -> None:
    """Raises AssertionError naming the first breach."""
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - the names alone, without an object for each
    assert threads == 1, (
        f"{threads} threads before a fork: {[thread.name for thread in threading.enumerate()]}"
    )
    assert asyncio._get_running_loop() is None, "an event loop runs before a fork"
    clients = connected_sockets()
    assert not clients, f"connections before a fork: {clients}"


def connected_sockets() -> list[str]:
    """Peers of the connected stream sockets of this process."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        descriptor = int(entry.name)
        if descriptor < STANDARD_DESCRIPTORS:
            continue
        try:
            if not entry.readlink().name.startswith("socket:"):
                continue
            peer = _peer_of(descriptor)
        except OSError:
            continue  # the descriptor of the listing itself, or not connected
        if peer is not None:
            found.append(f"descriptor {descriptor}: {peer}")
    return found


def _peer_of(descriptor: int) -> str | None:
    with socket.socket(fileno=os.dup(descriptor)) as probe:
        if probe.type != socket.SOCK_STREAM or probe.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        return repr(probe.getpeername())

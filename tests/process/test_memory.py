"""What a worker costs in memory: with nobody connected, and per idle authenticated connection.

The empty worker is measured by its whole resident set, shared pages included; a connection by what two
thousand of them add to it. Two thousand real TLS connections of one user each, all logged in and silent.
"""

import asyncio
import resource
import ssl
from pathlib import Path

import psutil
import pytest

from qim.client.transport import build_tls_context
from qim.wire.bodies import Auth, build_message
from qim.wire.layout import HEADER, Op
from tests.services.dev_server import DevServer, User
from tests.waiting import happens

CONNECTIONS = 2_000
LOGINS_AT_ONCE = 1
"""One after the other is the dearest order: the next buffer may take over pages that a handshake dirtied."""
IDLE_WORKER_BYTES_MAX = 120 * 1024 * 1024
CONNECTION_BYTES_MAX = 40 * 1024

pytestmark = pytest.mark.timeout(180)


def resident_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


async def log_in(server: DevServer, user: User, context: ssl.SSLContext) -> asyncio.StreamWriter:
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", server.port, ssl=context, server_hostname="localhost"
    )
    auth = Auth(token=user.token, device_id=user.user)  # type: ignore[arg-type]  # any 16 bytes are a device
    writer.write(build_message(Op.AUTH, 1, auth))
    header = HEADER.unpack(await reader.readexactly(HEADER.size))
    assert header[2] == Op.AUTH_ACK
    await reader.readexactly(header[4])
    return writer


async def test_idle_connections_and_an_empty_worker_stay_within_their_budget(tmp_path: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8_192), most))
    with DevServer(tmp_path) as server:
        (worker,) = server.worker_pids()
        empty = resident_bytes(worker)
        assert empty <= IDLE_WORKER_BYTES_MAX, f"an empty worker holds {empty / 2**20:.0f} MiB"
        context = build_tls_context(server.certificate)
        users = [server.new_user() for _ in range(CONNECTIONS)]
        writers = []
        for start in range(0, CONNECTIONS, LOGINS_AT_ONCE):
            some = users[start : start + LOGINS_AT_ONCE]
            writers += await asyncio.gather(*(log_in(server, user, context) for user in some))
        await happens(lambda: _connections(server) == CONNECTIONS, what="all connections are counted")
        each = (resident_bytes(worker) - empty) / CONNECTIONS
        figures = f"empty worker {empty / 2**20:.1f} MiB, idle connection {each / 1024:.1f} KiB"
        print(figures)  # noqa: T201 - the figures are wanted as such, `pytest -s` shows them
        assert each <= CONNECTION_BYTES_MAX, f"an idle connection costs {each / 1024:.1f} KiB"
        for writer in writers:
            writer.transport.abort()
        await happens(lambda: _connections(server) == 0, what="all connections are gone")


def _connections(server: DevServer) -> int:
    status = server.status()
    return -1 if status is None else sum(int(row["connections"]) for row in status["workers"])

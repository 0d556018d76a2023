"""A gateway on a real loopback TLS socket, a router that only records, and a client that speaks raw bytes.

The clock is moved by hand and the deadlines are swept by hand, so no test waits for time to pass.
"""

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Self

import trustme
import uvloop

from qim import limits
from qim.clock import ManualClock
from qim.domain.gateway import Destination, GatewayLimits
from qim.ids import (
    ClientMessageId,
    ConversationId,
    DeviceId,
    MailboxSeq,
    MessageId,
    Millis,
    Seq,
    SessionId,
    TenantId,
    UserId,
    WorkerId,
)
from qim.metrics import Metrics
from qim.records import Kind, MessageRecord, build_entry, encode_record
from qim.tokens import TokenVerifier, generate_key_pair, mint_token
from qim.wire.bodies import Auth, AuthAck, SendMessage, Target, build_message, decode_body
from qim.wire.frames import Frame, FrameSplitter, build_frame
from qim.wire.layout import ALPN, Op
from qim.wire.link import Announce
from tests.waiting import happens
from workers.gateway import Gateway
from workers.outbound import Outbound
from workers.request import Request

TENANT: Final = TenantId(7)
ALICE, BOB = UserId(b"a" * 16), UserId(b"b" * 16)
PHONE, TABLET = DeviceId(b"p" * 16), DeviceId(b"t" * 16)
NEWEST: Final = MailboxSeq(41)
OWNER: Final = WorkerId(0)
KEY_ID: Final = "k1"
ANSWER_SECONDS: Final = 10.0


@functools.cache
def signing_key() -> tuple[bytes, bytes]:
    return generate_key_pair()


@functools.cache
def certificate() -> tuple[trustme.CA, trustme.LeafCert]:
    authority = trustme.CA()
    return authority, authority.issue_cert("localhost", key_type=trustme.KeyType.ECDSA)


def server_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    certificate()[1].configure_cert(context)
    return context


def client_tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols([ALPN])
    certificate()[0].configure_trust(context)
    return context


def token(clock: ManualClock, *, user: UserId = ALICE, life_ms: int = 3_600_000, **changes: Any) -> str:
    claims: dict[str, Any] = {
        "tenant": TENANT,
        "user": user,
        "expires_at_ms": Millis(clock.now_ms() + life_ms),
        "issuer": "qim",
        "audience": "qim",
    }
    return mint_token(signing_key()[0], KEY_ID, **(claims | changes))


def send_body(text: bytes = b"hello", *, peer: bytes = BOB, kind: int = 1, **changes: Any) -> bytes:
    fields: dict[str, Any] = {"message_type": 1, "custom_type": ""}
    return build_message(
        Op.SEND_MESSAGE,
        0,
        SendMessage(Target(kind, peer), b"c" * 16, body=text, **(fields | changes)),  # type: ignore[arg-type]  # plain values stand for ids
    )[12:]


class RecordingRouter:
    """Notes what the gateway hands over; announcements are answered at once unless told otherwise."""

    def __init__(self) -> None:
        self.gateway: Gateway | None = None
        self.requests: list[tuple[Request, Destination]] = []
        self.announced: list[Announce] = []
        self.withdrawn: list[SessionId] = []
        self.reachable = True
        self.answers = True

    def route(self, request: Request, destination: Destination) -> None:
        self.requests.append((request, destination))

    def owner_of_user(self, tenant: TenantId, user: UserId) -> WorkerId:
        return OWNER

    def announce(self, owner: WorkerId, announce: Announce) -> bool:
        self.announced.append(announce)
        if self.reachable and self.answers:
            assert self.gateway is not None
            self.gateway.logins.announced(announce.handle, announce.generation, NEWEST)
        return self.reachable

    def withdraw(self, owner: WorkerId, tenant: TenantId, user: UserId, session: SessionId) -> None:
        self.withdrawn.append(session)


class RawClient:
    """One TLS connection: bytes out, frames in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._splitter = FrameSplitter()
        self._frames: list[Frame] = []

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def frame(self) -> Frame:
        """The next frame; fails at the end of the stream."""
        async with asyncio.timeout(ANSWER_SECONDS):
            while not self._frames:
                data = await self.reader.read(65_536)
                assert data, "the connection ended"
                self._frames += self._splitter.feed(data)
        return self._frames.pop(0)

    async def body(self, op: Op) -> Any:
        """The body of the next frame, which must have this opcode."""
        frame = await self.frame()
        assert frame.opcode == op, (frame.opcode, frame.body)
        return decode_body(op, frame.body)

    async def rest(self) -> list[Frame]:
        """Every frame until the server ends the connection."""
        async with asyncio.timeout(ANSWER_SECONDS):
            while True:
                try:
                    data = await self.reader.read(65_536)
                except ConnectionError:
                    break
                if not data:
                    break
                self._frames += self._splitter.feed(data)
        frames, self._frames = self._frames, []
        return frames

    async def goaway(self) -> Any:
        """The reason with which the server ends the connection, its last frame."""
        frames = await self.rest()
        assert frames, "ended without a reason"
        assert frames[-1].opcode == Op.GOAWAY
        return decode_body(Op.GOAWAY, frames[-1].body)

    async def log_in(self, token_text: str, *, device: DeviceId = PHONE) -> AuthAck:
        self.send(build_message(Op.AUTH, 1, Auth(token_text, device)))
        answer: AuthAck = await self.body(Op.AUTH_ACK)
        return answer

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS):
                await self.writer.wait_closed()


class GatewayRig:
    """One gateway that listens, and everything it was made of."""

    def __init__(self, *, handshake_timeout_ms: int = limits.TLS_HANDSHAKE_TIMEOUT_MS, **bounds: Any) -> None:
        self._handshake_timeout_ms = handshake_timeout_ms
        self.clock = ManualClock()
        self.router = RecordingRouter()
        self.metrics = Metrics()
        self.bounds = GatewayLimits(**bounds)
        self.port = 0
        self._clients: list[RawClient] = []

    async def __aenter__(self) -> Self:
        self.gateway = Gateway(
            router=self.router,
            tokens=TokenVerifier({KEY_ID: signing_key()[1]}, issuer="qim", audience="qim", clock=self.clock),
            clock=self.clock,
            outbound=Outbound(asyncio.get_running_loop()),
            bounds=self.bounds,
            metrics=self.metrics,
            tls=server_tls(),
        )
        self.router.gateway = self.gateway
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        await self.gateway.listen(listener, handshake_timeout_ms=self._handshake_timeout_ms)
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            await client.close()
        # What still owes an answer will not get one: the deadline is now.
        await self.gateway.drain(self.clock.monotonic())
        await self._connections_gone()

    async def _connections_gone(self) -> None:
        await happens(lambda: not self.gateway.open_sockets, what="every socket is closed")

    async def connect(self) -> RawClient:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=client_tls(), server_hostname="localhost"
        )
        client = RawClient(reader, writer)
        self._clients.append(client)
        return client

    async def logged_in(self, *, user: UserId = ALICE, device: DeviceId = PHONE) -> RawClient:
        client = await self.connect()
        await client.log_in(token(self.clock, user=user), device=device)
        return client

    async def requests(self, count: int) -> Sequence[Request]:
        """The requests that have reached the router, once there are so many."""
        await happens(lambda: len(self.router.requests) >= count, what="the requests have arrived")
        return [request for request, _ in self.router.requests]

    def pass_time(self, *, milliseconds: int) -> None:
        """Moves the clock and sweeps, as the timer would."""
        self.clock.advance(milliseconds=milliseconds)
        self.gateway.sweep()


CONVERSATION = ConversationId(b"v" * 16)


def send_frame(request_id: int, text: bytes = b"hello", **changes: Any) -> bytes:
    return build_frame(Op.SEND_MESSAGE, request_id, send_body(text, **changes))


def entry(seq: int = 1, body: bytes = b"hello") -> bytes:
    record = MessageRecord(
        version=1, tenant=TENANT, conversation_id=CONVERSATION, kind=Kind.DIRECT, parties=ALICE + BOB,
        message_id=MessageId(b"m" * 16), sender=ALICE, sender_device=PHONE,
        client_message_id=ClientMessageId(b"c" * 16), message_type=1, custom_type="", body=body,
        retention_class=0, reserved_at=Millis(1), membership_version=0,
    )  # fmt: skip
    return build_entry(Seq(seq), encode_record(record))


Scenario = Callable[[], Coroutine[Any, Any, None]]


def run_on_uvloop(scenario: Scenario) -> None:
    """Workers run on uvloop, tests and the simulation on the stock loop; some things must hold on both."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())

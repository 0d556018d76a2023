"""A server of one user for the SDK's tests: the real server codec over real TLS, the rest is a few lists.

It keeps conversations, one mailbox and the identities it has seen, so a resend meets the same coordinates as
on the real server. What goes wrong is asked for by name: refuse the next requests of an opcode, swallow
acknowledgements and cut, lose a push, ask for a rebuild. `frames` is the record of what the client sent.
"""

import asyncio
import base64
import json
import ssl
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trustme

from qim.errors import ClientError, Conflict, Unsupported
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
)
from qim.limits import READ_BUFFER_BYTES
from qim.records import Kind, MessageRecord, build_entry, encode_record, identity_digest, message_id_of
from qim.wire import bodies
from qim.wire.connection import ServerConnection
from qim.wire.frames import Frame
from qim.wire.layout import ALPN, Op

TENANT = TenantId(7)
ME = UserId(b"m" * 16)
PEER = UserId(b"p" * 16)
OTHER = UserId(b"q" * 16)
SERVER_TIME = 1_700_000_000_000


def build_token(user: UserId = ME, *, tenant: int = TENANT, device: bytes | None = None) -> str:
    claims: dict[str, Any] = {"tenant": tenant, "sub": user.hex(), "aud": "qim"}
    if device is not None:
        claims["dev"] = device.hex()
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"header.{body}.SECRETSIGNATURE"


def conversation_of(peer: UserId) -> ConversationId:
    return ConversationId(peer[:8] + b"convers.")


def build_record(
    *, peer: UserId, sender: UserId, body: bytes, cmid: bytes, reserved_at: int, message_id: bytes = b"",
    message_type: int = 1, retention_class: int = 0, device: bytes = bytes(16),
) -> MessageRecord:  # fmt: skip
    return MessageRecord(
        version=1, tenant=TENANT, conversation_id=conversation_of(peer), kind=Kind.DIRECT,
        parties=min(ME, peer) + max(ME, peer), message_id=MessageId(message_id or cmid), sender=sender,
        sender_device=DeviceId(device), client_message_id=ClientMessageId(cmid), message_type=message_type,
        custom_type="", body=body, retention_class=retention_class, reserved_at=Millis(reserved_at),
        membership_version=0,
    )  # fmt: skip


class FakeServer:
    """See the module docstring."""

    def __init__(self) -> None:
        authority = trustme.CA()
        self.authority = authority
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_3
        self._tls.set_alpn_protocols([ALPN])
        authority.issue_cert("127.0.0.1", "localhost").configure_cert(self._tls)
        self.frames: list[tuple[int, Any]] = []
        self.refusals: defaultdict[int, deque[ClientError]] = defaultdict(deque)
        self.silent_ops: set[int] = set()
        self.acks_to_swallow = 0
        self.login_refusal: ClientError | None = None
        self.is_rebuild_due = False
        self.pushes_echo = True
        self.logins = 0
        self.heartbeat_ms = 25_000
        self.devices: list[bytes] = []
        self.server_time = SERVER_TIME
        self.watermark = 100
        self.mailbox: list[tuple[int, bytes]] = []
        self.history: defaultdict[ConversationId, list[MessageRecord]] = defaultdict(list)
        self.earliest = 1
        self._seen: dict[bytes, tuple[bytes, bodies.SendAck]] = {}
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None
        self.port = 0

    # --- life

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        """Ends every connection without a word."""
        for writer in self._connections.values():
            writer.transport.abort()

    def goaway(self, error: ClientError, *, reconnect_after_ms: int = 0) -> None:
        self._broadcast(bodies.build_goaway(error, reconnect_after_ms=reconnect_after_ms))
        for writer in self._connections.values():
            writer.close()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    # --- what tests do and ask

    def received(self, op: int) -> list[Any]:
        return [body for seen, body in self.frames if seen == op]

    def deliver(
        self, text: str, *, peer: UserId = PEER, push: bool = True, previous: int | None = None
    ) -> int:
        """A message of the peer arrives in the mailbox; returns its mailbox_seq."""
        number = len(self.history[conversation_of(peer)]) + 1
        cmid = peer[:8] + number.to_bytes(8, "big")
        record = build_record(
            peer=peer, sender=peer, body=text.encode(), cmid=cmid, reserved_at=self.server_time + number
        )
        return self._commit(record, push=push, previous=previous)

    def push(self, mailbox_seq: int, *, previous: int) -> None:
        entry = dict(self.mailbox)[mailbox_seq]
        self._broadcast(*bodies.build_push([(previous, mailbox_seq, entry)]))

    def newest(self) -> int:
        return self.mailbox[-1][0] if self.mailbox else 0

    @contextmanager
    def silence(self, op: int) -> Iterator[None]:
        self.silent_ops.add(op)
        yield
        self.silent_ops.discard(op)

    def _commit(
        self, record: MessageRecord, *, push: bool, previous: int | None = None, echo: bool = False
    ) -> int:
        log = self.history[record.conversation_id]
        log.append(record)
        before = self.newest()
        self.watermark += 3
        seq = self.watermark
        entry = build_entry(Seq(len(log)), encode_record(record))
        self.mailbox.append((seq, entry))
        if push:
            if echo:
                entry = bodies.build_echo_entry(Seq(len(log)), record.conversation_id)
            self._broadcast(*bodies.build_push([(before if previous is None else previous, seq, entry)]))
        return seq

    def _broadcast(self, *frames: bytes) -> None:
        for writer in self._connections.values():
            writer.write(b"".join(frames))

    # --- one connection

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = ServerConnection()
        try:
            while data := await reader.read(READ_BUFFER_BYTES):
                for frame in connection.receive(data):
                    self._on_frame(frame, connection, writer, task)
        except (OSError, ssl.SSLError):
            pass
        finally:
            self._connections.pop(task, None)
            writer.close()

    def _on_frame(
        self,
        frame: Frame,
        connection: ServerConnection,
        writer: asyncio.StreamWriter,
        task: "asyncio.Task[None]",
    ) -> None:
        op, request_id, raw = frame.opcode, frame.request_id, frame.body
        body = bodies.decode_body(op, raw)
        self.frames.append((op, body))
        if op in self.silent_ops:
            return
        if self.refusals[op]:
            writer.write(bodies.build_error(request_id, self.refusals[op].popleft()))
            return
        match op:
            case Op.AUTH:
                if self.login_refusal is not None:
                    writer.write(bodies.build_error(request_id, self.login_refusal))
                    writer.close()
                    return
                if connection.state.value == "authenticating":
                    connection.authenticated()
                    self._connections[task] = writer
                    self.logins += 1
                    self.devices.append(body.device_id)
                ack = bodies.AuthAck(
                    ME,
                    SessionId(b"s" * 16),
                    Millis(self.server_time),
                    self.heartbeat_ms,
                    {},
                    MailboxSeq(self.newest()),
                )
                writer.write(bodies.build_message(Op.AUTH_ACK, request_id, ack))
            case Op.PING:
                pong = bodies.Pong(Millis(self.server_time), MailboxSeq(self.newest()))
                writer.write(bodies.build_message(Op.PONG, request_id, pong))
            case Op.SEND_MESSAGE:
                self._on_send(request_id, body, writer)
            case Op.PULL_MAILBOX:
                writer.write(self._page(request_id, body))
            case Op.PULL_HISTORY:
                writer.write(self._history_page(request_id, body))
            case Op.MARK_READ:
                answer = bodies.MarkReadAck(conversation_of(UserId(body.target.id)), body.read_seq, 0)
                writer.write(bodies.build_message(Op.MARK_READ_ACK, request_id, answer))
            case _:
                writer.write(bodies.build_error(request_id, Unsupported("later")))

    def _on_send(self, request_id: int, body: bodies.SendMessage, writer: asyncio.StreamWriter) -> None:
        peer = UserId(body.target.id)
        identity = identity_digest(
            tenant=TENANT, conversation=conversation_of(peer), sender=ME,
            client_message_id=body.client_message_id, message_type=body.message_type,
            retention_class=body.retention_class, custom_type=body.custom_type, body=body.body,
        )  # fmt: skip
        known = self._seen.get(body.client_message_id)
        if known is not None and known[0] != identity:
            writer.write(bodies.build_error(request_id, Conflict("other content")))
            return
        is_repeat = known is not None
        if known is None:
            record = build_record(
                peer=peer, sender=ME, body=body.body, cmid=body.client_message_id,
                reserved_at=self.server_time,
                message_id=message_id_of(identity), message_type=body.message_type,
                retention_class=body.retention_class,
            )  # fmt: skip
            seq = Seq(len(self.history[record.conversation_id]) + 1)
            ack = bodies.SendAck(
                body.client_message_id,
                record.conversation_id,
                seq,
                record.message_id,
                record.reserved_at,
                False,
            )
            known = self._seen[body.client_message_id] = (identity, ack)
            if self.acks_to_swallow:
                self._commit(record, push=False)
            else:
                # The real pipeline acknowledges first; the echo follows from the mailbox.
                writer.write(bodies.build_message(Op.SEND_ACK, request_id, ack))
                self._commit(record, push=self.pushes_echo, echo=True)
                return
        if self.acks_to_swallow:
            self.acks_to_swallow -= 1
            writer.transport.abort()
            return
        fields = {name: getattr(known[1], name) for name in known[1].__struct_fields__}
        writer.write(
            bodies.build_message(
                Op.SEND_ACK, request_id, bodies.SendAck(**{**fields, "duplicate": is_repeat})
            )
        )

    def _page(self, request_id: int, body: bodies.PullMailbox) -> bytes:
        watermark = MailboxSeq(self.watermark)
        if self.is_rebuild_due:
            self.is_rebuild_due = False
            return bodies.build_mailbox_batch(
                request_id, entries=[], covered_through=watermark, more=False, rebuild=True
            )
        after = body.after_mailbox_seq
        held = [seq for seq, _ in self.mailbox if after < seq <= body.held_through]
        if body.held_through and len(held) == body.held_count:
            return bodies.build_mailbox_batch(
                request_id,
                entries=[],
                covered_through=body.held_through,
                more=self.newest() > body.held_through,
                rebuild=False,
            )
        rest = [(MailboxSeq(seq), entry) for seq, entry in self.mailbox if seq > after]
        page = rest[: body.limit]
        more = len(page) < len(rest)
        covered = page[-1][0] if more else watermark
        return bodies.build_mailbox_batch(
            request_id, entries=page, covered_through=covered, more=more, rebuild=False
        )

    def _history_page(self, request_id: int, body: bodies.PullHistory) -> bytes:
        conversation_id = conversation_of(UserId(body.target.id))
        log = self.history[conversation_id]
        top = min(len(log), body.before_seq - 1) if body.before_seq else len(log)
        low = max(self.earliest, top - body.limit + 1)
        records = [(Seq(seq), encode_record(log[seq - 1])) for seq in range(top, low - 1, -1)]
        return bodies.build_history_batch(
            request_id, conversation_id=conversation_id, records=records,
            earliest_available_seq=Seq(self.earliest if log else 0), head_seq=Seq(len(log)),
            more=low > self.earliest and bool(records),
        )  # fmt: skip

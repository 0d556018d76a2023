"""A client without opinions: the real codec over a real TLS socket, nothing resent, nothing stored.

Tests of the server speak through it where the SDK would hide what they look for: duplicates, unknown
outcomes, the exact answer to a broken request. One reader task sorts frames into answers (by request id)
and pushes. When the connection ends, every open request fails with ConnectionError and the GOAWAY that
came before it, if any, is kept in `goaway`.
"""

import asyncio
import contextlib
import os
import ssl
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from blake3 import blake3
from qim.wire.frames import Frame, FrameSplitter

from qim.ids import ClientMessageId, DeviceId, MailboxSeq, Seq
from qim.records import Entry, Kind, MessageType, decode_entry
from qim.wire import bodies
from qim.wire.layout import ALPN, Op

ANSWER_SECONDS_MAX = 20.0


def client_context(ca: Path) -> ssl.SSLContext:
    """TLS 1.3 and our protocol only."""
    context = ssl.create_default_context(cafile=str(ca))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    return context


def text_message(peer: bytes, text: str, *, cmid: bytes | None = None) -> bodies.SendMessage:
    """A TEXT to a user, under a fresh or a given client_message_id."""
    return bodies.SendMessage(
        target=bodies.Target(Kind.DIRECT, peer),
        client_message_id=ClientMessageId(cmid or os.urandom(16)),
        message_type=MessageType.TEXT,
        custom_type="",
        body=text.encode(),
    )


class RawClient:
    """One connection of one user."""

    def __init__(self, host: str, port: int, ca: Path, *, token: str, device: bytes | None = None) -> None:
        self.host, self.port, self.ca, self.token = host, port, ca, token
        self.device = DeviceId(device or os.urandom(16))
        self.pushed: list[tuple[int, int, bytes]] = []
        self.goaway: bodies.GoAway | None = None
        self.ack: bodies.AuthAck | None = None
        self._answers: dict[int, asyncio.Future[Frame]] = {}
        self._splitter = FrameSplitter()
        self._next_request = 0
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(
            self.host, self.port, ssl=client_context(self.ca), server_hostname="localhost"
        )
        self._reading = asyncio.create_task(self._read())
        if self.token:
            frame = await self.request(Op.AUTH, bodies.Auth(token=self.token, device_id=self.device))
            body = bodies.decode_body(frame.opcode, frame.body)
            assert isinstance(body, bodies.AuthAck), body
            self.ack = body
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        assert self._reading is not None
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading

    def close(self) -> None:
        """Ends the connection without ceremony, as a lost network would."""
        self.writer.transport.abort()
        if self._reading is not None:
            self._reading.cancel()

    def post(self, op: Op, body: Any) -> asyncio.Future[Frame]:
        """Writes a request and returns its future answer; many may be on their way."""
        self._next_request += 1
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._answers[self._next_request] = answer
        self.writer.write(bodies.build_message(op, self._next_request, body))
        return answer

    async def request(self, op: Op, body: Any) -> Frame:
        """One request and its answer."""
        return await asyncio.wait_for(self.post(op, body), ANSWER_SECONDS_MAX)

    async def ask(self, op: Op, body: Any) -> Any:
        """One request and its decoded answer; an ERROR body comes back as it is."""
        frame = await self.request(op, body)
        return bodies.decode_body(frame.opcode, frame.body)

    async def send(self, peer: bytes, text: str, *, cmid: bytes | None = None) -> Any:
        return await self.ask(Op.SEND_MESSAGE, text_message(peer, text, cmid=cmid))

    async def drain_mailbox(self, *, after: int = 0) -> list[tuple[int, Entry]]:
        """Every entry behind a cursor, page by page."""
        entries: list[tuple[int, Entry]] = []
        while True:
            page = await self.ask(
                Op.PULL_MAILBOX, bodies.PullMailbox(after_mailbox_seq=MailboxSeq(after), limit=300)
            )
            assert isinstance(page, bodies.MailboxBatch), page
            entries.extend((seq, decode_entry(bytes(raw))) for seq, raw in page.entries)
            after = page.covered_through
            if not page.more:
                return entries

    async def history(self, peer: bytes) -> list[Entry]:
        """The whole history with a user, oldest first."""
        records: list[Entry] = []
        before = Seq(0)
        target = bodies.Target(Kind.DIRECT, peer)
        while True:
            page = await self.ask(
                Op.PULL_HISTORY, bodies.PullHistory(target=target, before_seq=before, limit=300)
            )
            assert isinstance(page, bodies.HistoryBatch), page
            records.extend(decode_entry(bytes(raw)) for raw in page.records)
            if not page.more:
                return records[::-1]
            before = records[-1].conversation_seq

    async def _read(self) -> None:
        try:
            while data := await self.reader.read(262_144):
                for frame in self._splitter.feed(data):
                    self._on_frame(frame)
        except (OSError, ssl.SSLError):
            pass
        finally:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(ConnectionError("the connection ended before the answer"))
                    answer.exception()
            self._answers.clear()

    def _on_frame(self, frame: Frame) -> None:
        answer = self._answers.pop(frame.request_id, None)
        if answer is not None:
            if not answer.done():
                answer.set_result(frame)
        elif frame.opcode == Op.PUSH_EVENTS:
            body = bodies.decode_body(frame.opcode, frame.body)
            assert isinstance(body, bodies.PushEvents)
            self.pushed.extend((previous, seq, bytes(raw)) for previous, seq, raw in body.events)
        elif frame.opcode == Op.GOAWAY:
            body = bodies.decode_body(frame.opcode, frame.body)
            assert isinstance(body, bodies.GoAway)
            self.goaway = body


def user_id(name: str) -> bytes:
    """The id of a user known by name; demo users and test users are made this way."""
    return blake3(b"qim.user.v1" + name.encode()).digest(16)

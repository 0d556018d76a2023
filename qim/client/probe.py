"""A client without opinions: the real codec over a real TLS socket, nothing resent, nothing stored.

The demo, operators' checks and the tests of the server speak through it where the SDK would hide what they
look for: duplicates, unknown outcomes, the exact answer to a broken request. One reader task sorts frames
into answers (by request id) and pushes. When the connection ends, every open request fails with
ConnectionError, and the GOAWAY that came before it, if any, is kept in `goaway`.

Not for applications: it forgets everything with the connection.
"""

import asyncio
import contextlib
import os
import ssl
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from msgspec import Struct

from qim.client.transport import build_tls_context
from qim.errors import RemoteProtocolError
from qim.ids import ClientMessageId, DeviceId, MailboxSeq, Seq
from qim.limits import PAGE_ENTRIES_MAX, READ_BUFFER_BYTES
from qim.records import Entry, Kind, MessageType, decode_entry
from qim.wire import bodies
from qim.wire.frames import Frame, FrameSplitter
from qim.wire.layout import Op

ANSWER_SECONDS_MAX: Final = 20.0

B = TypeVar("B", bound=Struct)


def expect(kind: type[B], body: Struct) -> B:
    """The body, if it is of this kind; otherwise RemoteProtocolError names what came instead."""
    if not isinstance(body, kind):
        raise RemoteProtocolError(f"expected {kind.__name__}, got {body!r}")
    return body


def text_message(peer: bytes, text: str, *, cmid: bytes | None = None) -> bodies.SendMessage:
    """A TEXT to a user, under a fresh or a given client_message_id."""
    return bodies.SendMessage(
        target=bodies.Target(Kind.DIRECT, peer),
        client_message_id=ClientMessageId(cmid or os.urandom(16)),
        message_type=MessageType.TEXT,
        custom_type="",
        body=text.encode(),
    )


class Probe:
    """One connection of one user. Without a token nothing is sent at the start."""

    def __init__(
        self, host: str, port: int, ca: Path, *, token: str = "", device: bytes | None = None
    ) -> None:
        self.host, self.port, self.ca = host, port, ca
        self._token = token
        self.device = DeviceId(device or os.urandom(16))
        self.pushed: list[tuple[int, int, bytes]] = []
        """(previous, mailbox_seq, entry or echo) in order of arrival."""
        self.goaway: bodies.GoAway | None = None
        self.ack: bodies.AuthAck | None = None
        self._answers: dict[int, asyncio.Future[Frame]] = {}
        self._splitter = FrameSplitter()
        self._next_request = 0

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(
            self.host, self.port, ssl=build_tls_context(self.ca), server_hostname="localhost"
        )
        self._reading = asyncio.create_task(self._read())
        if self._token:
            auth = bodies.Auth(token=self._token, device_id=self.device, client_name="probe")
            self.ack = expect(bodies.AuthAck, await self.ask(Op.AUTH, auth))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading

    def close(self) -> None:
        """Ends the connection without ceremony, as a lost network would."""
        self.writer.transport.abort()
        self._reading.cancel()

    async def closed(self) -> None:
        """Returns when the server has ended the connection."""
        await asyncio.wait({self._reading}, timeout=ANSWER_SECONDS_MAX)
        if not self._reading.done():
            raise TimeoutError("the server did not end the connection")

    def post(self, op: Op, body: Struct) -> asyncio.Future[Frame]:
        """Writes a request and returns its future answer; many may be on their way."""
        self._next_request += 1
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        if self._reading.done():
            answer.set_exception(ConnectionError("the connection has ended"))
            answer.exception()  # nobody may be waiting for this one
            return answer
        self._answers[self._next_request] = answer
        self.writer.write(bodies.build_message(op, self._next_request, body))
        return answer

    async def ask(self, op: Op, body: Struct) -> Struct:
        """One request and its decoded answer; a refusal is the answer `bodies.Error`."""
        frame = await asyncio.wait_for(self.post(op, body), ANSWER_SECONDS_MAX)
        answer: Struct = bodies.decode_body(frame.opcode, frame.body)
        return answer

    async def send(self, peer: bytes, text: str, *, cmid: bytes | None = None) -> Struct:
        """SendAck, or Error."""
        return await self.ask(Op.SEND_MESSAGE, text_message(peer, text, cmid=cmid))

    async def drain_mailbox(self, *, after: int = 0) -> list[tuple[int, Entry]]:
        """Every entry behind a cursor, page by page."""
        entries: list[tuple[int, Entry]] = []
        while True:
            pull = bodies.PullMailbox(after_mailbox_seq=MailboxSeq(after), limit=PAGE_ENTRIES_MAX)
            page = expect(bodies.MailboxBatch, await self.ask(Op.PULL_MAILBOX, pull))
            entries.extend((seq, decode_entry(bytes(raw))) for seq, raw in page.entries)
            after = page.covered_through
            if not page.more:
                return entries

    async def history(self, peer: bytes) -> list[Entry]:
        """The whole history with a user, oldest first."""
        records: list[Entry] = []
        target, before = bodies.Target(Kind.DIRECT, peer), Seq(0)
        while True:
            pull = bodies.PullHistory(target=target, before_seq=before, limit=PAGE_ENTRIES_MAX)
            page = expect(bodies.HistoryBatch, await self.ask(Op.PULL_HISTORY, pull))
            records.extend(decode_entry(bytes(raw)) for raw in page.records)
            if not page.more:
                return records[::-1]
            before = records[-1].conversation_seq

    async def _read(self) -> None:
        try:
            while data := await self.reader.read(READ_BUFFER_BYTES):
                for frame in self._splitter.feed(data):
                    self._on_frame(frame)
        except (OSError, ssl.SSLError):
            pass  # an ended connection is what the open requests are told below
        finally:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(ConnectionError("the connection ended before the answer"))
                    answer.exception()  # nobody may be waiting for this one
            self._answers.clear()

    def _on_frame(self, frame: Frame) -> None:
        answer = self._answers.pop(frame.request_id, None)
        if answer is not None:
            if not answer.done():
                answer.set_result(frame)
            return
        body = bodies.decode_body(frame.opcode, frame.body)
        if isinstance(body, bodies.PushEvents):
            self.pushed.extend((previous, seq, bytes(raw)) for previous, seq, raw in body.events)
        elif isinstance(body, bodies.GoAway):
            self.goaway = body

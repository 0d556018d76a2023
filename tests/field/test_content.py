"""O18: awkward content comes back byte for byte on every path, or is refused before it costs a sequence.

Paths: acknowledgement, push, mailbox, history, and the store of the SDK. The same bodies are tried as
`custom_type`. There are no groups and no names yet, so there is nothing else in which content could stand.
"""

import asyncio
import re
import time
from pathlib import Path

import msgspec
import pytest

from qim.client import AsyncClient, MessageRejected
from qim.client.probe import Probe, expect, text_message
from qim.errors import InvalidArgument, TooLarge
from qim.limits import CUSTOM_TYPE_BYTES_MAX, MESSAGE_BODY_BYTES_MAX
from qim.records import MessageType, decode_entry
from qim.wire import bodies
from qim.wire.frames import build_frame
from qim.wire.layout import Op
from tests.field.figures import Figures
from tests.process.load import Account
from tests.rows.world import new_account, probe_of
from tests.services.dev_server import DevServer
from tests.waiting import eventually_async, happens

TEXTS = {
    "empty": "",
    "one byte": "a",
    "NUL first": "\0after",
    "NUL in the middle": "be\0tween",
    "NUL last": "before\0",
    "a family of four, joined": "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "composed": "\u00e9",
    "decomposed": "e\u0301",
    "right to left with an override": "\u05e9\u05dc\u05d5\u05dd \u202egnp.exe\u202c",
    "line separator": "a\u2028b\u2029c",
    "byte order mark": "\ufeffbom",
    "newlines to the limit": "\n" * MESSAGE_BODY_BYTES_MAX,
    "a wide character up to the limit": "x" * (MESSAGE_BODY_BYTES_MAX - 4) + "\U0001f600",
    "JSON": '{"op": "drop", "x": [1, null]}',
    "SQL": "'; DROP TABLE message; --",
    "format strings": "%s %n {0} {} ${HOME} {{7*7}}",
    "terminal": "\x1b[31mred\x1b[0m\r\nX-Header: 1\x07",
    "keys of the store": "{b000}:\r\n*1\r\n$4\r\nPING\r\n",
}
BROKEN = {
    "invalid": b"\xff\xfe",
    "cut in the middle of a character": "\U0001f600".encode()[:3],
    "overlong NUL": b"\xc0\x80",
    "lone surrogate": b"\xed\xa0\x80",
    "beyond the last character": b"\xf4\x90\x80\x80",
}
TOO_LONG = {
    "a byte too many": "x" * (MESSAGE_BODY_BYTES_MAX + 1),
    "a character across the limit": "x" * (MESSAGE_BODY_BYTES_MAX - 2) + "\U0001f600",
}


def with_body(peer: Account, body: bytes, *, kind: MessageType = MessageType.TEXT) -> bodies.SendMessage:
    return msgspec.structs.replace(text_message(peer.user, ""), body=body, message_type=kind)


async def send(probe: Probe, message: bodies.SendMessage) -> msgspec.Struct:
    return await probe.ask(Op.SEND_MESSAGE, message)


@pytest.mark.shows("O18")
async def test_every_text_is_the_same_bytes_on_every_path(
    server: DevServer, pair: tuple[Account, Account], tmp_path: Path, figures: Figures
) -> None:
    sender, receiver = pair
    wanted = {name: text.encode() for name, text in TEXTS.items()}
    address = f"127.0.0.1:{server.port}"
    ca = server.certificate
    async with (
        AsyncClient(address, sender.token, ca=ca, data_dir=tmp_path / "one") as one,
        AsyncClient(address, receiver.token, ca=ca, data_dir=tmp_path / "two") as two,
        probe_of(server, receiver) as probe,
    ):
        for text in TEXTS.values():
            await one.send(receiver.user, text)
        await happens(lambda: len(probe.pushed) == len(wanted), what="all are pushed")
        paths = {
            "push": [decode_entry(raw).record.body for _, _, raw in probe.pushed],
            "mailbox": [entry.record.body for _, entry in await probe.drain_mailbox()],
            "history": [entry.record.body for entry in await probe.history(sender.user)],
            "store of the sender": [m.body for m in await one.messages(receiver.user, limit=1_000)],
        }

        async def arrived() -> bool:
            return len(await two.messages(sender.user, limit=1_000)) == len(wanted)

        await eventually_async(arrived, what="all are stored by the receiver")
        paths["store of the receiver"] = [m.body for m in await two.messages(sender.user, limit=1_000)]
    for path, found in paths.items():
        assert found == list(wanted.values()), f"other bytes by {path}"
    figures.note("texts", len(wanted))
    figures.note("paths compared", len(paths))


@pytest.mark.shows("O18", "X16")
async def test_what_is_no_text_is_refused_by_server_and_sdk_alike_and_costs_nothing(
    server: DevServer, pair: tuple[Account, Account], tmp_path: Path
) -> None:
    sender, receiver = pair
    async with (
        AsyncClient(
            f"127.0.0.1:{server.port}", sender.token, ca=server.certificate, data_dir=tmp_path
        ) as client,
        probe_of(server, sender) as probe,
    ):
        for body in BROKEN.values():
            refused = expect(bodies.Error, await send(probe, with_body(receiver, body)))
            assert (refused.code, refused.retry_after_ms) == (InvalidArgument.code, 0)
            with pytest.raises(MessageRejected) as locally:
                await client.send(receiver.user, body, message_type=MessageType.TEXT)
            assert locally.value.code == InvalidArgument.code
        with pytest.raises(MessageRejected):
            await client.send(receiver.user, "\ud800")
        for text in TOO_LONG.values():
            refused = expect(bodies.Error, await send(probe, with_body(receiver, text.encode())))
            assert refused.code == TooLarge.code
            with pytest.raises(MessageRejected) as locally:
                await client.send(receiver.user, text)
            assert locally.value.code == TooLarge.code
        # As what it is, bytes, all of it is welcome.
        for body in BROKEN.values():
            ack = await send(probe, with_body(receiver, body, kind=MessageType.CUSTOM))
            assert isinstance(ack, bodies.SendAck)
        history = await probe.history(receiver.user)
    assert [entry.record.body for entry in history] == list(BROKEN.values())
    assert [int(entry.conversation_seq) for entry in history] == list(range(1, len(BROKEN) + 1))


@pytest.mark.shows("O18")
async def test_a_custom_type_is_text_of_at_most_128_bytes(
    server: DevServer, pair: tuple[Account, Account]
) -> None:
    sender, receiver = pair
    kept = {name: text for name, text in TEXTS.items() if len(text.encode()) <= CUSTOM_TYPE_BYTES_MAX}
    async with probe_of(server, sender) as probe:
        model = with_body(receiver, b"x", kind=MessageType.CUSTOM)
        for text in kept.values():
            fresh = msgspec.structs.replace(
                model, custom_type=text, client_message_id=text_message(receiver.user, "").client_message_id
            )
            assert isinstance(await send(probe, fresh), bodies.SendAck)
        long = msgspec.structs.replace(model, custom_type="\u00e9" * (CUSTOM_TYPE_BYTES_MAX // 2) + "x")
        assert expect(bodies.Error, await send(probe, long)).code == TooLarge.code
        history = await probe.history(receiver.user)
    assert [entry.record.custom_type for entry in history] == list(kept.values())


@pytest.mark.shows("O18", "F-46")
async def test_frames_without_a_body_are_an_error_of_theirs_and_the_connection_lives(
    server: DevServer, pair: tuple[Account, Account]
) -> None:
    sender, receiver = pair
    async with probe_of(server, sender) as probe:
        for number, op in enumerate((Op.SEND_MESSAGE, Op.PULL_MAILBOX, Op.PULL_HISTORY, Op.MARK_READ)):
            request_id = 1_000 + number
            answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            probe._answers[request_id] = answer  # type: ignore[assignment]  # its frame is what we look at
            probe.writer.write(build_frame(op, request_id, b""))
            frame = await asyncio.wait_for(answer, 10)
            assert getattr(frame, "opcode") == Op.ERROR  # noqa: B009 - the future is typed as any object
        assert isinstance(await probe.send(receiver.user, ""), bodies.SendAck)


@pytest.mark.shows("O18", "T14")
async def test_nothing_of_a_message_is_in_a_log_and_no_control_character(server: DevServer) -> None:
    mark = f"canary {time.monotonic_ns()}"
    sender, receiver = new_account(server), new_account(server)
    async with probe_of(server, sender) as probe:
        for text in (f"{mark}\x1b[31m\n\u202e", f"\0{mark}"):
            assert isinstance(await probe.send(receiver.user, text), bodies.SendAck)
        await send(probe, with_body(receiver, mark.encode() + b"\xff"))
        probe.writer.write(mark.encode() * 20)
        await probe.closed()
    log = server.log()
    assert "frame_refused" in log, "the broken frame was not noticed"
    assert mark not in log
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u200e\u200f\u202a-\u202e\u2066-\u2069]", log)

"""One client process of a live run: several devices, each with its own connection, all in one history file.

It is started by `live.py` and may be killed at any moment. Everything that it must remember stands in its
history files, so the next process reads them and goes on: cursors are what the last page said, a message
without an answer is sent again under its client_message_id, with a body that follows from that id. On SIGTERM
it sends nothing new, waits until each message has its answer, and ends.
"""

import asyncio
import contextlib
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from qim.client.probe import Probe, text_message
from qim.domain.placement import direct_conversation
from qim.errors import QimError
from qim.ids import Seq, TenantId, UserId
from qim.records import Kind, entry_coordinates
from qim.wire import bodies
from qim.wire.frames import Frame
from qim.wire.layout import Op
from tests.checker.history import (
    Device,
    FileHistory,
    History,
    Pull,
    Push,
    Pushed,
    Read,
    Recorder,
    Send,
    Shown,
    digest_of,
    type_of_error,
)

ANSWER_SECONDS_MAX: Final = 8.0
RETRY_SECONDS: Final = 0.1
SETTLE_SECONDS_MAX: Final = 40.0
REPEATED: Final = 0.1
"""Part of the sends that repeat a message, acknowledged or not."""
REPEATABLE_MAX: Final = 200
ENDED: Final = (OSError, TimeoutError, QimError)


class DeviceOrder(msgspec.Struct):
    user: str
    token: str
    device: str
    peers: list[str]
    sends_per_second: float


class ClientOrder(msgspec.Struct):
    """What `live.py` tells a client process."""

    port: int
    ca: str
    tenant: int
    process: str
    folder: str
    seed: int
    devices: list[DeviceOrder]


@dataclass
class Memory:
    """What a device knows; all of it can be read again from its history."""

    cursor: int = 0
    unanswered: dict[str, str] = field(default_factory=dict)
    """client_message_id → peer"""
    acknowledged: list[tuple[str, str]] = field(default_factory=list)
    last_seqs: dict[str, int] = field(default_factory=dict)


class RecordingProbe(Probe):
    """Writes each push as it comes."""

    pushes: "DeviceClient"

    def _on_frame(self, frame: Frame) -> None:
        super()._on_frame(frame)
        if self.pushed:
            self.pushes.on_pushed(self.pushed)
            self.pushed = []


class DeviceClient:
    """One device: connects again and again, mixes its requests, notes what it asked and what it got."""

    def __init__(self, order: ClientOrder, place: int, recorder: Recorder) -> None:
        self.order, self.place, self.recorder = order, place, recorder
        device = self.device = order.devices[place]
        self._operations = 0
        self.memory = Memory()
        self.chance = random.Random(f"{order.seed} {order.process} {device.device}")
        self._numbers = 0
        me, tenant = UserId(bytes.fromhex(device.user)), TenantId(order.tenant)
        self.conversations = {
            peer: direct_conversation(tenant, me, UserId(bytes.fromhex(peer))).hex() for peer in device.peers
        }

    # --- life ---

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            with contextlib.suppress(*ENDED):
                async with self._probe() as probe:
                    await self._session(probe, stop)
            await _pause(stop, RETRY_SECONDS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settle(), SETTLE_SECONDS_MAX)

    async def drain(self) -> None:
        """To an empty page, then every history and mark, exact; raises when the server does not answer."""
        async with self._probe() as probe:
            await self._pull(probe)
            held = Device(
                time.monotonic_ns(),
                self.order.process,
                self.device.user,
                self.device.device,
                self.memory.cursor,
            )
            self.recorder.write(held)
            for peer in self.device.peers:
                before = await self._history(probe, peer, before=0, final=True)
                while before:
                    before = await self._history(probe, peer, before=before, final=True)
                await self._mark_read(probe, peer, wanted=0, final=True)

    async def _settle(self) -> None:
        while self.memory.unanswered:
            with contextlib.suppress(*ENDED):
                async with self._probe() as probe:
                    while self.memory.unanswered:
                        await self._send_all(probe, list(self.memory.unanswered.items())[:8])
            await _pause(asyncio.Event(), RETRY_SECONDS)

    def _probe(self) -> RecordingProbe:
        device = self.device
        probe = RecordingProbe(
            "127.0.0.1", self.order.port, Path(self.order.ca), token=device.token,
            device=bytes.fromhex(device.device),
        )  # fmt: skip
        probe.pushes = self
        return probe

    async def _session(self, probe: Probe, stop: asyncio.Event) -> None:
        await self._pull(probe)
        while not stop.is_set():
            started = time.monotonic()
            batch = self._choose_messages()
            if batch:
                await self._send_all(probe, batch)
            await self._look_around(probe)
            wait = len(batch or "x") / max(self.device.sends_per_second, 1.0)
            await _pause(stop, max(0.0, wait - (time.monotonic() - started)))

    def _choose_messages(self) -> list[tuple[str, str]]:
        memory = self.memory
        batch = dict(list(memory.unanswered.items())[:8])
        if not self.device.sends_per_second:
            return list(batch.items())
        for _ in range(self.chance.randint(1, 3)):
            if memory.acknowledged and self.chance.random() < REPEATED:
                message, peer = self.chance.choice(memory.acknowledged)
            else:
                self._numbers += 1
                message = digest_of(f"{self.order.process} {self.device.device} {self._numbers}".encode()) * 2
                peer = self.chance.choice(self.device.peers)
                memory.unanswered[message] = peer
            batch[message] = peer
        return list(batch.items())

    async def _look_around(self, probe: Probe) -> None:
        chance = self.chance.random()
        peer = self.chance.choice(self.device.peers)
        last = self.memory.last_seqs.get(self.conversations[peer], 0)
        if chance < 0.25 or not self.device.sends_per_second:
            await self._pull(probe)
        elif chance < 0.32:
            await self._history(probe, peer, before=self.chance.choice([0, self.chance.randint(0, last + 1)]))
        elif chance < 0.39 and last:
            await self._mark_read(probe, peer, wanted=self.chance.randint(1, last))

    # --- requests ---

    def _operation(self) -> int:
        """Every device of the process counts for itself, so its place is part of the number."""
        self._operations += 1
        return self._operations * 100 + self.place

    async def _send_all(self, probe: Probe, batch: Sequence[tuple[str, str]]) -> None:
        """All at once, as a person with a fast thumb; each has its own answer."""
        asked: list[tuple[Send, str, asyncio.Future[Frame]]] = []
        for message, peer in batch:
            text = f"message {message}"
            event = Send(
                time.monotonic_ns(), self.order.process, "invoke", self._operation(), self.device.user,
                self.conversations[peer], message, digest_of(text.encode()),
            )  # fmt: skip
            self.recorder.write(event)
            body = text_message(bytes.fromhex(peer), text, cmid=bytes.fromhex(message))
            asked.append((event, peer, probe.post(Op.SEND_MESSAGE, body)))
        for event, peer, waiting in asked:
            try:
                frame = await asyncio.wait_for(waiting, ANSWER_SECONDS_MAX)
            except (OSError, TimeoutError):
                self._write_end(event, "info")
                continue
            self._on_sent(event, peer, bodies.decode_body(frame.opcode, frame.body))

    def _on_sent(self, event: Send, peer: str, answer: Any) -> None:
        if isinstance(answer, bodies.Error):
            self._write_end(event, type_of_error(answer.code), code=answer.code)
            return
        assert isinstance(answer, bodies.SendAck), answer
        self._write_end(
            event, "ok", message_id=answer.message_id.hex(), seq=answer.conversation_seq,
            reserved_at=answer.reserved_at, duplicate=answer.duplicate,
        )  # fmt: skip
        self.remember_sent(event, peer, answer.conversation_seq)

    def remember_sent(self, event: Send, peer: str, seq: int) -> None:
        memory = self.memory
        memory.unanswered.pop(event.client_message_id, None)
        memory.acknowledged = [*memory.acknowledged[-REPEATABLE_MAX:], (event.client_message_id, peer)]
        memory.last_seqs[event.conversation] = max(memory.last_seqs.get(event.conversation, 0), seq)

    def _write_end(self, event: Any, type_: str, **result: Any) -> None:
        self.recorder.write(msgspec.structs.replace(event, t=time.monotonic_ns(), type=type_, **result))

    async def _ask(self, probe: Probe, event: Any, op: Op, body: msgspec.Struct) -> Any:
        """The answer, or None after its end was written."""
        self.recorder.write(event)
        try:
            frame = await asyncio.wait_for(probe.post(op, body), ANSWER_SECONDS_MAX)
        except (OSError, TimeoutError):
            self._write_end(event, "info")
            raise
        answer = bodies.decode_body(frame.opcode, frame.body)
        if isinstance(answer, bodies.Error):
            self._write_end(event, type_of_error(answer.code), code=answer.code)
            return None
        return answer

    async def _pull(self, probe: Probe) -> None:
        more = True
        while more:
            after = self.memory.cursor
            event = Pull(
                time.monotonic_ns(), self.order.process, "invoke", self._operation(), self.device.user,
                self.device.device, after,
            )  # fmt: skip
            ask = bodies.PullMailbox(after_mailbox_seq=after, limit=self.chance.choice([5, 100, 300]))  # type: ignore[arg-type]  # a number of the history
            page = await self._ask(probe, event, Op.PULL_MAILBOX, ask)
            if page is None:
                raise ConnectionError("a page was refused")
            entries = [_shown(seq, bytes(raw)) for seq, raw in page.entries]
            self._write_end(
                event, "ok", entries=entries, covered_through=page.covered_through, more=page.more,
                rebuild=page.rebuild,
            )  # fmt: skip
            self.memory.cursor = page.covered_through
            self._see(entries)
            more = page.more

    def _see(self, entries: Sequence[Shown | Pushed]) -> None:
        last = self.memory.last_seqs
        for entry in entries:
            last[entry.conversation] = max(last.get(entry.conversation, 0), entry.seq)

    def on_pushed(self, pushed: Sequence[tuple[int, int, bytes]]) -> None:
        events = [_pushed(previous, seq, raw) for previous, seq, raw in pushed]
        self.recorder.write(
            Push(time.monotonic_ns(), self.order.process, self.device.user, self.device.device, events)
        )
        self._see(events)

    async def _history(self, probe: Probe, peer: str, *, before: int, final: bool = False) -> int:
        """One page; the sequence that the next page goes on from, 0 at the end."""
        event = History(
            time.monotonic_ns(), self.order.process, "invoke", self._operation(), self.device.user,
            self.conversations[peer], before, final=final,
        )  # fmt: skip
        target = bodies.Target(Kind.DIRECT, bytes.fromhex(peer))
        limit = 200 if final else self.chance.choice([3, 50])
        ask = bodies.PullHistory(target=target, before_seq=Seq(before), limit=limit)
        page = await self._ask(probe, event, Op.PULL_HISTORY, ask)
        if page is None:
            return 0
        entries = [(entry_coordinates(bytes(raw))[0], digest_of(bytes(raw))) for raw in page.records]
        self._write_end(
            event,
            "ok",
            entries=entries,
            earliest=page.earliest_available_seq,
            head=page.head_seq,
            more=page.more,
        )
        return entries[-1][0] if page.more else 0

    async def _mark_read(self, probe: Probe, peer: str, *, wanted: int, final: bool = False) -> None:
        event = Read(
            time.monotonic_ns(), self.order.process, "invoke", self._operation(), self.device.user,
            self.conversations[peer], wanted, final=final,
        )  # fmt: skip
        target = bodies.Target(Kind.DIRECT, bytes.fromhex(peer))
        answer = await self._ask(
            probe, event, Op.MARK_READ, bodies.MarkRead(target=target, read_seq=Seq(wanted))
        )
        if answer is not None:
            self._write_end(event, "ok", read_seq=answer.read_seq, unread=answer.unread)


def _shown(mailbox_seq: int, raw: bytes) -> Shown:
    seq, conversation = entry_coordinates(raw)
    return Shown(mailbox_seq, conversation.hex(), seq, digest_of(raw))


def _pushed(previous: int, mailbox_seq: int, raw: bytes) -> Pushed:
    if len(raw) <= bodies.ECHO_BYTES_MAX:
        echo = bodies.decode_pushed(raw)
        assert isinstance(echo, bodies.Echo)
        return Pushed(previous, mailbox_seq, echo.conversation_id.hex(), echo.conversation_seq, "")
    return Pushed(previous, *_shown(mailbox_seq, raw))


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)


def remember(clients: Sequence[DeviceClient], files: Sequence[Path]) -> None:
    """What earlier processes of these devices wrote."""
    by_device = {client.device.device: client for client in clients}
    by_user: dict[str, DeviceClient] = {c.device.user: c for c in clients if c.device.sends_per_second}
    for event in FileHistory(files).events():
        if isinstance(event, Pull) and event.type == "ok" and event.device in by_device:
            by_device[event.device].memory.cursor = event.covered_through
        elif isinstance(event, Send) and event.user in by_user:
            client = by_user[event.user]
            peer = next(p for p, name in client.conversations.items() if name == event.conversation)
            if event.type == "ok":
                client.remember_sent(event, peer, event.seq)
            elif (event.client_message_id, peer) not in client.memory.acknowledged:
                client.memory.unanswered[event.client_message_id] = peer


def history_files(folder: Path, process: str) -> list[Path]:
    """Of this client process and of those whose work it goes on with: `client-2.0`, `client-2.1`, …"""
    name = process.partition(".")[0]
    return sorted(folder.glob(f"{name}.*.jsonl"), key=lambda path: int(path.stem.split(".")[1]))


async def main(order: ClientOrder) -> None:
    folder = Path(order.folder)
    earlier = history_files(folder, order.process)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    with Recorder(folder / f"{order.process}.jsonl") as recorder:
        clients = [DeviceClient(order, place, recorder) for place in range(len(order.devices))]
        remember(clients, earlier)
        await asyncio.gather(*(client.run(stop) for client in clients))


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=ClientOrder)))

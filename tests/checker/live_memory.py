"""What a client process knows, and how the next one knows it again after a kill.

A history says everything: a cursor is what the last page said, a message without an answer is sent again
under its client_message_id. Reading all of it at each kill would take longer and longer, so each process
writes once, when it begins, what its predecessors left; whoever comes next reads that and the history since.
A kill before that file is there costs nothing: then the one before it counts.

Owned by one process at a time. The files stay in the run folder beside the histories, which do not need them.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from qim.domain.placement import direct_conversation
from qim.ids import TenantId, UserId
from tests.checker.history import Pull, Send

REPEATABLE_MAX: Final = 200
WANTED: Final = (b'["send",', b'["pull",')


class DeviceOrder(msgspec.Struct):
    user: str
    token: str
    device: str
    peers: list[str]
    sends_per_second: float
    """New messages; 0 for a device that only reads."""


class ClientOrder(msgspec.Struct):
    """What `live.py` tells a client process."""

    port: int
    ca: str
    tenant: int
    process: str
    folder: str
    seed: int
    devices: list[DeviceOrder]
    began_ns: int = 0
    """When the load of the whole run began: how many messages are due follows from it."""
    curiosity: float = 1.0
    """The part of the turns after which a device may look around."""
    is_final: bool = False
    """Only the last reads, exact."""


class Memory(msgspec.Struct):
    """What a device knows."""

    cursor: int = 0
    made: int = 0
    """Messages that were sent at least once."""
    unanswered: dict[str, str] = {}
    """client_message_id → peer"""
    acknowledged: list[tuple[str, str]] = []
    """Some of the newest; one of them is repeated now and then."""
    last_seqs: dict[str, int] = {}

    def on_made(self, message: str, peer: str) -> None:
        self.made += 1
        self.unanswered[message] = peer

    def on_acknowledged(self, message: str, peer: str, conversation: str, seq: int) -> None:
        self.unanswered.pop(message, None)
        self.acknowledged.append((message, peer))
        if len(self.acknowledged) > 2 * REPEATABLE_MAX:
            del self.acknowledged[:REPEATABLE_MAX]
        self.on_seen(conversation, seq)

    def on_seen(self, conversation: str, seq: int) -> None:
        if seq > self.last_seqs.get(conversation, 0):
            self.last_seqs[conversation] = seq


def conversations_of(order: ClientOrder, device: DeviceOrder) -> dict[str, str]:
    """Peer → conversation."""
    me, tenant = UserId(bytes.fromhex(device.user)), TenantId(order.tenant)
    return {peer: direct_conversation(tenant, me, UserId(bytes.fromhex(peer))).hex() for peer in device.peers}


def recall(order: ClientOrder) -> list[Memory]:
    """Of each device of the order, in its order; noted for the successor before it is used."""
    memories, files = _newest_note(order)
    _replay(order, memories, _events(files))
    _write_note(order, memories)
    return [memories[device.device] for device in order.devices]


def history_files(folder: Path, process: str) -> list[Path]:
    """Of this client process and of those whose work it goes on with: `client-2.0`, `client-2.1`, …"""
    name = process.partition(".")[0]
    return sorted(folder.glob(f"{name}.*.jsonl"), key=_number)


def _number(path: Path) -> int:
    return int(path.stem.split(".")[1])


def _newest_note(order: ClientOrder) -> tuple[dict[str, Memory], list[Path]]:
    """What the newest note says, and the histories that were written since."""
    folder = Path(order.folder)
    memories = {device.device: Memory() for device in order.devices}
    histories = history_files(folder, order.process)
    notes = sorted(folder.glob(f"{order.process.partition('.')[0]}.*.memory"), key=_number)
    if not notes:
        return memories, histories
    known = msgspec.json.decode(notes[-1].read_bytes(), type=dict[str, Memory])
    return memories | known, [path for path in histories if _number(path) >= _number(notes[-1])]


def _write_note(order: ClientOrder, memories: Mapping[str, Memory]) -> None:
    """Whole or not at all."""
    path = Path(order.folder) / f"{order.process}.memory"
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(msgspec.json.encode(memories))
    unfinished.rename(path)


def _events(files: Iterable[Path]) -> Iterator[Send | Pull]:
    """Only the lines that are needed are decoded: most of a history is pushes."""
    decode = msgspec.json.Decoder(Send | Pull).decode
    for path in files:
        with path.open("rb") as lines:
            for line in lines:
                if line.startswith(WANTED) and line.endswith(b"\n"):
                    yield decode(line)


def _replay(order: ClientOrder, memories: Mapping[str, Memory], events: Iterable[Send | Pull]) -> None:
    senders = {device.user: device for device in order.devices if device.sends_per_second}
    peers = {
        (device.user, conversation): peer
        for device in senders.values()
        for peer, conversation in conversations_of(order, device).items()
    }
    made = {message for memory in memories.values() for message in memory.unanswered}
    made.update(message for memory in memories.values() for message, _ in memory.acknowledged)
    for event in events:
        if isinstance(event, Pull):
            if event.type == "ok" and event.device in memories:
                memories[event.device].cursor = event.covered_through
        elif event.user in senders:
            memory = memories[senders[event.user].device]
            _replay_send(memory, event, peers[event.user, event.conversation], made)


def _replay_send(memory: Memory, event: Send, peer: str, made: set[str]) -> None:
    """`made`: messages that were sent before, so that this is not their first time."""
    message = event.client_message_id
    if event.type == "ok":
        memory.on_acknowledged(message, peer, event.conversation, event.seq)
    elif message not in made:
        made.add(message)
        memory.on_made(message, peer)

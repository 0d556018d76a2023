"""A process that receives and sends into one store until it is killed: `python -m … PATH COUNT_FILE`.

Each pass commits a page of messages with its cursor and queues one message. The identity of every queued
message is appended to COUNT_FILE after its commit, so the survivor knows what was promised.
"""

import asyncio
import os
import sys
from pathlib import Path

from qim.client.model import Message, Target
from qim.client.steps import Incoming
from qim.client.store import Store
from qim.clock import SystemClock
from qim.ids import ClientMessageId, ConversationId, DeviceId, MailboxSeq, MessageId, Millis, Seq, UserId

ME = UserId(b"m" * 16)
PEER = UserId(b"p" * 16)
CONVERSATION = ConversationId(b"c" * 16)


def build_message(seq: int, *, sender: UserId = PEER, cmid: bytes = b"", body: bytes = b"x") -> Message:
    identity = cmid or seq.to_bytes(16, "big")
    return Message(
        target=Target(1, PEER), conversation_id=CONVERSATION, conversation_seq=Seq(seq),
        message_id=MessageId(identity), sender=sender, sender_device=DeviceId(bytes(16)),
        client_message_id=ClientMessageId(identity), message_type=1, custom_type="", body=body,
        retention_class=0, reserved_at=Millis(seq),
    )  # fmt: skip


async def queue(store: Store, device_id: DeviceId, body: bytes = b"out") -> ClientMessageId:
    row = await store.queue_message(
        target=Target(1, PEER), message_type=1, custom_type="", body=body, retention_class=0,
        device_id=device_id, first_sent_at=Millis(0),
    )  # fmt: skip
    return row.client_message_id


async def main(path: Path, promises: Path) -> None:
    store, _ = await Store.open(path, me=ME, clock=SystemClock())
    loaded = await store.load(bound_device=None)
    seq = int(loaded.cursor)
    file = os.open(promises, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while True:
        page = [build_message(number, body=b"b" * 500) for number in range(seq + 1, seq + 21)]
        seq += 20
        _, cmid = await asyncio.gather(
            store.apply(Incoming(messages=page, cursor=MailboxSeq(seq))), queue(store, loaded.device_id)
        )
        os.write(file, f"{seq} {cmid.hex()}\n".encode())


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))

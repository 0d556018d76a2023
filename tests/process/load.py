"""Load that survives faults, and the verdict afterwards.

Pairs of users talk to each other while a test kills things. A message that got no answer is sent again under
its client_message_id, over whatever connection there is, until it is acknowledged: exactly what the SDK
promises, without its store. `verdict` then compares what was acknowledged with what the server holds:
every acknowledgement names one message, sequences run 1…n without gap, history equals it, and both
mailboxes hold each message once.
"""

import asyncio
import contextlib
import itertools
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from qim.client.probe import Probe, text_message
from qim.errors import RemoteProtocolError, ResourceExhausted
from qim.wire import bodies
from qim.wire.layout import Op

SEND_SECONDS_MAX = 10.0
RETRY_PAUSE_SECONDS = 0.05


@dataclass
class Account:
    """A user of the load, with what was acknowledged to it."""

    user: bytes
    token: str
    device: bytes = field(default_factory=lambda: os.urandom(16))
    acks: dict[bytes, bodies.SendAck] = field(default_factory=dict)
    bodies_sent: dict[bytes, bytes] = field(default_factory=dict)
    unstable: list[bytes] = field(default_factory=list)
    retries: int = 0


@dataclass(frozen=True)
class Endpoint:
    host: str
    port: int
    ca: Path


class Load:
    """Two users per pair, each sends one message after the other to its peer, `lanes` at a time."""

    def __init__(self, endpoint: Endpoint, pairs: list[tuple[Account, Account]], *, lanes: int = 4) -> None:
        self.endpoint, self.pairs, self.lanes = endpoint, pairs, lanes

    async def run(self, *, messages_per_user: int, seconds_max: float = 60.0) -> None:
        """Until every user has that many acknowledgements; fails when that takes too long."""
        talkers = [
            self._talk(account, peer.user, messages_per_user)
            for one, other in self.pairs
            for account, peer in ((one, other), (other, one))
        ]
        await asyncio.wait_for(asyncio.gather(*talkers), seconds_max)

    async def _talk(self, account: Account, peer: bytes, messages: int) -> None:
        numbers = itertools.count()
        unanswered: list[bytes] = []
        wanted = len(account.acks) + messages
        while len(account.acks) < wanted:
            with contextlib.suppress(OSError, TimeoutError, RemoteProtocolError):
                async with self._client(account) as client:
                    await self._exchange(client, account, peer, unanswered, numbers, wanted)
            await asyncio.sleep(RETRY_PAUSE_SECONDS)

    async def _exchange(
        self, client: Probe, account: Account, peer: bytes, unanswered: list[bytes],
        numbers: "itertools.count[int]", wanted: int,
    ) -> None:  # fmt: skip
        account.retries += len(unanswered)
        while len(account.acks) < wanted:
            while len(unanswered) < min(self.lanes, wanted - len(account.acks)):
                cmid = os.urandom(16)
                account.bodies_sent[cmid] = f"{account.user.hex()[:8]} {next(numbers)} {cmid.hex()}".encode()
                unanswered.append(cmid)
            batch = list(unanswered)
            answers = [
                client.post(
                    Op.SEND_MESSAGE, text_message(peer, account.bodies_sent[cmid].decode(), cmid=cmid)
                )
                for cmid in batch
            ]
            for cmid, waiting in zip(batch, answers, strict=True):
                frame = await asyncio.wait_for(waiting, SEND_SECONDS_MAX)
                body = bodies.decode_body(frame.opcode, frame.body)
                if isinstance(body, bodies.SendAck):
                    _note(account, cmid, body)
                    unanswered.remove(cmid)
                else:
                    assert isinstance(body, bodies.Error), body
                    assert 2000 <= body.code < 3000, f"a valid message was refused: {body}"
                    await asyncio.sleep(RETRY_PAUSE_SECONDS)

    def _client(self, account: Account) -> Probe:
        endpoint = self.endpoint
        return Probe(endpoint.host, endpoint.port, endpoint.ca, token=account.token, device=account.device)

    async def verdict(self, *, settle_seconds: float = 20.0) -> None:
        """Raises AssertionError naming the first contradiction."""
        for one, other in self.pairs:
            assert not one.unstable, "an acknowledgement changed its coordinates"
            assert not other.unstable, "an acknowledgement changed its coordinates"
            acked = {**one.acks, **other.acks}
            sequences = Counter(ack.conversation_seq for ack in acked.values())
            assert max(sequences.values()) == 1, "two messages share a sequence"
            await self._check_history(one, other, acked)
            for account in (one, other):
                await self._check_mailbox(account, acked, settle_seconds)

    async def _check_history(self, one: Account, other: Account, acked: dict[bytes, bodies.SendAck]) -> None:
        async with self._client(one) as client:
            history = await client.history(other.user)
        assert [entry.conversation_seq for entry in history] == list(range(1, len(history) + 1)), (
            "a gap in history"
        )
        by_cmid = {bytes(entry.record.client_message_id): entry for entry in history}
        assert len(by_cmid) == len(history), "history holds a message twice"
        sent = {**one.bodies_sent, **other.bodies_sent}
        for cmid, ack in acked.items():
            entry = by_cmid.get(cmid)
            assert entry is not None, "an acknowledged message is not in history"
            assert entry.conversation_seq == ack.conversation_seq, "history has it under another sequence"
            assert entry.record.body == sent[cmid], "history has other bytes"

    async def _check_mailbox(
        self, account: Account, acked: dict[bytes, bodies.SendAck], settle: float
    ) -> None:
        conversation = next(iter(acked.values())).conversation_id
        wanted = {ack.conversation_seq for ack in acked.values()}
        deadline = time.monotonic() + settle
        while True:
            async with self._client(account) as client:
                entries = await client.drain_mailbox()
            held = Counter(
                entry.conversation_seq for _, entry in entries if entry.record.conversation_id == conversation
            )
            assert not held or max(held.values()) == 1, "a mailbox holds a message twice"
            missing = wanted - held.keys()
            if not missing:
                return
            assert time.monotonic() < deadline, f"a mailbox misses {len(missing)} acknowledged messages"
            await asyncio.sleep(RETRY_PAUSE_SECONDS)


def _note(account: Account, cmid: bytes, ack: bodies.SendAck) -> None:
    known = account.acks.get(cmid)
    if known is not None and (known.conversation_seq, known.message_id) != (
        ack.conversation_seq,
        ack.message_id,
    ):
        account.unstable.append(cmid)
    account.acks[cmid] = ack


async def resend_all(endpoint: Endpoint, account: Account, peer: Account) -> None:
    """Every acknowledged message once more: the same coordinates come back, marked as duplicate."""
    async with Probe(
        endpoint.host, endpoint.port, endpoint.ca, token=account.token, device=account.device
    ) as client:
        for cmid, ack in account.acks.items():
            text = account.bodies_sent[cmid].decode()
            while isinstance(again := await client.send(peer.user, text, cmid=cmid), bodies.Error):
                assert again.code == ResourceExhausted.code, again
                await asyncio.sleep(RETRY_PAUSE_SECONDS)
            assert isinstance(again, bodies.SendAck), again
            assert (again.conversation_seq, again.message_id, again.reserved_at, again.duplicate) == (
                ack.conversation_seq, ack.message_id, ack.reserved_at, True,
            )  # fmt: skip

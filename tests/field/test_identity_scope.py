"""O03: what a client_message_id is unique in, with a hundred sends whose answers nobody heard.

Scope: (tenant, conversation, sender). There are no groups yet, so another direct conversation stands for one.
"""

import asyncio
import os
import random

import msgspec
import pytest

from qim.client.probe import Probe, expect, text_message
from qim.errors import Conflict, InvalidArgument
from qim.ids import ClientMessageId
from qim.wire import bodies
from qim.wire.layout import Op
from tests.field.figures import Figures
from tests.process.load import Account
from tests.rows.world import new_account, probe_of
from tests.services.dev_server import DevServer
from tests.waiting import eventually_async

COUNT = 100


async def send_unheard(server: DevServer, sender: Account, peer: Account, texts: dict[bytes, str]) -> None:
    """Pipelined on one connection that reads nothing and is then cut."""
    async with probe_of(server, sender) as deaf, probe_of(server, peer) as other:
        deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport that reads
        answers = [
            deaf.post(Op.SEND_MESSAGE, text_message(peer.user, text, cmid=cmid))
            for cmid, text in texts.items()
        ]

        async def all_committed() -> bool:
            return len(await other.history(sender.user)) == len(texts)

        await eventually_async(all_committed, what="all of them are committed")
        assert not any(answer.done() for answer in answers)


async def resend(probe: Probe, peer: Account, texts: dict[bytes, str]) -> dict[bytes, int]:
    answers = {
        cmid: probe.post(Op.SEND_MESSAGE, text_message(peer.user, text, cmid=cmid))
        for cmid, text in texts.items()
    }
    found = {}
    for cmid, waiting in answers.items():
        frame = await asyncio.wait_for(waiting, 20)
        ack = expect(bodies.SendAck, bodies.decode_body(frame.opcode, frame.body))
        assert ack.duplicate
        found[cmid] = int(ack.conversation_seq)
    return found


@pytest.mark.shows("O03", "C4")
async def test_a_hundred_unheard_sends_repeated_over_two_connections_are_a_hundred_messages(
    server: DevServer, pair: tuple[Account, Account], figures: Figures
) -> None:
    sender, peer = pair
    texts = {os.urandom(16): f"number {number}" for number in range(COUNT)}
    await send_unheard(server, sender, peer, texts)
    chance = random.Random(3)
    async with probe_of(server, sender) as one, probe_of(server, sender) as two:
        rounds = []
        for _ in range(2):
            for probe in (one, two):
                mixed = dict(chance.sample(list(texts.items()), COUNT))
                rounds.append(resend(probe, peer, mixed))
        results = await asyncio.gather(*rounds)
        history = await one.history(peer.user)
    by_cmid = {bytes(entry.record.client_message_id): int(entry.conversation_seq) for entry in history}
    assert len(history) == len(by_cmid) == COUNT
    assert sorted(by_cmid.values()) == list(range(1, COUNT + 1))
    assert all(result == by_cmid for result in results)
    figures.note("sends without an answer", COUNT)
    figures.note("repeats, over two connections", len(results) * COUNT)
    figures.note("messages", len(history))


async def seqs(probe: Probe, peer: Account) -> list[int]:
    return [int(entry.conversation_seq) for entry in await probe.history(peer.user)]


@pytest.mark.shows("O03", "C5")
async def test_the_same_id_with_another_body_is_a_conflict_and_changes_nothing(
    server: DevServer, pair: tuple[Account, Account]
) -> None:
    sender, peer = pair
    cmid = os.urandom(16)
    async with probe_of(server, sender) as probe:
        first = expect(bodies.SendAck, await probe.send(peer.user, "first", cmid=cmid))
        refused = expect(bodies.Error, await probe.send(peer.user, "second", cmid=cmid))
        assert refused.code == Conflict.code
        again = expect(bodies.SendAck, await probe.send(peer.user, "first", cmid=cmid))
        assert (again.conversation_seq, again.duplicate) == (first.conversation_seq, True)
        assert [entry.record.body for entry in await probe.history(peer.user)] == [b"first"]
        after = expect(bodies.SendAck, await probe.send(peer.user, "third"))
    assert after.conversation_seq == first.conversation_seq + 1


@pytest.mark.shows("O03")
async def test_the_same_id_elsewhere_or_of_somebody_else_is_another_message(
    server: DevServer, pair: tuple[Account, Account]
) -> None:
    sender, peer = pair
    third = new_account(server)
    cmid = os.urandom(16)
    async with probe_of(server, sender) as mine, probe_of(server, peer) as theirs:
        acks = [
            expect(bodies.SendAck, await mine.send(peer.user, "here", cmid=cmid)),
            expect(bodies.SendAck, await mine.send(third.user, "there", cmid=cmid)),
            expect(bodies.SendAck, await theirs.send(sender.user, "theirs", cmid=cmid)),
        ]
    assert not any(ack.duplicate for ack in acks)
    assert [int(ack.conversation_seq) for ack in acks] == [1, 1, 2]
    assert len({bytes(ack.message_id) for ack in acks}) == 3


@pytest.mark.shows("O03", "X16")
async def test_an_id_of_another_length_is_refused_before_it_costs_a_sequence(
    server: DevServer, pair: tuple[Account, Account]
) -> None:
    sender, peer = pair
    async with probe_of(server, sender) as probe:
        for length in (0, 1, 15, 17, 4_096):
            model = text_message(peer.user, "x")
            body = msgspec.structs.replace(model, client_message_id=ClientMessageId(b"c" * length))
            refused = expect(bodies.Error, await probe.ask(Op.SEND_MESSAGE, body))
            assert refused.code == InvalidArgument.code
        for cmid in (b"a" * 16, b"A" * 16):
            assert not expect(bodies.SendAck, await probe.send(peer.user, "case", cmid=cmid)).duplicate
        assert await seqs(probe, peer) == [1, 2]

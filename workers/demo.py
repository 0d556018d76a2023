"""`qim demo`: two users talk over real TLS connections, and every claim is checked and printed.

    1  alice and bob connect and exchange messages both ways; bob is offline for a part of them
    2  one message is sent again under its client_message_id: the same coordinates come back
    3  the same client_message_id with other content is refused as CONFLICT
    4  a second device of bob catches up from nothing
    5  both local stores and the server's history hold sequence 1…n, no gap, nothing twice, in order

Runs against any server that the endpoint names; needs tokens of two users. With data of an earlier run the
conversation simply goes on: the checks look at the whole of it. The stores of the demo are temporary, so each
run also shows two fresh devices catching up.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console
from rich.progress import Progress

from qim.client.client import AsyncClient
from qim.client.model import Ack, Message
from qim.client.probe import Probe, expect
from qim.errors import Conflict
from qim.records import Entry
from qim.wire import bodies

MESSAGES_EACH: Final = 200
OFFLINE: Final = 50
SETTLE_SECONDS_MAX: Final = 30.0
POLL_SECONDS: Final = 0.05
IN_FLIGHT: Final = 16


class DemoUser(NamedTuple):
    """Who takes part; the token says so to the server."""

    name: str
    user: bytes
    token: str


@dataclass(frozen=True)
class DemoServer:
    host: str
    port: int
    ca: Path

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"


class DemoError(Exception):
    """A check did not hold; the text says which and what was seen."""


class Checks:
    """Numbered claims; the first one that does not hold ends the demo."""

    def __init__(self, console: Console) -> None:
        self.results: list[dict[str, object]] = []
        self._console = console

    def holds(self, claim: str, condition: bool, seen: str = "") -> None:
        number = len(self.results) + 1
        self.results.append({"check": number, "claim": claim, "holds": condition, "seen": seen})
        mark = "[green]ok[/green]" if condition else "[red]FAILED[/red]"
        self._console.print(f"  {number:>2}  {mark}  {claim}" + (f"  [dim]{seen}[/dim]" if seen else ""))
        if not condition:
            raise DemoError(f"{claim}: {seen}")


async def run_demo(
    server: DemoServer, alice: DemoUser, bob: DemoUser, *, console: Console
) -> list[dict[str, object]]:
    """All checks in order; raises DemoError at the first that does not hold."""
    checks = Checks(console)
    with tempfile.TemporaryDirectory(prefix="qim-demo-") as folder:
        await _Demo(server, alice, bob, Path(folder), checks, console).run()
    return checks.results


class _Demo:
    def __init__(
        self,
        server: DemoServer,
        alice: DemoUser,
        bob: DemoUser,
        folder: Path,
        checks: Checks,
        console: Console,
    ) -> None:
        self.server, self.alice, self.bob = server, alice, bob
        self.folder, self.checks, self.console = folder, checks, console

    async def run(self) -> None:
        before = await self._last_seq()
        first = await self._talk()
        await self._repeat_and_conflict(first)
        await self._compare(before)

    def _client(self, who: DemoUser, device: str) -> AsyncClient:
        return AsyncClient(
            self.server.endpoint,
            who.token,
            data_dir=self.folder / device,
            ca=self.server.ca,
            client_name="demo",
        )

    async def _last_seq(self) -> int:
        async with Probe(self.server.host, self.server.port, self.server.ca, token=self.alice.token) as probe:
            history = await probe.history(self.bob.user)
        return history[-1].conversation_seq if history else 0

    async def _talk(self) -> Ack:
        """Both ways, with bob's connection closed for OFFLINE of alice's messages."""
        online = MESSAGES_EACH - OFFLINE
        total = 2 * MESSAGES_EACH
        with Progress(console=self.console, transient=True) as progress:
            bar = progress.add_task("messages", total=total)
            async with self._client(self.alice, "alice") as alice:
                async with self._client(self.bob, "bob") as bob:
                    acks, replies = await asyncio.gather(
                        self._send(alice, self.bob.user, "alice says", online, progress, bar),
                        self._send(bob, self.alice.user, "bob says", MESSAGES_EACH, progress, bar),
                    )
                missed = await self._send(alice, self.bob.user, "while bob is away", OFFLINE, progress, bar)
        seqs = [ack.conversation_seq for ack in (*acks, *replies, *missed)]
        self.checks.holds(
            f"{total} messages acknowledged, {OFFLINE} of them while bob was offline",
            len(seqs) == len(set(seqs)) == total,
            f"sequences {min(seqs)} to {max(seqs)}",
        )
        return acks[0]

    async def _send(
        self, client: AsyncClient, peer: bytes, text: str, count: int, progress: Progress, bar: "object"
    ) -> Sequence[Ack]:
        acks: list[Ack] = []
        for start in range(0, count, IN_FLIGHT):
            numbers = range(start, min(start + IN_FLIGHT, count))
            acks += await asyncio.gather(*(client.send(peer, f"{text} {number}") for number in numbers))
            progress.advance(bar, len(numbers))  # type: ignore[arg-type]  # TaskID is an int in disguise
        return acks

    async def _repeat_and_conflict(self, first: Ack) -> None:
        """What the SDK never does by itself, done by hand."""
        async with Probe(self.server.host, self.server.port, self.server.ca, token=self.alice.token) as probe:
            one = expect(bodies.SendAck, await probe.send(self.bob.user, "once", cmid=first.message_id))
            again = expect(bodies.SendAck, await probe.send(self.bob.user, "once", cmid=first.message_id))
            self.checks.holds(
                "a message sent again gets the same coordinates",
                (one.conversation_seq, one.message_id, one.reserved_at, again.duplicate)
                == (again.conversation_seq, again.message_id, again.reserved_at, True),
                f"sequence {again.conversation_seq}",
            )
            other = expect(bodies.Error, await probe.send(self.bob.user, "other", cmid=first.message_id))
            self.checks.holds(
                "the same id with other content is refused", other.code == Conflict.code, f"code {other.code}"
            )

    async def _compare(self, before: int) -> None:
        async with AsyncExitStack() as stack:
            probe = await stack.enter_async_context(
                Probe(self.server.host, self.server.port, self.server.ca, token=self.alice.token)
            )
            history = await probe.history(self.bob.user)
            last = len(history)
            self.checks.holds(
                "history holds sequence 1 to n without gap or double",
                [entry.conversation_seq for entry in history] == list(range(1, last + 1))
                and last == before + 2 * MESSAGES_EACH + 1,
                f"n = {last}",
            )
            for who, device, peer in (
                (self.alice, "alice", self.bob),
                (self.bob, "bob", self.alice),
                (self.bob, "bob-second-device", self.alice),
            ):
                client = await stack.enter_async_context(self._client(who, device))
                held = await self._settled(client, peer.user, above=before, count=last - before)
                self.checks.holds(
                    f"the store of {device} equals history, byte for byte",
                    _same(held, history[before:]),
                    f"{len(held)} messages of this run",
                )
            conversation = history[0].record.conversation_id
            entries = await probe.drain_mailbox()
            seqs = [e.conversation_seq for _, e in entries if e.record.conversation_id == conversation]
            self.checks.holds(
                "alice's mailbox holds each message of this run once",
                sorted(seq for seq in seqs if seq > before) == list(range(before + 1, last + 1)),
                f"sequences {before + 1} to {last}",
            )

    async def _settled(self, client: AsyncClient, peer: bytes, *, above: int, count: int) -> list[Message]:
        """What the local store holds of a conversation above a sequence, once it has caught up.

        Messages of earlier runs are left out: a fresh device gets them only while the mailbox keeps them.
        """
        deadline = asyncio.get_running_loop().time() + SETTLE_SECONDS_MAX
        while True:
            held = [m for m in await _all_messages(client, peer) if m.conversation_seq > above]
            if len(held) >= count or asyncio.get_running_loop().time() > deadline:
                return held
            await asyncio.sleep(POLL_SECONDS)


async def _all_messages(client: AsyncClient, peer: bytes) -> list[Message]:
    """Oldest first, page by page from the local store."""
    held: list[Message] = []
    before = 0
    while page := await client.messages(peer, before=before):
        held = [*page, *held]
        before = held[0].conversation_seq
    return held


def _same(held: Sequence[Message], history: Sequence[Entry]) -> bool:
    return [(m.conversation_seq, m.message_id, m.sender, m.body) for m in held] == [
        (e.conversation_seq, e.record.message_id, e.record.sender, e.record.body) for e in history
    ]

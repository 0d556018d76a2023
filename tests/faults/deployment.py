"""A whole service for the fault rows, the load that runs through the fault, and the verdict from outside.

The service is `qim dev`. A proxy may stand between its workers and its store, another between clients and the
gateway; a tool may be wrapped around its store. `Steady` keeps the load running while a test switches faults
on and off, and counts acknowledgements, so that a test can wait for progress or see that there is none.

The verdict trusts nothing that the server says of itself: every acknowledged message is sent once more and
must get its old coordinates, history and both mailboxes must hold each one once, and the audit of the raw
keys must be clean.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from tests.faults.proxy import Proxy
from tests.process.load import Account, Endpoint, Load, resend_all
from tests.services.dev_server import DevServer
from tests.waiting import happens

COMMAND_TIMEOUT_MS: Final = 700
"""Of the workers' store commands: a cut is unknown after this, and a row need not last long."""
PAIRS: Final = 3
BATCH: Final = 20
"""Acknowledgements per user and round; a round has connections of its own."""
QUIET_POLLS: Final = 30
FINISH_SECONDS_MAX: Final = 60.0


class Proxied(NamedTuple):
    """A service whose wires a test holds."""

    server: DevServer
    to_store: Proxy
    to_gateway: Proxy


@contextmanager
def proxied_service(folder: Path, *, workers: int = 1) -> Iterator[Proxied]:
    """The launcher itself reaches the store directly, and so does the audit."""
    with Proxy(folder / "dev" / "run" / "store.sock") as to_store:
        environment = {
            "QIM__REDIS__CORE": f"redis://127.0.0.1:{to_store.port}",
            "QIM__REDIS__COMMAND_TIMEOUT_MS": str(COMMAND_TIMEOUT_MS),
        }
        with (
            DevServer(folder, workers=workers, environment=environment) as server,
            Proxy(("127.0.0.1", server.port)) as to_gateway,
        ):
            yield Proxied(server, to_store, to_gateway)


def service_on(
    store: Path, folder: Path, *, environment: Mapping[str, str] | None = None, module: str = "workers"
) -> DevServer:
    """A service whose store is started with a tool around it."""
    return DevServer(folder, environment=environment, arguments=("--redis-server", str(store)), module=module)


def store_socket(server: DevServer) -> Path:
    return (server.folder / "run").resolve() / "store.sock"


def build_load(server: DevServer, *, port: int | None = None, pairs: int = PAIRS) -> Load:
    """New users each time. `port`: of a proxy before the gateway."""

    def account() -> Account:
        user = server.new_user()
        return Account(user.user, user.token)

    endpoint = Endpoint("127.0.0.1", port or server.port, server.certificate)
    return Load(endpoint, [(account(), account()) for _ in range(pairs)])


class Steady:
    """Load without end, until the block ends; then what is unanswered gets its acknowledgement."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self._ending = False
        self._task: asyncio.Task[None] | None = None

    @property
    def acks(self) -> int:
        return count_acks(self.load)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        await self.progresses()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._ending = True
        if error is None:
            await asyncio.wait_for(self._task, FINISH_SECONDS_MAX)
        else:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def progresses(self, *, by: int = 30, timeout_seconds: float = 30.0) -> None:
        """Returns when so many more messages are acknowledged."""
        assert self._task is not None
        task, wanted = self._task, self.acks + by
        await happens(
            lambda: task.done() or self.acks >= wanted,
            what=f"{by} more acknowledgements",
            timeout_seconds=timeout_seconds,
        )
        if task.done():
            await task

    async def is_quiet(self) -> None:
        """What was on its way may still be acknowledged, then nothing is for a while."""
        seen: list[int] = []

        def repeats() -> bool:
            seen.append(self.acks)
            return len(seen) > QUIET_POLLS and len(set(seen[-QUIET_POLLS:])) == 1

        await happens(repeats, what="acknowledgements stop")

    async def _run(self) -> None:
        while not self._ending:
            await self.load.run(messages_per_user=BATCH, seconds_max=FINISH_SECONDS_MAX)


def count_acks(load: Load) -> int:
    return sum(len(account.acks) for pair in load.pairs for account in pair)


async def judge(server: DevServer, load: Load) -> None:
    """Raises AssertionError naming the first contradiction."""
    await load.verdict()
    talkers = [both for one, other in load.pairs for both in ((one, other), (other, one))]
    await asyncio.gather(*(resend_all(load.endpoint, account, peer) for account, peer in talkers))
    await load.verdict()
    check_audit(server, load)


def check_audit(server: DevServer, load: Load) -> None:
    """The audit is clean and has really seen the load's messages."""
    audit = server.tool("audit", "--json")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    result = json.loads(audit.stdout)
    assert result["clean"]
    assert result["walked"]["outbox_records"] >= count_acks(load)


def copied_load(load: Load, server: DevServer, acks: Sequence[frozenset[bytes]]) -> Load:
    """The same users and what was acknowledged to them at a moment, against another service."""
    known = iter(acks)

    def copy(account: Account) -> Account:
        names = next(known)
        return Account(
            account.user,
            account.token,
            device=account.device,
            acks={cmid: ack for cmid, ack in account.acks.items() if cmid in names},
            bodies_sent=dict(account.bodies_sent),
        )

    endpoint = Endpoint("127.0.0.1", server.port, server.certificate)
    return Load(endpoint, [(copy(one), copy(other)) for one, other in load.pairs])

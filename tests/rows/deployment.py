"""`qim serve` on servers that the test owns: one for everything, or the log apart; twice on the same store.

A row that pauses or kills a supervisor, or only one of two servers, cannot use `qim dev`, whose launcher
would mend it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from qim.ids import UserId
from qim.tokens import mint_token
from tests.process.load import Account, Endpoint
from tests.process.service import REPOSITORY
from tests.process.test_serve import Serve
from tests.rows.world import TENANT
from tests.services import StoreServer
from tests.services.dev_server import TOKEN_END_MS
from tests.waiting import eventually


class Deployment(Serve):
    """One supervisor and its children."""

    def __init__(
        self, folder: Path, run: Path, store: StoreServer, *, log: StoreServer | None, workers: int
    ) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder, run, store, workers=workers)
        if log is not None:
            core = f'core = ["{store.url}"]\n'
            self.config.write_text(self.config.read_text().replace(core, f'{core}log = "{log.url}"\n'))

    def run_beside(self, environment: Mapping[str, str] | None = None) -> None:
        """Starts and waits until it serves."""
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "workers", "serve", "--config", str(self.config)],
                cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip
        self.until_ready()

    def trust(self, other: "Deployment") -> None:
        """Takes over keys and certificate, so that the clients of one are clients of both."""
        for name in ("token.pem", "public.pem", "cert.pem", "key.pem"):
            self.write(name, (other.folder / name).read_bytes())

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("127.0.0.1", int(self.status()["port"]), self.folder / "cert.pem")

    def account(self) -> Account:
        user = UserId(os.urandom(16))
        token = mint_token(
            (self.folder / "token.pem").read_bytes(), "k",
            tenant=TENANT, user=user, expires_at_ms=TOKEN_END_MS, issuer="qim", audience="qim",
        )  # fmt: skip
        return Account(user, token)

    @property
    def supervisor(self) -> int:
        assert self.process is not None
        return self.process.pid

    def children(self) -> list[int]:
        """Every process that the supervisor has forked and that is still there."""
        text = Path(f"/proc/{self.supervisor}/task/{self.supervisor}/children").read_text()
        return [int(pid) for pid in text.split()]

    def worker_pids(self) -> list[int]:
        return [int(row["pid"]) for row in self.status()["workers"] if row["pid"]]

    def freeze(self) -> list[int]:
        """Stops supervisor and children, the supervisor first so that it judges nobody; whom it stopped."""
        pids = [self.supervisor, *self.children()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        eventually(lambda: all(is_stopped(pid) for pid in pids), what="all of them stand still")
        return pids

    @staticmethod
    def thaw(pids: list[int]) -> None:
        """The children first: they go on before anybody can tell them something."""
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@contextmanager
def deployment(
    folder: Path, store: StoreServer, *, log: StoreServer | None = None, workers: int = 1
) -> Iterator[Deployment]:
    """Not started; what still runs at the end is killed, stopped or not."""
    with TemporaryDirectory(prefix="qim-") as run:
        made = Deployment(folder, Path(run), store, log=log, workers=workers)
        try:
            yield made
        finally:
            process = made.process
            if process is not None and process.poll() is None:
                for pid in [*made.children(), process.pid]:
                    os.kill(pid, signal.SIGKILL)
                process.wait(10)

"""`qim dev`: a whole service on one box with one command: store, keys, server, two users.

    lock the folder → store → certificate and keys → init → supervisor → ready → (demo) → until Ctrl-C

A launcher and nothing more: the store and the supervisor are its children, each in a process group of its
own, so a Ctrl-C in the terminal reaches the launcher alone and the order of the end is ours: the supervisor
drains first, the store stops last, and the data survive in the folder. A second Ctrl-C hurries the drain. A
store that dies by itself is started again, on a full disk as soon as there is room; the workers wait
meanwhile. When the launcher is killed, the kernel ends its children, and the next start recovers.

What was started, and where, is printed; logs go to a file in the folder. Whatever cannot start is one line.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rich.console import Console

from qim.clock import SystemClock
from qim.config import Secret, load_config
from qim.ctl import protocol
from qim.errors import ConfigError, ControlError, ExitCode, GuardRefused, QimError, StoreError
from qim.ids import Millis, TenantId
from qim.limits import DAY_MS, SLOTS
from qim.tokens import mint_token
from workers.child import start_program
from workers.devfolder import DEFAULT_FOLDER, KEY_ID, DevFolder, open_folder, user_id, write_private
from workers.embedded import EmbeddedStore, find_server
from workers.listeners import Listeners

ADDRESS: Final = "127.0.0.1"
TENANT: Final = TenantId(1)
USERS: Final = ("alice", "bob")
TOKEN_DAYS: Final = 30
READY_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 30.0
WATCH_SECONDS: Final = 0.2
STORE_RESTARTS_MAX: Final = 5
RESTART_WINDOW_SECONDS: Final = 60.0
FREE_BYTES_MIN: Final = 1_048_576
"""With less the disk counts as full: the store needs some of it to rewrite its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevOptions:
    """The command line."""

    data_dir: Path
    port: int
    workers: int | None = None
    redis_server: Path | None = None
    demo: bool = False
    once: bool = False
    """End after the demo with its exit code."""
    json: bool = False


def dev(options: DevOptions) -> int:
    """Runs until stopped; returns the exit code. Raises ConfigError or GuardRefused when it cannot start."""
    if options.workers is not None and not 1 <= options.workers <= SLOTS:
        # The configuration is ours and would be blamed by its line, which nobody has typed.
        raise ConfigError([f"--workers {options.workers}: allowed are 1 to {SLOTS}"])
    with open_folder(options.data_dir, clock=SystemClock()) as folder:
        return Launcher(options, folder).run()


class Launcher:
    """One run of `qim dev`."""

    def __init__(self, options: DevOptions, folder: DevFolder) -> None:
        self._options = options
        self._folder = folder
        self._clock = SystemClock()
        # Never wrapped at a width: a token must be copied in one piece, and a pipe has no width.
        self._console = Console(stderr=options.json, soft_wrap=True)
        self._store = EmbeddedStore(
            find_server(options.redis_server),
            folder=folder.store,
            socket_path=folder.store_socket,
            lock=folder.lock,
            clock=self._clock,
        )
        self._server: subprocess.Popen[bytes] | None = None
        self._port = 0
        """Where the service listens; known when it is ready."""
        self._stops = 0
        """Signals to stop, counted by the handler."""
        self._told_full = False
        self._restarts: deque[float] = deque(maxlen=STORE_RESTARTS_MAX)

    def run(self) -> int:
        """From nothing to nothing."""
        self._check_port()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_stop)
        try:
            return self._serve()
        finally:
            self._stop_server()
            self._store.stop()

    def _serve(self) -> int:
        options, folder = self._options, self._folder
        folder.prepare(address=ADDRESS, port=options.port, workers=options.workers)
        self._start_store()
        self._say(f"store      pid {self._store.pid}, data in {folder.store}")
        for line in self._initialise():
            self._say(f"init       {line}")
        folder.mark_initialised()
        self._start_server()
        status = self._until_ready()
        if status is None:
            return self._ended_early()
        self._describe(status)
        code: int = ExitCode.OK
        if options.demo:
            code = self._run_demo()
            if options.once:
                return code
        self._say("serving until Ctrl-C")
        return self._watch() or code

    # --- children ---

    def _start_store(self) -> None:
        self._store.start(lambda: self._say(f"store      reads its data, see {self._store.log_path}"))

    def _initialise(self) -> list[str]:
        from workers.init import initialise

        try:
            return initialise(load_config(self._folder.config), password=Secret.none())
        except GuardRefused:
            raise
        except StoreError as error:
            raise ConfigError([f"the embedded store: {error}"]) from error

    def _start_server(self) -> None:
        with self._folder.log.open("ab") as log:
            command = (sys.executable, "-m", "workers", "serve", "--config", str(self._folder.config))
            # Like the store: whoever still drains keeps the folder, its sockets and its port to itself.
            self._server = start_program([*command, "--take-over"], log=log, keep=[self._folder.lock])

    def _stop_server(self) -> None:
        """Politely; the second signal of a person is passed on, and there is a deadline."""
        server = self._server
        if server is None or server.poll() is not None:
            return
        self._say("stopping")
        server.terminate()
        told, deadline = self._stops, self._clock.monotonic() + STOP_SECONDS_MAX
        while self._clock.monotonic() < deadline:
            try:
                server.wait(WATCH_SECONDS)
            except subprocess.TimeoutExpired:
                if self._stops > max(told, 1):
                    told = self._stops
                    server.terminate()
                continue
            return
        server.kill()
        server.wait()

    def _watch(self) -> int:
        """Until somebody stops us or the server ends by itself; its exit code then."""
        assert self._server is not None
        while not self._stops:
            try:
                code = self._server.wait(WATCH_SECONDS)
            except subprocess.TimeoutExpired:
                self._keep_store()
                continue
            self._say(f"the server ended by itself with {code}; see {self._folder.log}")
            return code if code > 0 else ExitCode.BUG
        return ExitCode.OK

    def _keep_store(self) -> None:
        if self._store.has_ended() and not self._waits_for_room():
            self._restart_store()

    def _restart_store(self) -> None:
        now = self._clock.monotonic()
        if len(self._restarts) == STORE_RESTARTS_MAX and now - self._restarts[0] < RESTART_WINDOW_SECONDS:
            raise ConfigError([f"the embedded store dies again and again; see {self._store.log_path}"])
        self._restarts.append(now)
        self._say("store      died, starting it again on the same data")
        self._start_store()
        self._say(f"store      pid {self._store.pid}, data in {self._folder.store}")
        if self._port == 0:
            return  # not ready yet: the announcement comes with everything else
        try:
            self._announce()
        except ConfigError as error:
            # The service goes on; only programs that read the file would see the old process id.
            self._say(f"store      not announced: {error}")

    def _waits_for_room(self) -> bool:
        """A store ends when it cannot write; starting it on a full disk would only end it again."""
        full = shutil.disk_usage(self._folder.path).free < FREE_BYTES_MIN
        if full and not self._told_full:
            self._say(
                f"store      stopped: the disk of {self._folder.path} is full; goes on when there is room"
            )
        self._told_full = full
        return full

    # --- ready ---

    def _until_ready(self) -> dict[str, Any] | None:
        """The status of a ready service; None when it ended or somebody stopped us."""
        assert self._server is not None
        deadline = self._clock.monotonic() + READY_SECONDS_MAX
        while not self._stops:
            try:
                self._server.wait(WATCH_SECONDS)
            except subprocess.TimeoutExpired:
                pass
            else:
                return None
            self._keep_store()
            status = self._ask_status()
            if status is not None and status["ready"]:
                self._port = status["port"]
                return status
            if self._clock.monotonic() > deadline:
                reasons = "it does not answer" if status is None else "; ".join(status["reasons"])
                raise ConfigError([f"the server is not ready after {READY_SECONDS_MAX:.0f} s: {reasons}"])
        return None

    def _ask_status(self) -> dict[str, Any] | None:
        try:
            return protocol.call(self._folder.control_socket, "status", timeout_seconds=5.0)
        except ControlError:
            return None

    def _ended_early(self) -> int:
        if self._stops:
            return ExitCode.OK
        assert self._server is not None
        reason = last_refusal(self._folder.log) or f"see {self._folder.log}"
        code = self._server.returncode or ExitCode.BUG
        text = f"the server did not start: {reason}"
        print(f"qim: {text}", file=sys.stderr)
        if self._options.json:
            print(json.dumps({"schema": 1, "error": text, "code": code}))
        return code

    # --- words ---

    def _describe(self, status: dict[str, Any]) -> None:
        folder = self._folder
        self._say(f"server     pid {self._server.pid if self._server else 0}, log {folder.log}")
        for row in status["workers"]:
            self._say(f"worker {row['worker']}   pid {row['pid']}, slots {row['slots']}")
        self._say(f"address    {ADDRESS}:{self._port}  TLS 1.3, certificate {folder.certificate}")
        self._say(f"control    {folder.control_socket}  (qimctl status{self._how_to_reach()})")
        self._say("history    nothing is trimmed: there is no archive yet, the store keeps every message")
        for name in USERS:
            token = self._token(name)
            write_private(folder.token_file(name), token.encode())
            self._say(f"{name:<10} user {user_id(name).hex()}, good for {TOKEN_DAYS} days, token:")
            self._say(token)
        self._announce()

    def _how_to_reach(self) -> str:
        """What qimctl must be told besides nothing: it looks into the default folder by itself."""
        folder = self._folder.path
        return "" if folder == Path(DEFAULT_FOLDER).absolute() else f" --data-dir {folder}"

    def _announce(self) -> None:
        """`dev.json`: the same for programs."""
        folder = self._folder
        self._folder.announce(
            {
                "endpoint": f"{ADDRESS}:{self._port}",
                "host": ADDRESS,
                "port": self._port,
                "certificate": str(folder.certificate),
                "config": str(folder.config),
                "log": str(folder.log),
                "control_socket": str(folder.control_socket),
                "store_socket": str(folder.store_socket),
                "users": {
                    name: {"user": user_id(name).hex(), "token_file": str(folder.token_file(name))}
                    for name in USERS
                },
                "pids": {
                    "launcher": os.getpid(),
                    "store": self._store.pid,
                    "supervisor": self._server.pid if self._server else 0,
                },
            }
        )

    def _token(self, name: str) -> str:
        return mint_token(
            self._folder.token_key.read_bytes(),
            KEY_ID,
            tenant=TENANT,
            user=user_id(name),
            expires_at_ms=Millis(self._clock.now_ms() + TOKEN_DAYS * DAY_MS),
            issuer="qim",
            audience="qim",
        )

    def _run_demo(self) -> int:
        from workers.demo import DemoError, DemoServer, DemoUser, run_demo

        alice, bob = (DemoUser(name, user_id(name), self._token(name)) for name in USERS)
        server = DemoServer(ADDRESS, self._port, self._folder.certificate)
        try:
            results = asyncio.run(run_demo(server, alice, bob, console=self._console))
        except (DemoError, QimError) as failure:
            # A store that died meanwhile is the reason, whatever the demo has seen of it.
            died = f"; the embedded store died: {self._store.last_words()}" if self._store.has_ended() else ""
            self._say(f"demo       FAILED: {failure}{died}")
            return ExitCode.NO
        self._say(f"demo       all {len(results)} checks hold")
        if self._options.json:
            print(json.dumps({"schema": 1, "checks": results}))
        return ExitCode.OK

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False)

    # --- small things ---

    def _check_port(self) -> None:
        """Before anything is started; the supervisor would find it too, but later and in its log."""
        listeners = Listeners(address=ADDRESS, port=self._options.port, count=1, backlog=1)
        listeners.open_all()
        listeners.close_all()

    def _on_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stops += 1


def last_refusal(log: Path) -> str | None:
    """Why the service did not start, from the newest line of its log that gives a reason."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-200:]
    except OSError:
        return None
    for line in reversed(lines):
        if line.startswith("qim: "):
            return line.removeprefix("qim: ")
        if line.startswith("{"):
            entry = json.loads(line)
            if entry.get("event") == "start_refused":
                return str(entry.get("reason"))
    return None

"""`qim serve` beside a store that is down, comes up, comes back empty; reload; TLS as clients see it."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from qim.clock import SystemClock
from qim.config import Secret, load_config
from qim.ctl import protocol
from qim.errors import ControlError
from qim.tokens import generate_key_pair
from tests.process.service import REPOSITORY, is_alive
from tests.services import StoreServer
from tests.waiting import eventually
from workers.awake import DEVICE
from workers.devfolder import make_certificate
from workers.init import initialise
from workers.listeners import ALPN

pytestmark = pytest.mark.timeout(120)


class Serve:
    """One `qim serve` with its own folder of files; the store belongs to the test."""

    def __init__(self, folder: Path, run: Path, store: StoreServer, *, workers: int = 2) -> None:
        self.folder, self.run = folder, run
        self.config = folder / "qim.toml"
        private, public = generate_key_pair()
        self.write("token.pem", private)
        self.write("public.pem", public)
        self.write_certificate()
        self.config.write_text(
            f'[server]\ndeployment = "test"\nruntime_dir = "{run}"\nworkers = {workers}\npin = false\n'
            "drain_timeout_ms = 5000\n"
            '[gateway]\naddress = "127.0.0.1"\nport = 0\n'
            f'[tls]\ncertificate_file = "{folder}/cert.pem"\nkey_file = "{folder}/key.pem"\n'
            f'[auth.keys]\nk = "{folder}/public.pem"\n'
            f'[redis]\ncore = ["{store.url}"]\n[log]\nformat = "json"\n'
        )
        self.process: subprocess.Popen[bytes] | None = None

    def write(self, name: str, data: bytes) -> None:
        path = self.folder / name
        path.write_bytes(data)
        path.chmod(0o600)

    def write_certificate(self) -> bytes:
        key, certificate = make_certificate(datetime.fromtimestamp(SystemClock().now_ms() / 1000, tz=UTC))
        self.write("key.pem", key)
        self.write("cert.pem", certificate)
        return ssl.PEM_cert_to_DER_cert(certificate.decode())

    def initialise(self) -> None:
        initialise(load_config(self.config), password=Secret.none())

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "workers", "serve", "--config", str(self.config)],
                cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def status(self) -> dict[str, Any]:
        try:
            return protocol.call(self.run / "control.sock", "status")
        except ControlError as error:
            return {"ready": False, "reasons": [str(error)], "workers": []}

    def until_ready(self) -> None:
        eventually(lambda: self.status()["ready"], what="the service is ready", timeout_seconds=30)

    def logged(self, event: str) -> list[dict[str, Any]]:
        lines = (self.folder / "log").read_text().splitlines()
        return [entry for line in lines if (entry := json.loads(line))["event"] == event]

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(30)


@pytest.fixture
def store(valkey_binary: str, tmp_path: Path) -> Iterator[StoreServer]:
    """Not started: the test decides when."""
    server = StoreServer(valkey_binary, tmp_path / "store")
    yield server
    server.close()


@pytest.fixture
def service(tmp_path: Path, store: StoreServer) -> Iterator[Serve]:
    # Short: a socket path ends at 107 bytes, and folders of tests are longer.
    with TemporaryDirectory(prefix="qim-") as run:
        serve = Serve(tmp_path, Path(run), store)
        yield serve
        if serve.process is not None and serve.process.poll() is None:
            serve.process.kill()
            serve.process.wait(10)


def hello(port: int, *, session: ssl.SSLSession | None = None, alpn: str = ALPN) -> ssl.SSLSocket:
    """A finished handshake; the certificate is not judged here."""
    context = CONTEXTS.setdefault(alpn, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([alpn])
    raw = socket.create_connection(("127.0.0.1", port), timeout=10)
    return context.wrap_socket(raw, session=session)


CONTEXTS: dict[str, ssl.SSLContext] = {}


def test_a_store_that_is_down_at_start_is_waited_for(service: Serve, store: StoreServer) -> None:
    store.start()
    service.initialise()
    store.stop()
    service.start()
    eventually(
        lambda: [row["state"] for row in service.status()["workers"]] == ["waiting", "waiting"],
        what="both workers wait",
        timeout_seconds=20,
    )
    reasons = service.status()["reasons"]
    assert any(reason.startswith("worker 0 waits: ") and store.url in reason for reason in reasons)
    store.start()
    service.until_ready()
    assert service.stop() == 0
    assert not service.logged("child_died"), "waiting is not an exit"


def test_a_service_that_waits_can_be_stopped(service: Serve) -> None:
    service.start()
    eventually(
        lambda: [row["state"] for row in service.status()["workers"]] == ["waiting", "waiting"],
        what="both workers wait",
        timeout_seconds=20,
    )
    assert service.stop() == 0


def test_an_uninitialised_store_ends_the_service_with_78(service: Serve, store: StoreServer) -> None:
    store.start()
    service.start()
    assert service.process is not None
    assert service.process.wait(30) == 78
    reason = service.logged("start_refused")[0]["reason"]
    assert "identity as core is missing" in reason
    assert "qim init" in reason


def test_a_store_that_comes_back_empty_ends_the_service(service: Serve, store: StoreServer) -> None:
    store.start()
    service.initialise()
    service.start()
    service.until_ready()
    store.kill9()
    for path in sorted(store.folder.rglob("*"), reverse=True):
        if path.is_file() and path.name != "store.log":
            path.unlink()
    store.start()
    assert service.process is not None
    assert service.process.wait(60) == 78
    assert any("is missing" in line["reason"] for line in service.logged("start_refused"))


def test_a_store_that_comes_back_whole_is_served_again(service: Serve, store: StoreServer) -> None:
    store.start()
    service.initialise()
    service.start()
    service.until_ready()
    store.kill9()
    eventually(lambda: service.logged("store_lost"), what="the loss is logged")
    store.start()
    eventually(lambda: service.logged("store_reached"), what="the return is logged")
    service.until_ready()
    assert service.stop() == 0


def test_one_worker_alone_may_be_restarted_politely(service: Serve, store: StoreServer) -> None:
    store.start()
    service.initialise()
    service.start()
    service.until_ready()
    before = service.status()["workers"]
    os.kill(before[0]["pid"], signal.SIGTERM)
    eventually(lambda: service.status()["workers"][0]["restarts"] == 1, what="the worker is forked again")
    service.until_ready()
    assert service.status()["workers"][1]["pid"] == before[1]["pid"]
    died = service.logged("child_died")
    assert [(line["child"], line["exit_code"]) for line in died] == [("worker-0", 0)]


def test_a_second_signal_hurries_the_drain(service: Serve, store: StoreServer) -> None:
    store.start()
    service.initialise()
    service.start()
    service.until_ready()
    assert service.process is not None
    workers = [row["pid"] for row in service.status()["workers"]]
    service.process.terminate()
    eventually(lambda: service.logged("drain_started"), what="the drain has begun")
    service.process.terminate()
    assert service.process.wait(30) == 0
    assert service.logged("drain_hurried")
    assert not any(is_alive(pid) for pid in workers)


def test_a_session_resumes_on_any_worker(service: Serve, store: StoreServer) -> None:
    store.start()
    service.initialise()
    service.start()
    service.until_ready()
    port = service.status()["port"]
    with hello(port) as first:
        assert first.version() == "TLSv1.3"
        assert first.selected_alpn_protocol() == ALPN
        first.settimeout(0.2)
        # Tickets come behind the handshake and are taken in by a read.
        with pytest.raises(TimeoutError):
            first.recv(1)
        session = first.session
    resumed = 0
    for _ in range(12):
        with hello(port, session=session) as again:
            resumed += bool(again.session_reused)
    # Two workers share the port, so twelve connections all on one of them are one in two thousand.
    assert resumed == 12


def test_a_client_of_an_older_tls_is_refused(service: Serve, store: StoreServer) -> None:
    store.start()
    service.initialise()
    service.start()
    service.until_ready()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    raw = socket.create_connection(("127.0.0.1", service.status()["port"]), timeout=10)
    with raw, pytest.raises((ssl.SSLError, ConnectionResetError)):
        context.wrap_socket(raw)


def test_a_processor_that_is_not_ours_is_refused(service: Serve) -> None:
    text = service.config.read_text().replace("pin = false", "pin = true\ncpus = [4000, 4001]")
    service.config.write_text(text)
    service.start()
    assert service.process is not None
    assert service.process.wait(30) == 78
    assert "qim: server.cpus: not allowed for this process" in (service.folder / "log").read_text()


def test_a_pinned_worker_keeps_to_its_processor(service: Serve, store: StoreServer) -> None:
    cpu = max(os.sched_getaffinity(0))
    text = service.config.read_text().replace("pin = false", f"pin = true\ncpus = [{cpu}]")
    service.config.write_text(text.replace("workers = 2", "workers = 1"))
    store.start()
    service.initialise()
    service.start()
    service.until_ready()
    assert os.sched_getaffinity(service.status()["workers"][0]["pid"]) == {cpu}
    assert service.process is not None
    assert os.sched_getaffinity(service.process.pid) == os.sched_getaffinity(0)


def test_processors_are_kept_awake_as_long_as_the_server_runs_or_the_start_is_refused(
    service: Serve, store: StoreServer
) -> None:
    service.config.write_text(service.config.read_text().replace("[server]", "[server]\nkeep_awake = true"))
    store.start()
    service.initialise()
    service.start()
    assert service.process is not None
    if os.access(DEVICE, os.W_OK):
        service.until_ready()
        held = Path(f"/proc/{service.process.pid}/fd").iterdir()
        assert DEVICE in {descriptor.readlink() for descriptor in held}
    else:
        assert service.process.wait(30) == 78
        assert "server.keep_awake" in (service.folder / "log").read_text()


def test_a_reload_takes_a_new_certificate_and_refuses_a_bad_one(service: Serve, store: StoreServer) -> None:
    store.start()
    service.initialise()
    service.start()
    service.until_ready()
    assert service.process is not None
    port = service.status()["port"]
    fresh = service.write_certificate()
    service.process.send_signal(signal.SIGHUP)
    eventually(lambda: service.logged("config_reloaded"), what="the reload is accepted")
    eventually(lambda: shown(port) == fresh, what="new handshakes show the new certificate")
    service.write("cert.pem", b"no certificate")
    service.process.send_signal(signal.SIGHUP)
    eventually(lambda: service.logged("config_reload_refused"), what="the bad one is refused")
    assert shown(port) == fresh
    assert service.status()["ready"]


def shown(port: int) -> bytes | None:
    with hello(port) as connection:
        return connection.getpeercert(binary_form=True)

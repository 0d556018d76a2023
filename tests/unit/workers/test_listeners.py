"""Listening sockets and the TLS context: what is refused, what a child keeps, what survives a death."""

import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from qim.clock import SystemClock
from qim.errors import ConfigError
from workers.devfolder import make_certificate
from workers.forkable import assert_forkable, connected_sockets
from workers.listeners import Listeners, build_tls_context, load_certificate

HOST = "127.0.0.1"


@pytest.fixture
def listeners() -> Iterator[Listeners]:
    made = Listeners(address=HOST, port=0, count=3, backlog=8)
    made.open_all()
    yield made
    made.close_all()


def test_all_workers_share_the_port_that_the_kernel_chose(listeners: Listeners) -> None:
    assert listeners.port
    listener = listeners.keep_only(1)
    assert listener is not None
    assert listener.getsockname() == (HOST, listeners.port)


def test_a_child_without_a_listener_keeps_none(listeners: Listeners) -> None:
    assert listeners.keep_only(None) is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, listeners.port), timeout=5)


def test_a_closed_listener_can_be_opened_again_on_the_same_port(listeners: Listeners) -> None:
    port = listeners.port
    listeners.close(2)
    listeners.open(2)
    assert listeners.port == port


def test_a_taken_port_is_refused_although_both_would_share_it(listeners: Listeners) -> None:
    second = Listeners(address=HOST, port=listeners.port, count=1, backlog=8)
    with pytest.raises(ConfigError, match=f"{HOST} port {listeners.port} is in use"):
        second.open_all()


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not an address of this host"):
        Listeners(address="192.0.2.1", port=0, count=1, backlog=8).open_all()


def write_pair(folder: Path, name: str) -> tuple[Path, Path]:
    key, certificate = make_certificate(datetime.fromtimestamp(SystemClock().now_ms() / 1000, tz=UTC))
    paths = folder / f"{name}.cert.pem", folder / f"{name}.key.pem"
    paths[0].write_bytes(certificate)
    paths[1].write_bytes(key)
    return paths


def test_the_context_speaks_tls_1_3_only(tmp_path: Path) -> None:
    certificate, key = write_pair(tmp_path, "a")
    context = build_tls_context(certificate_file=certificate, key_file=key)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3


@pytest.mark.parametrize("broken", ["missing", "swapped", "garbage", "mixed"])
def test_files_that_do_not_serve_are_refused_by_name(tmp_path: Path, broken: str) -> None:
    certificate, key = write_pair(tmp_path, "a")
    other, _ = write_pair(tmp_path, "b")
    match broken:
        case "missing":
            certificate = tmp_path / "nothing.pem"
        case "swapped":
            certificate, key = key, certificate
        case "garbage":
            certificate.write_text("garbage")
        case "mixed":
            certificate = other
    with pytest.raises(ConfigError, match="tls") as refused:
        build_tls_context(certificate_file=certificate, key_file=key)
    assert str(certificate) in str(refused.value)


def test_a_refused_certificate_leaves_the_living_context_as_it_was(tmp_path: Path) -> None:
    certificate, key = write_pair(tmp_path, "a")
    context = build_tls_context(certificate_file=certificate, key_file=key)
    other, _ = write_pair(tmp_path, "b")
    with pytest.raises(ConfigError):
        load_certificate(context, certificate_file=other, key_file=key)
    load_certificate(context, certificate_file=certificate, key_file=key)


def test_a_connection_is_seen_before_a_fork(listeners: Listeners) -> None:
    before = connected_sockets()
    with socket.create_connection((HOST, listeners.port), timeout=5):
        assert len(connected_sockets()) == len(before) + 1
    assert connected_sockets() == before


async def test_a_running_loop_forbids_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.listdir", lambda _path: ["one thread"])
    with pytest.raises(AssertionError, match="an event loop runs"):
        assert_forkable()

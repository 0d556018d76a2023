"""Each fault of the proxy strikes, is counted, and ends; a proxy without faults is a plain wire."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.faults.proxy import BOTH_WAYS, Faults, Proxy
from tests.waiting import eventually

SILENCE_SECONDS = 0.2


class Echo:
    """A server that sends back what it reads, and remembers how much that was."""

    def __init__(self) -> None:
        self.read = bytearray()
        self.reads = 0
        self.ended = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            while data := peer.recv(65_536):
                self.read += data
                self.reads += 1
                peer.sendall(data)
        self.ended += 1

    def close(self) -> None:
        # A thread in accept is woken by a shutdown, not by a close.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(5)


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", echo.port)) as between:
        yield between


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as connection:
        # The first exchange makes the connection behind the proxy, which a later fault would prevent.
        assert exchange(connection, b"hello") == b"hello"
        yield connection


def exchange(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    return receive(connection, len(data))


def receive(connection: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        data = connection.recv(size - len(got))
        if not data:
            break
        got += data
    return got


def is_silent(connection: socket.socket) -> bool:
    connection.settimeout(SILENCE_SECONDS)
    try:
        return connection.recv(1) is None
    except TimeoutError:
        return True
    finally:
        connection.settimeout(5)


def seconds_of_exchange(connection: socket.socket, size: int) -> float:
    began = time.monotonic()
    assert len(exchange(connection, b"x" * size)) == size
    return time.monotonic() - began


def test_without_faults_it_is_a_plain_wire(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    data = bytes(range(256)) * 2000
    sending = threading.Thread(target=client.sendall, args=(data,))
    sending.start()
    assert receive(client, len(data)) == data
    sending.join()
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b"", "the end of the client's stream came back as the end of the server's"
    counters = proxy.counters
    assert counters.bytes_to_server == counters.bytes_to_client == len(data) + 5
    assert (counters.held_bytes_to_server, counters.swallowed_bytes, counters.resets) == (0, 0, 0)


def test_latency_delays_each_direction_and_ends(proxy: Proxy, client: socket.socket) -> None:
    proxy.set(Faults(latency_ms=60))
    assert seconds_of_exchange(client, 10) >= 0.12
    assert proxy.counters.delayed_reads >= 2
    proxy.heal()
    assert seconds_of_exchange(client, 10) < 0.12


def test_bandwidth_is_limited(proxy: Proxy, client: socket.socket) -> None:
    proxy.set(Faults(bytes_per_second=100_000))
    assert seconds_of_exchange(client, 20_000) >= 0.2
    proxy.heal()
    assert seconds_of_exchange(client, 20_000) < 0.2


def test_a_cut_holds_everything_and_loses_nothing(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    proxy.set(Faults(cut=BOTH_WAYS))
    client.sendall(b"held")
    eventually(lambda: proxy.counters.held_bytes_to_server == 4, what="the request is held")
    assert is_silent(client)
    assert bytes(echo.read) == b"hello", "the request did not reach the server"
    proxy.heal()
    assert receive(client, 4) == b"held"


def test_a_cut_of_the_answers_lets_the_request_through(
    proxy: Proxy, client: socket.socket, echo: Echo
) -> None:
    proxy.set(Faults(cut=frozenset({"to_client"})))
    client.sendall(b"held")
    eventually(lambda: bytes(echo.read) == b"helloheld", what="the server has the request")
    eventually(lambda: proxy.counters.held_bytes_to_client == 4, what="the answer is held")
    assert is_silent(client)
    proxy.heal()
    assert receive(client, 4) == b"held"


def test_a_cut_of_the_requests_lets_the_answers_through(
    proxy: Proxy, client: socket.socket, echo: Echo
) -> None:
    proxy.set(Faults(latency_ms=100))
    client.sendall(b"sent")
    eventually(lambda: bytes(echo.read) == b"hellosent", what="the server has the request")
    proxy.set(Faults(cut=frozenset({"to_server"})))
    assert receive(client, 4) == b"sent"
    client.sendall(b"held")
    assert is_silent(client)
    assert proxy.counters.held_bytes_to_server == 4


def test_a_reset_reaches_both_sides(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    assert proxy.reset() == 1
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    eventually(lambda: echo.ended == 1, what="the server lost its peer")
    assert proxy.counters.resets == 1
    assert proxy.reset() == 0


def test_slices_arrive_one_by_one(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    proxy.set(Faults(slice_bytes=1))
    before = echo.reads
    assert exchange(client, b"abcdefgh") == b"abcdefgh"
    eventually(lambda: proxy.counters.slices == 16, what="each byte was written on its own, both ways")
    assert echo.reads > before + 1


def test_a_swallowed_answer_ends_the_connection_behind_the_request(
    proxy: Proxy, client: socket.socket, echo: Echo
) -> None:
    proxy.set(Faults(swallow=True))
    client.sendall(b"done")
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert bytes(echo.read) == b"hellodone", "the request was done"
    assert (proxy.counters.swallowed_bytes, proxy.counters.resets) == (4, 1)


def test_a_stream_with_a_hole_never_goes_on(proxy: Proxy, client: socket.socket) -> None:
    proxy.set(Faults(swallow=True, close_after_swallow=False))
    client.sendall(b"gone")
    eventually(lambda: proxy.counters.swallowed_bytes == 4, what="the answer is swallowed")
    assert is_silent(client)
    proxy.heal()
    with pytest.raises(ConnectionResetError):
        client.recv(1)


def test_a_limit_ends_the_connection_in_the_middle(proxy: Proxy, client: socket.socket) -> None:
    proxy.set(Faults(limit_bytes=8))
    assert exchange(client, b"abcdefgh") == b"abc", "five of the eight bytes had gone before"
    assert client.recv(1) == b""
    assert proxy.counters.limited == 1


def test_refused_connections_are_reset_until_healed(proxy: Proxy) -> None:
    proxy.set(Faults(refuse=True))
    with pytest.raises(ConnectionResetError):
        exchange_once(proxy)
    assert proxy.counters.refused == 1
    proxy.heal()
    assert exchange_once(proxy) == b"again"


def exchange_once(proxy: Proxy) -> bytes:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as connection:
        return exchange(connection, b"again")

"""Locust users for qim: many people who log in, send to a partner and receive, through the real codec.

    QIM_ENDPOINT=127.0.0.1:7443 QIM_CA=…/certificate.pem QIM_TOKEN_KEY=…/token-key.pem
    python -m locust -f loadtest/locustfile.py --headless --users 20 --spawn-rate 10 --run-time 30s

gevent patches sockets and TLS, so a user is a blocking socket around the `User` of `capacity.py`.
One greenlet receives with plain `recv` and nothing else; the task of the user sends; a lock keeps their
writes apart. Users form pairs by their number: both ends live in this process and share one monotonic clock.

Events: AUTH (connect to ready), SEND (to SEND_ACK), E2E (to the partner's push or pull, fired by the
receiver). A refusal is a failure of SEND; a doubled message, and one that is accepted and not delivered when
its user stops, is a failure of E2E. When the server ends a connection the user stops, and what was unanswered
fails. A user stays until its partner's last messages have arrived, too.

Locust paces its users, so a stalled server is offered less: for a limit or a tail latency use `capacity.py`.
"""

import os
import secrets
import socket
import ssl
from itertools import count
from pathlib import Path
from typing import Any, Final

import gevent
from gevent.lock import RLock
from locust import User as LocustUser
from locust import constant_throughput, events, task
from locust.exception import StopUser

from loadtest.server import Server
from loadtest.user import User, make_account, parse_body
from qim.clock import SystemClock
from qim.errors import ClientError
from qim.records import Entry
from qim.wire.bodies import SendAck
from qim.wire.layout import ALPN

RECEIVE_BYTES: Final = 65_536
CONNECT_SECONDS_MAX: Final = 10.0
DRAIN_SECONDS_MAX: Final = 5.0
SWEEP_SECONDS: Final = 0.1
BODY_BYTES: Final = 128
SENDS_PER_SECOND: Final = float(os.environ.get("QIM_SENDS_PER_SECOND", "2"))

_clock: Final = SystemClock()
_run: Final = secrets.randbits(63)
_user_numbers = count()
_message_numbers = count(1)
_sent_at: dict[int, float] = {}
"""Message → when it was sent. Entries go when they are delivered."""
_delivered: dict[int, int] = {}
"""Message → mailbox_seq of the recipient, for telling doubles."""
_people: dict[int, "ChatUser"] = {}


def server_from_environment() -> Server:
    """Where and who; raises KeyError with the name of the variable that is missing."""
    host, _, port = os.environ["QIM_ENDPOINT"].rpartition(":")
    return Server(
        host=host,
        port=int(port),
        ca_file=Path(os.environ["QIM_CA"]),
        token_key_pem=Path(os.environ["QIM_TOKEN_KEY"]).read_bytes(),
        kid=os.environ.get("QIM_KID", "dev"),
        server_name=os.environ.get("QIM_SERVER_NAME", "localhost"),
    )


def fire(kind: str, name: str, seconds: float, *, size: int = 0, error: Exception | None = None) -> None:
    """One row of Locust's statistics."""
    events.request.fire(  # type: ignore[no-untyped-call]  # the package types only a part of itself
        request_type=kind,
        name=name,
        response_time=seconds * 1000,
        response_length=size,
        exception=error,
        context={},
    )


class DeliveryError(Exception):
    """A message was doubled or never came."""


class ChatUser(LocustUser):
    """One person with one connection."""

    wait_time = constant_throughput(SENDS_PER_SECOND)

    def __init__(self, environment: Any) -> None:  # noqa: ANN401 - Locust's environment has no type
        super().__init__(environment)
        number = next(_user_numbers)
        self.chat = User(
            make_account(_run, number),
            make_account(_run, number ^ 1).user,
            index=number,
            run=_run,
            sink=self,
            body_size=BODY_BYTES,
        )
        _people[number] = self
        self._unanswered: dict[int, float] = {}
        self._accepted: set[int] = set()
        """Not yet delivered."""
        self._socket: ssl.SSLSocket | None = None
        self._writing = RLock()
        self._greenlets: list[gevent.Greenlet] = []

    # --- the life of a user, called by Locust ---

    def on_start(self) -> None:
        began = _clock.monotonic()
        try:
            self._connect()
        except (OSError, ClientError, gevent.Timeout) as error:
            fire("AUTH", "log in", _clock.monotonic() - began, error=_as_exception(error))
            raise StopUser from None
        fire("AUTH", "log in", _clock.monotonic() - began)
        self._greenlets.append(gevent.spawn(self._sweep))

    @task
    def send(self) -> None:
        if not self.chat.is_ready:
            raise StopUser
        number, now = next(_message_numbers), _clock.monotonic()
        _sent_at[number] = self._unanswered[number] = now
        self._write(self.chat.send(number, now))

    def on_stop(self) -> None:
        """Waits a moment for what is on its way, then tells what never came."""
        partner = self._partner()
        with gevent.Timeout(DRAIN_SECONDS_MAX, False):
            while self.chat.is_ready and (self.is_waiting or (partner is not None and partner.is_waiting)):
                gevent.sleep(SWEEP_SECONDS)
        for number in self._unanswered:
            fire("SEND", "message", DRAIN_SECONDS_MAX, error=DeliveryError(f"message {number} unanswered"))
        for number in self._accepted if partner is not None else ():
            fire("E2E", "message", DRAIN_SECONDS_MAX, error=DeliveryError(f"message {number} lost"))
        gevent.killall(self._greenlets)
        if self._socket is not None:
            self._socket.close()

    @property
    def is_waiting(self) -> bool:
        """Whether something of this user is on its way."""
        return self.chat.is_ready and bool(self._unanswered or self._accepted)

    def _partner(self) -> "ChatUser | None":
        """None for the last of an odd number of users: nobody waits for what it says."""
        return _people.get(self.chat.index ^ 1)

    # --- the socket ---

    def _connect(self) -> None:
        server = server_from_environment()
        context = ssl.create_default_context(cafile=str(server.ca_file))
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols([ALPN])
        with gevent.Timeout(CONNECT_SECONDS_MAX):
            plain = socket.create_connection((server.host, server.port))
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = context.wrap_socket(plain, server_hostname=server.server_name)
            self._write(self.chat.log_in(server.token_for(self.chat.account.user, _clock)))
            self._greenlets.append(gevent.spawn(self._receive))
            while not self.chat.is_ready:
                if self._greenlets[0].dead:
                    raise ConnectionError("the server did not accept the log-in")
                gevent.sleep(0.005)

    def _receive(self) -> None:
        """The only reader; ends when the server does."""
        assert self._socket is not None
        try:
            while data := self._socket.recv(RECEIVE_BYTES):
                answer = self.chat.receive(data, _clock.monotonic())
                if answer:
                    self._write(answer)
        except (OSError, ClientError):
            pass  # the end of a connection is told below, whatever its form
        self.chat.is_ready = False
        self.chat.connection.close()

    def _sweep(self) -> None:
        """The timers of a client: held pulls, pings."""
        while self.chat.is_ready:
            data = self.chat.due_frame(_clock.monotonic())
            if data:
                self._write(data)
            gevent.sleep(SWEEP_SECONDS)

    def _write(self, data: bytes) -> None:
        assert self._socket is not None
        with self._writing:
            self._socket.sendall(data)

    # --- what the user reports ---

    def on_ready(self, user: User) -> None:
        """`_connect` watches the flag itself."""

    def on_accepted(self, user: User, number: int, ack: SendAck) -> None:  # noqa: ARG002 - the sink's signature
        sent = self._unanswered.pop(number, None)
        if sent is not None:
            if number not in _delivered:
                self._accepted.add(number)
            fire("SEND", "message", _clock.monotonic() - sent, size=BODY_BYTES)

    def on_refused(self, user: User, number: int, code: int) -> None:  # noqa: ARG002 - the sink's signature
        sent = self._unanswered.pop(number, None)
        if sent is not None:
            fire("SEND", "message", _clock.monotonic() - sent, error=DeliveryError(f"refused with {code}"))

    def on_entry(self, user: User, mailbox_seq: int, entry: Entry, *, pushed: bool) -> None:  # noqa: ARG002 - as above
        run, number = parse_body(entry.record.body)
        if run != _run:
            return
        known = _delivered.setdefault(number, mailbox_seq)
        partner = self._partner()
        if partner is not None:
            partner._accepted.discard(number)
        sent = _sent_at.pop(number, None)
        if sent is not None:
            fire("E2E", "message", _clock.monotonic() - sent, size=len(entry.record.body))
        elif known != mailbox_seq:
            fire("E2E", "message", 0.0, error=DeliveryError(f"message {number} doubled"))

    def on_echo(self, user: User, seq: int) -> None:
        """The sender's own copy; nobody waits for it here."""

    def on_ended(self, user: User, code: int) -> None:  # noqa: ARG002 - the sink's signature
        fire("SEND", "connection", 0.0, error=DeliveryError(f"the server ended the connection with {code}"))


def _as_exception(error: BaseException) -> Exception:
    """Locust counts exceptions; gevent's time-out is none."""
    return error if isinstance(error, Exception) else TimeoutError("no answer to the log-in")

"""Log-ins of one worker, and everything else that waits for the word of a user's owner: AUTH and PING.

    AUTH  token verified → announced to the owner of the user's shard → the owner's answer → AUTH_ACK
    PING                   announced again                            → the owner's answer → PONG

So a session is registered before its client pulls, and nothing falls between. PING takes the same way,
therefore PONG carries the true newest mailbox sequence. The owner answers announcements of one connection in
order, so what waits is a list on the connection, and an answer belongs to the first of it; also that of an
announcement after the owner was away, which no client has asked for.

A later AUTH renews the token of the same user on the same device; a connection that was somebody stays so
until its own token ends. Every refused token is told the same, and is counted against its address.

Owned here: how often each address has failed. What waits is on the connections; sessions are the owner's.

Full: too many refused tokens from one address → RESOURCE_EXHAUSTED, before a signature is looked at. What
waits is bounded with the unanswered requests of its connection. The owner dies: pings are answered without
it, log-ins have to come again; when it is back, all its sessions are announced to it once more.
"""

import secrets
from typing import Final, Protocol

from qim import limits
from qim.clock import Clock
from qim.domain.gateway import FailedLogins, GatewayLimits, token_end
from qim.domain.presence import SESSION_TIME_BYTES, build_session_id
from qim.errors import ClientError, ResourceExhausted, Unauthenticated, Unavailable
from qim.ids import ID_BYTES, MailboxSeq, Millis, SessionId, TenantId, UserId, WorkerId
from qim.metrics import Metrics
from qim.tokens import REFUSED, Identity, TokenVerifier
from qim.wire.bodies import Auth, AuthAck, Ping, Pong, build_error, build_message, decode_body
from qim.wire.connection import State
from qim.wire.frames import Frame
from qim.wire.layout import Op
from qim.wire.link import Announce
from workers.client_socket import ClientSocket, Waiting
from workers.connections import Connections

_READY: Final = State.READY
_NOBODY: Final = 0
"""Waits in the place of an opcode where the owner's answer is for no client."""


class Owners(Protocol):
    """The way to the owners of users, local or not."""

    def owner_of_user(self, tenant: TenantId, user: UserId) -> WorkerId: ...

    def announce(self, owner: WorkerId, announce: Announce) -> bool:
        """False: the owner cannot be reached, there will be no answer."""
        ...


class Logins:
    """Who the connections of one worker speak for."""

    def __init__(
        self,
        *,
        connections: Connections,
        owners: Owners,
        tokens: TokenVerifier,
        clock: Clock,
        bounds: GatewayLimits,
        metrics: Metrics,
    ) -> None:
        self._connections = connections
        self._owners = owners
        self._tokens = tokens
        self._clock = clock
        self._bounds = bounds
        self._metrics = metrics
        self._failed_logins = FailedLogins(bounds.failed_logins)

    # --- called by the gateway -----------------------------------------------------------------------

    def on_auth(self, sock: ClientSocket, frame: Frame, now: float) -> None:
        """The first frame of a connection, or a later token of the same user and device."""
        first = not sock.session
        try:
            auth, identity = self._verify(sock, frame, now)
        except ClientError as error:
            self._connections.answer(sock, build_error(frame.request_id, error))
            # A connection that was somebody stays so until its own token ends.
            if first:
                self._connections.part(sock)
            return
        sock.token_ends_at = token_end(
            now_seconds=now, now_ms=self._clock.now_ms(), expires_at_ms=identity.expires_at_ms
        )
        if first:
            sock.tenant, sock.user, sock.device = identity.tenant, identity.user, auth.device_id
            sock.session = self._new_session(auth.device_time)
            sock.owner = self._owners.owner_of_user(sock.tenant, sock.user)
        self._connections.look_again(sock)
        self._await_owner(sock, Waiting(Op.AUTH, frame.request_id))
        if not self._announce(sock, repeated=not first):
            self._fail_waiting(sock)

    def on_ping(self, sock: ClientSocket, frame: Frame) -> None:
        """Answered by the owner's word, or without one when the owner cannot be reached."""
        try:
            ping: Ping = decode_body(Op.PING, frame.body)
        except ClientError as error:
            self._connections.answer(sock, build_error(frame.request_id, error))
            return
        self._await_owner(sock, Waiting(Op.PING, frame.request_id, ping.time))
        if not self._announce(sock, repeated=True):
            self._answer_waiting(sock, MailboxSeq(0))

    def _verify(self, sock: ClientSocket, frame: Frame, now: float) -> tuple[Auth, Identity]:
        """Raises what the client is told. The cheap checks come first, the signature last."""
        wait_ms = self._failed_logins.wait_ms(sock.address, now)
        if wait_ms:
            raise ResourceExhausted("too many refused tokens", retry_after_ms=wait_ms)
        auth: Auth = decode_body(Op.AUTH, frame.body)
        try:
            identity = self._tokens.verify(auth.token)
            if identity.device not in {None, auth.device_id}:
                raise Unauthenticated(REFUSED)
            if sock.session and (identity.tenant, identity.user, auth.device_id) != (
                sock.tenant, sock.user, sock.device,
            ):  # fmt: skip
                raise Unauthenticated(REFUSED)
        except Unauthenticated:
            self._metrics.auth_refused += 1
            self._failed_logins.note_failure(sock.address, now)
            raise
        return auth, identity

    def _new_session(self, device_time: Millis) -> SessionId:
        """Begins with the time: of two sessions of a device the later one is known by it."""
        time = device_time or self._clock.now_ms()
        return build_session_id(time, secrets.token_bytes(ID_BYTES - SESSION_TIME_BYTES))

    def _announce(self, sock: ClientSocket, *, repeated: bool) -> bool:
        who = (sock.tenant, sock.user, sock.device, sock.session)
        return self._owners.announce(sock.owner, Announce(sock.handle, sock.generation, *who, repeated))

    def _await_owner(self, sock: ClientSocket, waiting: Waiting) -> None:
        if sock.waiting is None:
            sock.waiting = []
        sock.waiting.append(waiting)

    def _answer_waiting(self, sock: ClientSocket, newest: MailboxSeq) -> None:
        """Answers the first that waits."""
        assert sock.waiting
        waiting = sock.waiting.pop(0)
        if not sock.waiting:
            sock.waiting = None
        if waiting.opcode == _NOBODY:
            return
        if waiting.opcode == Op.PING:
            pong = Pong(self._clock.now_ms(), newest)
            self._connections.answer(sock, build_message(Op.PONG, waiting.request_id, pong))
            return
        if sock.wire.state is State.AUTHENTICATING:
            sock.wire.authenticated()
        ack = self._auth_ack(sock, newest)
        self._connections.answer(sock, build_message(Op.AUTH_ACK, waiting.request_id, ack))

    def _auth_ack(self, sock: ClientSocket, newest: MailboxSeq) -> AuthAck:
        bounds = self._bounds
        told = {
            "message_body_bytes": limits.MESSAGE_BODY_BYTES_MAX,
            "page_entries": limits.PAGE_ENTRIES_MAX,
            "unanswered_requests": bounds.unanswered_requests_max,
            "sends_per_second": int(bounds.sends.per_second),
            "sends_burst": int(bounds.sends.burst),
        }
        return AuthAck(sock.user, sock.session, self._clock.now_ms(), bounds.ping_interval_ms, told, newest)

    def _fail_waiting(self, sock: ClientSocket) -> None:
        """The owner cannot be reached: pings are still answered, a log-in has to come again."""
        while sock.waiting:
            if sock.waiting[0].opcode in {Op.PING, _NOBODY} or sock.wire.state is _READY:
                self._answer_waiting(sock, MailboxSeq(0))
                continue
            request_id = sock.waiting.pop(0).request_id
            error = Unavailable("try again", retry_after_ms=1_000)
            self._connections.answer(sock, build_error(request_id, error))
            self._connections.part(sock)

    # --- called by the router ------------------------------------------------------------------------

    def announced(self, handle: int, generation: int, newest: MailboxSeq) -> None:
        """The owner has registered the session; it answers announcements of one connection in order."""
        sock = self._connections.table.find(handle, generation)
        if sock is not None and sock.waiting:
            self._answer_waiting(sock, newest)

    def close(self, handle: int, generation: int, error: ClientError) -> None:
        """The owner of the user's shard has decided that this session ends."""
        sock = self._connections.table.find(handle, generation)
        if sock is None:
            return
        if sock.wire.state is State.AUTHENTICATING and sock.waiting:
            self._connections.answer(sock, build_error(sock.waiting.pop(0).request_id, error))
        self._connections.end(sock, error)

    def on_owner_lost(self, owner: WorkerId) -> None:
        """What waits for this owner's word will not get it."""
        for sock in list(self._connections.table):
            if sock.waiting and sock.owner == owner:
                self._fail_waiting(sock)

    def announce_all(self, owner: WorkerId) -> None:
        """The owner is back and knows nothing, or not all: tell it every session again."""
        for sock in self._connections.table:
            if sock.owner == owner and sock.wire.state is _READY:
                self._await_owner(sock, Waiting(_NOBODY, 0))
                if not self._announce(sock, repeated=True):
                    self._fail_waiting(sock)

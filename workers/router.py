"""Everything between the gateway, the roles and the links of one worker: who owns it, here or over there.

    gateway → route, announce, withdraw  → local role or link
    mailbox → push                       → local gateway or link
    presence → announced, close_session  → local gateway or link
    link → on_link_message               → local role or gateway

For a request only the target is looked at, and of the usual encoding only four bytes: the body travels
untouched and is decoded once, by its owner. Owners are remembered in two bounded caches, so the two hashes
of a placement are computed once per pair and once per user; places of groups are remembered by their rules.

The router owns no message and waits for nothing. Every request gets exactly one answer: from its role, from
the stream that lost it, or from here when its owner cannot be reached (UNAVAILABLE, nothing was stored).
What is full is the link's business. A peer dies: what waited for its word is told so, its sessions leave
the presence table; when it is back, all sessions it owns are announced again.
"""

from collections.abc import Hashable
from typing import Final, Generic, Protocol, TypeVar, assert_never

from qim import limits
from qim.clock import Clock
from qim.domain.gateway import Destination
from qim.domain.placement import Placement, shard_of_user, slot_of_bucket
from qim.domain.presence import Session
from qim.domain.writer import Route, route_direct, route_group
from qim.errors import (
    ClientError,
    RemoteProtocolError,
    Unavailable,
)
from qim.ids import ID_BYTES, GroupId, MailboxSeq, SessionId, TenantId, UserId, WorkerId
from qim.metrics import Metrics
from qim.wire.bodies import build_error
from qim.wire.link import (
    Announce,
    Announced,
    Close,
    Hello,
    LinkMessage,
    LinkRequest,
    Push,
    PushedTo,
    Reply,
    Withdraw,
    build_announce,
    build_announced,
    build_close,
    build_link_push,
    build_withdraw,
)
from workers.gateway import DESTINATION_OF, Gateway
from workers.link import Links, LinkStream
from workers.presence import Presence, ending_of
from workers.request import Request
from workers.subject import conversation_of

_DIRECT_TARGET: Final = b"\x92\x01\xc4\x10"
"""Array of two, kind 1, bin of 16: how a direct target begins, behind the head of the body's array."""
_GROUP_TARGET: Final = b"\x92\x02\xc4\x10"
_TARGET_ID: Final = slice(5, 5 + ID_BYTES)

K = TypeVar("K", bound=Hashable)


class Role(Protocol):
    """What takes requests: writer and mailbox."""

    def submit(self, request: Request) -> None:
        """Notes the request, or answers it at once when there is no room."""
        ...


class OwnerCache(Generic[K]):
    """Bounded, with no bookkeeping on a hit: what was not used while the young half filled is forgotten."""

    def __init__(self, entries_max: int) -> None:
        self._half = entries_max // 2
        self._young: dict[K, WorkerId] = {}
        self._old: dict[K, WorkerId] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: K) -> WorkerId | None:
        owner = self._young.get(key)
        if owner is None:
            owner = self._old.get(key)
            if owner is not None:
                self.put(key, owner)
        return owner

    def put(self, key: K, owner: WorkerId) -> None:
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[key] = owner


class Router:
    """One per worker. `bind` closes the circle, because everyone here needs the router too."""

    def __init__(self, *, worker: WorkerId, placement: Placement, clock: Clock, metrics: Metrics) -> None:
        self._worker = worker
        self._placement = placement
        self._clock = clock
        self._metrics = metrics
        self._conversations: OwnerCache[tuple[TenantId, UserId, bytes]] = OwnerCache(limits.ROUTES_MAX)
        self._users: OwnerCache[tuple[TenantId, UserId]] = OwnerCache(limits.ROUTES_MAX)

    def bind(
        self, *, gateway: Gateway, presence: Presence, writer: Role, mailbox: Role, links: Links | None
    ) -> None:
        """`links` None: this worker is the only one."""
        assert links is not None or self._placement.workers == 1
        self._gateway = gateway
        self._presence = presence
        self._writer = writer
        self._mailbox = mailbox
        self._links = links

    # --- from the gateway ----------------------------------------------------------------------------

    def route(self, request: Request, destination: Destination) -> None:
        """Hands a request to its owner; its origin gets exactly one answer, whatever happens."""
        of_user = destination is Destination.USER
        if self._links is None:
            (self._mailbox if of_user else self._writer).submit(request)
            return
        try:
            owner = self._owner_of_sender(request) if of_user else self._owner_of_target(request)
        except ClientError as error:
            request.origin.reply(request, build_error(request.request_id, error))
            return
        if owner == self._worker:
            (self._mailbox if of_user else self._writer).submit(request)
            return
        stream = self._links.stream(owner)
        if stream is None or not stream.request(request):
            self._metrics.link_unavailable += 1
            away = Unavailable("the owner cannot be reached", retry_after_ms=limits.LINK_RETRY_MS_MAX)
            request.origin.reply(request, build_error(request.request_id, away))

    def _owner_of_sender(self, request: Request) -> WorkerId:
        return self.owner_of_user(request.tenant, request.user)

    def _owner_of_target(self, request: Request) -> WorkerId:
        body = request.body
        named = body[_TARGET_ID]
        if len(named) == ID_BYTES and len(body) <= limits.MESSAGE_BODY_BYTES_MAX:
            if body[1:5] == _DIRECT_TARGET:
                key = (request.tenant, request.user, named)
                owner = self._conversations.get(key)
                if owner is None:
                    owner = self._owner_of(route_direct(request.tenant, request.user, UserId(named)))
                    self._conversations.put(key, owner)
                return owner
            if body[1:5] == _GROUP_TARGET:
                return self._owner_of(route_group(request.tenant, GroupId(named)))
        # What names no target, unusual encodings, and what must not travel: too large or unreadable.
        return self._owner_of(conversation_of(request))

    def _owner_of(self, route: Route) -> WorkerId:
        return self._placement.worker_of(slot_of_bucket(route.bucket))

    def owner_of_user(self, tenant: TenantId, user: UserId) -> WorkerId:
        """The worker that holds the user's mailbox and presence."""
        owner = self._users.get((tenant, user))
        if owner is None:
            owner = self._placement.worker_of(shard_of_user(tenant, user))
            self._users.put((tenant, user), owner)
        return owner

    def announce(self, owner: WorkerId, announce: Announce) -> bool:
        """False: the owner cannot be reached, there will be no answer."""
        if owner == self._worker:
            self._presence.announce(Session(owner, *announce[:6]), repeated=announce.repeated)
            return True
        stream = self._stream(owner)
        if stream is None:
            return False
        stream.send(build_announce(announce))
        return True

    def withdraw(self, owner: WorkerId, tenant: TenantId, user: UserId, session: SessionId) -> None:
        """An owner that cannot be reached has dropped all our sessions with the link."""
        if owner == self._worker:
            self._presence.withdraw(tenant, user, session)
        elif stream := self._stream(owner):
            stream.send(build_withdraw(tenant, user, session))

    def _stream(self, peer: WorkerId) -> LinkStream | None:
        return self._links.stream(peer) if self._links is not None else None

    # --- from mailbox and presence -------------------------------------------------------------------

    def push(self, worker: WorkerId, targets: list[PushedTo], entry: bytes) -> None:
        """Sends one entry to sessions behind one gateway. May be lost: a pull brings it."""
        if worker == self._worker:
            self._gateway.deliver(targets, entry)
            return
        stream = self._stream(worker)
        if stream is None or stream.is_full:
            self._metrics.link_pushes_dropped += len(targets)
            return
        stream.send(build_link_push(targets, entry))

    def announced(self, session: Session, newest: MailboxSeq) -> None:
        """The owner's answer to an announcement."""
        if session.worker == self._worker:
            self._gateway.logins.announced(session.handle, session.generation, newest)
        elif stream := self._stream(session.worker):
            stream.send(build_announced(session.handle, session.generation, newest))

    def close_session(self, session: Session, error: ClientError) -> None:
        """The owner's word that a session ends."""
        if session.worker == self._worker:
            self._gateway.logins.close(session.handle, session.generation, error)
        elif stream := self._stream(session.worker):
            stream.send(build_close(session.handle, session.generation, error.code))

    # --- from the links ------------------------------------------------------------------------------

    def on_link_up(self, peer: WorkerId) -> None:
        self._gateway.logins.announce_all(peer)

    def on_link_lost(self, peer: WorkerId) -> None:
        self._presence.drop_worker(peer)
        self._gateway.logins.on_owner_lost(peer)

    def on_link_reply(self, handle: int, generation: int, frame: bytes) -> None:
        self._gateway.deliver_reply(handle, generation, frame)

    def on_link_message(self, stream: LinkStream, message: LinkMessage) -> None:
        """Raises RemoteProtocolError for what a peer must not send; the stream is cut then."""
        match message:
            case LinkRequest():
                self._on_link_request(stream, message)
            case Push():
                self._gateway.deliver(message.targets, message.entry)
            case Announce():
                assert stream.peer is not None
                self._presence.announce(Session(stream.peer, *message[:6]), repeated=message.repeated)
            case Announced():
                self._gateway.logins.announced(*message)
            case Withdraw():
                self._presence.withdraw(*message)
            case Close():
                self._gateway.logins.close(message.handle, message.generation, ending_of(message.code))
            case Hello() | Reply():
                raise RemoteProtocolError("this link frame is not expected here")
            case _:
                assert_never(message)

    def _on_link_request(self, stream: LinkStream, message: LinkRequest) -> None:
        destination = DESTINATION_OF.get(message.opcode)
        request = Request(
            origin=stream, handle=message.handle, generation=message.generation,
            request_id=message.request_id, opcode=message.opcode, tenant=message.tenant, user=message.user,
            device=message.device, session=message.session, body=message.body,
            arrived=self._clock.monotonic(),
        )  # fmt: skip
        match destination:
            case Destination.CONVERSATION:
                self._writer.submit(request)
            case Destination.USER:
                self._mailbox.submit(request)
            case _:
                raise RemoteProtocolError(f"opcode {message.opcode:#06x} does not travel over links")

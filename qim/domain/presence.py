"""Which session of a user is connected where, and what its newest mailbox entry is.

The table belongs to the owner of the user's shard and lives in its memory only. Losing it costs a pull, never
a message: gateways announce their sessions again, and until then a user simply gets no push. Invariants:

    - a user is in the table exactly while at least one session of theirs is registered
    - at most one session per device; a log-in replaces the session of its device, whatever it was
    - a *repeated* announcement (ping, link back) never displaces a log-in that this table has seen. Of two
      repeated ones, after the table was lost, the later stays: session ids begin with the time of log-in
    - a client is told for good that it was replaced only where arrival and time agree: two links, or a
      gateway that stood still over an AUTH, may change the order of two log-ins. The time is the device's,
      which knows the order of its own log-ins; that of a gateway where the device told none. Who was ended
      on less comes again; with two living clients of one device that may end the other one
    - a withdrawal names its session, so the late end of an old socket cannot remove the new one
    - `newest` is 0 (not known) or exactly the user's newest entry at or below W: the store's answer at the
      first log-in, from then on what `advance` was told. It is forgotten together with the last session

Order at log-in: the session is registered first, then the store is asked, so an entry that is finished in
between is either in the answer or pushed. `advance` may therefore hear of an entry that the store's answer
already covered; it then answers 0, and the client pulls instead of trusting a broken chain.
Full: one more session is refused; sessions that are registered stay.
"""

from enum import Enum
from typing import Final, NamedTuple

from qim import limits
from qim.ids import ID_BYTES, DeviceId, MailboxSeq, Millis, SessionId, TenantId, UserId, WorkerId

UNKNOWN = MailboxSeq(0)
SESSION_TIME_BYTES: Final = 6
"""A session id begins with the milliseconds of its log-in, big-endian, by the clock of its device
if that told one, else by that of its gateway."""


def build_session_id(log_in: Millis, chance: bytes) -> SessionId:
    """`chance` tells apart what logged in within one millisecond; 10 bytes."""
    assert len(chance) == ID_BYTES - SESSION_TIME_BYTES
    return SessionId(log_in.to_bytes(SESSION_TIME_BYTES, "big") + chance)


class Session(NamedTuple):
    """A connected device: its connection at its gateway, and who it is."""

    worker: WorkerId
    handle: int
    generation: int
    tenant: TenantId
    user: UserId
    device: DeviceId
    session: SessionId


class Outcome(Enum):
    REGISTERED = "registered"
    REFUSED = "refused"
    """Another session of this device stays."""
    FULL = "full"


class Announcement(NamedTuple):
    """What an announcement did."""

    outcome: Outcome
    ended: Session | None = None
    """The one of two sessions of a device that must be closed now."""
    is_sure: bool = True
    """Whether the other one is known to be later."""


class _User:
    __slots__ = ("again", "asked", "newest", "sessions", "stay")

    def __init__(self, stay: int) -> None:
        self.stay = stay
        self.sessions: dict[DeviceId, Session] = {}
        self.again: set[DeviceId] | None = None
        """Devices whose session was announced again; of the others the log-in was seen. None: of all."""
        self.newest = UNKNOWN
        self.asked = False
        """Whether the store has answered: then 0 means that the mailbox is empty."""


class PresenceTable:
    """The users of the owner's shards that are online."""

    def __init__(
        self,
        *,
        sessions_max: int = limits.PRESENCE_SESSIONS_MAX,
        sessions_per_user_max: int = limits.PRESENCE_SESSIONS_PER_USER_MAX,
    ) -> None:
        self._sessions_max = sessions_max
        self._sessions_per_user_max = sessions_per_user_max
        self._users: dict[tuple[TenantId, UserId], _User] = {}
        self._count = 0
        self._stays = 0

    def __len__(self) -> int:
        """Sessions, not users."""
        return self._count

    def announce(self, session: Session, *, repeated: bool) -> Announcement:
        """Registers a session. `repeated` is false for a log-in only."""
        key = (session.tenant, session.user)
        user = self._users.get(key)
        held = user.sessions.get(session.device) if user else None
        if user is None or held is None:
            held_by_user = len(user.sessions) if user else 0
            if self._count >= self._sessions_max or held_by_user >= self._sessions_per_user_max:
                return Announcement(Outcome.FULL)
            self._count += 1
        elif repeated and held.session != session.session:
            if user.again is None or session.device not in user.again:
                return Announcement(Outcome.REFUSED, session, is_sure=_is_surely_later(held, session))
            if held.session > session.session:
                return Announcement(Outcome.REFUSED, session, is_sure=False)
        if user is None:
            self._stays += 1
            user = self._users[key] = _User(self._stays)
        user.sessions[session.device] = session
        if held is None or not repeated:
            _note(user, session.device, again=repeated)
        if held is None or held.session == session.session:
            return Announcement(Outcome.REGISTERED)
        is_sure = not repeated and _is_surely_later(session, held)
        return Announcement(Outcome.REGISTERED, held, is_sure)

    def withdraw(self, tenant: TenantId, user_id: UserId, session_id: SessionId) -> bool:
        """Removes exactly this session; False when it is not the registered one any more."""
        user = self._users.get((tenant, user_id))
        if user is None:
            return False
        for device, session in user.sessions.items():
            if session.session == session_id:
                self._remove(user, device, session)
                return True
        return False

    def drop_worker(self, worker: WorkerId) -> int:
        """Forgets all sessions behind a gateway that cannot be reached; it announces them again."""
        lost = [
            (user, device, session)
            for user in self._users.values()
            for device, session in user.sessions.items()
            if session.worker == worker
        ]
        for user, device, session in lost:
            self._remove(user, device, session)
        return len(lost)

    def _remove(self, user: _User, device: DeviceId, session: Session) -> None:
        del user.sessions[device]
        _note(user, device, again=False)
        self._count -= 1
        if not user.sessions:
            del self._users[session.tenant, session.user]

    def sessions_of(self, tenant: TenantId, user_id: UserId) -> list[Session]:
        """Where a push goes; empty: offline."""
        user = self._users.get((tenant, user_id))
        return list(user.sessions.values()) if user else []

    def newest(self, tenant: TenantId, user_id: UserId) -> MailboxSeq | None:
        """The newest entry from memory; None: the store must be asked."""
        user = self._users.get((tenant, user_id))
        return user.newest if user is not None and (user.asked or user.newest) else None

    def stay_of(self, tenant: TenantId, user_id: UserId) -> int:
        """Names the unbroken time that the user has been in the table; 0: is not."""
        user = self._users.get((tenant, user_id))
        return user.stay if user else 0

    def learn(self, tenant: TenantId, user_id: UserId, newest: MailboxSeq, *, stay: int) -> MailboxSeq:
        """Takes the store's answer; what was finished since then is newer and stays. Gives the newest.

        `stay` is from when the store was asked: if the user has left the table since, entries may have been
        finished unseen, and the answer is good for its client only.
        """
        user = self._users.get((tenant, user_id))
        if user is None or user.stay != stay:
            return newest
        user.asked = True
        user.newest = max(user.newest, newest)
        return user.newest

    def advance(self, tenant: TenantId, user_id: UserId, mailbox_seq: MailboxSeq) -> MailboxSeq:
        """Notes a finished entry and gives the user's entry before it; 0: not known.

        Must be called for every finished entry of a user who is online, in order.
        """
        user = self._users.get((tenant, user_id))
        if user is None or user.newest >= mailbox_seq:
            return UNKNOWN
        previous, user.newest = user.newest, mailbox_seq
        return previous


def _note(user: _User, device: DeviceId, *, again: bool) -> None:
    if again:
        user.again = user.again or set()
        user.again.add(device)
    elif user.again is not None:
        user.again.discard(device)
        user.again = user.again or None


def _is_surely_later(arrived: Session, before: Session) -> bool:
    """Whether time agrees with the order of arrival. Equal times say nothing."""
    return _login_ms(arrived) > _login_ms(before)


def _login_ms(session: Session) -> int:
    return int.from_bytes(session.session[:SESSION_TIME_BYTES], "big")

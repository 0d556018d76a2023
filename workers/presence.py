"""Who is connected where: the owner's side of log-ins, pings and withdrawals.

One object per worker, for the users of its shards; `qim/domain/presence.py` decides. Order of an
announcement: the session is registered at once, in the callback that brought it, then its gateway is
answered with the user's newest mailbox sequence: from memory when the user is known, otherwise from the
store. All users that became unknown questions during one pass are asked in one `read_mailbox` per instance,
so a wave of log-ins costs few round trips.

The table is memory; losing it costs pulls. Who goes away is withdrawn by name, or with the link to their
gateway. Full: the newcomer is closed with RESOURCE_EXHAUSTED, registered sessions stay. REPLACED, which
ends a client for good, is said only where the order of two log-ins is sure; otherwise the client comes
again. The store fails: the announcement is answered with 0, which means "not known" and makes nobody wait;
the user stays unknown, so the next ping asks again.
"""

from collections.abc import Awaitable, Sequence
from typing import Final, Protocol

from qim import limits
from qim.domain.placement import Placement, shard_of_user
from qim.domain.presence import UNKNOWN, Outcome, PresenceTable, Session
from qim.errors import ClientError, GoingAway, Replaced, ResourceExhausted, StoreError
from qim.ids import MAILBOX_SEQ_MAX, MailboxSeq, SessionId, TenantId, UserId, WorkerId
from qim.ports import MailboxPage, MailboxPageQuery, MailboxStore
from workers.inbox import Inbox

_FULL: Final = ResourceExhausted("too many sessions", retry_after_ms=limits.LINK_RETRY_MS_MAX)
_REPLACED: Final = Replaced("a later log-in of this device took over")
_COME_AGAIN: Final = GoingAway("another connection of this device")

_ENDINGS: Final = {error.code: error for error in (_FULL, _REPLACED)}


def ending_of(code: int) -> ClientError:
    """What the owner of a user says to a session that it ends; over a link travels its code only."""
    return _ENDINGS.get(code, _COME_AGAIN)


class PresenceAnswers(Protocol):
    """The way back to the gateways (`workers/router.py`)."""

    def announced(self, session: Session, newest: MailboxSeq) -> None: ...

    def close_session(self, session: Session, error: ClientError) -> None: ...


class Presence:
    """The sessions of the users whose shards this worker owns."""

    def __init__(
        self,
        *,
        placement: Placement,
        mailboxes: Sequence[MailboxStore],
        answers: PresenceAnswers,
        table: PresenceTable | None = None,
    ) -> None:
        """`mailboxes` by mailbox instance."""
        self._placement = placement
        self._mailboxes = mailboxes
        self._answers = answers
        self._table = table if table is not None else PresenceTable()
        self._unknown: Inbox[tuple[Session, int]] = Inbox(items_max=limits.PRESENCE_SESSIONS_MAX, bytes_max=1)

    def __len__(self) -> int:
        return len(self._table)

    def announce(self, session: Session, *, repeated: bool) -> None:
        """Registers, then answers: now, or after the store was asked. `repeated`: not a log-in."""
        outcome, ended, is_sure = self._table.announce(session, repeated=repeated)
        if outcome is Outcome.FULL:
            self._answers.close_session(session, _FULL)
        if ended is not None:
            self._answers.close_session(ended, _REPLACED if is_sure else _COME_AGAIN)
        if outcome is not Outcome.REGISTERED:
            return
        newest = self._table.newest(session.tenant, session.user)
        if newest is not None:
            self._answers.announced(session, newest)
        elif not self._unknown.offer((session, self._table.stay_of(session.tenant, session.user))):
            self._answers.announced(session, UNKNOWN)

    def withdraw(self, tenant: TenantId, user: UserId, session: SessionId) -> None:
        """The session has ended; a later one of the same device stays."""
        self._table.withdraw(tenant, user, session)

    def drop_worker(self, worker: WorkerId) -> None:
        """The link to this gateway is lost; it announces its sessions again when it is back."""
        self._table.drop_worker(worker)

    def sessions_of(self, tenant: TenantId, user: UserId) -> list[Session]:
        """Where pushes for this user go."""
        return self._table.sessions_of(tenant, user)

    def advance(self, tenant: TenantId, user: UserId, mailbox_seq: MailboxSeq) -> MailboxSeq:
        """Notes a finished entry; gives the user's entry before it, 0 when it is not known.

        To be called for every entry at which W has arrived, in the order of the shard.
        """
        return self._table.advance(tenant, user, mailbox_seq)

    async def run(self) -> None:
        """Asks the store for the users that memory does not know, until drained."""
        while batch := await self._unknown.take(limits.PRESENCE_READS_MAX):
            await self._ask_store(batch)

    async def drain(self, deadline: float) -> None:  # noqa: ARG002 - a question takes one round trip
        """No more questions; what was asked is still answered."""
        self._unknown.close()

    async def _ask_store(self, batch: Sequence[tuple[Session, int]]) -> None:
        by_instance: dict[int, list[tuple[Session, int]]] = {}
        for session, stay in batch:
            shard = shard_of_user(session.tenant, session.user)
            by_instance.setdefault(self._placement.mailbox_instance_of(shard), []).append((session, stay))
        # Issued to all instances first, then awaited: the slowest decides, not the sum.
        asked = [
            (
                sessions,
                self._mailboxes[instance].read_mailbox([_newest_only(session) for session, _ in sessions]),
            )
            for instance, sessions in by_instance.items()
        ]
        for sessions, pages in asked:
            await self._answer(sessions, pages)

    async def _answer(
        self, sessions: Sequence[tuple[Session, int]], pages: Awaitable[list[MailboxPage]]
    ) -> None:
        try:
            found = [page.newest for page in await pages]
        except StoreError:
            for session, _ in sessions:
                self._answers.announced(session, UNKNOWN)
            return
        for (session, stay), newest in zip(sessions, found, strict=True):
            known = self._table.learn(session.tenant, session.user, newest, stay=stay)
            self._answers.announced(session, known)


def _newest_only(session: Session) -> MailboxPageQuery:
    """Asks for nothing behind the end: the page is empty, only its `newest` is looked at."""
    return MailboxPageQuery(
        tenant=session.tenant,
        user=session.user,
        slot=shard_of_user(session.tenant, session.user),
        after=MailboxSeq(MAILBOX_SEQ_MAX),
        entries_max=1,
        bytes_max=1,
        held_through=MailboxSeq(0),
        held_count=0,
    )

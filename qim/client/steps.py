"""What a transaction of the local store does to its tables; runs in the writer thread only.

`apply` is the heart. In one transaction, in this order: acknowledgements become messages, received messages
are stored once per (conversation_id, conversation_seq), pending rows whose message arrived are released,
echoes are looked up, and a cursor moves if a page brought one. What it returns is told to nobody before the
commit: the caller learns which messages were new, which conversations changed, which acknowledgements hold
and which echoes have no message here.

The statements put together with f-strings contain constants of this module only (hence S608 beside them).

A received message releases a pending row only if its content is the same. A row with the identity of another
content (a copied file) stays, and the server's CONFLICT ends it.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from qim.client import schema
from qim.client.model import Ack, Conversation, Message, MessageState, Target
from qim.client.outgoing import PendingRow
from qim.client.sync import Gap, subtract_page
from qim.ids import ClientMessageId, ConversationId, DeviceId, MailboxSeq, MessageId, Millis, Seq, UserId
from qim.wire.bodies import DEVICE_TIME_MAX, SendAck

UNREAD_SHOWN_MAX: Final = 1_000
"""Counting stops here: a number above it helps nobody and would cost a scan per message."""
_MESSAGE_COLUMNS: Final = (
    "m.conversation_id, m.conversation_seq, m.message_id, m.sender, m.sender_device, m.client_message_id,"
    " m.message_type, m.custom_type, m.body, m.retention_class, m.reserved_at"
)
_NONE: Final = bytes(16)


class Echo(NamedTuple):
    """The coordinates of an own message, pushed without its record."""

    conversation_id: ConversationId
    conversation_seq: Seq


@dataclass
class Incoming:
    """Everything of one pass that goes into one transaction."""

    messages: list[Message] = field(default_factory=list)
    acks: list[SendAck] = field(default_factory=list)
    echoes: list[Echo] = field(default_factory=list)
    cursor: MailboxSeq | None = None
    """Set by a page only."""


@dataclass
class Applied:
    """What a committed transaction changed."""

    added: list[Message] = field(default_factory=list)
    acknowledged: list[tuple[Ack, Message]] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)
    missing_echoes: set[Echo] = field(default_factory=set)


class RebuildItem(NamedTuple):
    """A conversation as the server lists it."""

    conversation_id: ConversationId
    target: Target
    head_seq: Seq
    read_seq: Seq
    last_activity: Millis


class Loaded(NamedTuple):
    """What a client starts with."""

    device_id: DeviceId
    cursor: MailboxSeq
    pending: list[PendingRow]


class StoreSteps:
    """Statements over one connection, inside a transaction of the writer thread."""

    def __init__(self, connection: sqlite3.Connection, me: UserId) -> None:
        self._connection = connection
        self._me = me

    # --- identity

    def load(self, bound_device: DeviceId | None) -> Loaded:
        if bound_device is not None:
            self._set_meta("device_id", bound_device)
        rows = self._connection.execute(
            f"SELECT {schema.PENDING_COLUMNS} FROM pending WHERE state = ? ORDER BY ordinal",  # noqa: S608 - constants
            (MessageState.QUEUED,),
        )
        return Loaded(
            DeviceId(bytes(self._meta("device_id"))),
            MailboxSeq(self._meta("cursor")),
            [_pending(r) for r in rows],
        )

    def reserve_ordinals(self, count: int) -> int:
        first = int(self._meta("ordinal"))
        self._set_meta("ordinal", first + count)
        return first

    def next_login(self, now_ms: Millis) -> Millis:
        """Above every one that this store gave before, whatever became of the clock since."""
        last = self._meta("login")
        # A value that cannot be told, from a clock gone wrong or a bad disk, would lock the device out.
        is_possible = isinstance(last, int) and 0 <= last < DEVICE_TIME_MAX
        time = Millis(min(max(now_ms, last + 1 if is_possible else 0), DEVICE_TIME_MAX))
        self._set_meta("login", time)
        return time

    def renew_identity(self, is_device_bound: bool) -> DeviceId:
        self._set_meta("ordinal", schema.first_ordinal())
        if not is_device_bound:
            self._set_meta("device_id", schema.new_device_id())
        return self._device_id()

    # --- outgoing

    def insert_pending(self, row: PendingRow) -> None:
        self._connection.execute(
            "INSERT INTO pending (ordinal, client_message_id, kind, target, message_type, custom_type, body,"
            " retention_class, first_sent_at, state) VALUES (?,?,?,?,?,?,?,?,?,?)",
            (
                row.ordinal, row.client_message_id, row.target.kind, row.target.id, row.message_type,
                row.custom_type, row.body, row.retention_class, row.first_sent_at, MessageState.QUEUED,
            ),
        )  # fmt: skip

    def mark_sent(self, rows: Sequence[PendingRow]) -> None:
        self._connection.executemany(
            "UPDATE pending SET first_sent_at = ? WHERE ordinal = ?",
            [(row.first_sent_at, row.ordinal) for row in rows],
        )

    def end_pending(
        self, client_message_id: ClientMessageId, state: MessageState, failure: str, code: int
    ) -> Message | None:
        self._connection.execute(
            "UPDATE pending SET state = ?, failure = ?, failure_code = ? WHERE client_message_id = ?",
            (state, failure, code, client_message_id),
        )
        found = self._pending_rows("client_message_id = ?", (client_message_id,))
        return found[0] if found else None

    def discard(self, client_message_id: ClientMessageId) -> bool:
        done = self._connection.execute(
            "DELETE FROM pending WHERE client_message_id = ? AND state != ?",
            (client_message_id, MessageState.QUEUED),
        )
        return done.rowcount > 0

    # --- incoming

    def apply(self, incoming: Incoming) -> Applied:
        applied = Applied()
        for ack in incoming.acks:
            self._apply_ack(ack, applied)
        self._store(incoming.messages, applied)
        applied.missing_echoes = {echo for echo in incoming.echoes if not self._has(echo)}
        if incoming.cursor is not None:
            self._set_meta("cursor", incoming.cursor)
        self._describe(applied)
        return applied

    def apply_history(
        self,
        target: Target,
        conversation_id: ConversationId,
        messages: Sequence[Message],
        page: Gap | None,
    ) -> Applied:
        applied = Applied()
        self._store(messages, applied)
        if page is not None:
            for gap in self.gaps(target):
                self._replace_gap(
                    conversation_id,
                    gap,
                    subtract_page(gap, first=Seq(page.after_seq + 1), last=page.head_seq),
                )
        self._describe(applied)
        return applied

    def rebuild(self, cursor: MailboxSeq, items: Sequence[RebuildItem]) -> Applied:
        applied = Applied()
        for item in items:
            self._note_holes(item.conversation_id, item.head_seq)
            self._touch(item.conversation_id, item.target, item.head_seq, item.read_seq, item.last_activity)
        self._set_meta("cursor", cursor)
        applied.conversations = self._conversations_of(item.conversation_id for item in items)
        return applied

    def set_read(self, marks: Sequence[tuple[ConversationId, Seq]]) -> list[Conversation]:
        self._connection.executemany(
            "UPDATE conversation SET read_seq = max(read_seq, ?) WHERE conversation_id = ?",
            [(seq, conversation_id) for conversation_id, seq in marks],
        )
        return self._conversations_of(conversation_id for conversation_id, _ in marks)

    # --- reading

    def conversations(self) -> list[Conversation]:
        rows = self._connection.execute(
            "SELECT conversation_id FROM conversation ORDER BY last_activity DESC, conversation_id"
        ).fetchall()
        return self._conversations_of(ConversationId(bytes(row[0])) for row in rows)

    def messages(self, target: Target, before: Seq, limit: int) -> list[Message]:
        """Oldest first. Without `before`, the unacknowledged messages stand at the end."""
        rows = self._connection.execute(
            f"SELECT {_MESSAGE_COLUMNS} FROM message m JOIN conversation c USING (conversation_id)"  # noqa: S608 - constants
            " WHERE c.kind = ? AND c.target = ? AND (? = 0 OR m.conversation_seq < ?)"
            " ORDER BY m.conversation_seq DESC LIMIT ?",
            (target.kind, target.id, before, before, limit),
        ).fetchall()
        stored = [_message(row, target) for row in reversed(rows)]
        if before:
            return stored
        return stored + self._pending_rows("kind = ? AND target = ?", (target.kind, target.id))

    def gaps(self, target: Target) -> list[Gap]:
        """Newest first."""
        rows = self._connection.execute(
            "SELECT after_seq, g.head_seq FROM gap g JOIN conversation c USING (conversation_id)"
            " WHERE c.kind = ? AND c.target = ? ORDER BY after_seq DESC",
            (target.kind, target.id),
        )
        return [Gap(Seq(after), Seq(head)) for after, head in rows]

    # --- parts

    def _apply_ack(self, ack: SendAck, applied: Applied) -> None:
        row = self._connection.execute(
            f"SELECT {schema.PENDING_COLUMNS} FROM pending WHERE client_message_id = ?",  # noqa: S608 - constants
            (ack.client_message_id,),
        ).fetchone()
        if row is None:
            return
        pending = _pending(row)
        message = Message(
            target=pending.target, conversation_id=ack.conversation_id, conversation_seq=ack.conversation_seq,
            message_id=ack.message_id, sender=self._me, sender_device=self._device_id(),
            client_message_id=ack.client_message_id, message_type=pending.message_type,
            custom_type=pending.custom_type, body=pending.body, retention_class=pending.retention_class,
            reserved_at=ack.reserved_at,
        )  # fmt: skip
        self._release(message, applied, is_duplicate=ack.duplicate)
        self._store([message], applied)

    def _store(self, messages: Iterable[Message], applied: Applied) -> None:
        for message in messages:
            is_own = message.sender == self._me
            done = self._connection.execute(
                "INSERT OR IGNORE INTO message VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
                (
                    message.conversation_id, message.conversation_seq, message.message_id, message.sender,
                    message.sender_device, message.client_message_id, message.message_type,
                    message.custom_type, message.body, message.retention_class, message.reserved_at, is_own,
                ),
            )  # fmt: skip
            if done.rowcount == 1:
                applied.added.append(message)
                if message.conversation_seq > 1:
                    self._note_beginning(message)
                # An own message is read by its sender, as the server counts it.
                read = message.conversation_seq if is_own else Seq(0)
                self._touch(
                    message.conversation_id,
                    message.target,
                    message.conversation_seq,
                    read,
                    message.reserved_at,
                )
            if is_own:
                self._release(message, applied, is_duplicate=True)

    def _note_holes(self, conversation_id: ConversationId, head: Seq) -> None:
        """Every stretch that is missing behind the first message that is here, or all when none is.

        Not only what lies above the highest: a push may have brought the newest before the rebuild.
        """
        self._connection.execute(
            "INSERT OR REPLACE INTO gap"
            " WITH held AS (SELECT conversation_seq AS seq FROM message"
            "   WHERE conversation_id = ?1 AND conversation_seq <= ?2),"
            " started AS (SELECT seq FROM held UNION ALL SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM held)),"
            " stretch AS (SELECT seq, lead(seq, 1, ?2 + 1) OVER (ORDER BY seq) AS next FROM started)"
            " SELECT ?1, seq, next - 1 FROM stretch WHERE next > seq + 1",
            (conversation_id, head),
        )

    def _note_beginning(self, message: Message) -> None:
        """What lies before the first message that is seen of a conversation, only history can tell.

        A device that was away for longer than the mailbox keeps has not heard of a conversation that began
        meanwhile, and a new one may send into one that is old.
        """
        self._connection.execute(
            "INSERT INTO gap SELECT ?1, 0, ?2 WHERE NOT EXISTS"
            " (SELECT 1 FROM conversation WHERE conversation_id = ?1)",
            (message.conversation_id, message.conversation_seq - 1),
        )

    def _release(self, message: Message, applied: Applied, *, is_duplicate: bool) -> None:
        done = self._connection.execute(
            "DELETE FROM pending WHERE client_message_id = ? AND kind = ? AND target = ? AND message_type = ?"
            " AND custom_type = ? AND body = ? AND retention_class = ?",
            (
                message.client_message_id, message.target.kind, message.target.id, message.message_type,
                message.custom_type, message.body, message.retention_class,
            ),
        )  # fmt: skip
        if done.rowcount == 1:
            ack = Ack(
                client_message_id=message.client_message_id, conversation_id=message.conversation_id,
                conversation_seq=message.conversation_seq, message_id=message.message_id,
                reserved_at=message.reserved_at, duplicate=is_duplicate,
            )  # fmt: skip
            applied.acknowledged.append((ack, message))

    def _touch(
        self, conversation_id: ConversationId, target: Target, head: Seq, read: Seq, last_activity: Millis
    ) -> None:
        self._connection.execute(
            "INSERT INTO conversation VALUES (?1,?2,?3,?4,?5,?6) ON CONFLICT (conversation_id) DO UPDATE SET"
            " head_seq = max(head_seq, ?4), read_seq = max(read_seq, ?5),"
            " last_activity = max(last_activity, ?6)",
            (conversation_id, target.kind, target.id, head, read, last_activity),
        )

    def _has(self, echo: Echo) -> bool:
        return (
            self._connection.execute(
                "SELECT 1 FROM message WHERE conversation_id = ? AND conversation_seq = ?", echo
            ).fetchone()
            is not None
        )

    def _replace_gap(self, conversation_id: ConversationId, gap: Gap, rest: Sequence[Gap]) -> None:
        self._connection.execute(
            "DELETE FROM gap WHERE conversation_id = ? AND after_seq = ?", (conversation_id, gap.after_seq)
        )
        self._connection.executemany(
            "INSERT OR REPLACE INTO gap VALUES (?,?,?)", [(conversation_id, *part) for part in rest]
        )

    def _describe(self, applied: Applied) -> None:
        touched = dict.fromkeys(message.conversation_id for message in applied.added)
        applied.conversations = self._conversations_of(touched)
        applied.added.sort(key=lambda message: (message.conversation_id, message.conversation_seq))

    def _conversations_of(self, conversation_ids: Iterable[ConversationId]) -> list[Conversation]:
        described = (self._conversation(conversation_id) for conversation_id in conversation_ids)
        return [conversation for conversation in described if conversation is not None]

    def _conversation(self, conversation_id: ConversationId) -> Conversation | None:
        row = self._connection.execute(
            f"SELECT c.kind, c.target, c.head_seq, c.read_seq, c.last_activity, {_MESSAGE_COLUMNS}"  # noqa: S608 - constants
            " FROM conversation c LEFT JOIN message m"
            " ON m.conversation_id = c.conversation_id AND m.conversation_seq = c.head_seq"
            " WHERE c.conversation_id = ?",
            (conversation_id,),
        ).fetchone()
        if row is None:
            return None
        unread = self._connection.execute(
            "SELECT count(*) FROM (SELECT 1 FROM message WHERE conversation_id = ? AND conversation_seq > ?"
            " AND own = 0 LIMIT ?)",
            (conversation_id, row[3], UNREAD_SHOWN_MAX),
        ).fetchone()[0]
        target = Target(row[0], bytes(row[1]))
        return Conversation(
            target=target, conversation_id=conversation_id, head_seq=Seq(row[2]), read_seq=Seq(row[3]),
            unread=unread, last_activity=Millis(row[4]),
            head=_message(row[5:], target) if row[5] is not None else None,
        )  # fmt: skip

    def _pending_rows(self, condition: str, arguments: tuple[Any, ...]) -> list[Message]:
        rows = self._connection.execute(
            f"SELECT {schema.PENDING_COLUMNS} FROM pending WHERE {condition} ORDER BY ordinal",  # noqa: S608 - constants
            arguments,
        )
        return [self._pending_message(row) for row in rows]

    def _pending_message(self, row: tuple[Any, ...]) -> Message:
        pending = _pending(row)
        return Message(
            target=pending.target, conversation_id=ConversationId(_NONE), conversation_seq=Seq(0),
            message_id=MessageId(_NONE), sender=self._me, sender_device=self._device_id(),
            client_message_id=pending.client_message_id, message_type=pending.message_type,
            custom_type=pending.custom_type, body=pending.body, retention_class=pending.retention_class,
            reserved_at=Millis(0), state=MessageState(row[9]), failure=row[10], failure_code=row[11],
        )  # fmt: skip

    def _device_id(self) -> DeviceId:
        return DeviceId(bytes(self._meta("device_id")))

    def _meta(self, key: str) -> Any:  # noqa: ANN401 - a number or an id, by key
        return self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0]

    def _set_meta(self, key: str, value: int | bytes) -> None:
        self._connection.execute("UPDATE meta SET value = ? WHERE key = ?", (value, key))


def _message(row: Sequence[Any], target: Target) -> Message:
    return Message(
        target=target, conversation_id=ConversationId(bytes(row[0])), conversation_seq=Seq(row[1]),
        message_id=MessageId(bytes(row[2])), sender=UserId(bytes(row[3])),
        sender_device=DeviceId(bytes(row[4])),
        client_message_id=ClientMessageId(bytes(row[5])), message_type=row[6], custom_type=row[7],
        body=bytes(row[8]), retention_class=row[9], reserved_at=Millis(row[10]),
    )  # fmt: skip


def _pending(row: Sequence[Any]) -> PendingRow:
    return PendingRow(
        row[0], ClientMessageId(bytes(row[1])), Target(row[2], bytes(row[3])), row[4], row[5], bytes(row[6]),
        row[7], Millis(row[8]),
    )  # fmt: skip

"""What an application sees of the SDK: targets, messages, conversations and events.

Everything here is frozen and holds no reference into the SDK, so an application may keep, compare and pass
it between threads. Times are server times in milliseconds; the clock of this host orders and expires
nothing. A message is shown in the order of its `conversation_seq`; a hole in that order is not an error.
"""

from enum import IntEnum
from typing import NamedTuple

import msgspec

from qim.ids import ClientMessageId, ConversationId, DeviceId, MessageId, Millis, Seq, UserId
from qim.records import Kind


class Target(NamedTuple):
    """Names a conversation: the other user, or a group."""

    kind: int
    id: bytes

    @classmethod
    def user(cls, user: bytes | str) -> "Target":
        """The direct conversation with a user, given as 16 bytes or 32 hexadecimal digits."""
        return cls(Kind.DIRECT, parse_id(user))


def parse_id(value: bytes | str) -> bytes:
    """Accepts the two forms an id has outside the protocol."""
    try:
        raw = bytes.fromhex(value) if isinstance(value, str) else bytes(value)
    except ValueError:
        raw = b""
    if len(raw) != 16:
        raise ValueError("an id is 16 bytes or 32 hexadecimal digits")
    return raw


def as_target(value: "Target | bytes | str") -> Target:
    """A bare user id names the direct conversation with that user."""
    return Target(value.kind, parse_id(value.id)) if isinstance(value, Target) else Target.user(value)


class MessageState(IntEnum):
    """Where a message stands. Everything received is STORED."""

    STORED = 0
    QUEUED = 1
    """Durable here, not yet acknowledged."""
    FAILED = 2
    """Refused for good; `failure` says why."""
    UNKNOWN = 3
    """Too old to be repeated safely and not provable from history; never sent again by itself."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message as this device knows it."""

    target: Target
    conversation_id: ConversationId
    conversation_seq: Seq
    """0 while there is no acknowledgement."""
    message_id: MessageId
    sender: UserId
    sender_device: DeviceId
    client_message_id: ClientMessageId
    message_type: int
    custom_type: str
    body: bytes
    retention_class: int
    reserved_at: Millis
    """Server time of the message; 0 while there is no acknowledgement."""
    state: MessageState = MessageState.STORED
    failure: str = ""
    failure_code: int = 0

    @property
    def text(self) -> str:
        """The body as text; a body that is not UTF-8 shows replacement characters."""
        return self.body.decode(errors="replace")


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the conversation list, from the local store."""

    target: Target
    conversation_id: ConversationId
    head_seq: Seq
    read_seq: Seq
    unread: int
    last_activity: Millis
    head: Message | None = None


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinates of a sent message, the same in every repeat."""

    client_message_id: ClientMessageId
    conversation_id: ConversationId
    conversation_seq: Seq
    message_id: MessageId
    reserved_at: Millis
    duplicate: bool


class HistoryPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of history, oldest message first."""

    messages: tuple[Message, ...]
    earliest_available_seq: Seq
    head_seq: Seq
    more: bool


# --- events ----------------------------------------------------------------------------------------


class ConversationsUpdated(msgspec.Struct, frozen=True):
    """These conversations are new or changed; always before the MessagesAdded of the same step."""

    conversations: tuple[Conversation, ...]


class MessagesAdded(msgspec.Struct, frozen=True):
    """Messages that this store did not have before, in order within each conversation."""

    messages: tuple[Message, ...]


class MessageAcknowledged(msgspec.Struct, frozen=True):
    """A queued message now has its coordinates."""

    ack: Ack
    message: Message


class MessageFailed(msgspec.Struct, frozen=True):
    """A queued message was refused for good, or its outcome can no longer be known."""

    message: Message


class Connected(msgspec.Struct, frozen=True):
    """The first login of this client succeeded."""


class Reconnected(msgspec.Struct, frozen=True):
    """A later login succeeded; the mailbox is drained before anything is resent."""


class ConnectionLost(msgspec.Struct, frozen=True):
    """The connection ended; the next attempt follows after `retry_in` seconds."""

    reason: str
    code: int
    retry_in: float


class StoreRebuilt(msgspec.Struct, frozen=True):
    """A damaged local file was set aside; what the server has comes back by itself."""

    set_aside: str
    unsent_kept: int
    unsent_complete: bool
    """False: some unsent messages could not be read and were not sent."""


class StoreTrouble(msgspec.Struct, frozen=True):
    """Something received could not be stored; it is fetched again when the store can write."""

    reason: str


class EventsDropped(msgspec.Struct, frozen=True):
    """The application did not read its events in time: read conversations and messages anew."""

    count: int


Event = (
    ConversationsUpdated
    | MessagesAdded
    | MessageAcknowledged
    | MessageFailed
    | Connected
    | Reconnected
    | ConnectionLost
    | StoreRebuilt
    | StoreTrouble
    | EventsDropped
)

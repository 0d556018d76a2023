"""The client SDK: a core without input or output, a local SQLite store and thin transports around them.

The mailbox on the server is the truth and a push is a hint; the core turns gaps, lost answers and reconnects
into pulls and repeats with the same client message id, so that an application sees every message once and in
order. `client.py` says how it is used; `model.py` and `errors.py` are what an application meets.
"""

from qim.client.blocking import Client
from qim.client.client import AsyncClient
from qim.client.errors import (
    AuthError,
    Disconnected,
    MessageRejected,
    RateLimited,
    SdkError,
    StoreDamaged,
    StoreError,
    StoreUnavailable,
    Timeout,
)
from qim.client.model import (
    Ack,
    Connected,
    ConnectionLost,
    Conversation,
    ConversationsUpdated,
    Event,
    EventsDropped,
    HistoryPage,
    Message,
    MessageAcknowledged,
    MessageFailed,
    MessagesAdded,
    MessageState,
    Reconnected,
    StoreRebuilt,
    StoreTrouble,
    Target,
)

__all__ = [
    "Ack",
    "AsyncClient",
    "AuthError",
    "Client",
    "Connected",
    "ConnectionLost",
    "Conversation",
    "ConversationsUpdated",
    "Disconnected",
    "Event",
    "EventsDropped",
    "HistoryPage",
    "Message",
    "MessageAcknowledged",
    "MessageFailed",
    "MessageRejected",
    "MessageState",
    "MessagesAdded",
    "RateLimited",
    "Reconnected",
    "SdkError",
    "StoreDamaged",
    "StoreError",
    "StoreRebuilt",
    "StoreTrouble",
    "StoreUnavailable",
    "Target",
    "Timeout",
]

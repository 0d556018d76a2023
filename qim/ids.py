"""Typed identifiers, sequences and positions.

Every identifier that travels is 16 raw bytes; every number that orders something is an unsigned
integer below 2^53, because Redis scripts compute with doubles. NewTypes cost nothing at run time and
keep two bare integers from being swapped in a signature.

The words: a *sequence* orders the messages of one conversation, a *mailbox sequence* orders the
entries of one mailbox shard, an *offset* names a record of one log partition, a *position* is the
offset of the last finished record. Zero means "none" for sequences and mailbox sequences; a position
of -1 means "nothing finished yet", because offsets start at 0.
"""

from typing import Final, NewType

TenantId = NewType("TenantId", int)
UserId = NewType("UserId", bytes)
DeviceId = NewType("DeviceId", bytes)
ConversationId = NewType("ConversationId", bytes)
GroupId = NewType("GroupId", bytes)
MessageId = NewType("MessageId", bytes)
ClientMessageId = NewType("ClientMessageId", bytes)
SessionId = NewType("SessionId", bytes)
DispatchId = NewType("DispatchId", bytes)
BootId = NewType("BootId", bytes)
RequestId = NewType("RequestId", bytes)
"""Of a request whose result is remembered: CREATE_GROUP, and changes by an operator."""

Seq = NewType("Seq", int)
MailboxSeq = NewType("MailboxSeq", int)
Offset = NewType("Offset", int)
Millis = NewType("Millis", int)
"""Milliseconds since 1970, wall clock."""

SlotId = NewType("SlotId", int)
"""0…63: mailbox shard, Outbox partition and dispatch partition of the same number."""
BucketId = NewType("BucketId", int)
"""0…255: commit bucket; its slot is bucket // 4."""
WorkerId = NewType("WorkerId", int)
Epoch = NewType("Epoch", int)
"""Ownership epoch of one slot on one instance; rises with each new owner."""

ID_BYTES: Final = 16
SEQ_MAX: Final = 2**53 - 1
"""Largest sequence, also in Lua, where numbers are doubles."""
MAILBOX_SEQ_MAX: Final = 2**48 - 1

"""The bytes of the client protocol, version 1, and of the links between workers.

     0       1       2               4               8               12
     +-------+-------+---------------+---------------+---------------+----------
     | ver=1 | flags | opcode u16be  | request_id u32be | length u32be | body
     +-------+-------+---------------+---------------+---------------+----------

`length` counts the body only. `flags` is 0 in version 1. A reply carries the request's request_id, a
push carries 0. The body is a MessagePack array with positional fields: readers ignore extra trailing
fields and give missing optional ones their default, so fields are only ever appended.

Links use the same frame with opcodes of their own, which a client may never send.
"""

import struct
from enum import IntEnum
from typing import Final

PROTOCOL_VERSION: Final = 1
ALPN: Final = "qim/1"
HEADER: Final = struct.Struct(">BBHII")


class Op(IntEnum):
    AUTH = 0x0001
    AUTH_ACK = 0x0002
    PING = 0x0003
    PONG = 0x0004
    GOAWAY = 0x0005
    ERROR = 0x0006
    SEND_MESSAGE = 0x0101
    SEND_ACK = 0x0102
    PULL_MAILBOX = 0x0201
    MAILBOX_BATCH = 0x0202
    PUSH_EVENTS = 0x0203
    STATE_EVENTS = 0x0204
    PULL_HISTORY = 0x0301
    HISTORY_BATCH = 0x0302
    SESSION_LIST_REQ = 0x0401
    SESSION_LIST = 0x0402
    MARK_READ = 0x0403
    MARK_READ_ACK = 0x0404
    CREATE_GROUP = 0x0A01
    PULL_MEMBERS = 0x0A02
    MEMBER_LIST_BATCH = 0x0A03
    LEAVE_GROUP = 0x0A04
    GROUP_CREATED = 0x0A05


class LinkOp(IntEnum):
    """Opcodes between workers; refused from a client as unknown."""

    HELLO = 0xF001
    REQUEST = 0xF002
    REPLY = 0xF003
    PUSH = 0xF004
    ANNOUNCE = 0xF005
    ANNOUNCED = 0xF006
    WITHDRAW = 0xF007
    CLOSE = 0xF008


CLIENT_OPS: Final = frozenset(
    {
        Op.AUTH, Op.PING, Op.PONG, Op.SEND_MESSAGE, Op.PULL_MAILBOX, Op.PULL_HISTORY, Op.SESSION_LIST_REQ,
        Op.MARK_READ, Op.CREATE_GROUP, Op.PULL_MEMBERS, Op.LEAVE_GROUP,
    }
)  # fmt: skip
"""What a client may send; anything else is PROTOCOL_ERROR."""

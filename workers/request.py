"""A client's request on its way to the role that owns its subject, and the way back.

A request is the same object whether the client is connected to this worker or to another one: only its
`origin` differs. The role never sees a connection; it answers with a ready frame and the request, and
the origin (gateway or link) writes it. The pair (handle, generation) names the connection on the
gateway's worker; a handle is reused, a generation is not, so a late answer never reaches a stranger.
"""

from typing import Final, Protocol

import msgspec

from qim.domain.writer import RETRY_AFTER_MS
from qim.errors import ClientError, Unavailable
from qim.ids import DeviceId, SessionId, SlotId, TenantId, UserId
from qim.wire.bodies import build_error

NOTHING_WRITTEN: Final = Unavailable("the store is away", retry_after_ms=RETRY_AFTER_MS)


class OnFatal(Protocol):
    """Told once that a slot must not be served by this process any more."""

    def __call__(self, slot: SlotId) -> None: ...


class Origin(Protocol):
    """Where the answer goes: the local gateway, or the link to the worker that holds the connection."""

    def reply(self, request: "Request", frame: bytes) -> None:
        """Buffers one complete client frame; it is written at the end of the pass. Never raises:
        a connection that has gone away is a normal event."""
        ...


class Request(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """One frame of an authenticated client."""

    origin: Origin
    handle: int
    generation: int
    request_id: int
    opcode: int
    tenant: TenantId
    user: UserId
    device: DeviceId
    session: SessionId
    body: bytes
    arrived: float
    """Monotonic seconds, read once per pass."""


def reply_error(request: Request, error: ClientError) -> None:
    request.origin.reply(request, build_error(request.request_id, error))

"""Which conversation a request is about: what the router asks for its owner, and the writer for its store.

Most bodies name a target. Those about a group itself name the group, and one that creates a group names what
the id of the group comes from. Whether there is such a conversation, and whether the sender may see it, is
not asked here: the store knows, and its answer is the same for both.

The body is decoded for it and again by its owner. The usual encodings of a target never come here, the router
reads four bytes of them instead. No state.
"""

from qim.domain.groups import group_id_of
from qim.domain.writer import Route, route_group, route_target
from qim.errors import InvalidArgument
from qim.ids import GroupId, RequestId
from qim.wire.bodies import CreateGroup, LeaveGroup, PullMembers, decode_body
from workers.request import Request


def conversation_of(request: Request) -> Route:
    """Raises what the client is told."""
    body = decode_body(request.opcode, request.body)
    if isinstance(body, CreateGroup):
        group = group_id_of(request.tenant, request.user, RequestId(body.request_id16))
        return route_group(request.tenant, group)
    if isinstance(body, PullMembers | LeaveGroup):
        return route_group(request.tenant, GroupId(body.group))
    target = getattr(body, "target", None)
    if target is None:
        raise InvalidArgument("the body names no conversation")
    return route_target(tenant=request.tenant, user=request.user, kind=target.kind, target=target.id)

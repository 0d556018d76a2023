"""The operator's commands for groups: who is added, removed, and who is in.

    membership.add|remove    users of one group, up to 500 at once, under a request id
    membership.list          current members by id, a page at a time, each with the sequence of the joining

Ids travel as hexadecimal text. The request id makes a command safe to repeat: for a day its first result is
the answer, whatever happened to the members since. So a refusal that only says *not now* or *nobody knows*
is 69, as if nobody had answered: repeat the same command with the same id. All else is 1, or 2 for a command
that no group could follow.

It decides nothing and holds nothing; the writer of the group's bucket does the work, and what becomes of a
change when that process dies stands there.
"""

from collections.abc import Sequence
from typing import Any

from qim.domain.groups import route_group
from qim.errors import ClientError, ControlRefused, ExitCode, InvalidArgument, PermissionDenied
from qim.ids import GroupId, RequestId, UserId
from qim.records import MembershipOp
from qim.wire.bodies import clamp_page
from workers.control import parse_id, parse_tenant
from workers.group_changes import operator_order
from workers.writer import Writer

Answer = dict[str, Any]


async def change_members(
    writer: Writer, op: MembershipOp, *, tenant: int, group: str, users: Sequence[str], request_id: str
) -> Answer:
    """What came of it; the same for every repeat. Raises ControlRefused."""
    group_id = GroupId(parse_id("group", group))
    named = [parse_id("user", user) for user in users]
    request = RequestId(parse_id("request id", request_id))
    try:
        order = operator_order(
            tenant=parse_tenant(tenant), group=group_id, op=op, users=named, request_id=request
        )
        result = await writer.change_members(order)
    except ClientError as error:
        raise _as_refusal(error) from error
    return {
        "group": group_id.hex(),
        "request_id": request.hex(),
        "event_seq": result.seq or None,
        "member_count": result.member_count,
        "membership_version": result.version,
    }


async def list_members(writer: Writer, *, tenant: int, group: str, after: str = "", limit: int = 0) -> Answer:
    """A page of members. Raises ControlRefused."""
    group_id = GroupId(parse_id("group", group))
    behind = UserId(parse_id("user", after) if after else b"")
    tenant_id = parse_tenant(tenant)
    route = route_group(tenant_id, group_id)
    try:
        page = await writer.list_members(
            tenant_id, route, after=behind, entries_max=clamp_page(max(0, limit))
        )
    except ClientError as error:
        raise _as_refusal(error) from error
    return {
        "group": group_id.hex(),
        "name": page.group.name,
        "owner": page.group.owner.hex() or None,
        "membership_version": page.group.version,
        "total": page.group.member_count,
        "next": page.rows[-1].user.hex() if page.more else None,
        "members": [{"user": row.user.hex(), "joined_at": row.joined_at} for row in page.rows],
    }


def _as_refusal(error: ClientError) -> ControlRefused:
    if isinstance(error, PermissionDenied):
        return ControlRefused("there is no such group")
    if error.retryable:
        return ControlRefused(
            f"{error.text}: repeat it with the same request id", exit_code=ExitCode.UNREACHABLE
        )
    is_usage = isinstance(error, InvalidArgument)
    return ControlRefused(error.text, exit_code=ExitCode.USAGE if is_usage else ExitCode.NO)

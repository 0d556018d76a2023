"""Where the router sends what is about a group: to the owner of its conversation, whoever asks for it."""

from typing import Any, cast

import pytest

from qim.clock import ManualClock
from qim.domain.gateway import Destination
from qim.domain.groups import group_id_of, route_group
from qim.domain.placement import Placement, slot_of_bucket
from qim.ids import GroupId, RequestId, Seq, UserId, WorkerId
from qim.metrics import Metrics
from qim.wire.bodies import (
    CreateGroup,
    LeaveGroup,
    MarkRead,
    PullHistory,
    PullMembers,
    SendMessage,
    Target,
    encode_body,
)
from qim.wire.layout import Op
from tests.unit.workers.group_calls import GROUP_KIND
from tests.unit.workers.rig import ALICE, BOB, TENANT, Client
from workers.request import Request
from workers.router import Router

TWO = Placement(workers=2, core_instances=1, mailbox_instances=1)
HERE, THERE = WorkerId(0), WorkerId(1)


class Taker:
    """Takes requests: the writer of this worker, or the link to the other one."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, UserId]] = []

    def submit(self, request: Request) -> None:
        self.taken.append((request.opcode, request.user))

    def request(self, request: Request) -> bool:
        self.submit(request)
        return True

    def stream(self, owner: WorkerId) -> "Taker":
        assert owner == THERE
        return self


def group_owned_by(worker: WorkerId, creator: UserId) -> tuple[RequestId, GroupId]:
    """The request id of a CREATE_GROUP whose group this worker owns, and the group."""
    for number in range(1_000):
        request_id = RequestId(number.to_bytes(16, "big"))
        group = group_id_of(TENANT, creator, request_id)
        if TWO.worker_of(slot_of_bucket(route_group(TENANT, group).bucket)) == worker:
            return request_id, group
    raise AssertionError("no such group in a thousand")


@pytest.mark.shows("C1", "C8")
@pytest.mark.parametrize("owner", [HERE, THERE])
def test_all_that_is_about_a_group_goes_to_the_owner_of_its_conversation(owner: WorkerId) -> None:
    clock, writer, link = ManualClock(), Taker(), Taker()
    router = Router(worker=HERE, placement=TWO, clock=clock, metrics=Metrics())
    router.bind(
        gateway=cast("Any", None), presence=cast("Any", None), writer=writer, mailbox=Taker(),
        links=cast("Any", link),
    )  # fmt: skip
    alice, bob = Client(clock, user=ALICE), Client(clock, user=BOB)
    request_id, group = group_owned_by(owner, ALICE)
    target = Target(GROUP_KIND, group)
    send = encode_body(SendMessage(target, b"m" * 16, 1, "", b"hello"))  # type: ignore[arg-type]  # plain bytes stand for an id
    asked = [
        (alice, Op.CREATE_GROUP, encode_body(CreateGroup(request_id, "g", []))),
        (bob, Op.PULL_MEMBERS, encode_body(PullMembers(group))),
        (bob, Op.LEAVE_GROUP, encode_body(LeaveGroup(group))),
        (bob, Op.PULL_HISTORY, encode_body(PullHistory(target))),
        (alice, Op.MARK_READ, encode_body(MarkRead(target, Seq(1)))),
        (alice, Op.SEND_MESSAGE, send),
        (bob, Op.SEND_MESSAGE, send),
        (bob, Op.SEND_MESSAGE, send.replace(b"\x92\x02\xc4\x10", b"\x92\xcc\x02\xc4\x10", 1)),
    ]
    for client, op, body in asked:
        router.route(client.request(op, body), Destination.CONVERSATION)
    taker, other = (writer, link) if owner == HERE else (link, writer)
    assert taker.taken == [(op, client.user) for client, op, _body in asked]
    assert not other.taken

"""The gateway on real TLS connections over loopback: log-in, requests, answers, pushes, goodbye."""

import asyncio
import socket
from typing import Any

import jwt
import pytest

from qim import errors, limits
from qim.domain.gateway import Destination, Rate
from qim.ids import MailboxSeq, Millis
from qim.tokens import generate_key_pair, mint_token
from qim.wire.bodies import (
    Auth,
    Ping,
    PullMailbox,
    SessionListReq,
    build_message,
    decode_body,
    decode_pushed,
)
from qim.wire.frames import Frame, build_frame
from qim.wire.layout import Op
from tests.unit.workers.gateway_rig import (
    ALICE,
    BOB,
    CONVERSATION,
    KEY_ID,
    NEWEST,
    OWNER,
    PHONE,
    TABLET,
    TENANT,
    GatewayRig,
    Scenario,
    entry,
    run_on_uvloop,
    send_body,
    send_frame,
    signing_key,
    token,
)
from tests.waiting import happens, stays
from workers.client_socket import ClientSocket

# --- log-in ------------------------------------------------------------------------------------------


async def test_a_log_in_is_announced_and_then_acknowledged() -> None:
    async with GatewayRig() as rig:
        client = await rig.connect()
        acknowledged = await client.log_in(token(rig.clock))
        (announce,) = rig.router.announced
        assert (acknowledged.user_id, acknowledged.session_id) == (ALICE, announce.session)
        assert acknowledged.newest_mailbox_seq == NEWEST
        assert acknowledged.heartbeat_ms == limits.PING_INTERVAL_MS
        assert acknowledged.limits["unanswered_requests"] == limits.UNANSWERED_REQUESTS_MAX
        assert (announce.tenant, announce.user, announce.device) == (TENANT, ALICE, PHONE)
        assert not announce.repeated


@pytest.mark.shows("O13")
@pytest.mark.parametrize("told", [0, 5, 2**48 - 1])
async def test_a_session_is_dated_by_its_device_or_else_by_its_gateway(told: int) -> None:
    async with GatewayRig() as rig:
        client = await rig.connect()
        auth = Auth(token(rig.clock), PHONE, device_time=Millis(told))
        client.send(build_message(Op.AUTH, 1, auth))
        acknowledged = await client.body(Op.AUTH_ACK)
        assert int.from_bytes(acknowledged.session_id[:6], "big") == (told or rig.clock.now_ms())


async def test_a_device_time_that_no_session_can_carry_is_refused() -> None:
    async with GatewayRig() as rig:
        client = await rig.connect()
        auth = Auth(token(rig.clock), PHONE, device_time=Millis(2**48))
        client.send(build_message(Op.AUTH, 1, auth))
        (answer,) = await client.rest()
        assert decode_body(Op.ERROR, answer.body).code == errors.InvalidArgument.code
        assert not rig.router.announced


async def test_nothing_is_acknowledged_before_the_owner_has_registered_the_session() -> None:
    async with GatewayRig() as rig:
        rig.router.answers = False
        client = await rig.connect()
        client.send(build_message(Op.AUTH, 1, Auth(token(rig.clock), PHONE)))
        await happens(lambda: rig.router.announced, what="announced")
        assert rig.metrics.frames_out == 0
        announce = rig.router.announced[0]
        rig.gateway.logins.announced(announce.handle, announce.generation, MailboxSeq(9))
        assert (await client.body(Op.AUTH_ACK)).newest_mailbox_seq == 9


async def test_a_log_in_whose_owner_cannot_be_reached_has_to_come_again() -> None:
    async with GatewayRig() as rig:
        rig.router.reachable = False
        client = await rig.connect()
        client.send(build_message(Op.AUTH, 1, Auth(token(rig.clock), PHONE)))
        (answer,) = await client.rest()
        assert answer.request_id == 1
        assert decode_body(Op.ERROR, answer.body).code == errors.Unavailable.code


def refused_tokens(rig: GatewayRig) -> dict[str, str]:
    stranger, _ = generate_key_pair()
    claims = {"iss": "qim", "aud": "qim", "tenant": 7, "sub": ALICE.hex(), "exp": 2**31}
    good = token(rig.clock)
    later = Millis(rig.clock.now_ms() + 1000)
    return {
        "garbage": "not a token",
        "empty": "",
        "expired": token(rig.clock, life_ms=-1),
        "other audience": token(rig.clock, audience="another"),
        "other issuer": token(rig.clock, issuer="another"),
        "other algorithm": jwt.encode(claims, "a shared secret of many bytes...", "HS256", {"kid": KEY_ID}),
        "no algorithm": jwt.encode(claims, "", "none", {"kid": KEY_ID}),
        "stranger's key": mint_token(
            stranger, KEY_ID, tenant=TENANT, user=ALICE, expires_at_ms=later,
            issuer="qim", audience="qim",
        ),
        "unknown key": mint_token(
            signing_key()[0], "k2", tenant=TENANT, user=ALICE, expires_at_ms=later,
            issuer="qim", audience="qim",
        ),
        "another device's": token(rig.clock, device=TABLET),
        "broken signature": good[:-4] + ("AAAA" if good[-4:] != "AAAA" else "BBBB"),
    }  # fmt: skip


@pytest.mark.shows("F-47")
async def test_every_token_that_is_refused_gets_the_same_bytes() -> None:
    async with GatewayRig(failed_logins=Rate(1, 100)) as rig:
        answers = {}
        for name, text in refused_tokens(rig).items():
            client = await rig.connect()
            client.send(build_message(Op.AUTH, 1, Auth(text, PHONE)))
            answers[name] = await client.rest()
        (only,) = {tuple(answer) for answer in answers.values()}
        assert len(only) == 1
        assert decode_body(Op.ERROR, only[0].body).code == errors.Unauthenticated.code
        assert rig.metrics.auth_refused == len(answers)
        assert not rig.router.announced


@pytest.mark.shows("F-47")
async def test_a_token_that_is_bound_to_the_device_is_accepted_from_it() -> None:
    async with GatewayRig() as rig:
        client = await rig.connect()
        assert (await client.log_in(token(rig.clock, device=TABLET), device=TABLET)).user_id == ALICE


async def test_an_address_that_failed_too_often_is_not_even_heard() -> None:
    async with GatewayRig(failed_logins=Rate(0.17, 1)) as rig:
        refusals = []
        for _ in range(2):
            client = await rig.connect()
            client.send(build_message(Op.AUTH, 1, Auth("not a token", PHONE)))
            (answer,) = await client.rest()
            refusals.append(decode_body(Op.ERROR, answer.body))
        codes = [refusal.code for refusal in refusals]
        assert codes == [errors.Unauthenticated.code, errors.ResourceExhausted.code]
        assert rig.metrics.auth_refused == 1
        rig.clock.advance(milliseconds=refusals[1].retry_after_ms)
        assert (await (await rig.connect()).log_in(token(rig.clock))).user_id == ALICE


async def test_a_body_that_is_no_log_in_is_told_so() -> None:
    async with GatewayRig() as rig:
        client = await rig.connect()
        client.send(build_frame(Op.AUTH, 5, b"\xc1"))
        (answer,) = await client.rest()
        assert answer.request_id == 5
        assert decode_body(Op.ERROR, answer.body).code == errors.InvalidArgument.code


async def test_a_second_log_in_renews_the_session() -> None:
    async with GatewayRig() as rig:
        client = await rig.connect()
        first = await client.log_in(token(rig.clock, life_ms=1_000))
        second = await client.log_in(token(rig.clock, life_ms=3_600_000))
        assert first.session_id == second.session_id
        assert [announce.repeated for announce in rig.router.announced] == [False, True]
        for _ in range(10):
            client.send(build_message(Op.PING, 2, Ping()))
            await client.body(Op.PONG)
            rig.pass_time(milliseconds=20_000)
        client.send(build_message(Op.PING, 2, Ping()))
        await client.body(Op.PONG)


@pytest.mark.parametrize("who", [{"user": BOB}, {"life_ms": -1}])
async def test_a_refused_renewal_changes_nothing(who: dict[str, Any]) -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        client.send(build_message(Op.AUTH, 2, Auth(token(rig.clock, **who), PHONE)))
        assert (await client.body(Op.ERROR)).code == errors.Unauthenticated.code
        client.send(send_frame(3))
        (request,) = await rig.requests(1)
        assert request.user == ALICE


# --- requests and answers ----------------------------------------------------------------------------


async def test_a_request_is_handed_over_untouched_with_the_identity_of_the_session() -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        body = send_body(b"\x00 \xf0\x9f\x91\xaa")
        client.send(build_frame(Op.SEND_MESSAGE, 77, body))
        await rig.requests(1)
        request, destination = rig.router.requests[0]
        assert (request.body, request.request_id, destination) == (body, 77, Destination.CONVERSATION)
        assert (request.tenant, request.user, request.device) == (TENANT, ALICE, PHONE)
        request.origin.reply(request, build_frame(Op.SEND_ACK, 77, b"\x90"))
        assert await client.frame() == Frame(Op.SEND_ACK, 77, b"\x90")


async def test_a_pull_goes_to_the_owner_of_the_user() -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        client.send(build_message(Op.PULL_MAILBOX, 2, PullMailbox(MailboxSeq(0), 300)))
        await rig.requests(1)
        assert rig.router.requests[0][1] is Destination.USER


async def test_what_is_not_served_yet_is_told_so_and_the_connection_lives() -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        client.send(build_message(Op.SESSION_LIST_REQ, 2, SessionListReq()))
        frame = await client.frame()
        assert frame.request_id == 2
        assert decode_body(Op.ERROR, frame.body).code == errors.Unsupported.code


async def test_what_is_about_a_group_goes_to_its_conversation() -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        ops = [Op.CREATE_GROUP, Op.PULL_MEMBERS, Op.LEAVE_GROUP]
        client.send(*(build_frame(op, 2, b"") for op in ops))
        await rig.requests(3)
        assert [(request.opcode, to) for request, to in rig.router.requests] == [
            (op, Destination.CONVERSATION) for op in ops
        ]


async def test_answers_and_pushes_of_one_pass_leave_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        client.send(send_frame(2), send_frame(3))
        first, second = await rig.requests(2)
        asked: list[int] = []
        admits = rig.gateway.admits_write

        def admits_and_notes(sock: ClientSocket, unread: int, frames: int, size: int) -> bool:
            asked.append(frames)
            return admits(sock, unread, frames, size)

        monkeypatch.setattr(rig.gateway, "admits_write", admits_and_notes)
        for request in (first, second):
            request.origin.reply(request, build_frame(Op.SEND_ACK, request.request_id, b"\x90"))
        rig.gateway.deliver([(first.handle, first.generation, 0, 5, False)], entry(1))
        rig.gateway.deliver([(first.handle, first.generation, 5, 6, False)], entry(2))
        await happens(lambda: asked, what="written")
        assert asked == [3]
        assert [(await client.frame()).opcode for _ in range(3)] == [Op.SEND_ACK, Op.SEND_ACK, Op.PUSH_EVENTS]


@pytest.mark.shows("M10")
async def test_a_push_carries_the_entry_and_the_sender_gets_the_echo() -> None:
    async with GatewayRig() as rig:
        alice, bob = await rig.logged_in(), await rig.logged_in(user=BOB)
        one, other = rig.router.announced
        targets = [(one.handle, one.generation, 3, 5, True), (other.handle, other.generation, 0, 5, False)]
        rig.gateway.deliver(targets, entry(9))
        ((_, _, full),) = (await bob.body(Op.PUSH_EVENTS)).events
        assert bytes(full) == entry(9)
        rig.pass_time(milliseconds=limits.ECHO_WAIT_MS)
        ((previous, mailbox_seq, echo),) = (await alice.body(Op.PUSH_EVENTS)).events
        assert (previous, mailbox_seq) == (3, 5)
        decoded = decode_pushed(echo)
        assert (decoded.conversation_seq, decoded.conversation_id) == (9, CONVERSATION)  # type: ignore[union-attr]  # an entry, not an echo


async def test_an_echo_waits_and_leaves_with_the_next_push_in_one_frame() -> None:
    async with GatewayRig() as rig:
        alice = await rig.logged_in()
        (one,) = rig.router.announced
        rig.gateway.sweep()
        rig.gateway.deliver([(one.handle, one.generation, 3, 5, True)], entry(9))
        rig.gateway.sweep()
        rig.gateway.deliver([(one.handle, one.generation, 5, 6, False)], entry(10))
        events = (await alice.body(Op.PUSH_EVENTS)).events
        assert [(previous, mailbox_seq) for previous, mailbox_seq, _ in events] == [(3, 5), (5, 6)]


async def test_a_late_answer_never_reaches_the_next_user_of_its_handle() -> None:
    async with GatewayRig() as rig:
        first = await rig.logged_in()
        first.send(send_frame(2))
        (request,) = await rig.requests(1)
        await first.close()
        await happens(lambda: rig.router.withdrawn, what="withdrawn")
        second = await rig.logged_in(user=BOB)
        assert rig.router.announced[1].handle == request.handle
        request.origin.reply(request, build_frame(Op.SEND_ACK, 2, b"\x90"))
        rig.gateway.deliver([(request.handle, request.generation, 0, 5, False)], entry())
        second.send(build_message(Op.PING, 3, Ping()))
        await second.body(Op.PONG)


async def test_a_ping_asks_the_owner_and_carries_its_newest() -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        client.send(build_message(Op.PING, 2, Ping()))
        pong = await client.body(Op.PONG)
        assert pong.newest_mailbox_seq == NEWEST
        assert rig.router.announced[1].repeated


async def test_a_ping_is_answered_when_the_owner_cannot_be_reached() -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        rig.router.reachable = False
        client.send(build_message(Op.PING, 2, Ping()))
        assert (await client.body(Op.PONG)).newest_mailbox_seq == 0


async def test_a_ping_that_waits_is_answered_when_its_owner_is_lost() -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        rig.router.answers = False
        client.send(build_message(Op.PING, 2, Ping()))
        await happens(lambda: len(rig.router.announced) == 2, what="asked")
        rig.gateway.logins.on_owner_lost(OWNER)
        assert (await client.body(Op.PONG)).newest_mailbox_seq == 0


async def test_a_log_in_that_waits_fails_when_its_owner_is_lost() -> None:
    async with GatewayRig() as rig:
        rig.router.answers = False
        client = await rig.connect()
        client.send(build_message(Op.AUTH, 1, Auth(token(rig.clock), PHONE)))
        await happens(lambda: rig.router.announced, what="asked")
        rig.gateway.logins.on_owner_lost(OWNER)
        (answer,) = await client.rest()
        assert decode_body(Op.ERROR, answer.body).code == errors.Unavailable.code


async def test_an_owner_that_is_back_hears_of_every_session_again() -> None:
    async with GatewayRig() as rig:
        await rig.logged_in()
        await rig.logged_in(user=BOB)
        await rig.connect()
        rig.gateway.logins.announce_all(OWNER)
        first, second, *again = rig.router.announced
        assert [announce._replace(repeated=False) for announce in again] == [first, second]
        assert all(announce.repeated for announce in again)


async def test_a_replaced_session_is_told_so_and_withdrawn() -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        announce = rig.router.announced[0]
        rig.gateway.logins.close(announce.handle, announce.generation, errors.Replaced("a later log-in"))
        assert (await client.goaway()).code == errors.Replaced.code
        assert rig.router.withdrawn == [announce.session]


async def test_a_log_in_that_the_owner_refuses_gets_its_reason_as_the_answer() -> None:
    async with GatewayRig() as rig:
        rig.router.answers = False
        client = await rig.connect()
        client.send(build_message(Op.AUTH, 1, Auth(token(rig.clock), PHONE)))
        await happens(lambda: rig.router.announced, what="asked")
        announce = rig.router.announced[0]
        rig.gateway.logins.close(
            announce.handle, announce.generation, errors.ResourceExhausted("too many sessions")
        )
        answer, goodbye = await client.rest()
        assert (answer.opcode, answer.request_id, goodbye.opcode) == (Op.ERROR, 1, Op.GOAWAY)


async def test_a_closed_connection_is_withdrawn_by_name() -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        await client.close()
        await happens(lambda: rig.router.withdrawn, what="withdrawn")
        assert rig.router.withdrawn == [rig.router.announced[0].session]
        assert rig.metrics.connections == 0


# --- goodbye -----------------------------------------------------------------------------------------


async def test_a_drain_says_goodbye_answers_what_it_took_and_closes() -> None:
    async with GatewayRig() as rig:
        clients = [await rig.logged_in(), await rig.logged_in(user=BOB)]
        clients[0].send(send_frame(2))
        (request,) = await rig.requests(1)
        draining = asyncio.create_task(rig.gateway.drain(rig.clock.monotonic() + 1))
        goodbyes = [await client.body(Op.GOAWAY) for client in clients]
        assert {goodbye.code for goodbye in goodbyes} == {errors.GoingAway.code}
        assert goodbyes[0].reconnect_after_ms != goodbyes[1].reconnect_after_ms
        await stays(lambda: not draining.done(), what="waits for the answer")
        request.origin.reply(request, build_frame(Op.SEND_ACK, 2, b"\x90"))
        assert await clients[0].frame() == Frame(Op.SEND_ACK, 2, b"\x90")
        await draining
        assert [await client.rest() for client in clients] == [[], []]
        with pytest.raises(OSError):
            await rig.connect()


async def test_a_drain_begins_nothing_new_and_says_so() -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        client.send(send_frame(2))
        (request,) = await rig.requests(1)
        draining = asyncio.create_task(rig.gateway.drain(rig.clock.monotonic() + 1))
        await client.body(Op.GOAWAY)
        client.send(send_frame(3))
        frame = await client.frame()
        assert (frame.opcode, frame.request_id) == (Op.ERROR, 3)
        assert decode_body(Op.ERROR, frame.body).code == errors.Unavailable.code
        request.origin.reply(request, build_frame(Op.SEND_ACK, 2, b"\x90"))
        assert (await client.frame()).opcode == Op.SEND_ACK
        await draining
        assert len(rig.router.requests) == 1


async def test_a_drain_does_not_wait_longer_than_it_may() -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        client.send(send_frame(2))
        await rig.requests(1)
        await rig.gateway.drain(rig.clock.monotonic())
        assert [frame.opcode for frame in await client.rest()] == [Op.GOAWAY]


async def test_the_sweep_runs_until_the_drain() -> None:
    async with GatewayRig() as rig:
        running = asyncio.create_task(rig.gateway.run())
        client = await rig.connect()
        await happens(lambda: rig.metrics.accepts, what="accepted")
        rig.clock.advance(milliseconds=limits.AUTH_TIMEOUT_MS)
        assert (await client.goaway()).code == errors.AuthRequired.code
        await rig.gateway.drain(rig.clock.monotonic())
        await running


async def test_sockets_send_small_frames_at_once_and_notice_dead_peers() -> None:
    async with GatewayRig() as rig:
        await rig.logged_in()
        announce = rig.router.announced[0]
        sock = rig.gateway._table.find(announce.handle, announce.generation)
        assert sock is not None
        assert sock._transport is not None
        raw: socket.socket = sock._transport.get_extra_info("socket")
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == limits.CONNECTION_SILENCE_MS_MAX


# --- the loop of the workers -------------------------------------------------------------------------

ON_UVLOOP: tuple[Scenario, ...] = (
    test_a_log_in_is_announced_and_then_acknowledged,
    test_every_token_that_is_refused_gets_the_same_bytes,
    test_a_push_carries_the_entry_and_the_sender_gets_the_echo,
    test_a_late_answer_never_reaches_the_next_user_of_its_handle,
    test_a_drain_says_goodbye_answers_what_it_took_and_closes,
    test_sockets_send_small_frames_at_once_and_notice_dead_peers,
)


@pytest.mark.parametrize("scenario", ON_UVLOOP, ids=lambda scenario: scenario.__name__)
def test_the_same_holds_on_the_loop_that_workers_run(scenario: Scenario) -> None:
    run_on_uvloop(scenario)


async def test_what_an_owner_says_when_it_is_back_answers_no_ping() -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        rig.router.answers = False
        rig.gateway.logins.announce_all(OWNER)
        client.send(build_message(Op.PING, 2, Ping()))
        await happens(lambda: len(rig.router.announced) == 3, what="log-in, again, ping")
        announce = rig.router.announced[-1]
        for newest in (MailboxSeq(1), MailboxSeq(2)):
            rig.gateway.logins.announced(announce.handle, announce.generation, newest)
        assert (await client.body(Op.PONG)).newest_mailbox_seq == 2


async def test_an_owner_that_is_away_again_at_once_leaves_no_ping_without_an_answer() -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        rig.router.reachable = False
        rig.gateway.logins.announce_all(OWNER)
        rig.router.reachable = True
        client.send(build_message(Op.PING, 2, Ping()))
        assert (await client.body(Op.PONG)).newest_mailbox_seq == NEWEST

"""The gateway against broken, slow, silent and greedy peers, on real TLS connections over loopback."""

import asyncio
import contextlib
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from qim import errors, limits
from qim.domain.gateway import Rate
from qim.ids import MailboxSeq
from qim.wire.bodies import (
    Auth,
    Error,
    Ping,
    PullMailbox,
    build_message,
    decode_body,
)
from qim.wire.frames import build_frame
from qim.wire.layout import CLIENT_OPS, HEADER, Op
from tests.unit.workers.gateway_rig import (
    BOB,
    PHONE,
    GatewayRig,
    RawClient,
    Scenario,
    entry,
    run_on_uvloop,
    send_body,
    send_frame,
    token,
)
from tests.waiting import happens
from workers.handshake_memory import (
    HANDSHAKE_MEMORY_BEGUN,
    HANDSHAKE_MEMORY_INTERVAL_MS,
    HandshakeMemory,
    give_back_memory,
)

# --- broken peers ------------------------------------------------------------------------------------

HEADER_OF_4_GIB = HEADER.pack(1, 0, Op.SEND_MESSAGE, 2, 2**32 - 1)
BROKEN = {
    "length 2^32-1": (HEADER_OF_4_GIB, errors.RemoteProtocolError),
    "length -1": (struct.pack(">BBHIi", 1, 0, Op.SEND_MESSAGE, 2, -1), errors.RemoteProtocolError),
    "one byte too long": (
        HEADER.pack(1, 0, Op.SEND_MESSAGE, 2, limits.FRAME_BODY_BYTES_MAX + 1), errors.RemoteProtocolError
    ),
    "flags": (HEADER.pack(1, 1, Op.PING, 2, 0), errors.RemoteProtocolError),
    "version 2": (HEADER.pack(2, 0, Op.PING, 2, 0), errors.VersionUnsupported),
    "version 0": (bytes(12), errors.VersionUnsupported),
    "text": (b"GET / HTTP/1.1\r\n\r\n", errors.VersionUnsupported),
    "unknown opcode": (build_frame(0x7777, 2, b""), errors.RemoteProtocolError),
    "opcode 0": (build_frame(0, 0, b""), errors.RemoteProtocolError),
    "an opcode of links": (build_frame(0xF002, 2, bytes(90)), errors.RemoteProtocolError),
    "an opcode of the server": (build_frame(Op.SEND_ACK, 2, b"\x90"), errors.RemoteProtocolError),
}  # fmt: skip


@pytest.mark.shows("F-45")
@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_frame_ends_the_connection_with_its_code(name: str) -> None:
    data, error = BROKEN[name]
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        client.send(data)
        assert (await client.goaway()).code == error.code
        assert rig.metrics.protocol_errors == 1
        assert rig.router.withdrawn
        assert not rig.router.requests


async def test_many_broken_frames_are_one_line_that_quotes_none_of_them() -> None:
    with capture_logs() as lines:
        async with GatewayRig() as rig:
            for _ in range(3):
                client = await rig.logged_in()
                client.send(BROKEN["text"][0])
                await client.goaway()
            assert rig.metrics.protocol_errors == 3
    (line,) = [line for line in lines if line["event"] == "frame_refused"]
    assert line == {
        "event": "frame_refused",
        "log_level": "warning",
        "count": 1,
        "error": "VersionUnsupported",
        "code": errors.VersionUnsupported.code,
    }


@pytest.mark.shows("F-45")
@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_first_frame_ends_the_connection_too(name: str) -> None:
    async with GatewayRig() as rig:
        client = await rig.connect()
        client.send(BROKEN[name][0])
        assert (await client.goaway()).code in {
            errors.RemoteProtocolError.code, errors.VersionUnsupported.code, errors.AuthRequired.code
        }  # fmt: skip


@pytest.mark.parametrize("op", sorted(CLIENT_OPS - {Op.AUTH}))
async def test_the_first_frame_must_be_a_log_in(op: Op) -> None:
    async with GatewayRig() as rig:
        client = await rig.connect()
        client.send(build_frame(op, 2, b""))
        assert (await client.goaway()).code == errors.AuthRequired.code


async def test_a_client_that_does_not_wait_for_its_log_in_is_sent_away() -> None:
    async with GatewayRig() as rig:
        client = await rig.connect()
        client.send(build_message(Op.AUTH, 1, Auth(token(rig.clock), PHONE)), send_frame(2))
        assert (await client.goaway()).code == errors.AuthRequired.code
        assert not rig.router.announced


async def test_a_frame_may_come_in_any_pieces() -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        data = send_frame(2, bytes(60_000)) + send_frame(3, b"")
        for at in range(0, len(data), 7_919):
            client.send(data[at : at + 7_919])
            await client.writer.drain()
        requests = await rig.requests(2)
        assert [request.body for request in requests] == [send_body(bytes(60_000)), send_body(b"")]


@pytest.mark.shows("F-45")
async def test_the_largest_legal_frame_is_taken() -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        client.send(build_frame(Op.SEND_MESSAGE, 2, bytes(limits.FRAME_BODY_BYTES_MAX)))
        (request,) = await rig.requests(1)
        assert len(request.body) == limits.FRAME_BODY_BYTES_MAX


@pytest.mark.shows("F-46")
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(min_size=1, max_size=300), authenticated=st.booleans())
def test_garbage_inside_tls_ends_in_a_code_or_in_a_deadline(garbage: bytes, authenticated: bool) -> None:
    async def scenario() -> None:
        async with GatewayRig() as rig:
            client = await (rig.logged_in() if authenticated else rig.connect())
            client.send(garbage)
            await _until_over(rig, client)

    asyncio.run(scenario())


async def _until_over(rig: GatewayRig, client: RawClient) -> None:
    """Either the garbage is refused, or the time for the rest of its frame passes."""
    ended = asyncio.create_task(client.rest())

    def is_over() -> bool:
        rig.pass_time(milliseconds=limits.AUTH_TIMEOUT_MS // 2)
        return ended.done()

    await happens(is_over, what="refused or timed out")
    codes = {decode_body(Op.GOAWAY, frame.body).code for frame in ended.result() if frame.opcode == Op.GOAWAY}
    assert codes <= set(errors.CLIENT_ERRORS)


@pytest.mark.shows("F-43", "F-46")
async def test_plain_tcp_garbage_is_cut_and_others_are_served() -> None:
    async with GatewayRig() as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(b"\x01\x00\x00\x01" * 100)
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                while await reader.read(4096):
                    pass
        writer.close()
        await rig.logged_in()
        assert rig.metrics.accepts == 1


@pytest.mark.shows("F-43")
async def test_peers_that_never_finish_their_handshake_are_cut_and_others_are_served() -> None:
    async with GatewayRig(handshake_timeout_ms=300) as rig:
        stalled = [await asyncio.open_connection("127.0.0.1", rig.port) for _ in range(20)]
        for _, writer in stalled[::2]:
            writer.write(b"\x16\x03\x01\x02\x00\x01")
        await rig.logged_in()
        async with asyncio.timeout(5):
            for reader, writer in stalled:
                with contextlib.suppress(ConnectionError):
                    while await reader.read(4096):
                        pass
                writer.close()
        assert rig.metrics.accepts == 1


@pytest.mark.shows("F-43")
def test_memory_of_many_handshakes_is_given_back_twice_and_that_of_few_is_kept() -> None:
    back: list[float] = []
    memory = HandshakeMemory(lambda: back.append(at))
    at = 0.0
    memory.look(at)
    memory.begun = HANDSHAKE_MEMORY_BEGUN - 1
    interval = HANDSHAKE_MEMORY_INTERVAL_MS / 1000
    for at in (interval, 2 * interval):
        memory.look(at)
    assert back == []
    memory.begun += 1
    for at in (2.5 * interval, 3 * interval, 3.5 * interval, 4 * interval, 5 * interval):
        memory.look(at)
    assert back == [3 * interval, 4 * interval], "once at once, and when the last of them has ended"


def test_giving_memory_back_works_with_the_library_of_this_host() -> None:
    give_back_memory()


# --- slow and fast peers -----------------------------------------------------------------------------


@pytest.mark.shows("F-40", "M10")
async def test_a_client_that_does_not_read_is_cut_at_its_bytes_and_others_go_on() -> None:
    async with GatewayRig() as rig:
        slow = await rig.logged_in()
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport that reads
        announce = rig.router.announced[0]
        pushed = held_back = 0
        large = entry(1, bytes(60_000))
        while not rig.router.withdrawn:
            pushed += 1
            rig.gateway.deliver([(announce.handle, announce.generation, 0, pushed, False)], large)
            await asyncio.sleep(0)
            rig.gateway.sweep()
            held_back = max(held_back, rig.metrics.send_queue_bytes)
            assert pushed < 1_000
        assert rig.metrics.slow_disconnects == 1
        assert held_back > 0
        normal = await rig.logged_in(user=BOB)
        normal.send(build_message(Op.PING, 2, Ping()))
        await normal.body(Op.PONG)
        slow.writer.transport.resume_reading()  # type: ignore[attr-defined]  # a transport that reads


@pytest.mark.shows("F-40")
async def test_what_one_pass_collects_is_bounded_too() -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        announce = rig.router.announced[0]
        large = entry(1, bytes(60_000))
        for pushed in range(1, 30):
            rig.gateway.deliver([(announce.handle, announce.generation, 0, pushed, False)], large)
        assert rig.metrics.slow_disconnects == 1
        assert (await client.goaway()).code == errors.SlowConsumer.code


async def test_a_client_with_too_many_open_requests_is_cut() -> None:
    async with GatewayRig(unanswered_requests_max=8) as rig:
        client = await rig.logged_in()
        for request_id in range(2, 10):
            client.send(send_frame(request_id))
        requests = await rig.requests(8)
        for request in requests[:3]:
            request.origin.reply(request, build_frame(Op.SEND_ACK, request.request_id, b"\x90"))
        for request_id in range(10, 13):
            client.send(send_frame(request_id))
        await rig.requests(11)
        assert not rig.router.withdrawn
        client.send(send_frame(13))
        assert (await client.goaway()).code == errors.SlowConsumer.code


@pytest.mark.shows("F-41")
async def test_sends_above_the_rate_are_refused_one_by_one_and_pass_again_later() -> None:
    async with GatewayRig(sends=Rate(10, 3)) as rig:
        client = await rig.logged_in()
        client.send(*(send_frame(request_id) for request_id in range(2, 7)))
        refused = [await client.frame(), await client.frame()]
        assert [frame.request_id for frame in refused] == [5, 6]
        error: Error = decode_body(Op.ERROR, refused[0].body)
        assert error.code == errors.ResourceExhausted.code
        assert len(rig.router.requests) == 3
        rig.clock.advance(milliseconds=error.retry_after_ms)
        client.send(send_frame(7))
        await rig.requests(4)
        assert rig.metrics.shed_rate == 2


async def test_a_limit_on_sends_does_not_touch_other_requests() -> None:
    async with GatewayRig(sends=Rate(0.001, 1)) as rig:
        client = await rig.logged_in()
        pull = build_message(Op.PULL_MAILBOX, 4, PullMailbox(MailboxSeq(0), 1))
        client.send(send_frame(2), send_frame(3), pull)
        await rig.requests(2)
        assert [request.request_id for request, _ in rig.router.requests] == [2, 4]


async def test_renewals_are_charged_like_sends() -> None:
    async with GatewayRig(sends=Rate(0.001, 1)) as rig:
        client = await rig.logged_in()
        await client.log_in(token(rig.clock))
        client.send(build_message(Op.AUTH, 3, Auth(token(rig.clock), PHONE)))
        assert (await client.body(Op.ERROR)).code == errors.ResourceExhausted.code
        client.send(build_message(Op.PING, 4, Ping()))
        await client.body(Op.PONG)


async def test_one_connection_too_many_is_told_to_come_back() -> None:
    async with GatewayRig(connections_max=1) as rig:
        first = await rig.logged_in()
        goodbye = await (await rig.connect()).goaway()
        assert goodbye.code == errors.GoingAway.code
        assert goodbye.reconnect_after_ms > 0
        first.send(build_message(Op.PING, 2, Ping()))
        await first.body(Op.PONG)
        await first.close()
        await happens(lambda: rig.gateway.open_sockets == 0, what="closed")
        await rig.logged_in()


# --- deadlines ---------------------------------------------------------------------------------------


async def test_a_connection_without_a_log_in_ends_in_time() -> None:
    async with GatewayRig() as rig:
        client = await rig.connect()
        await happens(lambda: rig.metrics.accepts, what="accepted")
        rig.pass_time(milliseconds=limits.AUTH_TIMEOUT_MS - 1)
        assert rig.metrics.connections == 1
        rig.pass_time(milliseconds=1)
        assert (await client.goaway()).code == errors.AuthRequired.code
        assert rig.metrics.auth_late == 1


@pytest.mark.shows("F-42", "O13")
async def test_a_silent_connection_is_dead_and_a_pinging_one_lives() -> None:
    async with GatewayRig() as rig:
        silent, pinging = await rig.logged_in(), await rig.logged_in(user=BOB)
        rig.pass_time(milliseconds=limits.PING_INTERVAL_MS)
        pinging.send(build_message(Op.PING, 2, Ping()))
        await pinging.body(Op.PONG)
        rig.pass_time(milliseconds=limits.CONNECTION_SILENCE_MS_MAX - limits.PING_INTERVAL_MS)
        assert (await silent.goaway()).code == errors.HeartbeatLost.code
        assert rig.router.withdrawn == [rig.router.announced[0].session]
        pinging.send(build_message(Op.PING, 3, Ping()))
        await pinging.body(Op.PONG)


@pytest.mark.shows("F-44")
async def test_a_trickled_frame_ends_the_connection() -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        for byte in send_frame(2)[:10]:
            seen = rig.metrics.bytes_in
            client.send(bytes((byte,)))
            await happens(lambda before=seen: rig.metrics.bytes_in > before, what="read")  # type: ignore[misc]  # bound in this turn of the loop
            rig.pass_time(milliseconds=limits.FRAME_TIMEOUT_MS // 10)
        assert (await client.goaway()).code == errors.HeartbeatLost.code


async def test_the_end_of_a_token_ends_the_connection_even_when_it_is_busy() -> None:
    async with GatewayRig() as rig:
        client = await rig.connect()
        await client.log_in(token(rig.clock, life_ms=10_000))
        for _ in range(6):
            rig.pass_time(milliseconds=10_000)
            client.send(build_message(Op.PING, 2, Ping()))
            await client.body(Op.PONG)
        rig.pass_time(milliseconds=10_000)
        assert (await client.goaway()).code == errors.Unauthenticated.code


async def test_reminders_do_not_pile_up() -> None:
    async with GatewayRig() as rig:
        client = await rig.logged_in()
        for request_id in range(2, 50):
            client.send(build_message(Op.PING, request_id, Ping()))
            await client.body(Op.PONG)
            rig.pass_time(milliseconds=1_000)
        assert len(rig.gateway._connections._deadlines) <= 3


# --- the loop of the workers -------------------------------------------------------------------------

ON_UVLOOP: tuple[Scenario, ...] = (
    test_peers_that_never_finish_their_handshake_are_cut_and_others_are_served,
    test_a_frame_may_come_in_any_pieces,
    test_the_largest_legal_frame_is_taken,
    test_plain_tcp_garbage_is_cut_and_others_are_served,
    test_a_client_that_does_not_read_is_cut_at_its_bytes_and_others_go_on,
    test_what_one_pass_collects_is_bounded_too,
    test_a_silent_connection_is_dead_and_a_pinging_one_lives,
)


@pytest.mark.parametrize("scenario", ON_UVLOOP, ids=lambda scenario: scenario.__name__)
def test_the_same_holds_on_the_loop_that_workers_run(scenario: Scenario) -> None:
    run_on_uvloop(scenario)

"""The probe against a server that goes away: what is asked of an ended connection fails at once."""

from pathlib import Path

import pytest

from qim.client.probe import Probe
from tests.unit.client.fake_server import PEER, FakeServer, build_token


async def test_a_request_on_an_ended_connection_fails_at_once(server: FakeServer, ca: Path) -> None:
    async with Probe("127.0.0.1", server.port, ca, token=build_token()) as probe:
        server.cut()
        await probe.closed()
        with pytest.raises(ConnectionError):
            await probe.send(PEER, "too late")

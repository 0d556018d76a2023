"""The fake server and the clients of the client's own tests."""

from tests.unit.client.conftest import ca, enter, server

__all__ = ["ca", "enter", "server"]

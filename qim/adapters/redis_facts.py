"""What a Redis or Valkey server says of itself: settings, role, identities, memory.

Asked at each start by the guards, by `qim init` and for `qimctl status`; never on the path of a message. Raw
answers become plain values here, and what they mean is decided elsewhere (`domain/guards.py`,
`domain/growth.py`). Nothing is kept, and nothing is written but the identity.

A server that does not answer raises what its pipe raises. One that answers but does not let us ask (a user
without the right to CONFIG GET, for example) raises StoreUnfit or StoreBroken, and the caller says who must
allow what.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from qim.adapters.redis_keys import IDENTITY, OWNER

Command = Callable[..., asyncio.Future[Any]]
"""`RedisPipe.command`, or anything else that sends one command."""


class StoreFacts(NamedTuple):
    """Who and how a server is."""

    settings: Mapping[str, str]
    """Of those that were asked for; one that the server does not know is absent."""
    role: str
    identities: Mapping[bytes, bytes]
    keys: int
    was_served: bool
    """Whether a worker has ever owned slots here."""


class StoreMemory(NamedTuple):
    """What a server holds, and how much it may hold."""

    used_bytes: int
    empty_bytes: int
    """What it used before it held anything."""
    limit_bytes: int
    """Its `maxmemory`; 0 is none."""
    host_bytes: int
    evicted: int


async def fetch_facts(command: Command, settings: Iterable[str]) -> StoreFacts:
    """Asks in one round trip."""
    asked = [command("CONFIG", "GET", setting) for setting in settings]
    asked += [command("INFO", "replication"), command("HGETALL", IDENTITY), command("DBSIZE")]
    asked += [command("EXISTS", OWNER)]
    # All are awaited, also behind a failed one: nobody else will ever look at them.
    await asyncio.gather(*asked, return_exceptions=True)
    *found, replication, identities, keys, owners = [await answer for answer in asked]
    return StoreFacts(
        settings={pair[0].decode(): pair[1].decode() for pair in found if pair},
        role=_parse_info(replication).get("role", "unknown"),
        identities=dict(zip(identities[::2], identities[1::2], strict=True)),
        keys=int(keys),
        was_served=bool(owners),
    )


async def fetch_memory(command: Command) -> StoreMemory:
    """Two sections, because older servers take one at a time."""
    facts: dict[str, str] = {}
    for section in ("memory", "stats"):
        facts |= _parse_info(await command("INFO", section))
    return StoreMemory(
        used_bytes=int(facts["used_memory"]),
        empty_bytes=int(facts.get("used_memory_startup", 0)),
        limit_bytes=int(facts["maxmemory"]),
        host_bytes=int(facts.get("total_system_memory", 0)),
        evicted=int(facts["evicted_keys"]),
    )


async def write_identity(command: Command, *, field: bytes, value: bytes) -> None:
    """For `init` only; an identity that is there already stays."""
    await command("HSETNX", IDENTITY, field, value)


def _parse_info(text: bytes) -> dict[str, str]:
    return dict(line.partition(":")[::2] for line in text.decode().splitlines() if ":" in line)

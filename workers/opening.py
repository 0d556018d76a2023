"""How a role begins when its store does not answer: it asks again, with back-off, until it does.

What a role reads before its first batch (positions, watermarks, the ends of its logs) changes nothing, so it
may be read as often as needed. One lost answer must not cost a worker that has claimed its slots, met its
peers and perhaps serves sockets already: its restart would ask the same question of the same store. A start
has no deadline, as the worker's own waiting for its stores has none; who cancels the role ends it. What
contradicts itself, or is another server than the one that was checked, is raised and ends the worker.
"""

import asyncio
from collections.abc import Awaitable, Callable

from structlog import get_logger

from qim.domain.mailbox import backoff_ms, is_news
from qim.errors import StaleOwner, StoreRefused, StoreUnfit, StoreUnknown

log = get_logger()


async def until_answered(role: str, read: Callable[[], Awaitable[None]]) -> None:
    """Repeats `read`, which must be safe to repeat from its begin, while its store is away."""
    attempts = 0
    while True:
        try:
            await read()
        except (StaleOwner, StoreUnfit):
            raise
        except (StoreUnknown, StoreRefused) as error:
            attempts += 1
            if is_news(attempts):
                log.warning("role_not_opened", role=role, attempts=attempts, reason=str(error))
        else:
            return
        await asyncio.sleep(backoff_ms(attempts) / 1000)

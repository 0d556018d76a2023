"""A bounded queue between an event callback and a role.

A callback only notes what came (`offer`), the role sets the pace (`take`). Bounded in items and in bytes; a
full inbox answers False and the caller decides: reject the request, or stop reading its source. Several
takers may share one inbox (the lanes of a role); each batch goes to one of them, in order. One wake-up per
batch: a taker that is already awake is not woken again, and no future exists while the inbox has enough work.
A role that has a batch under way may `expect` a larger one next: small batches are dear, and the one under
way brings the next look anyway.
"""

import asyncio
import sys
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """First in, first out; `offer` from callbacks of the same loop, `take` from roles."""

    def __init__(self, *, items_max: int, bytes_max: int) -> None:
        self._items: deque[tuple[T, int]] = deque()
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._closed = False
        self._enough = 1
        self._takers: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def offer(self, item: T, *, size: int = 0) -> bool:
        """False: full or closed; nothing was taken in."""
        if self._closed or len(self._items) >= self._items_max or self._bytes + size > self._bytes_max:
            return False
        self._items.append((item, size))
        self._bytes += size
        if len(self._items) >= self._enough:
            self._wake_one()
        return True

    def expect(self, enough: int) -> None:
        """How many items must be there before a taker gets any; whoever raised it lowers it again."""
        self._enough = enough
        if len(self._items) >= enough:
            self._wake_one()

    async def take(self, items_max: int, bytes_max: int = sys.maxsize) -> list[T]:
        """Everything that arrived since the last take, up to limits but at least one item.

        Empty only when closed and drained.
        """
        while len(self._items) < self._enough:
            if self._closed:
                break
            waiter = asyncio.get_running_loop().create_future()
            self._takers.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                # The wake-up may have been spent on this taker, which takes nothing: it goes to the next one.
                if len(self._items) >= self._enough:
                    self._wake_one()
                raise
        batch: list[T] = []
        left = bytes_max
        while self._items and len(batch) < items_max and left > 0:
            item, size = self._items.popleft()
            self._bytes -= size
            left -= size
            batch.append(item)
        if len(self._items) >= self._enough:
            self._wake_one()
        return batch

    def close(self) -> None:
        """No more offers; takers get what is left, then empty lists."""
        self._closed = True
        while self._takers:
            self._wake_one()

    def _wake_one(self) -> None:
        while self._takers:
            waiter = self._takers.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

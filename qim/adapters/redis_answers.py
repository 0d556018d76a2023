"""Several replies of one pipe become one future, in the order in which the commands were issued.

A port method splits its items into runs, issues all of them at once and promises one answer. Each reply is
decoded where it arrives, without a future or a task of its own. A reply of the wrong shape is StoreBroken.
When runs end differently the worst counts: broken before unknown before refused. A refusal promises that
nothing was written, so it becomes *unknown* when another run of the same call did its work.
"""

import asyncio
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from qim.adapters.redis_pipe import OnReply
from qim.errors import StoreBroken, StoreError, StoreUnknown

T = TypeVar("T")


class Answers(Generic[T]):
    """Give `part(at, …)` to each command; `future` resolves after the last reply."""

    def __init__(self, parts: int, combine: Callable[[list[Any]], T]) -> None:
        self.future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._combine = combine
        self._decoded: list[Any] = [None] * parts
        self._errors: list[StoreError] = []
        self._missing = parts
        if parts == 0:
            self.future.set_result(combine([]))

    def part(
        self,
        at: int,
        decode: Callable[[Any], Any],
        on_error: Callable[[StoreError], Any] | None = None,
    ) -> OnReply:
        """`on_error` may turn an error into a decoded answer; it gives None to leave it an error."""

        return partial(self._on_reply, at, decode, on_error)

    def _on_reply(
        self,
        at: int,
        decode: Callable[[Any], Any],
        on_error: Callable[[StoreError], Any] | None,
        reply: object,
    ) -> None:
        try:
            if not isinstance(reply, StoreError):
                self._decoded[at] = decode(reply)
            elif on_error is None or (answer := on_error(reply)) is None:
                self._errors.append(reply)
            else:
                self._decoded[at] = answer
        except (TypeError, ValueError, LookupError, AttributeError, struct.error) as error:
            self._errors.append(StoreBroken(f"a reply of the wrong shape: {str(reply)[:200]}: {error}"))
        self._missing -= 1
        if self._missing == 0 and not self.future.done():
            self._finish()

    def _finish(self) -> None:
        if not self._errors:
            self.future.set_result(self._combine(self._decoded))
            return
        for error in self._errors:
            if isinstance(error, StoreBroken):
                self.future.set_exception(error)
                return
        first = self._errors[0]
        if len(self._errors) < len(self._decoded) and not isinstance(first, StoreUnknown):
            first = StoreUnknown(f"part of the call was done, part was not: {first}")
        self.future.set_exception(next((e for e in self._errors if isinstance(e, StoreUnknown)), first))

"""Waiting in tests: poll with a deadline, never sleep for a fixed time.

A fixed sleep is too long on a quick machine and too short on a slow one. `eventually` asks again at short
intervals until its question is answered, and fails with the question when the deadline passes. `stays` is its
twin for "this must not happen": it asks for the whole of a short period. The pauses here are the only ones in
the tests.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

POLL_SECONDS: Final = 0.01

T = TypeVar("T")


def eventually(ask: Callable[[], T], *, what: str, timeout_seconds: float = 10.0) -> T:
    """Calls `ask` until it returns something true and returns that; fails naming `what` at the deadline."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        answer = ask()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_seconds} s: {what}; last answer {answer!r}")
        time.sleep(POLL_SECONDS)


async def eventually_async(ask: Callable[[], Awaitable[T]], *, what: str, timeout_seconds: float = 10.0) -> T:
    """The same for a coroutine function, inside an event loop."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        answer = await ask()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_seconds} s: {what}; last answer {answer!r}")
        await asyncio.sleep(POLL_SECONDS)


async def happens(ask: Callable[[], T], *, what: str, timeout_seconds: float = 10.0) -> T:
    """The same for a plain function, letting the event loop run between two questions."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        answer = ask()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_seconds} s: {what}; last answer {answer!r}")
        await asyncio.sleep(POLL_SECONDS)


async def stays(ask: Callable[[], bool], *, what: str, period_seconds: float = 0.2) -> None:
    """Fails as soon as `ask` stops being true within the period."""
    deadline = time.monotonic() + period_seconds
    while time.monotonic() < deadline:
        if not ask():
            raise AssertionError(f"did not stay true for {period_seconds} s: {what}")
        await asyncio.sleep(POLL_SECONDS)

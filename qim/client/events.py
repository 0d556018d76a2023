"""What happened, for the application: a bounded stream that never makes the connection wait.

The store holds everything, so an event is a hint to look. When the application does not read, the oldest
events are dropped and one `EventsDropped` stands in their place: the application then reads conversations and
messages anew. Events are emitted only after the commit of what they tell.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Final

from qim.client.model import Event, EventsDropped

EVENTS_WAITING_MAX: Final = 10_000
"""Full: the oldest is dropped and counted. Ten seconds of the highest rate a client is built for."""


class EventStream:
    """One reader's events. The first reader also gets what happened before it began to read."""

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque()
        self._dropped = 0
        self._wake = asyncio.Event()
        self._end: BaseException | None = None
        self._is_closed = False

    def emit(self, event: Event) -> None:
        if len(self._waiting) >= EVENTS_WAITING_MAX:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(event)
        self._wake.set()

    def close(self, failure: BaseException | None) -> None:
        """What waits is still read; then the stream ends, with the failure if there is one."""
        self._is_closed, self._end = True, failure
        self._wake.set()

    async def read(self) -> AsyncGenerator[Event, None]:
        while True:
            while self._dropped or self._waiting:
                if self._dropped:
                    count, self._dropped = self._dropped, 0
                    yield EventsDropped(count)
                else:
                    yield self._waiting.popleft()
            if self._is_closed:
                if self._end is not None:
                    raise self._end
                return
            self._wake.clear()
            await self._wake.wait()


class EventHub:
    """Every reader has a stream of its own."""

    def __init__(self) -> None:
        self._first: EventStream | None = EventStream()
        self._streams: set[EventStream] = {self._first}
        self._is_closed = False
        self._failure: BaseException | None = None

    def emit(self, event: Event) -> None:
        for stream in self._streams:
            stream.emit(event)

    def close(self, failure: BaseException | None = None) -> None:
        if not self._is_closed:
            self._is_closed, self._failure = True, failure
            for stream in self._streams:
                stream.close(failure)

    async def read(self) -> AsyncGenerator[Event, None]:
        stream, self._first = self._first or EventStream(), None
        self._streams.add(stream)
        if self._is_closed:
            stream.close(self._failure)
        try:
            async for event in stream.read():
                yield event
        finally:
            self._streams.discard(stream)

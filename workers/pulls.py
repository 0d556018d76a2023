"""Answers PULL_MAILBOX for the users of one mailbox instance, in batches.

A loop of its own beside the materialising ones: a user who catches up must not wait for a shard in trouble,
and a stopped shard still serves what it holds. Pages are clamped to 300 entries and 192 KiB, a few to a call,
because each may be large. A read changes nothing; when the store does not answer, the client is told to ask
again. Full: RESOURCE_EXHAUSTED. A request that has waited 8 s is refused.
"""

from collections.abc import Awaitable, Sequence
from typing import Final

from qim.clock import Clock
from qim.domain import writer as writer_rules
from qim.domain.fanout import shard_of
from qim.errors import ClientError, ResourceExhausted, StoreBroken, StoreError, Unavailable
from qim.limits import (
    BATCH_BYTES_MAX,
    HISTORY_QUERIES_PER_CALL_MAX,
    PULLS_WAITING_MAX,
    REQUEST_DEADLINE_MS,
    SCRIPT_RUN_ITEMS_MAX,
)
from qim.metrics import Metrics
from qim.ports import MailboxPage, MailboxPageQuery, MailboxStore
from qim.wire.bodies import PullMailbox, build_mailbox_batch, clamp_page, decode_body
from qim.wire.layout import Op
from workers.inbox import Inbox
from workers.request import NOTHING_WRITTEN, Request, reply_error

_PULL: Final = int(Op.PULL_MAILBOX)
_BYTES_WAITING_MAX: Final = PULLS_WAITING_MAX * 256
"""A pull is four numbers; larger bodies are foreign fields of later versions."""
_FULL: Final = ResourceExhausted("too many pulls are waiting", retry_after_ms=writer_rules.RETRY_AFTER_MS)
_TOO_LATE: Final = Unavailable("the request has waited too long", retry_after_ms=writer_rules.RETRY_AFTER_MS)


class Pulls:
    """One per mailbox instance."""

    def __init__(self, *, store: MailboxStore, clock: Clock, metrics: Metrics) -> None:
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._inbox: Inbox[Request] = Inbox(items_max=PULLS_WAITING_MAX, bytes_max=_BYTES_WAITING_MAX)

    def submit(self, request: Request) -> None:
        """Called in a callback: notes the request, or refuses it at once."""
        if not self._inbox.offer(request, size=len(request.body)):
            self._metrics.shed_queue += 1
            reply_error(request, _FULL)

    def close(self) -> None:
        """What is waiting is still answered; then `run` returns."""
        self._inbox.close()

    async def run(self) -> None:
        """Until closed and empty."""
        while batch := await self._inbox.take(SCRIPT_RUN_ITEMS_MAX):
            await self._answer(batch)

    async def _answer(self, batch: Sequence[Request]) -> None:
        oldest = self._clock.monotonic() - REQUEST_DEADLINE_MS / 1000
        asked = []
        for request in batch:
            if request.arrived < oldest:
                reply_error(request, _TOO_LATE)
                continue
            try:
                asked.append((request, _plan(request)))
            except ClientError as error:
                reply_error(request, error)
        step = HISTORY_QUERIES_PER_CALL_MAX
        parts = [asked[start : start + step] for start in range(0, len(asked), step)]
        calls = [self._store.read_mailbox([query for _request, query in part]) for part in parts]
        for part, call in zip(parts, calls, strict=True):
            await self._reply(part, call)

    async def _reply(
        self, part: Sequence[tuple[Request, MailboxPageQuery]], call: Awaitable[list[MailboxPage]]
    ) -> None:
        try:
            pages = await call
        except StoreBroken:
            # One user's broken mailbox fails the call of all; asked one by one, only that user is refused.
            if len(part) > 1:
                for request, query in part:
                    await self._reply([(request, query)], self._store.read_mailbox([query]))
            else:
                reply_error(part[0][0], NOTHING_WRITTEN)
            return
        except StoreError:
            for request, _query in part:
                reply_error(request, NOTHING_WRITTEN)
            return
        for (request, _query), page in zip(part, pages, strict=True):
            frame = build_mailbox_batch(
                request.request_id,
                entries=page.entries,
                covered_through=page.covered_through,
                more=page.more,
                rebuild=page.rebuild,
            )
            request.origin.reply(request, frame)
        self._metrics.mailbox_pulls += len(part)


def _plan(request: Request) -> MailboxPageQuery:
    pull: PullMailbox = decode_body(_PULL, request.body)
    return MailboxPageQuery(
        request.tenant, request.user, shard_of(request.tenant, request.user), pull.after_mailbox_seq,
        clamp_page(pull.limit), BATCH_BYTES_MAX, pull.held_through, pull.held_count,
    )  # fmt: skip

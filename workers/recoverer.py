"""Finishes what is RECORDED and nobody works on: messages that a crash or a lost answer left half-done.

Such a message has its coordinates and its bytes in the store and may or may not lie in the Outbox. It is
appended (again) and marked, with the same coordinates and the stored bytes, whether or not its client comes
back; whoever reads the Outbox twice over recognises it. It takes the steps of `workers/commits.py` and is in
their `in_flight` like any other, so a repeat of its client waits for it.

It is a pass of its own and no lane: at the claim for everything, then every second for what is older than a
pass can be. What a pass still works on it leaves alone, and so it does what `workers/stops.py` has noted as
unfinishable. It owns nothing but the count of its failed readings.

Full: one page per call; what is left waits for the next call. What cannot be finished is passed over, and the
page grows by it, so that it never hides what lies behind it. A store that is away costs a log line now and
then, and the next call. A recoverer that dies leaves what it was at RECORDED, for the next one.
"""

from collections.abc import Sequence

from structlog import get_logger

from qim.domain.mailbox import is_news
from qim.domain.placement import slot_of_bucket
from qim.errors import StoreError
from qim.ids import BucketId
from qim.limits import RECOVER_AGE_MS, UNFINISHABLE_MESSAGES_MAX, WRITER_BATCH_MESSAGES_MAX
from qim.metrics import Metrics
from qim.ports import CommitStore
from workers.commits import Commits

log = get_logger()


class Recoverer:
    """The recoverer of the buckets that live on one core instance."""

    def __init__(
        self, *, commits: Commits, store: CommitStore, buckets: Sequence[BucketId], metrics: Metrics
    ) -> None:
        self._commits = commits
        self._stops = commits.stops
        self._store = store
        self._buckets = tuple(buckets)
        self._metrics = metrics
        self._unread = 0

    async def recover(self, *, older_than_ms: int = RECOVER_AGE_MS) -> int:
        """Finishes one page of RECORDED messages that nobody works on; how many were finished."""
        in_flight, stops = self._commits.in_flight, self._stops
        entries_max = WRITER_BATCH_MESSAGES_MAX + len(in_flight) + len(stops.unfinishable)
        try:
            pending = await self._store.read_pending(
                self._recoverable(), older_than_ms=older_than_ms, entries_max=entries_max
            )
        except StoreError as error:
            self._unread += 1
            if is_news(self._unread):
                log.warning("recoverer_could_not_read", attempts=self._unread, reason=str(error))
            return 0
        self._unread = 0
        adopted = [sending for item in pending if (sending := self._commits.adopt(item))]
        if stops.outbox_broken and not (adopted or in_flight) and stops.is_outbox_due():
            stops.mend_outbox()  # nothing is left to try it with: the next send does
        recovered = await self._commits.settle(await self._commits.publish(adopted))
        self._metrics.writer_recovered += recovered
        return recovered

    def _recoverable(self) -> Sequence[BucketId]:
        """Where a stopped slot may hold what could not be noted, it waits for its operator as a whole."""
        if len(self._stops.unfinishable) < UNFINISHABLE_MESSAGES_MAX:
            return self._buckets
        return [bucket for bucket in self._buckets if slot_of_bucket(bucket) not in self._stops.slots]

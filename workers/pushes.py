"""Tells the sessions that are online of entries in their mailboxes.

A push starts only after the store has said that W has passed its record, and it may be lost: it names the
entry before it, so a device that misses one sees the gap and pulls. Nobody waits for it.

Only what stands where it says is told. A repeat has moved W and left no entry: it is neither told nor
counted. Where the answer of the store leaves open whether an entry stands (PASSED), the mailbox is looked
into first, the one read that is waited for here; where the store does not say, nobody is told, and the next
push names a place that the device does not know, so that it pulls.

State: none. The newest entry of a user is the presence's; the entries themselves are the store's.

Full: what a peer cannot take is dropped by its link, and a pull brings it. A session that has gone is left
out by its gateway. A worker that dies takes its pushes with it; its devices log in elsewhere and pull.
"""

from collections.abc import Sequence

from qim.clock import Clock
from qim.errors import StoreError
from qim.ids import WorkerId
from qim.metrics import Metrics
from qim.ports import MailboxStore, Materialised
from workers.shard_state import Delivery, PresenceView, Pusher, outcome_of_place, query_of_place


class Pushes:
    """The pushes of one mailbox instance."""

    def __init__(
        self, *, store: MailboxStore, presence: PresenceView, pusher: Pusher, clock: Clock, metrics: Metrics
    ) -> None:
        self._store = store
        self._presence = presence
        self._pusher = pusher
        self._clock = clock
        self._metrics = metrics

    def push(self, deliveries: Sequence[Delivery]) -> None:
        """Counts entries that are news and tells the sessions that are online.

        The sending device gets the echo: it has the body already.
        """
        metrics = self._metrics
        # Counted by age and observed once per age: what one pass of the writer has reserved is of one.
        ages_ms: dict[int, int] = {}
        now_ms = self._clock.now_ms()
        sessions_of = self._presence.sessions_of
        advance = self._presence.advance
        for delivery in deliveries:
            write, sender, device = delivery.write, delivery.sender, delivery.device
            targets: dict[WorkerId, list[tuple[int, int, int, int, bool]]] = {}
            mailbox_seq, tenant, recipients = write.mailbox_seq, write.tenant, write.recipients
            metrics.mailbox_entries += len(recipients)
            age_ms = now_ms - write.reserved_at
            ages_ms[age_ms] = ages_ms.get(age_ms, 0) + 1
            for user in recipients:
                sessions = sessions_of(tenant, user)
                if not sessions:
                    continue
                previous = advance(tenant, user, mailbox_seq)
                for session in sessions:
                    echo = user == sender and session.device == device
                    target = (session.handle, session.generation, previous, mailbox_seq, echo)
                    targets.setdefault(session.worker, []).append(target)
            for worker, named in targets.items():
                metrics.pushes += len(named)
                self._pusher.push(worker, named, write.entry)
        for age_ms, times in ages_ms.items():
            metrics.message_delivery.observe(age_ms / 1000 if age_ms > 0 else 0.0, times=times)

    async def tell(self, deliveries: Sequence[Delivery], outcomes: Sequence[Materialised]) -> None:
        """Pushes what stands where it says, of records that W has passed.

        A device that is told of a place without an entry counts one too many. Where the store does not say,
        nobody is told, but the next push names that place, which the device does not know: so it pulls.
        """
        outcomes = await self._look_up(deliveries, outcomes)
        for delivery, outcome in zip(deliveries, outcomes, strict=True):
            if outcome is Materialised.DONE:
                self.push([delivery])
            elif outcome is Materialised.PASSED:
                self.note_untold([delivery])

    async def _look_up(
        self, deliveries: Sequence[Delivery], outcomes: Sequence[Materialised]
    ) -> Sequence[Materialised]:
        """PASSED becomes DONE or REPEAT by what the mailbox shows; it stays where the store does not say."""
        named = zip(deliveries, outcomes, strict=True)
        writes = [delivery.write for delivery, outcome in named if outcome is Materialised.PASSED]
        if not writes:
            return outcomes
        try:
            pages = await self._store.read_mailbox([query_of_place(write) for write in writes])
        except StoreError:
            return outcomes
        found = map(outcome_of_place, writes, pages)
        return [next(found) if outcome is Materialised.PASSED else outcome for outcome in outcomes]

    def note_untold(self, part: Sequence[Delivery]) -> None:
        """The next push names these places as the ones before it."""
        for delivery in part:
            write = delivery.write
            for user in write.recipients:
                self._presence.advance(write.tenant, user, write.mailbox_seq)

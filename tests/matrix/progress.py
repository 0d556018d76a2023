"""E3: every task stands twice in the log, shuffled, and the consumer dies between entry and progress write.

The consumer is the real pair of fan-out and mailbox. It dies at every step of both, over and over; the steps
that matter most are `fanout.appended` (dispatched, position not stored) and `mailbox.taken` …
`mailbox.finished`. Every other time the medium dies with it. In the end every mailbox must hold exactly what
it holds where each task was delivered once, in order, with nobody dying; and one dispatch id must stand for
one digest and one content.
"""

import asyncio
from collections.abc import Mapping
from itertools import cycle
from random import Random
from typing import Final

from qim.ids import SlotId, UserId
from qim.records import parse_dispatch_record
from tests.matrix.media import ALL_SLOTS, Host, Medium, prepare
from tests.matrix.verdict import Outcome
from tests.matrix.work import all_mailboxes, claim_of, consume, consume_until_struck, outbox_record, read_all

POINTS: Final = (
    "fanout.planned", "fanout.appended", "fanout.stored",
    "mailbox.taken", "mailbox.finished", "mailbox.pushed",
)  # fmt: skip
Mailboxes = Mapping[UserId, list[bytes]]

ROUNDS_MAX: Final = 4
"""How often each point is struck, in a long run."""
TASKS_PER_ROUND: Final = 1_000
HITS_MAX: Final = 3
RECORDS_PER_HIT: Final = 512
"""As many as one batch of the roles holds; a consumer with less to do hits each point once."""
PARTITIONS: Final = 8
APPEND_RECORDS: Final = 256


def deliver_twice(medium: Medium, host: Host, control: Host, *, tasks: int, seed: int = 0) -> Outcome:
    """E3. `control` is a second, empty instance for the single delivery."""
    random = Random(seed)
    outcome = Outcome(tasks=tasks, strikes_wanted=len(POINTS))
    control.start()
    _fill(control, [*range(tasks)])
    consume(control, claim_of(1))
    host.start()
    twice = [*range(tasks)] * 2
    random.shuffle(twice)
    # A share before each strike: so that no consumer is through before it is struck.
    rounds = min(ROUNDS_MAX, 1 + tasks // TASKS_PER_ROUND)
    strikes = rounds * len(POINTS)
    share = -(-len(twice) // strikes)
    for strike, point in zip(range(strikes), cycle(POINTS), strict=False):
        part = twice[strike * share : (strike + 1) * share]
        _fill(host, part, is_new=not strike)
        at_hit = random.randint(1, min(HITS_MAX, 1 + share // RECORDS_PER_HIT))
        struck = consume_until_struck(medium, host, claim_of(strike + 1), point=point, at_hit=at_hit)
        outcome.strikes += struck
        outcome.count(point, struck)
        if strike % 2 and medium.outlives_processes:
            host.kill9()
            host.start()
    consume(host, claim_of(strikes + 1))
    untouched = [point for point in POINTS if not outcome.figures[point]]
    outcome.strikes *= not untouched
    asyncio.run(_check_dispatches(host, outcome))
    _compare(outcome, once=asyncio.run(all_mailboxes(control)), twice=asyncio.run(all_mailboxes(host)))
    return outcome


def _fill(host: Host, numbers: list[int], *, is_new: bool = True) -> None:
    async def fill() -> None:
        if is_new:
            await prepare(host)
        async with host.open() as parts:
            for start in range(0, len(numbers), APPEND_RECORDS):
                some = numbers[start : start + APPEND_RECORDS]
                records = [(SlotId(number % PARTITIONS * 8), outbox_record(number)) for number in some]
                assert None not in await parts.outbox.append(records)

    asyncio.run(fill())


def _compare(outcome: Outcome, *, once: Mailboxes, twice: Mailboxes) -> None:
    """A mailbox is compared as a set that counts: kills change the order of delivery, never what is
    delivered.
    """
    entries = sum(map(len, once.values()))
    outcome.figures["entries"] = entries
    outcome.expect(entries == 2 * outcome.tasks, "the single delivery itself is not complete")
    differing = sum(sorted(once[user]) != sorted(twice[user]) for user in once)
    outcome.violated("a mailbox differs from single delivery", times=differing)


async def _check_dispatches(host: Host, outcome: Outcome) -> None:
    content: dict[bytes, bytes] = {}
    async with host.open() as parts:
        for slot in ALL_SLOTS:
            for record in await read_all(parts.dispatch, slot):
                name = parse_dispatch_record(record.data).dispatch_id
                known = content.setdefault(name, record.data)
                outcome.expect(known == record.data, f"dispatch {name.hex()} has two contents")
                outcome.count("dispatch records", 1)
    outcome.figures["dispatch ids"] = len(content)

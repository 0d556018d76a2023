"""E1: the owner dies after each step of a commit, no client comes back, and the recoverer finishes the rest.

    intent, body     `writer.reserved`: both are one step of the commit store, so one point stands behind both
    task accepted    `writer.appended`: the record is durable in the log, nothing else knows of it
    complete         `writer.marked`, `writer.acknowledged`: the mark was issued, clients may have their ACKs

and before them `writer.taken`, where nothing may be left behind. An owner ends there as after kill -9; every
other time the medium is killed with it, and now and then the medium alone dies first. Owners that commit in
one step, as they do where one server holds everything, take turns with owners that need two.

Then, with nobody sending: what was acknowledged is in the log before the recoverer has run; afterwards
nothing is half-done, the log and the history of the commit store name the same messages with the same
coordinates, no conversation has a hole, and nobody has another sequence than its ACK said.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import cycle
from random import Random
from typing import Final, NamedTuple

from qim.domain.placement import buckets_of_slot
from qim.ids import BucketId, Seq
from qim.ports import HistoryQuery
from qim.records import HEADER_BYTES, decode_entry, decode_record, parse_header
from tests.matrix.media import ALL_SLOTS, Host, Parts, prepare
from tests.matrix.processes import Child, Reporter
from tests.matrix.verdict import Outcome
from tests.matrix.work import (
    ACKED,
    CONVERSATIONS,
    HOME,
    SENT,
    TENANT,
    WINDOW,
    Owner,
    build_writer,
    claim_of,
    number_of,
    plan_task,
    read_all,
    running,
    take_slots,
)
from workers.failpoints import KILLED, Action, Failpoints

TAKEN, RESERVED, APPENDED = "writer.taken", "writer.reserved", "writer.appended"
MARKED, ACKNOWLEDGED = "writer.marked", "writer.acknowledged"
MEDIUM: Final = "the medium"
"""Not a point of the code: the medium dies at a random acknowledgement, and then its owner."""


class Strike(NamedTuple):
    """Where an owner dies, and how it commits."""

    point: str
    in_one_step: bool


STRIKES: Final = (
    *(Strike(point, False) for point in (TAKEN, RESERVED, APPENDED, MARKED, ACKNOWLEDGED, MEDIUM)),
    *(Strike(point, True) for point in (TAKEN, RESERVED, ACKNOWLEDGED, MEDIUM)),
)
PASSES_BEFORE_STRIKE_MAX: Final = 6
TASKS_PER_OWNER_MAX: Final = 100_000
RECOVERIES_MAX: Final = 8
"""A page of the recoverer holds more than an owner can leave half-done, so the second finds nothing."""
_ALL_BUCKETS: Final = [BucketId(bucket) for slot in ALL_SLOTS for bucket in buckets_of_slot(slot)]


class Place(NamedTuple):
    """The coordinates of a task."""

    seq: int
    reserved_at: int


def commit_under_strikes(host: Host, *, tasks: int, seed: int = 0) -> Outcome:
    """E1."""
    host.start()
    asyncio.run(prepare(host))
    random = Random(seed)
    outcome = Outcome(strikes_wanted=len(STRIKES))
    acked: dict[int, Place] = {}
    for number, strike in enumerate(cycle(STRIKES)):
        if outcome.tasks >= tasks and number >= len(STRIKES):
            break
        passes = random.randint(1, PASSES_BEFORE_STRIKE_MAX)
        owner = partial(_own, host, strike=strike, first=outcome.tasks, boot=2 * number + 1, at_hit=passes)
        child = _strike(host, owner, strike, acks=passes * WINDOW // 2, takes_medium=bool(number % 2))
        outcome.strikes += 1
        outcome.tasks += child.counts[SENT]
        outcome.count("acknowledged", child.counts[ACKED])
        acked_now = {
            told.first: Place(told.second, told.third) for told in child.reports if told.kind == ACKED
        }
        acked |= acked_now
        asyncio.run(_recover(host, outcome, acked_now, boot=2 * number + 2))
    asyncio.run(compare(host, outcome, acked))
    return outcome


def _strike(
    host: Host, owner: Callable[[Reporter], None], strike: Strike, *, acks: int, takes_medium: bool
) -> Child:
    """Runs an owner to its death; the medium is alive again when this returns."""
    child = Child(owner)
    if strike.point == MEDIUM:
        alive = child.read_until_told(ACKED, acks)
        assert alive, "the owner ended before it was struck"
        host.kill9()
        child.kill9()
        host.start()
        return child
    code = child.finish()
    assert code == KILLED, f"the owner ended with {code} instead of being struck at {strike.point}"
    if takes_medium:
        host.kill9()
        host.start()
    return child


def _own(host: Host, reporter: Reporter, *, strike: Strike, first: int, boot: int, at_hit: int) -> None:
    points = {} if strike.point == MEDIUM else {strike.point: Action("exit", at_hit=at_hit)}

    async def own() -> None:
        async with host.open() as parts:
            await take_slots(parts, claim_of(boot))
            writer = build_writer(parts, Failpoints(points), in_one_step=strike.in_one_step)
            async with running(writer):
                await Owner(writer, reporter).send(range(first, first + TASKS_PER_OWNER_MAX))

    asyncio.run(own())


async def _recover(host: Host, outcome: Outcome, acked: dict[int, Place], *, boot: int) -> None:
    """What a new owner does before it serves; looks at the log before it and at what is pending after it."""
    async with host.open() as parts:
        early = acked.keys() - (await _places_in_log(parts, outcome)).keys()
        outcome.violated("an ACK was sent before its task was in the log", times=len(early))
        await take_slots(parts, claim_of(boot))
        writer = build_writer(parts, Failpoints())
        for _page in range(RECOVERIES_MAX):
            outcome.count("recovered", recovered := await writer.recover_once(older_than_ms=0))
            if not recovered:
                break
        left = await parts.commits.read_pending(_ALL_BUCKETS, older_than_ms=0, entries_max=1_000)
        outcome.violated("a task stays half-done", times=len(left))


async def compare(host: Host, outcome: Outcome, acked: dict[int, Place]) -> None:
    """Log, history and acknowledgements at the end."""
    async with host.open() as parts:
        logged = await _places_in_log(parts, outcome)
        stored = await _places_in_history(parts)
    outcome.figures["committed"] = len(stored)
    outcome.violated("only in the log", times=len(logged.keys() - stored.keys()))
    outcome.violated("only in the history", times=len(stored.keys() - logged.keys()))
    differing = sum(logged[number] != stored[number] for number in logged.keys() & stored.keys())
    outcome.violated("log and history give a task other coordinates", times=differing)
    missing = acked.keys() - stored.keys()
    outcome.violated("an acknowledged task is in no store", times=len(missing))
    changed = sum(acked[number] != stored[number] for number in acked.keys() & stored.keys())
    outcome.violated("a task has other coordinates than its ACK said", times=changed)
    sequences = defaultdict(list)
    for number, place in stored.items():
        sequences[number % CONVERSATIONS].append(place.seq)
    holes = sum(sorted(found) != [*range(1, len(found) + 1)] for found in sequences.values())
    outcome.violated("a conversation has a hole or a sequence twice", times=holes)


async def _places_in_log(parts: Parts, outcome: Outcome) -> dict[int, Place]:
    """A task may stand there twice; then both times as the same bytes."""
    places: dict[int, Place] = {}
    bytes_of: dict[int, bytes] = {}
    for record in await read_all(parts.outbox, HOME):
        header = parse_header(record.data)
        entry = decode_entry(record.data[HEADER_BYTES:])
        number = number_of(entry.record.client_message_id)
        outcome.expect(
            bytes_of.setdefault(number, record.data) == record.data,
            f"task {number} is in the log with two contents",
        )
        places[number] = Place(entry.conversation_seq, header.reserved_at)
    return places


async def _places_in_history(parts: Parts) -> dict[int, Place]:
    places: dict[int, Place] = {}
    for conversation in range(CONVERSATIONS):
        route = plan_task(conversation).route
        before = Seq(0)
        while True:
            query = HistoryQuery(TENANT, route.conversation, route.bucket, before, Seq(0), 300, 196_608)
            (page,) = await parts.commits.read_history([query])
            for seq, data in page.records:
                record = decode_record(data)
                places[number_of(record.client_message_id)] = Place(seq, record.reserved_at)
                before = seq
            if not page.more:
                break
    return places

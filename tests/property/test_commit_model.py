"""The commit scripts on a real server against the memory adapter, driven by Hypothesis with the same calls.

Every answer is compared; the stamp of a commit is compared with its own first answer, because the two clocks
differ by moments. A rule kills the server and starts it again on the same file: what was answered must still
be there. At the end of each run both sides show the same messages, marks, positions and pending facts.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from qim.adapters.commitlog_memory import MemoryCommitLog
from qim.adapters.commitlog_redis import RedisCommitLog
from qim.adapters.commits_memory import MemoryCommitStore
from qim.adapters.commits_one_step_memory import MemoryOneStepCommits
from qim.adapters.commits_one_step_redis import RedisOneStepCommits
from qim.adapters.commits_redis import RedisCommitStore
from qim.adapters.redis_pipe import RedisPipe
from qim.ids import BucketId, ClientMessageId, ConversationId, Millis, Offset, Seq, SlotId, UserId
from qim.ports import (
    ClaimResult,
    Commit,
    Committed,
    HistoryQuery,
    MessageKey,
    ReadMark,
    Reservation,
    Reserved,
    ReserveResult,
    SlotClaim,
)
from qim.records import OUTBOX_FRAME_BYTES
from tests.lua.commit_calls import ALICE, BOB, CLOCK, CONVERSATION, SCRIPTS, TENANT, claim_of
from tests.services import StoreServer

T = TypeVar("T")
HOME = SlotId(1)
KILLS_MAX = 1
"""Per run: a restart takes longer than everything else of a run together."""

PLACES = [
    (BucketId(0), CONVERSATION),
    (BucketId(3), ConversationId(bytes(16))),
    (BucketId(255), ConversationId(b"\r\n" * 8)),
]
places = st.sampled_from(PLACES)
users = st.sampled_from([ALICE, BOB])
texts = st.sampled_from([b"", b"one", b"two" * 100, b"\x00\r\n"])


@st.composite
def reservations(draw: st.DrawFn) -> Reservation:
    """Few keys, so that repeats and conflicts are common."""
    bucket, conversation = draw(places)
    number = draw(st.integers(0, 9))
    key = MessageKey(bucket, TENANT, conversation, draw(users), ClientMessageId(bytes([number]) * 16))
    text = draw(st.sampled_from([b"one", b"one", b"one", b"other"]))
    skew_ms = draw(st.sampled_from([0, 0, 0, 0, 60_000, -60_000]))
    record = b"record " + draw(texts)
    frame = b"\x02\x01\x00" + bytes([bucket]) + text.ljust(OUTBOX_FRAME_BYTES - 4, b"f")
    return Reservation(key, text.ljust(36, b"."), record, Millis(CLOCK.now_ms() + skew_ms), Millis(0), frame)


class CommitComparison(RuleBasedStateMachine):
    """One server and one model; two workers on each side, which take the slots from each other."""

    server: StoreServer

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        model = MemoryCommitStore(CLOCK)
        self.models = [model, MemoryCommitStore(CLOCK, model.state)]
        self.pipe = self.connect()
        self.wait(self.flush())
        self.reals = [RedisCommitStore(self.pipe, CLOCK) for _ in self.models]
        self.log = MemoryCommitLog(CLOCK)
        self.claims: list[SlotClaim | None] = [None, None]
        self.known: dict[MessageKey, tuple[Reservation, ReserveResult]] = {}
        self.stamps: dict[MessageKey, Millis] = {}
        self.kills = 0
        self.owner = 0
        self.take_over(0)

    def wait(self, awaitable: Awaitable[T]) -> T:
        async def run() -> T:
            return await awaitable

        return self.loop.run_until_complete(run())

    async def flush(self) -> None:
        await self.pipe.command("FLUSHALL")

    def connect(self) -> RedisPipe:
        pipe = RedisPipe(self.server.url, clock=CLOCK, scripts=SCRIPTS)
        self.wait(pipe.connect())
        return pipe

    def call(self, worker: int, name: str, *arguments: object, **named: object) -> tuple[object, object]:
        """The same call on both sides: what the server said, what the model says."""

        async def run() -> tuple[object, object]:
            real = await getattr(self.reals[worker], name)(*arguments, **named)
            return real, await getattr(self.models[worker], name)(*arguments, **named)

        return self.loop.run_until_complete(run())

    @rule(worker=st.integers(0, 1))
    def take_over(self, worker: int) -> None:
        claim = claim_of(bytes([worker + 1]) * 16, slots=[SlotId(0), SlotId(63)])
        self.claims[worker] = claim
        self.owner = worker
        real, model = self.call(worker, "claim", claim)
        assert real == model

    @rule(worker=st.integers(0, 1))
    def refresh(self, worker: int) -> None:
        claim = self.claims[worker] or claim_of(bytes([worker + 1]) * 16, slots=[SlotId(0), SlotId(63)])
        real, model = self.call(worker, "claim", claim._replace(is_refresh=True))
        assert real == model
        assert isinstance(model, ClaimResult)
        assert bool(model.epochs) == (worker == self.owner)

    @rule(worker=st.integers(0, 1), items=st.lists(reservations(), max_size=8))
    def reserve(self, worker: int, items: Sequence[Reservation]) -> None:
        real, model = self.call(worker, "reserve", items)
        assert real == model
        assert isinstance(model, list)
        for item, result in zip(items, model, strict=True):
            if result.outcome in {Reserved.NEW, Reserved.RECORDED}:
                self.known[item.key] = (item, result)

    @rule(worker=st.integers(0, 1), items=st.lists(reservations(), max_size=8))
    def commit_in_one_step(self, worker: int, items: Sequence[Reservation]) -> None:
        async def run() -> tuple[list[ReserveResult], list[ReserveResult]]:
            outbox = RedisCommitLog(self.pipe, "outbox")
            real = RedisOneStepCommits(self.reals[worker], outbox, CLOCK)
            model = MemoryOneStepCommits(self.models[worker], self.log)
            return await real.commit(items, HOME), await model.commit(items, HOME)

        real, model = self.loop.run_until_complete(run())
        assert real == model

    @precondition(lambda self: self.known)
    @rule(worker=st.integers(0, 1), data=st.data(), offset=st.integers(-1, 20))
    def mark_committed(self, worker: int, data: st.DataObject, offset: int) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.known)), max_size=8))
        is_control = data.draw(st.booleans())
        items = []
        for key in keys:
            item, result = self.known[key]
            commit = Commit(
                key, item.identity, result.seq, result.reserved_at, is_control, SlotId(2), Offset(offset)
            )
            items.append(commit)
        real, model = self.call(worker, "mark_committed", items)
        assert isinstance(real, list)
        assert isinstance(model, list)
        assert [result.outcome for result in real] == [result.outcome for result in model]
        for key, result in zip(keys, real, strict=True):
            if result.outcome in {Committed.COMMITTED, Committed.ALREADY}:
                assert self.stamps.setdefault(key, result.committed_at) == result.committed_at

    @rule(worker=st.integers(0, 1), place=places, user=users, seq=st.integers(0, 12))
    def mark_read(self, worker: int, place: tuple[BucketId, ConversationId], user: UserId, seq: int) -> None:
        mark = ReadMark(TENANT, place[1], place[0], user, Seq(seq))
        # Who left meets the same bound whenever he asks; here it goes back and forth, for the script only.
        left = mark._replace(upper_seq=Seq(seq // 2))
        real, model = self.call(worker, "mark_read", [left, mark, mark])
        assert real == model

    @rule(
        place=places,
        before=st.integers(0, 12),
        after=st.integers(0, 12),
        entries_max=st.integers(1, 5),
        bytes_max=st.sampled_from([1, 60, 100_000]),
    )
    def read_history(
        self,
        *,
        place: tuple[BucketId, ConversationId],
        before: int,
        after: int,
        entries_max: int,
        bytes_max: int,
    ) -> None:
        query = HistoryQuery(TENANT, place[1], place[0], Seq(before), Seq(after), entries_max, bytes_max)
        real, model = self.call(0, "read_history", [query])
        assert real == model

    @rule(offset=st.integers(-1, 9), slot=st.integers(0, 2))
    def store_position(self, offset: int, slot: int) -> None:
        self.call(0, "store_positions", "fanout", {SlotId(slot): Offset(offset)})

    @precondition(lambda self: self.kills < KILLS_MAX and self.known)
    @rule()
    def kill_and_reload(self) -> None:
        self.kills += 1
        self.wait(self.pipe.close())
        self.server.kill9()
        self.server.start()
        self.pipe = self.connect()
        self.reals = [RedisCommitStore(self.pipe, CLOCK) for _ in self.models]
        epochs = [self.models[worker]._epochs for worker in (0, 1)]
        for real, known in zip(self.reals, epochs, strict=True):
            for slot, epoch in known.items():
                real.epochs[slot] = epoch.to_bytes(8, "big")
        self.compare_everything()

    def compare_everything(self) -> None:
        """Whole history, pending facts, last sequences and offsets of both sides."""
        queries = [
            HistoryQuery(TENANT, conversation, bucket, Seq(0), Seq(0), 300, 1_000_000)
            for bucket, conversation in PLACES
        ]
        buckets = [bucket for bucket, _ in PLACES]
        slots = [SlotId(slot) for slot in range(3)]
        real, model = self.call(0, "read_history", queries)
        assert real == model

        async def outboxes() -> list[object]:
            outbox = RedisCommitLog(self.pipe, "outbox")
            return [await log.read(HOME, Offset(0), records_max=1_000) for log in (outbox, self.log)]

        real, model = self.loop.run_until_complete(outboxes())
        assert real == model
        real, model = self.call(0, "read_pending", buckets, older_than_ms=-100_000, entries_max=1_000)
        assert isinstance(real, list)
        assert isinstance(model, list)
        assert sorted(real) == sorted(model)
        for name, arguments in (
            ("load_last_seq", ([(bucket, TENANT, conversation) for bucket, conversation in PLACES],)),
            ("load_positions", ("fanout", slots)),
            ("load_outbox_seen", (slots,)),
        ):
            real, model = self.call(0, name, *arguments)
            assert real == model

    def teardown(self) -> None:
        self.compare_everything()
        self.wait(self.pipe.close())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


@pytest.mark.shows("C3", "C4", "C5", "C6", "C7", "C10", "X3", "X5", "X16", "F-08")
@pytest.mark.parametrize("name", ["valkey", "redis"])
def test_the_scripts_answer_as_the_model_does_and_a_kill_loses_nothing(
    name: str, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue(f"fresh_{name}")
    machine = type("CommitComparisonOnServer", (CommitComparison,), {"server": server})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert server.kills > 0, "the kill rule never ran"

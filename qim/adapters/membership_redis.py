"""Groups and their members on one core instance, by two scripts and plain reads.

Keys and packed values are drawn in `redis_keys.py`; all keys of a group carry the bucket of its conversation.
`lua/create_group.lua` and `lua/change_membership.lua` decide and write; a call of them is one group, because
changes are rare and each may name 500 users. A full server refuses both by itself, before they start.

A snapshot is an index of 64 versions, one per mailbox shard, and the parts that it names: a change writes
only the parts of the shards it touches, and what no newer version names waits in `grpsnapgc` for its last
replay. An index or a part that is missing is StoreBroken.

A page of members takes several commands. It is of one version because the version is read before the rows and
again behind them; when a change came between, all is read again, a bounded number of times.

No state of its own: the epochs are those of the commit store, nothing is cached here.
"""

import asyncio
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

from qim.adapters import redis_keys as keys
from qim.adapters.commits_redis import RedisCommitStore
from qim.adapters.redis_answers import Answers
from qim.adapters.redis_pipe import Argument
from qim.errors import StoreBroken, StoreError, StoreRefused
from qim.ids import ID_BYTES, SEQ_MAX, GroupId, Millis, Seq, SlotId, UserId
from qim.limits import (
    ADMIN_REQUEST_LIFE_MS,
    BUCKETS_PER_SLOT,
    CLOCK_SKEW_MS_MAX,
    GROUP_SNAPSHOT_LIFE_MS,
    MEMBER_ENTRIES_PER_CALL_MAX,
    MEMBER_READS_MAX,
    SLOTS,
)
from qim.memberships import (
    Changed,
    ChangeResult,
    Created,
    Group,
    GroupCreation,
    GroupPlace,
    Interval,
    MemberPage,
    MemberQuery,
    MemberRow,
    MembershipChange,
    MemberState,
    PlacedUser,
    Snapshot,
)
from qim.ports import Pending

_INTERVAL: Final = struct.Struct(">BQQ")
_INDEX: Final = struct.Struct(f">{SLOTS}Q")
_EVENT_HEAD: Final = struct.Struct(">36sQ")
_GROUP_FIELDS: Final = ("group_id", "name", "owner", "version", "count")
_CREATED: Final = {1: Created.CREATED, 0: Created.EXISTS, -1: Created.CONFLICT, -2: Created.STALE_OWNER}
_CHANGED: Final = {
    1: Changed.NEW,
    2: Changed.UNFINISHED,
    0: Changed.DONE,
    -1: Changed.CONFLICT,
    -2: Changed.STALE_OWNER,
    -3: Changed.CLOCK,
    -4: Changed.EXHAUSTED,
    -5: Changed.WAIT,
    -6: Changed.NOT_MEMBER,
    -7: Changed.MEMBERSHIP_CHANGED,
}

T = TypeVar("T")


class RedisMemberships:
    """`Memberships` of the port, on the pipe of a commit store."""

    def __init__(self, store: RedisCommitStore) -> None:
        self._store = store
        self._pipe = store.pipe

    # --- changes ---

    def create_groups(self, items: Sequence[GroupCreation]) -> asyncio.Future[list[Created]]:
        answers: Answers[list[Created]] = Answers(len(items), list)
        for at, item in enumerate(items):
            place = item.place
            suffix = keys.conversation_suffix(*place)
            script_keys = [
                keys.OWNER, keys.group_key(suffix), keys.member_key(suffix), keys.snapshot_key(suffix),
                keys.announce_key(place.bucket),
            ]  # fmt: skip
            arguments: list[Argument] = [
                *self._owner_arguments(place), item.digest, item.group, item.name.encode(), item.owner,
                keys.pack_tenant(place.tenant) + place.conversation + b"1",
                *map(_placed, item.members),
            ]  # fmt: skip
            on_reply = answers.part(at, _CREATED.__getitem__, partial(_if_full, Created.FULL))
            self._pipe.submit_script("create_group", script_keys, arguments, on_reply)
        return answers.future

    def change_memberships(self, items: Sequence[MembershipChange]) -> asyncio.Future[list[ChangeResult]]:
        answers: Answers[list[ChangeResult]] = Answers(len(items), list)
        for at, item in enumerate(items):
            script_keys, arguments = self._change_call(item)
            on_reply = answers.part(at, _change_result, partial(_if_full, _refused(Changed.FULL)))
            self._pipe.submit_script("change_membership", script_keys, arguments, on_reply)
        return answers.future

    def _change_call(self, item: MembershipChange) -> tuple[list[bytes], list[Argument]]:
        place, event, request = item.place, item.event, item.request
        suffix = keys.conversation_suffix(*place)
        script_keys = [
            keys.OWNER, keys.PENDING, keys.conversation_key(suffix), keys.record_key(suffix),
            keys.skip_key(suffix), keys.group_key(suffix), keys.member_key(suffix), keys.snapshot_key(suffix),
            keys.snapshot_garbage_key(place.bucket),
        ]  # fmt: skip
        if request is not None:
            script_keys.append(keys.request_key(suffix, request.request_id))
        if event is not None:
            script_keys.append(keys.committed_key(event.key))
        arguments: list[Argument] = [
            *self._owner_arguments(place), CLOCK_SKEW_MS_MAX, SEQ_MAX, int(item.op), item.version,
            item.actor or b"", item.owner_after, request.digest if request else b"",
            ADMIN_REQUEST_LIFE_MS, GROUP_SNAPSHOT_LIFE_MS,
            _EVENT_HEAD.pack(event.identity, event.reserved_at) if event else b"",
            event.record if event else b"",
            *map(_placed, item.users),
        ]  # fmt: skip
        return script_keys, arguments

    def _owner_arguments(self, place: GroupPlace) -> tuple[bytes, bytes]:
        slot = place.bucket // BUCKETS_PER_SLOT
        return keys.SLOT_FIELDS[slot], self._store.epochs[slot]

    # --- reads ---

    def load_groups(self, places: Sequence[GroupPlace]) -> asyncio.Future[list[Group | None]]:
        answers: Answers[list[Group | None]] = Answers(len(places), list)
        for at, place in enumerate(places):
            key = keys.group_key(keys.conversation_suffix(*place))
            self._pipe.submit(("HMGET", key, *_GROUP_FIELDS), answers.part(at, _group))
        return answers.future

    def load_intervals(
        self, wanted: Sequence[tuple[GroupPlace, UserId]]
    ) -> asyncio.Future[list[Interval | None]]:
        answers: Answers[list[Interval | None]] = Answers(len(wanted), list)
        for at, (place, user) in enumerate(wanted):
            key = keys.member_key(keys.conversation_suffix(*place))
            self._pipe.submit(("HGET", key, user), answers.part(at, _interval))
        return answers.future

    def load_snapshots(self, wanted: Sequence[tuple[GroupPlace, int]]) -> asyncio.Future[list[Snapshot]]:
        indexes: Answers[list[tuple[int, ...]]] = Answers(len(wanted), list)
        for at, (place, version) in enumerate(wanted):
            key = keys.snapshot_key(keys.conversation_suffix(*place))
            self._pipe.submit(("HGET", key, version), indexes.part(at, _index))
        return asyncio.ensure_future(self._load_parts(wanted, indexes.future))

    async def _load_parts(
        self, wanted: Sequence[tuple[GroupPlace, int]], indexes: asyncio.Future[list[tuple[int, ...]]]
    ) -> list[Snapshot]:
        found = await indexes
        answers: Answers[list[dict[SlotId, tuple[UserId, ...]]]] = Answers(len(wanted), list)
        for at, ((place, _version), index) in enumerate(zip(wanted, found, strict=True)):
            shards = [SlotId(shard) for shard, version in enumerate(index) if version]
            key = keys.snapshot_key(keys.conversation_suffix(*place))
            fields = (b"%d:%d" % (shard, index[shard]) for shard in shards)
            # An empty group asks for a field that never exists: a command needs one.
            command = ("HMGET", key, *(fields if shards else (b"none",)))
            self._pipe.submit(command, answers.part(at, partial(_parts, shards)))
        parts = await answers.future
        return [Snapshot(version, part) for (_, version), part in zip(wanted, parts, strict=True)]

    def load_members(self, queries: Sequence[MemberQuery]) -> asyncio.Future[list[MemberPage | None]]:
        first = self.load_groups([query.place for query in queries])
        return asyncio.ensure_future(self._load_members(queries, first))

    async def _load_members(
        self, queries: Sequence[MemberQuery], first: asyncio.Future[list[Group | None]]
    ) -> list[MemberPage | None]:
        groups = await first
        return [
            None if group is None else await self._load_page(query, group)
            for query, group in zip(queries, groups, strict=True)
        ]

    async def _load_page(self, query: MemberQuery, group: Group) -> MemberPage:
        for _ in range(MEMBER_READS_MAX):
            (snapshot,) = await self.load_snapshots([(query.place, group.version)])
            members = sorted(user for part in snapshot.shards.values() for user in part)
            wanted = list(islice((u for u in members if u > query.after), query.entries_max + 1))
            rows, (behind,) = await asyncio.gather(
                self._read_rows(query.place, wanted[: query.entries_max]), self.load_groups([query.place])
            )
            if behind is None:
                raise StoreBroken("a group is gone")
            if behind.version == group.version:
                return MemberPage(group, rows, len(wanted) > query.entries_max)
            group = behind
        raise StoreRefused("the members keep changing while a page of them is read")

    def _read_rows(self, place: GroupPlace, users: Sequence[UserId]) -> asyncio.Future[tuple[MemberRow, ...]]:
        key = keys.member_key(keys.conversation_suffix(*place))
        step = MEMBER_ENTRIES_PER_CALL_MAX
        chunks = [users[at : at + step] for at in range(0, len(users), step)]
        answers = Answers(len(chunks), _flatten)
        for at, chunk in enumerate(chunks):
            self._pipe.submit(("HMGET", key, *chunk), answers.part(at, _rows_decoder(chunk)))
        return answers.future


def _placed(user: PlacedUser) -> bytes:
    return bytes((user.shard,)) + user.user


def _refused(outcome: Changed) -> ChangeResult:
    return ChangeResult(outcome, Seq(0), 0, 0, None)


def _if_full(answer: T, error: StoreError) -> T | None:
    is_full = isinstance(error, StoreRefused) and str(error).startswith("OOM")
    return answer if is_full else None


def _change_result(reply: list[Any]) -> ChangeResult:
    outcome = _CHANGED[reply[0]]
    if len(reply) == 1:
        return _refused(outcome)
    seq, count, version, *event = reply[1:]
    return ChangeResult(outcome, Seq(int(seq)), int(count), int(version), _pending(*event) if event else None)


def _pending(field: bytes, value: bytes, record: bytes) -> Pending:
    identity, reserved_at = keys.unpack_value_head(value)
    seq = Seq(int(value[keys.VALUE_HEAD_BYTES :]))
    return Pending(keys.parse_pending_field(field), identity, seq, Millis(reserved_at), record)


def _group(reply: list[bytes | None]) -> Group | None:
    group, name, owner, version, count = reply
    if version is None:
        return None
    if group is None or name is None or owner is None or count is None:
        raise ValueError("the head of a group is torn")
    return Group(GroupId(group), name.decode(), UserId(owner), int(version), int(count))


def _interval(reply: bytes | None) -> Interval | None:
    if reply is None:
        return None
    state, joined_at, left_at = _INTERVAL.unpack(reply)
    return Interval(MemberState(state), Seq(joined_at), Seq(left_at))


def _index(reply: bytes) -> tuple[int, ...]:
    """None is of the wrong shape too: the snapshot is missing."""
    return _INDEX.unpack(reply)


def _parts(shards: Sequence[SlotId], reply: list[bytes]) -> dict[SlotId, tuple[UserId, ...]]:
    return {shard: _users(part) for shard, part in zip(shards, reply, strict=False)}


def _users(part: bytes) -> tuple[UserId, ...]:
    if not part or len(part) % ID_BYTES:
        raise ValueError("a part of a snapshot is missing or torn")
    return tuple(sorted(UserId(part[at : at + ID_BYTES]) for at in range(0, len(part), ID_BYTES)))


def _rows_decoder(users: Sequence[UserId]) -> Callable[[list[bytes | None]], list[MemberRow]]:
    def decode(reply: list[bytes | None]) -> list[MemberRow]:
        intervals = zip(users, map(_interval, reply), strict=True)
        return [MemberRow(user, interval.joined_at) for user, interval in intervals if interval]

    return decode


def _flatten(parts: Iterable[Sequence[MemberRow]]) -> tuple[MemberRow, ...]:
    return tuple(row for part in parts for row in part)

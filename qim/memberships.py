"""The port of groups: what the writer may ask about members, and what is promised in return.

It stands beside `ports.py` and keeps its promises: a request is issued when the method is called, answers are
per item and in order, a refusal of an item is an answer, every call may be repeated. An adapter is made over
the `CommitStore` of its instance and uses its epochs, because a change of members, its sequence and its event
are one atomic step of the store that numbers the messages. A store that cannot do this has no such port, and
the writer answers UNSUPPORTED.

The words: a *version* counts the changes of a group from 1; a *snapshot* is the members at a version and
never changes; an *interval* is what one user may see; an *event* is the control message of a change, with a
sequence J of its own. The event is left RECORDED, exactly as `CommitStore.reserve` leaves a message, so the
writer or the recoverer appends and commits it.

Adapters: `membership_redis`, `membership_memory`.
"""

from collections.abc import Awaitable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from qim.ids import BucketId, ConversationId, GroupId, RequestId, Seq, SlotId, TenantId, UserId
from qim.ports import Pending, Reservation
from qim.records import MembershipOp


class GroupPlace(NamedTuple):
    """Where a group and its conversation live: all keys of both carry the tag of this bucket."""

    bucket: BucketId
    tenant: TenantId
    conversation: ConversationId


class PlacedUser(NamedTuple):
    """A user with the mailbox shard, by which snapshots are cut."""

    shard: SlotId
    user: UserId


class MemberState(Enum):
    MEMBER = 1
    LEFT = 2
    REMOVED = 3


class Interval(NamedTuple):
    """What a user may see of a group: sequences in (joined_at, left_at), both ends open."""

    state: MemberState
    joined_at: Seq
    """0 for the first members; a join at J has J − 1, so that its event is seen."""
    left_at: Seq
    """0 while a member, else the sequence of the event that ended it."""


class GroupCreation(NamedTuple):
    place: GroupPlace
    group: GroupId
    name: str
    owner: UserId
    members: tuple[PlacedUser, ...]
    """At least one, each once, the owner among them."""
    digest: bytes
    """32 bytes over what the creator chose: another one under the same group id is a conflict."""


class Created(Enum):
    CREATED = "created"
    EXISTS = "exists"
    """By an earlier call with the same digest; what happened to its members since does not matter."""
    CONFLICT = "conflict"
    STALE_OWNER = "stale_owner"
    FULL = "full"


class OperatorRequest(NamedTuple):
    """An administrative change that is remembered for 24 h, also when it had nothing to do."""

    request_id: RequestId
    digest: bytes
    """32 bytes over what the operator asked for, not over what the plan made of it."""


class MembershipChange(NamedTuple):
    """One planned change, of users who are all in the group, or all are not, at `version`."""

    place: GroupPlace
    op: MembershipOp
    version: int
    """That the plan was made with."""
    actor: UserId | None
    """Who leaves; None where an operator acts."""
    users: tuple[PlacedUser, ...]
    """Whom the plan changes, each once; empty when all that was asked for is in effect already."""
    owner_after: UserId
    """A member who is not among `users`; empty bytes when nobody is left."""
    event: Reservation | None
    """Its control message; None exactly where `users` is empty."""
    request: OperatorRequest | None = None


class Changed(Enum):
    NEW = "new"
    """The members are changed, and the event is RECORDED: append and commit it, then it may be told."""
    UNFINISHED = "unfinished"
    """The event that comes back is RECORDED from before: append and commit it, then call again."""
    DONE = "done"
    """In effect, and COMMITTED where it took an event."""
    WAIT = "wait"
    """An event that is not the last one is unfinished: call again when the recoverer has finished it."""
    MEMBERSHIP_CHANGED = "membership_changed"
    """The plan is not made of the members as they are: load them and plan anew."""
    NOT_MEMBER = "not_member"
    """No such group; or who leaves was never in it."""
    CONFLICT = "conflict"
    """The request id was used for something else; or a message of the same sender holds the event's id."""
    STALE_OWNER = "stale_owner"
    CLOCK = "clock"
    FULL = "full"
    EXHAUSTED = "exhausted"


class ChangeResult(NamedTuple):
    outcome: Changed
    seq: Seq
    """Of the event; 0 where none was needed, and for a refusal."""
    member_count: int
    """Members behind the change; for a repeated request, what the first one was told."""
    version: int
    event: Pending | None
    """For NEW and UNFINISHED."""


class Group(NamedTuple):
    """The head of a group."""

    group: GroupId
    name: str
    owner: UserId
    """Empty when nobody is left."""
    version: int
    member_count: int


class Snapshot(NamedTuple):
    """The members at one version; nothing in it ever changes."""

    version: int
    shards: dict[SlotId, tuple[UserId, ...]]
    """Sorted by id; a shard without members is absent."""


class MemberQuery(NamedTuple):
    place: GroupPlace
    after: UserId
    """Exclusive; empty bytes = from the first."""
    entries_max: int


class MemberRow(NamedTuple):
    user: UserId
    joined_at: Seq


class MemberPage(NamedTuple):
    """Current members by id, all of one version."""

    group: Group
    rows: tuple[MemberRow, ...]
    more: bool


class Memberships(Protocol):
    """Groups of one core instance."""

    def create_groups(self, items: Sequence[GroupCreation]) -> Awaitable[list[Created]]:
        """Each group at version 1, its members at joined_at 0; no event. Queued for the members' lists."""
        ...

    def change_memberships(self, items: Sequence[MembershipChange]) -> Awaitable[list[ChangeResult]]:
        """After NEW: sequence, version + 1, snapshot, intervals and the RECORDED event are durable together.

        A refusal consumed no sequence and changed nobody. The event never counts as unread. With a request
        whose result is known, that result is the answer, whatever the plan says.
        """
        ...

    def load_groups(self, places: Sequence[GroupPlace]) -> Awaitable[list[Group | None]]:
        """None: there is no such group."""
        ...

    def load_snapshots(self, wanted: Sequence[tuple[GroupPlace, int]]) -> Awaitable[list[Snapshot]]:
        """The members at a version. StoreBroken when one is not there: it is never an empty audience."""
        ...

    def load_intervals(self, wanted: Sequence[tuple[GroupPlace, UserId]]) -> Awaitable[list[Interval | None]]:
        """None: the user was never in the group, or there is no such group."""
        ...

    def load_members(self, queries: Sequence[MemberQuery]) -> Awaitable[list[MemberPage | None]]:
        """One page per query; None: there is no such group. StoreRefused when changes keep overtaking it."""
        ...

"""Who a group message goes to: the members of the versions that a fan-out plans with.

A message names the version of the members that it was numbered under (`qim/domain/fanout.py`). Here those
members are asked for, one call per core instance and piece of a batch, and remembered: an active group is
read once per version. What is remembered never becomes wrong, because the members of a version never change.

A store that does not answer raises, and whoever asked comes back: nothing is decided. One that answers that
a snapshot is not there, or is torn, says so of a whole call; then each is asked for alone, and the ones that
are really missing are left out of the answer. **They never become an empty audience**: a record without its
members cannot be planned, and stops its partition.

State: owned by the fan-out's loop, lost with it, and built again from the store. Full
(`SNAPSHOT_USERS_REMEMBERED_MAX` members): the ones used longest ago are forgotten; those of the call at hand
are in its answer in any case.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from structlog import get_logger

from qim.domain.fanout import Audience, SnapshotId, Snapshots, snapshot_of
from qim.domain.placement import Placement, slot_of_bucket
from qim.errors import StoreBroken
from qim.limits import SNAPSHOT_USERS_REMEMBERED_MAX
from qim.memberships import GroupPlace, Memberships, Snapshot

log = get_logger()


class Audiences:
    """Members at versions, by the core instance that holds them."""

    def __init__(self, *, placement: Placement, memberships: Sequence[Memberships]) -> None:
        self._placement = placement
        self._memberships = memberships
        self._known: OrderedDict[SnapshotId, Audience] = OrderedDict()
        """The one used longest ago first."""
        self._users = 0
        """Members in all of them."""

    async def load(self, outbox_records: Iterable[bytes]) -> Snapshots:
        """The members that the plans of these records need; what is missing is absent. Raises StoreError."""
        found: dict[SnapshotId, Audience] = {}
        missing: dict[int, list[SnapshotId]] = {}
        for snapshot in dict.fromkeys(map(snapshot_of, outbox_records)):
            if snapshot is None:
                continue
            known = self._known.get(snapshot)
            if known is not None:
                self._known.move_to_end(snapshot)
                found[snapshot] = known
            else:
                instance = self._placement.core_instance_of(slot_of_bucket(snapshot.bucket))
                missing.setdefault(instance, []).append(snapshot)
        if missing:
            # Every answer is read, also behind a failed one: what has come is not asked for again.
            answers = await asyncio.gather(
                *(self._ask(instance, wanted) for instance, wanted in missing.items()), return_exceptions=True
            )
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
                found |= answer
        return found

    async def _ask(self, instance: int, wanted: Sequence[SnapshotId]) -> Snapshots:
        store = self._memberships[instance]
        try:
            snapshots = await store.load_snapshots([_place_of(snapshot) for snapshot in wanted])
        except StoreBroken as error:
            if len(wanted) > 1:
                return await self._ask_apart(instance, wanted)
            (snapshot,) = wanted
            log.warning(
                "snapshot_missing", bucket=snapshot.bucket, version=snapshot.version, reason=str(error)
            )
            return {}
        return dict(map(self._remember, wanted, snapshots))

    async def _ask_apart(self, instance: int, wanted: Sequence[SnapshotId]) -> Snapshots:
        found: dict[SnapshotId, Audience] = {}
        for snapshot in wanted:
            found |= await self._ask(instance, [snapshot])
        return found

    def _remember(self, name: SnapshotId, snapshot: Snapshot) -> tuple[SnapshotId, Audience]:
        if name not in self._known:
            self._known[name] = snapshot.shards
            self._users += _size(snapshot.shards)
            while self._users > SNAPSHOT_USERS_REMEMBERED_MAX:
                _name, oldest = self._known.popitem(last=False)
                self._users -= _size(oldest)
        return name, snapshot.shards


def _place_of(snapshot: SnapshotId) -> tuple[GroupPlace, int]:
    return GroupPlace(snapshot.bucket, snapshot.tenant, snapshot.conversation), snapshot.version


def _size(audience: Audience) -> int:
    return sum(map(len, audience.values()))

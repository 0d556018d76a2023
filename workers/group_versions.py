"""The versions that messages to groups are planned with: a memory of the writer that may be out of date.

A message names the version of the members that it was planned for, and the store compares it while it gives
the sequence. So nothing here has to be right, and nothing is asked before a message is sent: a group that is
not remembered is taken for a new one, and who is refused asks once and sends again. The writer makes all
changes of its groups itself and notes them (`note`), so a refusal means a change at the same moment, or a
group that was not used since the start.

One per core instance, owned by the loop. Full: the group that was noted first is forgotten. The store is
away: who asks is told which groups it could not learn of, and answers UNAVAILABLE; nothing was written.
"""

from collections.abc import Sequence

from qim.errors import StoreBroken, StoreRefused, StoreUnknown
from qim.ids import ConversationId
from qim.limits import GROUP_CACHE_ENTRIES_MAX
from qim.memberships import GroupPlace, Memberships


class GroupVersions:
    """What the planner of sends looks into, and how it learns."""

    def __init__(self, memberships: Memberships) -> None:
        self._memberships = memberships
        self.known: dict[ConversationId, int] = {}

    def note(self, conversation: ConversationId, version: int) -> None:
        """The group is at this version now."""
        known = self.known
        if conversation not in known and len(known) >= GROUP_CACHE_ENTRIES_MAX:
            del known[next(iter(known))]
        known[conversation] = version

    async def refresh(self, places: Sequence[GroupPlace]) -> set[ConversationId]:
        """Asks the store; returns the groups of which it could not be learnt."""
        try:
            groups = await self._memberships.load_groups(places)
        except StoreBroken:
            # One broken group fails the call of all; asked one by one, only that one is not known.
            if len(places) > 1:
                return set().union(*[await self.refresh([place]) for place in places])
            return {places[0].conversation}
        except (StoreUnknown, StoreRefused):
            return {place.conversation for place in places}
        for place, group in zip(places, groups, strict=True):
            if group is None:
                self.known.pop(place.conversation, None)
            else:
                self.note(place.conversation, group.version)
        return set()

"""How long the stores last: what a message costs, how fast messages come, how many days are left.

    bytes per message   (used − what an empty server uses) / messages ever committed
    days left           (maximum − used) / (bytes per message × messages per day since the first look)

Both are estimates, and a wrong one is worse than none: each needs enough to measure, and where there is not
enough the answer is None with the reason in words. The first look is the beginning of the rate; whoever looks
(the admin process) begins anew when it starts anew. Pure: time and counts come in.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from qim.limits import DAY_MS

MESSAGES_MIN: Final = 200
"""Fewer say more about an empty server than about messages."""
OBSERVED_MS_MIN: Final = 60_000
"""A shorter look takes a burst for the daily load."""


class Estimate(NamedTuple):
    """What an operator is told about one store."""

    bytes_per_message: float | None
    days_left: float | None
    days_left_reason: str | None
    """Why there is no number; None when there is one."""


@dataclass(frozen=True, slots=True)
class FirstLook:
    """Where the rate begins."""

    messages: int
    at_ms: int


def estimate(
    *, used_bytes: int, empty_bytes: int, max_bytes: int, messages: int, first: FirstLook, now_ms: int
) -> Estimate:
    """`max_bytes` 0: nothing limits the store."""
    if messages < MESSAGES_MIN:
        return Estimate(None, None, f"{messages} messages, too few to measure; {MESSAGES_MIN} are needed")
    each = max(0.0, (used_bytes - empty_bytes) / messages)
    fresh, observed_ms = messages - first.messages, now_ms - first.at_ms
    reason = None
    if not max_bytes:
        reason = "nothing limits this store"
    elif observed_ms < OBSERVED_MS_MIN:
        reason = f"watched for {observed_ms // 1000} s only; {OBSERVED_MS_MIN // 1000} s are needed"
    elif fresh <= 0 or not each:
        reason = f"no new message in {observed_ms // 1000} s"
    if reason is not None:
        return Estimate(each, None, reason)
    bytes_per_day = each * fresh / observed_ms * DAY_MS
    return Estimate(each, max(0.0, (max_bytes - used_bytes) / bytes_per_day), None)

"""Bytes per message and days left: right where enough was seen, silent with a reason where not."""

from typing import Any

import pytest

from qim.domain.growth import MESSAGES_MIN, Estimate, FirstLook, estimate
from qim.limits import DAY_MS

DAY_OF_1000 = FirstLook(messages=1_000, at_ms=0)


def judge(**changes: Any) -> Estimate:
    """1,000 messages on the first day after the first 1,000, at 2,000 bytes, in a store of 10 MB."""
    facts: dict[str, Any] = {
        "used_bytes": 5_000_000,
        "empty_bytes": 1_000_000,
        "max_bytes": 11_000_000,
        "messages": 2_000,
        "first": DAY_OF_1000,
        "now_ms": DAY_MS,
    }
    return estimate(**(facts | changes))


def test_what_an_empty_server_uses_is_no_cost_of_messages() -> None:
    assert judge().bytes_per_message == pytest.approx(2_000)


def test_days_left_follow_from_the_rate_since_the_first_look() -> None:
    assert judge().days_left == pytest.approx(3.0)
    assert judge().days_left_reason is None
    assert judge(now_ms=2 * DAY_MS).days_left == pytest.approx(6.0)


def test_a_full_store_has_no_day_left_instead_of_a_negative_one() -> None:
    assert judge(used_bytes=12_000_000).days_left == 0.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"messages": MESSAGES_MIN - 1}, "too few to measure"),
        ({"now_ms": 59_999}, "watched for 59 s only"),
        ({"messages": 1_000}, "no new message"),
        ({"max_bytes": 0}, "nothing limits"),
        ({"used_bytes": 1_000_000}, "no new message"),
    ],
)
def test_too_little_seen_gives_a_reason_and_no_number(changes: dict[str, Any], words: str) -> None:
    found = judge(**changes)
    assert found.days_left is None
    assert words in (found.days_left_reason or "")


def test_a_few_messages_do_not_make_a_cost() -> None:
    assert judge(messages=MESSAGES_MIN - 1).bytes_per_message is None
    assert judge(messages=MESSAGES_MIN, first=FirstLook(0, 0)).bytes_per_message is not None

"""The queue between callbacks and roles: order, both bounds, and who is woken when."""

import asyncio

from workers.inbox import Inbox


def inbox(*, items_max: int = 10, bytes_max: int = 1_000) -> Inbox[int]:
    return Inbox(items_max=items_max, bytes_max=bytes_max)


async def settle() -> None:
    """Lets everything run that can run now."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_take_gives_everything_that_came_in_order() -> None:
    box = inbox()
    for item in range(3):
        assert box.offer(item)
    assert await box.take(10) == [0, 1, 2]
    assert len(box) == 0


async def test_take_stops_at_its_limit_and_leaves_the_rest() -> None:
    box = inbox()
    for item in range(5):
        box.offer(item)
    assert await box.take(2) == [0, 1]
    assert await box.take(10) == [2, 3, 4]


async def test_full_inbox_refuses_items_and_accepts_again_after_a_take() -> None:
    box = inbox(items_max=2)
    assert box.offer(0)
    assert box.offer(1)
    assert not box.offer(2)
    await box.take(1)
    assert box.offer(3)
    assert await box.take(10) == [1, 3]


async def test_full_inbox_refuses_bytes_and_accepts_again_after_a_take() -> None:
    box = inbox(bytes_max=100)
    assert box.offer(0, size=100)
    assert not box.offer(1, size=1)
    await box.take(10)
    assert box.offer(1, size=100)


async def test_waiting_taker_wakes_with_what_came_before_it_ran() -> None:
    box = inbox()
    taker = asyncio.ensure_future(box.take(10))
    await settle()
    box.offer(1)
    box.offer(2)
    assert await taker == [1, 2]


async def test_each_batch_goes_to_one_of_several_takers() -> None:
    box = inbox()
    takers = [asyncio.ensure_future(box.take(1)) for _ in range(2)]
    await settle()
    box.offer(1)
    box.offer(2)
    assert sorted(await asyncio.gather(*takers)) == [[1], [2]]


async def test_what_a_taker_leaves_wakes_the_next_one() -> None:
    box = inbox()
    takers = [asyncio.ensure_future(box.take(1)) for _ in range(3)]
    await settle()
    for item in range(3):
        box.offer(item)
    assert sorted(await asyncio.gather(*takers)) == [[0], [1], [2]]


async def test_cancelled_taker_takes_no_item_and_no_wake_up_with_it() -> None:
    box = inbox()
    first = asyncio.ensure_future(box.take(10))
    second = asyncio.ensure_future(box.take(10))
    await settle()
    first.cancel()
    await settle()
    box.offer(1)
    assert await second == [1]


async def test_taker_cancelled_after_its_wake_up_leaves_the_item_to_another() -> None:
    box = inbox()
    first = asyncio.ensure_future(box.take(10))
    second = asyncio.ensure_future(box.take(10))
    await settle()
    box.offer(1)
    first.cancel()
    async with asyncio.timeout(1):
        assert await second == [1]


async def test_closed_inbox_refuses_offers_gives_what_is_left_then_nothing() -> None:
    box = inbox()
    box.offer(1)
    box.close()
    assert not box.offer(2)
    assert await box.take(10) == [1]
    assert await box.take(10) == []


async def test_close_releases_every_waiting_taker() -> None:
    box = inbox()
    takers = [asyncio.ensure_future(box.take(10)) for _ in range(3)]
    await settle()
    box.close()
    assert await asyncio.gather(*takers) == [[], [], []]


async def test_a_batch_ends_with_the_item_that_reaches_its_bytes() -> None:
    inbox: Inbox[int] = Inbox(items_max=10, bytes_max=100)
    for number in range(4):
        assert inbox.offer(number, size=20)
    assert await inbox.take(10, 30) == [0, 1]
    assert await inbox.take(10, 1) == [2]
    assert await inbox.take(10, 100) == [3]

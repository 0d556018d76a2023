"""Several replies into one answer: order, wrong shapes, and which error a caller must hear."""

from typing import Any

import pytest

from qim.adapters.redis_answers import Answers
from qim.errors import StoreBroken, StoreError, StoreRefused, StoreUnknown


def answers_to(*replies: Any) -> Answers[list[Any]]:
    answers: Answers[list[Any]] = Answers(len(replies), list)
    parts = [answers.part(at, int) for at in range(len(replies))]
    for on_reply, reply in reversed(list(zip(parts, replies, strict=True))):
        on_reply(reply)
    return answers


async def test_answers_stand_in_the_order_of_the_commands() -> None:
    assert await answers_to(b"1", b"2", b"3").future == [1, 2, 3]


async def test_no_command_is_an_empty_answer_at_once() -> None:
    assert answers_to().future.result() == []


async def test_a_reply_of_the_wrong_shape_is_broken_and_not_a_torn_pipe() -> None:
    with pytest.raises(StoreBroken, match="wrong shape"):
        await answers_to(b"1", b"no number").future


@pytest.mark.parametrize(
    ("replies", "kind"),
    [
        ([StoreRefused("a"), StoreRefused("b")], StoreRefused),
        ([StoreRefused("a"), StoreUnknown("b")], StoreUnknown),
        ([StoreUnknown("a"), StoreBroken("b")], StoreBroken),
        ([b"1", StoreRefused("b")], StoreUnknown),
        ([b"1", StoreUnknown("b")], StoreUnknown),
        ([b"1", StoreBroken("b")], StoreBroken),
    ],
)
async def test_the_worst_error_counts_and_a_refusal_beside_work_done_is_unknown(
    replies: list[Any], kind: type[StoreError]
) -> None:
    with pytest.raises(StoreError) as caught:
        await answers_to(*replies).future
    assert type(caught.value) is kind


async def test_an_error_may_be_turned_into_an_answer_of_its_part() -> None:
    answers: Answers[list[int]] = Answers(2, list)
    answers.part(0, int, lambda error: 7 if str(error) == "known" else None)(StoreRefused("known"))
    answers.part(1, int)(b"2")
    assert await answers.future == [7, 2]


async def test_a_cancelled_answer_takes_its_replies_without_a_word() -> None:
    answers: Answers[list[int]] = Answers(1, list)
    answers.future.cancel()
    answers.part(0, int)(b"1")
    assert answers.future.cancelled()

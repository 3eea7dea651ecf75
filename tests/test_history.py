from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from lspec.errors import ContextOverflowError
from lspec.history import fit, room
from lspec.template import Message


def characters(messages: Sequence[Message]) -> str:
    """Make a prompt in which a character is a token."""
    return "".join(message["content"] for message in messages)


def says(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def turns(n: int, *, first: int = 0) -> list[dict[str, Any]]:
    """Make `n` turns of 20 tokens each."""
    return [
        says(role, f"{role[0]}{i:09}") for i in range(first, n) for role in ("user", "assistant")
    ]


QUESTION = says("user", "1234567890")
SYSTEM = says("system", "abcdefghij")


@pytest.mark.parametrize(
    ("max_tokens", "left"), [(None, 25), (0, 1), (10, 10), (50, 50), (99, 50), (1000, 50)]
)
def test_room_is_what_may_be_generated_or_a_quarter_and_at_most_half(
    max_tokens: int | None, left: int
) -> None:
    assert room(100, max_tokens) == left


def test_nothing_goes_while_the_answer_has_room() -> None:
    messages = [SYSTEM, *turns(2), says("user", "x" * 25)]
    assert fit(messages, characters, n_ctx=100) == (messages, 0)
    assert fit([*messages[:-1], says("user", "x" * 26)], characters, n_ctx=100)[1] > 0


@pytest.mark.parametrize("n", range(1, 40))
def test_what_stays_is_the_system_message_and_the_latest_turns(n: int) -> None:
    messages = [SYSTEM, *turns(n), QUESTION]
    kept, dropped = fit(messages, characters, n_ctx=400)
    assert kept == [SYSTEM, *turns(n, first=dropped), QUESTION]
    assert len(characters(kept)) <= 300
    if dropped:  # as few as leave a quarter free beside the room
        assert len(characters(kept)) <= 200 < len(characters(kept)) + 20


def test_many_turns_pass_between_two_drops() -> None:
    messages, drops = [SYSTEM], []
    for i in range(200):
        messages.append(says("user", f"{i:010}"))
        messages, dropped = fit(messages, characters, n_ctx=400)  # type: ignore[assignment]
        messages.append(says("assistant", f"{i:010}"))
        drops += [i] if dropped else []
    assert len(drops) > 10
    assert {later - sooner for sooner, later in pairwise(drops)} == {6}


def test_a_turn_goes_with_its_calls_of_tools() -> None:
    call = [says("assistant", "c" * 20), says("tool", "t" * 20), says("assistant", "r" * 20)]
    messages = [says("user", "u" * 20), *call, says("user", "v" * 10), says("assistant", "a" * 10)]
    kept, dropped = fit([*messages, QUESTION], characters, n_ctx=120)
    assert dropped == 1
    assert kept == [*messages[4:], QUESTION]


def test_several_instructions_at_the_beginning_stay_and_later_ones_go_with_their_turn() -> None:
    first = [SYSTEM, says("developer", "klmnopqrst")]
    later = [*turns(1), says("system", "x" * 50)]
    kept, dropped = fit([*first, *later, QUESTION], characters, n_ctx=100)
    assert (kept, dropped) == ([*first, QUESTION], 1)


def test_what_stands_before_the_first_question_goes_first() -> None:
    greeting = says("assistant", "g" * 40)
    kept, dropped = fit([greeting, *turns(1), QUESTION], characters, n_ctx=90)
    assert (kept, dropped) == ([*turns(1), QUESTION], 1)


def test_last_turn_may_use_the_room_of_the_answer_where_it_must() -> None:
    long = says("user", "x" * 89)
    assert fit([SYSTEM, long], characters, n_ctx=100) == ([SYSTEM, long], 0)
    assert fit([SYSTEM, *turns(3), long], characters, n_ctx=100) == ([SYSTEM, long], 3)


@pytest.mark.parametrize("before", [0, 1, 3])
def test_last_turn_that_does_not_fit_alone_is_an_error_with_both_numbers(before: int) -> None:
    messages = [SYSTEM, *turns(before), says("user", "x" * 90)]
    with pytest.raises(ContextOverflowError, match=r"100 tokens.* has 100"):
        fit(messages, characters, n_ctx=100)


def test_long_history_is_rendered_a_few_times_only() -> None:
    calls = 0

    def counted(messages: Sequence[Message]) -> str:
        nonlocal calls
        calls += 1
        return characters(messages)

    messages = [*turns(1000), QUESTION]
    assert fit(messages, counted, n_ctx=400)[1] == 1000 - 9
    assert calls < 15

"""A conversation that outgrows the window: its oldest turns go, its system message stays."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence, Sized

from lspec.errors import ContextOverflowError
from lspec.template import Message

_INSTRUCTIONS = ("system", "developer")


def room(n_ctx: int, max_tokens: int | None = None) -> int:
    """Return how many of the window's `n_ctx` tokens should be left for an answer.

    They are `max_tokens`, or a quarter of the window if that is None; never more than half of it.
    """
    wanted = n_ctx // 4 if max_tokens is None else max_tokens
    return max(1, min(wanted, n_ctx // 2))


def fit(
    messages: Sequence[Message],
    tokenize: Callable[[Sequence[Message]], Sized],
    *,
    n_ctx: int,
    max_tokens: int | None = None,
) -> tuple[list[Message], int]:
    """Return `messages` without the oldest turns, as far as an answer needs it, and their number.

    A turn is a message of the user with everything up to the next one: answers, calls of tools and
    what these return. The system message stays, and so does the last turn, which is to be answered.
    `tokenize` makes the whole prompt, as `Engine.tokenize_chat` does.

    Nothing goes as long as the prompt leaves `room` in the window. Else as much goes as sets a
    quarter of the window free on top of that room: without its beginning a prompt is read anew,
    and that should not happen in every turn.

    Raises ContextOverflowError where the last turn does not even fit alone.
    """
    head = next(
        (i for i, message in enumerate(messages) if message["role"] not in _INSTRUCTIONS),
        len(messages),
    )
    later = range(head + 1, len(messages))
    starts = [head, *(i for i in later if messages[i]["role"] == "user")]

    def without(turns: int) -> list[Message]:
        return [*messages[:head], *messages[starts[turns] :]]

    def size(turns: int) -> int:
        return len(tokenize(without(turns)))

    most = n_ctx - room(n_ctx, max_tokens)
    if size(0) <= most:
        return list(messages), 0
    all_but_last = len(starts) - 1
    dropped = bisect_left(
        range(all_but_last), True, key=lambda turns: size(turns) <= most - n_ctx // 4
    )
    if dropped == all_but_last and (alone := size(dropped)) >= n_ctx:
        raise ContextOverflowError(
            f"the message alone makes a prompt of {alone} tokens, and the window has {n_ctx}: "
            "no room for an answer"
        )
    return without(dropped), dropped

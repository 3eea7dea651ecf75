from __future__ import annotations

import random

import pytest

from lspec.lookup import SuffixIndex


def longest_match(text: list[int]) -> int:
    """Return how much of the end of `text` occurred before, by trying every length."""
    for length in range(len(text) - 1, 0, -1):
        if any(text[i : i + length] == text[-length:] for i in range(len(text) - length)):
            return length
    return 0


@pytest.mark.parametrize("n_vocab", [1, 2, 3, 8])
def test_match_is_the_longest_end_of_the_text_that_occurred_before(n_vocab: int) -> None:
    draw = random.Random(n_vocab)
    for _ in range(60):
        index = SuffixIndex()
        for _ in range(draw.randrange(1, 50)):
            index.extend([draw.randrange(n_vocab)])
            text = index.tokens
            assert index.match == longest_match(text)
            if index.match:
                end = index._follow
                assert end < len(text)
                assert text[end - index.match : end] == text[-index.match :]


def test_proposal_continues_as_the_text_did_and_runs_into_itself() -> None:
    assert SuffixIndex([1, 2, 3, 4, 5, 2, 3]).propose(3) == (4, 5, 2)
    assert SuffixIndex([7, 8, 7, 8]).propose(5) == (7, 8, 7, 8, 7)
    assert SuffixIndex([5]).propose(3) == ()
    assert SuffixIndex().propose(3) == ()


def test_latest_occurrence_is_preferred() -> None:
    index = SuffixIndex([1, 2, 3, 9, 1, 2, 4, 9, 1, 2])
    assert index.propose(1) == (4,)


def test_work_per_token_does_not_grow_with_the_text() -> None:
    """States and transitions of a suffix automaton are linear in the text, whatever it says."""
    for text in ([1] * 3000, list(range(3000)), [random.Random(1).randrange(4)] * 3000):
        index = SuffixIndex(text)
        assert len(index._next) <= 2 * len(text)
        assert sum(map(len, index._next)) <= 3 * len(text)

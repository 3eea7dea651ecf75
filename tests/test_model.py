"""A model together with its cached tokens."""

from __future__ import annotations

import pytest
from table import TableModel

from lspec.errors import RollbackError
from lspec.model import TokenCache, common_prefix, rolls_back


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [("", "", 0), ("abc", "", 0), ("abc", "abd", 2), ("abc", "abcde", 3), ("xbc", "abc", 0)],
)
def test_common_prefix(a: str, b: str, length: int) -> None:
    assert common_prefix([*a], [*b]) == common_prefix([*b], [*a]) == length  # type: ignore[list-item]
    for known in range(length + 1):
        assert common_prefix([*a], [*b], known) == length  # type: ignore[list-item]


def test_cache_knows_what_its_model_holds() -> None:
    model = TableModel()
    cache = TokenCache(model)
    cache.eval([1, 2, 3], rows=0)
    cache.eval([0], rows=1)
    assert cache.tokens == model.seen == [1, 2, 3, 0]
    cache.truncate(2)
    assert cache.tokens == model.seen == [1, 2]
    assert cache.passes == 2
    assert cache.seconds > 0


def test_reuse_keeps_the_common_prefix() -> None:
    cache = TokenCache(TableModel())
    cache.eval([1, 2, 3, 0], rows=0)
    assert cache.reuse([1, 2, 0, 0, 0]) == 2
    assert cache.tokens == [1, 2]
    assert cache.reuse([1, 2, 3]) == 2
    assert cache.reuse([3]) == 0


def test_reuse_starts_anew_where_the_model_cannot_cut_back() -> None:
    model = TableModel()
    model.can_roll_back = False
    cache = TokenCache(model)
    cache.eval([1, 2, 3], rows=0)
    assert cache.reuse([1, 2, 3, 0]) == 3
    assert cache.reuse([1, 2, 0]) == 0
    assert cache.tokens == model.seen == []


def test_catch_up_reads_in_passes_of_n_batch_without_logits() -> None:
    model = TableModel(n_batch=4)
    cache = TokenCache(model)
    text = [1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert cache.catch_up(text)
    assert [len(tokens) for tokens in model.passes] == [4, 4, 1]
    assert cache.tokens == text
    assert cache.catch_up(text)
    assert len(model.passes) == 3


def test_catch_up_can_be_stopped_between_passes() -> None:
    model = TableModel(n_batch=4)
    cache = TokenCache(model)
    assert not cache.catch_up([1] * 9, lambda: len(model.passes) == 1)
    assert cache.tokens == [1] * 4


@pytest.mark.parametrize("known", range(9))
def test_logits_after_evaluates_what_is_missing(known: int) -> None:
    model = TableModel(n_batch=4)
    cache = TokenCache(model)
    text = [1, 2, 3, 0, 1, 2, 3, 0, 1]
    cache.catch_up(text[:known])
    row = cache.logits_after(text)
    assert row.shape == (4,)
    assert (row == model.logits(text)).all()
    assert cache.tokens == text


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("rolls", [False, True])
def test_failed_pass_leaves_cache_and_model_agreeing(late: bool, rolls: bool) -> None:
    model = TableModel()
    model.can_roll_back = rolls
    cache = TokenCache(model)
    cache.eval([1, 2], rows=0)
    model.fail_after, model.fail_late = 0, late
    with pytest.raises(KeyboardInterrupt):
        cache.eval([3, 0], rows=1)
    assert cache.tokens == model.seen
    assert (cache.logits_after([1, 2, 3]) == model.logits([1, 2, 3])).all()


# -- is a rollback a rollback? --


def test_model_that_forgets_rolls_back_and_is_left_empty() -> None:
    model = TableModel(n_vocab=8)
    model.eval([5, 6], rows=0)
    for depth in (1, 4, 8):
        assert rolls_back(model, depth=depth)
        assert model.n_past == 0


def test_model_that_refuses_does_not_roll_back_and_is_left_empty() -> None:
    model = TableModel(n_vocab=8)
    model.can_roll_back = False
    assert not rolls_back(model, depth=4)
    assert model.n_past == 0


class Liar(TableModel):
    """Says that it has cut its cache back, and remembers: a recurrent state that is left as is."""

    def truncate(self, n_past: int) -> None:
        if n_past == 0:
            self._ghosts: list[int] = []
        else:
            self._ghosts += self.seen[n_past:]
        super().truncate(n_past)

    def logits(self, prefix):  # type: ignore[no-untyped-def]
        return super().logits([*self._ghosts, *prefix])


def test_model_that_only_says_so_does_not_roll_back() -> None:
    model = Liar(n_vocab=8)
    assert not rolls_back(model, depth=4)
    assert model.n_past == 0


class Shallow(TableModel):
    """Takes back tokens of its last pass only, and at most all but the first of them."""

    def truncate(self, n_past: int) -> None:
        if 0 < n_past < self.n_past and self.n_past - n_past >= len(self.passes[-1]):
            raise RollbackError("too far")
        super().truncate(n_past)


@pytest.mark.parametrize("depth", [1, 4, 8])
def test_taking_back_the_drafted_part_of_a_pass_is_what_is_tried(depth: int) -> None:
    """A round evaluates the last token with the drafted ones, and takes back drafted ones only."""
    assert rolls_back(Shallow(n_vocab=8), depth=depth)

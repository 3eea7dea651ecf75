"""Width classes are found, on models whose logits depend on a pass's width in a known way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from table import TableModel

from lspec.errors import RollbackError
from lspec.model import FloatRows
from lspec.widths import CONTEXTS, ROWS, WIDTHS, find

TEXT = [(3 * i + i // 7) % 4 for i in range(CONTEXTS[-1] + ROWS)]


class Uneven(TableModel):
    """Adds `shift(width, tokens before the pass, place in the pass)` to the logits of a row."""

    def __init__(self, shift: Callable[[int, int, int], float], *, n_ctx: int = 1024) -> None:
        super().__init__(n_ctx=n_ctx, n_batch=64, max_rows=WIDTHS[-1])
        self._shift = shift
        self.asked: list[tuple[int, int]] = []  # tokens and rows of each pass

    def eval(self, tokens: Sequence[int], *, rows: int) -> FloatRows:
        before, n = self.n_past, len(tokens)
        self.asked.append((n, rows))
        result = super().eval(tokens, rows=rows)
        for i in range(rows):
            result[i] += np.float32(self._shift(n, before, n - rows + i))
        return result


def even(width: int, before: int, place: int) -> float:
    return 0.0


def one_row_kernel(width: int, before: int, place: int) -> float:
    """Like an f16 cache on a CPU: from 257 tokens on a single row takes another kernel."""
    return 1e-3 if width == 1 and before > 256 else 0.0


def test_widths_that_never_differ_are_one_class() -> None:
    found = find(Uneven(even), TEXT)
    assert found is not None
    assert found.classes == (WIDTHS,)
    assert found.difference == (0.0,) * len(WIDTHS)
    assert found.contexts == CONTEXTS


def test_width_that_differs_at_long_context_only_is_alone() -> None:
    short, whole = (find(Uneven(one_row_kernel), TEXT, contexts=c) for c in ((40,), CONTEXTS))
    assert short is not None
    assert whole is not None
    assert short.classes == (WIDTHS,)
    assert whole.classes == ((1,), WIDTHS[1:])
    assert whole.difference[0] == 0
    assert whole.difference[1:] == pytest.approx([1e-3] * 16, rel=1e-2)


def test_classes_need_not_be_neighbours_and_can_be_several() -> None:
    found = find(Uneven(lambda width, *_: (0, 0.1, 0.25)[width % 3]), TEXT)
    assert found is not None
    assert found.classes == (WIDTHS[::3], WIDTHS[1::3], WIDTHS[2::3])
    assert found.difference[:3] == pytest.approx([0, 0.15, 0.1], abs=1e-5)


def test_widths_that_agree_with_none_are_alone_and_not_tried_again() -> None:
    model = Uneven(lambda width, *_: width / 1000)
    found = find(model, TEXT)
    assert found is not None
    assert found.classes == tuple((width,) for width in WIDTHS)
    at_long_context = model.asked[model.asked.index((18, 0)) :]  # what 250 leaves of its chunks
    assert {rows for _, rows in at_long_context} == {0, 1}


@pytest.mark.parametrize("place", [1, 5, 16])
def test_every_place_in_a_pass_is_tried(place: int) -> None:
    found = find(Uneven(lambda width, before, at: 1e-3 * (at >= place)), TEXT, contexts=(40,))
    assert found is not None
    assert found.classes[0] == WIDTHS[:place]
    assert all(len(group) == 1 for group in found.classes[1:])


class Remembering(Uneven):
    """Keeps a trace of tokens that were taken back from the middle of a pass."""

    def __init__(self) -> None:
        super().__init__(lambda *_: self._trace)
        self._trace = 0.0

    def truncate(self, n_past: int) -> None:
        if self.asked and 0 < self.n_past - n_past < self.asked[-1][0]:
            self._trace = 1e-3
        elif self.n_past > n_past:
            self._trace = 0.0
        super().truncate(n_past)


def test_rolling_back_belongs_to_what_is_tried() -> None:
    found = find(Remembering(), TEXT, contexts=(40,))
    assert found is not None
    assert (1,) in found.classes


def test_all_rows_are_asked_for_and_the_text_is_read_once() -> None:
    model = Uneven(even)
    find(model, TEXT)
    assert {width for width, rows in model.asked if rows} == set(WIDTHS)
    assert all(rows in (0, width) for width, rows in model.asked)
    assert sum(width for width, rows in model.asked if not rows) == CONTEXTS[-1]


@pytest.mark.parametrize(
    ("n_ctx", "length", "contexts"),
    [
        (1024, 300, (40, 250, 300 - ROWS)),
        (256, 1000, (40, 256 - 17 - ROWS)),
        (64, 1000, (64 - 17 - ROWS,)),
        (1024, ROWS, ()),
        (35, 1000, ()),
    ],
)
def test_contexts_stay_within_text_and_window(
    n_ctx: int, length: int, contexts: tuple[int, ...]
) -> None:
    found = find(Uneven(even, n_ctx=n_ctx), TEXT[:length])
    assert found is not None
    assert found.contexts == contexts
    assert len(found.classes) == (1 if contexts else len(WIDTHS)), "nothing is known without any"


def test_what_was_in_the_cache_does_not_count() -> None:
    model = Uneven(even)
    model.eval([1, 2, 3], rows=1)
    find(model, TEXT, contexts=(40,))
    assert model.asked[1] == (40, 0)
    assert model.passes[1] == tuple(TEXT[:40])


@pytest.mark.parametrize("passes", [0, 1, 30, 200])
def test_stop_is_heard_between_passes(passes: int) -> None:
    model = Uneven(even)
    assert find(model, TEXT, should_stop=lambda: len(model.asked) >= passes) is None
    assert len(model.asked) < passes + 2 * ROWS


def test_model_that_cannot_go_back_is_an_error() -> None:
    model = Uneven(even)
    model.can_roll_back = False
    with pytest.raises(RollbackError):
        find(model, TEXT)


def test_only_the_asked_widths_and_rows_are_tried() -> None:
    model = Uneven(lambda width, *_: 0.5 * (width == 4))
    found = find(model, TEXT, contexts=(40,), rows=5, widths=(4, 2, 8))
    assert found is not None
    assert found.classes == ((2, 8), (4,))
    assert found.difference == (0.0, 0.5, 0.0)
    assert {width for width, rows in model.asked if rows} == {2, 4, 8}

"""The tests' own statistics, against known values."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from laws import chi_square_tail, fit, joint_law, truncated


@pytest.mark.parametrize(
    ("x", "degrees", "tail"),
    [
        (3.841458820694124, 1, 0.05),
        (6.634896601021214, 1, 0.01),
        (18.307038053275146, 10, 0.05),
        (124.34211340400408, 100, 0.05),
        (2.7055434540954146, 1, 0.1),
        (2 * np.log(1e8), 2, 1e-8),
        (0.0, 3, 1.0),
    ],
)
def test_chi_square_tail(x: float, degrees: int, tail: float) -> None:
    assert chi_square_tail(x, degrees) == pytest.approx(tail, rel=1e-9)


def test_fit_is_uniform_for_a_right_law_and_tiny_for_a_wrong_one() -> None:
    rng, law = np.random.default_rng(0), {0: 0.5, 1: 0.3, 2: 0.2}
    samples = [Counter(rng.choice(3, 500, p=[0.5, 0.3, 0.2]).tolist()) for _ in range(400)]
    values = [fit(counts, law) for counts in samples]
    assert 0.4 < np.mean(values) < 0.6
    assert 0.02 < np.mean(np.array(values) < 0.05) < 0.09
    assert np.median([fit(counts, {0: 0.35, 1: 0.35, 2: 0.3}) for counts in samples]) < 1e-8


def test_fit_of_the_impossible_is_zero() -> None:
    assert fit(Counter({0: 1000, 3: 1}), {0: 1.0, 3: 0.0}) == 0
    assert fit(Counter({0: 1000, 3: 1}), {0: 1.0}) == 0


def test_fit_pools_small_cells() -> None:
    law = {0: 0.49, 1: 0.49} | dict.fromkeys(range(2, 42), 0.02 / 40)
    counts = Counter({0: 490, 1: 490, 2: 20})
    assert fit(counts, law) == 1


def test_joint_law_sums_to_one_and_stops_at_end_tokens() -> None:
    law = joint_law(lambda prefix: (0.5, 0.25, 0.25), 3, ends=frozenset({2}))
    assert sum(law.values()) == 1
    assert law[(2,)] == 0.25
    assert law[(0, 2)] == 0.125
    assert law[(0, 1, 0)] == 0.0625
    assert all(2 not in text[:-1] for text in law)


def test_reference_law_of_one_row_by_hand() -> None:
    row = np.log([0.4, 0.1, 0.3, 0.2])
    assert truncated(row, temperature=1) == pytest.approx([0.4, 0.1, 0.3, 0.2])
    assert truncated(row, temperature=1, top_k=2) == pytest.approx([4 / 7, 0, 3 / 7, 0])
    assert truncated(row, temperature=1, top_p=0.75) == pytest.approx([4 / 9, 0, 3 / 9, 2 / 9])
    assert truncated(row, temperature=1, min_p=0.6) == pytest.approx([4 / 7, 0, 3 / 7, 0])
    assert truncated(row, temperature=0.5) == pytest.approx(np.array([16, 1, 9, 4]) / 30)
    # Top-p looks at what top-k left: .4 of .7 is .57.
    assert truncated(row, temperature=1, top_k=2, top_p=0.55) == pytest.approx([1, 0, 0, 0])

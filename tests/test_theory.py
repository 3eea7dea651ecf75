"""The formulas of Leviathan et al. 2023, against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from lspec.theory import best_gamma, improvement_factor, tau


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.99])
@pytest.mark.parametrize("gamma", [0, 1, 4, 16])
def test_tau_is_the_closed_form_of_equation_1(alpha: float, gamma: int) -> None:
    assert tau(alpha, gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))


def test_tau_of_a_draft_that_is_always_right_is_the_whole_window() -> None:
    assert tau(1.0, 5) == 6


def test_tau_agrees_with_rounds_that_were_drawn() -> None:
    accepted = np.random.default_rng(1).random((50_000, 4)) < 0.7
    tokens = 1 + np.cumprod(accepted, axis=1).sum(axis=1)
    assert tau(0.7, 4) == pytest.approx(float(tokens.mean()), rel=0.01)


def test_improvement_factor_with_v_1_is_theorem_3_8() -> None:
    alpha, gamma, c = 0.8, 5, 0.05
    paper = (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * c + 1))
    assert improvement_factor(tau(alpha, gamma), gamma, c=c, v=1) == pytest.approx(paper)


def test_improvement_factor_counts_the_cost_of_the_verify_pass() -> None:
    assert improvement_factor(3.0, 4, c=0.25, v=1.5) == pytest.approx(3.0 / 2.5)


def test_plain_decoding_has_factor_1() -> None:
    assert improvement_factor(tau(0.9, 0), 0, c=0.3, v=1.0) == 1


def test_best_gamma_is_0_where_a_pass_costs_as_much_as_its_tokens() -> None:
    compute_bound = [float(width) for width in range(1, 18)]
    assert best_gamma(0.9, c=0.4, v=compute_bound) == 0


def test_best_gamma_is_the_largest_where_drafting_is_free_and_right() -> None:
    assert best_gamma(1.0, c=0.0, v=[1.0] * 17) == 16


def test_best_gamma_is_where_the_factor_peaks() -> None:
    v = [1 + 0.12 * gamma for gamma in range(17)]
    factors = [improvement_factor(tau(0.8, g), g, c=0.1, v=v[g]) for g in range(17)]
    assert 0 < best_gamma(0.8, c=0.1, v=v) == factors.index(max(factors)) < 16


def test_best_gamma_rises_with_alpha() -> None:
    v = [1 + 0.1 * gamma for gamma in range(17)]
    chosen = [best_gamma(alpha, c=0.1, v=v) for alpha in (0.1, 0.5, 0.8, 0.95)]
    assert chosen == sorted(set(chosen))

"""From logits to a distribution, and drawing: judged by a plain reference and by llama.cpp."""

from __future__ import annotations

import ctypes
import math
from itertools import product

import numpy as np
import pytest
from laws import softmax, truncated

from lspec import truncation
from lspec.distribution import Distribution
from lspec.errors import DecodeError, RequestError
from lspec.params import SamplingParams
from lspec.sampling import ChainSampler

BELOW_ONE = math.nextafter(1.0, 0.0)
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
KNOBS = [
    dict(zip(OFF, values, strict=True))
    for values in product((0.3, 1.0, 2.5), (0, 1, 5, 40), (1.0, 0.95, 0.3), (0.0, 0.05, 0.5))
]


def random_row(size: int, spread: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([size, seed])
    return (rng.standard_normal(size) * spread).astype(np.float32)


def law(distribution: Distribution, size: int) -> np.ndarray:
    """Return all probabilities of `distribution`, (size,)."""
    whole = np.zeros(size)
    ids = slice(None) if distribution.ids is None else distribution.ids
    whole[ids] = distribution.weights / distribution.total
    return whole


def sampled(row: np.ndarray, **knobs: float) -> np.ndarray:
    params = SamplingParams(**{**OFF, **knobs})
    sampler = ChainSampler(params, n_vocab=len(row))
    return law(sampler.distribution(row), len(row))


# -- the law of a row --


@pytest.mark.parametrize("size", [2, 8, 260, 1000])
@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
def test_every_setting_agrees_with_the_plain_reference(size: int, spread: float) -> None:
    row = random_row(size, spread)
    before = row.copy()
    for knobs in KNOBS:
        assert sampled(row, **knobs) == pytest.approx(truncated(row, **knobs), abs=1e-6), knobs
    assert (row == before).all()  # the row belongs to the model


@pytest.mark.parametrize("spread", [1.0, 3.0])
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
        {"top_p": 0.9},
        {"top_k": 1000, "top_p": 0.99},
        {"min_p": 0.01, "temperature": 1.5},
    ],
)
def test_whole_vocabulary_agrees_with_the_plain_reference(
    spread: float, knobs: dict[str, float]
) -> None:
    row = random_row(151_936, spread)
    # In total variation: float32 sums may move the cut of top-p by an id of tiny probability.
    difference = np.abs(sampled(row, **knobs) - truncated(row, **{**OFF, **knobs})).sum() / 2
    assert difference < 1e-4


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5])
def test_equal_logits_are_taken_in_the_order_of_ids(top_k: int) -> None:
    row = np.array([1, 2, 2, 1, 2], np.float32)
    assert np.flatnonzero(sampled(row, top_k=top_k)).tolist() == sorted([1, 2, 4, 0, 3][:top_k])
    assert sampled(row, temperature=0).tolist() == [0, 1, 0, 0, 0]
    assert np.flatnonzero(sampled(row, min_p=1.0)).tolist() == [1, 2, 4]


def test_equal_logits_are_cut_by_top_p_in_the_order_of_ids() -> None:
    row = np.zeros(10, np.float32)
    assert np.flatnonzero(sampled(row, top_p=0.35)).tolist() == [0, 1, 2, 3]


def test_far_apart_logits_are_found_by_a_widening_search() -> None:
    row = np.array([0, -30, -1000, -12_000, -np.inf], np.float32)
    assert np.flatnonzero(sampled(row, top_k=2, temperature=100)).tolist() == [0, 1]
    kept = ChainSampler(SamplingParams(1, 3, 1, 0), n_vocab=5).distribution(row).ids
    assert kept is not None
    assert kept.tolist() == [0, 1, 2]


def test_confident_row_is_not_sorted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_ids: list[int] = []

    def descending(row: np.ndarray, ids: np.ndarray) -> np.ndarray:
        sorted_ids.append(len(ids))
        return truncation_descending(row, ids)

    truncation_descending = truncation._descending
    monkeypatch.setattr(truncation, "_descending", descending)
    row = random_row(50_000, 1.0)
    row[7] = 13.0
    kept = ChainSampler(SamplingParams(0.8, 40, 0.95, 0.0), n_vocab=len(row)).distribution(row).ids
    assert kept is not None
    assert kept.tolist() == [7]
    assert max(sorted_ids) == 40


def test_tokens_of_probability_zero_stay_so() -> None:
    row = np.array([-np.inf, 0, -np.inf, 1], np.float32)
    for knobs in ({}, {"top_k": 3}, {"top_p": 0.999}, {"min_p": 0.001}, {"temperature": 9.0}):
        assert np.flatnonzero(sampled(row, **knobs)).tolist() == [1, 3]


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-20, 1e-38, 1e-45, 1e-60])
@pytest.mark.parametrize("top_k", [0, 3])
def test_tiny_temperatures_are_greedy(temperature: float, top_k: int) -> None:
    row = random_row(100, 3.0)
    expected = np.eye(100)[row.argmax()]
    assert sampled(row, temperature=temperature, top_k=top_k) == pytest.approx(expected, abs=1e-6)


def test_temperature_zero_is_the_likeliest_token_whatever_the_truncation() -> None:
    row = random_row(100, 3.0)
    for knobs in ({}, {"top_k": 5}, {"top_p": 0.1}, {"min_p": 0.9}):
        assert sampled(row, temperature=0, **knobs).argmax() == row.argmax()
        assert np.count_nonzero(sampled(row, temperature=0, **knobs)) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(bad: float, temperature: float) -> None:
    row = random_row(100, 1.0)
    row[50] = bad
    with pytest.raises(DecodeError):
        sampled(row, temperature=temperature)
    with pytest.raises(DecodeError):
        sampled(np.full(5, -np.inf, np.float32), temperature=temperature)


def test_ids_above_n_vocab_do_not_exist() -> None:
    row = np.array([1, 2, 3, 99, np.nan], np.float32)
    sampler = ChainSampler(SamplingParams(**OFF), n_vocab=3)
    distribution = sampler.distribution(row)
    assert law(distribution, 3) == pytest.approx(softmax([1, 2, 3]))
    assert distribution.prob(3) == distribution.prob(4) == distribution.prob(10**6) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": math.nan},
    ],
)
def test_settings_without_a_meaning_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        SamplingParams(**{**OFF, **wrong})


# -- llama.cpp's own samplers as the judge --


def llama_cpp_law(row: np.ndarray, *, temperature: float, **knobs: float) -> np.ndarray:
    """Return the law of `row` under llama.cpp's chain top-k, top-p, min-p, temperature."""
    import llama_cpp as lib

    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_k(int(knobs["top_k"])))
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_p(knobs["top_p"], 1))
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_min_p(knobs["min_p"], 1))
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(temperature))
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(1))
    data = (lib.llama_token_data * len(row))()
    for i, logit in enumerate(row.tolist()):
        data[i].id, data[i].logit = i, logit
    candidates = lib.llama_token_data_array(data, len(row), -1, False)
    lib.llama_sampler_apply(chain, ctypes.byref(candidates))
    whole = np.zeros(len(row))
    for i in range(candidates.size):
        whole[candidates.data[i].id] = candidates.data[i].p
    lib.llama_sampler_free(chain)
    return whole


@pytest.mark.parametrize("size", [8, 260, 3000])
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_every_setting_agrees_with_llama_cpp(size: int, spread: float) -> None:
    for seed, knobs in enumerate(KNOBS):
        row = random_row(size, spread, seed)
        ours, theirs = sampled(row, **knobs), llama_cpp_law(row, **knobs)
        assert np.flatnonzero(ours).tolist() == np.flatnonzero(theirs).tolist(), knobs
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-7), knobs


def test_another_order_of_the_samplers_would_not_agree_with_llama_cpp() -> None:
    row = random_row(260, 2.0)
    knobs = {"temperature": 2.5, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
    temperature_first = sampled(row / np.float32(2.5), top_p=0.9)
    assert np.abs(temperature_first - llama_cpp_law(row, **knobs)).sum() > 0.1


def test_temperature_zero_agrees_with_llama_cpp() -> None:
    row = random_row(260, 2.0)
    knobs = {**OFF, "temperature": 0.0}
    assert np.flatnonzero(llama_cpp_law(row, **knobs)).tolist() == [row.argmax()]
    assert sampled(row, **knobs).argmax() == row.argmax()


# -- drawing --


def integer_weights(size: int) -> np.ndarray:
    """Return weights whose sums are exact: integers, a third of them 0, ends included."""
    rng = np.random.default_rng(size)
    weights = rng.integers(0, 4, size) * rng.integers(0, 2, size)
    weights[[0, -1]] = 0
    weights[size // 2] = 1
    return weights


def distributions(weights: np.ndarray) -> list[Distribution]:
    """Return the same distribution dense, in both precisions, and sparse."""
    ids = np.arange(len(weights), dtype=np.int32)
    return [
        Distribution(None, weights.astype(np.float32)),
        Distribution(None, weights.astype(np.float64)),
        Distribution(ids, weights.astype(np.float32)),
        Distribution(ids[weights > 0], weights[weights > 0].astype(np.float64)),
    ]


@pytest.mark.parametrize("size", [3, 511, 512, 513, 1024, 1300, 5000])
def test_draw_is_the_inverse_of_the_cumulative_sum(size: int) -> None:
    weights = integer_weights(size)
    cumulative = np.cumsum(weights)
    total = int(cumulative[-1])
    for distribution in distributions(weights):
        for step in range(0, total, max(1, total // 500)):
            for u in (step / total, (step + 0.5) / total):
                expected = int(np.flatnonzero(cumulative > u * total)[0])
                assert distribution.draw(u) == expected


@pytest.mark.parametrize("size", [3, 511, 512, 513, 1024, 1300, 5000])
def test_draws_at_the_ends_and_around_block_borders_have_weight(size: int) -> None:
    weights = integer_weights(size)
    cumulative = np.cumsum(weights) / weights.sum()
    borders = [cumulative[i - 1] for i in range(512, size, 512)]
    edges = [0.0, BELOW_ONE, 5e-324, *borders, *cumulative[::37]]
    nudged = [math.nextafter(u, 0) for u in edges] + [math.nextafter(u, 1) for u in edges]
    for distribution in distributions(weights):
        for u in (*edges, *nudged):
            if u < 1:
                assert weights[distribution.draw(u)] > 0
        assert distribution.draw(0.0) == np.flatnonzero(weights)[0]
        assert distribution.draw(BELOW_ONE) == np.flatnonzero(weights)[-1]


@pytest.mark.parametrize("size", [600, 151_936])
def test_awkward_float_weights_never_draw_a_zero(size: int) -> None:
    weights = np.exp(random_row(size, 8.0) - 30)
    weights[random_row(size, 1.0, 1) > 0] = 0
    weights[-1] = 0
    distribution = Distribution(None, weights)
    for u in (0.0, BELOW_ONE, 1 - 2**-52, *np.random.default_rng(0).random(300)):
        assert weights[distribution.draw(float(u))] > 0


def test_draws_follow_the_probabilities() -> None:
    weights = np.array([0.1, 0, 0.2, 0.7])
    grid = (np.arange(10_000) + 0.5) / 10_000
    for distribution in distributions(weights):
        counts = np.bincount([distribution.draw(u) for u in grid], minlength=4)
        assert np.abs(counts - weights * 10_000).max() <= 1


def test_sums_are_in_float64() -> None:
    weights = np.full(151_936, 1e-3, np.float32)
    weights[0] = 1e5  # float32 sums would lose what follows
    for ids in (None, np.arange(151_936, dtype=np.int32)):
        distribution = Distribution(ids, weights)
        assert distribution.total == pytest.approx(1e5 + 151.935, rel=1e-9)
        assert distribution.draw(BELOW_ONE) == 151_935


def test_one_hot() -> None:
    distribution = Distribution.one_hot(7)
    assert [distribution.prob(i) for i in (0, 6, 7, 8, 10**6)] == [0, 0, 1, 0, 0]
    assert distribution.draw(0.0) == distribution.draw(BELOW_ONE) == 7


# -- the residual --


def as_kinds(probabilities: np.ndarray) -> list[Distribution]:
    """Return a law as every kind of Distribution, unnormalized."""
    ids = np.flatnonzero(probabilities).astype(np.int32)
    return [
        Distribution(None, (probabilities * 3).astype(np.float32)),
        Distribution(None, probabilities * 5),
        Distribution(ids, probabilities[ids] * 7),
    ]


@pytest.mark.parametrize("size", [2, 8, 700])
@pytest.mark.parametrize("seed", range(5))
def test_residual_is_what_p_has_more_than_q(size: int, seed: int) -> None:
    rng = np.random.default_rng([size, seed])
    p, q = (rng.dirichlet(np.full(size, 0.5)) * (rng.random(size) < 0.7) for _ in range(2))
    p[seed % size] += 0.1
    q[(seed + 1) % size] += 0.1
    p, q = p / p.sum(), q / q.sum()
    expected = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
    for a, b in product(as_kinds(p), as_kinds(q)):
        assert law(a.excess(b), size) == pytest.approx(expected, abs=1e-6)
        assert a.prob(seed % size) == pytest.approx(p[seed % size])  # unchanged


def test_residual_against_a_smaller_vocabulary() -> None:
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.5, 0.25, 0.25])
    expected = np.array([0, 0, 0.05, 0.4]) / 0.45
    for a, b in product(as_kinds(p), as_kinds(q)):
        assert law(a.excess(b), 4) == pytest.approx(expected, abs=1e-6)


def test_equal_laws_leave_nothing() -> None:
    p = np.array([0.1, 0.2, 0.7])
    for a, b in product(as_kinds(p), as_kinds(p)):
        assert a.excess(b).total == pytest.approx(0, abs=1e-6)
    same = Distribution(None, p)
    assert same.excess(same).total == 0
    assert same.excess(Distribution(None, p * 4)).total == 0


@pytest.mark.parametrize("scale", [0.3, 0.8])
def test_excess_of_a_scaled_law_has_the_mass_that_block_verification_asks_for(scale: float) -> None:
    p, q = np.array([0.1, 0.6, 0.3]), np.array([0.3, 0.1, 0.6])
    expected = np.maximum(scale * p - q, 0)
    for a, b in product(as_kinds(p), as_kinds(q)):
        assert a.excess(b, scale).total == pytest.approx(expected.sum(), abs=1e-6)


def test_residual_of_disjoint_laws_is_p() -> None:
    p, q = np.array([0.5, 0.5, 0, 0]), np.array([0, 0, 0.5, 0.5])
    for a, b in product(as_kinds(p), as_kinds(q)):
        assert law(a.excess(b), 4) == pytest.approx(p)


def test_residual_of_a_chosen_token_leaves_it_out() -> None:
    for p in as_kinds(np.array([0.5, 0.2, 0.3])):
        rest = p.excess(Distribution.one_hot(0))
        assert law(rest, 3) == pytest.approx([0, 0.4, 0.6])
        assert rest.prob(0) == 0

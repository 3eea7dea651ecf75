"""Penalties, logit bias, typical and top-n-sigma sampling, log-probabilities."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from laws import P_MIN, fit, joint_law, softmax
from loop import Loop
from table import TableModel

import lspec
from lspec.distribution import Distribution
from lspec.errors import RequestError
from lspec.logprobs import token_logprob
from lspec.params import SamplingParams
from lspec.sampling import ChainSampler
from lspec.truncation import FloatArray
from lspec.verify import BlockRule, RejectionRule

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
PENALTIES = {"repeat_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.7}
PROMPT = (1, 2, 0)


def random_row(size: int, seed: int, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng([size, seed]).standard_normal(size) * spread).astype(np.float32)


def law(row: np.ndarray, text: Sequence[int] = (), **knobs: object) -> np.ndarray:
    params = SamplingParams(**{**OFF, **knobs})  # type: ignore[arg-type]
    distribution = ChainSampler(params, n_vocab=len(row), text=text).distribution(row)
    whole = np.zeros(len(row))
    ids = slice(None) if distribution.ids is None else distribution.ids
    whole[ids] = distribution.weights / distribution.total
    return whole


def llama_cpp_law(row: np.ndarray, text: Sequence[int] = (), **knobs: object) -> np.ndarray:
    """Return the law of llama.cpp's own chain: bias, penalties, then truncation, then the rest."""
    import llama_cpp as lib

    params = SamplingParams(**{**OFF, **knobs})  # type: ignore[arg-type]
    n = len(row)
    biases = (lib.llama_logit_bias * max(1, len(params.logit_bias)))()
    for i, (token, value) in enumerate(params.logit_bias):
        biases[i].token, biases[i].bias = token, value
    last_n = len(text) if params.penalty_last_n < 0 else params.penalty_last_n
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    penalties = (params.repeat_penalty, params.frequency_penalty, params.presence_penalty)
    for part in (
        lib.llama_sampler_init_logit_bias(n, len(params.logit_bias), biases),
        lib.llama_sampler_init_penalties(n, last_n, *penalties),
        lib.llama_sampler_init_top_n_sigma(params.top_n_sigma or -1.0),
        lib.llama_sampler_init_top_k(params.top_k),
        lib.llama_sampler_init_typical(params.typical_p, 1),
        lib.llama_sampler_init_top_p(params.top_p, 1),
        lib.llama_sampler_init_min_p(params.min_p, 1),
        lib.llama_sampler_init_temp(params.temperature),
        lib.llama_sampler_init_dist(1),
    ):
        lib.llama_sampler_chain_add(chain, part)
    for token in text:
        lib.llama_sampler_accept(chain, token)
    data = (lib.llama_token_data * n)()
    for i, logit in enumerate(row.tolist()):
        data[i].id, data[i].logit = i, logit
    candidates = lib.llama_token_data_array(data, n, -1, False)
    lib.llama_sampler_apply(chain, ctypes.byref(candidates))
    whole = np.zeros(n)
    for i in range(candidates.size):
        whole[candidates.data[i].id] = candidates.data[i].p
    lib.llama_sampler_free(chain)
    return whole


KNOBS: list[dict[str, object]] = [
    {"repeat_penalty": 1.5},
    {"repeat_penalty": 0.8},
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.9},
    {**PENALTIES, "penalty_last_n": 5},
    {**PENALTIES, "penalty_last_n": -1},
    {**PENALTIES, "penalty_last_n": 0},
    {"logit_bias": {3: 2.0, 5: -1.5, 7: -math.inf}},
    {"typical_p": 0.3},
    {"typical_p": 0.9, "top_k": 20},
    {"typical_p": 0.5, "top_p": 0.8, "min_p": 0.1},
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 0.3, "top_k": 5},
    # Not with typical_p: llama.cpp's entropy is NaN once top-n-sigma has left tokens out.
    {"top_n_sigma": 2.0, "top_p": 0.9, "min_p": 0.05, "temperature": 0.6},
    {**PENALTIES, "logit_bias": {1: 4.0}, "top_k": 10, "top_p": 0.9, "temperature": 0.7},
]


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: ", ".join(knobs))
@pytest.mark.parametrize("size", [30, 500])
def test_every_knob_agrees_with_llama_cpp(knobs: dict[str, object], size: int) -> None:
    for seed in range(10):
        row = random_row(size, seed)
        text = np.random.default_rng(seed).integers(0, 12, 20).tolist()
        ours, theirs = law(row, text, **knobs), llama_cpp_law(row, text, **knobs)
        assert np.flatnonzero(ours).tolist() == np.flatnonzero(theirs).tolist()
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-7)


def test_logits_of_the_model_are_left_alone() -> None:
    row = random_row(30, 1)
    before = row.copy()
    law(row, [1, 2, 3], **PENALTIES, logit_bias={4: 1.0})
    assert (row == before).all()


# -- looking back, in the loop --

LOOKING_BACK = SamplingParams(
    temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, **PENALTIES, penalty_last_n=4
)


def penalized(row: FloatArray, text: Sequence[int]) -> np.ndarray:
    """Return the law after `text` by a plain reading of the penalties."""
    logits = row.astype(np.float64)
    recent = list(text)[-4:]
    for token in set(recent):
        logits[token] = logits[token] * 1.3 if logits[token] <= 0 else logits[token] / 1.3
        logits[token] -= 0.4 * recent.count(token) + 0.7
    return softmax(logits)


class ForgetsDrafted(ChainSampler):
    """The wrong variant: at every row of a round it sees the accepted text alone (trap 4)."""

    def distribution(self, row: FloatArray, drafted: Sequence[int] = ()) -> Distribution:
        return super().distribution(row)


class ForgetsAccepted(ChainSampler):
    """The wrong variant: it never learns what was emitted."""

    def accept(self, tokens: Sequence[int]) -> None:
        pass


def p_value(kind: type[ChainSampler], gamma: int, **more: object) -> float:
    loop = Loop(
        TableModel(seed=1),
        TableModel(seed=2) if gamma else None,
        gamma=gamma,
        params=LOOKING_BACK,
        **more,  # type: ignore[arg-type]
    )
    counts = loop.sample(
        PROMPT, n=3, samples=3000, sampler=lambda: kind(LOOKING_BACK, n_vocab=4, text=PROMPT)
    )
    model = TableModel(seed=1)

    def next_law(prefix: tuple[int, ...]) -> np.ndarray:
        text = (*PROMPT, *prefix)
        return penalized(model.logits(text), text)

    return fit(counts, joint_law(next_law, 3))


@pytest.mark.parametrize("gamma", [0, 1, 4])
@pytest.mark.parametrize("make_rule", [RejectionRule, BlockRule])
def test_penalties_keep_their_law_under_speculation(gamma: int, make_rule: object) -> None:
    assert p_value(ChainSampler, gamma, make_rule=make_rule) > P_MIN


@pytest.mark.parametrize("wrong", [ForgetsDrafted, ForgetsAccepted])
def test_penalties_that_forget_do_not(wrong: type[ChainSampler]) -> None:
    assert p_value(wrong, 4) < P_MIN


def test_drafts_sampler_looks_back_at_the_same_text() -> None:
    sampler = ChainSampler(LOOKING_BACK, n_vocab=4, text=PROMPT)
    draft = sampler.for_draft(3)
    row = random_row(4, 1)
    sampler.accept((2, 2, 3))
    expected = penalized(row, (*PROMPT, 2, 2, 3, 1))[:3]
    found = draft.distribution(row, (1,))
    assert found.weights / found.total == pytest.approx(expected / expected.sum(), rel=1e-5)


# -- what makes no sense --


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repeat_penalty", 0),
        ("repeat_penalty", 1e-300),
        ("frequency_penalty", -1e308),
        ("presence_penalty", 1e7),
        ("repeat_penalty", math.nan),
        ("penalty_last_n", -2),
        ("penalty_last_n", 1.5),
        ("typical_p", 0),
        ("typical_p", 1.1),
        ("top_n_sigma", -1),
        ("frequency_penalty", math.inf),
        ("presence_penalty", "much"),
        ("temperature", None),
        ("top_k", None),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: 1e39}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", 3),
    ],
)
def test_values_without_a_meaning_are_refused(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_a_bias_may_be_given_with_texts_as_ids() -> None:
    assert SamplingParams(logit_bias={"7": 1}).logit_bias == ((7, 1.0),)  # type: ignore[dict-item]


# -- log-probabilities --


@pytest.fixture(scope="module")
def engine(chat_model: Path, chat_draft: Path) -> Iterator[lspec.Engine]:
    with lspec.load(target=chat_model, draft=chat_draft, n_ctx=256, n_threads=1) as engine:
        yield engine


def test_logprobs_are_the_targets_own() -> None:
    row = random_row(300, 5)
    expected = np.log(softmax(row))
    order = np.argsort(-row, kind="stable")
    found = token_logprob(row, 17, 5)
    assert (found.token, found.logprob) == (17, pytest.approx(expected[17], abs=1e-5))
    assert [token for token, _ in found.top] == order[:5].tolist()
    assert [p for _, p in found.top] == pytest.approx(expected[order[:5]], abs=1e-5)
    assert token_logprob(row, 3, 0).top == ()
    assert len(token_logprob(row, 3, 999).top) == 300


def test_equal_logits_come_in_the_order_of_their_ids() -> None:
    row = np.array([1, 3, 3, 0, 3, 1], np.float32)
    assert [token for token, _ in token_logprob(row, 0, 2).top] == [1, 2]


@pytest.mark.parametrize("gamma", [0, 1, 4, "auto"])
def test_completion_has_a_logprob_for_each_token(engine: lspec.Engine, gamma: int | str) -> None:
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 24, "logprobs": 3}
    done = engine.generate([5, 6, 7], gamma=gamma, reuse=False, **options)  # type: ignore[arg-type]
    assert [item.token for item in done.logprobs] == list(done.tokens)
    text = [5, 6, 7, *done.tokens]
    for i, item in enumerate(done.logprobs):
        engine.target.truncate(0)
        row = engine.target.logits_after(text[: 3 + i])
        expected = token_logprob(row, item.token, 3)
        assert item.logprob == pytest.approx(expected.logprob, abs=1e-2)
        assert item.top[0][1] == pytest.approx(expected.top[0][1], abs=1e-2)


def test_logprobs_of_chunks_join_to_those_of_the_completion(engine: lspec.Engine) -> None:
    *chunks, last = engine.stream([5, 6, 7], max_tokens=20, logprobs=0, seed=1, gamma=4)
    assert last.completion is not None
    joined = [item for chunk in chunks for item in chunk.logprobs]
    assert joined[: len(last.completion.tokens)] == list(last.completion.logprobs)
    assert all(len(chunk.logprobs) == len(chunk.pieces) for chunk in chunks)


@pytest.mark.parametrize("count", [-1, 101, 1.5])
def test_wrong_numbers_of_logprobs_are_refused(engine: lspec.Engine, count: float) -> None:
    with pytest.raises(RequestError, match="logprobs"):
        engine.generate([5], max_tokens=2, logprobs=count)  # type: ignore[arg-type]

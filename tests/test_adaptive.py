"""The adaptive controller in simulated sessions: made-up pairs, a made-up clock (case 7)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from laws import P_MIN, fit, joint_law, truncated
from loop import GREEDY, Loop
from steering import (
    BETWEEN,
    CLOSE,
    COMPUTE_BOUND,
    MEMORY_BOUND,
    Session,
    best_fixed,
    confidences,
)
from table import TableModel
from wrong import AcceptAlways

from lspec.adaptive import AdaptiveGamma
from lspec.controller import Controller, FixedGamma, Outlook
from lspec.costs import Costs
from lspec.drafters import Drafter, HybridDrafter, LookupDrafter, ModelDrafter
from lspec.model import TokenCache
from lspec.round import Source
from lspec.sampling import Sampler

PROMPT = (1, 2, 0, 1, 2)
EASY = (0.98, 0.98, 0.98, 0.3)
MIXED = (0.99, 0.9, 0.5, 0.2)
FLAT = (0.3,)


@pytest.mark.parametrize("costs", [MEMORY_BOUND, BETWEEN, COMPUTE_BOUND])
@pytest.mark.parametrize("kinds", [EASY, MIXED, FLAT, (0.95,), (0.8,), (0.6,)])
def test_auto_is_as_good_as_the_best_fixed_gamma(costs: Costs, kinds: tuple[float, ...]) -> None:
    _, best = best_fixed(costs, confidences(3, *kinds))
    controller = AdaptiveGamma(costs)
    session = Session(costs, confidences(4, *kinds))
    session.play(controller, tokens=300)
    assert session.play(controller, tokens=6000) >= 0.94 * best


@pytest.mark.parametrize("kinds", [EASY, (0.95,), (0.9,)])
@pytest.mark.parametrize("seed", range(4))
def test_good_draft_is_found_out_in_the_first_answer(kinds: tuple[float, ...], seed: int) -> None:
    """Also where plain decoding is not far behind and the first tokens are unlucky."""
    _, best = best_fixed(CLOSE, confidences(3, *kinds))
    session = Session(CLOSE, confidences(seed, *kinds), seed=seed)
    assert session.play(AdaptiveGamma(CLOSE), tokens=400) > 0.85 * best


def test_confidence_lets_auto_beat_every_fixed_gamma_on_mixed_text() -> None:
    _, best = best_fixed(BETWEEN, confidences(3, *EASY))
    session = Session(BETWEEN, confidences(4, *EASY))
    assert session.play(AdaptiveGamma(BETWEEN), tokens=6000) > 1.1 * best


@pytest.mark.parametrize("costs", [BETWEEN, COMPUTE_BOUND])
def test_hopeless_pair_costs_at_most_a_few_percent(costs: Costs) -> None:
    session = Session(costs, confidences(1, *FLAT))
    assert session.play(AdaptiveGamma(costs), tokens=1000) > 0.95
    assert session.play(AdaptiveGamma(costs), tokens=6000) > 0.97


def test_draft_that_cannot_pay_is_not_even_probed() -> None:
    controller = AdaptiveGamma(COMPUTE_BOUND)
    assert not controller.pays_at_best()
    session = Session(COMPUTE_BOUND, confidences(1, 0.9))
    session.play(controller, tokens=3000)
    assert session.drafted == 0
    assert AdaptiveGamma(BETWEEN).pays_at_best()


def test_gamma_rises_again_when_the_text_turns_easy() -> None:
    controller = AdaptiveGamma(BETWEEN)
    session = Session(BETWEEN, confidences(1, *FLAT))
    session.play(controller, tokens=3000)
    before = session.drafted
    session.play(controller, tokens=300)
    assert session.drafted - before < 60, "it should have given up"
    session.confidence = confidences(2, *EASY)
    session.play(controller, tokens=1500)
    assert session.play(controller, tokens=2000) > 1.2


@pytest.mark.parametrize("seed", range(4))
def test_text_that_turns_hard_soon_costs_nothing(seed: int) -> None:
    """What easy text yielded before does not keep it drafting."""
    controller, session = AdaptiveGamma(CLOSE), Session(CLOSE, confidences(1, 0.95), seed=seed)
    session.play(controller, tokens=500)
    session.confidence = confidences(2, *FLAT)
    assert session.play(controller, tokens=128) > 0.92


def test_passes_that_something_disturbed_do_not_mislead_it() -> None:
    kinds = EASY
    calm = Session(BETWEEN, confidences(3, *kinds))
    rough = Session(BETWEEN, confidences(3, *kinds), disturbed=0.02)
    calm.play(AdaptiveGamma(BETWEEN), tokens=6000)
    rough.play(AdaptiveGamma(BETWEEN), tokens=6000)
    assert rough.drafted / rough.tokens > 0.8 * calm.drafted / calm.tokens


def test_machine_that_became_slower_for_wide_passes_is_noticed() -> None:
    controller = AdaptiveGamma(MEMORY_BOUND)
    session = Session(MEMORY_BOUND, confidences(3, 0.8))
    session.play(controller, tokens=1000)
    session.costs = COMPUTE_BOUND
    session.play(controller, tokens=500)
    assert session.play(controller, tokens=3000) > 0.95


@pytest.mark.parametrize(("chance", "at_least"), [(0.99, 1.5), (0.2, 0.97)])
def test_copies_are_made_only_where_they_hold(chance: float, at_least: float) -> None:
    """Even where a draft model never pays a long copy does, and a bad one is soon left alone."""
    session = Session(COMPUTE_BOUND, confidences(1, *FLAT), match=lambda: (8, chance))
    controller = AdaptiveGamma(COMPUTE_BOUND)
    session.play(controller, tokens=200)
    assert session.play(controller, tokens=3000) > at_least


def test_copies_begin_short_and_grow_as_they_hold() -> None:
    """A first copy that fails costs little of a short answer."""
    controller, outlook = AdaptiveGamma(CLOSE), Outlook(12)
    assert 0 < controller.plan(16, outlook).copied < 8
    session = Session(CLOSE, confidences(1, *FLAT), match=lambda: (12, 0.99))
    session.play(controller, tokens=400)
    assert controller.plan(16, outlook).copied > 12


# -- the law, with everything that `--gamma auto` and the n-gram drafter add --

MAKE_CONTROLLER: dict[str, Callable[[int], Controller]] = {
    "fixed": lambda gamma: FixedGamma(gamma, min_match=1),
    "auto": lambda gamma: AdaptiveGamma(MEMORY_BOUND),
}


def lookup(cache: TokenCache, sampler: Sampler) -> Drafter:
    return LookupDrafter()


def hybrid(cache: TokenCache, sampler: Sampler) -> Drafter:
    return HybridDrafter(LookupDrafter(), ModelDrafter(cache, sampler, ends=frozenset()))


def loop(make: Callable[[TokenCache, Sampler], Drafter], controller: str, **more: object) -> Loop:
    return Loop(
        TableModel(seed=1, n_vocab=3, n_batch=32, max_rows=17),
        TableModel(seed=2, n_vocab=3, n_batch=32),
        make_drafter=make,
        make_controller=MAKE_CONTROLLER[controller],
        **more,  # type: ignore[arg-type]
    )


def p_value(tested: Loop) -> float:
    model = tested.target

    def law(prefix: tuple[int, ...]) -> object:
        return truncated(model.logits((*PROMPT, *prefix)), temperature=1.0)  # type: ignore[attr-defined]

    return fit(tested.sample(PROMPT, n=3, samples=3000), joint_law(law, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [lookup, hybrid])
@pytest.mark.parametrize("controller", ["fixed", "auto"])
def test_joint_law_is_the_targets(
    make: Callable[[TokenCache, Sampler], Drafter], controller: str
) -> None:
    assert p_value(loop(make, controller)) > P_MIN


@pytest.mark.parametrize("make", [lookup, hybrid])
def test_joint_law_would_tell_a_verifier_that_believes_every_copy(
    make: Callable[[TokenCache, Sampler], Drafter],
) -> None:
    assert p_value(loop(make, "fixed", make_rule=AcceptAlways)) < P_MIN


@pytest.mark.parametrize("make", [lookup, hybrid])
@pytest.mark.parametrize("controller", ["fixed", "auto"])
def test_greedy_text_is_the_targets(
    make: Callable[[TokenCache, Sampler], Drafter], controller: str
) -> None:
    tested = loop(make, controller, params=GREEDY)
    plain = Loop(TableModel(seed=1, n_vocab=3, n_batch=32), params=GREEDY)
    assert tested.text(PROMPT, max_tokens=60) == plain.text(PROMPT, max_tokens=60)
    rounds = tested.rounds(PROMPT, max_tokens=60)
    assert controller == "auto" or any(Source.NGRAM in round.proposed for round in rounds)

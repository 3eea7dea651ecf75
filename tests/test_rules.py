"""Block verification and coupled sampling: their laws, and wrong variants that must fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from laws import P_MIN, fit, joint_law, truncated
from loop import PLAIN, Loop
from table import TableModel
from wrong import (
    DrawsFromPlainResidual,
    NoiseWithoutPosition,
    SharesRoundNoise,
    StepByStepBlock,
    StopsAtFirstFailure,
    UnlimitedReach,
    UsesInnerChanceAtTheEnd,
)

from lspec.controller import FixedGamma
from lspec.distribution import Distribution
from lspec.drafters import HybridDrafter, LookupDrafter, ModelDrafter
from lspec.errors import RequestError
from lspec.estimates import confidence
from lspec.model import TokenCache
from lspec.params import SamplingParams
from lspec.request import check_rule
from lspec.round import Proposal, Source
from lspec.sampling import Sampler
from lspec.truncation import FloatArray
from lspec.verify import RULES, BlockRule, CoupledRule, Noise, RejectionRule, Rule

PROMPT = (1, 2, 0)
GAMMAS = pytest.mark.parametrize("gamma", [1, 4])
BOTH = pytest.mark.parametrize("make_rule", [BlockRule, CoupledRule])
MakeRule = Callable[[Noise], Rule]


def target() -> TableModel:
    return TableModel(seed=1)


def draft() -> TableModel:
    return TableModel(seed=2)


def steady(*law: float) -> TableModel:
    """Return a model of three tokens whose law is the same everywhere."""
    logits = np.array([*np.log(law), -np.inf])
    return TableModel(logits=lambda prefix: logits)


STEADY, STEADY_DRAFT = (0.45, 0.35, 0.2), (0.75, 0.2, 0.05)


def near(model: TableModel) -> TableModel:
    """Return a draft that is often right: then whole proposals are accepted, and parts of them."""
    other = TableModel(seed=3, spread=0.7)
    return TableModel(logits=lambda prefix: model.logits(prefix) + other.logits(prefix))


def p_value(loop: Loop, *, samples: int = 3000, **params: float) -> float:
    """Return how well the first three emitted tokens fit the target's law, drawn plainly."""
    settings = {"temperature": 1.0, **params}
    model = loop.target
    assert isinstance(model, TableModel)

    def law(prefix: tuple[int, ...]) -> np.ndarray:
        return truncated(model.logits((*PROMPT, *prefix)), **settings)

    return fit(loop.sample(PROMPT, n=3, samples=samples), joint_law(law, 3))


# -- the joint law of three tokens --


@BOTH
@GAMMAS
@pytest.mark.parametrize("make_draft", [lambda: draft(), lambda: near(target())])
def test_rule_keeps_the_targets_law(
    make_rule: MakeRule, gamma: int, make_draft: Callable[[], TableModel]
) -> None:
    assert p_value(Loop(target(), make_draft(), gamma=gamma, make_rule=make_rule)) > P_MIN


@BOTH
def test_rule_keeps_the_law_of_truncated_distributions(make_rule: MakeRule) -> None:
    knobs = {"temperature": 0.8, "top_k": 3, "top_p": 0.9, "min_p": 0.05}
    loop = Loop(
        target(), near(target()), gamma=3, params=SamplingParams(**knobs), make_rule=make_rule
    )
    assert p_value(loop, **knobs) > P_MIN


@BOTH
def test_rule_keeps_the_law_where_supports_differ(make_rule: MakeRule) -> None:
    params = SamplingParams(temperature=1, top_k=2, top_p=1, min_p=0)
    loop = Loop(target(), draft(), gamma=3, params=params, draft_params=PLAIN, make_rule=make_rule)
    assert p_value(loop, top_k=2) > P_MIN


@BOTH
def test_drafting_may_stop_where_q_is_flat(make_rule: MakeRule) -> None:
    """The end of a proposal then depends on the tokens in it: block verification must bear that."""

    class Timid(FixedGamma):
        def go_on(self, row: FloatArray, drafted: int) -> bool:
            return confidence(row) > 0.5

    loop = Loop(target(), near(target()), make_controller=Timid, make_rule=make_rule)
    assert p_value(loop) > P_MIN
    assert {round.drafted for round in loop.rounds(PROMPT, max_tokens=60)} > {0, 1}


@BOTH
def test_copies_and_draws_may_be_mixed(make_rule: MakeRule) -> None:
    def make(cache: TokenCache, sampler: Sampler) -> HybridDrafter:
        return HybridDrafter(LookupDrafter(), ModelDrafter(cache, sampler, ends=frozenset()))

    class CopyFirst(FixedGamma):
        def plan(self, limit, outlook):  # type: ignore[no-untyped-def]
            plan = super().plan(limit, outlook)
            return type(plan)(plan.gamma, copied=min(2, plan.copied))

    loop = Loop(
        target(),
        near(target()),
        make_drafter=make,
        make_controller=lambda gamma: CopyFirst(gamma, min_match=1),
        make_rule=make_rule,
    )
    assert p_value(loop) > P_MIN


WRONG: dict[str, MakeRule] = {
    "residual of p, not of the scaled p": DrawsFromPlainResidual,
    "inner chance at the end": UsesInnerChanceAtTheEnd,
    "reach above 1": UnlimitedReach,
    "first failure ends it": StopsAtFirstFailure,
    "noise without position": NoiseWithoutPosition,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_variants_do_not_have_the_targets_law(wrong: str) -> None:
    pairs = [(target(), near(target())), (steady(*STEADY), steady(*STEADY_DRAFT))]
    values = [p_value(Loop(big, small, make_rule=WRONG[wrong])) for big, small in pairs]
    assert min(values) < P_MIN, values


@BOTH
@GAMMAS
def test_rule_keeps_a_law_far_from_the_drafts(make_rule: MakeRule, gamma: int) -> None:
    loop = Loop(steady(*STEADY), steady(*STEADY_DRAFT), gamma=gamma, make_rule=make_rule)
    assert p_value(loop, samples=6000) > P_MIN


# -- block verification --

A, B = Distribution(None, np.array([1 / 3, 2 / 3])), Distribution(None, np.array([2 / 3, 1 / 3]))


def accepted(rule: Rule, start: int) -> int:
    """Draft two tokens from B for a target A that never changes; return how many stand."""
    tokens = tuple(rule.draw(B, start, i) for i in range(2))
    proposal = Proposal(tokens, (B, B), (Source.DRAFT,) * 2)
    return rule.verify(proposal, lambda i: A, start).accepted


@pytest.mark.parametrize(("make_rule", "expected"), [(RejectionRule, 10 / 9), (BlockRule, 11 / 9)])
def test_block_verification_accepts_what_the_paper_says(
    make_rule: MakeRule, expected: float
) -> None:
    rule = make_rule(Noise(5))
    mean = np.mean([accepted(rule, start) for start in range(40_000)])
    assert mean == pytest.approx(expected, abs=0.015)


def test_block_verification_from_the_end_is_the_papers_from_the_start() -> None:
    rng = np.random.default_rng(3)
    for start in range(2000):
        n = start % 5
        p = [Distribution(None, rng.dirichlet(np.ones(3))) for _ in range(n + 1)]
        qs = tuple(Distribution(None, rng.dirichlet(np.ones(3))) for _ in range(n))
        rules = BlockRule(Noise(1)), StepByStepBlock(Noise(1))
        tokens = tuple(rules[0].draw(q, start, i) for i, q in enumerate(qs))
        proposal = Proposal(tokens, qs, (Source.DRAFT,) * n)
        one, other = (rule.verify(proposal, p.__getitem__, start) for rule in rules)
        assert one == other


def test_block_verification_asks_for_no_distribution_behind_a_hopeless_token() -> None:
    asked: list[int] = []

    def p(i: int) -> Distribution:
        asked.append(i)
        return Distribution.one_hot(0 if i != 1 else 1)

    proposal = Proposal.chosen((0, 0, 0), Source.NGRAM)
    verdict = BlockRule(Noise(1)).verify(proposal, p, 9)
    assert (verdict.accepted, verdict.token) == (1, 1)
    assert asked == [0, 1]


@pytest.mark.parametrize("make_rule", [BlockRule, CoupledRule, RejectionRule])
def test_equal_laws_accept_everything(make_rule: MakeRule) -> None:
    rule = make_rule(Noise(3))
    for start in range(300):
        tokens = tuple(rule.draw(A, start, i) for i in range(3))
        proposal = Proposal(tokens, (A,) * 3, (Source.DRAFT,) * 3)
        assert rule.verify(proposal, lambda i: A, start).accepted == 3


# -- coupled sampling --


@pytest.mark.parametrize("params", [PLAIN, SamplingParams(0.7, 3, 0.9, 0.0)])
def test_text_of_coupled_sampling_is_the_same_with_any_draft_and_gamma(
    params: SamplingParams,
) -> None:
    for seed in range(30):
        plain = Loop(target(), params=params, make_rule=CoupledRule)
        expected = plain.text(PROMPT, max_tokens=25, seed=seed)
        for other in (draft(), near(target()), target()):
            for gamma in (1, 2, 3, 7):
                loop = Loop(target(), other, gamma=gamma, params=params, make_rule=CoupledRule)
                assert loop.text(PROMPT, max_tokens=25, seed=seed) == expected


def test_text_depends_on_the_draft_where_the_noise_belongs_to_a_round() -> None:
    plain = Loop(target(), make_rule=SharesRoundNoise)
    loop = Loop(target(), draft(), gamma=4, make_rule=SharesRoundNoise)
    texts = [(one.text(PROMPT, max_tokens=25, seed=7)) for one in (plain, loop)]
    assert texts[0] != texts[1]


def test_acceptance_of_coupled_sampling_is_what_theory_says() -> None:
    """Of two weight vectors the same token wins with sum_j 1 / sum_k max(p_k/p_j, q_k/q_j)."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    expected = sum(1 / sum(max(p[k] / p[j], q[k] / q[j]) for k in range(3)) for j in range(3))
    rule = CoupledRule(Noise(2))
    one, other = Distribution(None, p), Distribution(None, q)
    stood = [
        rule.verify(
            Proposal((rule.draw(other, start, 0),), (other,), (Source.DRAFT,)), lambda i: one, start
        ).accepted
        for start in range(20_000)
    ]
    assert np.mean(stood) == pytest.approx(expected, abs=0.012)
    overlap = float(np.minimum(p, q).sum())
    assert expected >= overlap / (2 - overlap)  # Daliri et al., theorem 1


def test_winner_does_not_depend_on_how_the_law_is_stored() -> None:
    rng = np.random.default_rng(1)
    rule = CoupledRule(Noise(4))
    for start in range(200):
        weights = rng.random(50).astype(np.float32) * (rng.random(50) < 0.5)
        weights[3] = 0.1
        ids = np.flatnonzero(weights).astype(np.int32)
        dense, sparse = Distribution(None, weights), Distribution(ids, weights[ids])
        assert rule.draw(dense, start, 2) == rule.draw(sparse, start, 2)
        assert weights[rule.draw(dense, start, 2)] > 0


def test_contenders_always_contain_the_winner() -> None:
    rng = np.random.default_rng(2)
    noise, rare = Noise(5), 0
    for position in range(300):
        weights = np.exp(rng.standard_normal(3000) * 3).astype(np.float32)
        weights[rng.random(3000) < 0.2] = 0
        ids = np.arange(3000, dtype=np.int32)
        with np.errstate(divide="ignore"):
            winner = int((noise.exponentials(position, ids) / weights).argmin())
        found = noise.contenders(position, weights)
        assert winner in found
        rare += weights[winner] < 1e-3 * weights.max()
    assert rare > 0


def test_shared_noise_is_exponential_and_independent() -> None:
    noise = Noise(11)
    ids = np.arange(4000)
    numbers = np.concatenate([noise.exponentials(position, ids) for position in range(10)])
    cells = Counter(np.minimum((1 - np.exp(-numbers)) * 50, 49).astype(int).tolist())
    assert fit(cells, dict.fromkeys(range(50), 1 / 50)) > P_MIN
    one, other = noise.exponentials(1, ids), noise.exponentials(2, ids)
    for a, b in ((one, other), (one[:-1], one[1:]), (one, Noise(12).exponentials(1, ids))):
        pairs = (np.exp(-a) * 8).astype(int) * 8 + (np.exp(-b) * 8).astype(int)
        assert fit(Counter(pairs.tolist()), dict.fromkeys(range(64), 1 / 64)) > P_MIN


# -- names --


def test_rules_have_names() -> None:
    assert [check_rule(name) for name in RULES] == ["rejection", "block", "coupled"]
    with pytest.raises(RequestError, match="rule must be block or rejection"):
        check_rule("best")

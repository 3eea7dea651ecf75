"""Rejection sampling on laws small enough to know the answer by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from itertools import combinations, product

import numpy as np
import pytest
from laws import P_MIN, fit
from wrong import AcceptAlways, ByPositionAlone, OneNumberForAll, RedrawFromTarget

from lspec.distribution import Distribution
from lspec.round import Proposal, Source, Verdict
from lspec.verify import Noise, Purpose, RejectionRule, Rule

P, Q = (0.6, 0.4), (0.9, 0.1)

Play = Callable[[Rule, Distribution, Distribution, int], tuple[int, bool | None]]


def dense(*weights: float) -> Distribution:
    return Distribution(None, np.array(weights))


def proposal(*tokens: int, q: Distribution | None) -> Proposal:
    return Proposal(tokens, (q,) * len(tokens), (Source.DRAFT,) * len(tokens))


def verify_one(rule: Rule, token: int, p: Distribution, q: Distribution | None, start: int) -> int:
    """Return the token that stands at `start` when `token` was proposed there."""
    verdict = rule.verify(proposal(token, q=q), lambda i: p, start)
    return token if verdict.accepted else verdict.token


def drawn(rule: Rule, p: Distribution, q: Distribution, start: int) -> tuple[int, bool | None]:
    """Play a round with a token drawn from q; return what was emitted and whether accepted."""
    token = rule.draw(q, start, 0)
    verdict = rule.verify(proposal(token, q=q), lambda i: p, start)
    return (token, True) if verdict.accepted else (verdict.token, False)


def chosen(rule: Rule, p: Distribution, q: Distribution, start: int) -> tuple[int, bool | None]:
    """Play a round with the likeliest token of q, which is chosen: its q is one-hot."""
    verdict = rule.verify(proposal(0, q=None), lambda i: p, start)
    return (0, True) if verdict.accepted else (verdict.token, False)


def chosen_with_ratio(
    rule: Rule, p: Distribution, q: Distribution, start: int
) -> tuple[int, bool | None]:
    """Play a round with the likeliest token as if it had been drawn (trap 2)."""
    return verify_one(rule, 0, p, q, start), None


def discard_unlikely(
    rule: Rule, p: Distribution, q: Distribution, start: int
) -> tuple[int, bool | None]:
    """Drop the drawn token where its own q is below one half (trap 1)."""
    token = rule.draw(q, start, 0)
    if q.prob(token) >= 0.5:
        return verify_one(rule, token, p, q, start), None
    return rule.verify(Proposal(), lambda i: p, start).token, None


def outcome(
    rule: Rule,
    p: tuple[float, ...] = P,
    q: tuple[float, ...] = Q,
    *,
    play: Play = drawn,
    draws: int = 20_000,
) -> tuple[Counter[Hashable], float]:
    """Return how often each token was emitted, and the share of accepted proposals."""
    emitted: Counter[Hashable] = Counter()
    accepted = 0
    target, draft = dense(*p), dense(*q)
    for start in range(draws):
        token, stood = play(rule, target, draft, start)
        emitted[token] += 1
        accepted += bool(stood)
    return emitted, accepted / draws


def law(*p: float) -> dict[Hashable, float]:
    return dict(enumerate(p))


def rule(seed: int = 1) -> RejectionRule:
    return RejectionRule(Noise(seed))


# -- case 1 --


def test_toy_law_is_the_targets_and_acceptance_is_the_overlap() -> None:
    emitted, acceptance = outcome(rule(), draws=200_000)
    assert fit(emitted, law(*P)) > P_MIN
    assert acceptance == pytest.approx(0.70, abs=0.005)


WRONG: dict[str, tuple[Rule, Play, float]] = {
    "accepts always": (AcceptAlways(Noise(1)), drawn, 0.90),
    "redraws from p": (RedrawFromTarget(Noise(1)), drawn, 0.78),
    "discards unlikely": (rule(), discard_unlikely, 0.66),
    "greedy with ratio": (rule(), chosen_with_ratio, 0.667),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_verifiers_fail_the_toy_law(wrong: str) -> None:
    one, play, share = WRONG[wrong]
    emitted, _ = outcome(one, play=play)
    assert fit(emitted, law(*P)) < P_MIN
    assert emitted[0] / emitted.total() == pytest.approx(share, abs=0.015)


@pytest.mark.parametrize("p", [P, (0.2, 0.3, 0.5), (1.0, 0.0)])
def test_equal_laws_accept_everything(p: tuple[float, ...]) -> None:
    emitted, acceptance = outcome(rule(), p, p)
    assert acceptance == 1
    assert fit(emitted, law(*p)) > P_MIN


@pytest.mark.parametrize("p", [P, (0.1, 0.9), (0.05, 0.25, 0.7)])
def test_chosen_token_is_accepted_with_its_probability(p: tuple[float, ...]) -> None:
    emitted, acceptance = outcome(rule(), p, play=chosen)
    assert acceptance == pytest.approx(p[0], abs=0.01)
    assert fit(emitted, law(*p)) > P_MIN


def test_tokens_that_the_draft_never_proposes_are_emitted() -> None:
    p, q = (0.3, 0.3, 0.4), (0.5, 0.5, 0.0)
    emitted, acceptance = outcome(rule(), p, q)
    assert fit(emitted, law(*p)) > P_MIN
    assert acceptance == pytest.approx(0.6, abs=0.01)


def test_tokens_that_the_target_never_emits_are_not() -> None:
    p, q = (0.5, 0.5, 0.0), (0.2, 0.2, 0.6)
    emitted, acceptance = outcome(rule(), p, q)
    assert fit(emitted, law(*p)) > P_MIN
    assert acceptance == pytest.approx(0.4, abs=0.01)


def test_disjoint_laws_accept_nothing_and_emit_p() -> None:
    p, q = (0.3, 0.7, 0.0, 0.0), (0.0, 0.0, 0.5, 0.5)
    emitted, acceptance = outcome(rule(), p, q)
    assert acceptance == 0
    assert fit(emitted, law(*p)) > P_MIN


def test_empty_residual_emits_p_without_a_nan() -> None:
    class Unlucky(Noise):
        def uniform(self, start: int, position: int, purpose: Purpose) -> float:
            number = super().uniform(start, position, purpose)
            return 1.0 if purpose is Purpose.ACCEPT else number  # u*q < p fails for p = q

    emitted, acceptance = outcome(RejectionRule(Unlucky(1)), P, P)
    assert acceptance == 0
    assert fit(emitted, law(*P)) > P_MIN


# -- the rule --


class Fixed(Noise):
    """Always the same number."""

    def __init__(self, number: float) -> None:
        self._number = number

    def uniform(self, start: int, position: int, purpose: Purpose) -> float:
        return self._number


@pytest.mark.parametrize(
    ("u", "p", "q", "accepted"),
    [
        (0.0, 0.0, 1.0, False),  # 0 < 0: what the target never emits is never accepted
        (0.5, 0.5, 1.0, False),  # equal is not below
        (0.499, 0.5, 1.0, True),
        (0.25, 0.25, 0.5, True),
        (0.5, 0.25, 0.5, False),
        (0.999, 0.5, 0.5, True),
        (0.0, 1e-300, 1.0, True),
    ],
)
def test_a_token_stands_where_u_q_is_strictly_below_p(
    u: float, p: float, q: float, accepted: bool
) -> None:
    target, draft = dense(1 - p, p), dense(1 - q, q)
    verdict = RejectionRule(Fixed(u)).verify(proposal(1, q=draft), lambda i: target, 0)
    assert verdict.accepted == accepted


def test_rejected_token_is_replaced_from_the_residual() -> None:
    p, q = dense(0.2, 0.3, 0.5), dense(0.5, 0.4, 0.1)
    for start in range(200):
        verdict = rule().verify(proposal(0, q=q), lambda i: p, start)
        assert verdict.accepted or verdict.token == 2  # p exceeds q for token 2 alone


def test_the_first_rejection_ends_the_round() -> None:
    asked: list[int] = []

    def p(i: int) -> Distribution:
        asked.append(i)
        return dense(1, 0) if i != 2 else dense(0, 1)

    verdict = rule().verify(proposal(0, 0, 0, 0, q=dense(1, 0)), p, 5)
    assert verdict == Verdict(2, 1)
    assert asked == [0, 1, 2]  # each once, in order, and no more than needed


def test_full_acceptance_brings_a_bonus_token() -> None:
    asked: list[int] = []

    def p(i: int) -> Distribution:
        asked.append(i)
        return dense(1, 0) if i < 3 else dense(0, 1)

    assert rule().verify(proposal(0, 0, 0, q=None), p, 5) == Verdict(3, 1)
    assert asked == [0, 1, 2, 3]


def test_empty_proposal_is_a_plain_draw() -> None:
    counts = Counter(
        rule().verify(Proposal(), lambda i: dense(*P), start).token for start in range(20_000)
    )
    assert fit(counts, law(*P)) > P_MIN


def test_whole_rounds_have_the_joint_law() -> None:
    """Three drafted tokens and a bonus; p and q depend on the token before."""
    p = [dense(0.5, 0.3, 0.2), dense(0.1, 0.6, 0.3), dense(0.3, 0.3, 0.4)]
    q = [dense(0.2, 0.3, 0.5), dense(0.5, 0.4, 0.1), dense(0.1, 0.8, 0.1)]

    def first_two(one: Rule, start: int) -> tuple[int, int]:
        tokens: list[int] = []
        qs: list[Distribution] = []
        for i in range(3):
            qs.append(q[tokens[-1] if tokens else 0])
            tokens.append(one.draw(qs[-1], start, i))
        whole = Proposal(tuple(tokens), tuple(qs), (Source.DRAFT,) * 3)
        verdict = one.verify(whole, lambda i: p[tokens[i - 1] if i else 0], start)
        emitted = [*tokens[: verdict.accepted], verdict.token]
        if len(emitted) < 2:
            emitted.append(one.verify(Proposal(), lambda i: p[emitted[0]], start + 1).token)
        return emitted[0], emitted[1]

    expected = {(a, b): p[0].prob(a) * p[a].prob(b) for a, b in product(range(3), repeat=2)}
    samples = 10_000
    right = Counter(first_two(RejectionRule(Noise(seed)), 7) for seed in range(samples))
    assert fit(right, expected) > P_MIN
    shared = Counter(first_two(RejectionRule(OneNumberForAll(seed)), 7) for seed in range(samples))
    assert fit(shared, expected) < P_MIN


# -- noise --


def test_same_address_same_number() -> None:
    assert Noise(3).uniform(1, 2, Purpose.EMIT) == Noise(3).uniform(1, 2, Purpose.EMIT)
    noise = Noise(3)
    before = noise.uniform(1, 2, Purpose.EMIT)
    noise.uniform(9, 9, Purpose.DRAFT)
    assert noise.uniform(1, 2, Purpose.EMIT) == before


def test_another_part_of_the_address_another_number() -> None:
    numbers = {
        Noise(seed).uniform(start, start + offset, purpose)
        for seed in (0, 1, -1, 2**63, 12345678901234567890)
        for start in (0, 1, 2, 1000)
        for offset in range(9)
        for purpose in Purpose
    }
    assert len(numbers) == 5 * 4 * 9 * len(Purpose)
    assert all(0 <= number < 1 for number in numbers)


def test_address_is_the_round_and_the_position() -> None:
    noise, alone = Noise(1), ByPositionAlone(1)
    assert noise.uniform(4, 7, Purpose.DRAFT) != noise.uniform(6, 7, Purpose.DRAFT)
    assert alone.uniform(4, 7, Purpose.DRAFT) == alone.uniform(6, 7, Purpose.DRAFT)


STREAMS: dict[str, Callable[[int], float]] = {
    "seed": lambda i: Noise(i).uniform(3, 3, Purpose.DRAFT),
    "seed, accept": lambda i: Noise(i).uniform(3, 3, Purpose.ACCEPT),
    "seed, emit": lambda i: Noise(i).uniform(3, 3, Purpose.EMIT),
    "seed, next position": lambda i: Noise(i).uniform(3, 4, Purpose.DRAFT),
    "seed, next round": lambda i: Noise(i).uniform(4, 4, Purpose.DRAFT),
    "next seed": lambda i: Noise(i + 1).uniform(3, 3, Purpose.DRAFT),
    "round": lambda i: Noise(0).uniform(i, i, Purpose.DRAFT),
    "position": lambda i: Noise(0).uniform(0, i, Purpose.DRAFT),
    "position, accept": lambda i: Noise(0).uniform(0, i, Purpose.ACCEPT),
}


@pytest.fixture(scope="module")
def streams() -> dict[str, np.ndarray]:
    return {name: np.array([f(i) for i in range(10_000)]) for name, f in STREAMS.items()}


@pytest.mark.parametrize("name", STREAMS)
def test_numbers_are_uniform(name: str, streams: dict[str, np.ndarray]) -> None:
    cells = Counter((streams[name] * 50).astype(int).tolist())
    assert fit(cells, dict.fromkeys(range(50), 1 / 50)) > P_MIN


@pytest.mark.parametrize(("one", "other"), list(combinations(STREAMS, 2)))
def test_streams_are_independent(one: str, other: str, streams: dict[str, np.ndarray]) -> None:
    pairs = (streams[one] * 8).astype(int) * 8 + (streams[other] * 8).astype(int)
    assert fit(Counter(pairs.tolist()), dict.fromkeys(range(64), 1 / 64)) > P_MIN


@pytest.mark.parametrize("name", STREAMS)
def test_neighbours_in_a_stream_are_independent(name: str, streams: dict[str, np.ndarray]) -> None:
    cells = (streams[name] * 8).astype(int)
    pairs = cells[::2] * 8 + cells[1::2]
    assert fit(Counter(pairs.tolist()), dict.fromkeys(range(64), 1 / 64)) > P_MIN

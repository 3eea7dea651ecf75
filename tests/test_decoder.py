"""The round loop over table models: its law, its caches, its ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from laws import P_MIN, fit, joint_law, softmax, truncated
from loop import GREEDY, PLAIN, Loop, joined, never
from table import TableModel
from wrong import (
    AcceptAlways,
    ByPositionAlone,
    ChoosesBestWithRatio,
    ClaimsOtherTemperature,
    DiscardsUnlikely,
    OneNumberForAll,
    RedrawFromTarget,
)

from lspec.controller import Controller, FixedGamma, Outlook, Plan
from lspec.distribution import Distribution
from lspec.drafters import ModelDrafter, NoDrafter
from lspec.errors import DecodeError
from lspec.estimates import confidence
from lspec.model import TokenCache
from lspec.params import SamplingParams
from lspec.round import Proposal, Round, Source, Verdict
from lspec.sampling import ChainSampler
from lspec.truncation import FloatArray
from lspec.verify import Noise, RejectionRule, Rule

PROMPT = (1, 2, 0)
SAMPLES = 3000
GAMMAS = pytest.mark.parametrize("gamma", [1, 4])


def target() -> TableModel:
    return TableModel(seed=1)


def draft() -> TableModel:
    return TableModel(seed=2)


def p_value(loop: Loop, *, samples: int = SAMPLES, **params: float) -> float:
    """Return how well the first three emitted tokens fit the target's law, drawn plainly."""
    settings = {"temperature": 1.0, **params}
    model = loop.target

    def law(prefix: tuple[int, ...]) -> np.ndarray:
        return truncated(model.logits((*PROMPT, *prefix)), **settings)

    return fit(loop.sample(PROMPT, n=3, samples=samples), joint_law(law, 3))


class Chooser:
    """Proposes tokens chosen by `choose(text)`, as a lookup in the text would."""

    seconds = 0.0
    passes = 0
    outlook = Outlook()

    def __init__(self, choose: Callable[[Sequence[int]], int]) -> None:
        self._choose = choose
        self._text: list[int] = []

    def start(self, text: Sequence[int], should_stop: Callable[[], bool]) -> None:
        self._text = list(text)

    def propose(self, start: Proposal, plan: Plan, controller: Controller, rule: Rule) -> Proposal:
        tokens: list[int] = []
        while len(tokens) < plan.gamma and controller.afford(len(tokens)):
            tokens.append(self._choose([*self._text, *tokens]))
        return Proposal(tuple(tokens), (None,) * len(tokens), (Source.DRAFT,) * len(tokens))

    def commit(self, tokens: Sequence[int]) -> None:
        self._text.extend(tokens)


# -- the law --


def test_plain_decoding_has_the_targets_law() -> None:
    assert p_value(Loop(target())) > P_MIN


@GAMMAS
def test_speculative_decoding_has_the_targets_law(gamma: int) -> None:
    assert p_value(Loop(target(), draft(), gamma=gamma)) > P_MIN


@GAMMAS
@pytest.mark.parametrize("temperature", [0.0, 0.3, 3.0])
def test_draft_may_have_its_own_temperature(gamma: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=0, top_p=1, min_p=0)
    assert p_value(Loop(target(), draft(), gamma=gamma, draft_params=params)) > P_MIN


@GAMMAS
def test_top_k_of_the_target_alone(gamma: int) -> None:
    params = SamplingParams(temperature=1, top_k=2, top_p=1, min_p=0)
    loop = Loop(target(), draft(), gamma=gamma, params=params, draft_params=PLAIN)
    assert p_value(loop, top_k=2) > P_MIN


@GAMMAS
def test_top_k_of_the_draft_alone(gamma: int) -> None:
    params = SamplingParams(temperature=1, top_k=2, top_p=1, min_p=0)
    assert p_value(Loop(target(), draft(), gamma=gamma, draft_params=params)) > P_MIN


@GAMMAS
def test_every_truncation_on_both_sides(gamma: int) -> None:
    knobs = {"temperature": 0.8, "top_k": 3, "top_p": 0.9, "min_p": 0.05}
    params = SamplingParams(**knobs)
    assert p_value(Loop(target(), draft(), gamma=gamma, params=params), **knobs) > P_MIN


@GAMMAS
def test_chosen_tokens_have_a_one_hot_q(gamma: int) -> None:
    def make(cache: TokenCache, sampler: object) -> Chooser:
        return Chooser(lambda text: (3 * len(text) + text[-1]) % 4)

    assert p_value(Loop(target(), gamma=gamma, make_drafter=make)) > P_MIN


@GAMMAS
def test_disjoint_supports_reject_everything_and_keep_the_law(gamma: int) -> None:
    def low(prefix: tuple[int, ...]) -> np.ndarray:
        return np.where(np.arange(4) < 2, target_like(prefix), -np.inf)

    def high(prefix: tuple[int, ...]) -> np.ndarray:
        return np.where(np.arange(4) >= 2, target_like(prefix), -np.inf)

    target_like = target().logits
    loop = Loop(TableModel(logits=low), TableModel(logits=high), gamma=gamma)
    assert p_value(loop) > P_MIN
    assert sum(round.accepted for round in loop.rounds(PROMPT, max_tokens=20)) == 0


@GAMMAS
@pytest.mark.parametrize("n_vocab", [3, 6])
def test_draft_vocabulary_may_be_smaller_or_larger(gamma: int, n_vocab: int) -> None:
    small_or_large = TableModel(seed=2, n_vocab=n_vocab)
    assert p_value(Loop(target(), small_or_large, gamma=gamma)) > P_MIN


def test_gamma_may_change_from_round_to_round() -> None:
    class Changing(FixedGamma):
        turn = 0

        def plan(self, limit: int, outlook: Outlook) -> Plan:
            self.turn += 1
            return Plan(min(limit, (2, 0, 1, 4)[self.turn % 4]))

    assert p_value(Loop(target(), draft(), make_controller=Changing)) > P_MIN


def test_drafting_may_stop_where_q_is_flat() -> None:
    class Timid(FixedGamma):
        def go_on(self, row: FloatArray, drafted: int) -> bool:
            return confidence(row) > 0.5

    loop = Loop(target(), draft(), make_controller=Timid)
    assert p_value(loop) > P_MIN
    assert {round.drafted for round in loop.rounds(PROMPT, max_tokens=40)} > {0, 1}


@pytest.mark.parametrize("gamma", [1, 3])
def test_sampler_that_looks_back_sees_what_plain_decoding_shows_it(gamma: int) -> None:
    loop = Loop(target(), draft(), gamma=gamma)
    counts = loop.sample(PROMPT, n=3, samples=SAMPLES, sampler=NoRepeats)
    assert fit(counts, joint_law(NoRepeats.law, 3)) > P_MIN
    forgetful = loop.sample(PROMPT, n=3, samples=SAMPLES, sampler=ForgetsDrafted)
    assert (fit(forgetful, joint_law(NoRepeats.law, 3)) > P_MIN) == (gamma < 1)


class NoRepeats:
    """Penalizes what the answer already has; a stateful Sampler."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def distribution(self, row: FloatArray, drafted: Sequence[int] = ()) -> Distribution:
        return Distribution(None, self.law_of(row, [*self.accepted, *drafted]))

    def forced(self, drafted: Sequence[int] = ()) -> tuple[int, ...]:
        return ()

    def accept(self, tokens: Sequence[int]) -> None:
        self.accepted.extend(tokens)

    @staticmethod
    def law_of(row: FloatArray, history: Sequence[int]) -> np.ndarray:
        return softmax(row - 1.5 * np.bincount(history, minlength=4)[:4])

    @classmethod
    def law(cls, prefix: tuple[int, ...]) -> np.ndarray:
        return cls.law_of(target().logits((*PROMPT, *prefix)), prefix)


class ForgetsDrafted(NoRepeats):
    """The wrong variant: at every row of a round it sees the accepted text alone."""

    def distribution(self, row: FloatArray, drafted: Sequence[int] = ()) -> Distribution:
        return super().distribution(row)


WRONG = {
    "accepts always": {"make_rule": AcceptAlways},
    "redraws from p": {"make_rule": RedrawFromTarget},
    "one number for all": {"make_rule": lambda noise: RejectionRule(OneNumberForAll(7))},
    "discards unlikely": {"make_drafter": DiscardsUnlikely},
    "greedy with ratio": {"make_drafter": ChoosesBestWithRatio},
    "claims another q": {"make_drafter": ClaimsOtherTemperature},
}


@GAMMAS
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_variants_do_not_have_the_targets_law(gamma: int, wrong: str) -> None:
    parts = dict(WRONG[wrong])
    if "make_drafter" in parts:
        kind = parts["make_drafter"]
        parts["make_drafter"] = lambda cache, sampler: kind(cache, sampler, ends=frozenset())
    assert p_value(Loop(target(), draft(), gamma=gamma, **parts)) < P_MIN


# -- why the start of the round belongs to the address of a number --


class Peeking:
    """Plans the second round by what was drafted behind the rejection that ended the first.

    It sees distributions only, as every controller may; but the q of the third token tells which
    the second was.
    """

    def __init__(self, gamma: int) -> None:
        self._second: int | None = None
        self._rounds = 0

    def plan(self, limit: int, outlook: Outlook) -> Plan:
        self._rounds += 1
        if self._rounds == 1:
            return Plan(3)
        return Plan(1 if self._second == 0 else 0)

    def afford(self, drafted: int) -> bool:
        return True

    def go_on(self, row: FloatArray, drafted: int) -> bool:
        if self._rounds == 1 and drafted == 2:
            self._second = 0 if row.argmax() == 0 and confidence(row) > 0.6 else 1
        return True

    def observe(self, round: Round) -> None:
        pass


@pytest.mark.parametrize(("noise", "lossless"), [(Noise, True), (ByPositionAlone, False)])
def test_planning_by_what_was_thrown_away_is_lossless(noise: type[Noise], lossless: bool) -> None:
    p = np.log([0.2, 0.5, 0.3])
    seeds = iter(range(SAMPLES))
    loop = Loop(
        TableModel(n_vocab=3, logits=lambda prefix: p),
        TableModel(
            n_vocab=3,
            logits=lambda prefix: np.log(
                [0.61, 0.29, 0.1] if prefix[-1] == 0 else [0.59, 0.31, 0.1]
            ),
        ),
        make_controller=Peeking,
        make_rule=lambda _: RejectionRule(noise(next(seeds))),
    )
    counts = loop.sample(PROMPT, n=2, samples=SAMPLES)
    assert (fit(counts, joint_law(lambda prefix: np.exp(p), 2)) > P_MIN) == lossless


# -- greedy --


@pytest.mark.parametrize("gamma", [0, 1, 2, 3, 4, 7, 8])
def test_greedy_text_is_the_targets_own(gamma: int) -> None:
    model, text = target(), list(PROMPT)
    for _ in range(40):
        text.append(int(model.logits(text).argmax()))
    loop = Loop(target(), draft(), gamma=gamma, params=GREEDY)
    assert [*PROMPT, *loop.text(PROMPT, max_tokens=40)] == text


def test_same_seed_same_text_and_another_seed_another() -> None:
    loop = Loop(target(), draft())
    text = loop.text(PROMPT, max_tokens=30, seed=5)
    assert loop.text(PROMPT, max_tokens=30, seed=5) == text
    assert Loop(target(), draft()).text(PROMPT, max_tokens=30, seed=5) == text
    assert loop.text(PROMPT, max_tokens=30, seed=6) != text


# -- the end token --

END = 3


def ends_after(n: int) -> Callable[[tuple[int, ...]], np.ndarray]:
    """Return logits whose greedy text is n times token 1, the end token, and on and on."""
    return lambda prefix: np.eye(4)[END if len(prefix) % (n + 1) == n else 1] * 9.0


@pytest.mark.parametrize("n", range(1, 12))
def test_nothing_comes_after_an_accepted_end_token(n: int) -> None:
    model = TableModel(logits=ends_after(n + 1))
    loop = Loop(model, TableModel(logits=ends_after(n + 1)), gamma=8, params=GREEDY)
    loop.ends = frozenset({END})
    rounds = loop.rounds((1,), max_tokens=40)
    assert joined(rounds) == (1,) * n + (END,)
    assert [round.ended for round in rounds] == [False] * (len(rounds) - 1) + [True]
    assert loop.target_cache.tokens == model.seen == [1] * (n + 1)
    assert loop.draft_cache.tokens == [1] * len(loop.draft_cache.tokens)
    assert sum(round.accepted for round in rounds) <= n + 1


def test_end_token_that_the_target_draws_ends_the_text() -> None:
    model = TableModel(logits=ends_after(4))
    loop = Loop(model, TableModel(logits=ends_after(100)), gamma=8, params=GREEDY)
    loop.ends = frozenset({END})
    (round,) = loop.rounds((1,), max_tokens=40)
    assert round.tokens == (1, 1, 1, END)
    assert round.source == (Source.DRAFT,) * 3 + (Source.TARGET,)
    assert (round.accepted, round.rejected, round.ended) == (3, True, True)


def test_nothing_is_drafted_after_an_end_token() -> None:
    loop = Loop(TableModel(), TableModel(logits=ends_after(2)), gamma=8, params=GREEDY)
    loop.ends = frozenset({END})
    round = loop.rounds((1,), max_tokens=40)[0]
    assert round.drafted == round.draft_steps == 2


def test_tail_behind_an_end_token_of_any_drafter_is_not_counted() -> None:
    model = TableModel(logits=ends_after(3))

    def make(cache: TokenCache, sampler: object) -> Chooser:
        return Chooser(lambda text: int(model.logits(tuple(text)).argmax()))

    loop = Loop(model, gamma=6, params=GREEDY, make_drafter=make, ends=frozenset({END}))
    (round,) = loop.rounds((1,), max_tokens=40)
    assert round.tokens == (1, 1, END)
    assert round.accepted == 3
    assert not round.rejected
    assert model.seen == [1, 1, 1]


def test_every_token_of_the_end_set_ends() -> None:
    loop = Loop(target(), draft(), ends=frozenset({2, 3}))
    for seed in range(50):
        text = loop.text(PROMPT, max_tokens=40, seed=seed)
        assert not {2, 3} & set(text[:-1])
        assert text[-1] in {2, 3}


def test_law_with_an_end_token() -> None:
    model = target()
    loop = Loop(model, draft(), ends=frozenset({2}))
    law = joint_law(lambda prefix: softmax(model.logits((*PROMPT, *prefix))), 3, ends=loop.ends)
    assert fit(loop.sample(PROMPT, n=3, samples=SAMPLES), law) > P_MIN


# -- lengths and windows --


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 9, 10, 30])
def test_never_more_tokens_than_asked_for(max_tokens: int) -> None:
    same = TableModel(seed=1)
    for other in (same, draft()):
        rounds = Loop(target(), other, gamma=8).rounds(PROMPT, max_tokens=max_tokens)
        assert len(joined(rounds)) == max_tokens
        assert all(round.tokens for round in rounds)


@pytest.mark.parametrize("length", range(1, 13))
def test_text_ends_where_the_targets_window_is_full(length: int) -> None:
    prompt = (1,) * length
    model = TableModel(seed=1, n_ctx=12)
    loop = Loop(model, TableModel(seed=1), gamma=8)
    assert len(loop.text(prompt, max_tokens=100)) == 12 - length
    assert model.n_past <= 12


@pytest.mark.parametrize("n_ctx", [1, 3, 4, 5, 10])
def test_full_draft_window_goes_on_plainly_and_says_so_once(
    n_ctx: int, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(target(), TableModel(seed=2, n_ctx=n_ctx), gamma=3)
    with caplog.at_level(logging.WARNING, "lspec"):
        rounds = loop.rounds(PROMPT, max_tokens=30)
    assert len(joined(rounds)) == 30
    assert rounds[-1].drafted == 0
    assert len(caplog.records) == 1
    assert str(n_ctx) in caplog.text
    assert loop.rounds(PROMPT, max_tokens=2)[0].drafted == (1 if n_ctx >= 3 else 0)


def test_law_across_the_end_of_the_drafts_window(caplog: pytest.LogCaptureFixture) -> None:
    assert p_value(Loop(target(), TableModel(seed=2, n_ctx=4), gamma=4)) > P_MIN


# -- what is evaluated, and how often --


def test_fully_accepted_drafts_are_evaluated_once_by_both_models() -> None:
    big, small = TableModel(seed=1), TableModel(seed=1)
    rounds = Loop(big, small, gamma=3, params=GREEDY).rounds(PROMPT, max_tokens=24)
    text = (*PROMPT, *joined(rounds))
    assert sum(round.accepted for round in rounds) == 18
    assert sum(big.passes, ()) == text[:-1]
    # The draft never sees the last two: the last drafted token and the bonus have no successor.
    assert sum(small.passes, ()) == text[:-2]


def test_rounds_say_what_they_cost() -> None:
    big, small = target(), draft()
    loop = Loop(big, small, gamma=3)
    loop.rounds(PROMPT, max_tokens=1)
    before = len(big.passes), len(small.passes)
    rounds = loop.rounds((*PROMPT, 3, 3), max_tokens=30)
    assert len(rounds) == len(big.passes) - before[0] - 1  # one pass for what the prompt gained
    assert sum(r.draft_steps for r in rounds) == len(small.passes) - before[1] - 1
    for round in rounds:
        assert round.width == round.drafted + 1
        assert round.accepted + 1 == len(round.tokens) == len(round.source)
        assert round.rejected == (round.accepted < round.drafted)
        assert round.draft_s >= 0
        assert round.target_s > 0


def test_caches_hold_a_prefix_of_the_text_whenever_the_caller_has_control() -> None:
    big, small = target(), draft()
    loop = Loop(big, small, gamma=4)
    decoder = loop.decoder(3)
    decoder.prefill(PROMPT, never)
    text = list(PROMPT)
    for round in decoder.rounds(PROMPT, max_tokens=40, should_stop=never):
        text += round.tokens
        assert loop.target_cache.tokens == big.seen == text[:-1]
        assert loop.draft_cache.tokens == small.seen == text[: small.n_past]
        assert small.n_past >= len(text) - 2


def test_q_is_the_drafts_law_after_the_text_and_the_tokens_before() -> None:
    small, seen = draft(), []

    class Spy(RejectionRule):
        def draw(self, q: Distribution, start: int, drafted: int) -> int:
            token = super().draw(q, start, drafted)
            seen.append((start, drafted, [q.prob(i) for i in range(4)], token))
            return token

    loop = Loop(target(), small, gamma=4, make_rule=Spy)
    text = (*PROMPT, *loop.text(PROMPT, max_tokens=40))
    drafted: list[int] = []
    for start, n, q, token in seen:
        drafted = [*drafted[:n], token]
        expected = softmax(small.logits((*text[:start], *drafted[:n])))
        assert q == pytest.approx(expected, rel=1e-5)


def test_sampler_sees_at_each_row_the_tokens_drafted_before_it() -> None:
    model, events = target(), []

    class Spy(ChainSampler):
        def distribution(self, row: FloatArray, drafted: Sequence[int] = ()) -> Distribution:
            events.append(("row", row.copy(), tuple(drafted)))
            return super().distribution(row, drafted)

        def accept(self, tokens: Sequence[int]) -> None:
            events.append(("accept", tuple(tokens)))

    loop = Loop(model, draft(), gamma=4)
    rounds = loop.rounds(PROMPT, max_tokens=30, sampler=Spy(PLAIN, n_vocab=4))
    text = list(PROMPT)
    for round in rounds:
        rows = []
        while events[0][0] == "row":
            rows.append(events.pop(0))
        assert [len(drafted) for _, _, drafted in rows] == list(range(round.accepted + 1))
        for _, row, drafted in rows:
            assert drafted == round.tokens[: len(drafted)]
            assert (row == model.logits((*text, *drafted))).all()
        assert events.pop(0) == ("accept", round.tokens)  # once per round
        text += round.tokens
    assert not events


def test_drafts_sampler_sees_the_tokens_drafted_before() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    class Spy(ChainSampler):
        def distribution(self, row: FloatArray, drafted: Sequence[int] = ()) -> Distribution:
            seen.append(("row", tuple(drafted)))
            return super().distribution(row, drafted)

        def accept(self, tokens: Sequence[int]) -> None:
            raise AssertionError("the target's sampler alone is told")

    drafter = ModelDrafter(TokenCache(draft()), Spy(PLAIN, n_vocab=4), ends=frozenset())
    drafter.start(PROMPT, never)
    tokens = drafter.propose(Proposal(), Plan(3), FixedGamma(0), RejectionRule(Noise(0))).tokens
    drafter.commit((tokens[0], 3))
    assert seen == [("row", tokens[:n]) for n in range(3)]


@pytest.mark.parametrize("gained", [1, 2, 3, 5])
def test_draft_may_be_told_of_tokens_that_it_did_not_propose(gained: int) -> None:
    model = draft()
    drafter = ModelDrafter(TokenCache(model), ChainSampler(PLAIN, n_vocab=4), ends=frozenset())
    drafter.start(PROMPT, never)
    proposed = drafter.propose(Proposal(), Plan(3), FixedGamma(0), RejectionRule(Noise(0))).tokens
    tokens = tuple((token + 1) % 4 for token in (*proposed, 0, 0))[:gained]
    drafter.commit(tokens)
    assert model.seen == list(PROMPT)
    drafter.propose(Proposal(), Plan(1), FixedGamma(0), RejectionRule(Noise(0)))
    assert model.seen == [*PROMPT, *tokens]


def test_second_request_reuses_the_common_prefix_and_is_right() -> None:
    big, small = target(), draft()
    loop = Loop(big, small)
    first = (*PROMPT, *loop.text(PROMPT, max_tokens=10))
    for prompt in ((*first, 1, 2), first, first[:6], (*first[:4], 3, 3, 3), (2,)):
        loop.text(first, max_tokens=5)
        common = next(
            (i for i, (a, b) in enumerate(zip(first, prompt, strict=False)) if a != b), 99
        )
        before = len(sum(big.passes, ()))
        loop.decoder(0).prefill(prompt, never)
        fresh = len(prompt) - 1 - min(common, len(prompt) - 1, len(first) + 4)
        assert len(sum(big.passes, ())) - before == fresh
        text = loop.text(prompt, max_tokens=8, seed=2)
        assert text == Loop(target(), draft()).text(prompt, max_tokens=8, seed=2)


# -- stopping and failing --


def test_stop_is_heard_between_chunks_of_the_prompt() -> None:
    big, small = TableModel(n_batch=4), TableModel(n_batch=4)
    loop = Loop(big, small, gamma=2)
    answers = iter([False, False, True, True, True])
    assert not loop.decoder(0).prefill((1,) * 30, lambda: next(answers))
    assert [len(tokens) for tokens in big.passes] == [4, 4]
    assert not small.passes
    answers = iter([False] * 6 + [False, True, True])
    assert not loop.decoder(0).prefill((1,) * 30, lambda: next(answers))
    assert [len(tokens) for tokens in small.passes] == [4]
    fresh = Loop(TableModel(n_batch=4), TableModel(n_batch=4), gamma=2)
    assert loop.text((1,) * 30, max_tokens=5) == fresh.text((1,) * 30, max_tokens=5)


def test_stop_is_heard_between_rounds() -> None:
    loop = Loop(target(), draft())
    decoder = loop.decoder(0)
    assert decoder.prefill(PROMPT, never)
    rounds: list[Round] = []
    for round in decoder.rounds(PROMPT, max_tokens=40, should_stop=lambda: len(rounds) == 3):
        rounds.append(round)
    assert len(rounds) == 3


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("whose", ["target", "draft"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), DecodeError("broken")], ids=repr)
def test_failed_pass_leaves_both_caches_in_step(
    whose: str, late: bool, failure: BaseException
) -> None:
    def loop() -> Loop:
        return Loop(TableModel(seed=1, n_batch=4), TableModel(seed=2, n_batch=4), gamma=3)

    prompt = (1, 2, 3, 0, 1, 2)
    expected = loop().text(prompt, max_tokens=30)
    for passes in range(12):
        broken = loop()
        failing = broken.target if whose == "target" else broken.draft
        assert isinstance(failing, TableModel)
        failing.fail_after, failing.fail_late, failing.failure = passes, late, failure
        with pytest.raises(type(failure)):
            broken.rounds(prompt, max_tokens=30)
        for cache in (broken.target_cache, broken.draft_cache):
            assert isinstance(cache.model, TableModel)
            assert cache.tokens == cache.model.seen
        assert broken.text(prompt, max_tokens=30) == expected


@pytest.mark.parametrize("rolls_back", [True, False])
def test_failure_of_the_sampler_is_reported_and_the_next_request_is_right(rolls_back: bool) -> None:
    class Broken(ChainSampler):
        calls = 0

        def distribution(self, row: FloatArray, drafted: Sequence[int] = ()) -> Distribution:
            self.calls += 1
            if self.calls == 4:
                raise DecodeError("broken")
            return super().distribution(row, drafted)

    big = target()
    big.can_roll_back = rolls_back
    loop = Loop(big, draft() if rolls_back else None)
    with pytest.raises(DecodeError, match="broken"):
        loop.rounds(PROMPT, max_tokens=40, sampler=Broken(PLAIN, n_vocab=4))
    assert loop.target_cache.tokens == big.seen
    fresh = Loop(target(), draft() if rolls_back else None)
    assert loop.text(PROMPT, max_tokens=20) == fresh.text(PROMPT, max_tokens=20)


def test_closing_the_generator_leaves_the_caches_in_step() -> None:
    big, small = target(), draft()
    loop = Loop(big, small)
    decoder = loop.decoder(0)
    decoder.prefill(PROMPT, never)
    rounds = decoder.rounds(PROMPT, max_tokens=40, should_stop=never)
    text = [*PROMPT, *next(rounds).tokens]
    rounds.close()
    assert loop.target_cache.tokens == big.seen == text[:-1]
    assert loop.draft_cache.tokens == small.seen == text[: small.n_past]


def test_model_that_cannot_roll_back_decodes_plainly() -> None:
    big = target()
    big.can_roll_back = False
    loop = Loop(big)
    assert loop.text(PROMPT, max_tokens=20) == Loop(target()).text(PROMPT, max_tokens=20)
    assert loop.text((*PROMPT, 3), max_tokens=20) == Loop(target()).text(
        (*PROMPT, 3), max_tokens=20
    )


def test_token_that_repeats_the_rejected_one_is_fed_to_the_draft_again() -> None:
    class Stubborn(RejectionRule):
        def verify(
            self, proposal: Proposal, p: Callable[[int], Distribution], start: int
        ) -> Verdict:
            return (
                Verdict(0, proposal.tokens[0])
                if proposal.tokens
                else super().verify(proposal, p, start)
            )

    big, small = target(), draft()
    loop = Loop(big, small, gamma=4, make_rule=Stubborn)
    assert len(loop.text(PROMPT, max_tokens=10)) == 10


def test_no_drafter_proposes_nothing() -> None:
    drafter = NoDrafter()
    drafter.start(PROMPT, never)
    assert (
        drafter.propose(Proposal(), Plan(4), FixedGamma(0), RejectionRule(Noise(0))) == Proposal()
    )
    drafter.commit((1, 2))
    assert (drafter.seconds, drafter.passes) == (0, 0)


def test_model_drafter_never_asks_for_more_than_the_limit() -> None:
    cache = TokenCache(draft())
    drafter = ModelDrafter(cache, ChainSampler(PLAIN, n_vocab=4), ends=frozenset())
    drafter.start(PROMPT, never)
    for limit in range(5):
        proposal = drafter.propose(Proposal(), Plan(limit), FixedGamma(0), RejectionRule(Noise(0)))
        assert len(proposal.tokens) == len(proposal.q) == len(proposal.source) == limit
        drafter.commit((1,))

"""A simulated session: a controller steers, a made-up pair accepts, a made-up clock runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from lspec.adaptive import AdaptiveGamma
from lspec.controller import Controller, FixedGamma, Outlook
from lspec.costs import Costs
from lspec.model import FloatRow
from lspec.round import Round, Source


def costs(step: float, widths: dict[int, float], draft_widths: dict[int, float]) -> Costs:
    """Costs in target steps: of a draft step, and of wider passes."""
    from lspec.costs import interpolate

    return Costs(interpolate({1: step, **draft_widths}), interpolate({1: 1.0, **widths}))


# A GPU or a memory-bound CPU; two cores with a 4-bit target; with an F16 target whose single steps
# have fast memory; and with slower one.
MEMORY_BOUND = costs(0.1, {9: 1.1, 17: 1.2}, {9: 0.15, 17: 0.2})
COMPUTE_BOUND = costs(0.48, {2: 2.0, 9: 4.5, 17: 7.0}, {2: 1.1, 9: 2.5, 17: 3.2})
CLOSE = costs(0.27, {2: 1.6, 3: 1.78, 5: 2.12, 9: 2.65, 17: 3.8}, {2: 0.52, 9: 0.95, 17: 1.6})
BETWEEN = costs(0.25, {2: 1.3, 5: 1.7, 9: 2.3, 17: 3.6}, {2: 0.45, 9: 1.4, 17: 1.7})


def row_of(confidence: float) -> FloatRow:
    """Return logits of 20 tokens whose likeliest has this probability."""
    row = np.zeros(20, np.float32)
    row[0] = np.log(19 * confidence / (1 - confidence))
    return row


@dataclass
class Session:
    """Plays rounds: `confidence()` of each drafted token is also its chance to be accepted."""

    costs: Costs
    confidence: Callable[[], float]
    match: Callable[[], tuple[int, float]] = lambda: (0, 0.0)  # length, chance of each copied token
    disturbed: float = 0.0  # share of passes that take ten times as long
    seed: int = 1
    pending: int = 1
    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def play(self, controller: Controller, *, tokens: int) -> float:
        """Play until `tokens` more are out; return their tokens per second (target steps)."""
        tokens_before, seconds_before = self.tokens, self.seconds
        while self.tokens < tokens_before + tokens:
            self._round(controller)
        return (self.tokens - tokens_before) / (self.seconds - seconds_before)

    def _round(self, controller: Controller) -> None:
        match, copy_chance = self.match()
        outlook = Outlook(match, min(self.pending, 32))
        plan = controller.plan(16, outlook)
        copied = plan.copied if match else 0
        chances = [copy_chance] * copied
        draft_s, steps = 0.0, 0
        while len(chances) < plan.gamma and controller.afford(len(chances)):
            width = 1 if steps else outlook.pending + copied
            draft_s += self._time(self._draft(width))
            steps += 1
            confidence = self.confidence()
            if not controller.go_on(row_of(confidence), len(chances)):
                break
            chances.append(confidence)
        accepted = next(
            (i for i, chance in enumerate(chances) if self.random.random() >= chance), len(chances)
        )
        rejected = accepted < len(chances)
        target_s = self._time(self.costs.target[len(chances)])
        if steps:
            # A pass whose token was not drawn has read the last one that was.
            self.pending = 2 if len(chances) - copied == steps and not rejected else 1
        else:
            self.pending += accepted + 1
        self.tokens += accepted + 1
        self.seconds += draft_s + target_s
        self.drafted += len(chances)
        controller.observe(
            Round(
                tokens=(0,) * (accepted + 1),
                source=(Source.DRAFT,) * accepted + (Source.TARGET,),
                proposed=(Source.NGRAM,) * copied + (Source.DRAFT,) * (len(chances) - copied),
                accepted=accepted,
                rejected=rejected,
                ended=False,
                width=len(chances) + 1,
                draft_steps=steps,
                draft_s=draft_s,
                target_s=target_s,
            )
        )

    def _draft(self, width: int) -> float:
        assert self.costs.draft is not None
        known = self.costs.draft
        return known[width - 1] if width <= len(known) else known[-1] * width / len(known)

    def _time(self, seconds: float) -> float:
        noise = self.random.uniform(0.9, 1.1)
        return seconds * noise * (10 if self.random.random() < self.disturbed else 1)


def confidences(seed: int, *values: float) -> Callable[[], float]:
    """Return a source of confidences, each of `values` equally often, in random order."""
    draw = random.Random(seed)
    return lambda: draw.choice(values)


def best_fixed(
    costs: Costs, confidence: Callable[[], float], *, tokens: int = 6000
) -> tuple[int, float]:
    """Return the best fixed gamma of 0 to 8 and its tokens per second."""
    rates: Iterator[tuple[int, float]] = (
        (gamma, Session(costs, confidence).play(FixedGamma(gamma), tokens=tokens))
        for gamma in range(9)
    )
    return max(rates, key=lambda item: item[1])


def adaptive(costs: Costs) -> AdaptiveGamma:
    return AdaptiveGamma(costs)

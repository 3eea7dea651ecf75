"""Wrong variants of parts that must be right: each test of a law has to fail for some of them.

A test that cannot tell these from the real thing proves nothing about the real thing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lspec.controller import Controller, Plan
from lspec.distribution import Distribution
from lspec.drafters import ModelDrafter
from lspec.round import Proposal, Source, Verdict
from lspec.verify import BlockRule, CoupledRule, Noise, Purpose, RejectionRule, Rule

TargetLaw = Callable[[int], Distribution]


class AcceptAlways(RejectionRule):
    """Believes the draft."""

    def verify(self, proposal: Proposal, p: TargetLaw, start: int) -> Verdict:
        n = len(proposal.tokens)
        return Verdict(n, self._emit(p(n), start, n))


class RedrawFromTarget(RejectionRule):
    """Draws from p, not from norm(max(0, p - q)), after a rejection."""

    def verify(self, proposal: Proposal, p: TargetLaw, start: int) -> Verdict:
        verdict = super().verify(proposal, p, start)
        if verdict.accepted == len(proposal.tokens):
            return verdict
        return Verdict(verdict.accepted, self._emit(p(verdict.accepted), start, verdict.accepted))


class OneNumberForAll(Noise):
    """Uses one number for drafting, accepting and emitting."""

    def uniform(self, start: int, position: int, purpose: Purpose) -> float:
        return super().uniform(start, position, Purpose.DRAFT)


class ByPositionAlone(Noise):
    """Leaves the start of the round out of the address."""

    def uniform(self, start: int, position: int, purpose: Purpose) -> float:
        return super().uniform(0, position, purpose)


class DiscardsUnlikely(ModelDrafter):
    """Draws a token, then drops it because its q is low (trap 1)."""

    least = 0.4

    def propose(self, start: Proposal, plan: Plan, controller: Controller, rule: Rule) -> Proposal:
        whole = super().propose(start, plan, controller, rule)
        n = 0
        for token, q in zip(whole.tokens, whole.q, strict=True):
            if q is None or q.prob(token) < self.least:
                break
            n += 1
        return Proposal(whole.tokens[:n], whole.q[:n], whole.source[:n])


class ChoosesBestWithRatio(ModelDrafter):
    """Takes the likeliest token but claims to have drawn it from q (trap 2)."""

    def propose(self, start: Proposal, plan: Plan, controller: Controller, rule: Rule) -> Proposal:
        return super().propose(start, plan, controller, _Likeliest())


class ClaimsOtherTemperature(ModelDrafter):
    """Draws from q and claims a flatter one (trap 3)."""

    def propose(self, start: Proposal, plan: Plan, controller: Controller, rule: Rule) -> Proposal:
        whole = super().propose(start, plan, controller, rule)
        flat = tuple(q and Distribution(q.ids, np.sqrt(q.weights)) for q in whole.q)
        return Proposal(whole.tokens, flat, whole.source)


class ForgetsTheDrawn(ModelDrafter):
    """Passes drawn tokens off as chosen ones: accepts with p(x) but drew from q (trap 2)."""

    def propose(self, start: Proposal, plan: Plan, controller: Controller, rule: Rule) -> Proposal:
        whole = super().propose(start, plan, controller, rule)
        return Proposal(whole.tokens, (None,) * len(whole.tokens), (Source.DRAFT,) * len(whole.q))


class StepByStepBlock(BlockRule):
    """Block verification forwards, as the paper writes it: right, with parts to get wrong."""

    most_reach = 1.0

    def verify(self, proposal: Proposal, p: TargetLaw, start: int) -> Verdict:
        n, reach, accepted, rest = len(proposal.tokens), 1.0, 0, p(0)
        if n:
            rest = p(0).excess(self._q(proposal, 0))
        for i in range(1, n + 1):
            token, q = proposal.tokens[i - 1], self._q(proposal, i - 1)
            reach = min(self.most_reach, reach * p(i - 1).prob(token) / q.prob(token))
            if reach == 0:
                break
            left = p(i).excess(self._q(proposal, i), reach) if i < n else p(n)
            if self._accept(i, start) < self.chance(reach, left.total, last=i == n):
                accepted, rest = i, self.rest(p(i), left, proposal, i)
            elif self.stops():
                break
        return Verdict(accepted, self._emit(rest if rest.total else p(accepted), start, accepted))

    @staticmethod
    def _q(proposal: Proposal, i: int) -> Distribution:
        return proposal.q[i] or Distribution.one_hot(proposal.tokens[i])

    def chance(self, reach: float, left: float, *, last: bool) -> float:
        return reach if last else left / max(left, left + 1 - reach) if left else 0.0

    def rest(self, p: Distribution, left: Distribution, proposal: Proposal, i: int) -> Distribution:
        return left

    def stops(self) -> bool:
        return False


class DrawsFromPlainResidual(StepByStepBlock):
    """Draws from norm(max(0, p - q)) where the scaled p is meant."""

    def rest(self, p: Distribution, left: Distribution, proposal: Proposal, i: int) -> Distribution:
        return p.excess(self._q(proposal, i)) if i < len(proposal.tokens) else left


class UsesInnerChanceAtTheEnd(StepByStepBlock):
    """Judges the last token as if another one followed it."""

    def chance(self, reach: float, left: float, *, last: bool) -> float:
        return super().chance(reach, 1.0 if last else left, last=False)


class UnlimitedReach(StepByStepBlock):
    """Lets a likely token make up for what comes before it."""

    most_reach = 10.0


class StopsAtFirstFailure(StepByStepBlock):
    """Ends at the first i that fails, as token by token verification does."""

    def stops(self) -> bool:
        return True


class NoiseWithoutPosition(CoupledRule):
    """Shares the noise between all positions."""

    def _winner(self, distribution: Distribution, position: int) -> int:
        return super()._winner(distribution, 0)


class SharesRoundNoise(CoupledRule):
    """Puts the start of the round into the address of the shared noise."""

    def draw(self, q: Distribution, start: int, drafted: int) -> int:
        return self._winner(q, 1000 * start + drafted)

    def verify(self, proposal: Proposal, p: TargetLaw, start: int) -> Verdict:
        for i, token in enumerate(proposal.tokens):
            choice = self._winner(p(i), 1000 * start + i)
            if choice != token:
                return Verdict(i, choice)
        n = len(proposal.tokens)
        return Verdict(n, self._winner(p(n), 1000 * start + n))


class _Likeliest:
    """A Rule that draws the likeliest token."""

    def draw(self, q: Distribution, start: int, drafted: int) -> int:
        best = int(np.argmax(q.weights))
        return best if q.ids is None else int(q.ids[best])

    def verify(self, proposal: Proposal, p: TargetLaw, start: int) -> Verdict:
        raise NotImplementedError

"""Wrong variants of parts that must be right: each test of a law has to fail for some of them.

A test that cannot tell these from the real thing proves nothing about the real thing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lspec.controller import Controller, Plan
from lspec.drafters import ModelDrafter
from lspec.round import Proposal, Source, Verdict
from lspec.sampling import Distribution
from lspec.verify import Noise, Purpose, RejectionRule, Rule

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

    def propose(self, plan: Plan, controller: Controller, rule: Rule) -> Proposal:
        whole = super().propose(plan, controller, rule)
        n = 0
        for token, q in zip(whole.tokens, whole.q, strict=True):
            if q is None or q.prob(token) < self.least:
                break
            n += 1
        return Proposal(whole.tokens[:n], whole.q[:n], whole.source[:n])


class ChoosesBestWithRatio(ModelDrafter):
    """Takes the likeliest token but claims to have drawn it from q (trap 2)."""

    def propose(self, plan: Plan, controller: Controller, rule: Rule) -> Proposal:
        return super().propose(plan, controller, _Likeliest())


class ClaimsOtherTemperature(ModelDrafter):
    """Draws from q and claims a flatter one (trap 3)."""

    def propose(self, plan: Plan, controller: Controller, rule: Rule) -> Proposal:
        whole = super().propose(plan, controller, rule)
        flat = tuple(q and Distribution(q.ids, np.sqrt(q.weights)) for q in whole.q)
        return Proposal(whole.tokens, flat, whole.source)


class ForgetsTheDrawn(ModelDrafter):
    """Passes drawn tokens off as chosen ones: accepts with p(x) but drew from q (trap 2)."""

    def propose(self, plan: Plan, controller: Controller, rule: Rule) -> Proposal:
        whole = super().propose(plan, controller, rule)
        return Proposal(whole.tokens, (None,) * len(whole.tokens), (Source.DRAFT,) * len(whole.q))


class _Likeliest:
    """A Rule that draws the likeliest token."""

    def draw(self, q: Distribution, start: int, drafted: int) -> int:
        best = int(np.argmax(q.weights))
        return best if q.ids is None else int(q.ids[best])

    def verify(self, proposal: Proposal, p: TargetLaw, start: int) -> Verdict:
        raise NotImplementedError

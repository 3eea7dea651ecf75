"""The controller behind `--gamma auto`: draft while the next token is worth what it costs.

Before a round it compares the expected tokens per second of plain decoding, of a copy and of the
draft model, each at its best length. Inside a round, drafting h more tokens gains the chance that
each is reached and costs draft steps and a wider target pass; with `rate` what the plan promised,
it goes on while

    sum of reach  -  rate * extra seconds  >  0

for some h, which makes E[tokens] / E[seconds] maximal (Dinkelbach 1967). Nothing here depends on a
drawn token before it has been verified, so the output's law is untouched.
"""

from __future__ import annotations

from bisect import bisect_right
from math import prod

from lspec.controller import Outlook, Plan
from lspec.costs import MAX_WIDTH, Costs
from lspec.estimates import Acceptance, PassTimes, confidence
from lspec.model import FloatRow
from lspec.round import Round, Source

# Classes of the draft's confidence and of the length of a match, with what to expect at first.
_CONFIDENCE = (0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.93, 0.98)
_CONFIDENCE_PRIOR = (0.2, 0.3, 0.4, 0.5, 0.65, 0.75, 0.85, 0.92, 0.97)
_MATCH = (2, 3, 4, 6, 10, 18, 34)
_MATCH_PRIOR = (0.2, 0.3, 0.45, 0.6, 0.75, 0.85, 0.92, 0.96)
_MEAN_PRIOR = (0.85,)

_FADE = 0.995  # what is known of copies loses this much per round without one
_LOST = 0.01  # of the time, at most, is lost by probing while decoding is plain
_PROBE = 3  # tokens of a probe
_SURELY_LOST = 0.1  # of what a probe costs: what it will gain is a guess
_PLAIN_EVERY = 50  # rounds, to know what a plain one costs now
_PATIENCE = 1.03  # estimates are noisy: go on drafting until it seems to lose this much
_RISK = 0.05  # of plain decoding's rate: what a longer copy must promise more than a shorter one
_KEPT = 0.9  # of what rounds with the draft model yielded and cost, per such round
_BEST_CASE = 0.92  # a mean acceptance that good pairs reach on easy text


class AdaptiveGamma:
    """Learns over a session; one instance serves request after request."""

    def __init__(self, costs: Costs) -> None:
        """Start from `costs`, measured on this machine."""
        self.costs = costs
        self._target = PassTimes(costs.target)
        self._draft = None if costs.draft is None else PassTimes(costs.draft)
        self._by_confidence = Acceptance(_CONFIDENCE_PRIOR, kept=0.99)
        self._by_match = Acceptance(_MATCH_PRIOR, kept=0.97)
        self._mean = Acceptance(_MEAN_PRIOR, kept=0.98, weight=12)  # of tokens of the draft model
        self._rate = 0.0  # tokens per second that the plan promises: what time is worth
        self._tokens, self._seconds = 0.0, self._target(1)  # of recent rounds with the draft model
        self._since_plain = 0  # rounds
        self._idle_s = 0.0  # plain decoding since the last probe
        self._outlook = Outlook()
        self._limit = 0
        self._drafting = False  # the last plan was to ask the draft model
        self._probing = False
        self._reach = 1.0
        self._kinds: list[int] = []  # confidence class of each token drawn in this round

    def pays_at_best(self) -> bool:
        """Whether the draft model could pay here with an acceptance that good pairs reach."""
        chances = [_BEST_CASE**i for i in range(1, MAX_WIDTH)]
        plain = 1 / self._target(1)
        return self._draft is not None and self._best_model(chances, first_pass=1) > plain

    def plan(self, limit: int, outlook: Outlook) -> Plan:
        """Choose what promises the most tokens per second: plain, a copy, or the draft model."""
        limit = min(limit, MAX_WIDTH - 1)
        self._limit, self._outlook = limit, outlook
        self._reach, self._kinds, self._probing = 1.0, [], False
        self._since_plain += 1
        if self._since_plain > _PLAIN_EVERY:
            return Plan(0)
        plain = 1 / self._target(1)
        copied, copy_rate = self._best_copy()
        model_rate = 0.0
        if outlook.pending:
            chances = [self._mean[0] ** i for i in range(1, limit + 1)]
            model_rate = self._best_model(chances, first_pass=outlook.pending)
            if self._drafting:  # stopping by confidence does better than a fixed length
                model_rate = max(model_rate * _PATIENCE, self._tokens / self._seconds)
        self._rate = max(plain, copy_rate, model_rate)
        if self._rate == copy_rate:
            self._reach = prod(self._by_match[self._match_kind(i)] for i in range(copied))
            return Plan(limit, copied)
        self._drafting = self._rate == model_rate
        if self._drafting:
            self._idle_s = 0.0
            return Plan(limit)
        if self._time_to_probe():
            self._probing, self._idle_s = True, 0.0
            return Plan(min(_PROBE, limit))
        return Plan(0)

    def afford(self, drafted: int) -> bool:
        """Say whether the next draft pass pays, by the chance to get there and what may follow."""
        if not self._outlook.pending:
            return False
        if self._probing or not drafted:
            return True
        first_pass = 1 if self._kinds else self._outlook.pending + drafted
        return self._surplus(self._reach * self._mean[0], drafted, first_pass=first_pass) > 0

    def go_on(self, row: FloatRow, drafted: int) -> bool:
        """Say whether one more token pays, now that the draft's confidence in it is known."""
        kind = bisect_right(_CONFIDENCE, confidence(row))
        reach = self._reach * self._by_confidence[kind]
        if not self._probing and self._surplus(reach, drafted, first_pass=0) <= 0:
            # Not worth verifying, but the look at it tells how the draft fares with this text.
            self._mean.observe(0, self._by_confidence[kind])
            return False
        self._reach = reach
        self._kinds.append(kind)
        return True

    def observe(self, round: Round) -> None:
        """Update times, acceptance and the rate."""
        self._target.observe(round.width, round.target_s)
        if round.width == 1:
            self._since_plain = 0
        if round.draft_steps:
            self._observe_draft(round)
            self._tokens = self._tokens * _KEPT + len(round.tokens)
            self._seconds = self._seconds * _KEPT + round.draft_s + round.target_s
        elif self._draft is not None:
            self._idle_s += round.target_s
        if Source.NGRAM not in round.proposed:
            self._by_match.fade(_FADE)
        kinds = iter(self._kinds)
        for i, source in enumerate(round.proposed[: round.accepted + round.rejected]):
            accepted = i < round.accepted
            if source is Source.NGRAM:
                self._by_match.observe(self._match_kind(i), accepted)
            elif source is Source.DRAFT:
                self._by_confidence.observe(next(kinds), accepted)
                self._mean.observe(0, accepted)
        if self._probing and round.drafted and not round.rejected:
            self._idle_s = float("inf")  # it went well: try again at once

    def _observe_draft(self, round: Round) -> None:
        """Split the draft's seconds into its passes; the first one may have read several tokens."""
        assert self._draft is not None
        first, *others = round.draft_widths(self._outlook.pending)
        expected = self._draft(first) + sum(map(self._draft, others))
        factor = round.draft_s / expected
        self._draft.observe(first, self._draft(first) * factor)
        if others:
            self._draft.observe(others[-1], self._draft(others[-1]) * factor)

    def _best_copy(self) -> tuple[int, float]:
        """Return how many tokens to copy, and the tokens per second of such a round.

        Of lengths that promise nearly as much as the best the shortest: it risks less, and if it
        goes well the next round knows more.
        """
        rates, reach, gain = [0.0], 1.0, 1.0
        for i in range(self._limit if self._outlook.match else 0):
            reach *= self._by_match[self._match_kind(i)]
            gain += reach
            rates.append(gain / self._target(i + 2))
        enough = max(rates) - _RISK / self._target(1)
        return next((n, rate) for n, rate in enumerate(rates) if rate >= enough)

    def _match_kind(self, offset: int) -> int:
        """Return the class of the copied token at `offset`: it is a longer match by then."""
        return bisect_right(_MATCH, self._outlook.match + offset)

    def _best_model(self, chances: list[float], *, first_pass: int) -> float:
        """Return the tokens per second of the best number of drafted tokens.

        `chances` are those of reaching each; `first_pass` is the width of the first draft pass.
        """
        assert self._draft is not None
        best, gain, cost, step = 0.0, 1.0, self._draft(first_pass), self._draft(1)
        for i, chance in enumerate(chances):
            gain += chance
            best = max(best, gain / (cost + self._target(i + 2)))
            cost += step
        return best

    def _surplus(self, chance: float, drafted: int, *, first_pass: int) -> float:
        """Return the largest value, in tokens, of drafting some more after `drafted` tokens.

        The next one is reached with `chance`; `first_pass` is the width of its draft pass, 0 if
        that is paid already.
        """
        assert self._draft is not None
        step, before, mean = self._draft(1), self._target(drafted + 1), self._mean[0]
        cost = self._draft(first_pass) if first_pass else 0.0
        gain, best = 0.0, 0.0
        for width in range(drafted + 2, self._limit + 2):
            gain += chance
            best = max(best, gain - self._rate * (cost + self._target(width) - before))
            chance *= mean
            cost += step
        return best

    def _time_to_probe(self) -> bool:
        """Say whether plain decoding has gone on long enough to pay for a look at the draft."""
        if self._draft is None or not self._outlook.pending or not self.pays_at_best():
            return False
        cost = self._draft(self._outlook.pending) + (_PROBE - 1) * self._draft(1)
        cost += self._target(_PROBE + 1) - self._target(1)
        gain = sum(self._mean[0] ** i for i in range(1, _PROBE + 1)) * self._target(1)
        return max(cost - gain, _SURELY_LOST * cost) <= self._idle_s * _LOST

"""From a row of logits to a distribution over the next token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from lspec.distribution import Distribution, IdArray
from lspec.errors import DecodeError
from lspec.params import SamplingParams
from lspec.truncation import FloatArray, keep

_COLD = 1e-30  # temperatures below are 0: dividing float32 by them would overflow
_HOT = 1e30  # and those above make every token as likely


class Sampler(Protocol):
    """One side of one request: rows of logits in, distributions out.

    Samplers that look back (penalties, grammars) see at position i the accepted text and the
    drafted tokens before i, and nothing else. The draft's sampler shares the text of the target's,
    which alone is told what was accepted.
    """

    def distribution(self, row: FloatArray, drafted: Sequence[int] = ()) -> Distribution:
        """Return the distribution after the accepted text and `drafted`; `row` is (n_vocab,)."""

    def forced(self, drafted: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the tokens that a grammar leaves no choice about after `drafted`; often none."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Take note of the tokens that a round emitted; called once per round."""


class Constraint(Protocol):
    """A grammar that the answer must follow; `drafted` comes after the accepted tokens."""

    def allowed(self, drafted: Sequence[int]) -> IdArray | None:
        """Return the ascending ids that may follow; None for any."""

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that must follow, as far as they are known; often none."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Move on behind `tokens`."""


class ChainSampler:
    """Grammar, logit bias, penalties, truncation, temperature: the chain of SamplingParams."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        n_vocab: int,
        text: Sequence[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        """Sample by `params` among the first `n_vocab` ids, after the prompt `text`."""
        self._params = params
        self._n_vocab = n_vocab
        self._text = list(text) if params.looks_back else []
        self._constraint = constraint
        known = [(token, value) for token, value in dict(params.logit_bias).items()]
        known = [pair for pair in known if pair[0] < n_vocab]
        self._biased = np.array([token for token, _ in known], np.int32)
        self._bias = np.array([value for _, value in known], np.float32)

    def for_draft(self, n_vocab: int) -> ChainSampler:
        """Return the draft's sampler: the same chain over its ids, behind the same text."""
        sampler = ChainSampler(self._params, n_vocab=n_vocab, constraint=self._constraint)
        sampler._text = self._text
        return sampler

    def distribution(self, row: FloatArray, drafted: Sequence[int] = ()) -> Distribution:
        """Return the distribution of one row of float32 logits. Raises DecodeError on NaN."""
        row = self._adjusted(row[: self._n_vocab], drafted)
        allowed = None if self._constraint is None else self._constraint.allowed(drafted)
        if allowed is not None:
            allowed = allowed[: int(np.searchsorted(allowed, self._n_vocab))]
            if not len(allowed):  # a draft that knows none of these: any guess will be rejected
                return Distribution.one_hot(0)
            row = row[allowed]
        best = int(row.argmax())
        top = row[best]
        if not np.isfinite(top):
            raise DecodeError("no token is left to choose: logits are not numbers, or all banned")
        if self._params.temperature < _COLD:
            return Distribution.one_hot(best if allowed is None else int(allowed[best]))
        ids = keep(row, float(top), self._params)
        weights = row - top if ids is None else row[ids] - top
        weights /= np.float32(min(self._params.temperature, _HOT))
        if allowed is not None:
            ids = allowed if ids is None else allowed[ids]
        return Distribution(ids, np.exp(weights, out=weights))

    def forced(self, drafted: Sequence[int] = ()) -> tuple[int, ...]:
        """Return what the grammar forces after `drafted`."""
        return () if self._constraint is None else self._constraint.forced(drafted)

    def accept(self, tokens: Sequence[int]) -> None:
        """Append to the text that penalties and grammar look back at."""
        if self._params.looks_back:
            self._text.extend(tokens)
        if self._constraint is not None:
            self._constraint.accept(tokens)

    def _adjusted(self, row: FloatArray, drafted: Sequence[int]) -> FloatArray:
        """Return `row` with bias and penalties: itself where there are none, else a copy."""
        if not (self._params.looks_back or len(self._biased)):
            return row
        row = row.copy()
        row[self._biased] += self._bias
        if self._params.looks_back:
            self._penalize(row, drafted)
        return row

    def _penalize(self, row: FloatArray, drafted: Sequence[int]) -> None:
        """Lower the logits of what the last tokens contain, in place."""
        params = self._params
        if params.penalty_last_n < 0:
            recent = [*self._text, *drafted]
        else:
            recent = [*self._text[-params.penalty_last_n :], *drafted][-params.penalty_last_n :]
        ids, counts = np.unique(np.array(recent, np.int64), return_counts=True)
        known = ids < self._n_vocab
        ids, counts = ids[known], counts[known]
        logits = row[ids]
        scaled = np.where(
            logits <= 0, logits * params.repeat_penalty, logits / params.repeat_penalty
        )
        row[ids] = scaled - counts * params.frequency_penalty - params.presence_penalty

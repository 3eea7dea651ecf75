"""A distribution over the next token, and drawing from it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WeightArray = npt.NDArray[np.floating]
IdArray = npt.NDArray[np.int32]

_BLOCK = 512  # weights per partial sum of a dense distribution


class Distribution:
    """Probabilities over token ids: `weights` divided by `total`, their sum in float64.

    `ids` is None for the whole vocabulary (weight i belongs to token i), otherwise the ascending
    int32 ids that `weights` belong to; every other token has probability 0.
    """

    __slots__ = ("_sums", "ids", "total", "weights")

    def __init__(self, ids: IdArray | None, weights: WeightArray) -> None:
        self.ids = ids
        self.weights = weights
        if ids is None:
            starts = np.arange(0, len(weights), _BLOCK)
            self._sums = np.add.reduceat(weights, starts, dtype=np.float64)
        else:
            self._sums = weights.astype(np.float64, copy=False)
        self.total = float(self._sums.sum())

    @classmethod
    def one_hot(cls, token: int) -> Distribution:
        """Return the distribution of a token that was chosen, not drawn."""
        return cls(np.array([token], np.int32), np.ones(1))

    def prob(self, token: int) -> float:
        """Return the probability of `token`; 0 for an id that is not among `ids`."""
        if self.ids is None:
            return float(self.weights[token]) / self.total if token < len(self.weights) else 0.0
        i = int(np.searchsorted(self.ids, token))
        found = i < len(self.ids) and self.ids[i] == token
        return float(self.weights[i]) / self.total if found else 0.0

    def draw(self, u: float) -> int:
        """Return the token at quantile `u` in [0, 1): the first whose cumulative sum exceeds it."""
        target = u * self.total
        i = _first_above(self._sums, target)
        if self.ids is not None:
            return int(self.ids[i])
        start = i * _BLOCK
        rest = max(0.0, target - float(self._sums[:i].sum()))
        return start + _first_above(self.weights[start : start + _BLOCK], rest)

    def excess(self, q: Distribution, scale: float = 1.0) -> Distribution:
        """Return max(0, scale * p - q), with p this distribution; `total` is what is left, maybe 0.

        `scale` is above 0. With scale 1, normalised, it is the residual of Leviathan et al. 2023,
        eq. 3.
        """
        if self.ids is None:
            rest = self.weights / np.float64(self.total / scale)
            support = slice(len(q.weights)) if q.ids is None else q.ids
            rest[support] -= q.weights / np.float64(q.total)
        else:
            rest = self.weights / np.float64(self.total / scale) - q.probs(self.ids)
        return Distribution(self.ids, np.maximum(rest, 0.0, out=rest))

    def probs(self, ids: IdArray) -> WeightArray:
        """Return the probabilities of ascending `ids`, float64."""
        weights = np.zeros(len(ids))
        if self.ids is None:
            known = ids < len(self.weights)
            weights[known] = self.weights[ids[known]]
        else:
            at = np.searchsorted(self.ids, ids).clip(max=len(self.ids) - 1)
            known = self.ids[at] == ids
            weights[known] = self.weights[at[known]]
        return weights / self.total


def _first_above(weights: WeightArray, target: float) -> int:
    """Return the first index whose cumulative sum exceeds `target`; never one of weight 0."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    i = int(np.searchsorted(cumulative, target, side="right"))
    return i if i < len(weights) else int(np.flatnonzero(weights)[-1])

"""From a row of logits to a distribution over the next token, and drawing from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lspec.errors import DecodeError, RequestError

FloatArray = npt.NDArray[np.float32]
WeightArray = npt.NDArray[np.floating]
IdArray = npt.NDArray[np.int32]

_BLOCK = 512  # weights per partial sum of a dense distribution
_COLD = 1e-30  # temperatures below are 0: dividing float32 by them would overflow
_HOT = 1e30  # and those above make every token as likely
_GAP = 8.0  # first guess of how far below the largest logit the interesting ones lie


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a row of logits becomes a distribution, in llama.cpp's order and with its defaults.

    Top-k, then top-p of what is left, then min-p, then temperature. `temperature` 0 is greedy;
    `top_k` 0, `top_p` 1 and `min_p` 0 switch a truncation off. Raises RequestError.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature must be 0 or more, not {self.temperature}")
        if self.top_k < 0:
            raise RequestError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1 (off), not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p must be between 0 (off) and 1, not {self.min_p}")


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

    def residual(self, q: Distribution) -> Distribution:
        """Return norm(max(0, p - q)), with p this distribution (Leviathan et al. 2023, eq. 3).

        Where nothing is left (p = q up to rounding) the result is p itself.
        """
        if self.ids is None:
            rest = self.weights / np.float64(self.total)
            support = slice(len(q.weights)) if q.ids is None else q.ids
            rest[support] -= q.weights / np.float64(q.total)
        else:
            rest = self.weights / np.float64(self.total) - q._probs(self.ids)
        np.maximum(rest, 0.0, out=rest)
        return Distribution(self.ids, rest) if rest.any() else self

    def _probs(self, ids: IdArray) -> WeightArray:
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


class Sampler(Protocol):
    """One side of one request: rows of logits in, distributions out.

    Holds what the accepted text implies, so that samplers which look back (penalties, grammars)
    see at position i the accepted text and the drafted tokens before i, and nothing else.
    """

    def distribution(self, row: FloatArray, drafted: Sequence[int] = ()) -> Distribution:
        """Return the distribution after the accepted text and `drafted`; `row` is (n_vocab,)."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Take note of the tokens that a round emitted; called once per round."""


class TruncatingSampler:
    """Temperature, top-k, top-p and min-p: a function of the row alone."""

    def __init__(self, params: SamplingParams, *, n_vocab: int) -> None:
        """Sample by `params` among the first `n_vocab` ids; ids above have probability 0."""
        self._params = params
        self._n_vocab = n_vocab

    def distribution(self, row: FloatArray, drafted: Sequence[int] = ()) -> Distribution:
        """Return the distribution of one row of float32 logits. Raises DecodeError on NaN."""
        row = row[: self._n_vocab]
        best = int(row.argmax())
        top = row[best]
        if not np.isfinite(top):
            raise DecodeError("the model returned logits that are not numbers")
        if self._params.temperature < _COLD:
            return Distribution.one_hot(best)
        ids = _truncate(row, float(top), self._params)
        weights = row - top if ids is None else row[ids] - top
        weights /= np.float32(min(self._params.temperature, _HOT))
        return Distribution(ids, np.exp(weights, out=weights))

    def accept(self, tokens: Sequence[int]) -> None:
        """Do nothing: these samplers do not look back."""


def _first_above(weights: WeightArray, target: float) -> int:
    """Return the first index whose cumulative sum exceeds `target`; never one of weight 0."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    i = int(np.searchsorted(cumulative, target, side="right"))
    return i if i < len(weights) else int(np.flatnonzero(weights)[-1])


def _truncate(row: FloatArray, top: float, params: SamplingParams) -> IdArray | None:
    """Return the ascending ids that top-k, top-p and min-p leave; None if none is switched on."""
    ids: IdArray | None = None
    if 0 < params.top_k < len(row):
        ids = _ids_within(row, top, lambda found: len(found) >= params.top_k)
        ids = _descending(row, ids)[: params.top_k]
    if params.top_p < 1:
        if ids is None:
            mass = params.top_p * float(np.exp(row - top).sum(dtype=np.float64))
            ids = _ids_within(row, top, lambda found: _mass(row[found], top) >= mass)
            ids = _descending(row, ids)
        else:
            mass = params.top_p * _mass(row[ids], top)
        cumulative = np.cumsum(np.exp(row[ids] - top), dtype=np.float64)
        ids = ids[: int(np.searchsorted(cumulative, mass)) + 1]
    if params.min_p > 0:
        least = top + math.log(params.min_p)
        ids = _ids_above(row, least) if ids is None else ids[row[ids] >= least]
    return None if ids is None else np.sort(ids)


def _ids_within(row: FloatArray, top: float, enough: Callable[[IdArray], bool]) -> IdArray:
    """Return the ids less than a gap below `top`; the gap grows until they are `enough`."""
    gap = _GAP
    while gap < 1e4:
        ids = _ids_above(row, top - gap)
        if len(ids) == len(row) or enough(ids):
            return ids
        gap *= 2
    return np.arange(len(row), dtype=np.int32)


def _ids_above(row: FloatArray, least: float) -> IdArray:
    return np.flatnonzero(row >= np.float32(least)).astype(np.int32)


def _descending(row: FloatArray, ids: IdArray) -> IdArray:
    """Sort by logit, largest first; equal ones by id."""
    return ids[np.argsort(-row[ids], kind="stable")]


def _mass(logits: FloatArray, top: float) -> float:
    return float(np.exp(logits - top).sum(dtype=np.float64))

"""Which tokens of a row truncation leaves: top-n-sigma, top-k, typical, top-p, min-p."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lspec.distribution import IdArray
from lspec.params import SamplingParams

FloatArray = npt.NDArray[np.float32]

_GAP = 8.0  # first guess of how far below the largest logit the interesting ones lie


def keep(row: FloatArray, top: float, params: SamplingParams) -> IdArray | None:
    """Return the ascending ids that are left of `row`, whose largest logit is `top`; None: all.

    The order and the meaning of each step are llama.cpp's.
    """
    ids: IdArray | None = None
    if params.top_n_sigma > 0:
        ids = _top_n_sigma(row, top, params.top_n_sigma)
    if 0 < params.top_k < len(row):
        ids = _top_k(row, top, ids, params.top_k)
    if params.typical_p < 1:
        ids = _typical(row, ids, params.typical_p)
    if params.top_p < 1:
        ids = _top_p(row, top, ids, params.top_p)
    if params.min_p > 0:
        best = top if ids is None else float(row[ids].max())
        least = best + math.log(params.min_p)
        ids = _ids_above(row, least) if ids is None else ids[row[ids] >= np.float32(least)]
    return None if ids is None else np.sort(ids)


def _top_n_sigma(row: FloatArray, top: float, n: float) -> IdArray:
    """Keep the logits within `n` standard deviations of the largest (Tang et al. 2024)."""
    finite = row[row > -np.inf]
    return _ids_above(row, top - n * float(finite.std(dtype=np.float64)))


def _top_k(row: FloatArray, top: float, ids: IdArray | None, k: int) -> IdArray:
    """Keep the `k` largest, in descending order."""
    if ids is None:
        ids = _ids_within(row, top, lambda found: len(found) >= k)
    if len(ids) > k:  # on a confident row the gap has grown until it let thousands in
        logits = row[ids]
        ids = ids[logits >= np.partition(logits, -k)[-k]]
    return _descending(row, ids)[:k]


def _typical(row: FloatArray, ids: IdArray | None, p: float) -> IdArray:
    """Keep those whose surprise is nearest the entropy, up to the sum `p` (Meister et al. 2022)."""
    if ids is None:
        ids = np.flatnonzero(row > -np.inf).astype(np.int32)
    logits = row[ids].astype(np.float64)
    logits -= logits.max()
    logits -= math.log(np.exp(logits).sum())
    probs = np.exp(logits)
    entropy = -float(probs @ logits)
    order = np.argsort(np.abs(-logits - entropy), kind="stable")
    enough = int(np.searchsorted(np.cumsum(probs[order]), p, side="right"))
    return ids[order[: enough + 1]]


def _top_p(row: FloatArray, top: float, ids: IdArray | None, p: float) -> IdArray:
    """Keep the likeliest up to the sum `p`, in descending order (Holtzman et al. 2020)."""
    if ids is None:
        mass = p * float(np.exp(row - top).sum(dtype=np.float64))
        ids = _ids_within(row, top, lambda found: _mass(row[found], top) >= mass)
    else:
        mass = p * _mass(row[ids], top)
    ids = _descending(row, ids)
    cumulative = np.cumsum(np.exp(row[ids] - top), dtype=np.float64)
    return ids[: int(np.searchsorted(cumulative, mass)) + 1]


def _ids_within(row: FloatArray, top: float, enough: Callable[[IdArray], bool]) -> IdArray:
    """Return the ids less than a gap below `top`; the gap grows until they are `enough`."""
    gap = _GAP
    while gap < 1e4:
        ids = _ids_above(row, top - gap)
        if len(ids) == len(row) or enough(ids):
            return ids
        gap *= 1.5
    return np.arange(len(row), dtype=np.int32)


def _ids_above(row: FloatArray, least: float) -> IdArray:
    return np.flatnonzero(row >= np.float32(least)).astype(np.int32)


def _descending(row: FloatArray, ids: IdArray) -> IdArray:
    """Sort by logit, largest first; equal ones by id."""
    ids = np.sort(ids)
    return ids[np.argsort(-row[ids], kind="stable")]


def _mass(logits: FloatArray, top: float) -> float:
    return float(np.exp(logits - top).sum(dtype=np.float64))

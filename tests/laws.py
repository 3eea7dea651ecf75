"""Is this sample from that law? Chi-square tests without scipy, and exact laws of few tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

# Tests use fixed seeds: a p-value below this is a fault, not bad luck.
P_MIN = 1e-4

NextLaw = Callable[[tuple[int, ...]], Sequence[float]]


def chi_square_tail(x: float, degrees: int) -> float:
    """Return P(X > x) of a chi-square variable: the regularised upper gamma Q(degrees/2, x/2)."""
    a, z = degrees / 2, x / 2
    if z <= 0 or degrees <= 0:
        return 1.0
    front = math.exp(a * math.log(z) - z - math.lgamma(a))
    if z < a + 1:  # series of the lower tail
        term = total = 1 / a
        n = a
        while abs(term) > abs(total) * 1e-15:
            n += 1
            term *= z / n
            total += term
        return max(0.0, 1 - total * front)
    b, c = z + 1 - a, 1e300  # continued fraction of the upper tail (Lentz)
    d = 1 / b
    h = d
    for i in range(1, 10_000):
        step = -i * (i - a)
        b += 2
        d = 1 / (step * d + b)
        c = b + step / c
        h *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return front * h


def fit(counts: Mapping[Hashable, int], law: Mapping[Hashable, float]) -> float:
    """Return the p-value of `counts` as a sample of `law`; 0 if it holds what cannot happen.

    Cells that expect fewer than 5 are pooled.
    """
    if any(law.get(cell, 0) == 0 for cell, n in counts.items() if n):
        return 0.0
    total = sum(counts.values())
    cells = [(counts.get(cell, 0), total * p) for cell, p in law.items() if p > 0]
    big = [cell for cell in cells if cell[1] >= 5]
    small = [cell for cell in cells if cell[1] < 5]
    if small:
        big.append((sum(n for n, _ in small), sum(e for _, e in small)))
    statistic = sum((n - e) ** 2 / e for n, e in big)
    return chi_square_tail(statistic, len(big) - 1)


def joint_law(
    law: NextLaw, n: int, *, ends: frozenset[int] = frozenset()
) -> dict[tuple[int, ...], float]:
    """Return the probability of every sequence of `n` tokens (shorter where an end token comes)."""
    whole: dict[tuple[int, ...], float] = {}
    growing: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(n):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, weight in growing.items():
            for token, p in enumerate(law(prefix)):
                into = whole if token in ends else longer
                if p > 0:
                    into[(*prefix, token)] = weight * float(p)
        growing = longer
    return whole | growing


def count(samples: Sequence[tuple[int, ...]]) -> Counter[Hashable]:
    """Count equal samples."""
    return Counter(samples)


def softmax(logits: Sequence[float] | np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the probabilities of `logits`, float64."""
    x = np.asarray(logits, np.float64) / temperature
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def truncated(
    row: Sequence[float] | np.ndarray,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Return the law of one row, sorted and in float64: the plain reading of llama.cpp's order.

    Top-k, top-p of what is left, min-p, temperature; equal logits by id. (n_vocab,)
    """
    row = np.asarray(row, np.float64)
    order = np.argsort(-row, kind="stable")
    if temperature == 0:
        return np.eye(1, len(row), int(order[0]))[0]
    if 0 < top_k < len(row):
        order = order[:top_k]
    if top_p < 1:
        weights = softmax(row[order])
        enough = np.flatnonzero(np.cumsum(weights) >= top_p)
        order = order[: enough[0] + 1] if len(enough) else order
    if min_p > 0:
        order = order[row[order] >= row[order[0]] + math.log(min_p)]
    law = np.zeros(len(row))
    law[order] = softmax(row[order], temperature)
    return law

"""What speculative decoding gains in expectation (Leviathan et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence


def tau(alpha: float, gamma: int) -> float:
    """Return the expected number of tokens per round, equation (1) of Leviathan et al. 2023.

    `alpha` is the chance that an examined draft token is accepted, the same at every position, and
    `gamma` the number of drafted tokens: (1 - alpha^(gamma+1)) / (1 - alpha).
    """
    return sum(alpha**i for i in range(gamma + 1))


def improvement_factor(tokens_per_round: float, gamma: float, *, c: float, v: float) -> float:
    """Return how many times faster than plain decoding: tau / (gamma c + v).

    Theorem 3.8 of Leviathan et al. 2023, without its assumption that a verify pass costs as much
    as a single step (v = 1). `gamma` is the number of draft steps of a round, `c` the cost of one
    and `v` that of the verify pass, both in target steps.
    """
    return tokens_per_round / (gamma * c + v)


def best_gamma(alpha: float, *, c: float, v: Sequence[float]) -> int:
    """Return the gamma with the largest improvement factor; the smallest of equals.

    `alpha` is the acceptance rate, `c` the cost of a draft step and `v[gamma]` that of a verify
    pass over gamma + 1 tokens, in target steps, for every gamma from 0 on that can be used.
    """

    def factor(gamma: int) -> float:
        return improvement_factor(tau(alpha, gamma), gamma, c=c, v=v[gamma])

    return max(range(len(v)), key=factor)

"""What a session has learned: how long passes take, and which drafted tokens are accepted."""

from __future__ import annotations

from collections import deque
from statistics import median

import numpy as np

from lspec.costs import Seconds
from lspec.model import FloatRow

_RECENT = 9  # passes of one width whose median counts
_PRIOR_WEIGHT = 4.0


class PassTimes:
    """Seconds of a pass by width: what was measured at load, corrected by what passes take now.

    Medians keep a pass that something else disturbed from counting.
    """

    def __init__(self, measured: Seconds) -> None:
        self._measured = measured
        self._recent: list[deque[float]] = [deque(maxlen=_RECENT) for _ in measured]
        self._drift: deque[float] = deque([1.0], maxlen=15)
        self._expected = list(measured)

    def __call__(self, width: int) -> float:
        """Return the expected seconds of a pass of `width` tokens."""
        last = len(self._expected)
        return self._expected[min(width, last) - 1] * max(1.0, width / last)

    def observe(self, width: int, seconds: float) -> None:
        """Take note of a pass; one that took very long counts as twice what was expected."""
        if width > len(self._measured):
            return
        seconds = min(seconds, 2 * self(width))
        self._recent[width - 1].append(seconds)
        self._drift.append(seconds / self._measured[width - 1])
        drift = median(self._drift)
        for i, (measured, recent) in enumerate(zip(self._measured, self._recent, strict=True)):
            self._expected[i] = median((measured * drift, measured * drift, *recent))


class Acceptance:
    """The chance that a drafted token is accepted, in classes, each a decayed average.

    Only tokens that verification examined count: what lies behind a rejection says nothing.
    """

    def __init__(
        self, prior: tuple[float, ...], *, kept: float, weight: float = _PRIOR_WEIGHT
    ) -> None:
        """Begin with `prior`, as if seen `weight` times.

        An observation keeps `kept` of its weight when the next one comes.
        """
        self._prior = prior
        self._kept = kept
        self._weight = weight
        self._accepted = [p * weight for p in prior]
        self._examined = [weight] * len(prior)

    def __getitem__(self, kind: int) -> float:
        return self._accepted[kind] / self._examined[kind]

    def observe(self, kind: int, accepted: float) -> None:
        """Take note of an examined token of class `kind`: 1 accepted, 0 not, or a chance."""
        self._accepted[kind] = self._accepted[kind] * self._kept + accepted
        self._examined[kind] = self._examined[kind] * self._kept + 1

    def fade(self, kept: float) -> None:
        """Move towards the prior, keeping `kept` of what was learned: old news loses its weight."""
        for kind, prior in enumerate(self._prior):
            self._accepted[kind] = kept * self._accepted[kind] + (1 - kept) * prior * self._weight
            self._examined[kind] = kept * self._examined[kind] + (1 - kept) * self._weight


def confidence(row: FloatRow) -> float:
    """Return the probability of the likeliest token of `row` at temperature 1."""
    shifted = row - row.max()
    return 1.0 / float(np.exp(shifted, out=shifted).sum())

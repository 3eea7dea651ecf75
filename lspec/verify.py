"""Which drafted tokens stand, and what follows them: rejection sampling."""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from hashlib import blake2b
from typing import Protocol

from lspec.round import Proposal, Verdict
from lspec.sampling import Distribution


class Purpose(IntEnum):
    """What a random number is for. Numbers of different purposes are independent."""

    DRAFT = 0
    ACCEPT = 1
    EMIT = 2  # the token after the accepted ones: residual, bonus, or plain decoding


class Noise:
    """Uniform numbers addressed by (seed, round, position, purpose) through a keyed hash.

    There is no running generator: nothing depends on how many numbers were asked for before. The
    round is named by the position at which it starts. It belongs to the address because a token
    drafted behind a rejection is thrown away, but has been seen by whatever plans the next round;
    its number must not be used for the same position again.
    """

    def __init__(self, seed: int) -> None:
        self._key = struct.pack("<Q", int(seed) % 2**64)

    def uniform(self, start: int, position: int, purpose: Purpose) -> float:
        """Return a number in [0, 1) for `position` in the round that starts at `start`."""
        address = struct.pack("<qqq", start, position, purpose)
        digest = blake2b(address, digest_size=8, key=self._key).digest()
        return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Rule(Protocol):
    """A way to draw drafted tokens and to verify them that leaves the target's law unchanged.

    `start` is the position of the first drafted token of the round: the length of the text.
    """

    def draw(self, q: Distribution, start: int, drafted: int) -> int:
        """Return a token drawn from `q`, to stand `drafted` tokens after `start`.

        The only way for a drafter to get a token out of a distribution.
        """

    def verify(self, proposal: Proposal, p: Callable[[int], Distribution], start: int) -> Verdict:
        """Judge a proposal. `p(i)`, 0 <= i <= its length, is the target's distribution after i
        of its tokens; it is asked for only when needed, in ascending order.
        """


class RejectionRule:
    """Token by token rejection sampling (Leviathan et al. 2023, algorithm 1).

    A drafted x is accepted with probability min(1, p(x)/q(x)); the first rejected one is replaced
    by a draw from norm(max(0, p - q)). A token that was chosen has q(x) = 1.
    """

    def __init__(self, noise: Noise) -> None:
        self._noise = noise

    def draw(self, q: Distribution, start: int, drafted: int) -> int:
        """Return a token drawn from `q`, to stand `drafted` tokens after `start`."""
        return q.draw(self._noise.uniform(start, start + drafted, Purpose.DRAFT))

    def verify(self, proposal: Proposal, p: Callable[[int], Distribution], start: int) -> Verdict:
        """Judge a proposal; see Rule.verify."""
        for i, token in enumerate(proposal.tokens):
            target, q = p(i), proposal.q[i] or Distribution.one_hot(token)
            u = self._noise.uniform(start, start + i, Purpose.ACCEPT)
            if not u * q.prob(token) < target.prob(token):
                return Verdict(i, self._emit(target.residual(q), start, i))
        accepted = len(proposal.tokens)
        return Verdict(accepted, self._emit(p(accepted), start, accepted))

    def _emit(self, distribution: Distribution, start: int, offset: int) -> int:
        return distribution.draw(self._noise.uniform(start, start + offset, Purpose.EMIT))

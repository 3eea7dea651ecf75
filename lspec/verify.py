"""Which drafted tokens stand, and what follows them: three rules that keep the target's law."""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from lspec.distribution import Distribution, IdArray, WeightArray
from lspec.round import Proposal, Verdict

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

_UNLIKELY = 1e-3  # of the likeliest weight

RuleName = Literal["rejection", "block", "coupled"]


class Purpose(IntEnum):
    """What a random number is for. Numbers of different purposes are independent."""

    DRAFT = 0
    ACCEPT = 1
    EMIT = 2  # the token after the accepted ones: residual, bonus, or plain decoding
    RACE = 3  # the noise that draft and target share, one number per token id


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

    def exponentials(self, position: int, ids: IdArray) -> WeightArray:
        """Return exponential numbers of mean 1 for token `ids` at `position`, float64."""
        bits = self._bits(position, (ids.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
        return -np.log((bits.astype(np.float64) + 0.5) * 2.0**-53)

    def contenders(self, position: int, weights: WeightArray) -> IdArray:
        """Return the ids x among which exponential(x) / weights[x] is smallest, often a few only.

        An unlikely id wins only with an extreme number, which shows in its bits: no logarithm of
        the whole vocabulary is taken.
        """
        least = _UNLIKELY * float(weights.max())
        likely = np.flatnonzero(weights >= least).astype(np.int32)
        first = float((self.exponentials(position, likely) / weights[likely]).min())
        # -log(u) < least * first needs 1 - u < least * first.
        extreme = max(0, int((1 - least * first) * 2.0**53) - 1)
        bits = self._bits(position, _counters(len(weights)))
        others = np.flatnonzero(bits >= np.uint64(extreme)).astype(np.int32)
        return np.union1d(likely, others[weights[others] > 0])

    def _bits(self, position: int, counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Return 53 random bits for each counter, by SplitMix64 (Steele, Lea, Flood 2014)."""
        address = struct.pack("<qqq", 0, position, Purpose.RACE)
        digest = blake2b(address, digest_size=8, key=self._key).digest()
        z = counters + np.frombuffer(digest, np.uint64)
        for shift, factor in ((np.uint64(30), _MIX_1), (np.uint64(27), _MIX_2)):
            z ^= z >> shift
            z *= factor
        z ^= z >> np.uint64(31)
        z >>= np.uint64(11)
        return z


@lru_cache(maxsize=2)
def _counters(n: int) -> npt.NDArray[np.uint64]:
    return np.arange(1, n + 1, dtype=np.uint64) * _GOLDEN


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


class _DrawingRule:
    """Drafted tokens and what follows them come from independent numbers."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise

    def draw(self, q: Distribution, start: int, drafted: int) -> int:
        """Return a token drawn from `q`, to stand `drafted` tokens after `start`."""
        return q.draw(self._noise.uniform(start, start + drafted, Purpose.DRAFT))

    def _emit(self, distribution: Distribution, start: int, offset: int) -> int:
        return distribution.draw(self._noise.uniform(start, start + offset, Purpose.EMIT))


class RejectionRule(_DrawingRule):
    """Token by token rejection sampling (Leviathan et al. 2023, algorithm 1).

    A drafted x is accepted with probability min(1, p(x)/q(x)); the first rejected one is replaced
    by a draw from norm(max(0, p - q)). A token that was chosen has q(x) = 1.
    """

    def verify(self, proposal: Proposal, p: Callable[[int], Distribution], start: int) -> Verdict:
        """Judge a proposal; see Rule.verify."""
        for i, token in enumerate(proposal.tokens):
            target, q = p(i), proposal.q[i] or Distribution.one_hot(token)
            u = self._noise.uniform(start, start + i, Purpose.ACCEPT)
            if not u * q.prob(token) < target.prob(token):
                rest = target.excess(q)
                return Verdict(i, self._emit(rest if rest.total else target, start, i))
        accepted = len(proposal.tokens)
        return Verdict(accepted, self._emit(p(accepted), start, accepted))


class BlockRule(_DrawingRule):
    """Block verification: the proposal is judged as a whole (Sun et al. 2024, arXiv 2403.10444).

    With r_0 = 1, r_i = min(1, r_(i-1) p(x_i)/q(x_i)) and s_i = sum_x max(0, r_i p(x) - q(x)) after
    i tokens, as many tokens stand as the largest i says for which

        u_i < h_i,   h_i = s_i / (s_i + 1 - r_i)   before the end of the proposal, r_i at its end

    (algorithm 2), and the next token comes from norm(max(0, r_i p - q)), or from p at the end. In
    the mean it accepts at least as many tokens as rejection sampling does. A controller may end the
    proposal if it has seen no more than the tokens so far and what follows from them.
    """

    def verify(self, proposal: Proposal, p: Callable[[int], Distribution], start: int) -> Verdict:
        """Judge a proposal; see Rule.verify. The sums are taken from the end, as far as needed."""
        reach, targets = [1.0], list[Distribution]()
        qs = [
            q or Distribution.one_hot(x) for x, q in zip(proposal.tokens, proposal.q, strict=True)
        ]
        for i, (token, q) in enumerate(zip(proposal.tokens, qs, strict=True)):
            targets.append(p(i))
            reach.append(min(1.0, reach[i] * targets[i].prob(token) / q.prob(token)))
            if reach[-1] == 0:
                break
        if len(reach) > len(qs) and self._accept(len(qs), start) < reach[-1]:
            return Verdict(len(qs), self._emit(p(len(qs)), start, len(qs)))
        for i in range(len(targets) - 1, 0, -1):
            rest = targets[i].excess(qs[i], reach[i])
            if self._accept(i, start) * (rest.total + 1 - reach[i]) < rest.total:
                return Verdict(i, self._emit(rest, start, i))
        rest = targets[0].excess(qs[0])
        return Verdict(0, self._emit(rest if rest.total else targets[0], start, 0))

    def _accept(self, accepted: int, start: int) -> float:
        return self._noise.uniform(start, start + accepted, Purpose.ACCEPT)


class CoupledRule:
    """Draft and target share the noise (Daliri, Musco, Suresh 2024, arXiv 2408.07978).

    Both sides choose the token that wins a race: x with weight w(x) arrives at e(x) / w(x), where
    e(x) is exponential noise addressed by (seed, position, x) alone; the first one has the law w
    (the Gumbel-max trick). A drafted token stands if the target chooses the same. So what is
    emitted is the target's own choice: the same text for any draft, any gamma, and none.
    """

    def __init__(self, noise: Noise) -> None:
        self._noise = noise

    def draw(self, q: Distribution, start: int, drafted: int) -> int:
        """Return the winner among `q` at the position `drafted` after `start`."""
        return self._winner(q, start + drafted)

    def verify(self, proposal: Proposal, p: Callable[[int], Distribution], start: int) -> Verdict:
        """Judge a proposal; see Rule.verify."""
        for i, token in enumerate(proposal.tokens):
            choice = self._winner(p(i), start + i)
            if choice != token:
                return Verdict(i, choice)
        accepted = len(proposal.tokens)
        return Verdict(accepted, self._winner(p(accepted), start + accepted))

    def _winner(self, distribution: Distribution, position: int) -> int:
        ids, weights = distribution.ids, distribution.weights
        if ids is None:
            ids = self._noise.contenders(position, weights)
            weights = weights[ids]
        if len(ids) == 1:
            return int(ids[0])
        with np.errstate(divide="ignore"):
            return int(ids[(self._noise.exponentials(position, ids) / weights).argmin()])


RULES: dict[RuleName, Callable[[Noise], Rule]] = {
    "rejection": RejectionRule,
    "block": BlockRule,
    "coupled": CoupledRule,
}

"""The data of one round: what was proposed, what verification said, and what happened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from lspec.distribution import Distribution

MAX_GAMMA = 16  # drafted tokens per round


class Source(StrEnum):
    """Where a token came from."""

    DRAFT = "draft"  # the draft model
    NGRAM = "ngram"  # copied from where the text said the same before
    GRAMMAR = "grammar"  # forced: the grammar leaves no choice
    TARGET = "target"  # the target: after a rejection, as the bonus, or in plain decoding


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens with the distributions that they were really drawn from.

    `q[i]` is None where token i was chosen, not drawn (copied, or forced): its q is one-hot.
    """

    tokens: tuple[int, ...] = ()
    q: tuple[Distribution | None, ...] = ()
    source: tuple[Source, ...] = ()

    @classmethod
    def chosen(cls, tokens: tuple[int, ...], source: Source) -> Proposal:
        """Return a proposal of chosen tokens."""
        return cls(tokens, (None,) * len(tokens), (source,) * len(tokens))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first `accepted` tokens of the proposal stand; `token` follows them.

    `token` was drawn from the residual where the proposal is longer than `accepted`, and is the
    bonus of a proposal accepted in full (or of an empty one) otherwise.
    """

    accepted: int
    token: int


class Plain(StrEnum):
    """Why a round drafted nothing."""

    OFF = "off"  # asked for: no drafter, or gamma 0
    LAST = "last"  # one token is left to emit
    COST = "cost"  # the controller expects that drafting does not pay
    SOURCE = "source"  # nothing to draft from: no match, a full window, or an unsure draft


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the target's own logits, and the k likeliest there."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, log-probability), the likeliest first


@dataclass(frozen=True, slots=True)
class Round:
    """One draft and verify cycle: the event that chat, statistics, bench and server read."""

    tokens: tuple[int, ...]  # emitted; an end-of-generation token can only be the last
    source: tuple[Source, ...]  # of each emitted token
    proposed: tuple[Source, ...]  # of each drafted token
    accepted: int
    rejected: bool  # False: every drafted token was accepted, or there was none
    ended: bool  # the last emitted token is an end-of-generation token
    width: int  # rows of the target pass
    draft_steps: int  # passes of the draft model, catching up included
    draft_s: float  # seconds inside the draft's passes
    target_s: float  # seconds inside the target's pass
    plain: Plain | None = None  # why nothing was drafted
    logprobs: tuple[TokenLogprob, ...] = ()  # of the emitted tokens, where they were asked for

    @property
    def drafted(self) -> int:
        """Number of drafted tokens."""
        return len(self.proposed)

    def draft_widths(self, pending: int) -> Iterator[int]:
        """Yield the tokens of each pass of the draft model; the first reads `pending` as well.

        Chosen tokens (copied, forced) are read by the pass that follows them.
        """
        passes = self.draft_steps
        for source in self.proposed:
            if source is Source.DRAFT and passes:
                yield pending
                passes, pending = passes - 1, 0
            pending += 1
        if passes:  # the last one, after which nothing was drawn
            yield pending

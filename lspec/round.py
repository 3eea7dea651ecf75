"""The data of one round: what was proposed, what verification said, and what happened."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lspec.sampling import Distribution


class Source(StrEnum):
    """Where a token came from."""

    DRAFT = "draft"  # the draft model
    NGRAM = "ngram"  # copied from where the text said the same before
    TARGET = "target"  # the target: after a rejection, as the bonus, or in plain decoding


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens with the distributions that they were really drawn from.

    `q[i]` is None where token i was chosen, not drawn (copied, or forced): its q is one-hot.
    """

    tokens: tuple[int, ...] = ()
    q: tuple[Distribution | None, ...] = ()
    source: tuple[Source, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first `accepted` tokens of the proposal stand; `token` follows them.

    `token` was drawn from the residual where the proposal is longer than `accepted`, and is the
    bonus of a proposal accepted in full (or of an empty one) otherwise.
    """

    accepted: int
    token: int


@dataclass(frozen=True, slots=True)
class Round:
    """One draft and verify cycle: the event that chat, statistics, bench and server read."""

    tokens: tuple[int, ...]  # emitted; an end-of-generation token can only be the last
    source: tuple[Source, ...]  # of each emitted token
    drafted: int
    copied: int  # of the drafted tokens, the first ones: they came from n-gram lookup
    accepted: int
    rejected: bool  # False: every drafted token was accepted, or there was none
    ended: bool  # the last emitted token is an end-of-generation token
    width: int  # rows of the target pass
    draft_steps: int  # passes of the draft model, catching up included
    draft_s: float  # seconds inside the draft's passes
    target_s: float  # seconds inside the target's pass

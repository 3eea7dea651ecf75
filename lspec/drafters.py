"""Who proposes the next tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from lspec.model import TokenCache, common_prefix
from lspec.round import Proposal, Source
from lspec.sampling import Distribution, Sampler
from lspec.verify import Rule

log = logging.getLogger("lspec")

GoOn = Callable[[Distribution | None, int], bool]


class Drafter(Protocol):
    """Proposes tokens to follow the text that it has been given.

    `seconds` and `passes` count what its model has cost since it was loaded.
    """

    @property
    def seconds(self) -> float: ...  # noqa: D102
    @property
    def passes(self) -> int: ...  # noqa: D102

    def start(self, text: Sequence[int], should_stop: Callable[[], bool]) -> None:
        """Take `text` as the text so far; `should_stop` is read between passes over it."""

    def propose(self, limit: int, go_on: GoOn, rule: Rule) -> Proposal:
        """Return at most `limit` tokens; `go_on` sees each q before the draw, never the token."""

    def commit(self, tokens: Sequence[int]) -> None:
        """Append what the round emitted and forget drafted tokens that were not."""


class NoDrafter:
    """Proposes nothing: plain decoding."""

    seconds = 0.0
    passes = 0

    def start(self, text: Sequence[int], should_stop: Callable[[], bool]) -> None:
        """Do nothing."""

    def propose(self, limit: int, go_on: GoOn, rule: Rule) -> Proposal:
        """Return an empty proposal."""
        return Proposal()

    def commit(self, tokens: Sequence[int]) -> None:
        """Do nothing."""


class ModelDrafter:
    """Draws from a small model, one pass per token.

    Its cache holds a prefix of the text and, while it proposes, the drafted tokens but the last.
    What the text gained since (the bonus token, tokens of plain rounds) is fed before the next
    proposal. Where its window is full it proposes nothing, and says so once.
    """

    def __init__(self, cache: TokenCache, sampler: Sampler, *, ends: frozenset[int]) -> None:
        """Draft with `cache`'s model; nothing is drafted after one of the tokens `ends`."""
        self._cache = cache
        self._sampler = sampler
        self._ends = ends
        self._text: list[int] = []
        self._window_full = False

    @property
    def seconds(self) -> float:
        """Seconds inside the draft model's passes."""
        return self._cache.seconds

    @property
    def passes(self) -> int:
        """Number of the draft model's passes."""
        return self._cache.passes

    def start(self, text: Sequence[int], should_stop: Callable[[], bool]) -> None:
        """Take `text` as the text so far and evaluate all of it but the last token."""
        self._text = self._known(text)
        self._window_full = False
        self._cache.reuse(self._text[:-1])
        if self._room() > 0:
            self._cache.catch_up(self._text[:-1], should_stop)

    def propose(self, limit: int, go_on: GoOn, rule: Rule) -> Proposal:
        """Draw up to `limit` tokens, each from the distribution after the ones before it."""
        limit = min(limit, self._room())
        tokens: list[int] = []
        q: list[Distribution] = []
        while len(tokens) < limit and not (tokens and tokens[-1] in self._ends):
            row = self._cache.logits_after([*self._text, *tokens])
            distribution = self._sampler.distribution(row, tokens)
            if not go_on(distribution, len(tokens)):
                break
            tokens.append(rule.draw(distribution, len(self._text), len(tokens)))
            q.append(distribution)
        return Proposal(tuple(tokens), tuple(q), (Source.DRAFT,) * len(tokens))

    def commit(self, tokens: Sequence[int]) -> None:
        """Append what the round emitted; the cache keeps what it shares with the new text."""
        known = min(len(self._text), len(self._cache.tokens))
        self._text.extend(self._known(tokens))
        shared = common_prefix(self._cache.tokens, self._text, known)
        self._cache.truncate(min(shared, len(self._text) - 1))  # the last one's logits are needed
        self._sampler.accept(tokens)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Put another id where the draft model's smaller vocabulary has none."""
        n_vocab = self._cache.model.n_vocab
        return [token if token < n_vocab else 0 for token in tokens]

    def _room(self) -> int:
        """Return how many tokens can be drafted: the last of them is never evaluated here."""
        room = self._cache.model.n_ctx - len(self._text) + 1
        if room <= 0 and not self._window_full:
            self._window_full = True
            log.warning(
                "the draft model's window of %d tokens is full: going on without it",
                self._cache.model.n_ctx,
            )
        return room

"""Who proposes the next tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from lspec.controller import Controller, Outlook, Plan
from lspec.lookup import SuffixIndex
from lspec.model import TokenCache, common_prefix
from lspec.round import Proposal, Source
from lspec.sampling import Sampler
from lspec.verify import Rule

log = logging.getLogger("lspec")

# A draft model that has fallen further behind than this reads only the last tokens: its guesses
# get a little worse, which costs less than reading a text that was decoded without it.
MAX_PENDING, KEPT = 64, 32


class Drafter(Protocol):
    """Proposes tokens to follow the text that it has been given.

    `seconds` and `passes` count what its model has cost since it was loaded.
    """

    @property
    def seconds(self) -> float: ...  # noqa: D102
    @property
    def passes(self) -> int: ...  # noqa: D102
    @property
    def outlook(self) -> Outlook:
        """What it could do next."""

    def start(self, text: Sequence[int], should_stop: Callable[[], bool]) -> None:
        """Begin a request with `text`; `should_stop` is read before every pass of it."""

    def propose(self, start: Proposal, plan: Plan, controller: Controller, rule: Rule) -> Proposal:
        """Continue `start` up to `plan.gamma` tokens in all, as far as `controller` goes along."""

    def commit(self, tokens: Sequence[int]) -> None:
        """Append what the round emitted and forget drafted tokens that were not."""


class NoDrafter:
    """Proposes nothing: plain decoding."""

    seconds = 0.0
    passes = 0
    outlook = Outlook()

    def start(self, text: Sequence[int], should_stop: Callable[[], bool]) -> None:
        """Do nothing."""

    def propose(self, start: Proposal, plan: Plan, controller: Controller, rule: Rule) -> Proposal:
        """Return `start`."""
        return start

    def commit(self, tokens: Sequence[int]) -> None:
        """Do nothing."""


class LookupDrafter:
    """Copies what followed the end of the text when it occurred before; needs no model.

    Its tokens are chosen, not drawn: each has a one-hot q (Saxena 2023, prompt lookup decoding).
    """

    seconds = 0.0
    passes = 0

    def __init__(self) -> None:
        self._index = SuffixIndex()

    @property
    def outlook(self) -> Outlook:
        """The length of the match."""
        return Outlook(match=self._index.match)

    def start(self, text: Sequence[int], should_stop: Callable[[], bool]) -> None:
        """Index `text`, or only what it adds to the text of the last request."""
        known = len(self._index.tokens)
        if common_prefix(self._index.tokens, text) < known:
            known, self._index = 0, SuffixIndex()
        self._index.extend(text[known:])

    def propose(self, start: Proposal, plan: Plan, controller: Controller, rule: Rule) -> Proposal:
        """Copy `plan.copied` tokens, which follow the text and not what `start` has."""
        if start.tokens:
            return start
        return Proposal.chosen(self._index.propose(plan.copied), Source.NGRAM)

    def commit(self, tokens: Sequence[int]) -> None:
        """Append what the round emitted."""
        self._index.extend(tokens)


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
        self._skipped = 0  # tokens of the text that the model never gets to see
        self._window_full = False
        self._should_stop: Callable[[], bool] = lambda: False

    @property
    def seconds(self) -> float:
        """Seconds inside the draft model's passes."""
        return self._cache.seconds

    @property
    def passes(self) -> int:
        """Number of the draft model's passes."""
        return self._cache.passes

    @property
    def outlook(self) -> Outlook:
        """How many tokens the model has to read first; none where its window is full."""
        if self._room() <= 0:
            return Outlook()
        pending = len(self._text) - len(self._cache.tokens)
        return Outlook(pending=pending if pending <= MAX_PENDING else KEPT)

    def start(self, text: Sequence[int], should_stop: Callable[[], bool]) -> None:
        """Take `text` as the text so far and evaluate all of it but the last token."""
        self._text = self._known(text)
        self._skipped = 0
        self._window_full = False
        self._should_stop = should_stop
        self._cache.reuse(self._text[:-1])
        if self._room() > 0:
            self._cache.catch_up(self._text[:-1], should_stop)

    def propose(self, start: Proposal, plan: Plan, controller: Controller, rule: Rule) -> Proposal:
        """Draw tokens, each from the distribution after those before it; forced ones are free."""
        limit = min(plan.gamma, self._room())
        tokens, q, source = list(start.tokens), list(start.q), list(start.source)
        while len(tokens) < limit and not (tokens and tokens[-1] in self._ends):
            if tokens and (forced := self._sampler.forced(tokens)[: limit - len(tokens)]):
                tokens += forced
                q += [None] * len(forced)
                source += [Source.GRAMMAR] * len(forced)
                continue
            if self._should_stop() or not controller.afford(len(tokens)):
                break
            self._skip()
            row = self._cache.logits_after([*self._text, *self._known(tokens)])
            if not controller.go_on(row, len(tokens)):
                break
            distribution = self._sampler.distribution(row, tokens)
            tokens.append(rule.draw(distribution, len(self._text) + self._skipped, len(tokens)))
            q.append(distribution)
            source.append(Source.DRAFT)
        return Proposal(tuple(tokens), tuple(q), tuple(source))

    def commit(self, tokens: Sequence[int]) -> None:
        """Append what the round emitted; the cache keeps what it shares with the new text."""
        known = min(len(self._text), len(self._cache.tokens))
        self._text.extend(self._known(tokens))
        shared = common_prefix(self._cache.tokens, self._text, known)
        self._cache.truncate(min(shared, len(self._text) - 1))  # the last one's logits are needed

    def _skip(self) -> None:
        """Leave out what lies too far behind; the law of the output does not depend on q."""
        start = len(self._cache.tokens)
        pending = len(self._text) - start
        if pending > MAX_PENDING:
            del self._text[start : start + pending - KEPT]
            self._skipped += pending - KEPT

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


class HybridDrafter:
    """Copies first, where the plan says so, and lets a model go on from there."""

    def __init__(self, lookup: LookupDrafter, model: ModelDrafter) -> None:
        self._lookup = lookup
        self._model = model

    @property
    def seconds(self) -> float:
        """Seconds inside the draft model's passes."""
        return self._model.seconds

    @property
    def passes(self) -> int:
        """Number of the draft model's passes."""
        return self._model.passes

    @property
    def outlook(self) -> Outlook:
        """The match of the one and what the other has to read."""
        return Outlook(self._lookup.outlook.match, self._model.outlook.pending)

    def start(self, text: Sequence[int], should_stop: Callable[[], bool]) -> None:
        """Begin a request with `text`."""
        self._lookup.start(text, should_stop)
        self._model.start(text, should_stop)

    def propose(self, start: Proposal, plan: Plan, controller: Controller, rule: Rule) -> Proposal:
        """Copy `plan.copied` tokens and draw the rest, up to `plan.gamma` in all."""
        copied = self._lookup.propose(start, plan, controller, rule)
        return self._model.propose(copied, plan, controller, rule)

    def commit(self, tokens: Sequence[int]) -> None:
        """Append what the round emitted."""
        self._lookup.commit(tokens)
        self._model.commit(tokens)

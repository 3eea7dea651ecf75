"""What the round loop asks of a language model, and a model together with its cached tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lspec.errors import RollbackError

FloatRow = npt.NDArray[np.float32]
FloatRows = npt.NDArray[np.float32]


class LanguageModel(Protocol):
    """A causal model with a cache of the tokens that it has seen."""

    @property
    def n_vocab(self) -> int:
        """Number of token ids that mean something; rows of logits are this wide."""

    @property
    def n_ctx(self) -> int:
        """The window: the most tokens that a text may have."""

    @property
    def n_batch(self) -> int:
        """The most tokens that one pass takes."""

    @property
    def n_past(self) -> int:
        """Number of tokens in the cache."""

    def eval(self, tokens: Sequence[int], *, rows: int) -> FloatRows:
        """Append `tokens` to the cache in one pass; return the logits after the last `rows`.

        The result is float32 (rows, n_vocab): a view, valid until this model's next `eval`.
        Raises DecodeError.
        """

    def truncate(self, n_past: int) -> None:
        """Cut the cache back to its first `n_past` tokens. Raises RollbackError."""


class TokenCache:
    """A model and the ids in its cache, so that a text which begins the same is not read twice.

    `seconds` and `passes` count what the model has cost since it was loaded.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.seconds = 0.0
        self.passes = 0

    def eval(self, tokens: Sequence[int], *, rows: int) -> FloatRows:
        """Evaluate `tokens` in one timed pass; see LanguageModel.eval."""
        started = perf_counter()
        try:
            result = self.model.eval(tokens, rows=rows)
        except BaseException:
            self._go_back(len(self.tokens))  # the pass may have left tokens behind
            raise
        self.tokens.extend(tokens)
        self.seconds += perf_counter() - started
        self.passes += 1
        return result

    def truncate(self, n_past: int) -> None:
        """Cut back to the first `n_past` tokens. Raises RollbackError."""
        self.model.truncate(n_past)
        del self.tokens[n_past:]

    def reuse(self, text: Sequence[int]) -> int:
        """Keep the longest common prefix of cache and `text`; return its length.

        A model that cannot cut its cache back to there starts anew.
        """
        self._go_back(common_prefix(self.tokens, text))
        return len(self.tokens)

    def _go_back(self, n_past: int) -> None:
        try:
            self.truncate(n_past)
        except RollbackError:
            self.truncate(0)

    def catch_up(
        self, text: Sequence[int], should_stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Evaluate what the cache lacks of `text`, asking for no logits, in passes of n_batch.

        The cache must hold a prefix of `text`. Returns False if `should_stop` ended it early.
        """
        while len(self.tokens) < len(text):
            if should_stop():
                return False
            start = len(self.tokens)
            self.eval(text[start : min(start + self.model.n_batch, len(text))], rows=0)
        return True

    def logits_after(self, text: Sequence[int]) -> FloatRow:
        """Evaluate what the cache lacks of `text`; return the logits after its last token.

        The cache must hold a prefix of `text`, not all of it. The result has shape (n_vocab,).
        """
        self.catch_up(text[: max(len(self.tokens), len(text) - self.model.n_batch)])
        row: FloatRow = self.eval(text[len(self.tokens) :], rows=1)[0]
        return row


def common_prefix(a: Sequence[int], b: Sequence[int], start: int = 0) -> int:
    """Return the length of the common prefix of `a` and `b`; the first `start` are known equal."""
    n = start
    for x, y in zip(a[start:], b[start:], strict=False):
        if x != y:
            break
        n += 1
    return n


def rolls_back(model: LanguageModel, *, depth: int) -> bool:
    """Try whether `model` forgets `depth` tokens as if it had never seen them; leaves it empty.

    As in a round, they are the end of a pass of `depth` + 1 tokens. The logits after what is left
    and one more token must be the same as without them.
    """
    prefix, kept, detour, last = [1, 2], [3], [4] * depth, [5]

    def logits(*passes: list[int]) -> FloatRows:
        model.truncate(0)
        for tokens in passes:
            model.eval(tokens, rows=0)
        model.truncate(len(prefix + kept))
        return model.eval(last, rows=1).copy()

    try:
        fresh, returned = logits(prefix, kept), logits(prefix, kept + detour)
    except RollbackError:
        return False
    finally:
        model.truncate(0)
    return bool(np.abs(fresh - returned).max() <= 1e-2 * np.ptp(fresh))

"""Exact mode: every pass that returns logits has a width of one class.

llama.cpp's logits depend on how many tokens a pass has. Widths whose logits agree bit for bit form
a class (lspec.widths finds them); a model that keeps to one class gives the same logits for the
same text, however many tokens were drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lspec.model import FloatRows, LanguageModel, TokenCache, common_prefix


class ExactModel:
    """A LanguageModel that pads narrower passes with tokens that are thrown away again."""

    def __init__(self, model: LanguageModel, widths: Sequence[int]) -> None:
        """Keep to `widths`, ascending; `model` has cells for one more pass beyond its window."""
        self._model = model
        self.widths = tuple(widths)

    @property
    def n_vocab(self) -> int:
        """See LanguageModel."""
        return self._model.n_vocab

    @property
    def n_ctx(self) -> int:
        """See LanguageModel."""
        return self._model.n_ctx

    @property
    def n_batch(self) -> int:
        """See LanguageModel."""
        return self._model.n_batch

    @property
    def n_past(self) -> int:
        """See LanguageModel."""
        return self._model.n_past

    def eval(self, tokens: Sequence[int], *, rows: int) -> FloatRows:
        """Append `tokens` in one pass; see LanguageModel.eval. Without rows, any width will do."""
        if rows == 0:
            return self._model.eval(tokens, rows=0)
        n, n_past = len(tokens), self._model.n_past
        width = next(width for width in self.widths if width >= n)
        # The last layer works on the wanted rows alone, so every pass wants all of them.
        logits = self._model.eval([*tokens, *[tokens[-1]] * (width - n)], rows=width)
        if width > n:
            self._model.truncate(n_past + n)
        return logits[n - rows : n]

    def truncate(self, n_past: int) -> None:
        """See LanguageModel.truncate."""
        self._model.truncate(n_past)


class ChunkedCache(TokenCache):
    """Reuses only what an earlier prompt had read in the same chunks, of n_batch from the start.

    What was decoded, or read as a shorter last chunk, went through passes of other widths.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self._chunked = 0  # leading tokens that were read in whole chunks

    def truncate(self, n_past: int) -> None:
        """See TokenCache.truncate."""
        super().truncate(n_past)
        self._chunked = min(self._chunked, n_past)

    def reuse(self, text: Sequence[int]) -> int:
        """Keep whole chunks of the common prefix of cache and `text`; return their length."""
        shared = min(self._chunked, common_prefix(self.tokens, text))
        self._go_back(shared - shared % self.model.n_batch)
        return len(self.tokens)

    def catch_up(
        self, text: Sequence[int], should_stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """See TokenCache.catch_up; the cache holds whole chunks when it is called."""
        finished = super().catch_up(text, should_stop)
        self._chunked = len(self.tokens) - len(self.tokens) % self.model.n_batch
        return finished

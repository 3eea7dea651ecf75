"""A language model without a model: the logits are a seeded function of the whole prefix.

It checks how it is used, and makes a use that only happens to work fail: the buffer that `eval`
returns is overwritten by the next `eval`, and a pass that fails may leave tokens behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lspec.errors import RollbackError
from lspec.model import FloatRows


class Misuse(AssertionError):
    """The loop asked for something that a LanguageModel does not promise."""


class TableModel:
    """A LanguageModel over `n_vocab` ids; `spread` is the standard deviation of its logits.

    `passes` lists the tokens of every pass, `positions` how often each position was evaluated since
    it was last cut off. `fail_after` passes from now, `failure` is raised: before the pass, or with
    `fail_late` when the cache has already grown (as when Ctrl-C comes right after llama_decode).
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        n_vocab: int = 4,
        n_ctx: int = 64,
        n_batch: int = 16,
        max_rows: int = 9,
        spread: float = 1.5,
        logits: Callable[[tuple[int, ...]], np.ndarray] | None = None,
    ) -> None:
        self.n_vocab, self.n_ctx, self.n_batch, self.n_past = n_vocab, n_ctx, n_batch, 0
        self.max_rows = max_rows
        self.passes: list[tuple[int, ...]] = []
        self.widest = 0
        self.can_roll_back = True
        self.fail_after: int | None = None
        self.fail_late = False
        self.failure: BaseException = KeyboardInterrupt()
        self._seed, self._spread, self._logits = seed, spread, logits
        self._memo: dict[tuple[int, ...], np.ndarray] = {}
        self._seen: list[int] = []
        self._buffer = np.full((max_rows, n_vocab), np.nan, np.float32)

    @property
    def seen(self) -> list[int]:
        """The tokens in the cache."""
        return self._seen[: self.n_past]

    def logits(self, prefix: Sequence[int]) -> np.ndarray:
        """Return the logits after `prefix`, (n_vocab,) float32, without touching the cache."""
        key = tuple(prefix)
        if key not in self._memo:
            self._memo[key] = self._compute(key)
        return self._memo[key]

    def _compute(self, prefix: tuple[int, ...]) -> np.ndarray:
        if self._logits is not None:
            return self._logits(prefix).astype(np.float32)
        rng = np.random.default_rng([self._seed, len(prefix), *prefix])
        return (rng.standard_normal(self.n_vocab) * self._spread).astype(np.float32)

    def eval(self, tokens: Sequence[int], *, rows: int) -> FloatRows:
        n = len(tokens)
        self._buffer.fill(np.nan)  # whoever still looks at the last pass sees it
        if len(self._seen) != self.n_past:
            raise Misuse("a failed pass left tokens in the cache that were not cut off")
        if not 0 < n <= self.n_batch:
            raise Misuse(f"a pass of {n} tokens, n_batch {self.n_batch}")
        if not 0 <= rows <= min(n, self.max_rows):
            raise Misuse(f"{rows} rows of {n} tokens, max_rows {self.max_rows}")
        if self.n_past + n > self.n_ctx:
            raise Misuse(f"{self.n_past + n} tokens in a window of {self.n_ctx}")
        if not all(0 <= token < self.n_vocab for token in tokens):
            raise Misuse(f"ids outside the vocabulary in {tokens}")
        failing = self.fail_after == 0
        if self.fail_after is not None:
            self.fail_after = None if failing else self.fail_after - 1
        if failing and not self.fail_late:
            raise self.failure
        self._seen.extend(tokens)
        if failing:
            raise self.failure
        self.n_past += n
        self.passes.append(tuple(tokens))
        self.widest = max(self.widest, n)
        for i in range(rows):
            self._buffer[i] = self.logits(self._seen[: self.n_past - rows + 1 + i])
        return self._buffer[:rows]

    def truncate(self, n_past: int) -> None:
        if n_past < 0:
            raise Misuse(f"truncate({n_past})")
        if not self.can_roll_back and 0 < n_past < len(self._seen):
            raise RollbackError("this table cannot be cut back")
        self.n_past = min(self.n_past, n_past)
        del self._seen[self.n_past :]

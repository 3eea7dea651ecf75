"""The models of a pair, opened as the plan of memory and the GPUs allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lspec.compat import require_match
from lspec.llama import KvType, LlamaModel, LoadOptions
from lspec.placement import fit
from lspec.planning import Planner
from lspec.probe import require_loadable
from lspec.selfcheck import KV_TYPES, choose


class Opening:
    """Opens the target first, then the draft."""

    def __init__(
        self,
        target: Sequence[Path],
        draft: Sequence[Path],
        options: LoadOptions,
        draft_options: LoadOptions,
        planner: Planner,
    ) -> None:
        """The options are what is wanted; the draft may have no files."""
        self._target, self._draft = target, draft
        self._wanted, self._wanted_draft = options, draft_options
        self._draft_options = draft_options
        self._planner = planner

    def target(self) -> LlamaModel:
        """Load the target. Raises ModelLoadError."""
        options = self._settle(self._wanted)
        require_loadable(self._target, self._draft)
        return fit("target", self._target, options, lambda o: LlamaModel(self._target, o))

    def exact_target(
        self, kv_type: KvType | None, should_stop: Callable[[], bool]
    ) -> tuple[LlamaModel, tuple[int, ...]]:
        """Load the target for exact mode; return it with the widths to keep to.

        `kv_type` leaves no choice of the cache's type. Raises ModelLoadError, and KeyboardInterrupt
        if `should_stop` ended the search.
        """

        def load(options: LoadOptions) -> tuple[LlamaModel, tuple[int, ...]]:
            choice = choose(self._target, options, kv_type, should_stop=should_stop)
            options = replace(
                self._wanted,
                n_gpu_layers=options.n_gpu_layers,
                kv_type=choice.kv_type,
                spare=max(choice.widths),
            )
            return LlamaModel(self._target, self._settle(options)), choice.widths

        least = kv_type or KV_TYPES[-1]  # until it is chosen, the one that takes least
        options = self._settle(replace(self._wanted, kv_type=least))
        require_loadable(self._target, self._draft)
        return fit("target", self._target, options, load)

    def draft(self, target: LlamaModel) -> LlamaModel:
        """Load the draft of `target`. Raises ModelLoadError, IncompatiblePairError."""
        load = lambda options: LlamaModel(self._draft, options)  # noqa: E731
        model = fit("draft", self._draft, self._draft_options, load)
        try:
            require_match(target.vocab.vocabulary, model.vocab.vocabulary)
        except BaseException:
            model.close()
            raise
        return model

    def _settle(self, options: LoadOptions) -> LoadOptions:
        """Return the target's options as the plan allows; the draft's change with them."""
        options, self._draft_options = self._planner.settle(options, self._wanted_draft)
        return options

"""The models of a pair, opened as the plan of memory and the GPUs allow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from lspec.compat import require_match
from lspec.llama import LlamaModel, LoadOptions
from lspec.placement import fit
from lspec.planning import Planner, Settled
from lspec.probe import require_loadable, size_of
from lspec.round import MAX_GAMMA
from lspec.selfcheck import KV_TYPES, choose
from lspec.wanted import Wanted

log = logging.getLogger("lspec")


class Opening:
    """Opens the target first, then the draft."""

    def __init__(
        self,
        target: Sequence[Path],
        draft: Sequence[Path],
        wanted: Wanted,
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Read the headers; the draft may have no files. Raises ModelLoadError.

        Where `should_stop` says so, what takes time later ends with KeyboardInterrupt.
        """
        self._target, self._draft = target, draft
        self._should_stop = should_stop
        self._wanted = wanted
        self._draft_options = wanted.draft
        self._planner = Planner(
            target,
            draft,
            auto=wanted.auto,
            shares_window=wanted.shares_window,
            force=wanted.force,
        )
        if wanted.own_draft and not draft:
            log.warning("there is no draft model, so that options for one have no effect")

    @cached_property
    def settled(self) -> Settled:
        """How the models will be opened, by what is free when this is first asked for."""
        return self._planner.settle(self._wanted.target, self._wanted.draft)

    @cached_property
    def settled_exact(self) -> Settled:
        """The same in exact mode, with the largest cache that may be chosen there.

        What is chosen later depends on the target's layers, so that these must not.
        """
        largest = replace(
            self._wanted.target, kv_type=self._wanted.kv_type or KV_TYPES[0], spare=MAX_GAMMA + 1
        )
        return self._planner.settle(largest, self._wanted.draft, exact=True)

    def target(self) -> LlamaModel:
        """Load the target. Raises ModelLoadError."""
        options = self._begin(self.settled)
        model = fit("target", self._target, options, partial(self._load, self._target))
        return _with_its_window(model)

    def exact_target(self) -> tuple[LlamaModel, tuple[int, ...]]:
        """Load the target for exact mode; return it with the widths to keep to.

        Raises ModelLoadError.
        """

        def load(options: LoadOptions) -> tuple[LlamaModel, tuple[int, ...]]:
            kv_type = self._wanted.kv_type
            choice = choose(self._target, options, kv_type, should_stop=self._should_stop)
            options = replace(
                options,
                kv_type=choice.kv_type,
                repack=choice.repack,
                spare=max(choice.widths),
            )
            return self._load(self._target, options), choice.widths

        options = self._begin(self.settled_exact)
        model, widths = fit("target", self._target, options, load, exact=True)
        return _with_its_window(model), widths

    def draft(self, target: LlamaModel) -> LlamaModel:
        """Load the draft of `target`. Raises ModelLoadError, IncompatiblePairError."""
        if size_of(self._draft) > size_of(self._target):
            log.warning("the draft is larger than its target: drafting cannot pay so")
        model = fit("draft", self._draft, self._draft_options, partial(self._load, self._draft))
        try:
            require_match(target.vocab.vocabulary, model.vocab.vocabulary)
        except BaseException:
            model.close()
            raise
        return model

    def _load(self, files: Sequence[Path], options: LoadOptions) -> LlamaModel:
        return LlamaModel(files, options, should_stop=self._should_stop)

    def _begin(self, settled: Settled) -> LoadOptions:
        """Return the target's options, and keep the draft's. Raises ModelLoadError."""
        if settled.refusal:
            raise settled.refusal
        if settled.notice:
            log.warning(settled.notice)
        require_loadable(self._target, self._draft)
        self._draft_options = settled.draft
        return settled.target


def _with_its_window(model: LlamaModel) -> LlamaModel:
    """Return `model`, with a notice where its window is smaller than what was asked for."""
    if model.n_ctx < model.options.n_ctx:
        log.warning("the window is %d tokens: the model was trained on no more", model.n_ctx)
    return model

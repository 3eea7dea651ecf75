"""The memory plan of models that are to be loaded on this machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lspec.fitting import (
    Free,
    Outlook,
    Wish,
    largest_window,
    outlook,
    require_room,
    with_fewer_layers,
)
from lspec.gguf import Header, read_header
from lspec.llama import LoadOptions, can_offload, prompt_chunk, used_gpus
from lspec.machine import free_memory
from lspec.memory import WINDOW_STEP, Setting, shape_of
from lspec.probe import parts_of
from lspec.round import MAX_GAMMA

log = logging.getLogger("lspec")

DEFAULT_N_CTX = 4096
_SHARE = 0.9  # of what is free, for a window that is chosen: a plan may be wrong by a tenth


def default_options() -> LoadOptions:
    """Return how models are loaded where nothing else is said."""
    return LoadOptions(DEFAULT_N_CTX, MAX_GAMMA + 1)


def free_here(options: LoadOptions) -> Free:
    """Return what is free on this machine now; of the GPUs, of those that `options` use."""
    # Asking a GPU starts its driver, which takes some of its memory.
    told = [gpu.memory_free for gpu in used_gpus(options) if gpu.memory_total]
    return Free(free_memory(), sum(told) if told else None)


def read_headers(files: Sequence[Path]) -> list[Header]:
    """Return the headers of a model's file, or of all its parts. Raises ModelLoadError."""
    return [read_header(path) for path in parts_of(files)]


def wish_for(
    target: Sequence[Header],
    draft: Sequence[Header],
    options: LoadOptions,
    draft_options: LoadOptions,
    *,
    shares_window: bool = True,
) -> Wish:
    """Return what is wanted, given the headers of a target and, or none, of a draft."""
    wish = Wish(shape_of(target), _setting(options), shares_window=shares_window)
    if not draft:
        return wish
    return replace(wish, draft=shape_of(draft), draft_setting=_setting(draft_options))


class Planner:
    """Finds the windows to load models with, given by their files, or refuses to load them."""

    def __init__(
        self,
        target: Sequence[Path],
        draft: Sequence[Path],
        *,
        auto: bool = False,
        shares_window: bool = True,
        force: bool = False,
        free: Free | None = None,
    ) -> None:
        """Read the headers; the draft may have no files. Raises ModelLoadError.

        `auto` chooses the target's window, and the draft's if it shares it. `force` accepts what
        does not fit. `free` is what may be taken (None: what is free now).
        """
        self._target, self._draft = read_headers(target), read_headers(draft)
        self._name = " with ".join(files[0].name for files in (target, draft) if files)
        self._auto, self._shares_window, self._force = auto, shares_window, force
        self._free = free

    def outlook(self, options: LoadOptions) -> Outlook:
        """Return what there is to say of loading both models with `options`."""
        wish = wish_for(self._target, self._draft, options, options)
        return outlook(wish, self._free or free_here(options))

    def settle(
        self, options: LoadOptions, draft_options: LoadOptions
    ) -> tuple[LoadOptions, LoadOptions]:
        """Return the options with their final windows and layers on the GPU.

        A window that is chosen takes up to nine tenths of what is free, if that is enough for any;
        where the system does not tell what is free, it stays as it is. Where all layers should go
        to a GPU that has no room for them, fewer do, and a notice says so. Raises ModelLoadError
        where the models do not fit.
        """
        wish = wish_for(
            self._target,
            self._draft,
            options,
            draft_options,
            shares_window=self._shares_window,
        )
        free = self._free or free_here(options if options.n_gpu_layers else draft_options)
        if self._auto and free.host is not None:
            window = largest_window(wish, free, _SHARE) or largest_window(wish, free)
            wish = wish.with_window(window or WINDOW_STEP)
        if not self._force:
            wish = self._make_fit(wish, free)
        return _settled(options, wish.setting), _settled(draft_options, wish.draft_setting)

    def _make_fit(self, wish: Wish, free: Free) -> Wish:
        """Return the wish, maybe with fewer layers on the GPU. Raises ModelLoadError."""
        if wish.setting.gpu_layers < 0 and not free.holds(wish.plan):
            fewer = with_fewer_layers(wish, free)
            if fewer is not None:
                there = fewer.plan.target
                log.warning(
                    "the GPU has no room for the whole target: %d of its %d layers go there",
                    there.gpu_layers,
                    there.n_layers,
                )
                return fewer
        require_room(wish, free, self._name)
        return wish


def _settled(options: LoadOptions, setting: Setting | None) -> LoadOptions:
    """Return `options` as `setting` says; without a model there is nothing to say."""
    if setting is None:
        return options
    there = setting.gpu_layers if can_offload() else options.n_gpu_layers
    return replace(options, n_ctx=setting.n_ctx, n_gpu_layers=there)


def _setting(options: LoadOptions) -> Setting:
    return Setting(
        options.n_ctx,
        options.max_rows,
        prompt_chunk(options),
        options.kv_type,
        options.n_gpu_layers if can_offload() else 0,
        options.spare,
        options.flash_attn != "off",
    )

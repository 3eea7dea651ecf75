"""The memory plan of models that are to be loaded on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lspec.errors import ModelLoadError
from lspec.fitting import (
    Free,
    Outlook,
    Wish,
    largest_window,
    outlook,
    placed,
    placed_for_exact,
    refusal,
)
from lspec.gguf import Header, read_header
from lspec.llama import GPU_SPARE_BYTES, LoadOptions, can_offload, prompt_chunk, used_gpus
from lspec.machine import free_memory
from lspec.memory import WINDOW_STEP, MemoryPlan, ModelPlan, Setting, shape_of
from lspec.probe import parts_of
from lspec.round import MAX_GAMMA

DEFAULT_N_CTX = 4096
_SHARE = 0.9  # of what is free, for a window that is chosen: a plan may be wrong by a tenth


@dataclass(frozen=True, slots=True)
class Settled:
    """How models are to be loaded so that they fit, as far as that can be had.

    `notice` says which layers do not go to the GPU ("": none that should). `refusal` is there if
    the models do not fit all the same.
    """

    target: LoadOptions
    draft: LoadOptions
    wish: Wish
    free: Free
    notice: str
    refusal: ModelLoadError | None

    @property
    def outlook(self) -> Outlook:
        """What there is to say of it."""
        return outlook(self.wish, self.free)


def default_options() -> LoadOptions:
    """Return how models are loaded where nothing else is said."""
    return LoadOptions(DEFAULT_N_CTX, MAX_GAMMA + 1)


def free_here(options: LoadOptions) -> Free:
    """Return what is free on this machine now; of the GPUs, of those that `options` use.

    Of each GPU what is to stay free is left out.
    """
    # Asking a GPU starts its driver, which takes some of its memory and of the machine's.
    used = [gpu for gpu in used_gpus(options) if gpu.memory_total]
    there = sum(max(0, gpu.memory_free - GPU_SPARE_BYTES) for gpu in used)
    unified = any(gpu.kind == "integrated" for gpu in used)
    return Free(free_memory(), there if used else None, unified)


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
    """Finds the windows, and the layers on the GPU, to load models with, given by their files."""

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
        return self.settle(options, options).outlook

    def settle(
        self, options: LoadOptions, draft_options: LoadOptions, *, exact: bool = False
    ) -> Settled:
        """Return the options with their final windows and layers on the GPU.

        Where a GPU has no room, fewer layers go there: as many as fit, or in `exact` mode half of
        them or none. A window that is chosen is the largest that nine tenths of what is free hold
        beside the layers that go to the GPU with the window of `options`; all of what is free where
        nine tenths hold none. Where the system does not tell what is free, it stays as it is.
        """
        wish = wish_for(
            self._target,
            self._draft,
            options,
            draft_options,
            shares_window=self._shares_window,
        )
        on_gpu = options.n_gpu_layers or not self._draft
        free = self._free or free_here(options if on_gpu else draft_options)
        chooses = self._auto and free.host is not None
        place = placed_for_exact if exact else placed
        found = place(wish, free, _SHARE if chooses else 1.0)
        if chooses:
            window = largest_window(found, free, _SHARE) or largest_window(found, free)
            found = found.with_window(window or WINDOW_STEP)
        there = found.plan
        too_large = refusal(found, free, self._name)
        if too_large and self._force and not exact:
            # A mapped file can be read again where it does not fit; what was made of it cannot.
            options, draft_options = (replace(o, repack=False) for o in (options, draft_options))
        return Settled(
            _settled(options, found.setting, there.target),
            _settled(draft_options, found.draft_setting, there.draft),
            found,
            free,
            _notice(wish.plan, there),
            None if self._force else too_large,
        )


def _settled(options: LoadOptions, setting: Setting | None, plan: ModelPlan | None) -> LoadOptions:
    """Return `options` as `setting` says; without a model there is nothing to say."""
    if setting is None or plan is None:
        return options
    there = -1 if plan.gpu_layers == plan.n_layers else plan.gpu_layers
    if not can_offload():
        there = options.n_gpu_layers
    return replace(options, n_ctx=setting.n_ctx, n_gpu_layers=there)


def _notice(wanted: MemoryPlan, found: MemoryPlan) -> str:
    """Return what is to be said of layers that have no room on the GPU; "" if there are none."""
    moved, target = [], found.target
    if target.gpu_layers < wanted.target.gpu_layers:
        some = f"{target.gpu_layers} of the target's {target.n_layers} layers go there"
        moved.append(some if target.gpu_layers else "the target goes to the CPU")
    if found.draft and wanted.draft and found.draft.gpu_layers < wanted.draft.gpu_layers:
        moved.append("the draft goes to the CPU, where drafting may not pay")
    return f"the GPU has no room for everything: {' and '.join(moved)}" if moved else ""


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

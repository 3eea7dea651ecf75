"""Whether a pair fits into what is free, which window does, and what to change where it does not.

A GPU without room is no reason to refuse: fewer layers go there. The machine's memory is one.
Nothing is guessed: every setting that is named has been planned and does fit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from lspec.errors import ModelLoadError
from lspec.memory import KV_BYTES, WINDOW_STEP, MemoryPlan, Setting, Shape, plan
from lspec.sizes import size_text

_LEAST_WINDOW = 512  # a shorter one is no advice
_FORCE = "force=True loads it all the same."
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Free:
    """Bytes that may be taken of the machine's memory and of the GPUs'; None: not known, or no GPU.

    `unified`: what is on the GPU lies in the machine's memory too.
    """

    host: int | None
    gpu: int | None = None
    unified: bool = False

    def holds(self, wanted: MemoryPlan, share: float = 1.0) -> bool:
        """Return whether a plan fits into this share of what is free."""
        fits = self.host is None or self.need(wanted) <= share * self.host
        return fits and self.holds_on_gpu(wanted, share)

    def holds_on_gpu(self, wanted: MemoryPlan, share: float = 1.0) -> bool:
        """Return whether the GPU's side of a plan fits into this share of what is free there."""
        return self.gpu is None or wanted.gpu <= share * self.gpu

    def need(self, wanted: MemoryPlan) -> int:
        """Return what a plan takes of the machine's memory."""
        return wanted.host + (wanted.gpu if self.unified else 0)


@dataclass(frozen=True, slots=True)
class Wish:
    """A pair and how it is to be loaded. `shares_window`: the draft's window is the target's."""

    target: Shape
    setting: Setting
    draft: Shape | None = None
    draft_setting: Setting | None = None
    shares_window: bool = True

    @property
    def plan(self) -> MemoryPlan:
        """What it takes."""
        return plan(self.target, self.setting, self.draft, self.draft_setting)

    @property
    def n_ctx_train(self) -> int:
        """The longest window that makes sense."""
        return self.target.n_ctx_train or self.setting.n_ctx

    def with_window(self, n_ctx: int) -> Wish:
        """Return the wish with another window, of the draft as well if it shares it."""
        if self.shares_window:
            return self._with(n_ctx=n_ctx)
        return replace(self, setting=replace(self.setting, n_ctx=n_ctx))

    def with_draft_window(self, n_ctx: int) -> Wish:
        """Return the wish with another window of the draft, which must be there."""
        assert self.draft_setting is not None
        return replace(self, draft_setting=replace(self.draft_setting, n_ctx=n_ctx))

    def with_kv_type(self, kv_type: str) -> Wish:
        """Return the wish with another type of both caches."""
        return self._with(kv_type=kv_type)

    def with_target_layers(self, n: int) -> Wish:
        """Return the wish with other layers of the target on the GPU."""
        return replace(self, setting=replace(self.setting, gpu_layers=n))

    def with_draft_on_cpu(self) -> Wish:
        """Return the wish with no layer of the draft on the GPU."""
        draft = self.draft_setting and replace(self.draft_setting, gpu_layers=0)
        return replace(self, draft_setting=draft)

    def without_draft(self) -> Wish:
        """Return the wish for the target alone."""
        return replace(self, draft=None, draft_setting=None)

    def _with(self, **changes: object) -> Wish:
        draft = self.draft_setting and replace(self.draft_setting, **changes)  # type: ignore[arg-type]
        setting = replace(self.setting, **changes)  # type: ignore[arg-type]
        return replace(self, setting=setting, draft_setting=draft)


@dataclass(frozen=True, slots=True)
class Outlook:
    """A plan, what is free, and by type of cache the largest windows that fit (0: none does).

    None is larger than `longest`, what the target was trained on.
    """

    plan: MemoryPlan
    free: Free
    windows: dict[str, int]
    longest: int


def outlook(wish: Wish, free: Free) -> Outlook:
    """Return what there is to say of a wish; layers stay where they are."""
    types = [name for name in KV_BYTES if name == wish.setting.kv_type or _can_quantize(wish)]
    windows = {name: largest_window(wish.with_kv_type(name), free) for name in types}
    return Outlook(wish.plan, free, windows, wish.n_ctx_train)


def largest_window(wish: Wish, free: Free, share: float = 1.0) -> int:
    """Return the longest window, up to what the target was trained on, that fits; 0: none does."""
    return _largest(wish.with_window, wish.n_ctx_train, free, share)


def placed(wish: Wish, free: Free, share: float = 1.0) -> Wish:
    """Return the wish with as many of the wanted layers on the GPU as fit into `share` of it.

    The target gives way first. A draft, which runs for every token, leaves last, and as a whole.
    """
    layers = range(wish.plan.target.gpu_layers - 1, -1, -1)
    bare = wish.with_target_layers(0).with_draft_on_cpu()
    fewer = chain([wish], map(wish.with_target_layers, layers), [bare])
    return next(other for other in fewer if free.holds_on_gpu(other.plan, share))


def placed_for_exact(wish: Wish, free: Free, share: float = 1.0) -> Wish:
    """Return the wish with all of the wanted layers on the GPU, or half of the target's, or none.

    The text of exact mode depends on where layers are: no draft may change that, and what happens
    to be free not layer by layer. A draft without room beside the target goes to the CPU.
    """
    alone = wish.without_draft()
    there = alone.plan.target
    fewer = (n for n in (there.n_layers // 2, 0) if n < there.gpu_layers)
    steps = chain([alone], map(alone.with_target_layers, fewer))
    found = next(other for other in steps if free.holds_on_gpu(other.plan, share))
    pair = replace(wish, setting=found.setting)
    return pair if free.holds_on_gpu(pair.plan, share) else pair.with_draft_on_cpu()


def refusal(wish: Wish, free: Free, name: str) -> ModelLoadError | None:
    """Return the error, with numbers and what would fit, if the memory is too small for a wish.

    `name` is that of the models; their layers are where they have room (see `placed`).
    """
    if free.host is None or free.need(wish.plan) <= free.host:
        return None
    found = list(_settings_that_fit(wish, free))
    hint = f"What would fit: {', or '.join(found)}." if found else "Take a smaller model."
    need, there = size_text(free.need(wish.plan)), size_text(free.host)
    return ModelLoadError(
        f"{name} with a window of {wish.plan.target.n_ctx} tokens needs {need} of memory, "
        f"where {there} are free",
        hint=f"{hint} {_FORCE}",
    )


def _settings_that_fit(wish: Wish, free: Free) -> Iterator[str]:
    """Yield changes of one option each, the gentlest first."""
    if (window := largest_window(wish, free)) >= _LEAST_WINDOW:
        yield f"n_ctx={window}"
    smaller = (name for name, size in KV_BYTES.items() if size < KV_BYTES[wish.setting.kv_type])
    for name in smaller if _can_quantize(wish) else ():
        if free.holds(wish.with_kv_type(name).plan):
            yield f'kv_type="{name}"'
            break
    if wish.draft is not None and wish.draft_setting is not None:
        longest = min(wish.draft_setting.n_ctx, wish.draft.n_ctx_train or _NEVER)
        window = _largest(wish.with_draft_window, longest, free)
        if _LEAST_WINDOW <= window < longest:
            yield f"draft_n_ctx={window}"
        if free.holds(wish.without_draft().plan):
            yield 'drafter="ngram", which needs no draft'


def _largest(
    with_window: Callable[[int], Wish], longest: int, free: Free, share: float = 1.0
) -> int:
    """Return the largest window up to `longest` that fits, in llama.cpp's steps; 0: none does."""
    steps = range(1, -(-longest // WINDOW_STEP) + 1)

    def window(step: int) -> int:
        return min(step * WINDOW_STEP, longest)

    def is_too_long(step: int) -> bool:
        return not free.holds(with_window(window(step)).plan, share)

    fitting = bisect_left(steps, True, key=is_too_long)  # how many of the steps
    return window(fitting)


def _can_quantize(wish: Wish) -> bool:
    """Return whether caches can be quantized, which takes flash attention."""
    heads = wish.target.quantizable and (wish.draft is None or wish.draft.quantizable)
    return heads and wish.setting.flash_attn

"""How models are to be loaded: the arguments of `lspec.load` that say so, checked."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TypedDict, cast, get_args

from lspec.errors import RequestError
from lspec.llama import KvType, LoadOptions
from lspec.machine import usable_cores
from lspec.placement import placement
from lspec.planning import DEFAULT_N_CTX
from lspec.round import MAX_GAMMA

log = logging.getLogger("lspec")

MAX_THREADS = 512  # llama.cpp's own limit


class How(TypedDict, total=False):
    """The arguments of `wanted`; `lspec.load` says what they mean."""

    n_ctx: int | str
    draft_n_ctx: int | None
    n_gpu_layers: int
    draft_n_gpu_layers: int | None
    main_gpu: int | None
    tensor_split: Sequence[float]
    flash_attn: str
    n_threads: int | None
    kv_type: str | None
    repack: bool
    force: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a pair is wanted.

    `kv_type` leaves exact mode no choice. `auto` and `shares_window` are about the window, as in
    lspec.planning. `own_draft`: there are options for the draft alone. `force` loads what does not
    fit.
    """

    target: LoadOptions
    draft: LoadOptions
    kv_type: KvType | None
    auto: bool
    shares_window: bool
    own_draft: bool
    force: bool


def wanted(
    *,
    n_ctx: int | str = DEFAULT_N_CTX,
    draft_n_ctx: int | None = None,
    n_gpu_layers: int = -1,
    draft_n_gpu_layers: int | None = None,
    main_gpu: int | None = None,
    tensor_split: Sequence[float] = (),
    flash_attn: str = "auto",
    n_threads: int | None = None,
    kv_type: str | None = None,
    repack: bool = True,
    force: bool = False,
) -> Wanted:
    """Return what the arguments mean, with a notice of what has no effect. Raises RequestError."""
    window = DEFAULT_N_CTX if n_ctx == "auto" else _window(n_ctx)
    _check_sizes(n_ctx=window, draft_n_ctx=draft_n_ctx, n_threads=n_threads)
    if n_threads is not None and n_threads > (cores := usable_cores()):
        log.warning(
            "%d threads share %d core%s: they wait for one another, which is slow",
            n_threads,
            cores,
            "" if cores == 1 else "s",
        )
    chosen = _kv_type(kv_type)
    options = LoadOptions(
        window,
        MAX_GAMMA + 1,
        n_gpu_layers=n_gpu_layers,
        n_threads=n_threads,
        kv_type=chosen or "f16",
        repack=repack,
        **placement(
            main_gpu=main_gpu,
            tensor_split=tensor_split,
            flash_attn=flash_attn,
            kv_type=kv_type,
            layers=(n_gpu_layers, draft_n_gpu_layers),
        ),
    )
    draft = replace(
        options,
        n_ctx=draft_n_ctx or window,
        n_gpu_layers=n_gpu_layers if draft_n_gpu_layers is None else draft_n_gpu_layers,
    )
    return Wanted(
        options,
        draft,
        chosen,
        auto=n_ctx == "auto",
        shares_window=draft_n_ctx is None,
        own_draft=(draft_n_ctx, draft_n_gpu_layers) != (None, None),
        force=force,
    )


def _kv_type(name: str | None) -> KvType | None:
    for known in (None, *get_args(KvType)):
        if name == known:
            return cast(KvType | None, known)
    raise RequestError(f"kv_type must be f16, q8_0 or q4_0, not {name!r}")


def _window(n_ctx: int | str) -> int:
    if isinstance(n_ctx, str):
        raise RequestError(f"n_ctx must be a number or 'auto', not {n_ctx!r}")
    return n_ctx


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and not isinstance(size, Integral):
            raise RequestError(f"{name} must be a whole number, not {size!r}")
        if size is not None and size < 1:
            raise RequestError(f"{name} must be 1 or more, not {size}")
    if (sizes.get("n_threads") or 1) > MAX_THREADS:
        raise RequestError(f"n_threads must be at most {MAX_THREADS}, not {sizes['n_threads']}")

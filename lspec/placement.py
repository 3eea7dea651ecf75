"""Where models go on a machine with GPUs: options, and what is tried where there is no room."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Literal, TypedDict, TypeVar, cast, get_args

from lspec.devices import find
from lspec.errors import GpuMemoryError, RequestError
from lspec.gguf import read_header
from lspec.llama import FlashAttention, LoadOptions, can_offload, gpus

log = logging.getLogger("lspec")

MAX_GPUS = 16  # llama.cpp's own limit

Loaded = TypeVar("Loaded")
Role = Literal["target", "draft"]


class Placement(TypedDict):
    """Fields of LoadOptions that are the same for target and draft."""

    main_gpu: int | None
    tensor_split: tuple[float, ...]
    flash_attn: FlashAttention


def placement(
    *,
    main_gpu: int | None,
    tensor_split: Sequence[float],
    flash_attn: str,
    kv_type: str | None,
    layers: Sequence[int | None],
) -> Placement:
    """Return the options for GPUs, checked; a notice says where no GPU is used.

    `layers` are the numbers of layers that were asked for, the target's first. Raises RequestError.
    """
    shares = tuple(map(float, tensor_split))
    if main_gpu is not None and shares:
        raise RequestError(
            "give main_gpu or tensor_split, not both",
            hint="main_gpu takes one GPU alone, tensor_split divides the layers.",
        )
    if main_gpu is not None and main_gpu < 0:
        raise RequestError(f"main_gpu must be 0 or more, not {main_gpu}")
    sensible = all(isfinite(share) and share >= 0 for share in shares)
    if shares and not (sensible and any(shares) and len(shares) <= MAX_GPUS):
        raise RequestError(
            f"tensor_split must be up to {MAX_GPUS} numbers of 0 or more, not all of them 0"
        )
    if flash_attn not in get_args(FlashAttention):
        raise RequestError(f"flash_attn must be auto, on or off, not {flash_attn!r}")
    if flash_attn == "off" and kv_type not in (None, "f16"):
        raise RequestError(f"a cache of {kv_type} needs flash attention", hint="Leave it on auto.")
    no_layers = not any(n != 0 for n in layers if n is not None)
    chosen = main_gpu is not None or bool(shares)
    if chosen and no_layers:
        log.warning("no layer goes to a GPU, so that main_gpu and tensor_split have no effect")
    elif can_offload():
        if chosen:
            _require_gpus(main_gpu, shares)
    elif chosen or any((n or 0) > 0 for n in layers):
        log.warning(
            "the installed llama-cpp-python uses no GPU here, so that options for one have no "
            "effect: `lspec check` says why"
        )
    elif layers[0] != 0 and log.isEnabledFor(logging.INFO):
        _note_unused()
    return Placement(
        main_gpu=main_gpu, tensor_split=shares, flash_attn=cast(FlashAttention, flash_attn)
    )


def fit(
    role: Role,
    files: Sequence[Path],
    options: LoadOptions,
    load: Callable[[LoadOptions], Loaded],
    *,
    exact: bool = False,
) -> Loaded:
    """Return what `load` makes of `options`, with less on the GPU where the plan asks too much.

    A target is tried with the layers of the plan, then with three quarters and half of these, then
    on the CPU; in `exact` mode with half of all its layers, then on the CPU. A draft goes to the
    CPU at once: half of it would slow down every token. A notice says what was done. Raises
    ModelLoadError.
    """
    others = _retreat(role, files, options.n_gpu_layers, exact=exact)
    while True:
        try:
            return load(options)
        except GpuMemoryError:
            n_layers = next(others, None)
            if n_layers is None:
                raise
        log.warning(
            "the GPU has less room for the %s than was planned with: %s",
            role,
            _way_out(role, n_layers),
        )
        options = replace(options, n_gpu_layers=n_layers)


def _retreat(role: Role, files: Sequence[Path], asked: int, *, exact: bool) -> Iterator[int]:
    """Yield the numbers of layers on the GPU to try after `asked`, in turn."""
    if role == "target":
        there = read_header(files[0]).number("block_count") + 1  # and the output
        now = there if asked < 0 else min(asked, there)
        fewer = (there // 2,) if exact else (now * 3 // 4, now // 2)
        yield from (n for n in dict.fromkeys(fewer) if 0 < n < now)
    if asked:
        yield 0


def _way_out(role: Role, n_layers: int) -> str:
    if n_layers:
        return f"{n_layers} of its layers go there"
    slow = ", where drafting may not pay" if role == "draft" else ""
    return f"it goes to the CPU{slow}"


def _note_unused() -> None:
    unused = [gpu.name for gpu in find() if gpu.backend != "Vulkan"]
    if unused:
        log.info("this machine's %s is not used: `lspec check` says what to do", unused[0])


def _require_gpus(main_gpu: int | None, shares: Sequence[float]) -> None:
    there = gpus()
    if not there:  # a GPU of another machine, or a system that does not list them
        return
    wanted = len(shares) if main_gpu is None else main_gpu + 1
    if wanted > len(there):
        names = ", ".join(f"{i}: {gpu.description}" for i, gpu in enumerate(there))
        what = f"GPU {main_gpu}" if main_gpu is not None else f"{wanted} GPUs"
        raise RequestError(f"there is no {what} here", hint=f"llama.cpp finds {names}.")

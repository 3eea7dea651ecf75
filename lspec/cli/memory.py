"""The memory plan, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lspec.fitting import Outlook
from lspec.memory import MemoryPlan, ModelPlan, Part
from lspec.sizes import size_text

_COLUMNS = ("", "weights", "cache", "buffers", "vocabulary", "in all")


def memory_object(outlook: Outlook) -> dict[str, Any]:
    """Return the plan as --json prints it: bytes, and windows in tokens."""
    plan = outlook.plan
    return {
        **{role: _model_object(model) for role, model in _roles(plan)},
        "host": {"process": plan.process, "total": plan.host, "free": outlook.free.host},
        "gpu": {"total": plan.gpu, "free": outlook.free.gpu},
        "fits": outlook.free.holds(plan),
        "largest_window": outlook.windows,
    }


def memory_lines(outlook: Outlook) -> Iterator[str]:
    """Yield the plan as people read it."""
    plan = outlook.plan
    yield f"Memory with a cache of {plan.target.kv_type}:"
    yield from _aligned([_COLUMNS, *_rows(plan)])
    yield memory_sentence(outlook)
    windows = [f"{window} with {name}" for name, window in outlook.windows.items() if window]
    if windows and outlook.free.host is not None:
        whole = f"The model's window is {outlook.longest} tokens"
        yield f"{whole}; the largest that fits: {', '.join(windows)}."


def memory_sentence(outlook: Outlook) -> str:
    """Return what a plan comes to, beside what is free."""
    plan, free = outlook.plan, outlook.free
    sides = [_side("of memory", free.need(plan), free.host)]
    if plan.gpu:
        sides.append(_side("on the GPU", plan.gpu, free.gpu))
    verdict = "" if free.holds(plan) else ": it does not fit"
    window = f"With a window of {plan.target.n_ctx} tokens"
    return f"{window} it takes {' and '.join(sides)}{verdict}."


def _side(where: str, need: int, free: int | None) -> str:
    there = "" if free is None else f" ({size_text(free)} free)"
    return f"{size_text(need)} {where}{there}"


def _roles(plan: MemoryPlan) -> Iterator[tuple[str, ModelPlan]]:
    return zip(("target", "draft"), plan.models, strict=False)


def _model_object(model: ModelPlan) -> dict[str, Any]:
    parts = {"host": model.host, "gpu": model.gpu}
    return {
        "n_ctx": model.n_ctx,
        "kv_type": model.kv_type,
        "layers": model.n_layers,
        "gpu_layers": model.gpu_layers,
        **{
            side: {name: getattr(part, name) for name in Part.__dataclass_fields__}
            for side, part in parts.items()
        },
    }


def _rows(plan: MemoryPlan) -> Iterator[tuple[str, ...]]:
    for role, model in _roles(plan):
        yield _row(role, model.host)
        if model.gpu_layers:
            yield _row(f"  {model.gpu_layers} of {model.n_layers} layers on the GPU", model.gpu)
    yield ("the program", "", "", "", "", size_text(plan.process))


def _row(name: str, part: Part) -> tuple[str, ...]:
    buffers = part.compute + part.logits
    sizes = (part.weights, part.cache, buffers, part.vocabulary, part.total)
    return (name, *(size_text(size) if size else "" for size in sizes))


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        texts = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join([name.ljust(widths[0]), *texts]).rstrip()

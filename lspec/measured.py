"""The costs of a pair on this machine, remembered from one session to the next."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from time import perf_counter

from lspec.costs import Costs, measure, quick_check
from lspec.model import LanguageModel
from lspec.paths import cache_dir, write_whole

_WORTH_REMEMBERING_S = 0.2


def costs_of(
    target: LanguageModel,
    draft: LanguageModel | None,
    identity: Callable[[], object],
    *,
    widest: int,
) -> Costs:
    """Return remembered costs if they still hold, else measure (at most about 1.5 s).

    `identity` returns all that the costs depend on: files, threads, device, llama.cpp. The target
    takes passes of `widest` tokens at most.
    """
    try:
        path = _path(identity())
    except OSError:  # the files are gone since they were loaded
        return measure(target, draft, widest=widest)
    remembered = _read(path)
    if remembered is not None and quick_check(remembered, target, widest=widest):
        return remembered
    started = perf_counter()
    costs = measure(target, draft, widest=widest)
    if perf_counter() - started > _WORTH_REMEMBERING_S:
        _write(path, costs)
    return costs


def _path(identity: object) -> Path:
    return cache_dir() / "costs" / f"{sha256(repr(identity).encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> Costs | None:
    try:
        costs = json.loads(path.read_text(encoding="utf-8"))
        return Costs(costs["draft"] and tuple(costs["draft"]), tuple(costs["target"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _write(path: Path, costs: Costs) -> None:
    with suppress(OSError):  # a cache that cannot be written is measured again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(costs)))

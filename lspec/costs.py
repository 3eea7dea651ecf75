"""What passes cost on this machine: the c and v of speculative decoding, measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from time import perf_counter

from lspec.errors import RollbackError
from lspec.model import LanguageModel
from lspec.round import MAX_GAMMA

MAX_WIDTH = MAX_GAMMA + 1
_WIDTHS = (1, 2, 3, 5, 9, MAX_WIDTH)  # what lies between is interpolated
_REPEATS = 5  # of each width at most, unless asked for more
_CONTEXT = 32  # tokens before a measured pass, unless asked for more
_ANY = 7  # a token id; which one does not matter

Seconds = tuple[float, ...]  # of a pass of width 1, 2, … MAX_WIDTH


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of the passes of both models by width; `draft` is None without one."""

    draft: Seconds | None
    target: Seconds

    @property
    def cost_coefficient(self) -> float | None:
        """A draft step in target steps, c."""
        return None if self.draft is None else self.draft[0] / self.target[0]

    def verify_cost(self, gamma: int) -> float:
        """A pass over gamma + 1 tokens in target steps, v. (Leviathan et al. assume 1.)"""
        return self.target[gamma] / self.target[0]


def measure(
    target: LanguageModel,
    draft: LanguageModel | None,
    *,
    widest: int = MAX_WIDTH,
    budget_s: float = 1.5,
    repeats: int = _REPEATS,
    context: int = _CONTEXT,
) -> Costs:
    """Time passes of both models, each at least once and again while `budget_s` lasts.

    Each width is timed `repeats` times at most, after `context` tokens. The target takes passes of
    `widest` tokens at most. Both caches are empty afterwards.
    """
    start = perf_counter()

    def seconds(model: LanguageModel, share: float, widest: int, rows: int) -> Seconds:
        widths = sorted({min(width, widest) for width in _WIDTHS})
        return _seconds(model, widths, rows, start + share * budget_s, repeats, context)

    # A draft is asked for the logits after its last token alone.
    draft_seconds = None if draft is None else seconds(draft, 0.3, MAX_WIDTH, 1)
    return Costs(draft_seconds, seconds(target, 1.0, widest, MAX_WIDTH))


def quick_check(costs: Costs, target: LanguageModel, *, widest: int = MAX_WIDTH) -> bool:
    """Return whether two passes of the target still cost what `costs` says, within a third.

    The cache is empty afterwards.
    """
    target.truncate(0)
    ratios = []
    for width in (1, min(5, widest)):
        _prepare(target)
        started = perf_counter()
        target.eval([_ANY] * width, rows=width)
        ratios.append((perf_counter() - started) / costs.target[width - 1])
    target.truncate(0)
    return all(2 / 3 < ratio < 3 / 2 for ratio in ratios)


def interpolate(times: Mapping[int, float]) -> Seconds:
    """Return the seconds for width 1 to MAX_WIDTH, straight lines between the given widths.

    Beyond the widest given one the last slope goes on.
    """
    known = sorted(times)
    result = []
    for width in range(1, MAX_WIDTH + 1):
        above = next((w for w in known if w >= width), known[-1])
        below = max((w for w in known if w < above), default=above)
        slope = (times[above] - times[below]) / (above - below) if above > below else 0.0
        result.append(times[above] + slope * (width - above))
    return tuple(result)


def _seconds(
    model: LanguageModel,
    widths: Sequence[int],
    rows: int,
    ends_at: float,
    repeats: int,
    context: int,
) -> Seconds:
    """Return the seconds by width; widths come in turn until the time is over.

    The logits after the last `rows` tokens of a pass are wanted.
    """
    context = max(0, min(context, model.n_ctx - widths[-1]))
    times: dict[int, list[float]] = {}
    model.truncate(0)
    _prepare(model, context)
    model.eval([_ANY], rows=1)  # the first pass of a kind is slower
    for _ in range(repeats):
        for width in widths:
            if len(times) == len(widths) and perf_counter() > ends_at:
                break
            _prepare(model, context)
            started = perf_counter()
            model.eval([_ANY] * width, rows=min(rows, width))
            times.setdefault(width, []).append(perf_counter() - started)
    model.truncate(0)
    return interpolate({width: _middle(seconds) for width, seconds in times.items()})


def _middle(values: Sequence[float]) -> float:
    """Return the mean of the middle half: outliers do not count, two speeds in turn both do."""
    quarter = (len(values) + 1) // 4
    return fmean(sorted(values)[quarter : len(values) - quarter])


def _prepare(model: LanguageModel, context: int = _CONTEXT) -> None:
    """Leave `context` tokens in the cache; a model that cannot go back there reads them again."""
    try:
        model.truncate(context)
    except RollbackError:
        model.truncate(0)
    while model.n_past < context:
        model.eval([_ANY] * min(_CONTEXT, context - model.n_past), rows=0)

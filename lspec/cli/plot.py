"""Drawing a benchmark; the only importer of matplotlib, which comes with `lspec[plot]`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lspec.comparison import ALL, Row
from lspec.errors import LspecError
from lspec.paths import reason

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR_SPACE = 0.8  # of the distance between two categories


def require_matplotlib() -> None:
    """Raise LspecError where matplotlib is missing, before anything is measured."""
    if find_spec("matplotlib") is None:
        raise LspecError(
            "--plot needs matplotlib, which is not installed",
            hint="pip install 'lspec[plot]', or in a clone: scripts/install plot",
        )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write an image: per temperature the speedup by category, and alpha by position.

    Raises LspecError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    figure = Figure(figsize=(13, 4.2 * len(temperatures)), layout="constrained")
    grid = figure.subplots(len(temperatures), 2, squeeze=False, width_ratios=(2, 1))
    for (left, right), temperature in zip(grid, temperatures, strict=True):
        group = [row for row in rows if row.temperature == temperature]
        _draw_speedups(left, group)
        left.set_title(f"Speedup over plain decoding, temperature {temperature:g}")
        _draw_acceptance(right, group)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise LspecError(f"cannot write {path}: {reason(error)}") from None


def _draw_speedups(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw pairs of bars, measured and predicted, for each category and gamma."""
    categories = list(dict.fromkeys(row.category for row in rows))
    gammas = list(dict.fromkeys(row.gamma for row in rows))
    width = _BAR_SPACE / (2 * len(gammas))
    for i, gamma in enumerate(gammas):
        bars = [row for row in rows if row.gamma == gamma]
        left = [categories.index(r.category) + 2 * i * width - _BAR_SPACE / 2 for r in bars]
        measured = [row.speedup.median for row in bars]
        below = [row.speedup.median - row.speedup.low for row in bars]
        above = [row.speedup.high - row.speedup.median for row in bars]
        spread = (below, above)
        colour, name = f"C{i}", f"gamma {gamma}"
        axes.bar(left, measured, width, yerr=spread, align="edge", color=colour, label=name)
        predicted = [row.improvement_factor for row in bars]
        name = "" if i else "predicted"
        left = [x + width for x in left]
        axes.bar(left, predicted, width, align="edge", color=colour, alpha=0.4, label=name)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(categories)), categories)
    axes.set_ylabel("times plain")
    axes.legend()


def _draw_acceptance(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw how often a token is accepted at each position, over all prompts."""
    for i, row in enumerate(row for row in rows if row.category == ALL):
        points = [(n, a) for n, a in enumerate(row.accepted_by_position, 1) if a is not None]
        places, rates = [n for n, _ in points], [a for _, a in points]
        axes.plot(places, rates, "o-", color=f"C{i}", label=f"gamma {row.gamma}")
    axes.set_title("Acceptance by position (alpha)")
    axes.set_xlabel("position in the draft")
    axes.set_xticks(range(1, 1 + max(len(row.accepted_by_position) for row in rows)))
    axes.set_ylim(0, 1.05)
    axes.legend()

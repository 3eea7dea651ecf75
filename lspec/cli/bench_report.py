"""The result of `lspec bench` as a table, Markdown, JSON or CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from shutil import get_terminal_size
from typing import Any

from lspec.bench import Plan
from lspec.comparison import Row, Run, Spread
from lspec.costs import Costs
from lspec.verdict import verdict

HEADERS = (
    "T",
    "gamma",
    "category",
    "plain tok/s",
    "tok/s",
    "speedup",
    "mean",
    "predicted",
    "alpha",
    "tau",
    "c",
    "v",
    "best",
    "outside",
    "accepted by position",
)
_STEADY = 1.1  # a longer text alone makes steps a few percent slower
_POSITIONS = 5  # that a line of a table has room for; JSON and CSV have all
_LEFT = ("category", "accepted by position")
_GAP = "  "
# What a narrow terminal does without, the first one first.
_DISPENSABLE = ("accepted by position", "mean", "best", "outside", "c", "v", "predicted")


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a benchmark has to say."""

    engine: str  # the models and where they run
    plan: Plan
    costs: Costs
    width_difference: float | None  # of logits, between passes of different widths
    runs: tuple[Run, ...]
    rows: tuple[Row, ...]  # what the runs say

    @property
    def interrupted(self) -> bool:
        """Whether there are fewer runs than planned."""
        return len(self.runs) < self.plan.size

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        doubt = " The machine changed its speed meanwhile: more --repeats would tell."
        return verdict(self.rows) + doubt * bool(self._unsteady() and self.plan.repeats == 1)

    @property
    def caveats(self) -> list[str]:
        """What to know beside the numbers; nothing where it needs no words."""
        return [text for text in (self._moved(), self._unsteady()) if text]

    def _moved(self) -> str:
        """Say what "the same text at temperature 0" means here."""
        if not self.width_difference:
            return ""
        return (
            f"the width of a pass moves this target's logits by up to {self.width_difference:.2g}: "
            "at temperature 0 the text may differ from plain decoding at closer ties (see --exact)"
        )

    def _unsteady(self) -> str:
        """Say whether the machine changed its speed, which no prediction can know."""
        steps = [run.target_s / len(run.rounds) for run in self.runs if run.gamma == 0]
        if not steps:
            return ""
        slowest, fastest, before = max(steps), min(steps), self.costs.target[0]
        if max(slowest, before) <= _STEADY * min(fastest, before):
            return ""
        return (
            f"this machine changed its speed: a plain step took {fastest * 1e3:.3g} to "
            f"{slowest * 1e3:.3g} ms in the runs, and {before * 1e3:.3g} ms when the predictions "
            "were made"
        )


def _table(report: Report) -> str:
    """Return aligned columns, numbers to the right; at a terminal those that it has room for."""
    columns = [*zip(HEADERS, *map(_cells, report.rows), strict=True)]
    widths = {column[0]: max(map(len, column)) for column in columns}
    room = get_terminal_size().columns if sys.stdout.isatty() else math.inf
    for header in _DISPENSABLE:
        if sum(widths.values()) + len(_GAP) * (len(widths) - 1) > room:
            del widths[header]
    shown = [
        [cell.ljust(width) if column[0] in _LEFT else cell.rjust(width) for cell in column]
        for column in columns
        if (width := widths.get(column[0]))
    ]
    return "\n".join(_GAP.join(line).rstrip() for line in zip(*shown, strict=True))


def _markdown(report: Report) -> str:
    """Return a table in Markdown, with an empty line for the sentence after it."""
    rules = [":--" if header in _LEFT else "--:" for header in HEADERS]
    lines = [HEADERS, rules, *map(_cells, report.rows)]
    escaped = (" | ".join(cell.replace("|", r"\|") for cell in line) for line in lines)
    return "\n".join(f"| {line} |" for line in escaped) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    """Return what people read of a row, in the order of HEADERS."""
    return (
        f"{row.temperature:g}",
        str(row.gamma),
        row.category,
        f"{row.plain_tokens_per_s.median:.1f}",
        f"{row.tokens_per_s.median:.1f}",
        _spread(row.speedup, row.repeats),
        f"{row.speedup_mean.median:.2f}",
        f"{row.improvement_factor:.2f}",
        _ratio(row.acceptance_rate),
        f"{row.block_efficiency:.2f}",
        _ratio(row.cost_coefficient),
        f"{row.verify_cost:.2f}",
        "-" if row.best_gamma is None else str(row.best_gamma),
        f"{row.outside_models:.1%}",
        _first(row.accepted_by_position),
    )


def _spread(spread: Spread, repeats: int) -> str:
    around = f" ({spread.low:.2f}-{spread.high:.2f})" if repeats > 1 else ""
    return f"{spread.median:.2f}{around}"


def _first(ratios: Sequence[float | None]) -> str:
    more = ["…"] if len(ratios) > _POSITIONS else []
    return " ".join([*map(_ratio, ratios[:_POSITIONS]), *more]) or "-"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _json(report: Report) -> str:
    """Return one object: what was measured, how, the rows, and every run with its counts."""
    plan = report.plan
    sampling = asdict(plan.sampling)
    del sampling["temperature"]
    result = {
        "engine": report.engine,
        "max_tokens": plan.max_tokens,
        "repeats": plan.repeats,
        "seed": plan.seed,
        "sampling": sampling,
        "interrupted": report.interrupted,
        "costs": asdict(report.costs),
        "caveats": report.caveats,
        "width_difference": report.width_difference,
        "rows": [asdict(row) for row in report.rows],
        "runs": [_counts(run) for run in report.runs],
        "verdict": report.verdict,
    }
    return json.dumps(result, ensure_ascii=False, indent=2)


def _counts(run: Run) -> dict[str, Any]:
    """Return a run without its rounds, but with their sums."""
    rounds = run.rounds
    return {
        "prompt": run.prompt,
        "category": run.category,
        "temperature": run.temperature,
        "gamma": run.gamma,
        "repeat": run.repeat,
        "tokens": run.tokens,
        "rounds": len(rounds),
        "drafted": sum(round.drafted for round in rounds),
        "accepted": sum(round.accepted for round in rounds),
        "rejections": sum(round.rejected for round in rounds),
        "draft_steps": sum(round.draft_steps for round in rounds),
        "draft_s": sum(round.draft_s for round in rounds),
        "target_s": run.target_s,
        "total_s": run.total_s,
    }


def _csv(report: Report) -> str:
    """Return one line per row; a spread is three columns, positions are separated by spaces."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for i, row in enumerate(report.rows):
        flat = _flat(row)
        if i == 0:
            writer.writerow(flat)
        writer.writerow(flat.values())
    return text.getvalue().rstrip("\n")


def _flat(row: Row) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in asdict(row).items():
        if isinstance(value, dict):
            flat |= {name: value["median"], f"{name}_low": value["low"]}
            flat[f"{name}_high"] = value["high"]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            flat[name] = " ".join("" if part is None else str(part) for part in value)
        else:
            flat[name] = value
    return flat


FORMATS: dict[str, Callable[[Report], str]] = {
    "table": _table,
    "json": _json,
    "csv": _csv,
    "md": _markdown,
}

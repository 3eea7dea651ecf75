"""`lspec bench`: does this pair pay on this machine, and with which setting?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import click

from lspec import bench as benchmark
from lspec import prompts
from lspec.cli.answer import stop_on_interrupt
from lspec.cli.bench_report import FORMATS, Report
from lspec.cli.loading import load
from lspec.cli.options import (
    ENGINE_OPTIONS,
    FILE,
    FILE_OPTIONS,
    GAMMA,
    TEMPLATE_OPTIONS,
    TRUNCATION_OPTIONS,
    add,
    split,
)
from lspec.cli.output import EXIT_INTERRUPTED, note, waiting
from lspec.comparison import Run, compare
from lspec.engine import Engine


class List(click.ParamType[tuple[Any, ...]]):
    """Values of one type, separated by commas; each counts once."""

    name = "LIST"

    def __init__(self, item: click.ParamType[Any]) -> None:
        self._item = item

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Return the values in their order."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if not parts:
            self.fail("nothing is listed.", param, ctx)
        return tuple(dict.fromkeys(self._item.convert(part, param, ctx) for part in parts))


BENCH_OPTIONS = (
    click.option(
        "--gamma",
        "gammas",
        type=List(GAMMA),
        default="2,4,8,auto",
        show_default=True,
        envvar="LSPEC_GAMMA",
        help="Drafted tokens per round to try. 0, plain decoding, is always measured beside them.",
    ),
    click.option(
        "--temperature",
        "temperatures",
        type=List(click.FLOAT),
        default="0",
        show_default=True,
        envvar="LSPEC_TEMPERATURE",
        help="Temperatures to try.",
    ),
    click.option("--prompts", "file", type=FILE, help="Your own prompts, as JSON Lines."),
    click.option("--category", "categories", type=List(click.STRING), help="Only these."),
    click.option("--limit", type=click.IntRange(1), help="Prompts per category (default: all)."),
    click.option(
        "--max-tokens",
        type=click.IntRange(1),
        default=128,
        show_default=True,
        envvar="LSPEC_MAX_TOKENS",
        help="Tokens per answer.",
    ),
    click.option(
        "--repeats",
        type=click.IntRange(1),
        default=3,
        show_default=True,
        help="How often everything is measured; the medians count.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the first repeat."),
    click.option(
        "--calibration",
        metavar="SECONDS",
        type=click.FloatRange(0),
        default=20.0,
        show_default=True,
        help="Time for measuring c and v before the run.",
    ),
    click.option(
        "-o",
        "--output",
        type=click.Choice(list(FORMATS)),
        default="table",
        show_default=True,
        help="How to print the result.",
    ),
    click.option("--plot", type=FILE, metavar="FILE.png", help="Draw it too; needs matplotlib."),
)


@click.command()
@add(FILE_OPTIONS, BENCH_OPTIONS, ENGINE_OPTIONS, TEMPLATE_OPTIONS, TRUNCATION_OPTIONS)
def bench(**params: Any) -> int:
    """Measure whether a pair pays on this machine.

    Plain and speculative decoding answer the same prompts in turn, on the same loaded models.
    All of it takes half an hour or more on two cores; --limit 1 is a quick look, and Ctrl-C shows
    what is there. Your own prompts are JSON objects, one a line, with "prompt" or "messages", and
    "id" and "category" if you like.

    The columns: T, temperature; speedup, ratio of total times; mean, of the prompts' own speedups;
    predicted, tau by gamma c + v; alpha, how often an examined token is accepted; tau, tokens per
    round; c and v, cost of a draft step and of a verify pass in single steps of the target; best,
    the gamma that these predict to be best; outside, share of the time not spent in the models.
    """
    if not isfinite(params["calibration"]):
        raise click.UsageError("--calibration is a time in seconds.")
    gammas = tuple(gamma for gamma in params["gammas"] if gamma != 0)
    if not gammas:
        raise click.UsageError("Name a gamma besides 0 to compare with plain decoding.")
    if params["plot"]:
        from lspec.cli.plot import require_matplotlib

        require_matplotlib()
    chosen = prompts.select(
        prompts.read(params["file"] or prompts.BUILT_IN),
        categories=params["categories"] or (),
        limit=params["limit"],
    )
    models, options = split()
    plan = benchmark.Plan(
        prompts=tuple(chosen),
        gammas=gammas,
        temperatures=params["temperatures"],
        repeats=params["repeats"],
        **options,
    )
    models.load["gamma"] = "auto" if "auto" in gammas else gammas[0]
    with load(models) as engine:
        benchmark.check(engine, plan)
        report = _measure(engine, plan, calibration_s=params["calibration"])
    _show(report, output=params["output"], plot=params["plot"])
    return EXIT_INTERRUPTED if report.interrupted else 0


def _measure(engine: Engine, plan: benchmark.Plan, *, calibration_s: float) -> Report:
    """Play the whole plan, or as much of it as Ctrl-C allows, with a progress bar on a terminal."""
    with waiting(f"timing passes, about {calibration_s:g} s …"):
        costs = benchmark.calibrate(engine, plan, budget_s=calibration_s)
    with waiting("comparing pass widths …"):
        moved = benchmark.width_difference(engine, plan)
    with stop_on_interrupt() as should_stop:
        with waiting("warming up …"):
            benchmark.warm_up(engine, plan, should_stop=should_stop)
        with _progress(benchmark.run(engine, plan, should_stop=should_stop), plan.size) as runs:
            done = tuple(runs)
    return Report(engine.description, plan, costs, moved, done, rows=tuple(compare(done, costs)))


@contextmanager
def _progress(runs: Iterator[Run], size: int) -> Iterator[Iterator[Run]]:
    from tqdm import tqdm  # type: ignore[import-untyped]

    hidden = not sys.stderr.isatty()
    with tqdm(
        runs, total=size, unit="answer", leave=False, disable=hidden, dynamic_ncols=True
    ) as bar:
        yield iter(bar)


def _show(report: Report, *, output: str, plot: Path | None) -> None:
    """Print the result on stdout, and the verdict where it does not break the format."""
    if report.rows or output == "json":
        click.echo(FORMATS[output](report))
    click.echo(report.verdict, err=output in ("json", "csv"))
    for caveat in report.caveats if output in ("table", "md") else ():
        note(caveat)
    if plot and report.rows:
        from lspec.cli.plot import draw

        draw(report.rows, plot)

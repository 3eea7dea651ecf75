"""`lspec check`: what a pair can do on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from lspec.arguments import as_options
from lspec.check import Facts, Measured, Report
from lspec.check import check as examine
from lspec.cli import offload
from lspec.cli.answer import stop_on_interrupt
from lspec.cli.loading import show_notices
from lspec.cli.memory import memory_lines, memory_object
from lspec.cli.models import as_json, pull_missing
from lspec.cli.options import DRAFTER_OPTION, FILE_OPTIONS, LOAD_OPTIONS, add, split
from lspec.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, note, visible, waiting
from lspec.costs import Costs
from lspec.loading import locate
from lspec.offload import survey
from lspec.selfcheck import Choice, Findings
from lspec.sizes import size_text
from lspec.widths import Widths

GAMMAS = (1, 2, 4, 8)


@click.command()
@add(FILE_OPTIONS, (DRAFTER_OPTION,), LOAD_OPTIONS)
@as_json
def check(*, as_json: bool, **_: Any) -> int:
    """Tell what a pair can do on this machine.

    Do the two match, can they take back drafted tokens, what do passes cost and what should that
    gain, which pass widths agree bit for bit (see --exact), how much memory does it take, is a
    GPU in use. Give it the options that you load with. The first time this takes a minute or two,
    on a slow machine five (Ctrl-C shows what is known by then, and the next time goes on);
    `lspec bench` measures the gain itself. The exit code is 1 where the two do not match or fit.
    """
    models, _options = split()
    how = dict(models.load)
    files = how.pop("target", None), how.pop("draft", None)
    alone = how.pop("drafter", "auto") in ("ngram", "none")
    show_notices()
    if files == (None, None):
        pull_missing(models.pair)
    target, draft = locate(models.pair, *files)
    draft = () if alone else draft
    told = False

    def tell(known: Report) -> None:
        nonlocal told
        told = True
        timing.close()
        if not as_json:
            click.echo(visible("\n".join((*_first_lines(known), ""))))

    with stop_on_interrupt() as should_stop, ExitStack() as timing:
        timing.enter_context(waiting("timing passes …"))
        report = examine(target, draft, say=note, tell=tell, should_stop=should_stop, **how)
    if as_json:
        click.echo(json.dumps(_object(report), ensure_ascii=False, indent=2))
    else:
        first = () if told else (*_first_lines(report), "")
        rest = (*_other_lines(report), "", *offload.lines(survey()))
        click.echo(visible("\n".join((*first, *rest))))
    if report.interrupted:
        return EXIT_INTERRUPTED
    return 0 if report.measured else EXIT_FAILED


def _object(report: Report) -> dict[str, Any]:
    """Return what --json prints; what was not measured is null."""
    result = asdict(report)
    measured, result["build"] = result.pop("measured"), _build()
    result["memory"] = memory_object(report.memory)
    result["refusal"] = report.refusal and as_options(report.refusal)
    if report.measured is None:
        return {**result, "measured": None}
    costs = report.measured.costs
    measured["cost_coefficient"] = costs.cost_coefficient
    measured["verify_cost"] = {str(gamma): costs.verify_cost(gamma) for gamma in GAMMAS}
    measured["plain_tokens_per_s"] = 1 / costs.target[0]
    return {**result, "measured": measured}


def _build() -> dict[str, Any]:
    found = survey()
    return {**asdict(found), "commands": found.commands}


def _first_lines(report: Report) -> Iterator[str]:
    """Yield for people what is known first."""
    yield f"target  {_model(report.target)}"
    yield f"draft   {_model(report.draft) if report.draft else 'none'}"
    if report.mismatch:
        yield f"They cannot work together: {report.mismatch}."
        yield "Use a draft of the same model family."
    if report.draft and not report.mismatch:
        yield "Their vocabularies match."
    if report.measured:
        yield from ("", *_cost_lines(report.measured))


def _other_lines(report: Report) -> Iterator[str]:
    """Yield what takes longer, and the memory."""
    if report.measured:
        if report.interrupted:
            yield "Which pass widths agree bit for bit was not found out: interrupted."
        else:
            yield from _exact_lines(report.measured)
        yield ""
    yield from memory_lines(report.memory)
    if report.refusal:
        yield f"So nothing was measured. {as_options(report.refusal)}"
    if report.measured and report.measured.peak_bytes:
        yield f"This check used {size_text(report.measured.peak_bytes)} at most."


def _model(facts: Facts) -> str:
    names = ", ".join(Path(file).name for file in facts.files)
    parts = [names, size_text(facts.size)]
    if facts.rolls_back is not None:
        can = "takes" if facts.rolls_back else "cannot take"
        parts.append(f"{can} back drafted tokens")
    return ", ".join(parts)


def _cost_lines(measured: Measured) -> Iterator[str]:
    costs, c = measured.costs, measured.costs.cost_coefficient
    step = costs.target[0]
    yield f"A step of the target takes {_ms(step)} {measured.device}: {1 / step:.1f} tok/s plainly."
    if costs.draft and c is not None:
        yield f"A step of the draft takes {_ms(costs.draft[0])}: c = {c:.2f}."
    yield from _table([("gamma", *map(str, GAMMAS)), ("v, cost of a verify pass", *_v(costs))])
    if measured.predictions:
        yield ""
        header = ("tokens accepted (alpha)", "best gamma", "predicted gain")
        yield from _table(
            [
                header,
                *(
                    (f"{p.acceptance_rate:.0%}", str(p.gamma), f"{p.improvement_factor:.2f}")
                    for p in measured.predictions
                ),
            ]
        )


def _v(costs: Costs) -> list[str]:
    return [f"{costs.verify_cost(gamma):.2f}" for gamma in GAMMAS]


def _exact_lines(measured: Measured) -> Iterator[str]:
    found, choice, apart = measured.exact, measured.choice, measured.width_difference
    yield "Pass widths whose logits agree bit for bit:"
    rows = [_row(_way(findings), findings.widths) for findings in found if findings.widths]
    if rows:
        yield from _table([("cache", "agree", "alone", "largest difference"), *rows])
    for findings in found:
        if findings.problem:
            yield f"Not to be found with a cache of {_way(findings)}: {findings.problem}."
    if apart:
        yield (
            f"Width moves this target's logits by up to {apart:.2g}, so greedy text may differ\n"
            "from plain decoding at ties closer than that."
        )
    elif apart == 0:
        yield "Width does not move this target's logits: greedy text is that of plain decoding."
    if choice is None:
        yield "Exact mode is not possible here."
    elif choice.widths == (1,):
        yield f"Exact mode decodes plainly here, with a cache of {_way(choice)}."
    else:
        yield (
            f"Exact mode takes a cache of {_way(choice)} and passes of {ranges(choice.widths)} "
            f"tokens, so that up to {max(choice.widths) - 1} can be drafted."
        )


def _way(found: Findings | Choice) -> str:
    return f"{found.kv_type}, repacked weights" if found.repack else found.kv_type


def _row(way: str, widths: Widths) -> tuple[str, ...]:
    alone = [width for group in widths.classes if len(group) == 1 for width in group]
    return (
        way,
        "; ".join(ranges(group) for group in widths.classes if len(group) > 1) or "-",
        ranges(alone) if alone else "-",
        f"{max(widths.difference):.2g}",
    )


def ranges(widths: Sequence[int]) -> str:
    """Return ascending numbers for people: "1 to 7, 9"."""
    starts = [widths[0], *(b for a, b in pairwise(widths) if b > a + 1)]
    ends = [*(a for a, b in pairwise(widths) if b > a + 1), widths[-1]]
    return ", ".join(
        str(start) if start == end else f"{start} to {end}"
        for start, end in zip(starts, ends, strict=True)
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows as aligned columns."""
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(size) for cell, size in zip(row, sizes, strict=True)).rstrip()

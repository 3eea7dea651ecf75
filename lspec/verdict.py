"""A benchmark's result in one sentence: does this pair pay on this machine?"""

from __future__ import annotations

from collections.abc import Sequence

from lspec.comparison import ALL, Row

_WORTH = 1.03  # below, a gain is within what a machine's speed wanders by itself


def verdict(rows: Sequence[Row]) -> str:
    """Return one sentence with the best setting per temperature and its numbers."""
    if not rows:
        return "Nothing was measured to the end, so there is no verdict."
    if all(row.acceptance_rate is None for row in rows):
        return "No token was drafted, so plain decoding was compared with itself."
    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    clauses = [_clause([r for r in rows if r.temperature == t], t) for t in temperatures]
    kinds = {kind for kind, _ in clauses}
    head = "This pair pays on this machine only in part"
    if kinds == {"yes"}:
        head = "This pair pays on this machine"
    elif kinds == {"no"}:
        head = "This pair does not pay on this machine"
    elif kinds <= {"no", "unclear"}:
        head = "This pair does not clearly pay on this machine"
    return f"{head}: {'; '.join(text for _, text in clauses)}."


def pays(row: Row) -> bool:
    """Return whether `row` is faster than plain decoding by more than noise, in every repeat.

    Where nothing was drafted, plain decoding was compared with itself. A single repeat does not
    tell what is noise, so the prediction must promise a gain as well.
    """
    if row.acceptance_rate is None or (row.repeats == 1 and row.improvement_factor <= 1):
        return False
    return row.speedup.median >= _WORTH and row.speedup.low > 1


def best(rows: Sequence[Row]) -> Row:
    """Return the row with the largest speedup, which is 1 where nothing was drafted."""
    return max(rows, key=lambda row: 1.0 if row.acceptance_rate is None else row.speedup.median)


def _clause(rows: Sequence[Row], temperature: float) -> tuple[str, str]:
    """Return what holds at one temperature, "yes", "part", "no" or "unclear", and say it."""
    overall = best([row for row in rows if row.category == ALL])
    where = f"at temperature {temperature:g}"
    rank = "is best" if overall.speedup.median >= 1 else "comes closest"
    reached = f"gamma {overall.gamma} {rank} with {_numbers(overall)}"
    if pays(overall):
        same = [row for row in rows if row.gamma == overall.gamma and row.category != ALL]
        slower = _list([row for row in same if row.speedup.median < 1])
        return "yes", f"{where} {reached}" + (f", though not for {slower}" if slower else "")
    categories = dict.fromkeys(row.category for row in rows if row.category != ALL)
    peaks = [best([row for row in rows if row.category == category]) for category in categories]
    if gains := _list([row for row in peaks if pays(row)], with_gamma=True):
        return "part", f"{where} for {gains}, while over all prompts {reached}"
    if overall.acceptance_rate is None:
        return "no", f"{where} gamma {overall.gamma} drafted nothing and was right"
    if overall.speedup.median >= _WORTH and overall.repeats == 1:
        promised = f"{overall.improvement_factor:.2f}"
        return "unclear", (
            f"{where} {reached} in a single repeat, while the costs measured before it promise "
            f"{promised}: more --repeats would tell"
        )
    if overall.speedup.median >= 1:
        return "unclear", f"{where} {reached}, which the machine's own ups and downs may be"
    cost = overall.block_efficiency / overall.improvement_factor
    return "no", (
        f"{where} {reached}: a round yields {overall.block_efficiency:.2f} tokens for the price "
        f"of {cost:.2f} single steps"
    )


def _numbers(row: Row) -> str:
    plain, fast, speedup = row.plain_tokens_per_s.median, row.tokens_per_s.median, row.speedup
    uneven = f", {speedup.low:.2f} to {speedup.high:.2f}" if speedup.low < 1 < speedup.high else ""
    return f"{speedup.median:.2f} times plain ({fast:.1f} against {plain:.1f} tok/s{uneven})"


def _list(rows: Sequence[Row], *, with_gamma: bool = False) -> str:
    """Name the categories of `rows` with their speedups; empty for none."""
    texts = [
        f"{row.category} ({row.speedup.median:.2f}{f' with gamma {row.gamma}' * with_gamma})"
        for row in rows
    ]
    return " and ".join(filter(None, (", ".join(texts[:-1]), *texts[-1:])))

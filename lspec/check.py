"""What a pair can do on this machine, found out by trying: the report of `lspec check`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from lspec import theory
from lspec.compat import require_match
from lspec.costs import Costs, measure
from lspec.errors import IncompatiblePairError
from lspec.fitting import Outlook
from lspec.llama import LlamaModel, read_vocabulary, repacks
from lspec.loading import can_roll_back
from lspec.opening import Opening
from lspec.placement import fit
from lspec.probe import require_loadable, size_of
from lspec.round import MAX_GAMMA
from lspec.selfcheck import Choice, Findings, best, sample_text, survey
from lspec.wanted import How, wanted
from lspec.widths import difference

ALPHAS = (0.6, 0.8, 0.9)
_COSTS_S = 4.0  # for timing passes of both models


@dataclass(frozen=True, slots=True)
class Facts:
    """A model: bytes of its files; can it go back (None: it was not loaded)?"""

    files: tuple[str, ...]
    size: int
    rolls_back: bool | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """The best number of drafted tokens at an acceptance rate, and what it gains."""

    acceptance_rate: float
    gamma: int
    improvement_factor: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What a pair that matches does; `predictions` are there only where drafting is possible."""

    device: str
    costs: Costs
    width_difference: float | None  # of logits, between widths; None: tokens cannot be taken back
    predictions: tuple[Prediction, ...]
    exact: tuple[Findings, ...]
    choice: Choice | None  # of exact mode; None: not possible
    peak_bytes: int | None  # resident memory of this process; None: the system does not tell


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that there is to say; `measured` is None where `mismatch` or `refusal` is there.

    `refusal` says what would fit into the memory, where the pair does not.
    """

    target: Facts
    draft: Facts | None
    mismatch: str | None  # the first difference of the vocabularies
    measured: Measured | None
    memory: Outlook
    refusal: str | None = None
    interrupted: bool = False  # in the search for pass widths that agree: `measured` lacks those


def check(
    target: Sequence[Path],
    draft: Sequence[Path],
    *,
    say: Callable[[str], None] = lambda text: None,
    tell: Callable[[Report], None] = lambda known: None,
    should_stop: Callable[[], bool] = lambda: False,
    **how: Unpack[How],
) -> Report:
    """Try a target and a draft, or a target alone, given as files, loaded as `how` says.

    `tell` is told what is known before the search for pass widths that agree, which takes longest,
    and `say` how that goes on; `should_stop` ends it. Raises RequestError, ModelLoadError.
    """
    chosen = wanted(**how)
    opening = Opening(target, draft, chosen, should_stop=should_stop)
    settled, exact = opening.settled, opening.settled_exact.target  # by what is free before
    if not settled.refusal:
        require_loadable(target, draft)
    mismatch = _mismatch(target, draft) if draft else None
    if mismatch or settled.refusal:
        refusal = settled.refusal.hint if settled.refusal else None
        files = (_facts(target), _facts(draft) if draft else None)
        return Report(*files, mismatch, None, settled.outlook, refusal)
    with ExitStack() as stack:
        models = {"target": opening.target()}
        stack.callback(models["target"].close)
        if draft:
            models["draft"] = opening.draft(models["target"])
            stack.callback(models["draft"].close)
        facts = {role: _facts(model.paths, model, role) for role, model in models.items()}
        device = models["target"].device
        costs = measure(models["target"], models.get("draft"), budget_s=_COSTS_S)
        apart = None
        if repacks(target, models["target"].options):  # else the survey shows it better
            apart = difference(models["target"], sample_text(models["target"]))
    possible = all(of.rolls_back for of in facts.values())
    predictions = tuple(predict(costs)) if possible else ()
    measured = Measured(device, costs, apart, predictions, (), None, _peak_bytes())
    known = Report(
        facts["target"], facts.get("draft"), None, measured, settled.outlook, interrupted=True
    )
    tell(known)
    found = fit(
        "target",
        target,
        exact,
        lambda options: survey(
            target, options, chosen.kv_type, announce=say, should_stop=should_stop
        ),
        exact=True,
    )
    if found is None:
        return known
    if apart is None:
        apart = next((max(of.widths.difference) for of in found if of.widths), None)
    measured = replace(
        measured,
        width_difference=apart,
        exact=tuple(found),
        choice=best(found),
        peak_bytes=_peak_bytes(),
    )
    return replace(known, measured=measured, interrupted=False)


def predict(costs: Costs) -> list[Prediction]:
    """Return what drafting with a model gains at ALPHAS; nothing without a draft."""
    c = costs.cost_coefficient
    if c is None:
        return []
    v = [costs.verify_cost(gamma) for gamma in range(MAX_GAMMA + 1)]
    predictions = []
    for alpha in ALPHAS:
        gamma = theory.best_gamma(alpha, c=c, v=v)
        gain = theory.improvement_factor(theory.tau(alpha, gamma), gamma, c=c, v=v[gamma])
        predictions.append(Prediction(alpha, gamma, gain))
    return predictions


def _mismatch(target: Sequence[Path], draft: Sequence[Path]) -> str | None:
    try:
        require_match(read_vocabulary(target[0]), read_vocabulary(draft[0]))
    except IncompatiblePairError as error:
        return str(error)
    return None


def _facts(files: Sequence[Path], model: LlamaModel | None = None, role: str = "") -> Facts:
    names, size = tuple(map(str, files)), size_of(files)
    if model is None:
        return Facts(names, size)
    return Facts(names, size, can_roll_back(model, role))


def _peak_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

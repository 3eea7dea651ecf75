"""Runs of a benchmark that never happened: rounds whose seconds are chosen."""

from __future__ import annotations

from collections.abc import Sequence

from lspec.comparison import Gamma, Row, Run, Spread
from lspec.costs import Costs
from lspec.round import Round, Source

# A draft step costs a quarter of a target step, each token more of a pass a tenth of it.
COSTS = Costs(
    draft=tuple(0.25 + 0.05 * i for i in range(17)), target=tuple(1 + 0.1 * i for i in range(17))
)


def a_round(
    drafted: int,
    accepted: int,
    *,
    steps: int | None = None,
    copied: int = 0,
    draft_s: float = 0.0,
    target_s: float = 1.0,
) -> Round:
    return Round(
        tokens=(7,) * (accepted + 1),
        source=(Source.DRAFT,) * accepted + (Source.TARGET,),
        proposed=(Source.NGRAM,) * copied + (Source.DRAFT,) * (drafted - copied),
        accepted=accepted,
        rejected=accepted < drafted,
        ended=False,
        width=drafted + 1,
        draft_steps=drafted - copied if steps is None else steps,
        draft_s=draft_s,
        target_s=target_s,
    )


def a_run(
    prompt: str,
    gamma: Gamma,
    rounds: Sequence[Round],
    *,
    total_s: float,
    temperature: float = 0.0,
    repeat: int = 0,
) -> Run:
    """Return a run; its category is the prompt's id up to the hyphen."""
    return Run(
        prompt=prompt,
        category=prompt.split("-")[0],
        temperature=temperature,
        gamma=gamma,
        repeat=repeat,
        rounds=tuple(rounds),
        total_s=total_s,
    )


def plain_run(prompt: str, n: int, total_s: float, **options: float) -> Run:
    return a_run(prompt, 0, [a_round(0, 0)] * n, total_s=total_s, **options)  # type: ignore[arg-type]


def a_row(
    category: str,
    speedup: float,
    *,
    gamma: Gamma = 4,
    temperature: float = 0.0,
    low: float | None = None,
    alpha: float | None = 0.8,
) -> Row:
    """Return a row over three repeats; plain decoding makes 10 tokens a second."""
    return Row(
        temperature=temperature,
        gamma=gamma,
        category=category,
        prompts=2,
        repeats=3,
        plain_tokens_per_s=Spread(10.0, 9.0, 11.0),
        tokens_per_s=Spread(10 * speedup, 9 * speedup, 11 * speedup),
        speedup=Spread(speedup, speedup - 0.01 if low is None else low, speedup + 0.01),
        speedup_mean=Spread(speedup, speedup, speedup),
        acceptance_rate=alpha,
        block_efficiency=3.0,
        accepted_by_position=(0.9, 0.8, None, 0.5),
        cost_coefficient=0.25,
        verify_cost=1.4,
        improvement_factor=1.2,
        best_gamma=3,
        outside_models=0.02,
    )

"""Plain and speculative decoding of the same prompts on one loaded engine, timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from lspec import widths
from lspec.comparison import Gamma, Run
from lspec.costs import Costs, measure
from lspec.engine import Engine
from lspec.errors import LspecError, RequestError
from lspec.params import SamplingParams
from lspec.prompts import Prompt
from lspec.request import Chunk, check_gamma

_WARM_UP_TOKENS = 16
_CALIBRATION_REPEATS = 100  # of a pass; the time ends it before


@dataclass(frozen=True, slots=True)
class Trial:
    """One answer to be decoded; `gamma` 0 is plain decoding."""

    prompt: Prompt
    temperature: float
    gamma: Gamma
    repeat: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: every prompt, temperature and gamma, plain decoding beside it.

    Raises RequestError for a temperature that has no meaning.
    """

    prompts: tuple[Prompt, ...]
    gammas: tuple[Gamma, ...]  # without 0, which is always measured
    temperatures: tuple[float, ...]
    max_tokens: int
    repeats: int
    sampling: SamplingParams  # but the temperature
    seed: int = 0  # of the first repeat; the next ones count on from it

    def __post_init__(self) -> None:
        """Refuse a wrong temperature now, not when its turn comes."""
        for temperature in self.temperatures:
            replace(self.sampling, temperature=temperature)

    @property
    def size(self) -> int:
        """The number of trials."""
        kinds = 1 + len(self.gammas)
        return len(self.prompts) * len(self.temperatures) * kinds * self.repeats

    def trials(self) -> Iterator[Trial]:
        """Yield all trials; plain and speculative ones of a prompt follow one another.

        Who comes first changes from prompt to prompt and from repeat to repeat, so that a machine
        which gets slower while it works favours nobody.
        """
        kinds = (0, *self.gammas)
        for repeat in range(self.repeats):
            for i, prompt in enumerate(self.prompts):
                first = (i + repeat) % len(kinds)
                for temperature in self.temperatures:
                    for gamma in kinds[first:] + kinds[:first]:
                        yield Trial(prompt, temperature, gamma, repeat)


def check(engine: Engine, plan: Plan) -> None:
    """Refuse what `run` would stumble over half-way. Raises RequestError, ContextOverflowError."""
    if engine.drafter == "none":
        raise RequestError(
            "nothing drafts here, so there is nothing to compare",
            hint="Name a pair, or a draft file: draft=FILE.",
        )
    for gamma in plan.gammas:
        check_gamma(gamma)
    for prompt in plan.prompts:
        try:  # a stream that is never read costs nothing
            _stream(engine, Trial(prompt, plan.temperatures[0], 0, 0), plan)
        except LspecError as error:
            raise type(error)(f"prompt {prompt.id!r}: {error}", hint=error.hint) from None


def calibrate(engine: Engine, plan: Plan, *, budget_s: float) -> Costs:
    """Measure what the passes of the engine's models cost, in about `budget_s` seconds.

    Passes are timed where the middle of the plan's answers will be. What the first half of the time
    shows is forgotten: a machine at work has another speed than one that has just begun. Nothing of
    earlier texts is left in the caches.
    """
    engine.forget()
    lengths = [len(engine.tokenize_chat(prompt.messages)) for prompt in plan.prompts]
    context = round(median(lengths)) + plan.max_tokens // 2

    def once() -> Costs:
        return measure(
            engine.target.model,
            None if engine.draft is None else engine.draft.model,
            widest=engine.max_width,
            budget_s=budget_s / 2,
            repeats=_CALIBRATION_REPEATS,
            context=context,
        )

    once()
    return once()


def width_difference(engine: Engine, plan: Plan) -> float | None:
    """Return how far the width of a pass moves the target's logits, on the first prompt.

    None for a target that cannot take tokens back. Nothing is left in the caches.
    """
    asked = {1 + gamma for gamma in plan.gammas if isinstance(gamma, int)}
    engine.forget()
    try:
        return widths.difference(
            engine.target.model,
            engine.tokenize_chat(plan.prompts[0].messages),
            widths={1, 3, 5} | asked if not engine.exact else {1, engine.max_width},
        )
    finally:
        engine.forget()


def run(
    engine: Engine, plan: Plan, *, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[Run]:
    """Yield a Run for each trial of `plan` as it is measured.

    `should_stop` is read before every pass: a trial that it interrupts is dropped and ends all.
    """
    for trial in plan.trials():
        result = _play(trial, _stream(engine, trial, plan, should_stop=should_stop))
        if result is None:
            return
        yield result


def warm_up(engine: Engine, plan: Plan, *, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Play what comes first a little, which is not counted: a machine at work has another speed."""
    brief = replace(plan, max_tokens=min(_WARM_UP_TOKENS, plan.max_tokens))
    for gamma in (0, *plan.gammas):
        trial = Trial(plan.prompts[0], plan.temperatures[0], gamma, 0)
        for _ in _stream(engine, trial, brief, should_stop=should_stop):
            pass


def _stream(engine: Engine, trial: Trial, plan: Plan, **options: Any) -> Iterator[Chunk]:
    options |= {
        "sampling": replace(plan.sampling, temperature=trial.temperature),
        "max_tokens": plan.max_tokens,
        "seed": plan.seed + trial.repeat,
        "gamma": trial.gamma,
        "reuse": False,
    }
    return engine.stream_chat(trial.prompt.messages, **options)


def _play(trial: Trial, chunks: Iterator[Chunk]) -> Run | None:
    """Return the answer as a Run; None if it was interrupted."""
    *steps, last = chunks
    assert last.completion is not None
    if last.completion.finish_reason == "interrupted":
        return None
    return Run(
        prompt=trial.prompt.id,
        category=trial.prompt.category,
        temperature=trial.temperature,
        gamma=trial.gamma,
        repeat=trial.repeat,
        rounds=tuple(chunk.round for chunk in steps if chunk.round),
        total_s=last.completion.stats.total_s,
    )

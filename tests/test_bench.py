"""What a benchmark plays, in which order, and what it makes of an engine's answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fabricated import a_round

import lspec
from lspec.bench import Plan, calibrate, check, run, warm_up
from lspec.comparison import Run, compare
from lspec.costs import MAX_WIDTH
from lspec.engine import Engine
from lspec.errors import ContextOverflowError, RequestError
from lspec.params import SamplingParams
from lspec.prompts import Prompt
from lspec.request import Chunk, Completion
from lspec.stats import Tally


def prompt(id: str, text: str = "Hello") -> Prompt:
    return Prompt(id, id.split("-")[0], ({"role": "user", "content": text},))


PLAN = Plan(
    prompts=(prompt("code-1"), prompt("chat-1")),
    gammas=(2, 4),
    temperatures=(0.0, 1.0),
    max_tokens=24,
    repeats=2,
    sampling=SamplingParams(top_k=0, top_p=1.0, min_p=0.0),
    seed=5,
)


class Recorder:
    """An engine that notes what it is asked; a plain round takes 1 s, any other 1.5 s."""

    drafter = "model"

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def stream_chat(self, messages: Any, **options: Any) -> Iterator[Chunk]:
        self.asked.append({**options, "messages": messages})
        return self._answer(options["gamma"], options.get("should_stop", lambda: False))

    def _answer(self, gamma: int, should_stop: Any) -> Iterator[Chunk]:
        tally = Tally()
        for _ in range(3):
            if should_stop():
                break
            round = a_round(gamma, min(gamma, 1))
            tally.add(round)
            tally.total_s += 1.5 if gamma else 1.0
            yield Chunk((), round)
        reason = "interrupted" if should_stop() else "length"
        yield Chunk((), completion=Completion("", (), reason, tally.stats(generated_tokens=0), 0))


def test_plain_and_speculative_answers_to_a_prompt_follow_one_another() -> None:
    trials = list(PLAN.trials())
    assert len(trials) == PLAN.size == 2 * 2 * 3 * 2
    for start in range(0, len(trials), 3):
        group = trials[start : start + 3]
        assert len({(t.prompt.id, t.temperature, t.repeat) for t in group}) == 1
        assert {t.gamma for t in group} == {0, 2, 4}


def test_everyone_comes_first_as_often() -> None:
    trials = list(replace(PLAN, repeats=3).trials())
    firsts = Counter(trial.gamma for trial in trials[::3])
    assert len(set(firsts.values())) == 1
    assert set(firsts) == {0, 2, 4}


def test_repeats_are_the_outermost_loop_so_that_an_early_end_leaves_whole_ones() -> None:
    repeats = [trial.repeat for trial in PLAN.trials()]
    assert repeats == sorted(repeats)


def test_warm_up_plays_each_gamma_a_little() -> None:
    engine = Recorder()
    warm_up(engine, PLAN)  # type: ignore[arg-type]
    assert [asked["gamma"] for asked in engine.asked] == [0, 2, 4]
    assert {asked["max_tokens"] for asked in engine.asked} == {16}


def test_each_side_is_asked_for_the_same_but_for_gamma() -> None:
    engine = Recorder()
    trials = list(PLAN.trials())
    list(run(engine, PLAN))  # type: ignore[arg-type]
    for trial, asked in zip(trials, engine.asked, strict=True):
        assert asked["messages"] == trial.prompt.messages
        assert asked["gamma"] == trial.gamma
        assert asked["max_tokens"] == 24
        assert asked["seed"] == 5 + trial.repeat
        assert asked["reuse"] is False
        assert asked["sampling"] == SamplingParams(trial.temperature, 0, 1.0, 0.0)


def test_runs_bring_rounds_and_seconds_of_the_engine() -> None:
    engine = Recorder()
    runs = list(run(engine, replace(PLAN, temperatures=(0.0,))))  # type: ignore[arg-type]
    by_gamma = {r.gamma: (r.tokens, len(r.rounds), r.total_s) for r in runs}
    assert by_gamma == {0: (3, 3, 3.0), 2: (6, 3, 4.5), 4: (6, 3, 4.5)}
    assert {(r.prompt, r.category) for r in runs} == {("code-1", "code"), ("chat-1", "chat")}


def test_interrupted_answer_is_dropped_and_ends_the_run() -> None:
    done: list[Run] = []
    engine = Recorder()
    for result in run(engine, PLAN, should_stop=lambda: len(done) == 4):  # type: ignore[arg-type]
        done.append(result)
    assert len(done) == 4


def test_automatic_gamma_is_passed_through() -> None:
    engine = Recorder()
    check(engine, replace(PLAN, gammas=("auto",)))  # type: ignore[arg-type]
    assert [t.gamma for t in replace(PLAN, gammas=("auto",)).trials()][:2] == [0, "auto"]


@pytest.mark.parametrize("gamma", [17, -1, "many"])
def test_wrong_gamma_is_refused_before_anything_runs(gamma: int | str) -> None:
    with pytest.raises(RequestError, match="gamma"):
        check(Recorder(), replace(PLAN, gammas=(2, gamma)))  # type: ignore[arg-type]


def test_wrong_temperature_is_refused_by_the_plan() -> None:
    with pytest.raises(RequestError, match="temperature"):
        replace(PLAN, temperatures=(0.0, -1.0))


def test_engine_that_drafts_nothing_is_refused() -> None:
    engine = Recorder()
    engine.drafter = "none"
    with pytest.raises(RequestError, match="nothing to compare"):
        check(engine, PLAN)  # type: ignore[arg-type]


@pytest.fixture
def engine(chat_model: Path, chat_draft: Path) -> Iterator[Engine]:
    with lspec.load(target=chat_model, draft=chat_draft, n_ctx=256) as engine:
        yield engine


def test_prompt_that_does_not_fit_is_named_before_anything_runs(engine: Engine) -> None:
    plan = replace(PLAN, prompts=(prompt("ok-1"), prompt("long-1", "x" * 300)))
    with pytest.raises(ContextOverflowError, match="prompt 'long-1': the prompt has"):
        check(engine, plan)


def test_real_engine_is_measured_from_calibration_to_rows(engine: Engine) -> None:
    engine.chat([{"role": "user", "content": "Something else."}], max_tokens=8)
    check(engine, PLAN)
    costs = calibrate(engine, PLAN, budget_s=0.0)
    assert costs.draft is not None
    assert len(costs.draft) == len(costs.target) == MAX_WIDTH
    runs = list(run(engine, PLAN))
    assert all(0 < r.tokens <= 24 for r in runs)
    assert all(round.drafted == 0 for r in runs if r.gamma == 0 for round in r.rounds)
    assert any(round.drafted == 4 for r in runs if r.gamma == 4 for round in r.rounds)
    rows = compare(runs, costs)
    assert len(rows) == 2 * 2 * 3
    assert all(row.repeats == 2 and row.acceptance_rate for row in rows)
    assert all(0 <= row.outside_models < 1 for row in rows)


def test_same_plan_gives_the_same_tokens(engine: Engine) -> None:
    first, second = ([r.rounds for r in run(engine, PLAN)] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert [round.tokens for round in a] == [round.tokens for round in b]


def test_calibration_leaves_the_engine_as_good_as_new(engine: Engine) -> None:
    def tokens() -> tuple[int, ...]:
        return engine.chat(PLAN.prompts[0].messages, temperature=0.0, max_tokens=20).tokens

    before = tokens()
    calibrate(engine, PLAN, budget_s=0.0)
    assert tokens() == before

"""The arithmetic of a benchmark, on runs whose seconds are chosen."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from fabricated import COSTS, a_round, a_run, plain_run

from lspec.comparison import Spread, acceptance_rate, accepted_by_position, compare, draft_widths
from lspec.costs import Costs


def test_a_speedup_is_the_ratio_of_total_times_and_the_mean_of_ratios_is_beside_it() -> None:
    runs = [
        plain_run("code-1", 8, 8.0),
        a_run("code-1", 4, [a_round(4, 3)] * 2, total_s=4.0),
        plain_run("code-2", 2, 2.0),
        a_run("code-2", 4, [a_round(4, 1)], total_s=2.0),
    ]
    (row,) = compare(runs, COSTS)
    assert (row.category, row.prompts, row.repeats) == ("all", 2, 1)
    assert row.speedup.median == pytest.approx(10 / 6)
    assert row.speedup_mean.median == pytest.approx((2 + 1) / 2)
    assert row.plain_tokens_per_s.median == pytest.approx(1.0)
    assert row.tokens_per_s.median == pytest.approx(10 / 6)


def test_texts_of_different_lengths_are_compared_by_seconds_per_token() -> None:
    runs = [
        plain_run("chat-1", 10, 10.0, temperature=1.0),
        a_run("chat-1", 4, [a_round(4, 4)] * 4, total_s=10.0, temperature=1.0),  # 20 tokens
        plain_run("chat-2", 30, 30.0, temperature=1.0),
        a_run("chat-2", 4, [a_round(4, 4)] * 2, total_s=10.0, temperature=1.0),  # 10 tokens
    ]
    (row,) = compare(runs, COSTS)
    # The second text would have taken 30 s for 30 tokens, the first 5 s for 10.
    assert row.speedup.median == pytest.approx(40 / 35)
    assert row.speedup_mean.median == pytest.approx((2 + 1) / 2)


def test_repeats_give_the_median_and_the_spread() -> None:
    runs = []
    for repeat, total_s in enumerate((4.0, 2.0, 5.0)):
        runs.append(plain_run("code-1", 8, 8.0, repeat=repeat))
        runs.append(a_run("code-1", 4, [a_round(4, 3)] * 2, total_s=total_s, repeat=repeat))
    (row,) = compare(runs, COSTS)
    assert row.repeats == 3
    assert row.speedup == Spread(2.0, 1.6, 4.0)
    assert row.tokens_per_s == Spread(2.0, 1.6, 4.0)
    assert row.plain_tokens_per_s == Spread(1.0, 1.0, 1.0)


def test_a_slow_moment_of_the_machine_does_not_count_as_a_speedup() -> None:
    """Plain and speculative runs of one repeat belong together."""
    runs = []
    for repeat, slowness in enumerate((1.0, 3.0, 1.5)):
        runs.append(plain_run("code-1", 8, 8 * slowness, repeat=repeat))
        runs.append(a_run("code-1", 4, [a_round(4, 3)] * 2, total_s=4 * slowness, repeat=repeat))
    (row,) = compare(runs, COSTS)
    assert row.speedup == Spread(2.0, 2.0, 2.0)


def test_rows_come_by_setting_with_the_categories_before_all() -> None:
    runs = [
        maker
        for temperature in (1.0, 0.0)
        for prompt in ("code-1", "chat-1")
        for maker in (
            a_run(prompt, "auto", [a_round(1, 1)], total_s=1.0, temperature=temperature),
            a_run(prompt, 8, [a_round(1, 1)], total_s=1.0, temperature=temperature),
            a_run(prompt, 2, [a_round(1, 1)], total_s=1.0, temperature=temperature),
            plain_run(prompt, 2, 2.0, temperature=temperature),
        )
    ]
    rows = compare(runs, COSTS)
    expected = [
        (t, gamma, category)
        for t in (0.0, 1.0)
        for gamma in (2, 8, "auto")
        for category in ("code", "chat", "all")
    ]
    assert [(row.temperature, row.gamma, row.category) for row in rows] == expected


def test_an_interrupted_repeat_is_left_out_where_a_whole_one_exists() -> None:
    runs = []
    for repeat, prompts in enumerate((["code-1", "code-2"], ["code-1"])):
        for prompt in prompts:
            runs.append(plain_run(prompt, 8, 8.0, repeat=repeat))
            total_s = 1.0 if repeat else 4.0
            runs.append(a_run(prompt, 4, [a_round(4, 3)] * 2, total_s=total_s, repeat=repeat))
    runs.append(plain_run("code-2", 8, 8.0, repeat=1))  # its counterpart never came
    (row,) = compare(runs, COSTS)
    assert (row.prompts, row.repeats, row.speedup.median) == (2, 1, 2.0)
    (alone,) = compare(runs[:2], COSTS)
    assert (alone.prompts, alone.speedup.median) == (1, 2.0)


def test_runs_without_counterpart_give_no_rows() -> None:
    assert compare([], COSTS) == []
    assert compare([plain_run("code-1", 8, 8.0)], COSTS) == []
    assert compare([a_run("code-1", 4, [a_round(4, 3)], total_s=1.0)], COSTS) == []


def test_alpha_counts_examined_tokens_only() -> None:
    rounds = [a_round(4, 4), a_round(4, 1), a_round(4, 0), a_round(0, 0)]
    assert acceptance_rate(rounds) == pytest.approx(5 / 7)
    assert acceptance_rate([a_round(0, 0)]) is None


def test_acceptance_by_position_is_censored_by_the_rejection_before_it() -> None:
    rounds = [a_round(3, 3), a_round(3, 1), a_round(3, 0), a_round(1, 1), a_round(4, 3)]
    assert accepted_by_position(rounds) == (4 / 5, 2 / 3, 1.0, 0.0)
    assert accepted_by_position([a_round(2, 0)]) == (0.0, None)
    assert accepted_by_position([a_round(0, 0)]) == ()


def test_shares_of_time_and_tokens_per_round() -> None:
    rounds = [a_round(4, 3, draft_s=1.0, target_s=2.0), a_round(4, 0, draft_s=1.0, target_s=2.0)]
    (row,) = compare([plain_run("code-1", 5, 5.0), a_run("code-1", 4, rounds, total_s=8.0)], COSTS)
    assert row.outside_models == pytest.approx(1 - 6 / 8)
    assert row.block_efficiency == pytest.approx(5 / 2)
    assert row.acceptance_rate == pytest.approx(3 / 5)


def test_prediction_takes_c_and_v_from_the_calibration_and_tau_from_the_run() -> None:
    rounds = [a_round(4, 2), a_round(2, 1)]
    runs = [plain_run("code-1", 5, 5.0), a_run("code-1", 4, rounds, total_s=99.0)]
    (row,) = compare(runs, COSTS)
    assert row.cost_coefficient == 0.25
    assert row.verify_cost == pytest.approx((1.4 + 1.2) / 2)
    assert row.improvement_factor == pytest.approx((5 / 2) / (3 * 0.25 + 1.3))


def test_prediction_is_what_the_clock_shows_when_passes_cost_what_they_did_before() -> None:
    """A machine without noise: every pass takes what the calibration said."""
    assert COSTS.draft
    rounds = []
    pattern = [(4, 4), (4, 4), (4, 1), (4, 0), (4, 4), (2, 1), (0, 0), (0, 0), (3, 3), (4, 2)]
    widths = iter(list(draft_widths([a_round(*shape) for shape in pattern])))
    for drafted, accepted in pattern:
        draft_s = sum(COSTS.draft[next(widths) - 1] for _ in range(drafted))
        target_s = COSTS.target[drafted]
        rounds.append(a_round(drafted, accepted, draft_s=draft_s, target_s=target_s))
    total_s = sum(round.draft_s + round.target_s for round in rounds)
    tokens = sum(len(round.tokens) for round in rounds)
    runs = [plain_run("code-1", tokens, 1.0 * tokens)]
    runs.append(a_run("code-1", "auto", rounds, total_s=total_s))
    (row,) = compare(runs, COSTS)
    assert row.improvement_factor == pytest.approx(row.speedup.median)
    assert row.outside_models == pytest.approx(0)


@pytest.mark.parametrize(
    ("rounds", "widths"),
    [
        ([a_round(3, 1), a_round(3, 0)], [1, 1, 1, 1, 1, 1]),
        ([a_round(2, 2), a_round(2, 0)], [1, 1, 2, 1]),  # the last drafted token was not read
        ([a_round(2, 2, steps=3), a_round(1, 1)], [1, 1, 1, 1]),  # read, then drafting stopped
        ([a_round(0, 0), a_round(0, 0), a_round(1, 1)], [3]),  # two plain rounds
        ([a_round(3, 3, copied=3), a_round(1, 0)], [5]),  # copied without the model
        ([a_round(4, 4, copied=2), a_round(1, 0)], [3, 1, 2]),  # copied, then continued
        ([a_round(4, 1, copied=2), a_round(1, 0)], [3, 1, 1]),
        ([a_round(0, 0)] * 99 + [a_round(1, 0)], [32]),  # too far behind: the rest is skipped
    ],
)
def test_draft_passes_read_what_the_draft_has_not_seen(rounds: list, widths: list[int]) -> None:
    assert list(draft_widths(rounds)) == widths


def test_draft_widths_count_each_answer_for_itself() -> None:
    run = a_run("code-1", 2, [a_round(2, 2)], total_s=1.0)
    other = replace(run, prompt="code-2")
    plains = [plain_run("code-1", 3, 3.0), plain_run("code-2", 3, 3.0)]
    (row,) = compare([*plains, run, other], COSTS)
    assert row.improvement_factor == pytest.approx(3 / (2 * 0.25 + 1.2))


def test_without_a_draft_model_drafting_costs_nothing() -> None:
    runs = [plain_run("copy-1", 3, 3.0)]
    runs.append(a_run("copy-1", "auto", [a_round(2, 2, copied=2)], total_s=1.2))
    (row,) = compare(runs, Costs(None, COSTS.target))
    assert row.improvement_factor == pytest.approx(3 / 1.2)
    assert (row.cost_coefficient, row.best_gamma) == (None, None)


def test_best_gamma_rises_with_the_acceptance_rate() -> None:
    chosen = []
    for accepted in (0, 2, 4):
        rounds = [a_round(4, accepted), a_round(4, min(accepted, 3))]
        tokens = sum(len(round.tokens) for round in rounds)
        runs = [plain_run("code-1", tokens, 1.0), a_run("code-1", 4, rounds, total_s=1.0)]
        chosen.append(compare(runs, COSTS)[0].best_gamma)
    assert chosen[0] == 0
    assert all(a < b for a, b in pairwise(chosen))  # type: ignore[operator]

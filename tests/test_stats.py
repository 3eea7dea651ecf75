"""Sums and ratios of rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lspec.round import Plain, Round, Source
from lspec.stats import Tally


def a_round(drafted: int, accepted: int, *, emitted: int | None = None) -> Round:
    n = accepted + 1 if emitted is None else emitted
    return Round(
        tokens=(7,) * n,
        source=(Source.DRAFT,) * accepted + (Source.TARGET,) * (n - accepted),
        proposed=(Source.DRAFT,) * drafted,
        accepted=accepted,
        rejected=accepted < drafted,
        ended=False,
        width=drafted + 1,
        draft_steps=drafted,
        draft_s=0.25,
        target_s=0.5,
    )


def test_sums_and_ratios() -> None:
    tally = Tally(prompt_tokens=10, reused_tokens=4, prompt_s=1.5, total_s=4.0)
    for drafted, accepted in ((4, 4), (4, 1), (4, 0), (2, 2)):
        tally.add(a_round(drafted, accepted))
    stats = tally.stats(generated_tokens=11)
    assert (stats.rounds, stats.drafted, stats.accepted) == (4, 14, 7)
    assert stats.acceptance_rate == pytest.approx(7 / 9)  # two rejections; tails are not examined
    assert stats.accepted_fraction == pytest.approx(7 / 14)
    assert stats.block_efficiency == pytest.approx(11 / 4)
    assert (stats.draft_s, stats.target_s, stats.total_s) == (1.0, 2.0, 4.0)
    assert stats.tokens_per_s == pytest.approx(11 / 4)
    assert (stats.prompt_tokens, stats.reused_tokens, stats.prompt_s) == (10, 4, 1.5)


def test_ratios_of_nothing_are_none() -> None:
    stats = Tally().stats(generated_tokens=0)
    assert stats.acceptance_rate is None
    assert stats.accepted_fraction is None
    assert stats.block_efficiency is None
    assert stats.tokens_per_s is None
    assert stats.line() == "0 tokens"


def test_plain_decoding_has_no_acceptance_rate() -> None:
    tally = Tally(total_s=2.0)
    for _ in range(5):
        tally.add(a_round(0, 0))
    stats = tally.stats(generated_tokens=5)
    assert stats.acceptance_rate is None
    assert stats.block_efficiency == 1
    assert stats.line() == "5 tokens, 2.5 tok/s, 1.00 per round, plain"


def test_line_says_that_hardly_anything_was_drafted() -> None:
    tally = Tally(total_s=2.0)
    for _ in range(30):
        tally.add(replace(a_round(0, 0), plain=Plain.COST))
    tally.add(a_round(3, 1))
    assert tally.stats(generated_tokens=32).line() == (
        "32 tokens, 16.0 tok/s, 1.03 per round, mostly plain (drafting did not pay)"
    )


def test_rejecting_everything_is_a_rate_of_zero_not_none() -> None:
    tally = Tally()
    tally.add(a_round(4, 0))
    assert tally.stats(generated_tokens=1).acceptance_rate == 0


def test_line_has_tokens_speed_efficiency_and_alpha() -> None:
    tally = Tally(total_s=2.0)
    for _ in range(3):
        tally.add(a_round(4, 3))
    line = tally.stats(generated_tokens=12).line()
    assert line == "12 tokens, 6.0 tok/s, 4.00 per round, alpha 0.75"

"""One sentence about a benchmark, for results that were made up."""

from __future__ import annotations

from dataclasses import replace

from fabricated import a_row

from lspec.verdict import verdict


def test_pair_that_pays() -> None:
    rows = [
        a_row("code", 1.9),
        a_row("creative", 0.91),
        a_row("all", 1.5),
        a_row("code", 1.2, gamma=8),
        a_row("all", 1.1, gamma=8),
        a_row("all", 1.25, gamma=2, temperature=1.0),
    ]
    assert verdict(rows) == (
        "This pair pays on this machine: "
        "at temperature 0 gamma 4 is best with 1.50 times plain (15.0 against 10.0 tok/s), "
        "though not for creative (0.91); "
        "at temperature 1 gamma 2 is best with 1.25 times plain (12.5 against 10.0 tok/s)."
    )


def test_pair_that_does_not_pay() -> None:
    rows = [a_row("code", 0.8), a_row("all", 0.7), a_row("all", 0.5, gamma=8)]
    assert verdict(rows) == (
        "This pair does not pay on this machine: at temperature 0 gamma 4 comes closest "
        "with 0.70 times plain (7.0 against 10.0 tok/s): a round yields 3.00 tokens for the price "
        "of 2.50 single steps."
    )


def test_single_repeat_must_be_what_was_predicted() -> None:
    def all_of(speedup: float, predicted: float, repeats: int) -> tuple[str, str]:
        row = replace(a_row("all", speedup), improvement_factor=predicted, repeats=repeats)
        head, _, rest = verdict([row]).partition(":")
        return head, rest

    head, rest = all_of(1.06, 0.99, 1)
    assert head == "This pair does not clearly pay on this machine"
    assert rest == (
        " at temperature 0 gamma 4 is best with 1.06 times plain (10.6 against 10.0 "
        "tok/s) in a single repeat, while the costs measured before it promise 0.99: more "
        "--repeats would tell."
    )
    for yes in (all_of(1.06, 1.05, 1), all_of(1.06, 0.99, 2)):
        assert yes[0] == "This pair pays on this machine"


def test_pair_that_pays_for_some_categories_only() -> None:
    rows = [
        a_row("code", 0.8),
        a_row("copy", 1.6),
        a_row("math", 1.1),
        a_row("all", 0.9, gamma=4),
        a_row("code", 0.6, gamma=8),
        a_row("copy", 2.1, gamma=8),
        a_row("math", 1.0, gamma=8),
        a_row("all", 0.8, gamma=8),
    ]
    assert verdict(rows) == (
        "This pair pays on this machine only in part: at temperature 0 for copy (2.10 with gamma 8)"
        " and math (1.10 with gamma 4), while over all prompts gamma 4 comes closest with 0.90 "
        "times plain (9.0 against 10.0 tok/s)."
    )


def test_pair_that_pays_at_one_temperature_only() -> None:
    text = verdict([a_row("all", 1.5), a_row("all", 0.8, temperature=1.0)])
    assert text.startswith("This pair pays on this machine only in part: at temperature 0 gamma 4")
    assert "; at temperature 1 gamma 4 comes closest with 0.80 times plain" in text


def test_a_gain_within_the_noise_is_none() -> None:
    assert verdict([a_row("all", 1.02)]) == (
        "This pair does not clearly pay on this machine: at temperature 0 gamma 4 is best with "
        "1.02 times plain (10.2 against 10.0 tok/s), which the machine's own ups and downs may be."
    )
    uneven = verdict([a_row("all", 1.3, low=0.9)])
    assert "does not clearly pay" in uneven
    assert "0.90 to 1.31" in uneven


def test_automatic_gamma_is_named() -> None:
    assert "gamma auto is best with 1.40" in verdict([a_row("all", 1.4, gamma="auto")])


def test_nothing_measured_and_nothing_drafted_are_no_verdicts() -> None:
    assert "Nothing was measured" in verdict([])
    assert "No token was drafted" in verdict([a_row("all", 1.0, gamma="auto", alpha=None)])


def test_a_setting_that_never_drafted_does_not_pay_however_fast_it_seems() -> None:
    idle = [a_row("all", 1.16, gamma="auto", alpha=None)]
    slow = [a_row("all", 0.7, gamma=2)]
    said = verdict([*idle, *slow])
    assert said == (
        "This pair does not pay on this machine: at temperature 0 gamma auto drafted nothing and "
        "was right."
    )

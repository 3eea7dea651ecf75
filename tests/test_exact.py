"""Exact mode: passes of one width class, and the same text whatever drafts."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from table import TableModel
from test_widths import Uneven

import lspec
from lspec import selfcheck
from lspec.costs import Costs
from lspec.engine import Engine
from lspec.exact import ChunkedCache, ExactModel
from lspec.llama import LlamaModel, LoadOptions
from lspec.model import FloatRows
from lspec.selfcheck import Findings, best, choose, survey, tokens_per_s
from lspec.widths import WIDTHS, Widths

# -- padding --


def by_width(width: int, before: int, place: int) -> float:
    return float(width)


@pytest.mark.parametrize(
    ("n", "rows"), [(n, rows) for n in range(1, 8) for rows in range(1, n + 1)]
)
def test_narrower_pass_is_padded_and_returns_the_rows_that_were_asked_for(
    n: int, rows: int
) -> None:
    table, inner = TableModel(max_rows=17), Uneven(by_width)
    model = ExactModel(inner, (2, 5, 7))
    text = [1, 2, 3, *(i % 4 for i in range(n))]
    model.eval(text[:3], rows=0)
    found = model.eval(text[3:], rows=rows).copy()
    width = 2 if n <= 2 else 5 if n <= 5 else 7
    assert inner.asked == [(3, 0), (width, width)]
    assert inner.seen == text
    assert model.n_past == len(text)
    expected = [table.logits(text[: len(text) - rows + 1 + i]) + width for i in range(rows)]
    assert found == pytest.approx(np.array(expected), abs=1e-5)


def test_pass_without_rows_keeps_its_width() -> None:
    inner = Uneven(by_width)
    model = ExactModel(inner, (3,))
    for n in (1, 2, 3, 64):
        model.eval([0] * n, rows=0)
    assert inner.asked == [(1, 0), (2, 0), (3, 0), (64, 0)]


def test_padding_at_the_end_of_the_window_needs_the_spare_cells_only() -> None:
    inner = Uneven(by_width, n_ctx=20 + 5)  # a window of 20 and a spare pass
    model = ExactModel(inner, (5,))
    model.eval([1] * 19, rows=0)
    model.eval([2], rows=1)
    assert inner.seen == [1] * 19 + [2]


# -- what the next prompt may reuse --


def chunked() -> tuple[ChunkedCache, TableModel]:
    model = TableModel(n_ctx=64, n_batch=4)
    return ChunkedCache(model), model


def test_only_whole_chunks_of_the_prompt_are_reused() -> None:
    cache, model = chunked()
    text = [1, 2, 3, 0, 1, 2, 3, 0, 1, 2]
    assert cache.catch_up(text)
    assert [len(p) for p in model.passes] == [4, 4, 2]
    cache.eval([3, 3, 3], rows=3)  # decoded, not read as a chunk
    assert cache.reuse([*text, 3, 3, 3, 1]) == 8
    assert cache.reuse([*text[:7], 1, 1]) == 4
    assert cache.reuse([2]) == 0


def test_chunk_boundaries_do_not_depend_on_what_was_reused() -> None:
    cache, model = chunked()
    first, second = [1] * 10, [1] * 10 + [2] * 7
    cache.catch_up(first)
    cache.reuse(second)
    model.passes.clear()
    cache.catch_up(second)
    assert [len(p) for p in model.passes] == [4, 4, 1]
    assert model.seen == second


def test_interrupted_prompt_leaves_whole_chunks() -> None:
    cache, model = chunked()
    assert not cache.catch_up([1] * 11, lambda: len(model.passes) >= 2)
    assert cache.reuse([1] * 11) == 8
    assert cache.catch_up([1] * 11)
    assert cache.reuse([1] * 11) == 8


def test_truncated_chunks_are_forgotten() -> None:
    cache, _ = chunked()
    cache.catch_up([1] * 8)
    cache.truncate(6)
    cache.eval([1, 1], rows=2)
    assert cache.reuse([1] * 8) == 4


# -- the choice --

FLAT = tuple(1 + 0.1 * i for i in range(17))  # seconds of passes where memory is the limit


def findings(kv_type: Any, *classes: tuple[int, ...], seconds: tuple[float, ...] = ()) -> Findings:
    return Findings(kv_type, Widths(classes, (0.5,) * 17, (40,)), seconds or FLAT)


def test_widest_class_is_chosen_where_wide_passes_are_cheap() -> None:
    wide = tuple(range(2, 10))
    choice = best([findings("f16", (1,), wide, (10, 11)), findings("q8_0", (1, 2), (3, 4))])
    assert choice is not None
    assert (choice.kv_type, choice.widths) == ("f16", wide)


def test_class_with_single_steps_is_chosen_where_wide_passes_cost_their_tokens() -> None:
    linear = tuple(1.0 + 0.8 * i for i in range(17))
    found = [
        findings("f16", (1,), tuple(range(2, 9)), seconds=linear),
        findings("q8_0", tuple(range(1, 8)), seconds=tuple(0.99 * s for s in linear)),
    ]
    choice = best(found)
    assert choice is not None
    assert (choice.kv_type, choice.widths) == ("q8_0", tuple(range(1, 8)))
    plain = best(found[:1])
    assert plain is not None
    assert plain.widths == (1,), "padding every step would cost more than drafting gains"


def test_padded_passes_and_draft_steps_count_in_what_a_class_promises() -> None:
    seconds = (1.0, 2.0, 4.0, 8.0)
    assert tokens_per_s(seconds, (1,)) == pytest.approx(1)
    assert tokens_per_s(seconds, (2,)) == pytest.approx(1.8 / 2.2)
    assert tokens_per_s(seconds, (1, 2)) == pytest.approx(1)
    assert tokens_per_s((1.0, 1.0, 1.0), (1, 3)) == pytest.approx((1 + 0.8 + 0.64) / 1.4)


def test_no_class_of_two_widths_is_no_choice() -> None:
    alone = tuple((width,) for width in WIDTHS)
    assert best([findings("f16", *alone), Findings("q8_0", None, problem="no")]) is None
    choice = best([findings("f16", *alone), findings("q8_0", (16, 17), *alone[:15])])
    assert choice is not None


# -- on llama.cpp --

PROMPTS = ["The quick brown fox", "x", "def f(a, b):\n    return " * 8, "one two one two one two "]
LONG = "All work and no play makes Jack a dull boy. " * 5  # more than two chunks


@pytest.fixture(scope="session")
def exact_files(models: Path) -> tuple[Path, Path]:
    """A target whose cache can be q8_0 as well, and its draft."""
    folder = models / "exact"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "WIDTH", 128)  # heads of 32, the size of a block of q8_0
        target = tiny.write_chat_model(folder / "target.gguf", seed=3, end_bias=-20)
        draft = tiny.write_chat_model(folder / "draft.gguf", seed=3, blur=0.1, end_bias=-20)
    return target, draft


@pytest.fixture(scope="module", autouse=True)
def quiet_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remember findings for these tests alone, with costs that no other process disturbs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(selfcheck, "measure", lambda *args, **kwargs: Costs(None, FLAT))
        yield


def load(files: Sequence[Path], **options: Any) -> Engine:
    """Load a target, and a draft where there is one, in exact mode."""
    roles = dict(zip(("target", "draft"), files, strict=False))
    return lspec.load(**{**roles, "exact": True, "n_ctx": 768, "n_threads": 1, **options})


@pytest.fixture(scope="module")
def engine(exact_files: tuple[Path, Path]) -> Iterator[Engine]:
    with load(exact_files) as engine:
        yield engine


def tokens(engine: Engine, prompt: str | Sequence[int], **options: Any) -> tuple[int, ...]:
    return engine.generate(prompt, **{"max_tokens": 48, "seed": 5, **options}).tokens


SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.0, "repeat_penalty": 1.3, "frequency_penalty": 0.3, "penalty_last_n": 20},
]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_text_is_the_same_for_every_gamma(
    engine: Engine, prompt: str, sampling: dict[str, Any]
) -> None:
    plain = tokens(engine, prompt, gamma=0, reuse=False, **sampling)
    assert len(plain) == 48
    for gamma, reuse in itertools.product((1, 2, 3, 4, 7, "auto"), (True, False)):
        assert tokens(engine, prompt, gamma=gamma, reuse=reuse, **sampling) == plain, gamma


@pytest.mark.parametrize("sampling", SAMPLING)
def test_text_is_the_same_for_every_drafter_and_draft(
    exact_files: tuple[Path, Path], engine: Engine, sampling: dict[str, Any], models: Path
) -> None:
    target, draft = exact_files
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "WIDTH", 64)
        other = models / "exact" / "other.gguf"
        if not other.exists():
            tiny.write_chat_model(other, seed=9, end_bias=-20)
    expected = [tokens(engine, prompt, **sampling) for prompt in PROMPTS]
    choices: list[dict[str, Any]] = [
        {"draft": draft, "drafter": "model", "gamma": 4},
        {"draft": target, "gamma": 7},
        {"draft": other, "gamma": 3},
        {"draft": other, "draft_n_ctx": 64},
        {"drafter": "ngram", "gamma": 5},
        {"drafter": "auto"},
        {"drafter": "none"},
    ]
    for options in choices:
        with load([target], **options) as variant:
            assert [tokens(variant, p, **sampling) for p in PROMPTS] == expected, options


def test_text_is_the_same_with_and_without_what_earlier_turns_left(engine: Engine) -> None:
    for cut in (60, 64, 65, 127, 128, 129, 200):
        prompt = engine.tokenize(LONG)[:cut]
        fresh = tokens(engine, prompt, gamma=3, reuse=False)
        tokens(engine, LONG, gamma=2)
        warm = engine.generate(prompt, max_tokens=48, seed=5, gamma=4)
        assert warm.tokens == fresh
        assert warm.stats.reused_tokens == (cut - 1) // 64 * 64
        again = engine.generate([*prompt, *fresh], max_tokens=48, seed=5)
        assert again.tokens == tokens(engine, [*prompt, *fresh], gamma=0, reuse=False)


def test_text_goes_on_to_the_end_of_the_window(exact_files: tuple[Path, Path]) -> None:
    prompt = [65] * 230
    texts = []
    with load(exact_files, n_ctx=256) as engine:
        for gamma in (0, 1, 7, 16):
            done = engine.generate(prompt, gamma=gamma, seed=1, reuse=False)
            assert (len(done.tokens), done.finish_reason) == (26, "length")
            texts.append(done.tokens)
    assert texts == [texts[0]] * 4


def test_context_beyond_256_tokens(engine: Engine) -> None:
    prompt = engine.tokenize(LONG)[:220]
    plain = tokens(engine, prompt, gamma=0, max_tokens=100, reuse=False)
    for gamma in (2, 5, "auto"):
        assert tokens(engine, prompt, gamma=gamma, max_tokens=100) == plain


def test_different_seeds_differ(engine: Engine) -> None:
    whole = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert len({tokens(engine, PROMPTS[0], seed=seed, **whole) for seed in range(8)}) == 8


def test_every_pass_with_rows_has_a_width_of_the_class(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: set[tuple[int, int]] = set()
    real = LlamaModel.eval

    def watch(self: LlamaModel, ids: Sequence[int], *, rows: int) -> Any:
        if self is engine._player.models[0]:
            widths.add((len(ids), rows))
        return real(self, ids, rows=rows)

    monkeypatch.setattr(LlamaModel, "eval", watch)
    for gamma in (0, 3, 16):
        tokens(engine, PROMPTS[0], gamma=gamma)
    allowed = engine._player.widths
    assert allowed is not None
    assert {rows for _, rows in widths} <= {0, *allowed}
    assert all(width == rows for width, rows in widths if rows)


@pytest.mark.parametrize(("widths", "same"), [(WIDTHS[1:], True), (WIDTHS, False)])
def test_wrong_class_shows_in_the_text(
    exact_files: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    widths: tuple[int, ...],
    same: bool,
) -> None:
    """The control, on a single-row kernel that is off by more than the real one."""
    real = LlamaModel.eval

    def exaggerated(self: LlamaModel, ids: Sequence[int], *, rows: int) -> FloatRows:
        return real(self, ids, rows=rows) * np.float32(1.2 if len(ids) == 1 else 1)

    monkeypatch.setattr(LlamaModel, "eval", exaggerated)
    options = LoadOptions(768, 17, n_threads=1, spare=17)
    target, draft = (LlamaModel([path], options) for path in exact_files)
    names: dict[str, Any] = {"drafter": "auto", "rule": "coupled", "chat_template": None}
    with Engine(target, draft, gamma=4, widths=widths, **names) as engine:
        texts = [
            [tokens(engine, PROMPTS[0], seed=seed, gamma=gamma) for seed in range(5)]
            for gamma in (0, 3)
        ]
    assert (texts[0] == texts[1]) == same


def test_drafted_tokens_are_accepted_and_the_mode_is_reported(engine: Engine) -> None:
    stats = engine.generate(PROMPTS[0], gamma=4, seed=1, max_tokens=48).stats
    assert stats.exact
    assert stats.rule == "coupled"
    assert stats.rounds < stats.generated_tokens
    assert engine.description.endswith(", exact")


# -- loading --


def test_findings_are_remembered_for_each_type_of_cache(
    exact_files: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.INFO, "lspec")
    files, options = exact_files[:1], LoadOptions(256, 17, n_threads=1)
    first = survey(files, options)
    assert [r.message for r in caplog.records if "a minute or two" in r.message]
    monkeypatch.setattr(selfcheck, "_examine", None)
    caplog.clear()
    assert survey(files, options) == first
    assert first is not None
    for kv_type in [found.kv_type for found in first]:
        again = survey(files, options, kv_type)
        assert again == [found for found in first if found.kv_type == kv_type]
    with load(files, n_ctx=256, drafter="none") as engine:
        assert engine.exact
    assert "a minute or two" not in caplog.text


def test_other_threads_files_and_unreadable_records_are_looked_at_anew(
    exact_files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    survey(exact_files[:1], LoadOptions(256, 17, n_threads=1), "f16")
    (record,) = (tmp_path / "lspec" / "exact").iterdir()
    assert json.loads(record.read_text())["kv_type"] == "f16"
    looked: list[object] = []

    def look(*args: Any) -> Findings:
        looked.append(args)
        return findings("f16", WIDTHS)

    monkeypatch.setattr(selfcheck, "_examine", look)
    survey(exact_files[:1], LoadOptions(4096, 9, n_threads=1, spare=5), "f16")
    assert looked == [], "window and rows do not count"
    survey(exact_files[:1], LoadOptions(256, 17, n_threads=2), "f16")
    survey(exact_files[1:], LoadOptions(256, 17, n_threads=1), "f16")
    assert len(looked) == 2
    for damaged in ("", "{}", '{"kv_type": "f16"}', "[1]"):
        record.write_text(damaged)
        survey(exact_files[:1], LoadOptions(256, 17, n_threads=1), "f16")
    assert len(looked) == 6


def test_cache_that_cannot_be_written_is_no_error(
    exact_files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lspec").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert choose(exact_files[:1], LoadOptions(256, 17, n_threads=1)).widths


def test_type_of_cache_that_the_model_cannot_have_is_left_out(law_target: Path) -> None:
    found = survey([law_target], LoadOptions(256, 17, n_threads=1), "q8_0")  # heads of 8
    assert found is not None
    assert found[0].widths is None
    assert "q8_0" in found[0].problem
    with pytest.raises(lspec.ModelLoadError, match=r"not possible here.*q8_0"):
        load([law_target], kv_type="q8_0", drafter="none")


def test_given_type_of_cache_is_kept(exact_files: tuple[Path, Path]) -> None:
    for kv_type in ("f16", "q8_0"):
        with load(exact_files, kv_type=kv_type) as engine:
            assert [model.kv_type for model in engine._player.models] == [kv_type, kv_type]


def test_model_without_agreeing_widths_is_refused_with_the_difference(
    exact_files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = tuple((width,) for width in WIDTHS)
    found = Findings("f16", Widths(alone, (0.0, 0.5, *(0.25,) * 15), (40,)), (1.0,) * 17)
    monkeypatch.setattr(selfcheck, "_read", lambda path: found)
    with pytest.raises(lspec.ModelLoadError, match=r"differ by up to 0\.5\n") as caught:
        load(exact_files)
    assert "Without exact mode" in caught.value.hint


def test_model_that_cannot_go_back_is_refused(mamba_model: Path, lfm2_model: Path) -> None:
    for path in (mamba_model, lfm2_model):
        with pytest.raises(lspec.ModelLoadError, match=r"not possible here.*cut back"):
            load([path])


def test_missing_file_is_what_it_always_is(tmp_path: Path) -> None:
    with pytest.raises(lspec.ModelLoadError, match="cannot read"):
        load([tmp_path / "none.gguf"], drafter="none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "rejection"}, "rule of its own"),
        ({"kv_type": "f32"}, "kv_type must be f16, q8_0 or q4_0, not 'f32'"),
    ],
)
def test_wrong_options_are_refused(
    exact_files: tuple[Path, Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(lspec.RequestError, match=message):
        load(exact_files, **options)


def test_request_cannot_ask_for_another_rule(engine: Engine) -> None:
    with pytest.raises(lspec.RequestError, match="rule of its own"):
        engine.generate("x", rule="block")
    assert tokens(engine, "x", rule="coupled") == tokens(engine, "x")

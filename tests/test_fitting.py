"""Whether a pair fits, with shapes and free memory made up."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lspec.errors import ModelLoadError
from lspec.fitting import (
    Free,
    Wish,
    largest_window,
    outlook,
    placed,
    placed_for_exact,
)
from lspec.fitting import refusal as refusal_of
from lspec.memory import KV_BYTES, WINDOW_STEP, Layer, Setting, Shape

GB = 10**9
SETTING = Setting(n_ctx=16384, max_rows=17, chunk=64)


def shape(layers: int, weights: int, *, trained: int = 32768, quantizable: bool = True) -> Shape:
    """A model of `layers` layers, of which each adds 4096 numbers a token to the cache."""
    layer = Layer(weights, cached=4096, state=0, live=30_000, largest=weights // 4)
    return Shape(
        (layer,) * layers,
        input=GB // 2,
        output=GB // 2,
        tied=0,
        vocabulary=50_000_000,
        n_vocab=100_000,
        n_embd=2048,
        n_heads=16,
        n_ctx_train=trained,
        sliding=False,
        one_state=False,
        quantizable=quantizable,
    )


TARGET, DRAFT = shape(30, GB // 10), shape(10, GB // 20)
ALONE = Wish(TARGET, SETTING)
PAIR = Wish(TARGET, SETTING, DRAFT, SETTING)
OFFLOADED = replace(ALONE, setting=replace(SETTING, gpu_layers=-1))
BOTH = replace(PAIR, setting=OFFLOADED.setting, draft_setting=OFFLOADED.setting)


def refusal(wish: Wish, free: Free) -> ModelLoadError:
    error = refusal_of(wish, free, "big.gguf")
    assert error is not None
    return error


def advice(wish: Wish, free: Free, option: str) -> str | None:
    """Return the value of an option that the refusal names; None if it does not."""
    found = re.search(rf'\b{option}="?(\w+)', refusal(wish, free).hint)
    return found[1] if found else None


@pytest.mark.parametrize("free", [Free(None), Free(100 * GB), Free(100 * GB, 1)])
def test_what_fits_or_cannot_be_known_is_not_refused(free: Free) -> None:
    assert refusal_of(PAIR, free, "big.gguf") is None


def test_refusal_has_the_numbers_and_the_way_round() -> None:
    need = PAIR.plan.host
    error = refusal(PAIR, Free(need - 1))
    assert str(error) == (
        f"big.gguf with a window of 16384 tokens needs {need / 1e9:.2f} GB of memory, "
        f"where {need / 1e9:.2f} GB are free"
    )
    assert error.hint.startswith("What would fit: n_ctx=")
    assert error.hint.endswith("force=True loads it all the same.")
    assert refusal_of(PAIR, Free(need), "big.gguf") is None


@pytest.mark.parametrize("wish", [ALONE, PAIR])
@pytest.mark.parametrize("less", [GB // 100, GB, 2 * GB])
def test_window_that_is_named_is_the_largest_that_fits(wish: Wish, less: int) -> None:
    free = Free(wish.plan.host - less)
    window = int(advice(wish, free, "n_ctx") or 0)
    assert window % WINDOW_STEP == 0
    assert free.holds(wish.with_window(window).plan)
    assert not free.holds(wish.with_window(window + 1).plan)


def test_type_of_cache_that_is_named_fits_and_changes_least() -> None:
    for less, named in ((GB // 100, "q8_0"), (5 * GB // 2, "q4_0"), (4 * GB, None)):
        free = Free(ALONE.plan.host - less)
        assert advice(ALONE, free, "kv_type") == named
        assert named is None or free.holds(ALONE.with_kv_type(named).plan)
    smallest = ALONE.with_kv_type("q4_0")
    assert advice(smallest, Free(smallest.plan.host - 1), "kv_type") is None


def test_type_of_cache_is_not_named_where_heads_cannot_be_quantized() -> None:
    odd = replace(ALONE, target=replace(TARGET, quantizable=False))
    assert advice(odd, Free(odd.plan.host - 1), "kv_type") is None
    assert advice(odd, Free(odd.plan.host - 1), "n_ctx")


def test_type_of_cache_is_not_named_without_flash_attention() -> None:
    scores = replace(ALONE, setting=replace(SETTING, flash_attn=False))
    free = Free(scores.plan.host - 1)
    assert advice(scores, free, "kv_type") is None
    assert advice(scores, free, "n_ctx")
    assert list(outlook(scores, free).windows) == ["f16"]


def test_layers_are_no_advice_since_the_gpu_gets_as_many_as_it_holds() -> None:
    crowded = placed(BOTH, Free(GB, GB))
    assert "GPU" not in str(refusal(crowded, Free(GB, GB)))
    assert "gpu" not in refusal(crowded, Free(GB, GB)).hint


def test_where_the_gpu_shares_the_memory_both_sides_count_together() -> None:
    need = OFFLOADED.plan.host + OFFLOADED.plan.gpu
    own, shared = Free(need - 1, need), Free(need - 1, need, unified=True)
    assert own.holds(OFFLOADED.plan)
    assert not shared.holds(OFFLOADED.plan)
    assert f"needs {need / 1e9:.2f} GB of memory" in str(refusal(OFFLOADED, shared))
    assert refusal_of(OFFLOADED, Free(need, need, unified=True), "big.gguf") is None


def test_draft_may_have_a_shorter_window_or_go() -> None:
    free = Free(PAIR.plan.host - GB // 100)
    window = int(advice(PAIR, free, "draft_n_ctx") or 0)
    assert window % WINDOW_STEP == 0
    assert free.holds(PAIR.with_draft_window(window).plan)
    assert not free.holds(PAIR.with_draft_window(window + 1).plan)
    assert 'drafter="ngram"' in refusal(PAIR, free).hint
    without = Free(PAIR.without_draft().plan.host)
    assert advice(PAIR, without, "draft_n_ctx") is None
    assert 'drafter="ngram"' in refusal(PAIR, without).hint


def test_where_nothing_fits_the_model_is_too_large() -> None:
    assert refusal(PAIR, Free(GB)).hint.startswith("Take a smaller model.")


def test_largest_window_ends_where_the_target_was_trained() -> None:
    assert largest_window(PAIR, Free(100 * GB)) == 32768
    odd = replace(ALONE, target=replace(TARGET, n_ctx_train=1000))
    assert largest_window(odd, Free(100 * GB)) == 1000
    assert largest_window(PAIR, Free(GB)) == 0
    unknown = replace(ALONE, target=replace(TARGET, n_ctx_train=0))
    assert largest_window(unknown, Free(100 * GB)) == SETTING.n_ctx


def test_draft_with_a_window_of_its_own_keeps_it() -> None:
    own = replace(PAIR, shares_window=False).with_window(1024)
    assert own.plan.target.n_ctx == 1024
    assert own.plan.draft is not None
    assert own.plan.draft.n_ctx == SETTING.n_ctx


def test_share_of_what_is_free() -> None:
    free = Free(ALONE.plan.host)
    assert largest_window(ALONE, free) == SETTING.n_ctx
    assert 0 < largest_window(ALONE, free, 0.9) < SETTING.n_ctx


def test_outlook_has_the_largest_window_of_every_type() -> None:
    found = outlook(PAIR, Free(PAIR.plan.host))
    assert found.plan == PAIR.plan
    assert list(found.windows) == list(KV_BYTES)
    assert found.windows["f16"] == SETTING.n_ctx < found.windows["q8_0"]
    odd = replace(PAIR, draft=replace(DRAFT, quantizable=False))
    assert list(outlook(odd, Free(None)).windows) == ["f16"]


def test_layers_are_as_many_as_fit_and_the_draft_leaves_last() -> None:
    assert placed(BOTH, Free(100 * GB)) == placed(BOTH, Free(1, BOTH.plan.gpu)) == BOTH
    free = Free(100 * GB, BOTH.plan.gpu - GB)
    found = placed(BOTH, free)
    n = found.setting.gpu_layers
    assert found == BOTH.with_target_layers(n)
    assert 0 < n < 31
    assert free.holds(found.plan)
    assert not free.holds(BOTH.with_target_layers(n + 1).plan)
    alone = BOTH.with_target_layers(0)
    assert placed(BOTH, Free(100 * GB, alone.plan.gpu)) == alone
    assert placed(BOTH, Free(100 * GB, alone.plan.gpu - 1)) == alone.with_draft_on_cpu()
    assert placed(BOTH, Free(1, 1)) == alone.with_draft_on_cpu()  # whatever the host says


def test_number_of_layers_that_was_asked_for_is_the_most() -> None:
    asked = BOTH.with_target_layers(9)
    assert placed(asked, Free(100 * GB, 100 * GB)) == asked
    less = placed(asked, Free(100 * GB, asked.plan.gpu - 1))
    assert 0 < less.setting.gpu_layers < 9


def test_share_of_the_gpu() -> None:
    free = Free(100 * GB, BOTH.plan.gpu)
    found = placed(BOTH, free, 0.9)
    assert found.plan.target.gpu_layers < 31
    assert free.holds(found.plan, 0.9)


def test_exact_mode_has_all_layers_half_or_none() -> None:
    wish, half = OFFLOADED, OFFLOADED.with_target_layers(15)
    found = [
        placed_for_exact(wish, Free(100 * GB, free)).plan.target.gpu_layers
        for free in (wish.plan.gpu, wish.plan.gpu - 1, half.plan.gpu, half.plan.gpu - 1)
    ]
    assert found == [31, 15, 15, 0]
    asked = OFFLOADED.with_target_layers(9)
    for free, n in ((asked.plan.gpu, 9), (asked.plan.gpu - 1, 0)):
        assert placed_for_exact(asked, Free(100 * GB, free)).plan.target.gpu_layers == n


@pytest.mark.parametrize("less", range(0, 8 * GB, GB // 3))
def test_draft_does_not_change_the_layers_of_exact_mode(less: int) -> None:
    free = Free(100 * GB, BOTH.plan.gpu - less)
    alone, pair = (placed_for_exact(wish, free) for wish in (OFFLOADED, BOTH))
    assert alone.plan.target == pair.plan.target
    assert pair.draft_setting is not None
    assert pair.draft_setting.gpu_layers in (-1, 0)
    assert free.holds(pair.plan)

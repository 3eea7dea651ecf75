"""The memory plan: what follows from headers, and what llama.cpp itself allocates."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from lspec.gguf import Header, Tensor, read_header
from lspec.llama import LlamaModel, LoadOptions, native, prompt_chunk
from lspec.memory import KV_BYTES, MemoryPlan, Part, Setting, Shape, plan, shape_of

MIB = 1 << 20
BIG = Setting(n_ctx=4096, max_rows=17, chunk=512)


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads can be quantized."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "WIDTH", 128)
        return tiny.write_chat_model(tmp_path_factory.mktemp("wide") / "wide.gguf")


def shape_at(path: Path) -> Shape:
    return shape_of([read_header(path)])


def fabricated(
    architecture: str = "big", layers: Callable[[int], list[str]] | None = None, **keys: Any
) -> Header:
    """A header of 4 layers and 8 heads, each tensor 64 x 64 f16; `layers` names those of one."""
    metadata = {
        "embedding_length": 64,
        "attention.head_count": 8,
        "context_length": 32768,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    inside = layers or (lambda i: ["attn_k.weight", "attn_output.weight", "ffn_up.weight"])
    names = [f"blk.{i}.{name}" for i in range(4) for name in inside(i)]
    names = ["token_embd.weight", "output_norm.weight", "output.weight", *names]
    tensors = tuple(Tensor(name, (64, 64), 1, 8192 * i) for i, name in enumerate(names))
    named = {f"{architecture}.{key}": value for key, value in metadata.items()}
    return Header(
        {"general.architecture": architecture, **named},
        {"tokenizer.ggml.tokens": 1000, "tokenizer.ggml.merges": 2000},
        tensors,
        size=10_000,
    )


def cache(header: Header, setting: Setting = BIG) -> int:
    return plan(shape_of([header]), setting).target.host.cache


# -- what llama.cpp says that it allocates --


def logged(what: str) -> float:
    """Return the megabytes that llama.cpp last reported for `what`, all of them together."""
    lines = [line for _, line in native._log if f"{what} = " in line]
    return sum(float(re.findall(r"= *([\d.]+) MiB", line)[0]) for line in lines)


@pytest.mark.parametrize("kv_type", KV_BYTES)
@pytest.mark.parametrize("n_ctx", [300, 2048])
@pytest.mark.parametrize("name", ["wide", "lfm2_model", "mamba_model"])
def test_cache_and_buffers_are_those_that_llama_cpp_reports(
    name: str,
    n_ctx: int,
    kv_type: Any,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "_log", deque())
    if name == "lfm2_model" and kv_type != "f16":
        pytest.skip("its heads are too small")
    path = request.getfixturevalue(name)
    options = LoadOptions(n_ctx, 17, n_gpu_layers=0, n_threads=1, kv_type=kv_type)
    LlamaModel([path], options).close()
    setting = Setting(n_ctx, 17, prompt_chunk(options), kv_type)
    planned = plan(shape_at(path), setting).target.host
    found = logged(" KV buffer size") + logged(" RS buffer size")
    assert planned.cache / MIB == pytest.approx(found, abs=0.011)
    computed = logged(" compute buffer size")
    assert 0 < computed <= planned.compute / MIB + 0.005 < 2 * computed + 2


# -- what follows from a header --


@pytest.mark.parametrize("name", ["chat_model", "lfm2_model", "mamba_model"])
def test_weights_are_those_of_the_file(name: str, request: pytest.FixtureRequest) -> None:
    header = read_header(request.getfixturevalue(name))
    part = plan(shape_of([header]), BIG).target.host
    assert part.weights == sum(tensor.n_bytes or 0 for tensor in header.tensors)


def test_parts_of_a_split_model_count_together(tmp_path: Path, models: Path) -> None:
    whole = tiny.write_chat_model(tmp_path / "whole.gguf", seed=1)
    headers = [read_header(path) for path in tiny.write_split_chat_model(tmp_path)]
    assert len(headers) > 1
    assert shape_of(headers) == shape_at(whole)


@pytest.mark.parametrize(("n_ctx", "cells"), [(1, 256), (256, 256), (257, 512), (4000, 4096)])
def test_window_is_rounded_up_as_llama_cpp_does(n_ctx: int, cells: int) -> None:
    header = fabricated()
    assert cache(header, replace(BIG, n_ctx=n_ctx)) == cells * 4 * 128 * 2
    assert plan(shape_of([header]), replace(BIG, n_ctx=n_ctx)).target.n_ctx == n_ctx


def test_spare_cells_are_cached_too() -> None:
    assert cache(fabricated(), replace(BIG, n_ctx=512, spare=17)) == 768 * 4 * 128 * 2


def test_window_is_no_longer_than_the_model_was_trained_on() -> None:
    header = fabricated(context_length=1024)
    assert plan(shape_of([header]), BIG).target.n_ctx == 1024
    assert cache(header) == 1024 * 4 * 128 * 2


def test_grouped_heads_and_their_lengths() -> None:
    assert cache(fabricated(attention__head_count_kv=2)) == 4096 * 4 * 2 * (8 + 8) * 2
    longer = fabricated(
        attention__head_count_kv=2, attention__key_length=32, attention__value_length=16
    )
    assert cache(longer) == 4096 * 4 * 2 * (32 + 16) * 2
    by_layer = fabricated(attention__head_count_kv=[0, 2, 0, 4])
    assert cache(by_layer) == 4096 * (2 + 4) * (8 + 8) * 2


def test_sliding_windows_are_cached_in_full_and_have_a_mask_of_their_own() -> None:
    sliding = fabricated(attention__sliding_window=128)
    assert cache(sliding) == cache(fabricated())
    masks = [plan(shape_of([h]), BIG).target.host.compute for h in (sliding, fabricated())]
    assert masks[0] - masks[1] == 4096 * 512 * 2


def test_latent_attention_caches_keys_alone() -> None:
    keys = {"attention__head_count_kv": 1, "attention__key_length": 96}
    latent = {"attention__key_length_mla": 48, "attention__value_length_mla": 32}
    assert cache(fabricated(**keys, **latent)) == 4096 * 4 * 96 * 2


def test_layers_that_share_a_cache_have_none() -> None:
    assert cache(fabricated(attention__shared_kv_layers=3)) == 4096 * 1 * 128 * 2


RECURRENT = {
    "ssm__conv_kernel": 4,
    "ssm__inner_size": 128,
    "ssm__state_size": 16,
    "ssm__group_count": 1,
}


def hybrid(i: int) -> list[str]:
    return ["attn_k.weight", "attn_output.weight"] if i == 3 else ["attn_qkv.weight", "ssm_out"]


def test_hybrid_model_caches_in_its_attention_layers_and_keeps_states_in_the_others() -> None:
    state = 3 * (128 + 2 * 16) + 128 * 16
    found = cache(fabricated("qwen35", hybrid, **RECURRENT))
    assert found == 4096 * 128 * 2 + 17 * 3 * state * 4
    one = cache(fabricated("qwen3next", hybrid, **RECURRENT))
    assert one == 4096 * 128 * 2 + 3 * state * 4


def test_layer_that_is_both_counts_twice() -> None:
    both = fabricated("falcon-h1", lambda i: ["attn_output.weight", "ssm_out"], **RECURRENT)
    assert cache(both) > 4 * 4096 * 128 * 2


@pytest.mark.parametrize(
    ("keys", "numbers"),
    [
        ({"wkv__head_size": 64}, 64 * (2 + 64)),
        ({"shortconv__l_cache": 3}, 64 * 2),
        ({"kda__head_dim": 16, "ssm__conv_kernel": 4}, 8 * 16 * (3 * 3 + 16)),
    ],
)
def test_states_of_other_kinds(keys: dict[str, int], numbers: int) -> None:
    header = fabricated("other", lambda i: ["time_mix_key.weight", "ssm_out"], **keys)
    assert cache(header) == 4 * 17 * 4 * numbers


@pytest.mark.parametrize(("kv_type", "size"), KV_BYTES.items())
def test_quantized_caches(kv_type: str, size: float) -> None:
    assert cache(fabricated(), replace(BIG, kv_type=kv_type)) == 4096 * 4 * 128 * size


def test_heads_of_odd_length_cannot_be_quantized() -> None:
    assert not shape_of([fabricated()]).quantizable  # 8 numbers a head
    assert shape_of([fabricated(attention__key_length=64, attention__value_length=32)]).quantizable


def test_scores_count_where_attention_is_not_fused() -> None:
    shape = shape_of([fabricated()])
    plans = [plan(shape, replace(BIG, flash_attn=flash)).target.host for flash in (True, False)]
    assert plans[1].compute - plans[0].compute > 4096 * 512 * 8 * 4


def test_experts_count_as_often_as_a_token_uses_them() -> None:
    header = fabricated(expert_used_count=2)
    expert = Tensor("blk.0.ffn_up_exps.weight", (64, 300, 16), 1, 8192 * len(header.tensors))
    layer = shape_of([replace(header, tensors=(*header.tensors, expert))]).layers[0]
    assert layer.live == 3 * 64 + 2 * 300
    assert layer.largest == 64 * 300 * 16 * 2


def test_unknown_types_count_with_the_bytes_that_they_take_in_the_file() -> None:
    header = fabricated()
    unknown = tuple(replace(tensor, type=9999) for tensor in header.tensors)
    part = plan(shape_of([replace(header, tensors=unknown)]), BIG).target.host
    assert part.weights == 8192 * (len(unknown) - 1)  # behind the last one nothing is known


def test_header_that_says_nothing_takes_nothing_but_the_program() -> None:
    empty = Header({}, {}, (), 24)
    found = plan(shape_of([empty]), BIG)
    assert found.host - found.process < 6_000_000  # of it 4 are a mask


# -- on the GPU --


def on_gpu(n: int, **keys: Any) -> MemoryPlan:
    return plan(shape_of([fabricated(**keys)]), replace(BIG, gpu_layers=n))


def test_layers_go_to_the_gpu_from_the_end_and_the_output_first() -> None:
    weights = [(p.target.host.weights, p.target.gpu.weights) for p in map(on_gpu, range(6))]
    layer, ends = 3 * 8192, (8192, 2 * 8192)  # of the input, of the output
    assert weights[0] == (ends[0] + ends[1] + 4 * layer, 0)
    assert weights[1] == (ends[0] + 4 * layer, ends[1])
    assert weights[3] == (ends[0] + 2 * layer, ends[1] + 2 * layer)
    assert weights[5] == (ends[0], ends[1] + 4 * layer)
    assert on_gpu(-1) == on_gpu(5) == on_gpu(99)
    assert on_gpu(-1).target.gpu_layers == on_gpu(0).target.n_layers == 5


def test_caches_follow_their_layers() -> None:
    for n in range(6):
        model = on_gpu(n).target
        assert model.gpu.cache == max(0, n - 1) * 4096 * 128 * 2
        assert model.host.cache + model.gpu.cache == 4 * 4096 * 128 * 2


def test_nothing_is_taken_of_a_gpu_that_is_not_used() -> None:
    found = on_gpu(0)
    assert (found.target.gpu, found.gpu) == (Part(), 0)
    assert on_gpu(1).gpu == on_gpu(1).target.gpu.total


def test_long_passes_copy_weights_that_are_not_on_the_gpu() -> None:
    assert on_gpu(4).target.gpu.compute - on_gpu(5).target.gpu.compute == 8192


def test_host_computes_nothing_where_all_is_on_the_gpu() -> None:
    assert on_gpu(5).target.host.compute < on_gpu(4).target.host.compute
    assert on_gpu(5).target.host.logits == on_gpu(0).target.host.logits == 4 * 1000 * 18


def test_embeddings_that_are_the_output_too_are_on_both_sides() -> None:
    header = fabricated()
    tied = shape_of(
        [replace(header, tensors=tuple(t for t in header.tensors if t.name != "output.weight"))]
    )
    host = plan(tied, BIG).target.host.weights
    whole = plan(tied, replace(BIG, gpu_layers=-1)).target
    assert whole.host.weights + whole.gpu.weights == host + 8192


def test_pair_is_both_models_and_one_process() -> None:
    shape = shape_of([fabricated()])
    alone = plan(shape, BIG)
    both = plan(shape, BIG, shape, replace(BIG, n_ctx=512))
    assert both.draft is not None
    assert both.host == alone.host + both.draft.host.total
    assert both.draft.host.cache == cache(fabricated()) // 8
    assert len(both.models) == 2

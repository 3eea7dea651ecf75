"""Options for GPUs, and what is tried where one has no room. No GPU is needed for it."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
import tiny

import lspec
from lspec import placement as module
from lspec.devices import Gpu
from lspec.errors import GpuMemoryError, ModelLoadError, RequestError
from lspec.llama import Device, LlamaModel, LoadOptions, build, native
from lspec.placement import fit, placement
from lspec.selfcheck import KV_TYPES, survey

FULL = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9 MiB on device 0: out of memory"
ERROR = 4


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that says it has a GPU; its layers are computed by the CPU all the same."""
    for name in ("lspec.llama.native.can_offload", "lspec.placement.can_offload"):
        monkeypatch.setattr(name, lambda: True)


@pytest.fixture
def small_gpu(gpu: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A GPU with room for as many layers as the list says; loading more of a model fails."""
    room = [0]
    load = native.load_model

    def load_model(paths: Any, params: Any) -> Any:
        model = load(paths, params)
        n_layers = params.n_gpu_layers
        wanted = tiny.BLOCKS + 1 if n_layers < 0 else n_layers
        if not params.vocab_only and wanted > room[0]:
            llama_cpp.llama_model_free(model)
            native._log.append((ERROR, FULL))
            raise native._failure(on_gpu=n_layers != 0)(f"cannot load{native.why()}")
        return model

    monkeypatch.setattr(native, "load_model", load_model)
    return room


def options(**fields: Any) -> LoadOptions:
    return replace(LoadOptions(64, 9, n_threads=1), **fields)


def checked(**fields: Any) -> Any:
    given = {
        "main_gpu": None,
        "tensor_split": (),
        "flash_attn": "auto",
        "kv_type": None,
        "layers": (-1, None),
        **fields,
    }
    return placement(**given)


# -- options --


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"main_gpu": 0, "tensor_split": (1, 1)}, "not both"),
        ({"main_gpu": -1}, "0 or more, not -1"),
        ({"tensor_split": (0, 0)}, "up to 16 numbers"),
        ({"tensor_split": (1, -1)}, "up to 16 numbers"),
        ({"tensor_split": (1, float("nan"))}, "up to 16 numbers"),
        ({"tensor_split": (1,) * 17}, "up to 16 numbers"),
        ({"flash_attn": "maybe"}, "auto, on or off, not 'maybe'"),
        ({"flash_attn": "off", "kv_type": "q8_0"}, "q8_0 needs flash attention"),
    ],
)
def test_options_that_make_no_sense(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        checked(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"main_gpu": 1}, "no GPU 1 here"), ({"tensor_split": (3, 1)}, "no 2 GPUs here")],
)
def test_gpu_that_is_not_there_is_named(
    gpu: None, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    only = Device("CUDA0", "NVIDIA L4", "gpu", "CUDA", 24 << 30, 23 << 30)
    monkeypatch.setattr(module, "gpus", lambda: (only,))
    with pytest.raises(RequestError, match=message) as caught:
        checked(**fields)
    assert "0: NVIDIA L4" in caught.value.hint
    assert checked(main_gpu=0)["main_gpu"] == 0
    assert checked(tensor_split=[2])["tensor_split"] == (2.0,)


@pytest.mark.parametrize(
    "fields",
    [{"main_gpu": 0}, {"tensor_split": (3, 1)}, {"layers": (-1, 5)}, {"layers": (9, None)}],
)
def test_options_without_effect_are_noted(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "can_offload", lambda: False)
    checked(**fields)
    assert "uses no GPU here" in caplog.text


def test_gpu_that_the_build_cannot_use_is_a_remark_of_less_weight(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "can_offload", lambda: False)
    found = [Gpu("Intel GPU", "Vulkan")]
    monkeypatch.setattr(module, "find", lambda: found)
    checked()
    assert not caplog.records
    found.append(replace(found[0], name="NVIDIA L4", backend="CUDA"))
    checked(layers=(0, None))
    assert not caplog.records
    checked()
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "NVIDIA L4 is not used" in caplog.text


def test_options_become_parameters_of_llama_cpp() -> None:
    split = native.model_params(options(tensor_split=(3.0, 1.0)))
    assert [split.tensor_split[i] for i in range(16)] == [3.0, 1.0, *[0.0] * 14]
    assert split.split_mode == llama_cpp.LLAMA_SPLIT_MODE_LAYER
    one = native.model_params(options(main_gpu=1))
    assert (one.split_mode, one.main_gpu) == (llama_cpp.LLAMA_SPLIT_MODE_NONE, 1)
    assert native.model_params(options()).devices is None
    none = native.model_params(options(n_gpu_layers=0, main_gpu=1))
    assert ctypes.c_void_p.from_address(none.devices).value is None


@pytest.mark.parametrize(
    "fields",
    [
        {"n_gpu_layers": 0},
        {"n_gpu_layers": 1},
        {"main_gpu": 0},
        {"tensor_split": (1.0,)},
        {"flash_attn": "on"},
        {"flash_attn": "off"},
    ],
)
def test_model_is_the_same_with_every_option(chat_model: Path, fields: dict[str, Any]) -> None:
    rows = []
    for given in ({}, fields):
        model = LlamaModel([chat_model], options(**given))
        rows.append(model.eval([1, 2, 3], rows=3).copy())
        model.close()
    assert np.abs(rows[0] - rows[1]).max() < 0.05


def test_flash_attention_off_refuses_a_quantized_cache(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "WIDTH", 128)  # heads as long as a block of the cache
    path = tiny.write_chat_model(models / "for-q8.gguf")
    LlamaModel([path], options(kv_type="q8_0")).close()
    with pytest.raises(ModelLoadError, match=r"for-q8\.gguf.*flash_attn"):
        LlamaModel([path], options(kv_type="q8_0", flash_attn="off"))


def test_device_says_how_many_layers_there_are(gpu: None, chat_model: Path) -> None:
    said = {-1: "on the GPU", 3: "on the GPU", 99: "on the GPU", 0: "on the CPU with 1 threads"}
    said[1] = "with 1 of 3 layers on the GPU"
    for n_layers, text in said.items():
        model = LlamaModel([chat_model], options(n_gpu_layers=n_layers))
        assert model.device == text
        model.close()


def test_identity_depends_on_the_placement(chat_model: Path) -> None:
    found = set()
    for fields in ({}, {"main_gpu": 0}, {"tensor_split": (1.0,)}, {"flash_attn": "off"}):
        model = LlamaModel([chat_model], options(**fields))
        found.add(model.identity())
        model.close()
    assert len(found) == 4


def test_gpus_are_part_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build()
    only = Device("CUDA0", "NVIDIA L4", "gpu", "CUDA", 1, 1)
    monkeypatch.setattr(native, "can_offload", lambda: True)
    monkeypatch.setattr(native, "gpus", lambda: (only,))
    assert "NVIDIA L4" in build()
    assert "NVIDIA L4" not in before


# -- no room --


@pytest.mark.parametrize(
    ("asked", "tried"), [(-1, [-1, 1, 0]), (99, [99, 1, 0]), (2, [2, 1, 0]), (1, [1, 0]), (0, [0])]
)
def test_target_retreats_by_half_then_to_the_cpu(
    chat_model: Path, asked: int, tried: list[int]
) -> None:
    seen: list[int] = []

    def load(options: LoadOptions) -> str:
        seen.append(options.n_gpu_layers)
        if options.n_gpu_layers:
            raise GpuMemoryError("full")
        return "loaded"

    assert fit("target", [chat_model], options(n_gpu_layers=asked), load) == "loaded"
    assert seen == tried


def test_draft_goes_to_the_cpu_at_once(chat_model: Path) -> None:
    seen: list[int] = []

    def load(options: LoadOptions) -> None:
        seen.append(options.n_gpu_layers)
        if options.n_gpu_layers:
            raise GpuMemoryError("full")

    fit("draft", [chat_model], options(), load)
    assert seen == [-1, 0]


def test_other_faults_are_not_retried(chat_model: Path) -> None:
    def load(options: LoadOptions) -> None:
        raise ModelLoadError("damaged")

    with pytest.raises(ModelLoadError, match="damaged"):
        fit("target", [chat_model], options(), load)


def test_fault_that_stays_is_the_error(chat_model: Path) -> None:
    def load(options: LoadOptions) -> None:
        raise GpuMemoryError("full")

    with pytest.raises(GpuMemoryError, match="full"):
        fit("target", [chat_model], options(), load)


@pytest.mark.parametrize("exact", [False, True])
def test_pair_that_does_not_fit_is_loaded_with_notices_and_answers_the_same(
    small_gpu: list[int],
    chat_model: Path,
    chat_draft: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    exact: bool,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def answer() -> tuple[str, list[int]]:
        caplog.clear()
        with lspec.load(
            target=chat_model, draft=chat_draft, n_ctx=256, n_threads=1, gamma=2, exact=exact
        ) as engine:
            done = engine.generate("Hello", max_tokens=20, temperature=0.0)
            return engine.description, done.tokens

    def notices() -> list[str]:
        return [r.getMessage() for r in caplog.records if "no room" in r.getMessage()]

    small_gpu[0] = 99
    whole = answer()
    assert "on the GPU" in whole[0]
    assert notices() == []
    small_gpu[0] = 1
    half = answer()
    assert "with 1 of 3 layers on the GPU" in half[0]
    assert notices() == [
        "the GPU has no room for the target: 1 layers of it go there, the others to the CPU",
        "the GPU has no room for the draft: it goes to the CPU, where drafting may not pay",
    ]
    small_gpu[0] = 0
    none = answer()
    assert "on the CPU" in none[0]
    assert len(notices()) == 3
    assert "the target: it goes to the CPU" in notices()[1]
    assert whole[1] == half[1] == none[1]


def test_draft_has_its_own_number_of_layers(
    small_gpu: list[int], chat_model: Path, chat_draft: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small_gpu[0] = 99
    with lspec.load(
        target=chat_model, draft=chat_draft, n_ctx=256, n_threads=1, gamma=2, draft_n_gpu_layers=0
    ) as engine:
        assert [model.options.n_gpu_layers for model in engine._player.models] == [-1, 0]


def test_missing_room_is_not_taken_for_a_finding_of_exact_mode(
    small_gpu: list[int], chat_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(GpuMemoryError):
        survey([chat_model], options(), KV_TYPES[1])
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("lines", "on_gpu", "kind"),
    [
        ([(ERROR, FULL)], True, GpuMemoryError),
        ([(ERROR, FULL)], False, ModelLoadError),
        ([(2, FULL)], True, ModelLoadError),
        ([(ERROR, "unknown model architecture")], True, ModelLoadError),
        ([(ERROR, "unable to allocate Vulkan0 buffer")], True, GpuMemoryError),
        ([(ERROR, "failed to allocate compute pp buffers")], True, GpuMemoryError),
        ([], True, ModelLoadError),
    ],
)
def test_lack_of_memory_is_told_from_other_faults(
    gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[tuple[int, str]],
    on_gpu: bool,
    kind: type[ModelLoadError],
) -> None:
    monkeypatch.setattr(native, "_log", lines)
    assert native._failure(on_gpu=on_gpu) is kind


def test_some_of_the_gpu_must_stay_free(
    gpu: None, monkeypatch: pytest.MonkeyPatch, chat_model: Path
) -> None:
    def device(free: int, total: int = 1 << 34) -> Device:
        return Device("CUDA0", "NVIDIA L4", "gpu", "CUDA", total, free)

    there = (device(100_000_000), device(1 << 33), device(0, total=0))
    monkeypatch.setattr(native, "gpus", lambda: there)
    with pytest.raises(GpuMemoryError, match=r"chat\.gguf leaves only 100 MB of the GPU free"):
        LlamaModel([chat_model], options())
    for fine in ({"n_gpu_layers": 0}, {"main_gpu": 1}, {"tensor_split": (0.0, 1.0)}):
        LlamaModel([chat_model], options(**fine)).close()
    LlamaModel([chat_model], options(main_gpu=2)).close()  # it does not tell

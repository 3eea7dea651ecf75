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
from lspec.check import check
from lspec.devices import Gpu
from lspec.errors import GpuMemoryError, ModelLoadError, RequestError
from lspec.fitting import Free
from lspec.llama import GPU_SPARE_BYTES, Device, LlamaModel, LoadOptions, build, native
from lspec.placement import fit, placement
from lspec.planning import Planner
from lspec.selfcheck import KV_TYPES, Choice, survey

FULL = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9 MiB on device 0: out of memory"
HOST_FULL = "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 9"
ERROR = 4


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that says it has a GPU; its layers are computed by the CPU all the same."""
    for name in ("llama.native", "placement", "planning"):
        monkeypatch.setattr(f"lspec.{name}.can_offload", lambda: True)


@pytest.fixture
def small_gpu(gpu: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A GPU with room for as many layers as the list says; loading more of a model fails."""
    room = [0]
    load = native.load_model

    def load_model(paths: Any, params: Any, **more: Any) -> Any:
        model = load(paths, params, **more)
        n_layers = params.n_gpu_layers
        wanted = tiny.BLOCKS + 1 if n_layers < 0 else n_layers
        if not params.vocab_only and wanted > room[0]:
            llama_cpp.llama_model_free(model)
            native._log.append((ERROR, FULL))
            raise native._failure(on_gpu=n_layers != 0)(f"cannot load{native.why()}")
        return model

    monkeypatch.setattr(native, "load_model", load_model)
    return room


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A GPU that says that the bytes of the list are free, however much lies on it."""
    free = [10**12]

    def gpus() -> tuple[Device, ...]:
        return (Device("CUDA0", "NVIDIA L4", "gpu", "CUDA", 10**12, free[0] + GPU_SPARE_BYTES),)

    for name in ("lspec.llama.native.gpus", "lspec.placement.gpus"):
        monkeypatch.setattr(name, gpus)
    return free


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


def test_gpus_are_asked_only_where_some_are_chosen(
    gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "gpus", None)
    checked()
    checked(layers=(0, 0))
    assert not caplog.records


@pytest.mark.parametrize("fields", [{"main_gpu": 5}, {"tensor_split": (3, 1)}])
@pytest.mark.parametrize("layers", [(0, None), (0, 0)])
def test_choice_of_gpus_without_layers_is_noted(
    gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fields: dict[str, Any],
    layers: tuple[int, int | None],
) -> None:
    monkeypatch.setattr(module, "gpus", None)
    checked(**fields, layers=layers)
    assert "no layer goes to a GPU" in caplog.text


def test_gpu_that_the_build_cannot_use_is_a_remark_of_less_weight(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lspec")
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
    caplog.set_level(logging.WARNING, "lspec")
    monkeypatch.setattr(module, "find", None)  # which may start a program
    checked()


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
    ("asked", "exact", "tried"),
    [
        (-1, False, [-1, 2, 1, 0]),
        (99, False, [99, 2, 1, 0]),
        (2, False, [2, 1, 0]),
        (1, False, [1, 0]),
        (0, False, [0]),
        (-1, True, [-1, 1, 0]),
        (1, True, [1, 0]),
    ],
)
def test_target_retreats_in_steps_to_the_cpu(
    chat_model: Path, asked: int, exact: bool, tried: list[int]
) -> None:
    seen: list[int] = []

    def load(options: LoadOptions) -> str:
        seen.append(options.n_gpu_layers)
        if options.n_gpu_layers:
            raise GpuMemoryError("full")
        return "loaded"

    wanted = options(n_gpu_layers=asked)
    assert fit("target", [chat_model], wanted, load, exact=exact) == "loaded"
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
        return [r.getMessage() for r in caplog.records if "less room" in r.getMessage()]

    small_gpu[0] = 99
    whole = answer()
    assert "on the GPU" in whole[0]
    assert notices() == []
    small_gpu[0] = 1
    half = answer()
    assert "with 1 of 3 layers on the GPU" in half[0]
    steps = [1] if exact else [2, 1]
    less = "the GPU has less room for the %s than was planned with: "
    assert notices() == [
        *(f"{less % 'target'}{n} of its layers go there" for n in steps),
        f"{less % 'draft'}it goes to the CPU, where drafting may not pay",
    ]
    small_gpu[0] = 0
    none = answer()
    assert "on the CPU" in none[0]
    assert len(notices()) == len(steps) + 2
    assert notices()[-2] == f"{less % 'target'}it goes to the CPU"
    assert whole[1] == half[1] == none[1]


MODES = ("load", "exact", "auto", "check")


def room_for_one_layer(mode: str, target: Path, draft: Path) -> int:
    """Return the bytes on the GPU that one layer of the target takes beside the whole draft.

    In exact mode the draft has no place there.
    """
    wanted = options(n_ctx=4096 if mode == "auto" else 256, max_rows=17)
    if mode == "exact":
        wanted = replace(wanted, spare=17)
    planner = Planner([target], [] if mode == "exact" else [draft], free=Free(None))
    plan = planner.settle(replace(wanted, n_gpu_layers=1), wanted).outlook.plan
    return int(plan.gpu / 0.9) + 1 if mode == "auto" else plan.gpu


def device_of_target(mode: str, target: Path, draft: Path) -> str:
    """Open the pair in some way; return where the target runs."""
    if mode == "check":
        report = check([target], [draft], n_ctx=256, n_threads=1)
        assert report is not None
        assert report.measured is not None
        assert report.memory.plan.target.n_ctx == 256
        return report.measured.device
    n_ctx = "auto" if mode == "auto" else 256
    exact = mode == "exact"
    with lspec.load(
        target=target, draft=draft, n_ctx=n_ctx, n_threads=1, gamma=2, exact=exact
    ) as engine:
        assert engine.n_ctx == (4096 if mode == "auto" else 256)
        assert engine.generate("Hello", max_tokens=8, temperature=0.0).tokens
        return engine.description


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimistic", [False, True])
def test_plan_and_retreat_have_one_notice_each(
    small_gpu: list[int],
    small_device: list[int],
    chat_model: Path,
    chat_draft: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    mode: str,
    optimistic: bool,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("lspec.check._COSTS_S", "lspec.selfcheck._COSTS_S"):
        monkeypatch.setattr(name, 0.05)
    if optimistic:
        small_gpu[0] = 1  # the device says that there is room for all
    else:
        small_gpu[0] = 99
        small_device[0] = room_for_one_layer(mode, chat_model, chat_draft)
    assert "with 1 of 3 layers on the GPU" in device_of_target(mode, chat_model, chat_draft)
    said = [record.getMessage() for record in caplog.records]
    planned = [text for text in said if "no room for everything" in text]
    if optimistic:
        assert planned == []
        assert any("less room for the target" in text for text in said)
    else:
        assert not any("less room" in text for text in said)
        (notice,) = planned
        assert "1 of the target's 3 layers go there" in notice
        assert ("the draft goes to the CPU" in notice) is (mode == "exact")


def test_widths_of_exact_mode_are_those_of_the_layers_that_it_keeps(
    small_gpu: list[int],
    chat_model: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    small_gpu[0] = 1
    looked_at: list[int] = []

    def chosen(files: Any, options: LoadOptions, *args: Any, **kwargs: Any) -> Choice:
        looked_at.append(options.n_gpu_layers)
        return Choice("f16", (1, 2, 3))

    monkeypatch.setattr("lspec.opening.choose", chosen)
    with lspec.load(
        target=chat_model, drafter="ngram", n_ctx=256, n_threads=1, gamma=2, exact=True
    ) as engine:
        assert "with 1 of 3 layers on the GPU" in engine.description
    assert looked_at == [-1, 1]


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
        ([(ERROR, HOST_FULL), (ERROR, "failed to allocate buffers")], True, ModelLoadError),
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


@pytest.mark.parametrize(
    ("before", "after", "left"),
    [
        ([1000, 8000], [100, 8000], 100),
        ([100, 8000], [100, 7000], None),  # another program has filled it
        ([100], [90], 90),
        ([100, 150], [90, 140], 90),
        ([8000], [7000], None),
        ([], [], None),  # it does not tell
    ],
)
def test_some_of_the_gpu_must_stay_free(
    gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    chat_model: Path,
    before: list[int],
    after: list[int],
    left: int | None,
) -> None:
    def device(free: int, total: int = 1 << 34) -> Device:
        return Device("CUDA0", "NVIDIA L4", "gpu", "CUDA", total, free)

    readings = [
        (*(device(free * 10**6) for free in megabytes), device(0, total=0))
        for megabytes in (before, after)
    ]
    monkeypatch.setattr(native, "gpus", lambda: readings.pop(0))
    if left is None:
        LlamaModel([chat_model], options()).close()
        return
    with pytest.raises(GpuMemoryError, match=rf"chat\.gguf leaves only {left} MB of the GPU free"):
        LlamaModel([chat_model], options())


def test_gpus_that_are_not_used_need_not_have_room(
    gpu: None, monkeypatch: pytest.MonkeyPatch, chat_model: Path
) -> None:
    full, other = (Device("CUDA0", "", "gpu", "CUDA", 1 << 34, free) for free in (10**8, 1 << 33))
    monkeypatch.setattr(native, "gpus", lambda: (full, other))
    for fine in ({"n_gpu_layers": 0}, {"main_gpu": 1}, {"tensor_split": (0.0, 1.0)}):
        LlamaModel([chat_model], options(**fine)).close()
    with pytest.raises(GpuMemoryError):
        LlamaModel([chat_model], options(main_gpu=0))

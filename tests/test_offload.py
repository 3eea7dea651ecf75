"""What the build can do with GPUs, and how `lspec check` says so."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from lspec import offload as module
from lspec.cli.offload import lines
from lspec.devices import Gpu
from lspec.llama import VERSION, Device, backends, can_offload, ggml, gpus
from lspec.llama.ggml import devices
from lspec.offload import Offload, survey

CPU_DEVICE = Device("CPU", "EPYC", "cpu", "CPU", 1 << 34, 1 << 33)
CUDA_DEVICE = Device("CUDA0", "NVIDIA L4", "gpu", "CUDA", 24_000_000_000, 23_000_000_000)
INTEGRATED = Device("Vulkan0", "Intel Iris", "integrated", "Vulkan", 1, 1)


def said(
    *,
    built: tuple[str, ...] = ("CPU",),
    used: tuple[Device, ...] = (),
    unused: tuple[Gpu, ...] = (),
) -> str:
    return "\n".join(lines(Offload("0.3.36", built, used, unused)))


def test_llama_cpp_tells_of_its_backends_and_devices() -> None:
    assert "CPU" in backends()
    found = {device.kind: device for device in devices()}
    assert found["cpu"].backend == "CPU"
    assert found["cpu"].description
    assert found["cpu"].memory_total >= found["cpu"].memory_free > 0
    assert can_offload() == bool(gpus())


def test_integrated_gpus_count_where_there_are_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [CPU_DEVICE, INTEGRATED]
    monkeypatch.setattr(ggml, "devices", lambda: tuple(there))
    assert gpus() == (INTEGRATED,)
    there.append(CUDA_DEVICE)
    assert gpus() == (CUDA_DEVICE,)


def test_library_without_these_functions_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml, "_lib", object())
    ggml._ggml.cache_clear()
    try:
        assert (devices(), backends(), gpus()) == ((), (), ())
    finally:
        ggml._ggml.cache_clear()


def test_survey_looks_for_other_gpus_only_where_none_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = Gpu("Intel GPU", "Vulkan")
    monkeypatch.setattr(module, "find", lambda: (other,))
    monkeypatch.setattr(module, "gpus", lambda: ())
    assert survey().unused == (other,)
    assert survey().version == VERSION
    monkeypatch.setattr(module, "gpus", lambda: (CUDA_DEVICE,))
    assert survey().unused == ()


def test_gpu_of_a_library_that_tells_nothing_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, told in (("gpus", ()), ("backends", ()), ("find", (Gpu("Apple GPU", "Metal"),))):
        monkeypatch.setattr(module, name, lambda told=told: told)
    monkeypatch.setattr(module, "can_offload", lambda: True)
    found = survey()
    assert found.unnamed
    assert not found.commands
    assert "CPU alone" not in "".join(lines(found))
    assert "uses a GPU here" in "".join(lines(found))
    monkeypatch.setattr(module, "can_offload", lambda: False)
    assert survey().unused == (Gpu("Apple GPU", "Metal"),)
    assert not survey().unnamed


def test_gpu_in_use() -> None:
    assert said(built=("CUDA", "CPU"), used=(CUDA_DEVICE,)) == (
        "llama-cpp-python 0.3.36 is built for CUDA.\n"
        "GPU 0: NVIDIA L4 (CUDA0), 24.00 GB, 23.00 GB free"
    )


def test_no_gpu_at_all() -> None:
    assert said() == (
        "llama-cpp-python 0.3.36 is built for the CPU alone.\n"
        "It uses no GPU, and none was found on this machine."
    )


def test_gpu_that_is_not_used_comes_with_the_command() -> None:
    first, second, third, command = said(unused=(Gpu("NVIDIA L4", "CUDA"),)).splitlines()
    assert "the CPU alone" in first
    assert second == "It does not use this machine's NVIDIA L4, which wants CUDA."
    assert "nvcc" in third
    assert command.startswith('  CMAKE_ARGS="-DGGML_CUDA=on" ')
    assert command.endswith("--no-binary llama-cpp-python llama-cpp-python==0.3.36")


def test_command_quotes_the_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for path, typed in (
        (tmp_path / "my envs/bin/python", "~/'my envs/bin/python'"),
        (tmp_path / "env/bin/python", "~/env/bin/python"),
        (Path("/opt/it's/python"), shlex.quote("/opt/it's/python")),
    ):
        monkeypatch.setattr(sys, "executable", str(path))
        (command,) = Offload("0.3.36", ("CPU",), (), (Gpu("L4", "CUDA"),)).commands.values()
        assert f" {typed} -m pip install " in command


def test_two_gpus_of_a_kind_need_one_command() -> None:
    gpu = Gpu("AMD GPU", "ROCm")
    assert said(unused=(gpu, gpu)).count("GGML_HIP") == 1


def test_build_that_finds_nothing_points_to_the_driver() -> None:
    text = said(built=("CUDA", "CPU"), unused=(Gpu("NVIDIA L4", "CUDA"),))
    assert "CMAKE_ARGS" not in text
    assert "look at the driver" in text

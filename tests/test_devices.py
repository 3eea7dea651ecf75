"""Which GPUs a machine is said to have, on machines made of files."""

from __future__ import annotations

import platform
import shlex
import sys
from pathlib import Path

import pytest

from lspec import devices
from lspec.devices import FLAGS, NEEDS, Gpu, find, install_command

NVIDIA = "proc/driver/nvidia/gpus/{}/information"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a Linux machine without any GPU, and an empty PATH."""
    monkeypatch.setattr(devices, "_ROOT", tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def put(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def render_node(root: Path, number: int, vendor: str | None) -> None:
    put(root, f"dev/dri/renderD{number}")
    if vendor:
        put(root, f"sys/class/drm/renderD{number}/device/vendor", f"{vendor}\n")


def smi(root: Path, script: str) -> None:
    put(root, "bin/nvidia-smi", f"#!/bin/sh\n{script}\n")
    (root / "bin/nvidia-smi").chmod(0o755)


def test_machine_without_a_gpu(root: Path) -> None:
    assert find() == ()


def test_nvidia_driver_names_its_gpus_in_order(root: Path) -> None:
    for address, name in (("0000:2b:00.0", "NVIDIA L4"), ("0000:01:00.0", "NVIDIA H200")):
        put(root, NVIDIA.format(address), f"Model: \t\t {name}\nIRQ:   1\n")
    assert find() == (Gpu("NVIDIA H200", "CUDA"), Gpu("NVIDIA L4", "CUDA"))


def test_nvidia_driver_without_a_name(root: Path) -> None:
    put(root, NVIDIA.format("0000:01:00.0"), "IRQ: 1\n")
    assert find() == (Gpu("NVIDIA GPU", "CUDA"),)


def test_device_file_is_enough_in_a_container(root: Path) -> None:
    put(root, "dev/nvidia0")
    assert find() == (Gpu("NVIDIA GPU", "CUDA"),)


def test_nvidia_smi_names_them_where_the_driver_shows_no_files(root: Path) -> None:
    smi(root, 'echo "NVIDIA GeForce RTX 4090"; echo; echo " NVIDIA T4 "')
    assert find() == (Gpu("NVIDIA GeForce RTX 4090", "CUDA"), Gpu("NVIDIA T4", "CUDA"))


def test_nvidia_smi_that_fails_says_nothing(root: Path) -> None:
    smi(root, "echo 'No devices were found'; exit 6")
    assert find() == ()


@pytest.mark.parametrize(
    ("vendor", "driver", "gpu"),
    [
        ("0x1002", True, Gpu("AMD GPU", "ROCm")),
        ("0x1002", False, Gpu("AMD GPU", "Vulkan")),
        ("0x8086", True, Gpu("Intel GPU", "Vulkan")),
        ("0x10de", False, Gpu("NVIDIA GPU", "Vulkan")),  # with the free driver
    ],
)
def test_render_nodes_tell_the_maker(root: Path, vendor: str, driver: bool, gpu: Gpu) -> None:
    render_node(root, 128, vendor)
    if driver:
        put(root, "dev/kfd")
    assert find() == (gpu,)


@pytest.mark.parametrize("vendor", [None, "0x1af4", "é"])
def test_virtual_gpus_and_those_of_small_boards_do_not_count(root: Path, vendor: str) -> None:
    render_node(root, 128, vendor)
    assert find() == ()


def test_nvidia_gpu_counts_once_beside_others(root: Path) -> None:
    render_node(root, 128, "0x8086")
    render_node(root, 129, "0x10de")
    put(root, NVIDIA.format("0000:01:00.0"), "Model: NVIDIA L4\n")
    assert find() == (Gpu("NVIDIA L4", "CUDA"), Gpu("Intel GPU", "Vulkan"))


@pytest.mark.parametrize(
    ("kind", "found"), [("arm64", (Gpu("Apple GPU", "Metal"),)), ("x86_64", ())]
)
def test_mac(
    root: Path, monkeypatch: pytest.MonkeyPatch, kind: str, found: tuple[Gpu, ...]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: kind)
    assert find() == found


@pytest.mark.parametrize("backend", FLAGS)
def test_install_command_is_one_that_a_shell_understands(backend: devices.Backend) -> None:
    setting, *command = shlex.split(install_command(backend, "0.3.36", "~/x/bin/python"))
    assert setting == f"CMAKE_ARGS={FLAGS[backend]}"
    assert command[:4] == ["~/x/bin/python", "-m", "pip", "install"]
    assert command[-1] == "llama-cpp-python==0.3.36"
    assert {"--force-reinstall", "--no-cache-dir", "--no-binary"} <= {*command}
    assert NEEDS[backend]


def test_this_machine_can_be_asked() -> None:
    assert all(gpu.name and gpu.backend in FLAGS for gpu in find())

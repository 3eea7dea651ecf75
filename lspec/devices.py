"""Which GPUs a machine has, told from what its system shows: no driver's library is loaded."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Backend = Literal["CUDA", "Metal", "ROCm", "Vulkan"]

# What llama.cpp's build is asked for, and what that build needs.
FLAGS: dict[Backend, str] = {
    "CUDA": "-DGGML_CUDA=on",
    "Metal": "-DGGML_METAL=on",
    "ROCm": "-DGGML_HIP=on",
    "Vulkan": "-DGGML_VULKAN=on",
}
NEEDS: dict[Backend, str] = {
    "CUDA": "the CUDA toolkit (nvcc)",
    "Metal": "Xcode's command line tools",
    "ROCm": "ROCm with its compiler (hipcc)",
    "Vulkan": "the Vulkan headers, SPIR-V headers and glslc",
}
_VENDORS = {"0x1002": "AMD GPU", "0x10de": "NVIDIA GPU", "0x8086": "Intel GPU"}  # by PCI number
_ROOT = Path("/")
_SMI = ("--query-gpu=name", "--format=csv,noheader")
_SMI_S = 10.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of the machine, and the backend of llama.cpp that suits it best."""

    name: str
    backend: Backend


def find() -> tuple[Gpu, ...]:
    """Return the GPUs of this machine; virtual ones and those of small boards do not count."""
    if sys.platform == "darwin":
        return (Gpu("Apple GPU", "Metal"),) if platform.machine() == "arm64" else ()
    nvidia = [Gpu(name, "CUDA") for name in _nvidia()]
    names = _render_nodes()
    if nvidia:
        names = [name for name in names if not name.startswith("NVIDIA")]
    driver = (_ROOT / "dev/kfd").exists()  # of AMD's compute stack
    others = (
        Gpu(name, "ROCm" if driver and name.startswith("AMD") else "Vulkan") for name in names
    )
    return (*nvidia, *others)


def install_command(backend: Backend, version: str, python: str = "python") -> str:
    """Return the command that replaces llama-cpp-python `version` by a build for `backend`."""
    # Without --no-cache-dir pip would take the wheel that it built before, for the CPU.
    return (
        f'CMAKE_ARGS="{FLAGS[backend]}" {python} -m pip install --force-reinstall --no-deps '
        f"--no-cache-dir --no-binary llama-cpp-python llama-cpp-python=={version}"
    )


def _nvidia() -> list[str]:
    """Return the names of NVIDIA's GPUs that have their driver."""
    told = sorted(_ROOT.glob("proc/driver/nvidia/gpus/*/information"))
    # Some containers, and Linux inside Windows, show no such files.
    names = [_model(path) for path in told] or _by_smi()
    return names or ["NVIDIA GPU"] * (_ROOT / "dev/nvidia0").exists()


def _model(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names[0] if names else "NVIDIA GPU"


def _by_smi() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(  # noqa: S603  # no shell, nothing from outside
            [program, *_SMI],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SMI_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # a driver that does not answer
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _render_nodes() -> list[str]:
    """Return the makers of the GPUs that programs may compute on, in the order of their nodes."""
    names = []
    for node in sorted(_ROOT.glob("dev/dri/renderD*")):
        vendor = _ROOT / "sys/class/drm" / node.name / "device/vendor"
        try:
            names.append(_VENDORS.get(vendor.read_text(encoding="ascii").strip(), ""))
        except (OSError, UnicodeDecodeError):  # no PCI device
            continue
    return [name for name in names if name]

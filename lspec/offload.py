"""What the installed llama-cpp-python can do with the GPUs of this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lspec.devices import Backend, Gpu, find, install_command
from lspec.llama import VERSION, Device, backends, gpus
from lspec.paths import shown

_NO_GPU = {"CPU", "BLAS", "RPC"}


@dataclass(frozen=True, slots=True)
class Offload:
    """The backends of the build, the GPUs that it uses, and those that it does not.

    `unused` is empty where a GPU is in use, whatever else the machine has.
    """

    version: str
    backends: tuple[str, ...]
    gpus: tuple[Device, ...]
    unused: tuple[Gpu, ...]

    @property
    def for_gpus(self) -> tuple[str, ...]:
        """The backends that are made for GPUs."""
        return tuple(name for name in self.backends if name not in _NO_GPU)

    @property
    def commands(self) -> dict[Backend, str]:
        """What to type for each backend that `unused` need and the build lacks."""
        python = shown(Path(sys.executable)) if sys.executable else "python"
        lacking = (gpu.backend for gpu in self.unused if gpu.backend not in self.backends)
        return {backend: install_command(backend, self.version, python) for backend in lacking}


def survey() -> Offload:
    """Find out what there is."""
    used = gpus()
    return Offload(VERSION, backends(), used, () if used else find())

"""What the installed llama-cpp-python can do with the GPUs of this machine."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from lspec.devices import Backend, Gpu, find, install_command
from lspec.llama import VERSION, Device, backends, can_offload, gpus
from lspec.paths import shown

_NO_GPU = {"CPU", "BLAS", "RPC"}


@dataclass(frozen=True, slots=True)
class Offload:
    """The backends of the build, the GPUs that it uses, and those that it does not.

    `unused` is empty where a GPU is in use, whatever else the machine has. `unnamed`: there is one,
    but of GPUs and backends the library does not tell.
    """

    version: str
    backends: tuple[str, ...]
    gpus: tuple[Device, ...]
    unused: tuple[Gpu, ...]
    unnamed: bool = False

    @property
    def for_gpus(self) -> tuple[str, ...]:
        """The backends that are made for GPUs."""
        return tuple(name for name in self.backends if name not in _NO_GPU)

    @property
    def commands(self) -> dict[Backend, str]:
        """What to type for each backend that `unused` need and the build lacks."""
        python = _typed(Path(sys.executable)) if sys.executable else "python"
        lacking = (gpu.backend for gpu in self.unused if gpu.backend not in self.backends)
        return {backend: install_command(backend, self.version, python) for backend in lacking}


def survey() -> Offload:
    """Find out what there is."""
    used, built = gpus(), backends()
    unnamed = not built and can_offload()
    return Offload(VERSION, built, used, () if used or unnamed else find(), unnamed)


def _typed(path: Path) -> str:
    """Return a path as a shell reads it, which looks for `~` outside of quotes alone."""
    text = shown(path)
    home = "~/" if text.startswith("~/") else ""
    return home + shlex.quote(text.removeprefix(home))

"""What the installed llama-cpp-python can do with GPUs, in lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from lspec.devices import NEEDS
from lspec.offload import Offload
from lspec.sizes import size_text


def lines(found: Offload) -> Iterator[str]:
    """Yield what is used, or what is not and how to change that."""
    if found.unnamed:
        yield f"llama-cpp-python {found.version} uses a GPU here; which one, it does not tell."
        return
    built = " and ".join(found.for_gpus) or "the CPU alone"
    yield f"llama-cpp-python {found.version} is built for {built}."
    for i, gpu in enumerate(found.gpus):
        memory = f"{size_text(gpu.memory_total)}, {size_text(gpu.memory_free)} free"
        yield f"GPU {i}: {gpu.description} ({gpu.name}), {memory}"
    if found.gpus:
        return
    if not found.unused:
        yield "It uses no GPU, and none was found on this machine."
    for unused in found.unused:
        yield f"It does not use this machine's {unused.name}, which wants {unused.backend}."
    for backend, command in found.commands.items():
        yield f"With {NEEDS[backend]} installed, this builds it for {backend}:"
        yield f"  {command}"
    if found.unused and not found.commands:
        yield "It is built for it: look at the driver, and at variables that hide GPUs."

"""The devices that llama.cpp computes on, and the backends that it was built with.

llama_cpp has no bindings for this part of ggml, so that they are made here.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from llama_cpp.llama_cpp import _lib

Kind = Literal["cpu", "gpu", "integrated", "accelerator", "other"]
# ggml_backend_dev_type; an accelerator (BLAS) helps the CPU and holds no weights
_KINDS: tuple[Kind, ...] = ("cpu", "gpu", "integrated", "accelerator")


@dataclass(frozen=True, slots=True)
class Device:
    """A device by ggml's name ("CUDA0") and in words, its backend, and its memory in bytes."""

    name: str
    description: str
    kind: Kind
    backend: str
    memory_total: int
    memory_free: int


def backends() -> tuple[str, ...]:
    """Return the backends of this build ("CPU", "CUDA"), whether they find a device or not."""
    ggml = _ggml()
    if ggml is None:
        return ()
    return tuple(_backend(ggml, ggml.reg_get(i)) for i in range(ggml.reg_count()))


def devices() -> tuple[Device, ...]:
    """Return all devices of this build's backends, the CPU too."""
    ggml = _ggml()
    if ggml is None:
        return ()
    return tuple(_device(ggml, ggml.dev_get(i)) for i in range(ggml.dev_count()))


def gpus() -> tuple[Device, ...]:
    """Return the GPUs that models go to, in llama.cpp's order: integrated ones if no others."""
    found = devices()
    own = tuple(device for device in found if device.kind == "gpu")
    return own or tuple(device for device in found if device.kind == "integrated")


def _device(ggml: _Ggml, handle: int) -> Device:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ggml.dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
    kind: int = ggml.dev_type(handle)
    return Device(
        _text(ggml.dev_name(handle)),
        _text(ggml.dev_description(handle)),
        _KINDS[kind] if kind < len(_KINDS) else "other",
        _backend(ggml, ggml.dev_backend_reg(handle)),
        total.value,
        free.value,
    )


def _backend(ggml: _Ggml, handle: int) -> str:
    name = _text(ggml.reg_name(handle))
    return "Metal" if name == "MTL" else name


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", errors="replace").strip()


class _Ggml:
    """Functions of ggml's registry, by their names without the prefix."""

    def __init__(self) -> None:
        size, handle, text = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
        sizes = ctypes.POINTER(size)
        self.reg_count = _bind("reg_count", size)
        self.reg_get = _bind("reg_get", handle, size)
        self.reg_name = _bind("reg_name", text, handle)
        self.dev_count = _bind("dev_count", size)
        self.dev_get = _bind("dev_get", handle, size)
        self.dev_name = _bind("dev_name", text, handle)
        self.dev_description = _bind("dev_description", text, handle)
        self.dev_type = _bind("dev_type", ctypes.c_int, handle)
        self.dev_memory = _bind("dev_memory", None, handle, sizes, sizes)
        self.dev_backend_reg = _bind("dev_backend_reg", handle, handle)


def _bind(name: str, result: Any, *arguments: Any) -> Any:
    # Looked up in libllama, which is linked with ggml's libraries: those that are in use.
    function = getattr(_lib, f"ggml_backend_{name}")
    function.restype, function.argtypes = result, list(arguments)
    return function


@cache
def _ggml() -> _Ggml | None:
    """Return the functions; None on a system that looks only into the one library."""
    try:
        return _Ggml()
    except AttributeError:
        return None

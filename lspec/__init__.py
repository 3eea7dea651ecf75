"""Lossless speculative decoding for two local GGUF models.

>>> import lspec
>>> with lspec.load("qwen2.5-coder-1.5b") as engine:
...     print(engine.generate("def fib(n):", max_tokens=64, temperature=0.0).text)

Importing this package loads none of llama_cpp, numpy or huggingface_hub; `load` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lspec.errors import (
    CatalogueError,
    ContextOverflowError,
    DecodeError,
    DownloadError,
    IncompatiblePairError,
    LspecError,
    ModelLoadError,
    RequestError,
    RollbackError,
)

if TYPE_CHECKING:
    from lspec.dropin import Llama
    from lspec.engine import Engine
    from lspec.loading import load
    from lspec.params import SamplingParams
    from lspec.request import Chunk, Completion
    from lspec.stats import Stats

__version__ = "0.1.0"

__all__ = [
    "CatalogueError",
    "Chunk",
    "Completion",
    "ContextOverflowError",
    "DecodeError",
    "DownloadError",
    "Engine",
    "IncompatiblePairError",
    "Llama",
    "LspecError",
    "ModelLoadError",
    "RequestError",
    "RollbackError",
    "SamplingParams",
    "Stats",
    "load",
]

_LAZY = {
    "Chunk": "lspec.request",
    "Completion": "lspec.request",
    "Engine": "lspec.engine",
    "Llama": "lspec.dropin",
    "load": "lspec.loading",
    "SamplingParams": "lspec.params",
    "Stats": "lspec.stats",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

"""Every error that lspec raises on purpose.

LspecError
├── RequestError            a parameter, message or option that makes no sense (also a ValueError)
├── CatalogueError          an unknown pair, or a catalogue file that cannot be read
├── DownloadError           a model file that could not be fetched or verified
├── ModelLoadError          a file that llama.cpp cannot load
│   └── GpuMemoryError      a GPU without room for a model
├── IncompatiblePairError   target and draft have different vocabularies
├── RollbackError           a model whose cache cannot be cut back to a prefix
├── ContextOverflowError    a prompt that does not fit into the window (also a ValueError)
└── DecodeError             llama.cpp or a grammar failed in mid-text
"""

from __future__ import annotations


class LspecError(Exception):
    """What happened, in one sentence; `hint` says what to do about it (may be empty)."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(hint)  # a traceback shows it


class RequestError(LspecError, ValueError):
    """A parameter, message or option that makes no sense."""


class CatalogueError(LspecError):
    """An unknown pair, or a catalogue file that cannot be read."""


class DownloadError(LspecError):
    """A model file that could not be fetched or verified."""


class ModelLoadError(LspecError):
    """A file that llama.cpp cannot load."""


class GpuMemoryError(ModelLoadError):
    """A GPU has no room for a model or its cache."""


class IncompatiblePairError(LspecError):
    """Target and draft have different vocabularies."""


class RollbackError(LspecError):
    """A model whose cache cannot be cut back to a prefix."""


class ContextOverflowError(LspecError, ValueError):
    """A prompt that does not fit into the window."""


class DecodeError(LspecError):
    """llama.cpp or a grammar failed in mid-text."""

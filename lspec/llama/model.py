"""A loaded model with one context."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

from lspec.errors import DecodeError, GpuMemoryError, RollbackError
from lspec.llama import native
from lspec.llama.native import GPU_SPARE_BYTES, VERSION, LoadOptions
from lspec.llama.vocab import Vocab
from lspec.model import FloatRows

# Prompt tokens per pass. On a CPU 64 are as fast as 512, and Ctrl-C is heard within a second.
_CHUNK_CPU, _CHUNK_GPU = 64, 512


def prompt_chunk(options: LoadOptions) -> int:
    """Return how many tokens of a prompt one pass takes."""
    return _CHUNK_GPU if options.on_gpu else _CHUNK_CPU


def _free(lock: AbstractContextManager[Any], *parts: Any) -> None:
    """Free a model while nobody tokenizes with it."""
    with lock:
        native.free(*parts)


class LlamaModel:
    """A loaded model with one context; a LanguageModel (see lspec.model)."""

    def __init__(
        self,
        paths: Sequence[Path],
        options: LoadOptions,
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Load the file, or the parts of a split one in order.

        Raises ModelLoadError, GpuMemoryError where less on the GPU may go well, and
        KeyboardInterrupt if `should_stop` says so meanwhile.
        """
        self._on_gpu = options.on_gpu
        self.n_batch = prompt_chunk(options)
        self.paths = tuple(paths)
        self.n_past = 0
        self.max_rows = options.max_rows
        self.kv_type = options.kv_type
        self.options = options
        self._last_width = 0
        free = native.free_gpu_memory(options) if self._on_gpu else ()
        params = native.model_params(options, repack=native.repacks(paths, options))
        model = native.load_model(paths, params, should_stop=should_stop)
        context = native.new_context(model, paths[0], options, n_batch=self.n_batch)
        batch = lib.llama_batch_init(self.n_batch, 0, 1)
        lock = threading.RLock()
        self.close = weakref.finalize(self, _free, lock, context, model, batch)
        self._require_spare_memory(free)

        self._model, self._context, self._batch = model, context, batch
        self._memory = lib.llama_get_memory(context)
        # Cache and graph are sized in steps of 256; the window that was asked for is ours to keep.
        self.n_ctx = min(options.n_ctx, self.n_ctx_train)
        close = self.close
        self.vocab = Vocab(lib.llama_model_get_vocab(model), lambda: close.alive, lock)
        self.n_vocab = self.vocab.n_tokens
        self.is_recurrent = bool(
            lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)
        )
        self._token = np.ctypeslib.as_array(batch.token, (self.n_batch,))
        self._pos = np.ctypeslib.as_array(batch.pos, (self.n_batch,))
        self._wanted = np.ctypeslib.as_array(batch.logits, (self.n_batch,))
        np.ctypeslib.as_array(batch.n_seq_id, (self.n_batch,))[:] = 1
        for i in range(self.n_batch):
            batch.seq_id[i][0] = 0

    @property
    def device(self) -> str:
        """Where the model runs, in words."""
        threads = lib.llama_n_threads(self._context)
        if not self._on_gpu:
            return f"on the CPU with {threads} threads"
        there, all_layers = self.options.n_gpu_layers, lib.llama_model_n_layer(self._model) + 1
        if not 0 < there < all_layers:
            return "on the GPU"
        return f"with {there} of {all_layers} layers on the GPU"

    @property
    def n_ctx_train(self) -> int:
        """The longest text that the model was trained on."""
        return int(lib.llama_model_n_ctx_train(self._model))

    def identity(self) -> tuple[object, ...]:
        """Return all that costs and logits depend on: files, llama.cpp, device, cache type.

        Raises OSError where the files are gone.
        """
        states = [(path.resolve(), path.stat()) for path in self.paths]
        files = [(str(path), state.st_size, state.st_mtime_ns) for path, state in states]
        return (VERSION, self.device, self.options.placement, self.kv_type, *files)

    def _require_spare_memory(self, before: Sequence[int]) -> None:
        """Raise GpuMemoryError, given what was free of each GPU, if too little is left of one.

        One that others had filled before tells nothing, unless there is no other.
        """
        after = native.free_gpu_memory(self.options) if before else ()
        had_room = [
            left for was, left in zip(before, after, strict=False) if was >= GPU_SPARE_BYTES
        ]
        left = min(had_room or after, default=GPU_SPARE_BYTES)
        if left < GPU_SPARE_BYTES:
            self.close()
            raise GpuMemoryError(
                f"{self.paths[0]} leaves only {left / 1e6:.0f} MB of the GPU free",
                hint="Free some of the GPU, put fewer layers there (n_gpu_layers=N), or take a "
                "smaller window (n_ctx=N).",
            )

    def metadata(self, key: str) -> str | None:
        """Return a scalar of the file's metadata as text; None where it is missing."""
        buffer = ctypes.create_string_buffer(1024)
        n = lib.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer))
        return None if n < 0 else buffer.value.decode("utf-8", errors="replace")

    def all_metadata(self) -> dict[str, str]:
        """Return all scalars of the file's metadata as texts."""
        return native.metadata(self._model)

    @property
    def chat_template(self) -> str | None:
        """The chat template in the file; None where there is none."""
        raw: bytes | None = lib.llama_model_chat_template(self._model, None)
        return None if raw is None else raw.decode("utf-8", errors="replace")

    def require_open(self) -> None:
        """Raise RequestError after `close`."""
        self.vocab.require_open()

    def eval(self, tokens: Sequence[int], *, rows: int) -> FloatRows:
        """Append `tokens` in one pass; see LanguageModel.eval."""
        n = len(tokens)
        self.require_open()
        if not (0 < n <= self.n_batch and rows <= min(n, self.max_rows)):
            raise ValueError(f"a pass of {n} tokens and {rows} rows was not prepared for")
        self._token[:n] = tokens
        self._pos[:n] = np.arange(self.n_past, self.n_past + n)
        self._wanted[: n - rows] = 0
        self._wanted[n - rows : n] = 1
        self._batch.n_tokens = n
        code = lib.llama_decode(self._context, self._batch)
        if code != 0:
            raise DecodeError(
                f"llama.cpp could not evaluate {n} tokens (code {code}{native.why()})"
            )
        self.n_past += n
        self._last_width = n
        if rows == 0:
            return np.empty((0, self.n_vocab), np.float32)
        logits = lib.llama_get_logits(self._context)  # waits for the pass to end
        size = self.vocab.size
        return np.ctypeslib.as_array(logits, (rows, size))[:, : self.n_vocab]

    def truncate(self, n_past: int) -> None:
        """Cut the cache back to `n_past` tokens; see LanguageModel.truncate."""
        self.require_open()
        # A recurrent state is kept for the tokens of the last pass only; llama.cpp does not check.
        too_far = self.is_recurrent and 0 < n_past < self.n_past - self._last_width + 1
        if too_far or not lib.llama_memory_seq_rm(self._memory, 0, n_past, -1):
            raise RollbackError("this model's cache cannot be cut back to a prefix")
        self.n_past = min(self.n_past, n_past)

"""Models and contexts of llama.cpp; the only module that imports llama_cpp.

Everything goes through the C interface. llama.cpp's log is kept and shown only when loading fails,
or as it comes with LSPEC_DEBUG=1.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np
from jinja2 import TemplateError
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from lspec.compat import Vocabulary
from lspec.errors import DecodeError, ModelLoadError, RequestError, RollbackError
from lspec.machine import usable_cores
from lspec.model import FloatRows
from lspec.template import Message

_KINDS = {0: "none", 1: "SPM", 2: "BPE", 3: "WPM", 4: "UGM", 5: "RWKV", 6: "PLaMo-2"}
_UNKNOWN, _UNUSED, _CONTROL = 1 << 0, 1 << 1, 1 << 3  # bits of llama_token_attr
_LOG_ERROR = 4
_LOADING = "llama_model_load: error loading model: "

# Prompt tokens per pass. On a CPU 64 are as fast as 512, and Ctrl-C is heard within a second.
_CHUNK_CPU, _CHUNK_GPU = 64, 512

VERSION: str = lib.__version__

_log: deque[tuple[int, str]] = deque(maxlen=100)


@lib.llama_log_callback  # type: ignore[untyped-decorator]
def _keep_log(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    line = text.decode("utf-8", errors="replace")
    _log.append((level, line.strip()))
    if os.environ.get("LSPEC_DEBUG"):
        sys.stderr.write(line)


lib.llama_log_set(_keep_log, ctypes.c_void_p(0))
lib.llama_backend_init()


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a model; `max_rows` is the most rows of logits that one pass returns."""

    n_ctx: int
    max_rows: int
    n_gpu_layers: int = -1  # negative: all
    n_threads: int | None = None  # None: the physical cores that this process may use


def read_vocabulary(path: Path) -> Vocabulary:
    """Read only the vocabulary of a GGUF file. Raises ModelLoadError."""
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = _load([path], params)
    try:
        return Vocab(lib.llama_model_get_vocab(model)).vocabulary
    finally:
        lib.llama_model_free(model)


class Vocab:
    """Text to token ids and back."""

    def __init__(self, pointer: Any) -> None:
        self._vocab = pointer
        self.kind = _KINDS.get(lib.llama_vocab_type(pointer), "unknown")
        self.size: int = lib.llama_vocab_n_tokens(pointer)
        self.n_tokens = self.size - self._padding()

    def _padding(self) -> int:
        """Count the unused ids at the end, which only round the output matrix up."""
        padding = 0
        while self.kind != "none" and self._attr(self.size - 1 - padding) & _UNUSED:
            padding += 1
        return padding

    def _attr(self, token: int) -> int:
        return int(lib.llama_vocab_get_attr(self._vocab, token))

    def _ids(self) -> range:
        """Return all ids that have a text; none for a model without a vocabulary."""
        return range(0 if self.kind == "none" else self.n_tokens)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What must agree between target and draft."""
        v, get_text = self._vocab, lib.llama_vocab_get_text
        return Vocabulary(
            kind=self.kind,
            size=self.size,
            bos=lib.llama_vocab_bos(v) if lib.llama_vocab_get_add_bos(v) else -1,
            eos=lib.llama_vocab_eos(v) if lib.llama_vocab_get_add_eos(v) else -1,
            texts=[get_text(v, i) for i in self._ids()],
        )

    @cached_property
    def ends(self) -> frozenset[int]:
        """The end-of-generation set."""
        return frozenset(i for i in self._ids() if lib.llama_vocab_is_eog(self._vocab, i))

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """The texts that `tokenize(..., special=True)` turns into control tokens."""
        marked = (i for i in self._ids() if self._attr(i) & (_CONTROL | _UNKNOWN))
        return tuple(filter(None, map(self.text, marked)))

    @property
    def adds_bos(self) -> bool:
        """Whether a text begins with the beginning-of-sequence token."""
        return self.kind != "none" and bool(lib.llama_vocab_get_add_bos(self._vocab))

    @property
    def bos_text(self) -> str:
        """The text of the beginning-of-sequence token; empty where there is none."""
        return self.text(lib.llama_vocab_bos(self._vocab))

    @property
    def eos_text(self) -> str:
        """The text of the end-of-sequence token; empty where there is none."""
        return self.text(lib.llama_vocab_eos(self._vocab))

    def text(self, token: int) -> str:
        """Return the text by which the vocabulary names `token`, control tokens included."""
        if token < 0 or self.kind == "none":
            return ""
        raw: bytes = lib.llama_vocab_get_text(self._vocab, token)
        return raw.decode("utf-8", errors="replace")

    def piece(self, token: int) -> bytes:
        """Return the bytes that `token` adds to a text; none for a control token."""
        if self.kind == "none":
            return b""
        length = 64
        while True:
            buffer = ctypes.create_string_buffer(length)
            n = lib.llama_token_to_piece(self._vocab, token, buffer, length, 0, False)
            if n >= 0:
                return buffer.raw[:n]
            length = -n

    def tokenize(self, text: str, *, bos: bool, special: bool) -> list[int]:
        """Return the ids of `text`.

        `bos` puts the beginning-of-sequence token first where the model wants one; `special` reads
        the text of a control token as that token. Lone surrogates become "?".
        """
        if self.kind == "none":
            raise RequestError("this model has no vocabulary: give token ids, not text")
        data = text.encode("utf-8", errors="replace")
        room = len(data) + 2
        while True:
            ids = (lib.llama_token * room)()
            n = lib.llama_tokenize(self._vocab, data, len(data), ids, room, bos, special)
            if n >= 0:
                return list(ids[:n])
            room = -n


def chat_renderer(template: str, vocab: Vocab) -> Callable[[list[Message]], str]:
    """Return a function from messages to the prompt text, by a sandboxed Jinja2 template.

    It raises RequestError where the template refuses the messages, and so does this function for a
    template that is broken.
    """
    try:
        formatter = Jinja2ChatFormatter(template, vocab.eos_text, vocab.bos_text)
    except TemplateError as error:
        raise RequestError(f"the chat template is broken: {error}") from None

    def render(messages: list[Message]) -> str:
        try:
            return str(formatter(messages=messages).prompt)
        except Exception as error:  # a template is a program, and may fail in any way
            raise RequestError(f"the chat template refuses these messages: {error}") from None

    return render


class LlamaModel:
    """A loaded model with one context; a LanguageModel (see lspec.model)."""

    def __init__(self, paths: Sequence[Path], options: LoadOptions) -> None:
        """Load the file, or the parts of a split one in order. Raises ModelLoadError."""
        # A build with GPU support reports it where it finds a GPU.
        self._on_gpu = bool(lib.llama_supports_gpu_offload()) and options.n_gpu_layers != 0
        self.n_batch = _CHUNK_GPU if self._on_gpu else _CHUNK_CPU
        self.paths = tuple(paths)
        self.n_past = 0
        self.max_rows = options.max_rows
        self._last_width = 0
        model = _load(paths, _model_params(options))
        context = _context(model, paths[0], options, n_batch=self.n_batch)
        batch = lib.llama_batch_init(self.n_batch, 0, 1)
        self.close = weakref.finalize(self, _free, context, model, batch)

        self._model, self._context, self._batch = model, context, batch
        self._memory = lib.llama_get_memory(context)
        # Cache and graph are sized in steps of 256; the window that was asked for is ours to keep.
        self.n_ctx = min(options.n_ctx, self.n_ctx_train)
        self.vocab = Vocab(lib.llama_model_get_vocab(model))
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
        return "on the GPU" if self._on_gpu else f"on the CPU with {threads} threads"

    @property
    def n_ctx_train(self) -> int:
        """The longest text that the model was trained on."""
        return int(lib.llama_model_n_ctx_train(self._model))

    def metadata(self, key: str) -> str | None:
        """Return a scalar of the file's metadata as text; None where it is missing."""
        buffer = ctypes.create_string_buffer(1024)
        n = lib.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer))
        return None if n < 0 else buffer.value.decode("utf-8", errors="replace")

    @property
    def chat_template(self) -> str | None:
        """The chat template in the file; None where there is none."""
        raw: bytes | None = lib.llama_model_chat_template(self._model, None)
        return None if raw is None else raw.decode("utf-8", errors="replace")

    def require_open(self) -> None:
        """Raise RequestError after `close`."""
        if not self.close.alive:
            raise RequestError("this engine has been closed")

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
            raise DecodeError(f"llama.cpp could not evaluate {n} tokens (code {code}{_why()})")
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


def _model_params(options: LoadOptions) -> Any:
    params = lib.llama_model_default_params()
    params.n_gpu_layers = options.n_gpu_layers
    # Repacked weights cost memory and loading time, and make logits depend on a pass's width.
    params.use_extra_bufts = False
    return params


def _load(paths: Sequence[Path], params: Any) -> Any:
    for path in paths:
        _require_gguf(path)
    _log.clear()
    if len(paths) == 1:
        model = lib.llama_model_load_from_file(os.fsencode(paths[0]), params)
    else:
        names = (ctypes.c_char_p * len(paths))(*map(os.fsencode, paths))
        model = lib.llama_model_load_from_splits(names, len(paths), params)
    if not model:
        raise ModelLoadError(
            f"llama.cpp cannot load {paths[0]}{_why()}",
            hint="The file may be damaged: `lspec pull` checks and replaces the files of a pair.",
        )
    return model


def _context(model: Any, path: Path, options: LoadOptions, *, n_batch: int) -> Any:
    params = lib.llama_context_default_params()
    # llama.cpp's own window must hold a whole prompt chunk; the one asked for is ours to enforce.
    params.n_ctx = max(256, min(options.n_ctx, lib.llama_model_n_ctx_train(model)))
    params.n_batch = params.n_ubatch = n_batch
    params.n_outputs_max = options.max_rows
    # Where the state is recurrent, keep it for as many tokens as a round may have to take back.
    params.n_rs_seq = options.max_rows - 1
    params.n_threads = params.n_threads_batch = options.n_threads or usable_cores()
    params.no_perf = True
    context = lib.llama_init_from_model(model, params)
    if not context:
        lib.llama_model_free(model)
        raise ModelLoadError(
            f"no context of {options.n_ctx} tokens for {path}{_why()}",
            hint="A smaller --ctx needs less memory.",
        )
    return context


def _free(context: Any, model: Any, batch: Any) -> None:
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    lib.llama_model_free(model)


def _require_gguf(path: Path) -> None:
    """Refuse what is no GGUF file before llama.cpp sees it."""
    hint = "Give the path of a .gguf file, or the name of a pair (`lspec ls`)."
    try:
        if path.exists() and not path.is_file():
            raise ModelLoadError(f"{path} is not a file", hint=hint)
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}", hint=hint) from None
    if magic != b"GGUF":
        raise ModelLoadError(f"{path} is not a GGUF file", hint=hint)


def _why() -> str:
    """Return llama.cpp's first complaint, which names the cause, to put behind a sentence."""
    complaints = [line for level, line in _log if level == _LOG_ERROR and line]
    return f": {complaints[0].removeprefix(_LOADING)}" if complaints else ""

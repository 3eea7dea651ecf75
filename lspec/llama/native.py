"""llama.cpp itself: its log, its build, loading and freeing through the C interface.

llama.cpp's log is kept and shown only when loading fails, or as it comes with LSPEC_DEBUG=1.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import llama_cpp as lib

from lspec.errors import GpuMemoryError, ModelLoadError
from lspec.gguf import is_repackable, read_header, require_gguf
from lspec.llama.ggml import Device, gpus
from lspec.machine import usable_cores

_LOG_ERROR = 4
_LOADING = "llama_model_load: error loading model: "
# What llama.cpp and its backends say where memory is short, and where it is the machine's.
_NO_MEMORY = re.compile(r"allocat|out of memory", re.IGNORECASE)
_OF_MACHINE = re.compile(r"cpu|aligned_malloc", re.IGNORECASE)

# Bytes of a GPU that must stay free: a backend that is refused some in a pass ends the process.
GPU_SPARE_BYTES = 200_000_000

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


KvType = Literal["f16", "q8_0", "q4_0"]
FlashAttention = Literal["auto", "on", "off"]
_GGML_TYPES = {"f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0, "q4_0": lib.GGML_TYPE_Q4_0}
_FLASH_ATTENTION = {
    "auto": lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_NO_GPUS = (ctypes.c_void_p * 1)()  # a list of devices that ends where it begins


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a model; `max_rows` is the most rows of logits that one pass returns."""

    n_ctx: int
    max_rows: int
    n_gpu_layers: int = -1  # the output counts as one; negative: all; 0: no GPU is used
    n_threads: int | None = None  # None: the physical cores that this process may use
    kv_type: KvType = "f16"
    spare: int = 0  # cells of the cache beyond the window, for tokens that are thrown away
    main_gpu: int | None = None  # the only GPU to use; None: all of them
    tensor_split: tuple[float, ...] = ()  # shares of the GPUs; none: by their free memory
    flash_attn: FlashAttention = "auto"
    repack: bool = False  # rearrange weights for the CPU, where llama.cpp can and no GPU is used

    @property
    def placement(self) -> tuple[object, ...]:
        """Where and how the model is computed, as far as costs and logits depend on it."""
        gpu = self.n_gpu_layers, self.main_gpu, self.tensor_split, self.flash_attn
        return *gpu, self.repack

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes any of it."""
        return self.n_gpu_layers != 0 and can_offload()


def can_offload() -> bool:
    """Return whether this llama.cpp was built for a GPU and finds one."""
    return bool(lib.llama_supports_gpu_offload())


def build() -> str:
    """Return what llama.cpp says of itself and of the machine: version, devices, instructions."""
    names = [gpu.description for gpu in gpus()] if can_offload() else []
    return f"{VERSION}, offload {can_offload()}, {features()}{', '.join(names)}"


def features() -> str:
    """Return what the backends say of their build: instructions, architectures."""
    text: bytes = lib.llama_print_system_info()
    return text.decode("utf-8", errors="replace")


def used_gpus(options: LoadOptions) -> tuple[Device, ...]:
    """Return the GPUs that a model may be put on."""
    used = gpus() if options.n_gpu_layers else ()
    if options.main_gpu is not None:
        return used[options.main_gpu : options.main_gpu + 1]
    if options.tensor_split:
        return tuple(gpu for gpu, share in zip(used, options.tensor_split, strict=False) if share)
    return used


def free_gpu_memory(options: LoadOptions) -> tuple[int, ...]:
    """Return the free bytes of each GPU that `options` use and that tells them."""
    return tuple(gpu.memory_free for gpu in used_gpus(options) if gpu.memory_total)


def repacks(paths: Sequence[Path], options: LoadOptions) -> bool:
    """Return whether the weights of a model are repacked with `options`. Raises ModelLoadError."""
    return options.repack and not options.on_gpu and is_repackable(list(map(read_header, paths)))


def model_params(options: LoadOptions, *, repack: bool = False) -> Any:
    """Return llama_model_params for `options`; `repack` rearranges the weights (see `repacks`)."""
    params = lib.llama_model_default_params()
    params.n_gpu_layers = options.n_gpu_layers
    if options.n_gpu_layers == 0:
        params.devices = ctypes.addressof(_NO_GPUS)
    elif options.main_gpu is not None:
        params.split_mode, params.main_gpu = lib.LLAMA_SPLIT_MODE_NONE, options.main_gpu
    elif options.tensor_split:
        shares = (ctypes.c_float * lib.llama_max_devices())(*options.tensor_split)
        params.tensor_split = shares
    params.use_extra_bufts = repack
    if repack:  # a mapped file's pages would stay beside what was made of them
        params.load_mode = lib.LLAMA_LOAD_MODE_NONE
    return params


@contextmanager
def open_header(path: Path) -> Iterator[Any]:
    """Load only metadata and vocabulary of a file. Raises ModelLoadError."""
    params = lib.llama_model_default_params()
    params.vocab_only = True
    params.devices = ctypes.addressof(_NO_GPUS)
    model = load_model([path], params)
    try:
        yield model
    finally:
        lib.llama_model_free(model)


def metadata(model: Any) -> dict[str, str]:
    """Return the scalars of a model's metadata as texts."""
    key, value = lib.llama_model_meta_key_by_index, lib.llama_model_meta_val_str_by_index
    count = lib.llama_model_meta_count(model)
    return {_written(key, model, i): _written(value, model, i) for i in range(count)}


def _written(write: Callable[..., int], model: Any, i: int) -> str:
    """Return what `write` puts into a buffer, however long it is."""
    length = 1024
    while True:
        buffer = ctypes.create_string_buffer(length)
        n = write(model, i, buffer, length)
        if n < length:
            return buffer.value.decode("utf-8", errors="replace")
        length = n + 1


def load_model(
    paths: Sequence[Path], params: Any, *, should_stop: Callable[[], bool] = lambda: False
) -> Any:
    """Return a llama_model of a file, or of the parts of a split one.

    Raises ModelLoadError, and KeyboardInterrupt where `should_stop`, read before each tensor, ended
    it.
    """

    stopped = False

    @lib.llama_progress_callback  # type: ignore[untyped-decorator]
    def goes_on(_progress: float, _data: ctypes.c_void_p) -> bool:
        nonlocal stopped
        try:
            stopped = should_stop()
        except BaseException:  # C cannot take it
            stopped = True
        return not stopped

    for path in paths:
        require_gguf(path)
    params.progress_callback = goes_on
    _log.clear()
    if len(paths) == 1:
        model = lib.llama_model_load_from_file(os.fsencode(paths[0]), params)
    else:
        names = (ctypes.c_char_p * len(paths))(*map(os.fsencode, paths))
        model = lib.llama_model_load_from_splits(names, len(paths), params)
    if not model and stopped:
        raise KeyboardInterrupt
    if not model:
        raise _failure(on_gpu=params.n_gpu_layers != 0)(
            f"llama.cpp cannot load {paths[0]}{why()}",
            hint="The file may be damaged: `lspec pull` checks and replaces the files of a pair.",
        )
    return model


def new_context(model: Any, path: Path, options: LoadOptions, *, n_batch: int) -> Any:
    """Return a llama_context; where there is none, `model` is freed. Raises ModelLoadError."""
    params = lib.llama_context_default_params()
    # llama.cpp's own window must hold a whole prompt chunk; the one asked for is ours to enforce.
    window = min(options.n_ctx, lib.llama_model_n_ctx_train(model))
    params.n_ctx = max(256, window + options.spare)
    params.type_k = params.type_v = _GGML_TYPES[options.kv_type]
    params.flash_attn_type = _FLASH_ATTENTION[options.flash_attn]
    params.n_batch = params.n_ubatch = n_batch
    params.n_outputs_max = options.max_rows
    # Where the state is recurrent, keep it for as many tokens as a round may have to take back.
    params.n_rs_seq = options.max_rows - 1
    params.n_threads = params.n_threads_batch = options.n_threads or usable_cores()
    params.no_perf = True
    context = lib.llama_init_from_model(model, params)
    if not context:
        lib.llama_model_free(model)
        raise _failure(on_gpu=options.n_gpu_layers != 0)(
            f"no context of {options.n_ctx} tokens for {path}{why()}",
            hint="A smaller window (n_ctx=N) needs less memory.",
        )
    return context


def free(context: Any, model: Any, batch: Any) -> None:
    """Free all three."""
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    lib.llama_model_free(model)


def _failure(*, on_gpu: bool) -> type[ModelLoadError]:
    """Return the class of the error for what llama.cpp has just refused."""
    complaints = (line for level, line in _log if level == _LOG_ERROR)
    short = [line for line in complaints if _NO_MEMORY.search(line)]
    full = on_gpu and can_offload() and short and not any(map(_OF_MACHINE.search, short))
    return GpuMemoryError if full else ModelLoadError


def why() -> str:
    """Return llama.cpp's first complaint, which names the cause, to put behind a sentence."""
    complaints = [line for level, line in _log if level == _LOG_ERROR and line]
    return f": {complaints[0].removeprefix(_LOADING)}" if complaints else ""

"""How much memory a pair takes, from the headers of its files alone: nothing is loaded.

All sizes are bytes. Weights, caches and rows of logits follow from the headers exactly. What
llama.cpp computes with, and what it keeps of a vocabulary, is estimated, rather too much than too
little: from the tensors' shapes, and from constants that `scripts/check_memory.py` compares with
what loading really takes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lspec.gguf import Header, Tensor

KV_BYTES = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}  # of a number, scales included
KV_BLOCK = 32  # numbers that share a scale: a head must hold a multiple to be quantized
WINDOW_STEP = 256  # llama.cpp's own window is a multiple of it

_FLOAT = 4
_PROCESS = 60_000_000  # Python, the libraries, and what these work with
_FRAGMENTS = 1_000_000  # that no tensor fits into, between those of a pass
_TOKEN, _MERGE = 220, 160  # of a vocabulary in memory: maps in both directions, and our own list
_LAYER = re.compile(r"blk\.(\d+)\.(.*)")
_RECURRENT = ("ssm_", "shortconv", "time_mix")
# These keep one recurrent state, whatever they are asked for; all others one per token of a round.
_ONE_STATE = {
    *("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"),
    *("jamba", "falcon-h1", "granitehybrid", "plamo2", "qwen3next", "kimi-linear"),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: bytes of its weights; numbers that a token adds to the cache; those of its state.

    `live` are the numbers per token that are computed in it, `largest` the bytes of its largest
    tensor.
    """

    weights: int
    cached: int
    state: int
    live: int
    largest: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What the memory of a model depends on; `input` and `output` are bytes of weights.

    `tied` are the bytes of an output matrix that is the input's: on a GPU it is there twice.
    `vocabulary` is what tokens and merges take in memory.
    """

    layers: tuple[Layer, ...]
    input: int
    output: int
    tied: int
    vocabulary: int
    n_vocab: int
    n_embd: int
    n_heads: int
    n_ctx_train: int
    sliding: bool
    one_state: bool
    quantizable: bool


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is to be loaded.

    `max_rows` are the rows of logits that a pass returns at most, `chunk` is the most tokens of a
    pass, `spare` cells of the cache beyond the window. `gpu_layers` counts the output as a layer
    of its own; negative means all, and 0 also stands for a machine without a GPU.
    """

    n_ctx: int
    max_rows: int
    chunk: int
    kv_type: str = "f16"
    gpu_layers: int = 0
    spare: int = 0
    flash_attn: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """What one model takes on one side: in the machine's memory or in the GPU's."""

    weights: int = 0
    cache: int = 0
    compute: int = 0
    logits: int = 0
    vocabulary: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.compute + self.logits + self.vocabulary


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What one model takes; of its `n_layers` layers, the output included, some are on the GPU."""

    n_ctx: int
    kv_type: str
    n_layers: int
    gpu_layers: int
    host: Part
    gpu: Part


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a pair takes: both models, and the process around them.

    Not what a GPU's driver takes there: what is free is told with the driver running.
    """

    target: ModelPlan
    draft: ModelPlan | None
    process: int = _PROCESS

    @property
    def models(self) -> tuple[ModelPlan, ...]:
        """The models that there are."""
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def host(self) -> int:
        """All that is taken of the machine's memory."""
        return self.process + sum(model.host.total for model in self.models)

    @property
    def gpu(self) -> int:
        """All that is taken of the GPU's memory."""
        return sum(model.gpu.total for model in self.models)


def shape_of(headers: Sequence[Header]) -> Shape:
    """Return what matters of a model, given the headers of its file, or of its parts in order."""
    first = headers[0]
    sizes: dict[int, int] = defaultdict(int)  # by layer; -1: input, -2: output
    tensors: dict[int, list[tuple[str, Tensor, int]]] = defaultdict(list)
    tied = 0
    names = {tensor.name for header in headers for tensor in header.tensors}
    for header in headers:
        for tensor, size in zip(header.tensors, header.sizes, strict=True):
            if found := _LAYER.match(tensor.name):
                tensors[int(found[1])].append((found[2], tensor, size))
                continue
            sizes[-2 if tensor.name.startswith("output") else -1] += size
            if tensor.name == "token_embd.weight" and "output.weight" not in names:
                tied = size
    head = _head_length(first)
    return Shape(
        tuple(_layer(first, i, tensors[i], len(tensors)) for i in sorted(tensors)),
        input=sizes[-1],
        output=sizes[-2],
        tied=tied,
        vocabulary=_TOKEN * first.lengths.get("tokenizer.ggml.tokens", 0)
        + _MERGE * first.lengths.get("tokenizer.ggml.merges", 0),
        n_vocab=first.lengths.get("tokenizer.ggml.tokens", 0) or first.number("vocab_size"),
        n_embd=first.number("embedding_length"),
        n_heads=first.number("attention.head_count"),
        n_ctx_train=first.number("context_length"),
        sliding=first.number("attention.sliding_window") > 0,
        one_state=first.architecture in _ONE_STATE,
        quantizable=all(length % KV_BLOCK == 0 for length in head),
    )


def plan(
    target: Shape,
    setting: Setting,
    draft: Shape | None = None,
    draft_setting: Setting | None = None,
) -> MemoryPlan:
    """Return what the models take, each loaded as its setting says."""
    return MemoryPlan(
        _model(target, setting),
        None if draft is None or draft_setting is None else _model(draft, draft_setting),
    )


def _layer(
    header: Header, i: int, tensors: Sequence[tuple[str, Tensor, int]], n_layers: int
) -> Layer:
    recurrent = any(name.startswith(_RECURRENT) for name, *_ in tensors)
    attends = not recurrent or any(name.startswith("attn_output") for name, *_ in tensors)
    shared = i >= n_layers - header.number("attention.shared_kv_layers")
    key, value = _head_length(header)
    heads = _of_layer(header, "attention.head_count_kv", i, header.number("attention.head_count"))
    return Layer(
        weights=sum(size for *_, size in tensors),
        cached=heads * (key + value) if attends and not shared else 0,
        state=_state(header) if recurrent else 0,
        live=sum(_computed(header, tensor) for _, tensor, _ in tensors),
        largest=max(size for *_, size in tensors),
    )


def _computed(header: Header, tensor: Tensor) -> int:
    """Return how many numbers per token a product with `tensor` has."""
    if len(tensor.shape) < 2:
        return 0
    experts = header.number("expert_used_count", 1) if len(tensor.shape) > 2 else 1
    return tensor.shape[1] * experts


def _head_length(header: Header) -> tuple[int, int]:
    """Return the numbers of a key and of a value of one head that are cached, the most of any."""
    of_width = header.number("embedding_length") // max(1, header.number("attention.head_count"))
    key, value = (
        max(
            header.number(f"attention.{what}_length", of_width),
            header.number(f"attention.{what}_length_swa"),
        )
        for what in ("key", "value")
    )
    latent = header.number("attention.key_length_mla") and header.number(
        "attention.value_length_mla"
    )
    return key, 0 if latent else value


def _of_layer(header: Header, key: str, i: int, default: int) -> int:
    """Return a number that may be another one in each layer."""
    values = header.metadata.get(f"{header.architecture}.{key}")
    if isinstance(values, list) and i < len(values):
        value = values[i]
        return value if isinstance(value, int) else default
    return header.number(key, default)


def _state(header: Header) -> int:
    """Return the numbers of a recurrent layer's state, for one sequence."""
    n_embd = header.number("embedding_length")
    kernel = max(0, header.number("ssm.conv_kernel", 1) - 1)
    if head := header.number("wkv.head_size"):
        return n_embd * (header.number("token_shift_count", 2) + head)
    if length := header.number("shortconv.l_cache"):
        return n_embd * (length - 1)
    if head := header.number("kda.head_dim"):
        return header.number("attention.head_count") * head * (3 * kernel + head)
    inner, state = header.number("ssm.inner_size"), header.number("ssm.state_size")
    groups = header.number("ssm.group_count")
    return kernel * (inner + 2 * groups * state) + inner * state


def _model(shape: Shape, setting: Setting) -> ModelPlan:
    n_layers = len(shape.layers) + 1
    on_gpu = n_layers if setting.gpu_layers < 0 else min(setting.gpu_layers, n_layers)
    first = n_layers - on_gpu  # the last ones go to the GPU, the output before all others
    here, there = shape.layers[:first], shape.layers[first:]
    window = min(setting.n_ctx, shape.n_ctx_train or setting.n_ctx)
    cells = -(-max(WINDOW_STEP, window + setting.spare) // WINDOW_STEP) * WINDOW_STEP
    compute, inputs = _compute(shape, setting, cells), _inputs(shape, setting, cells)
    copied = max((layer.largest for layer in here), default=0)  # to the GPU, for a long pass
    host = Part(
        shape.input + sum(layer.weights for layer in here) + (0 if on_gpu else shape.output),
        _cache(shape, setting, here, cells),
        compute if here or not on_gpu else inputs,
        _FLOAT * shape.n_vocab * (setting.max_rows + 1),  # one for the ids that samplers start from
        shape.vocabulary,
    )
    gpu = Part(
        shape.output + shape.tied + sum(layer.weights for layer in there),
        _cache(shape, setting, there, cells),
        compute + copied,
    )
    return ModelPlan(window, setting.kv_type, n_layers, on_gpu, host, gpu if on_gpu else Part())


def _cache(shape: Shape, setting: Setting, layers: Sequence[Layer], cells: int) -> int:
    """Return the bytes of keys, values and states. Sliding windows are cached in full."""
    numbers = cells * sum(layer.cached for layer in layers)
    states = 1 if shape.one_state else setting.max_rows
    state = _FLOAT * states * sum(layer.state for layer in layers)
    return int(numbers * KV_BYTES[setting.kv_type]) + state


def _inputs(shape: Shape, setting: Setting, cells: int) -> int:
    """Return the bytes of a pass's embeddings and of its masks, one per kind of window."""
    mask = cells * setting.chunk * (_FLOAT // 2 if setting.flash_attn else _FLOAT)
    return mask * (2 if shape.sliding else 1) + _FLOAT * setting.chunk * shape.n_embd


def _compute(shape: Shape, setting: Setting, cells: int) -> int:
    """Return the bytes that a pass computes in.

    Inputs stay; of the layers, whose buffers are used again in turn, the widest one counts, and of
    it and the rows of logits at the end, the larger.
    """
    live = max((layer.live for layer in shape.layers), default=0) + 2 * shape.n_embd
    state = max((layer.state for layer in shape.layers), default=0)
    scores = 0 if setting.flash_attn else 2 * cells * shape.n_heads
    layer = setting.chunk * (live + scores) + state * (1 if shape.one_state else setting.max_rows)
    logits = setting.max_rows * (shape.n_vocab + shape.n_embd)
    return _inputs(shape, setting, cells) + _FLOAT * max(layer, logits) + _FRAGMENTS

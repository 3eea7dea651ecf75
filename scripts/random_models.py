"""Models of real shapes with random Q4_0 weights, written in seconds: for measuring, not for text.

After the token t comes t + 1, most of the time: the output matrix is the embeddings shifted by a
row, so that models of different sizes agree as a target and its draft do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from pathlib import Path

import numpy as np

try:
    import gguf
except ModuleNotFoundError:
    sys.exit("error: the package gguf is not installed\nInstall it with: pip install gguf")

_BLOCK, _BYTES = 32, 18  # weights and bytes of a block of Q4_0
_SPREAD = 4.32  # standard deviation of a random number from -7 to 7
_PATTERN = 1_000_003  # blocks; a prime, so that no two rows of a matrix are the same
_LIKELY = 2.5  # how far the logit of t + 1 is above what all others come to together


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Qwen2 model."""

    name: str
    width: int
    blocks: int
    feed: int
    heads: int
    kv_heads: int
    vocabulary: int = 151_936
    window: int = 32_768


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("0.1B", 512, 12, 1536, 8, 2),
        Shape("0.5B", 896, 24, 4864, 14, 2),
        Shape("1.5B", 1536, 28, 8960, 12, 2),
        Shape("7B", 3584, 28, 18944, 28, 4),
        Shape("tiny", 128, 2, 256, 4, 2, 1000, 2048),
        Shape("small", 256, 3, 512, 4, 2, 1000, 2048),
    )
}


def write(path: Path, shape: Shape) -> Path:
    """Write the model of `shape`; the same bytes each time."""
    writer = gguf.GGUFWriter(path, "qwen2")
    _add_metadata(writer, shape)
    tensors = list(_tensors(shape))
    for name, rows, columns, _, _ in tensors:
        if columns:
            size = rows * columns // _BLOCK * _BYTES
            kind = gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor_info(name, (rows, columns), np.dtype(np.int8), size, raw_dtype=kind)
        else:
            writer.add_tensor_info(name, (rows,), np.dtype(np.float32), 4 * rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    pattern = _pattern()
    for _, rows, columns, deviation, start in tensors:
        if columns:
            # float16 is the type of a block's scale.
            pattern[:, :2] = np.array([deviation / _SPREAD], np.float16).view(np.uint8)
            writer.write_tensor_data(_repeat(pattern, rows * columns // _BLOCK, start))
        else:
            writer.write_tensor_data(np.full(rows, deviation, np.float32))
    writer.close()
    return path


def _pattern() -> np.ndarray:
    """Return random blocks, their scales not yet filled in.

    The numbers have the mean 0: else all states would drift into one direction.
    """
    random = np.random.default_rng(1)
    low, high = (random.integers(1, 16, (_PATTERN, _BLOCK // 2), np.uint8) for _ in range(2))
    scale = np.zeros((_PATTERN, 2), np.uint8)
    return np.concatenate([scale, low | high << 4], axis=1)


def _repeat(pattern: np.ndarray, blocks: int, start: int) -> np.ndarray:
    """Return `blocks` blocks of the endless pattern, from block `start` on."""
    rest = np.roll(pattern, -(start % _PATTERN), axis=0)
    return np.resize(rest, (blocks, _BYTES))


def _tensors(shape: Shape) -> Iterator[tuple[str, int, int, float, int]]:
    """Yield name, rows, columns (0: a vector), deviation (a vector's value), first block."""
    width, kv = shape.width, shape.width // shape.heads * shape.kv_heads
    row = width // _BLOCK
    # Behind the norm a state has length sqrt(width), most of it the token's own embedding.
    likely = (log(shape.vocabulary) + _LIKELY) / width
    yield "token_embd.weight", shape.vocabulary, width, 1.0, 0
    yield "output_norm.weight", width, 0, 1.0, 0
    yield "output.weight", shape.vocabulary, width, likely, -row
    start = 7
    for i in range(shape.blocks):
        block = f"blk.{i}."
        yield f"{block}attn_norm.weight", width, 0, 1.0, 0
        yield f"{block}ffn_norm.weight", width, 0, 1.0, 0
        for name, rows, columns in (
            ("attn_q", width, width),
            ("attn_k", kv, width),
            ("attn_v", kv, width),
            ("attn_output", width, width),
            ("ffn_gate", shape.feed, width),
            ("ffn_up", shape.feed, width),
            ("ffn_down", width, shape.feed),
        ):
            # What a block adds to the state is small beside it.
            small = 0.1 if name in ("attn_output", "ffn_down") else 1.0
            start += 104_729
            yield f"{block}{name}.weight", rows, columns, small * columns**-0.5, start
        for name, rows in (("attn_q", width), ("attn_k", kv), ("attn_v", kv)):
            yield f"{block}{name}.bias", rows, 0, 0.0, 0


def _add_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name(f"random {shape.name}")
    writer.add_context_length(shape.window)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.blocks)
    writer.add_feed_forward_length(shape.feed)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    _add_vocabulary(writer, shape.vocabulary)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Add byte tokens, one merged token, an end token, and numbered ones up to `size`."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    letters = [chr(b if b in printable else next(others)) for b in range(256)]
    end = size - 1
    names = [*letters, "he", *(f"<{i}>" for i in range(257, end)), "<|endoftext|>"]
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(names)
    writer.add_token_types([kinds.NORMAL] * end + [kinds.CONTROL])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(end)
    writer.add_bos_token_id(end)
    writer.add_add_bos_token(False)

"""Tiny GGUF models, written in milliseconds and loaded in as many.

All are random float32 models of two blocks: `seed` decides the weights, and `blur` adds noise to
them, so that a model and its blurred copy disagree a little, like a target and its draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

WIDTH, FEED, HEADS, BLOCKS = 32, 64, 4, 2

# Ids of the SPM vocabulary: 4 named tokens, then the 256 bytes.
SPM_UNKNOWN, SPM_BOS, SPM_EOS, SPM_SPACE, SPM_BYTES = 0, 1, 2, 3, 4
SPM_SIZE = 260

# Ids of the chat vocabulary: 256 bytes in their own order, one merged token, control tokens.
CHAT_MERGED, CHAT_ENDOFTEXT, CHAT_IM_START, CHAT_IM_END = 256, 257, 258, 259
CHAT_SIZE = 260
CHAT_CONTROLS = {
    CHAT_ENDOFTEXT: "<|endoftext|>",
    CHAT_IM_START: "<|im_start|>",
    CHAT_IM_END: "<|im_end|>",
}

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class _Weights:
    """Random tensors: a function of seed, blur and the order in which they are asked for."""

    def __init__(self, seed: int, blur: float) -> None:
        self._sharp = np.random.default_rng([seed, 0])
        self._noise = np.random.default_rng([seed, 1])
        self._blur = blur

    def __call__(self, *shape: int, scale: float | None = None) -> Floats:
        scale = shape[-1] ** -0.5 if scale is None else scale
        sharp = self._sharp.standard_normal(shape, np.float32)
        noise = self._noise.standard_normal(shape, np.float32)
        return ((sharp + self._blur * noise) * scale).astype(np.float32)


def write_law_model(
    path: Path, *, seed: int, n_vocab: int = 8, blur: float = 0.0, n_ctx: int = 256
) -> Path:
    """Write a llama model without text: `n_vocab` ids whose logits spread by about 1.3."""
    writer = _llama(path, n_ctx)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(n_vocab)
    _add_llama_tensors(writer, _Weights(seed, blur), np.zeros(n_vocab, np.float32), spread=1.3)
    return _finish(writer, path)


def write_spm_model(
    path: Path, *, seed: int = 1, blur: float = 0.0, n_ctx: int = 4096, add_bos: bool = False
) -> Path:
    """Write a llama model over SPM bytes (260 ids): every UTF-8 text round-trips; `</s>` ends."""
    writer = _llama(path, n_ctx)
    _add_spm_vocabulary(writer, add_bos=add_bos)
    likely = _favour(SPM_SIZE, SPM_BYTES, ends=[SPM_EOS], never=[SPM_UNKNOWN, SPM_BOS])
    _add_llama_tensors(writer, _Weights(seed, blur), likely, spread=2.0)
    return _finish(writer, path)


def write_chat_model(
    path: Path,
    *,
    seed: int = 1,
    blur: float = 0.0,
    padding: int = 0,
    n_ctx: int = 4096,
    template: str | None = CHATML,
    merged: str = "he",
    end_bias: float = 0.5,
    marks: Sequence[str] = (),
    marks_are_controls: bool = False,
    pre: str = "qwen2",
) -> Path:
    """Write a llama model over BPE bytes with ChatML's control tokens and template.

    Its text is mostly printable ASCII and ends now and then; a larger `end_bias` ends sooner, -20
    never. `marks` are user-defined or control tokens behind the others, which come only if they are
    wanted (the first is CHAT_SIZE).
    `padding` unused ids at the end change nothing else, but have the largest logits of all,
    so that whoever lets them through is found out. `merged` is the text of id 256: give another
    one for a mismatched pair.
    """
    writer = _llama(path, n_ctx)
    _add_chat_vocabulary(
        writer,
        padding=padding,
        merged=merged,
        template=template,
        marks=marks,
        marks_are_controls=marks_are_controls,
        pre=pre,
    )
    bias = np.concatenate([_chat_bias(end_bias), np.full(len(marks), -20, np.float32)])
    _add_llama_tensors(writer, _Weights(seed, blur), bias, spread=2.0, padding=padding)
    return _finish(writer, path)


def write_split_chat_model(folder: Path, *, seed: int = 1, tensors: int = 8) -> list[Path]:
    """Write `write_chat_model(seed=seed)` as a split GGUF; return its files in order."""
    writer = _llama(folder / "split.gguf", 4096, split_max_tensors=tensors)
    _add_chat_vocabulary(writer, padding=0, merged="he", template=CHATML)
    _add_llama_tensors(writer, _Weights(seed, 0.0), _chat_bias(0.5), spread=2.0)
    _finish(writer, folder)
    return sorted(folder.glob("split-*-of-*.gguf"))


def write_mamba(path: Path, *, seed: int = 1, n_ctx: int = 4096) -> Path:
    """Write a recurrent model (mamba) over the chat vocabulary: it cannot roll back at all."""
    inner, state, rank, kernel = 2 * WIDTH, 8, 4, 4
    writer = gguf.GGUFWriter(path, "mamba")
    _add_size(writer, n_ctx, feed=0, heads=0)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    _add_chat_vocabulary(writer, padding=0, merged="he", template=CHATML)
    draw = _Weights(seed, 0.0)
    _add_embeddings(writer, draw, _chat_bias(0.5), spread=2.0)
    for i in range(BLOCKS):
        block = f"blk.{i}."
        writer.add_tensor(block + "attn_norm.weight", np.ones(WIDTH, np.float32))
        writer.add_tensor(block + "ssm_in.weight", draw(2 * inner, WIDTH))
        writer.add_tensor(block + "ssm_conv1d.weight", draw(inner, kernel))
        writer.add_tensor(block + "ssm_conv1d.bias", np.zeros(inner, np.float32))
        writer.add_tensor(block + "ssm_x.weight", draw(rank + 2 * state, inner))
        writer.add_tensor(block + "ssm_dt.weight", draw(inner, rank))
        writer.add_tensor(block + "ssm_dt.bias", np.zeros(inner, np.float32))
        decay = np.tile(np.arange(1, state + 1, dtype=np.float32), (inner, 1))
        writer.add_tensor(block + "ssm_a", -decay)
        writer.add_tensor(block + "ssm_d", np.ones(inner, np.float32))
        writer.add_tensor(block + "ssm_out.weight", _keep_bias_channel(draw(WIDTH, inner)))
    return _finish(writer, path)


def write_lfm2(path: Path, *, seed: int = 1, n_ctx: int = 4096) -> Path:
    """Write a hybrid model (LFM2) over the chat vocabulary: it rolls back `n_rs_seq` tokens."""
    kernel, head = 3, WIDTH // HEADS
    writer = gguf.GGUFWriter(path, "lfm2")
    _add_size(writer, n_ctx, feed=FEED, heads=HEADS)
    writer.add_head_count_kv([0, HEADS])  # 0: a short convolution in place of attention
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(CHAT_SIZE)
    writer.add_shortconv_l_cache(kernel)
    _add_chat_vocabulary(writer, padding=0, merged="he", template=CHATML)
    draw = _Weights(seed, 0.0)
    _add_embeddings(writer, draw, _chat_bias(0.5), spread=2.0, norm="token_embd_norm.weight")
    writer.add_tensor("blk.0.shortconv.conv.weight", draw(WIDTH, kernel))
    writer.add_tensor("blk.0.shortconv.in_proj.weight", draw(3 * WIDTH, WIDTH))
    writer.add_tensor("blk.0.shortconv.out_proj.weight", _keep_bias_channel(draw(WIDTH, WIDTH)))
    _add_attention(writer, draw, "blk.1.")
    writer.add_tensor("blk.1.attn_q_norm.weight", np.ones(head, np.float32))
    writer.add_tensor("blk.1.attn_k_norm.weight", np.ones(head, np.float32))
    for i in range(BLOCKS):
        _add_feed_forward(writer, draw, f"blk.{i}.")
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(WIDTH, np.float32))
    return _finish(writer, path)


# -- files that are no language models --


def write_truncated(path: Path) -> Path:
    """Write the first two thirds of a chat model: its header is whole, its tensors are not."""
    write_chat_model(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    return path


def write_empty(path: Path) -> Path:
    """Write an empty file."""
    path.write_bytes(b"")
    return path


def write_web_page(path: Path) -> Path:
    """Write what a failed download leaves behind: text."""
    path.write_text("<!doctype html><title>404</title>\n", encoding="utf-8")
    return path


def write_projector(path: Path) -> Path:
    """Write a GGUF that holds only an image projector, as multimodal models bring along."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_tensor("mm.0.weight", np.zeros((WIDTH, WIDTH), np.float32))
    return _finish(writer, path)


# -- parts --


def _llama(path: Path, n_ctx: int, split_max_tensors: int = 0) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split_max_tensors)
    _add_size(writer, n_ctx, feed=FEED, heads=HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    return writer


def _add_size(writer: gguf.GGUFWriter, n_ctx: int, *, feed: int, heads: int) -> None:
    writer.add_name("tiny")
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(BLOCKS)
    writer.add_feed_forward_length(feed)
    writer.add_head_count(heads)
    if not heads:
        writer.add_layer_norm_rms_eps(1e-5)


def _add_spm_vocabulary(writer: gguf.GGUFWriter, *, add_bos: bool) -> None:
    kinds = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "▁", *(f"<0x{b:02X}>" for b in range(256))])
    writer.add_token_scores([0.0, 0.0, 0.0, -1.0] + [0.0] * 256)
    writer.add_token_types(
        [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, kinds.NORMAL] + [kinds.BYTE] * 256
    )
    writer.add_bos_token_id(SPM_BOS)
    writer.add_eos_token_id(SPM_EOS)
    writer.add_unk_token_id(SPM_UNKNOWN)
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(add_bos)


def _add_chat_vocabulary(
    writer: gguf.GGUFWriter,
    *,
    padding: int,
    merged: str,
    template: str | None,
    marks: Sequence[str] = (),
    marks_are_controls: bool = False,
    pre: str = "qwen2",
) -> None:
    kinds = gguf.TokenType
    names = _gpt2_characters()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    pads = [f"[PAD{CHAT_SIZE + len(marks) + i}]" for i in range(padding)]
    writer.add_token_list([*names, merged, *CHAT_CONTROLS.values(), *marks, *pads])
    writer.add_token_types(
        [kinds.NORMAL] * 257
        + [kinds.CONTROL] * 3
        + [kinds.CONTROL if marks_are_controls else kinds.USER_DEFINED] * len(marks)
        + [kinds.UNUSED] * padding,
    )
    writer.add_token_merges([f"{merged[0]} {merged[1:]}"])
    writer.add_eos_token_id(CHAT_IM_END)
    writer.add_pad_token_id(CHAT_ENDOFTEXT)
    writer.add_bos_token_id(CHAT_ENDOFTEXT)
    writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template(template)


def _gpt2_characters() -> list[str]:
    """Return the character by which a gpt2 vocabulary names each of the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def _chat_bias(end_bias: float) -> Floats:
    never = [CHAT_ENDOFTEXT, CHAT_IM_START]
    return _favour(CHAT_SIZE, 0, ends=[CHAT_IM_END], never=never, end_bias=end_bias)


def _favour(
    size: int, first_byte: int, *, ends: Sequence[int], never: Sequence[int], end_bias: float = 0.5
) -> Floats:
    """Return biases of the logits: for printable ASCII, a little for ends, against the rest."""
    bias = np.full(size, -4, np.float32)
    bias[[first_byte + b for b in (0x0A, *range(0x20, 0x7F))]] = 0
    bias[list(ends)] = end_bias
    bias[list(never)] = -20
    return bias


def _add_llama_tensors(
    writer: gguf.GGUFWriter,
    draw: Callable[..., Floats],
    bias: Floats,
    *,
    spread: float,
    padding: int = 0,
) -> None:
    _add_embeddings(writer, draw, bias, spread=spread, padding=padding)
    for i in range(BLOCKS):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(WIDTH, np.float32))
        _add_attention(writer, draw, f"blk.{i}.")
        _add_feed_forward(writer, draw, f"blk.{i}.")


def _add_embeddings(
    writer: gguf.GGUFWriter,
    draw: Callable[..., Floats],
    bias: Floats,
    *,
    spread: float,
    norm: str = "output_norm.weight",
    padding: int = 0,
) -> None:
    """Add the ends of the model. Channel 0 is the same for every token and carries the bias."""
    embeddings = draw(len(bias), WIDTH, scale=1.0)
    embeddings[:, 0] = 4.0
    output = draw(len(bias), WIDTH, scale=spread * WIDTH**-0.5)
    output[:, 0] = bias / 2.0  # about what channel 0 is after the norm
    unused = np.zeros((padding, WIDTH), np.float32)
    unused[:, 0] = 10.0
    writer.add_tensor("token_embd.weight", np.concatenate([embeddings, unused]))
    writer.add_tensor(norm, np.ones(WIDTH, np.float32))
    writer.add_tensor("output.weight", np.concatenate([output, unused]))


def _add_attention(writer: gguf.GGUFWriter, draw: Callable[..., Floats], block: str) -> None:
    # Queries and keys large enough that attention is far from uniform: the order of tokens counts.
    for name in ("attn_q", "attn_k"):
        writer.add_tensor(f"{block}{name}.weight", draw(WIDTH, WIDTH, scale=0.25))
    writer.add_tensor(f"{block}attn_v.weight", draw(WIDTH, WIDTH))
    output = _keep_bias_channel(draw(WIDTH, WIDTH))
    writer.add_tensor(f"{block}attn_output.weight", output)


def _add_feed_forward(writer: gguf.GGUFWriter, draw: Callable[..., Floats], block: str) -> None:
    writer.add_tensor(f"{block}ffn_norm.weight", np.ones(WIDTH, np.float32))
    writer.add_tensor(f"{block}ffn_gate.weight", draw(FEED, WIDTH))
    writer.add_tensor(f"{block}ffn_up.weight", draw(FEED, WIDTH))
    writer.add_tensor(f"{block}ffn_down.weight", _keep_bias_channel(draw(WIDTH, FEED)))


def _keep_bias_channel(weight: Floats) -> Floats:
    """Return a projection back to the residual stream that leaves channel 0 alone."""
    weight[0] = 0
    return weight


def _finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

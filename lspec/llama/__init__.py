"""Models, contexts and vocabularies of llama.cpp; the only part that imports llama_cpp."""

from lspec.llama.chat import chat_format, chat_renderer, variables_of
from lspec.llama.ggml import Device, backends, gpus
from lspec.llama.model import LlamaModel, prompt_chunk
from lspec.llama.native import (
    GPU_SPARE_BYTES,
    VERSION,
    FlashAttention,
    KvType,
    LoadOptions,
    build,
    can_offload,
    features,
    repacks,
    used_gpus,
)
from lspec.llama.vocab import Vocab, read_vocabulary

__all__ = [
    "GPU_SPARE_BYTES",
    "VERSION",
    "Device",
    "FlashAttention",
    "KvType",
    "LlamaModel",
    "LoadOptions",
    "Vocab",
    "backends",
    "build",
    "can_offload",
    "chat_format",
    "chat_renderer",
    "features",
    "gpus",
    "prompt_chunk",
    "read_vocabulary",
    "repacks",
    "used_gpus",
    "variables_of",
]

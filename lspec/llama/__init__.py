"""Models, contexts and vocabularies of llama.cpp; the only part that imports llama_cpp."""

from lspec.llama.chat import chat_format, chat_renderer
from lspec.llama.ggml import gpus
from lspec.llama.model import LlamaModel, prompt_chunk
from lspec.llama.native import VERSION, KvType, LoadOptions, build, can_offload
from lspec.llama.vocab import Vocab, read_vocabulary

__all__ = [
    "VERSION",
    "KvType",
    "LlamaModel",
    "LoadOptions",
    "Vocab",
    "build",
    "can_offload",
    "chat_format",
    "chat_renderer",
    "gpus",
    "prompt_chunk",
    "read_vocabulary",
]

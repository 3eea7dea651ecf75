"""Models, contexts and vocabularies of llama.cpp; the only part that imports llama_cpp."""

from lspec.llama.chat import chat_format, chat_renderer, variables_of
from lspec.llama.model import LlamaModel
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
    "read_vocabulary",
    "variables_of",
]

"""The drop-in for `llama_cpp.Llama`: the same calls and replies, with speculative decoding."""

from lspec.dropin.llama import Llama

__all__ = ["Llama"]

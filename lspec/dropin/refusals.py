"""Arguments of llama_cpp that lspec cannot honour, each with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from inspect import Parameter, signature
from typing import Any

from lspec.errors import RequestError

_ROPE = "positions are encoded as the model's file says"
_EMBEDDING = "there are no embeddings, only text"
_ADAPTERS = "there are no adapters: merge it into the model first"
_HUB = "files of the hub go into its own cache, which HF_HOME moves"

LOADING = {
    "vocab_only": "nothing can be decoded without the weights",
    "kv_overrides": "the metadata of the model's file are taken as they are",
    "rope_scaling_type": _ROPE,
    "pooling_type": _EMBEDDING,
    "attention_type": _EMBEDDING,
    "rope_freq_base": _ROPE,
    "rope_freq_scale": _ROPE,
    "yarn_ext_factor": _ROPE,
    "yarn_attn_factor": _ROPE,
    "yarn_beta_fast": _ROPE,
    "yarn_beta_slow": _ROPE,
    "yarn_orig_ctx": _ROPE,
    "embedding": _EMBEDDING,
    "offload_kqv": "the caches lie where the layers do",
    "lora_base": _ADAPTERS,
    "lora_path": _ADAPTERS,
    "chat_handler": "a handler drives llama_cpp.Llama itself: name a chat_format",
    "draft_model": "lspec drafts by itself: give draft_model_path, or drafter='ngram'",
    "tokenizer": "target and draft are tokenized as their files say",
}

COMPLETION = {
    "tfs_z": "llama.cpp has no tail-free sampling any more",
    "mirostat_mode": "mirostat's state follows each token, so drafted tokens cannot be judged",
    "stopping_criteria": "a criterion sees the logits after each token: use stop",
    "logits_processor": "a processor sees one token at a time: use logit_bias or a grammar",
}

CHAT = {
    "functions": "it is the old form of tools: give these",
    **{name: COMPLETION[name] for name in ("tfs_z", "mirostat_mode", "logits_processor")},
}

PRETRAINED = {"local_dir": _HUB, "cache_dir": _HUB}


def refuse(
    method: Callable[..., Any], given: Mapping[str, Any], reasons: Mapping[str, str]
) -> None:
    """Raise RequestError for an argument in `reasons` that is not `method`'s default."""
    for name, reason in reasons.items():
        if not _is_default(given[name], _parameters(method)[name].default):
            raise RequestError(f"{name} cannot be honoured: {reason}", hint=f"Leave {name} out.")


@cache
def _parameters(method: Callable[..., Any]) -> Mapping[str, Parameter]:
    return signature(method).parameters


def _is_default(value: Any, default: Any) -> bool:
    if value is None or value is default:
        return True
    if default is None:
        return isinstance(value, list | tuple | dict) and not value
    return bool(value == default)

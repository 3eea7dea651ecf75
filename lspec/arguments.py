"""The arguments of the library and the options of the command line, by each other's names."""

from __future__ import annotations

import re
import shlex

# Options that are not their argument with - for _.
RENAMED = {
    "ctx": "n_ctx",
    "draft_ctx": "draft_n_ctx",
    "threads": "n_threads",
    "gpu_layers": "n_gpu_layers",
    "draft_gpu_layers": "draft_n_gpu_layers",
}
_OPTIONS = {argument: option for option, argument in RENAMED.items()}

# An argument, with its value or without; words of English are arguments only with a value.
_NAMES = (
    rf"{'|'.join(_OPTIONS)}|main_gpu|tensor_split|flash_attn|kv_type|chat_template|max_tokens|"
    r"top_[kp]|min_p|typical_p|top_n_sigma|[a-z]+_penalty|penalty_last_n|logit_bias"
)
_ARGUMENT = re.compile(
    rf"\b((?:{_NAMES})\b|(?:target|draft|drafter|force)(?==))(?:=(\"[^\"]*\"|\w+))?"
)


def as_options(text: str) -> str:
    """Return what the library says in the terms of the command line: n_ctx=9 becomes --ctx 9."""
    return _ARGUMENT.sub(_option, text)


def _option(found: re.Match[str]) -> str:
    name, value = found[1], (found[2] or "").strip('"')
    option = "--" + _OPTIONS.get(name, name).replace("_", "-")
    return f"{option} {shlex.quote(value)}" if value and value != "True" else option

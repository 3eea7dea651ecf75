"""Arguments of llama_cpp as those of lspec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from lspec import catalogue, store
from lspec.errors import RequestError
from lspec.gguf import read_header
from lspec.llama import KvType, Vocab
from lspec.request import RANDOM, RequestOptions

RANDOM_SEED = 0xFFFFFFFF  # llama.cpp's; -1 is the same in 32 bits
_KV_TYPES: Mapping[int | None, KvType] = {None: "f16", 1: "f16", 8: "q8_0", 2: "q4_0"}  # ggml's


class CacheType(TypedDict, total=False):
    """What may be said about the caches."""

    kv_type: KvType


def trained_window(model_path: str | None, pair: str | None) -> int:
    """Return the longest text that the target was trained on; any number if it is not there."""
    if model_path is not None:
        return _trained(Path(model_path))
    paths = store.locate(catalogue.load().pair(pair).target)
    return _trained(paths[0]) if paths else 1


def _trained(path: Path) -> int:
    return read_header(path).number("context_length", 1)


def cache_type(type_k: int | None, type_v: int | None) -> CacheType:
    """Return the argument of `load` for the type of the caches, if ggml's numbers ask for one.

    Raises RequestError.
    """
    if type_k is None and type_v is None:
        return {}
    kind = _KV_TYPES.get(type_k)
    if kind is None or _KV_TYPES.get(type_v) != kind:
        raise RequestError(
            f"type_k {type_k} and type_v {type_v} cannot be honoured",
            hint="Both must be the same: F16 (1), Q8_0 (8) or Q4_0 (2).",
        )
    return {"kv_type": kind}


class Placement(TypedDict, total=False):
    """What may be said about several GPUs."""

    main_gpu: int
    tensor_split: Sequence[float]


def placement(split_mode: int, main_gpu: int, tensor_split: Sequence[float] | None) -> Placement:
    """Return the arguments of `load` for several GPUs. Raises RequestError."""
    if split_mode == 0:  # LLAMA_SPLIT_MODE_NONE: one GPU alone
        return {"main_gpu": main_gpu}
    if split_mode != 1 or main_gpu:
        raise RequestError(
            f"split_mode {split_mode} with main_gpu {main_gpu} cannot be honoured",
            hint="Whole layers are divided (1), or main_gpu takes all of them (0).",
        )
    return {} if tensor_split is None else {"tensor_split": tuple(tensor_split)}


def is_random(seed: int) -> bool:
    """Return whether `seed` stands for any seed."""
    return seed in (RANDOM, RANDOM_SEED)


def request_options(
    *,
    max_tokens: int | None,
    top_k: int,
    seed: int | None,
    stop: str | Sequence[str] | None,
    more_stops: Sequence[str] = (),
    logit_bias: Mapping[Any, float] | None,
    response_format: Mapping[str, Any] | None = None,
    grammar: Any,
    **others: Any,
) -> RequestOptions:
    """Return the options of a completion as the engine's."""
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    options = {
        "max_tokens": None if max_tokens is None or max_tokens <= 0 else max_tokens,
        "top_k": max(top_k, 0),
        "seed": None if seed is None or is_random(seed) else seed,
        "stop": [*stops, *more_stops],
        "logit_bias": logit_bias or {},
        "response_format": _response_format(response_format, grammar),
    }
    return {**options, **others}  # type: ignore[typeddict-item]


def fill_in(vocab: Vocab, prompt: str | list[int], suffix: str, *, suffix_first: bool) -> list[int]:
    """Return the ids of a prompt for the text between `prompt` and `suffix`. Raises RequestError.

    As in llama_cpp, the names of control tokens are ordinary text in it.
    """
    before, behind, middle = vocab.fim
    if min(before, behind, middle) < 0:
        raise RequestError("suffix cannot be honoured: this model has no tokens to fill in by")
    if isinstance(prompt, str):
        prompt = vocab.tokenize(prompt, bos=False, special=False)
    first = [before, *prompt]
    second = [behind, *vocab.tokenize(suffix, bos=False, special=False)]
    if suffix_first:
        first, second = second, first
    return [*([vocab.bos] if vocab.adds_bos else []), *first, *second, middle]


def with_one_text(message: Any) -> Any:
    """Return a message whose parts are joined to one text; a mere tool call has an empty one.

    Raises RequestError for an image.
    """
    content = message.get("content") if isinstance(message, Mapping) else None
    if content is None and isinstance(message, Mapping) and message.get("tool_calls"):
        return {**message, "content": ""}
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise RequestError(f"a message has a part that is no text: {kind!r}")
    return {**message, "content": "".join(texts)}


def _response_format(
    response_format: Mapping[str, Any] | None, grammar: Any
) -> Mapping[str, Any] | None:
    """Return llama_cpp's response format, or its LlamaGrammar, as the engine's response format."""
    match response_format:
        case None | {"type": "text"}:
            # The text of a LlamaGrammar is in no public attribute.
            return grammar and {"type": "grammar", "grammar": grammar._grammar}
        case {"type": "json_object", "schema": Mapping() as schema}:
            return {"type": "json_schema", "json_schema": {"schema": schema}}
    return response_format

"""From a request's fields to the engine's options."""

from __future__ import annotations

from lspec.params import SamplingParams
from lspec.request import RequestOptions
from lspec.server.errors import unsupported
from lspec.server.schemas import SAMPLING, Body, ChatBody, CompletionBody


def chat_options(body: ChatBody, *, n_vocab: int) -> RequestOptions:
    """Return what `body` says, except of the answer's format. Raises ApiError."""
    options = _options(body, n_vocab=n_vocab)
    options["thoughts"] = True
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise unsupported("max_tokens", "max_completion_tokens says something else")
        options["max_tokens"] = body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise unsupported("top_logprobs", "needs logprobs to be true")
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    return options


def completion_options(body: CompletionBody, *, n_vocab: int) -> RequestOptions:
    """Return what `body` says. Raises ApiError."""
    options = _options(body, n_vocab=n_vocab)
    options["logprobs"] = body.logprobs
    return options


def _options(body: Body, *, n_vocab: int) -> RequestOptions:
    if any(token >= n_vocab for token in body.logit_bias):
        raise unsupported("logit_bias", f"the vocabulary has {n_vocab} tokens, from 0 on")
    if not body.speculate and body.gamma:
        raise unsupported("gamma", "speculate false means a gamma of 0")
    return RequestOptions(
        sampling=SamplingParams(**body.model_dump(include=set(SAMPLING), exclude_unset=True)),
        max_tokens=body.max_tokens,
        stop=body.stop,
        seed=body.seed,
        gamma=body.gamma if body.speculate else 0,
        reuse=body.cache_prompt,
    )

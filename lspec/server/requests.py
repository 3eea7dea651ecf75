"""From a checked body to prompts, tools and generations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from lspec.engine import Engine
from lspec.llama import Vocab
from lspec.request import RANDOM, Chunk, RequestOptions
from lspec.server.errors import unsupported
from lspec.server.schemas import ChatBody, CompletionBody, Message, NamedTool
from lspec.server.tools import Offer, Tools

_ANY_ARGUMENTS = {"parameters": {"type": "object"}}


def messages_of(body: ChatBody, tools: Tools | None) -> list[dict[str, Any]]:
    """Return the messages as chat templates want them. Raises ApiError."""
    if tools is None and any(m.tool_calls or m.role == "tool" for m in body.messages):
        raise unsupported("messages", "the chat template of this model knows no tools")
    return [_message(message, tools) for message in body.messages]


def _message(said: Message, tools: Tools | None) -> dict[str, Any]:
    extra = {"name", "tool_call_id", "reasoning_content"}
    fields = said.model_dump(include=extra, exclude_unset=True)
    role = "system" if said.role == "developer" else said.role
    message = {"role": role, "content": said.content or "", **fields}
    if said.tool_calls and tools and tools.shows_calls:
        message["tool_calls"] = [call.model_dump() for call in said.tool_calls]
    elif said.tool_calls and tools:
        functions = [call.function for call in said.tool_calls]
        message["content"] += tools.format.write([(f.name, f.arguments) for f in functions])
    return message


def offer_of(body: ChatBody, tools: Tools | None) -> Offer | None:
    """Return the functions that the model may call; None for none. Raises ApiError."""
    functions = [tool.function for tool in body.tools]
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        functions = [f for f in functions if f.name == choice.function.name]
    if choice not in ("none", "auto") and not functions:
        raise unsupported("tool_choice", "there is no such tool among the tools")
    if choice == "none" or not functions:
        return None
    if tools is None:
        raise unsupported("tools", "the chat template of this model knows no tools")
    return Offer(tools, functions, many=body.parallel_tool_calls and isinstance(choice, str))


def answer_format(body: ChatBody, offer: Offer | None) -> Mapping[str, Any] | None:
    """Return the response format that the engine is asked for. Raises ApiError.

    Calls are constrained where the model must call, and otherwise where a function is strict.
    Without llguidance a model that must call is only asked to.
    """
    asked = None if body.response_format.get("type") == "text" else body.response_format
    if offer is None:
        return asked
    if asked:
        raise unsupported("response_format", "cannot be combined with tools")
    forced = body.tool_choice != "auto"
    if (forced or offer.strict) and find_spec("llguidance"):
        functions = [
            function if forced or function.strict else function.model_copy(update=_ANY_ARGUMENTS)
            for function in offer.functions
        ]
        grammar = offer.tools.grammar(functions, free=not forced, many=offer.many)
        return {"type": "grammar", "grammar": grammar}
    if offer.strict:
        raise unsupported("tools", "a strict function needs lspec[grammar] on the server")
    return None


def prompts_of(body: CompletionBody, engine: Engine) -> list[Sequence[int]]:
    """Return the ids of the prompts of a text completion. Raises ApiError, RequestError."""
    if body.suffix is None:
        return [engine.tokenize(p) if isinstance(p, str) else p for p in body.prompt]
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    if len(texts) < len(body.prompt):
        raise unsupported("suffix", "needs a prompt of text, not of token ids")
    return [infill(text, body.suffix, engine.vocab) for text in texts]


def infill(prefix: str, suffix: str, vocab: Vocab) -> list[int]:
    """Return the prompt for the text between two others. Raises ApiError."""
    before, after, middle = vocab.fim
    if min(before, after, middle) < 0:
        raise unsupported("suffix", "this model has no tokens for fill-in-the-middle")
    first, last = (vocab.tokenize(t, bos=False, special=False) for t in (prefix, suffix))
    start = [vocab.bos] if vocab.adds_bos else []
    return [*start, before, *first, after, *last, middle]


def generations(
    engine: Engine, prompts: Sequence[Sequence[int]], n: int, options: RequestOptions
) -> list[Iterator[Chunk]]:
    """Return `n` generations for each prompt, checked and not begun. Raises LspecError.

    With a seed the further ones have the seeds that follow it.
    """
    found = []
    for prompt in prompts:
        for i in range(n):
            chosen = options.copy()
            seed = options.get("seed")
            if seed is not None and seed != RANDOM:
                chosen["seed"] = seed + i
            found.append(engine.stream(prompt, **chosen))
    return found

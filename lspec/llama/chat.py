"""Chat templates and formats, rendered by llama_cpp."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import Environment, TemplateError, meta
from llama_cpp.llama_chat_format import (
    Jinja2ChatFormatter,
    LlamaChatCompletionHandlerNotFoundException,
    get_chat_completion_handler,
)

from lspec.errors import RequestError
from lspec.llama.vocab import Vocab
from lspec.template import Message, Renderer, Tool


def chat_format(name: str) -> Callable[[list[Message]], tuple[str, list[str]]]:
    """Return llama_cpp's chat format `name`: from messages to the prompt and its stop strings.

    Raises RequestError for an unknown name, and for a format that is more than a template.
    """
    try:
        handler = get_chat_completion_handler(name)
    except LlamaChatCompletionHandlerNotFoundException:
        raise RequestError(f"llama_cpp has no chat format named {name!r}") from None
    known = inspect.getclosurevars(handler).nonlocals if inspect.isfunction(handler) else {}
    formatter = known.get("chat_formatter")
    if formatter is None:
        raise RequestError(f"the chat format {name!r} is a program that needs llama_cpp.Llama")

    def render(messages: list[Message]) -> tuple[str, list[str]]:
        try:
            result = formatter(messages=messages)
        except Exception as error:  # a format is a program, and may fail in any way
            raise RequestError(f"the chat format refuses these messages: {error}") from None
        stop = [result.stop] if isinstance(result.stop, str) else list(result.stop or [])
        return str(result.prompt), stop

    return render


def chat_renderer(template: str, vocab: Vocab) -> Renderer:
    """Return a function from messages, tools and variables to the prompt, by a sandboxed template.

    It raises RequestError where the template refuses the messages, and so does this function for a
    template that is broken.
    """
    try:
        formatter = Jinja2ChatFormatter(template, vocab.eos_text, vocab.bos_text)
    except TemplateError as error:
        raise RequestError(f"the chat template is broken: {error}") from None

    def render(messages: list[Message], tools: Sequence[Tool] = (), **variables: Any) -> str:
        try:
            shown = list(tools) or None
            return str(formatter(messages=messages, tools=shown, **variables).prompt)
        except Exception as error:  # a template is a program, and may fail in any way
            raise RequestError(f"the chat template refuses these messages: {error}") from None

    return render


def variables_of(template: str) -> set[str]:
    """Return the names that a chat template reads."""
    extensions = [Jinja2ChatFormatter.IgnoreGenerationTags, "jinja2.ext.loopcontrols"]
    environment = Environment(extensions=extensions)  # noqa: S701 (it renders nothing)
    return meta.find_undeclared_variables(environment.parse(template))

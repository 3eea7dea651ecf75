"""From chat messages to token ids, so that nothing a user types becomes a control token."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from lspec.errors import RequestError

Message = Mapping[str, Any]  # "role", "content", and what else the template reads
Tool = Mapping[str, Any]  # a function that the model may call, in OpenAI's shape
Variables = Mapping[str, Any]  # what a template reads beside messages and tools

_PRIVATE_USE = range(0xE000, 0xF8FF)
_ROLES = ("system", "user", "assistant", "tool")  # templates may rewrite what these say
_TAG = re.compile(r"<[^<>\s'\"]{1,60}>")
_TAKEN = {
    "messages",
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "raise_exception",
    "strftime_now",
    "self",
}


class Tokenizer(Protocol):
    """What this module asks of a vocabulary."""

    @property
    def control_texts(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def adds_bos(self) -> bool: ...  # noqa: D102
    @property
    def bos_text(self) -> str: ...  # noqa: D102
    def tokenize(self, text: str, *, bos: bool, special: bool) -> list[int]: ...  # noqa: D102


class Renderer(Protocol):
    """A chat template."""

    def __call__(
        self, messages: list[Message], tools: Sequence[Tool] = (), **variables: Any
    ) -> str:
        """Return the text of the prompt. Raises RequestError."""


def tags(template: str) -> set[str]:
    """Return the texts like `<name>` in a template's source: tokens among them are its markers."""
    return set(_TAG.findall(template))


def check_variables(variables: Variables) -> None:
    """Raise RequestError where a name is not free."""
    for name in variables:
        if not isinstance(name, str) or not name.isidentifier() or name in _TAKEN:
            raise RequestError(f"{name!r} cannot be a variable of the chat template")


def tokenize_chat(
    messages: Sequence[Message],
    vocab: Tokenizer,
    *,
    render: Renderer,
    tools: Sequence[Tool] = (),
    variables: Variables | None = None,
    spoken: Collection[str] = (),
) -> list[int]:
    """Return the ids of a rendered chat, ready for the assistant's answer. Raises RequestError.

    The template's own control tokens are read as such. Where a message, a tool or a variable
    contains the text of one, a mark put inside that text keeps it apart, and the rendered chat is
    tokenized in parts that end at the marks: each part is then ordinary text there. `spoken` are
    texts of tokens, like `</think>`, that a model writes as well: in the assistant's own messages,
    and only there, they stay these tokens.
    """
    said, offered = _checked(messages), list(tools)
    given: Any = dict(variables or {})
    check_variables(given)
    texts = set(_texts([said, offered, given]))
    guarded = {*vocab.control_texts, *spoken}
    found = [c for c in guarded if any(c in text for text in texts)]
    mark = _unused(texts) if found else ""
    for text in sorted(found, key=lambda text: (-len(text), text)):
        broken = text[:1] + mark + text[1:]
        own = "assistant" if text in spoken else None
        said = [m if m["role"] == own else _replaced(m, text, broken) for m in said]
        offered, given = _replaced(offered, text, broken), _replaced(given, text, broken)
    prompt = render(said, offered, **given)
    _require_all(said, prompt)
    # A template that writes the token itself must not get a second one.
    bos = vocab.adds_bos and not (vocab.bos_text and prompt.startswith(vocab.bos_text))
    ids: list[int] = []
    for i, part in enumerate(prompt.split(mark) if mark else [prompt]):
        ids += vocab.tokenize(part, bos=bos and i == 0, special=True)
    return ids


def _checked(messages: Iterable[Message]) -> list[Message]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise RequestError('messages are a list: [{"role": "user", "content": "…"}]')
    messages = list(messages)
    if not messages:
        raise RequestError("there is no message to answer")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise RequestError("a message is a mapping with 'role' and 'content'")
        if not all(isinstance(message[key], str) for key in ("role", "content")):
            raise RequestError("'role' and 'content' of a message are texts")
    return messages


def _require_all(messages: Sequence[Message], prompt: str) -> None:
    """Raise RequestError where a role is none that the template knows, and its message is lost."""
    for role, content in ((m["role"], m["content"].strip()) for m in messages):
        if role not in _ROLES and content not in prompt:
            raise RequestError(
                f"the chat template leaves out messages of the role {role!r}",
                hint="Roles that most templates know are system, user, assistant and tool.",
            )


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in nested data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.items():
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


def _replaced(value: Any, old: str, new: str) -> Any:
    """Return nested data with `old` replaced in every text, keys included."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, Mapping):
        return {_replaced(k, old, new): _replaced(v, old, new) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [_replaced(item, old, new) for item in value]
    return value


def _unused(texts: Iterable[str]) -> str:
    """Return a private-use character that no text contains. Raises RequestError."""
    used: set[str] = set().union(*texts)
    free = next((chr(c) for c in _PRIVATE_USE if chr(c) not in used), None)
    if free is None:
        raise RequestError("the chat has a control token's text and all private-use characters")
    return free

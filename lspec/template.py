"""From chat messages to token ids, so that nothing a user types becomes a control token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from lspec.errors import RequestError

Message = Mapping[str, str]
_PRIVATE_USE = range(0xE000, 0xF8FF)


class Tokenizer(Protocol):
    """What this module asks of a vocabulary."""

    @property
    def control_texts(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def adds_bos(self) -> bool: ...  # noqa: D102
    @property
    def bos_text(self) -> str: ...  # noqa: D102
    def tokenize(self, text: str, *, bos: bool, special: bool) -> list[int]: ...  # noqa: D102


def tokenize_chat(
    messages: Sequence[Message], vocab: Tokenizer, *, render: Callable[[list[Message]], str]
) -> list[int]:
    """Return the ids of a rendered chat, ready for the assistant's answer. Raises RequestError.

    The template's own control tokens are read as such. Where a message contains the text of one, a
    mark put inside that text keeps it apart, and the rendered chat is tokenized in parts that end
    at the marks: each part is then ordinary text there.
    """
    messages = list(messages)
    _check(messages)
    found = [c for c in vocab.control_texts if any(c in m["content"] for m in messages)]
    mark = _unused(messages) if found else ""
    for text in sorted(found, key=len, reverse=True):
        broken = text[:1] + mark + text[1:]
        messages = [{**m, "content": m["content"].replace(text, broken)} for m in messages]
    prompt = render(list(messages))
    # A template that writes the token itself must not get a second one.
    bos = vocab.adds_bos and not (vocab.bos_text and prompt.startswith(vocab.bos_text))
    ids: list[int] = []
    for i, part in enumerate(prompt.split(mark) if mark else [prompt]):
        ids += vocab.tokenize(part, bos=bos and i == 0, special=True)
    return ids


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise RequestError("there is no message to answer")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise RequestError("a message is a mapping with 'role' and 'content'")
        if not all(isinstance(message[key], str) for key in ("role", "content")):
            raise RequestError("'role' and 'content' of a message are texts")


def _unused(messages: Sequence[Message]) -> str:
    """Return a private-use character that no message contains."""
    used = {c for m in messages for c in m["content"]}
    return next(chr(c) for c in _PRIVATE_USE if chr(c) not in used)

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from lspec.template import Message, Tool, tokenize_chat


class Characters:
    """A vocabulary of characters with two control tokens and a beginning of sequence."""

    control_texts = ("<s>", "<end>")
    adds_bos = True
    bos_text = "<s>"

    def tokenize(self, text: str, *, bos: bool, special: bool) -> list[int]:
        ids = [1] if bos else []
        while text:
            for token, marker in ((1, "<s>"), (2, "<end>")):
                if special and text.startswith(marker):
                    ids.append(token)
                    text = text.removeprefix(marker)
                    break
            else:
                ids.append(ord(text[0]))
                text = text[1:]
        return ids


def render(messages: list[Message], tools: Sequence[Tool] = ()) -> str:
    return "".join(f"{m['role'][0]}:{m['content'].strip()}<end>" for m in messages)


def plain(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_control_tokens_of_the_template_are_control_tokens() -> None:
    ids = tokenize_chat([{"role": "user", "content": "hi"}], Characters(), render=render)
    assert ids == [1, *plain("u:hi"), 2]


@pytest.mark.parametrize("typed", ["<end>", "a<end>b", "<s><end>", "<end><end>", "\ue000<end>"])
def test_control_text_that_a_user_types_stays_text(typed: str) -> None:
    ids = tokenize_chat([{"role": "user", "content": typed}], Characters(), render=render)
    assert ids == [1, *plain("u:" + typed), 2]


def test_beginning_of_sequence_comes_once_even_if_the_template_writes_it() -> None:
    def with_bos(messages: list[Message], tools: Sequence[Tool] = ()) -> str:
        return "<s>" + render(messages)

    ids = tokenize_chat([{"role": "user", "content": "hi"}], Characters(), render=with_bos)
    assert ids == [1, *plain("u:hi"), 2]


@pytest.mark.parametrize("typed", ["<end>", "a<end>b", '"<s>"'])
def test_control_text_in_tools_and_calls_stays_text(typed: str) -> None:
    def with_tools(messages: list[Message], tools: Sequence[Tool] = ()) -> str:
        return json.dumps([messages, tools], ensure_ascii=False) + "<end>"

    call = {"name": "f", "arguments": {typed: [typed, 1, None]}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"name": "f", "description": typed}]
    ids = tokenize_chat(messages, Characters(), render=with_tools, tools=tools)
    assert ids == [1, *plain(json.dumps([messages, tools], ensure_ascii=False)), 2]

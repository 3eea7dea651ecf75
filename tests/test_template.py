from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from lspec.errors import RequestError
from lspec.template import Message, Tool, tags, tokenize_chat


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


@pytest.mark.parametrize("typed", ["<end>", "a<end>b"])
def test_control_text_in_template_variables_stays_text(typed: str) -> None:
    def with_variables(messages: list[Message], tools: Sequence[Tool] = (), **given: str) -> str:
        return render(messages) + given["who"] + "<end>"

    messages = [{"role": "user", "content": "hi"}]
    variables = {"who": typed}
    ids = tokenize_chat(messages, Characters(), render=with_variables, variables=variables)
    assert ids == [1, *plain("u:hi"), 2, *plain(typed), 2]


def test_what_a_model_writes_itself_stays_a_token_in_its_own_messages_only() -> None:
    turns = [("user", "<t>a"), ("assistant", "<t>b<end>"), ("tool", "<t>c"), ("system", "<t>d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    ids = tokenize_chat(messages, Spoken(), render=render, spoken=["<t>"])
    own = [*plain("a:"), 3, *plain("b<end>"), 2]
    rest = [*plain("t:<t>c"), 2, *plain("s:<t>d"), 2]
    assert ids == [1, *plain("u:<t>a"), 2, *own, *rest]


class Spoken(Characters):
    """The same with a token that is read wherever it stands."""

    def tokenize(self, text: str, *, bos: bool, special: bool) -> list[int]:
        first, *others = text.split("<t>")
        ids = super().tokenize(first, bos=bos, special=special)
        for other in others:
            ids += [3, *super().tokenize(other, bos=False, special=special)]
        return ids


def test_a_chat_with_every_private_use_character_is_refused_or_rendered() -> None:
    everything = "".join(map(chr, range(0xE000, 0xF8FF)))
    messages = [{"role": "user", "content": everything}]
    ids = tokenize_chat(messages, Characters(), render=render)
    assert ids == [1, *plain("u:" + everything), 2]
    messages[0]["content"] += "<end>"
    with pytest.raises(RequestError, match="private-use"):
        tokenize_chat(messages, Characters(), render=render)


def test_message_of_a_role_that_the_template_leaves_out_is_refused() -> None:
    def knows_users(messages: list[Message], tools: Sequence[Tool] = ()) -> str:
        return render([m for m in messages if m["role"] in ("user", "note")])

    asked = [{"role": "note", "content": " <end> "}, {"role": "user", "content": "hi"}]
    assert tokenize_chat(asked, Characters(), render=knows_users)
    for lost, refused in (("system", False), ("developer", True)):
        chat = [{"role": lost, "content": "be brief"}, *asked]
        if refused:
            with pytest.raises(RequestError, match="leaves out messages of the role 'developer'"):
                tokenize_chat(chat, Characters(), render=knows_users)
        else:
            assert tokenize_chat(chat, Characters(), render=knows_users)


def test_tags_of_a_template() -> None:
    found = tags("{% if a < b and c > d %}<|im_start|>x<think>\n{{ '</think>' }}<a b><x-1>")
    assert found == {"<|im_start|>", "<think>", "</think>", "<x-1>"}

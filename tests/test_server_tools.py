"""Calls in the formats of the catalogue's families."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from serving import Server, serving

from lspec import grammar
from lspec.request import Chunk, Completion
from lspec.round import Round, Source
from lspec.server.formats import FORMATS, Format, format_of, read_calls
from lspec.server.schemas import Function
from lspec.server.tools import ContentStream, Offer, Tools
from lspec.stats import Tally

MINISTRAL, QWEN, GRANITE, LLAMA = FORMATS
CALLS = [("weather", {"city": 'Zürich {"x"}', "days": [1, 2]}), ("time", {})]
WEATHER = Function(
    name="weather",
    parameters={
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
)


class Characters:
    """A vocabulary of characters, where some texts are control tokens."""

    def __init__(self, *controls: str) -> None:
        self.controls = dict(enumerate(controls, start=0x110000))

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token in self.controls:
            return self.controls[token].encode() if special else b""
        return chr(token).encode()

    def tokenize(self, text: str, *, bos: bool, special: bool) -> list[int]:
        ids: list[int] = []
        while text:
            found = next((i for i, c in self.controls.items() if text.startswith(c)), None)
            ids.append(ord(text[0]) if found is None else found)
            text = text.removeprefix(self.controls[found]) if found else text[1:]
        return ids


def offer(format: Format, *controls: str, many: bool = True) -> Offer:
    tools = Tools(format, Characters(*controls))  # type: ignore[arg-type]
    return Offer(tools, [WEATHER, Function(name="time")], many)


def chunks(tokens: list[int], vocab: Any, size: int) -> Iterator[Chunk]:
    """Yield an answer in rounds of `size` tokens."""
    pieces = [vocab.piece(token).decode() for token in tokens]
    for at in range(0, len(tokens), size):
        part = tuple(tokens[at : at + size])
        source = (Source.TARGET,) * len(part)
        round = Round(part, source, (), 0, False, False, 1, 0, 0.0, 0.0)
        yield Chunk(tuple((piece, Source.TARGET) for piece in pieces[at : at + size]), round)
    text, stats = "".join(pieces), Tally().stats(generated_tokens=len(tokens))
    yield Chunk((), completion=Completion(text, tuple(tokens), "stop", stats, 0))


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.family)
def test_what_a_family_writes_is_read_back(format: Format) -> None:
    calls = CALLS if format.between is not None else CALLS[:1]
    content, found = read_calls(f"Let me see.\n{format.write(calls)}", format, ["weather"])
    assert content == "Let me see.\n"
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "weather", "arguments": {"city": "Oslo"}}',
        '```json\n{\n  "name": "weather",\n  "arguments": {"city": "Oslo"}\n}\n```',
        '{"name": "weather", "parameters": {}}; {"name": "weather", "parameters": {}}',
    ],
)
def test_calls_without_markers_are_read_too(text: str) -> None:
    _, calls = read_calls(text, QWEN, ["weather"])
    assert {call.name for call in calls} == {"weather"}


@pytest.mark.parametrize(
    "text",
    [
        "Hello",
        '{"name": "Bob", "arguments": {"a": 1}}',
        '{"name": "weather"}',
        '```json\n{"name": "x", "age": 3}\n```',
        "<tool_call>\n{",
        '<tool_call>\n{"name": "weather", "arguments": {"x": NaN}}',
        "",
    ],
)
def test_what_is_no_call_is_the_answer(text: str) -> None:
    assert read_calls(text, QWEN, ["weather"]) == (text, [])


def test_a_strict_call_without_a_marker_is_all_there_is() -> None:
    call = '{"name": "weather", "parameters": {}}'
    assert len(read_calls(call, LLAMA, ["weather"], strict=True)[1]) == 1
    assert read_calls(f"So:\n{call}", LLAMA, ["weather"], strict=True)[1] == []


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("format", "controls"),
    [
        (QWEN, ()),
        (QWEN, ("<tool_call>", "</tool_call>")),
        (GRANITE, ("<|tool_call|>",)),
        (MINISTRAL, ("[TOOL_CALLS]", "[ARGS]")),
        (LLAMA, ("<|python_tag|>",)),
    ],
)
@pytest.mark.parametrize("before", ["", "a < b, [x] and ```c\n{}\n```\nso:\n", "\n\n"])
def test_a_stream_shows_no_part_of_a_call(
    format: Format, controls: tuple[str, ...], size: int, before: str
) -> None:
    wanted = offer(format, *controls)
    vocab: Any = wanted.tools._vocab
    calls = CALLS if format.between is not None else CALLS[:1]
    tokens = vocab.tokenize(before + format.write(calls), bos=False, special=True)
    stream = ContentStream(wanted)
    texts, found = zip(*map(stream.add, chunks(tokens, vocab, size)), strict=True)
    assert "".join(texts).strip() == before.strip()
    assert [(c.name, json.loads(c.arguments)) for c in found[-1]] == calls
    assert not any(found[:-1])


@pytest.mark.parametrize("size", [1, 4])
def test_a_stream_without_calls_is_the_whole_answer_and_held_for_moments_only(size: int) -> None:
    text = 'Compare a<b:\n```json\n{"age": 3}\n```\nand <tool_box> {"name": 5}'
    wanted = offer(QWEN)
    vocab: Any = wanted.tools._vocab
    stream = ContentStream(wanted)
    shown = ""
    for seen, chunk in enumerate(chunks([ord(c) for c in text], vocab, size), start=1):
        shown += stream.add(chunk)[0]
        assert text.startswith(shown)
        assert len(shown) >= min(seen * size, len(text)) - 20
    assert shown == text


def test_only_the_first_call_counts_where_one_was_asked_for() -> None:
    wanted = offer(QWEN, many=False)
    vocab: Any = wanted.tools._vocab
    *_, last = chunks(vocab.tokenize(QWEN.write(CALLS), bos=False, special=True), vocab, 9)
    assert last.completion is not None
    assert [call.name for call in wanted.read(last.completion)[1]] == ["weather"]


def test_formats_are_told_from_templates() -> None:
    for format in FORMATS:
        assert format_of("{% for tool in tools %}" + format.sign) is format
    assert format_of("{{ messages }}") is format_of(None) is format_of("tools") is None


# -- through the server --

TEMPLATE = """
{%- for t in tools or [] %}{{ t | tojson }}
{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}{% endfor %}
{{- m.tool_call_id or '' }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
TOOLS: list[Any] = [{"type": "function", "function": WEATHER.model_dump(exclude_unset=True)}]
needs_grammar = pytest.mark.skipif(
    not hasattr(grammar, "GrammarConstraint"), reason="grammars are not there yet"
)


@pytest.fixture(scope="module")
def server(
    chat_model: Path, chat_draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    with serving(chat_model, chat_draft, "--chat-template", str(template)) as server:
        yield server
        assert server.end() == 0
    assert "Traceback" not in server.said


def ask(server: Server, **fields: Any) -> Any:
    body = {"messages": ASKED, "max_tokens": 5, "temperature": 0, **fields}
    reply = httpx2.post(server.url + "/chat/completions", json=body, timeout=60)
    return reply.json()


def test_tools_are_shown_unless_the_choice_is_none(server: Server) -> None:
    def length(**fields: Any) -> int:
        return int(ask(server, **fields)["usage"]["prompt_tokens"])

    assert length(tools=TOOLS) > length(tools=TOOLS, tool_choice="none") == length()


def test_a_call_and_its_result_go_back_to_the_model(server: Server) -> None:
    call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    turns = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "Rain"},
    ]
    reply = ask(server, messages=[*ASKED, *turns], tools=TOOLS)
    assert reply["choices"][0]["message"]["role"] == "assistant"
    call["arguments"] = "no JSON"
    error = ask(server, messages=[*ASKED, *turns], tools=TOOLS)["error"]
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"


def test_a_tool_that_is_not_there_cannot_be_chosen(server: Server) -> None:
    choice = {"type": "function", "function": {"name": "nothing"}}
    assert ask(server, tools=TOOLS, tool_choice=choice)["error"]["param"] == "tool_choice"


def test_tools_and_a_response_format_exclude_each_other(server: Server) -> None:
    error = ask(server, tools=TOOLS, response_format={"type": "json_object"})["error"]
    assert error["param"] == "response_format"


@needs_grammar
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_that_must_be_follows_the_schema(server: Server, choice: Any) -> None:
    with server.client() as client:
        asked: Any = {"model": "chat", "messages": ASKED, "tools": TOOLS, "tool_choice": choice}
        asked |= {"parallel_tool_calls": False, "seed": 1}
        whole = client.chat.completions.create(**asked).choices[0]
        events = list(client.chat.completions.create(**asked, stream=True))
    assert whole.finish_reason == events[-1].choices[0].finish_reason == "tool_calls"
    assert whole.message.content is None
    (call,) = whole.message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    deltas = [d for e in events for d in e.choices[0].delta.tool_calls or []]
    assert [d.function and d.function.name for d in deltas] == ["weather"]
    assert not any(event.choices[0].delta.content for event in events)


@needs_grammar
def test_a_strict_tool_is_refused_where_a_call_cannot_be_told_from_prose(server: Server) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    assert "strict" in ask(server, tools=strict)["error"]["message"]
    assert "choices" in ask(server, tools=strict, tool_choice="required")


@needs_grammar
def test_a_response_format_is_followed(server: Server) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = ask(server, response_format=wanted, max_tokens=60)
    assert json.loads(reply["choices"][0]["message"]["content"])["n"] in (1, 2)

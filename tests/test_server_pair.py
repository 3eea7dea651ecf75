"""The official client against a server of the real pair."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving import Server, serving

from lspec import grammar
from lspec.store import PairFiles

pytestmark = pytest.mark.pair

NAME = "pair"
COLD: Any = {"model": NAME, "temperature": 0}
COUNT: Any = [{"role": "user", "content": "Count from one to five, in words."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
needs_grammar = pytest.mark.skipif(
    not hasattr(grammar, "GrammarConstraint"), reason="grammars are not there yet"
)


@pytest.fixture(scope="module")
def server(pair: PairFiles) -> Iterator[Server]:
    with serving(pair.target[0], pair.draft[0], "--alias", NAME) as server:
        yield server
        assert server.end() == 0
    assert "Traceback" not in server.said


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def test_chat_streamed_and_stopped(client: openai.OpenAI) -> None:
    asked: Any = {**COLD, "messages": COUNT, "max_tokens": 40}
    whole = client.chat.completions.create(**asked).choices[0]
    text = whole.message.content or ""
    assert "three" in text.lower()
    *events, last = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(e.choices[0].delta.content or "" for e in events) == text
    assert last.usage is not None
    cut = client.chat.completions.create(**asked, stop="three").choices[0]
    assert (cut.message.content, cut.finish_reason) == (text[: text.find("three")], "stop")


def test_seed_and_logprobs(client: openai.OpenAI) -> None:
    def ask(seed: int) -> tuple[str | None, list[str]]:
        choice = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "Write a line of a poem."}],
            max_tokens=16,
            temperature=1,
            seed=seed,
            logprobs=True,
            top_logprobs=2,
            extra_body={"cache_prompt": False},
        ).choices[0]
        assert choice.logprobs is not None
        return choice.message.content, [c.token for c in choice.logprobs.content or []]

    text, tokens = ask(5)
    assert "".join(tokens) == text
    assert ask(5) == (text, tokens)
    assert ask(6) != (text, tokens)


def test_a_gap_in_code_is_filled(client: openai.OpenAI) -> None:
    choice = client.completions.create(
        **COLD, prompt="def add(a, b):\n    return ", suffix="\n\nprint(add(1, 2))\n", max_tokens=12
    ).choices[0]
    assert choice.text.strip().startswith("a + b")


def test_a_tool_is_called_and_its_result_is_used(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo now?"}]
    asked: Any = {**COLD, "tools": [WEATHER], "max_tokens": 80}
    choice = client.chat.completions.create(messages=messages, **asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"].startswith("Oslo")
    events = client.chat.completions.create(messages=messages, **asked, stream=True)
    deltas = [d for e in events for d in e.choices[0].delta.tool_calls or []]
    assert [d.function and d.function.arguments for d in deltas] == [call.function.arguments]
    messages += [
        choice.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "snow", "celsius": -7}'},
    ]
    answer = client.chat.completions.create(messages=messages, tool_choice="none", **asked)
    assert "7" in (answer.choices[0].message.content or "")


@needs_grammar
def test_a_json_schema_and_a_forced_call_are_followed(client: openai.OpenAI) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"sum": {"type": "integer"}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    choice = client.chat.completions.create(
        **COLD,
        messages=[{"role": "user", "content": "What is 2 + 3?"}],
        max_tokens=30,
        response_format={"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}},
    ).choices[0]
    assert json.loads(choice.message.content or "") == {"sum": 5}
    forced: Any = {"type": "function", "function": {"name": "get_weather"}}
    choice = client.chat.completions.create(
        **COLD, messages=COUNT, tools=[WEATHER], tool_choice=forced, max_tokens=60
    ).choices[0]
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert set(json.loads(call.function.arguments)) == {"city"}


@needs_grammar
def test_a_strict_tool_is_called_by_the_schema_of_the_models_own_will(
    client: openai.OpenAI,
) -> None:
    city = {"type": "string", "enum": ["Oslo (NO)", "Rome (IT)"]}
    schema = {**WEATHER["function"]["parameters"], "properties": {"city": city}}
    function = {**WEATHER["function"], "strict": True, "parameters": schema}
    choice = client.chat.completions.create(
        **COLD,
        messages=[{"role": "user", "content": "What is the weather in Oslo now?"}],
        tools=[{"type": "function", "function": function}],
        max_tokens=60,
    ).choices[0]
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Oslo (NO)"}


def test_a_client_that_hangs_up_leaves_the_next_one_free(
    server: Server, client: openai.OpenAI
) -> None:
    with client.chat.completions.create(**COLD, messages=COUNT, stream=True) as stream:
        next(iter(stream))
    reply = client.chat.completions.create(**COLD, messages=COUNT, max_tokens=1)
    assert reply.choices[0].finish_reason == "length"
    assert server.metric("queue_requests") == 0

"""The server as the official client sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from serving import Server, serving

import lspec

HELLO: Any = [{"role": "user", "content": "Hello"}]
PROMPT = "The quick brown fox"
ENDLESS: Any = {"temperature": 0, "logit_bias": {"259": -100}}  # <|im_end|>


@pytest.fixture(scope="module")
def server(chat_model: Path, chat_draft: Path) -> Iterator[Server]:
    with serving(chat_model, chat_draft, "--alias", "other") as server:
        yield server
        assert server.metric("running_requests") == server.metric("queue_requests") == 0
        assert server.end() == 0
    assert "Traceback" not in server.said


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def engine(chat_model: Path, chat_draft: Path) -> Iterator[lspec.Engine]:
    with lspec.load(target=chat_model, draft=chat_draft, gamma=4) as engine:
        yield engine


def test_chat_is_what_the_engine_says(client: openai.OpenAI, engine: lspec.Engine) -> None:
    done = engine.chat(HELLO, temperature=0.0, max_tokens=60)
    reply = client.chat.completions.create(
        model="chat", messages=HELLO, temperature=0, max_tokens=60
    )
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", done.text)
    assert choice.finish_reason == done.finish_reason
    assert (reply.object, reply.model, reply.id[:9]) == ("chat.completion", "chat", "chatcmpl-")
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == done.stats.prompt_tokens
    assert reply.usage.completion_tokens == done.stats.generated_tokens
    timings = reply.model_extra["timings"] if reply.model_extra else {}
    assert timings["draft_n_accepted"] <= timings["draft_n"]
    assert 0 < timings["rounds"] < timings["predicted_n"] == done.stats.generated_tokens


def test_stream_is_the_same_text_in_parts(client: openai.OpenAI) -> None:
    asked: Any = {"model": "chat", "messages": HELLO, "temperature": 0, "max_tokens": 60}
    whole = client.chat.completions.create(**asked)
    events = list(client.chat.completions.create(**asked, stream=True))
    deltas = [event.choices[0].delta for event in events]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [e.choices[0].finish_reason for e in events[-2:]] == [
        None,
        whole.choices[0].finish_reason,
    ]
    assert len({event.id for event in events}) == 1
    assert all(event.usage is None for event in events)
    assert "timings" in (events[-1].model_extra or {})


def test_usage_in_a_stream_comes_last_and_only_when_asked(client: openai.OpenAI) -> None:
    *events, last = client.chat.completions.create(
        model="chat",
        messages=HELLO,
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert all(event.usage is None and len(event.choices) == 1 for event in events)
    assert last.usage is not None
    assert last.choices == []
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_async_client(server: Server) -> None:
    async def talk() -> tuple[str, str]:
        async with server.async_client() as client:
            asked: Any = {"model": "chat", "messages": HELLO, "temperature": 0, "max_tokens": 40}
            whole, stream = await asyncio.gather(
                client.chat.completions.create(**asked),
                client.chat.completions.create(**asked, stream=True),
            )
            parts = [event.choices[0].delta.content or "" async for event in stream]
            return whole.choices[0].message.content or "", "".join(parts)

    whole, streamed = asyncio.run(talk())
    assert whole == streamed


def test_text_completion_and_its_stream(client: openai.OpenAI, engine: lspec.Engine) -> None:
    asked: Any = {"model": "other", "prompt": PROMPT, "temperature": 0, "max_tokens": 50}
    whole = client.completions.create(**asked)
    events = list(client.completions.create(**asked, stream=True))
    done = engine.generate(PROMPT, temperature=0.0, max_tokens=50)
    assert whole.choices[0].text == "".join(e.choices[0].text for e in events) == done.text
    assert whole.object == events[0].object == "text_completion"
    assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ([72, 105], ["Hi"]),
        (["Hi", PROMPT], ["Hi", PROMPT]),
        ([[72, 105], [72, 111]], ["Hi", "Ho"]),
    ],
)
def test_prompts_of_all_kinds(
    client: openai.OpenAI, engine: lspec.Engine, prompt: Any, texts: list[str]
) -> None:
    reply = client.completions.create(model="chat", prompt=prompt, temperature=0, max_tokens=9)
    solo = [engine.generate(text, temperature=0.0, max_tokens=9) for text in texts]
    assert [choice.text for choice in reply.choices] == [done.text for done in solo]
    assert [choice.index for choice in reply.choices] == list(range(len(texts)))
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(done.stats.prompt_tokens for done in solo)


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI) -> None:
    asked: Any = {"model": "chat", "messages": HELLO, "max_tokens": 60, **ENDLESS}
    text = client.chat.completions.create(**asked).choices[0].message.content or ""
    stop = text[20:23]
    cut = client.chat.completions.create(**asked, stop=[stop, "never there"]).choices[0]
    assert cut.message.content == text[: text.find(stop)]
    assert cut.finish_reason == "stop"
    assert client.chat.completions.create(**asked, stop=stop).choices[0].message == cut.message


def test_same_seed_same_text_and_the_next_choice_has_the_next_seed(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> list[str]:
        reply = client.chat.completions.create(
            model="chat",
            messages=HELLO,
            max_tokens=30,
            temperature=1,
            extra_body={"cache_prompt": False},
            **fields,
        )
        assert reply.usage is not None
        assert reply.usage.prompt_tokens < 60  # once, however many choices
        return [choice.message.content or "" for choice in reply.choices]

    assert ask(seed=7, n=2) == [*ask(seed=7), *ask(seed=8)]
    assert ask(seed=7) != ask(seed=8)


def test_several_choices_are_streamed_one_after_the_other(client: openai.OpenAI) -> None:
    events = client.chat.completions.create(
        model="chat", messages=HELLO, max_tokens=4, n=3, stream=True
    )
    indices = [event.choices[0].index for event in events]
    assert sorted(indices) == indices
    assert set(indices) == {0, 1, 2}


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    asked: Any = {"model": "chat", "messages": HELLO, "temperature": 0, "max_tokens": 30}
    asked |= {"logprobs": True, "top_logprobs": 3}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert b"".join(bytes(c.bytes or ()) for c in content).decode() == choice.message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.token == entry.top_logprobs[0].token
        assert 0 >= entry.logprob == entry.top_logprobs[0].logprob
    streamed = [
        entry
        for event in client.chat.completions.create(**asked, stream=True)
        for entry in (event.choices[0].logprobs and event.choices[0].logprobs.content) or []
    ]
    assert [e.token for e in streamed] == [e.token for e in content]


def test_streamed_logprobs_leave_out_what_a_stop_string_takes_away(client: openai.OpenAI) -> None:
    asked: Any = {"model": "chat", "prompt": PROMPT, "max_tokens": 60, "logprobs": 0, **ENDLESS}
    text = client.completions.create(**asked).choices[0].text
    stop = text[20:26]
    whole = client.completions.create(**asked, stop=stop).choices[0]
    events = client.completions.create(**asked, stop=stop, stream=True)
    parts = [event.choices[0].logprobs for event in events]
    assert whole.logprobs is not None
    assert whole.logprobs.tokens is not None
    assert whole.text.startswith("".join(whole.logprobs.tokens)[: len(whole.text)])
    for name in ("tokens", "token_logprobs", "text_offset"):
        joined = [value for part in parts for value in getattr(part, name)]
        assert joined == getattr(whole.logprobs, name)


def test_logprobs_of_a_text_have_offsets(client: openai.OpenAI) -> None:
    choice = client.completions.create(
        model="chat", prompt=PROMPT, temperature=0, max_tokens=20, logprobs=2
    ).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text.startswith(token, offset)
    assert all(len(top) == 2 for top in logprobs.top_logprobs or [])


def test_speculation_can_be_left_out_and_the_cache_too(client: openai.OpenAI) -> None:
    def ask(**extra: Any) -> Any:
        reply = client.completions.create(
            model="chat", prompt=PROMPT, temperature=0, max_tokens=30, extra_body=extra
        )
        return reply.model_extra["timings"], reply.choices[0].text

    fast, text = ask(gamma=8)
    again, _ = ask()
    plain, same = ask(speculate=False, cache_prompt=False)
    assert fast["draft_n"] > 0 == plain["draft_n"]
    assert text == same
    assert again["cache_n"] > 0 == plain["cache_n"]
    assert again["prompt_n"] == 1
    assert again["prompt_per_second"] is None
    assert plain["prompt_per_second"] > 0


def test_text_parts_are_joined_and_developer_is_system(client: openai.OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]

    def ask(messages: Any) -> str | None:
        reply = client.chat.completions.create(
            model="chat", messages=messages, temperature=0, max_tokens=20
        )
        return reply.choices[0].message.content

    said = ask([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}])
    assert said == ask([{"role": "system", "content": "Be brief."}, *HELLO])


def test_models_and_health(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == ["chat", "other"]
    assert client.models.retrieve("chat").owned_by == "lspec"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    reply = httpx2.get(server.url.removesuffix("/v1") + "/health")
    assert (reply.status_code, reply.json()) == (200, {"status": "ok"})
    assert httpx2.head(server.url.removesuffix("/v1") + "/health").status_code == 200


def test_error_does_not_repeat_all_that_was_sent(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="x" * 9000, prompt=PROMPT)
    assert len(str(caught.value)) < 1500


def test_metrics_are_prometheus_text(client: openai.OpenAI, server: Server) -> None:
    before = server.metric("generated_tokens_total")
    client.completions.create(model="chat", prompt=PROMPT, max_tokens=7, **ENDLESS)
    assert server.metric("generated_tokens_total") == before + 7
    reply = httpx2.get(server.url.removesuffix("/v1") + "/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    assert 'lspec_requests_total{path="/v1/completions",status="200"}' in reply.text
    assert "lspec_first_token_seconds_bucket" in reply.text
    assert "_created" not in reply.text


CHAT = "/chat/completions"
TEXT = "/completions"


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        (CHAT, {"nonsense": 1}, 400, "nonsense"),
        (CHAT, {"functions": []}, 400, "functions"),
        (CHAT, {"max_tokens": "5"}, 400, "max_tokens"),
        (CHAT, {"max_tokens": -1}, 400, "max_tokens"),
        (CHAT, {"max_tokens": 2, "max_completion_tokens": 3}, 400, "max_tokens"),
        (CHAT, {"temperature": -1}, 400, "temperature"),
        (CHAT, {"top_p": 3}, 400, "top_p"),
        (CHAT, {"n": 0}, 400, "n"),
        (CHAT, {"n": True}, 400, "n"),
        (CHAT, {"stop": [""]}, 400, "stop[0]"),
        (CHAT, {"stop": 5}, 400, "stop"),
        (CHAT, {"gamma": 99}, 400, "gamma"),
        (CHAT, {"gamma": 2, "speculate": False}, 400, "gamma"),
        (CHAT, {"top_logprobs": 2}, 400, "top_logprobs"),
        (CHAT, {"logit_bias": {"x": 1}}, 400, "logit_bias"),
        (CHAT, {"logit_bias": {"99999": 1}}, 400, "logit_bias"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"content": "Hi"}]}, 400, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0]"),
        (CHAT, {"messages": [{"role": "\ud800", "content": ""}]}, 400, "messages[0].role"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages[0].content",
        ),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        (CHAT, {"tool_choice": "required"}, 400, "tool_choice"),
        (CHAT, {"model": "gpt-99"}, 404, "model"),
        (CHAT, {"response_format": {"type": "json_schema"}}, 400, None),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 9000}]}, 400, None),
        (TEXT, {"suffix": "}"}, 400, "suffix"),
        (TEXT, {"echo": True}, 400, "echo"),
        (TEXT, {"prompt": [1.5]}, 400, "prompt"),
        (TEXT, {"prompt": [-1]}, 400, None),
        (TEXT, {"prompt": ""}, 400, None),
        (TEXT, {"prompt": []}, 400, "prompt"),
        (TEXT, {"prompt": ["a"] * 9, "n": 8}, 400, None),
        (TEXT, {"logprobs": 1000}, 400, "logprobs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    server: Server, path: str, fields: dict[str, Any], status: int, param: str | None
) -> None:
    base = {"messages": HELLO} if path == CHAT else {"prompt": PROMPT}
    body = json.dumps({**base, **fields})
    reply = httpx2.post(
        server.url + path, content=body, headers={"Content-Type": "application/json"}
    )
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param), error
    assert error["type"] == "invalid_request_error"
    assert error["message"]


def test_a_prompt_too_long_has_its_own_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="chat", prompt="x" * 9000)
    assert caught.value.code == "context_length_exceeded"
    assert "Shorten the prompt" in caught.value.message


def test_a_refused_value_is_named_once(server: Server) -> None:
    reply = httpx2.post(server.url + CHAT, json={"messages": HELLO, "temperature": -1})
    assert reply.json()["error"]["message"] == "temperature: must be 0 or more, not -1.0"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{", "application/json"),
        (b"[1]", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"messages": []}', "text/plain"),
        (b"", "application/json"),
    ],
)
def test_garbage_is_refused(server: Server, content: bytes, kind: str) -> None:
    reply = httpx2.post(server.url + CHAT, content=content, headers={"Content-Type": kind})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_bodies_that_are_too_long_are_refused_announced_or_not(server: Server) -> None:
    body = b'{"prompt": "' + b"x" * 10_000_000 + b'"}'
    headers = {"Content-Type": "application/json"}
    for content in (body, iter([body[:5_000_000], body[5_000_000:]])):
        reply = httpx2.post(server.url + TEXT, content=content, headers=headers)
        assert reply.status_code == 413
        assert reply.json()["error"]["type"] == "invalid_request_error"


def test_unknown_paths_and_methods_are_errors_in_the_same_shape(server: Server) -> None:
    for reply, status in (
        (httpx2.get(server.url + "/nothing"), 404),
        (httpx2.get(server.url + CHAT), 405),
    ):
        assert reply.status_code == status
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    message = httpx2.post(server.url + "/responses", json={}).json()["error"]["message"]
    assert message == (
        "Not Found: POST /v1/responses; there are /v1/chat/completions, /v1/completions, "
        "/v1/models, /health, /metrics"
    )


def test_fields_that_change_nothing_are_accepted(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="chat",
        messages=[{**HELLO[0], "name": "me"}],
        max_tokens=1,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        extra_body={"stop": None, "functions": None},
    )
    assert reply.choices[0].finish_reason == "length"


def test_no_page_may_ask_unless_told(server: Server) -> None:
    headers = {"Origin": "http://example.com", "Access-Control-Request-Method": "POST"}
    reply = httpx2.options(server.url + CHAT, headers=headers)
    assert reply.status_code == 405
    assert not any(name.startswith("access-control") for name in reply.headers)

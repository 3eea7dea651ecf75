"""What a model thinks before it answers, told apart in the text, the chat and the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import tiny
from serving import Server, serving
from test_terminal import Typist, interruptible  # noqa: F401

import lspec
from lspec.errors import RequestError
from lspec.server.formats import FORMATS
from lspec.server.schemas import Function
from lspec.server.tools import ContentStream, Offer, Tools
from lspec.thinking import AfterThought, Split, Style, ThoughtStream, is_opened, style_of

TAGS = style_of(None)
GRANITE = style_of("Write <think></think>, then <response></response>")
BRACKETS = style_of("[THINK]{{ thought }}[/THINK]")
SIZES = [1, 2, 3, 5, 1000]

# Like Qwen3's: a thought unless it is switched off, and those of earlier turns if they are given.
CLOSING = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}"""
OPENING = CLOSING + "<think>\n"  # like DeepSeek-R1's: the prompt opens the thought
HELLO = [{"role": "user", "content": "Hello"}]
THOUGHT = 'start: "<think>\\nHm.\\n</think>\\n\\nYes."'
needs_grammar = pytest.mark.usefixtures("llguidance")


@pytest.fixture
def llguidance() -> None:
    pytest.importorskip("llguidance")


def split(text: str, size: int, style: Style = TAGS, *, opened: bool = False) -> Split:
    """Push `text` in pieces of `size` characters; return all that came."""
    stream = ThoughtStream(style, opened=opened)
    parts = [stream.push(text[i : i + size]) for i in range(0, len(text), size)]
    return Split(*map("".join, zip(*parts, stream.finish(), strict=True)))


# -- the text --


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>\nHm.\n</think>\n\nYes.\n", "Hm.", "Yes.\n"),
        ("\n<think>Hm.</think>Yes.", "Hm.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("<think></think>", "", ""),
        ("<think>a < b </thin k> </ think>\n\n c</think>d", "a < b </thin k> </ think>\n\n c", "d"),
        ("<think>a</think>b <think>c</think>", "a", "b <think>c</think>"),
        ("<think>cut sho", "cut sho", ""),
        ("<think>cut </thi", "cut </thi", ""),
        ("<think>\n", "", ""),
        ("<thi", "", "<thi"),
        ("<thinking>no</thinking>", "", "<thinking>no</thinking>"),
        ("  Yes: <think>a</think>\n", "", "  Yes: <think>a</think>\n"),
        ("Yes.</think>", "", "Yes.</think>"),
        ("[THINK]a[/THINK]b", "", "[THINK]a[/THINK]b"),
        ("<think>a</think><response>b</response>", "a", "<response>b</response>"),
        (" \n", "", " \n"),
        ("", "", ""),
    ],
)
def test_a_thought_is_told_from_the_answer(
    text: str, reasoning: str, answer: str, size: int
) -> None:
    assert split(text, size) == (reasoning, answer)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("\n</think>Yes.", "", "Yes."),
        ("</think>\n", "", ""),
        ("Hm. I", "Hm. I", ""),
        ("<think>Hm.</think>Yes.", "<think>Hm.", "Yes."),
        ("", "", ""),
    ],
)
def test_a_thought_that_the_prompt_has_opened(
    text: str, reasoning: str, answer: str, size: int
) -> None:
    assert split(text, size, opened=True) == (reasoning, answer)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("style", "text", "reasoning", "answer"),
    [
        (BRACKETS, "[THINK]a[/THINK]\nb", "a", "b"),
        (GRANITE, "<think>a</think>\n<response>\nb c\n</response>", "a", "b c"),
        (GRANITE, "<think>a</think><response>b < c </resp", "a", "b < c </resp"),
        (GRANITE, "<think>a</think><res", "a", "<res"),
        (GRANITE, "<think>a</think><result>b", "a", "<result>b"),
        (GRANITE, "<response>b</response>", "", "<response>b</response>"),
    ],
)
def test_families_mark_thoughts_in_their_own_ways(
    style: Style, text: str, reasoning: str, answer: str, size: int
) -> None:
    assert split(text, size, style) == (reasoning, answer)


def test_a_stream_holds_back_no_more_than_may_be_a_marker() -> None:
    stream = ThoughtStream(TAGS)
    pushed = ["<", "think", ">", "\n", "H", "m", "</", "b>", "</think>", "\n", "\nY", "es<", "/"]
    parts = [stream.push(text) for text in pushed]
    reasoning = ["", "", "", "", "H", "m", "", "</b>", "", "", "", "", ""]
    assert [part.reasoning for part in parts] == reasoning
    assert [part.answer for part in parts[-3:]] == ["Y", "es<", "/"]


def test_a_prompt_opens_a_thought_only_at_its_very_end() -> None:
    assert is_opened(TAGS, "<|im_start|>assistant\n<think>\n")
    assert not is_opened(TAGS, "<think>\n\n</think>\n\n")
    assert not is_opened(TAGS, "<think> is a tag<|im_end|>\n<|im_start|>assistant\n")
    assert is_opened(BRACKETS, "[THINK]")


class Digits:
    """A grammar of one digit, as a Constraint over bytes; `seen` is what it has accepted."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def allowed(self, drafted: Sequence[int]) -> np.ndarray:
        return np.array([] if self.seen or drafted else range(48, 58), np.int32)

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        return (0,) if self.seen or drafted else ()

    def accept(self, tokens: Sequence[int]) -> None:
        self.seen += tokens


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_grammar_begins_where_the_thought_ends(size: int) -> None:
    inner, anything = Digits(), np.arange(1, 256, dtype=np.int32)
    after = AfterThought(inner, TAGS, piece=lambda token: bytes([token]), anything=anything)
    thought = b"a 7 </thinkk> <</think>"
    for at in range(0, len(thought) - 1, size):
        part = thought[:-1][at : at + size]
        assert after.allowed(part) is anything
        assert after.forced(part) == ()
        after.accept(part)
    assert inner.seen == []
    assert list(after.allowed(thought[-1:])) == list(range(48, 58))  # type: ignore[arg-type]
    assert after.allowed(b"") is anything, "a draft is taken back"
    assert after.forced(thought[-1:] + b"7") == (0,)
    after.accept(thought[-1:] + b"7")
    assert inner.seen == [55]
    assert after.forced(()) == (0,)


# -- the engine --


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary has the markers and whose template opens thoughts itself."""
    path = tmp_path_factory.mktemp("thinker") / "thinker.gguf"
    marks = ("</think>", "<think>", "<tool_call>")
    return tiny.write_chat_model(path, seed=3, template=OPENING, marks=marks)


CLOSE, OPEN, CALL = tiny.CHAT_SIZE, tiny.CHAT_SIZE + 1, tiny.CHAT_SIZE + 2


@pytest.fixture(scope="module")
def engine(thinker: Path) -> Iterator[lspec.Engine]:
    with lspec.load(target=thinker, gamma=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def qwen(chat_model: Path, chat_draft: Path) -> Iterator[lspec.Engine]:
    """A pair without tokens for markers, whose template leaves the thought to the model."""
    options: Any = {"gamma": 4, "chat_template": CLOSING}
    with lspec.load(target=chat_model, draft=chat_draft, **options) as engine:
        yield engine


def test_an_open_thought_goes_on_until_its_marker_comes(engine: lspec.Engine) -> None:
    done = engine.chat(HELLO, max_tokens=12, seed=1)
    assert (done.reasoning, done.answer) == (done.text.strip(), "")
    assert done.thought_tokens == len(done.tokens)
    closed = engine.chat(HELLO, max_tokens=3, temperature=0.0, logit_bias={CLOSE: 100.0})
    assert closed.text == "</think>" * 3
    assert (closed.reasoning, closed.answer) == ("", "</think>" * 2)
    assert closed.thought_tokens == 1


def test_raw_prompts_have_no_thoughts_unless_they_are_asked_for(engine: lspec.Engine) -> None:
    prompt = engine.tokenize_chat(HELLO)
    options: Any = {"max_tokens": 12, "seed": 1, "reuse": False}
    raw = engine.generate(prompt, **options)
    assert (raw.reasoning, raw.answer, raw.thought_tokens) == ("", raw.text, 0)
    told = engine.generate(prompt, thoughts=True, **options)
    assert told.reasoning == told.text.strip()
    assert engine.chat(HELLO, thoughts=False, **options).answer == told.text


@pytest.mark.parametrize("stop", [None, "m", "</", "es"])
@needs_grammar
def test_chunks_add_up_to_the_completion(qwen: lspec.Engine, stop: str | None) -> None:
    chunks = list(
        qwen.stream_chat(HELLO, response_format={"type": "grammar", "grammar": THOUGHT}, stop=stop)
    )
    done = chunks[-1].completion
    assert done is not None
    for name in ("text", "reasoning", "answer"):
        assert "".join(getattr(chunk, name) for chunk in chunks) == getattr(done, name)
    assert done.text == "<think>\nHm.\n</think>\n\nYes.".split(stop or "none")[0]
    wanted = {None: ("Hm.", "Yes."), "m": ("H", ""), "</": ("Hm.", ""), "es": ("Hm.", "Y")}
    assert (done.reasoning, done.answer) == wanted[stop]
    assert done.thought_tokens == min(len("<think>\nHm.\n</think>"), len(done.tokens))


@needs_grammar
def test_a_grammar_is_for_the_answer_behind_an_open_thought(engine: lspec.Engine) -> None:
    wanted = {"type": "regex", "regex": "[a-z]{4}"}
    for bias, seed in ((100.0, 1), (25.0, 2), (25.0, 3)):
        done = engine.chat(
            HELLO, response_format=wanted, seed=seed, max_tokens=400, logit_bias={CLOSE: bias}
        )
        assert "</think>" in done.text
        assert (len(done.answer), done.answer.isalpha()) == (4, True)
        assert done.finish_reason == "stop"


@needs_grammar
def test_without_an_open_thought_a_grammar_begins_at_once(qwen: lspec.Engine) -> None:
    wanted = {"type": "regex", "regex": "[a-z]{4}"}
    done = qwen.chat(HELLO, response_format=wanted, seed=1)
    assert (done.reasoning, done.answer) == ("", done.text)
    assert len(done.text) == 4


def test_markers_that_are_control_tokens_are_a_part_of_the_text(tmp_path: Path) -> None:
    marks = ("[/THINK]", "[THINK]", "[OTHER]")
    path = tmp_path / "brackets.gguf"
    template = OPENING.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    tiny.write_chat_model(path, marks=marks, marks_are_controls=True, template=template)
    with lspec.load(target=path, gamma=0) as engine:
        done = engine.chat(HELLO, max_tokens=2, temperature=0.0, logit_bias={CLOSE: 100.0})
        assert (done.text, done.answer) == ("[/THINK]" * 2, "[/THINK]")
        assert engine.vocab.piece(CALL) == b""


# -- template variables --


def test_template_variables_reach_the_template(qwen: lspec.Engine, chat_model: Path) -> None:
    prompt = qwen.tokenize_chat(HELLO)
    off = qwen.tokenize_chat(HELLO, template_args={"enable_thinking": False})
    assert off == prompt + qwen.vocab.tokenize("<think>\n\n</think>\n\n", bos=False, special=True)
    args = {"enable_thinking": False}
    with lspec.load(target=chat_model, gamma=0, chat_template=CLOSING, template_args=args) as other:
        assert other.tokenize_chat(HELLO) == off
        assert other.tokenize_chat(HELLO, template_args={"enable_thinking": True}) == prompt
        one = other.chat(HELLO, max_tokens=1, seed=1)
        more = other.chat(HELLO, max_tokens=1, seed=1, template_args={"enable_thinking": True})
    assert one.stats.prompt_tokens == len(off)
    assert more.stats.prompt_tokens == len(prompt)


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "self", "", "a b", 5])
def test_variables_that_are_not_free_are_refused(
    qwen: lspec.Engine, chat_model: Path, name: Any
) -> None:
    with pytest.raises(RequestError, match="cannot be a variable"):
        qwen.chat(HELLO, template_args={name: 1})
    with pytest.raises(RequestError, match="cannot be a variable"):
        lspec.load(target=chat_model, gamma=0, template_args={name: 1})


def test_a_variable_that_the_template_does_not_read_is_told(
    chat_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = {"enable_thinking": False, "enable_thinkin": False}
    with lspec.load(target=chat_model, gamma=0, chat_template=CLOSING, template_args=args):
        pass
    assert "no variable enable_thinkin" in caplog.text
    assert "no variable enable_thinking" not in caplog.text


# -- the command line --


@pytest.fixture
def command(chat_model: Path, tmp_path: Path) -> list[str]:
    """Options of a chat that thinks `Hm.` and answers `Yes.`"""
    grammar, template = tmp_path / "thought.lark", tmp_path / "closing.jinja"
    grammar.write_text(THOUGHT)
    template.write_text(CLOSING)
    model = ["--target", str(chat_model), "--drafter", "none", "--chat-template", str(template)]
    return ["chat", *model, "--grammar", str(grammar)]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lspec", *args, "-p", "Hello"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("LSPEC_")},
        timeout=60,
        check=False,
    )


@needs_grammar
def test_piped_there_is_the_answer_alone(command: list[str]) -> None:
    done = run(*command)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Yes.\n", "")
    cut = run(*command, "--max-tokens", "10")
    assert (cut.stdout, cut.stderr) == ("\n", "(it was still thinking)\n")


@needs_grammar
def test_json_has_thought_and_answer_beside_the_text(command: list[str]) -> None:
    found = json.loads(run(*command, "--json").stdout)
    assert list(found)[:3] == ["text", "reasoning", "answer"]
    assert found["text"] == "<think>\nHm.\n</think>\n\nYes."
    assert (found["reasoning"], found["answer"]) == ("Hm.", "Yes.")


@needs_grammar
def test_template_args_of_the_command_line(command: list[str]) -> None:
    def prompt_tokens(*args: str) -> int:
        done = run(*command, "--json", *args)
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout)["stats"]["prompt_tokens"])

    off = prompt_tokens("--template-arg", "enable_thinking=false")
    assert off == prompt_tokens() + len("<think>\n\n</think>\n\n")
    assert prompt_tokens("--template-arg", "enable_thinking=no") < off  # a text, and a true one
    for wrong in ("enable_thinking", "=1", "messages=[]"):
        done = run(*command, "--template-arg", wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert "Traceback" not in done.stderr


@needs_grammar
def test_a_terminal_shows_the_thought_and_the_conversation_forgets_it(
    command: list[str], tmp_path: Path
) -> None:
    typist = Typist(command, tmp_path / "config")
    try:
        typist.read_until(">>> ")
        typist.type("Hello\r")
        shown = typist.read_until(r"\d+ tokens, ").replace("\r\n", "\n")
        assert "<think>\nHm.\n</think>\n\nYes.\n" in shown
        typist.read_until(">>> ")
        typist.type(f"/save {tmp_path}/talk.json\r")
        typist.read_until("saved 2 messages")
        typist.type("/bye\r")
        assert typist.process.wait(30) == 0
    finally:
        typist.close()
    talk = json.loads((tmp_path / "talk.json").read_text())
    assert talk["messages"][1] == {"role": "assistant", "content": "Yes."}


# -- the server --


@pytest.fixture(scope="module")
def server(
    chat_model: Path, chat_draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("template") / "closing.jinja"
    template.write_text(CLOSING + "{# tools <tool_call> tool_calls #}")
    with serving(chat_model, chat_draft, "--chat-template", str(template)) as server:
        yield server
        assert server.end() == 0
    assert "Traceback" not in server.said


def ask(server: Server, **fields: Any) -> Any:
    body = {"messages": HELLO, "max_tokens": 60, "temperature": 0, **fields}
    return httpx2.post(server.url + "/chat/completions", json=body, timeout=60).json()


@needs_grammar
@pytest.mark.parametrize("logprobs", [False, True])
def test_replies_have_reasoning_content(server: Server, logprobs: bool) -> None:
    wanted = {"type": "grammar", "grammar": THOUGHT}
    asked: Any = {"response_format": wanted, "logprobs": logprobs}
    whole = ask(server, **asked)["choices"][0]
    message = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert whole["message"] == message
    with server.client() as client:
        events = list(
            client.chat.completions.create(
                model="chat", messages=HELLO, stream=True, max_tokens=60, **asked
            )
        )
    deltas = [event.choices[0].delta.model_dump(exclude_unset=True) for event in events]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    assert all(("content" in delta) + ("reasoning_content" in delta) <= 1 for delta in deltas)
    if logprobs:
        found = [e.choices[0].logprobs for e in events if e.choices[0].logprobs]
        tokens = [entry.token for part in found for entry in part.content or []]
        assert "".join(tokens) == "<think>\nHm.\n</think>\n\nYes."


def test_a_reply_without_a_thought_has_none(server: Server) -> None:
    assert "reasoning_content" not in ask(server)["choices"][0]["message"]


def test_thoughts_of_earlier_turns_go_to_the_template(server: Server) -> None:
    def length(**fields: Any) -> int:
        turn = {"role": "assistant", "content": "Yes.", **fields}
        reply = ask(server, messages=[*HELLO, turn, *HELLO], max_tokens=1)
        return int(reply["usage"]["prompt_tokens"])

    added = len("<think>\nHm.\n</think>\n\n")
    assert length(reasoning_content="Hm.") == length() + added == length(reasoning_content="Ah.")
    assert length(reasoning_content=None) == length()
    error = ask(server, messages=[{**HELLO[0], "reasoning_content": "Hm."}])["error"]
    assert "reasoning_content" in error["message"]


def test_template_variables_of_a_request(server: Server) -> None:
    def length(**variables: Any) -> int:
        reply = ask(server, max_tokens=1, chat_template_kwargs=variables)
        return int(reply["usage"]["prompt_tokens"])

    assert length(enable_thinking=False) == length() + len("<think>\n\n</think>\n\n")
    assert length(enable_thinking=True, other=[1, {"a": None}]) == length()
    error = ask(server, chat_template_kwargs={"messages": []})["error"]
    assert "'messages' cannot be a variable" in error["message"]


CALL_TEXT = '<think>\n{"name": "time", "arguments": {}}?\n</think>\n\n'
CALL_TEXT += 'So: <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@needs_grammar
def test_a_call_that_must_be_comes_behind_an_open_thought(thinker: Path, tmp_path: Path) -> None:
    template = tmp_path / "opening.jinja"
    template.write_text("{# tools <tool_call> tool_calls #}" + OPENING)
    function = {"name": "weather", "parameters": {"type": "object", "additionalProperties": False}}
    asked: Any = {"tools": [{"type": "function", "function": function}]}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False}
    with serving(thinker, thinker, "--chat-template", str(template)) as server:
        for bias in (100, 25):
            bias_of = {"logit_bias": {str(CLOSE): bias}, "temperature": 1, "seed": 1}
            reply = ask(server, **asked, **bias_of, max_tokens=400)
            (choice,) = reply["choices"]
            assert choice["finish_reason"] == "tool_calls"
            (call,) = choice["message"]["tool_calls"]
            assert call["function"] == {"name": "weather", "arguments": "{}"}
            assert choice["message"]["content"] is None


class Characters:
    """A vocabulary of characters, where some texts are control tokens that leave no trace."""

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


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("controls", [(), ("<tool_call>", "</tool_call>")])
def test_tools_are_read_from_the_answer_alone(
    size: int, opened: bool, controls: tuple[str, ...]
) -> None:
    from lspec.request import Answer
    from lspec.round import Round, Source
    from lspec.stats import Tally

    vocab: Any = Characters(*controls)
    offer = Offer(Tools(FORMATS[1], vocab), [Function(name="weather"), Function(name="time")], True)
    text = CALL_TEXT.removeprefix("<think>") if opened else CALL_TEXT
    tokens = vocab.tokenize(text, bos=False, special=True)
    request: Any = type("Request", (), {"stop": (), "max_tokens": len(tokens), "seed": 0})
    answer = Answer(request, vocab.piece, ThoughtStream(TAGS, opened=opened))
    chunks = []
    for at in range(0, len(tokens), size):
        part = tuple(tokens[at : at + size])
        source = (Source.TARGET,) * len(part)
        chunks.append(answer.add(Round(part, source, (), 0, False, False, 1, 0, 0.0, 0.0)))
    chunks.append(answer.finish(Tally()))
    stream = ContentStream(offer)
    texts, found = zip(*map(stream.add, chunks), strict=True)
    assert "".join(chunk.reasoning for chunk in chunks) == '{"name": "time", "arguments": {}}?'
    assert "".join(texts).strip() == "So:"
    assert [(call.name, json.loads(call.arguments)) for call in found[-1]] == [
        ("weather", {"city": "Oslo"})
    ]
    assert not any(found[:-1])

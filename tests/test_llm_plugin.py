"""The plug-in for `llm`, through llm's own interface and its command line."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llm
import pytest
import tiny
from hub_server import Hub, running_hub
from hub_world import CATALOGUE, ROOT, isolate, write_catalogue
from llm.plugins import load_plugins, pm

from lspec import llm_plugin, loading
from lspec.engine import Engine
from lspec.grammar import Grammars

OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "gamma": 4}
ASKED = {**OPTIONS, "n_threads": 1}


@pytest.fixture
def hub(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chat_model: Path,
    chat_draft: Path,
) -> Iterator[Hub]:
    """A machine with a pair in its catalogue that the hub has, and a home for llm."""
    with running_hub() as hub:
        isolate(monkeypatch, tmp_path, hub.endpoint)
        monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
        write_catalogue(tmp_path, CATALOGUE)
        hub.add("owner/big", "big.gguf", chat_model.read_bytes())
        hub.add("owner/small", "small.gguf", chat_draft.read_bytes())
        yield hub


@pytest.fixture(autouse=True)
def plugin(hub: Hub) -> Iterator[None]:
    """The plug-in as llm has it after an installation."""
    load_plugins()
    registered = pm.is_registered(llm_plugin)
    if not registered:
        pm.register(llm_plugin, "lspec")
    yield
    llm_plugin._engines.close()
    if not registered:
        pm.unregister(llm_plugin)


@pytest.fixture
def engine(chat_model: Path, chat_draft: Path) -> Iterator[Engine]:
    """The same pair by itself, to compare with."""
    with loading.load(target=chat_model, draft=chat_draft, gamma=4, n_threads=1) as engine:
        yield engine


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_all_pairs_of_the_catalogue_are_models_and_the_default_has_a_short_name() -> None:
    names = {str(model.model_id) for model in llm.get_models()}
    assert {"lspec/tiny", "lspec/qwen2.5-coder-1.5b", "lspec/qwen2.5-7b"} <= names
    assert llm.get_model("lspec").model_id == "lspec/tiny"


def test_listing_models_loads_and_pulls_none(hub: Hub) -> None:
    llm.get_models()
    assert hub.asked == []
    code = "import lspec.llm_plugin, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"llama_cpp", "huggingface_hub"} & set(done.stdout.split())


def test_broken_catalogue_leaves_llms_other_models_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_catalogue(tmp_path, "default = 5")
    assert not any(model.model_id.startswith("lspec") for model in llm.get_models())
    assert "no models of lspec" in caplog.text


def test_first_prompt_pulls_the_pair_and_streams_the_answer(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    response = llm.get_model("lspec/tiny").prompt("Hello", **ASKED)
    parts = list(response)
    assert len(parts) > 2
    assert "".join(parts) == engine.chat([user("Hello")], **OPTIONS).text
    out, err = capsys.readouterr()
    assert out == ""
    assert "Pulling tiny" in err


def test_usage_and_what_the_answer_cost_are_told(engine: Engine) -> None:
    response = llm.get_model("lspec/tiny").prompt("Hello", **ASKED)
    usage, done = response.usage(), engine.chat([user("Hello")], **OPTIONS)
    assert (usage.input, usage.output) == (done.stats.prompt_tokens, 12)
    assert usage.details == {"drafted": done.stats.drafted, "accepted": done.stats.accepted}
    assert response.response_json is not None
    assert response.response_json["finish_reason"] == "length"
    assert response.response_json["stats"]["rounds"] == done.stats.rounds
    json.dumps(response.response_json)


def test_conversation_and_system_message_reach_the_model(engine: Engine) -> None:
    conversation = llm.get_model("lspec/tiny").conversation()
    first = conversation.prompt("Hello", system="Be brief.", **ASKED).text()
    second = conversation.prompt("More", **ASKED)
    system = {"role": "system", "content": "Be brief."}
    turns = [system, user("Hello"), {"role": "assistant", "content": first}, user("More")]
    assert first == engine.chat(turns[:2], **OPTIONS).text
    assert second.text() == engine.chat(turns, reuse=False, **OPTIONS).text


def test_options_reach_the_engine_with_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    stream_chat = Engine.stream_chat

    def spy(self: Engine, messages: Any, **options: Any) -> Any:
        seen.append(options)
        return stream_chat(self, messages, **{"max_tokens": 2, **options})

    monkeypatch.setattr(Engine, "stream_chat", spy)
    model = llm.get_model("lspec/tiny")
    # As texts, the way the command line gives them.
    for name, text, value in (
        ("temperature", "0.5", 0.5),
        ("top_k", "5", 5),
        ("top_p", "0.5", 0.5),
        ("min_p", "0.1", 0.1),
        ("repeat_penalty", "1.1", 1.1),
        ("frequency_penalty", "0.1", 0.1),
        ("presence_penalty", "0.1", 0.1),
        ("max_tokens", "3", 3),
        ("stop", "x", "x"),
        ("stop", ["x", "y"], ["x", "y"]),
        ("seed", "7", 7),
        ("gamma", "auto", "auto"),
        ("gamma", "4", 4),
    ):
        model.prompt("Hello", n_threads=1, **{name: text}).text()
        assert seen.pop() == {name: value}
        assert seen == []


def test_pair_is_loaded_once_for_a_process_and_anew_for_another_drafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads: list[dict[str, Any]] = []
    load = loading.load

    def spy(pair: str, **options: Any) -> Engine:
        loads.append({"pair": pair, **options})
        return load(pair, **options)

    monkeypatch.setattr(loading, "load", spy)
    for more in ({}, {"seed": 2}, {"drafter": "ngram"}, {"drafter": "ngram", "n_ctx": 128}, {}):
        llm.get_model("lspec/tiny").prompt("Hello", max_tokens=1, n_threads=1, **more).text()
    assert loads == [
        {"pair": "tiny", "n_threads": 1},
        {"pair": "tiny", "drafter": "ngram", "n_threads": 1},
        {"pair": "tiny", "drafter": "ngram", "n_ctx": 128, "n_threads": 1},
        {"pair": "tiny", "n_threads": 1},
    ]


def test_errors_are_llms_own_with_the_hint() -> None:
    model = llm.get_model("lspec/tiny")
    with pytest.raises(llm.ModelError, match=r"temperature must be 0 or more, not -1\.0\.$"):
        model.prompt("Hello", temperature=-1, n_threads=1).text()
    with pytest.raises(llm.ModelError, match="no message"):
        model.prompt("", n_threads=1).text()
    model.prompt("Hello", max_tokens=1, n_ctx=128, n_threads=1).text()
    with pytest.raises(llm.ModelError, match="no room for an answer"):
        model.prompt("a" * 200, n_ctx=128, n_threads=1).text()


def test_what_is_no_text_is_refused_and_thoughts_are_left_out(engine: Engine) -> None:
    from llm.parts import AttachmentPart, Message, ReasoningPart, TextPart

    model = llm.get_model("lspec/tiny")
    with pytest.raises(ValueError, match="attachments"):
        model.prompt("Hello", attachments=[llm.Attachment(content=b"x", type="image/png")])
    picture = Message(role="user", parts=[AttachmentPart(attachment=None), TextPart("Hello")])
    with pytest.raises(llm.ModelError, match="text only"):
        model.prompt(messages=[picture], n_threads=1).text()
    thought = Message(role="assistant", parts=[ReasoningPart("Hm."), TextPart("Hi.")])
    answer = model.prompt("More", messages=[llm.user("Hello"), thought], **ASKED).text()
    turns = [user("Hello"), {"role": "assistant", "content": "Hi."}, user("More")]
    assert answer == engine.chat(turns, **OPTIONS).text


def test_thoughts_are_events_of_their_own(hub: Hub, tmp_path: Path) -> None:
    path = tiny.write_chat_model(tmp_path / "t.gguf", seed=3, template=f"{tiny.CHATML}<think>")
    hub.add("owner/big", "big.gguf", path.read_bytes())
    response = llm.get_model("lspec/tiny").prompt("Hello", **ASKED)
    assert {event.type for event in response.stream_events()} == {"reasoning"}
    assert response.text() == ""


def test_schema_becomes_a_response_format(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(Grammars, "constraint", lambda self, wanted: seen.append(wanted))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    llm.get_model("lspec/tiny").prompt("Hello", schema=schema, max_tokens=1, n_threads=1).text()
    assert seen == [{"type": "json_schema", "json_schema": {"schema": schema}}]


def test_async_model_answers_the_same_and_shares_the_loaded_pair(engine: Engine) -> None:
    async def main() -> None:
        model = llm.get_async_model("lspec/tiny")
        response = model.prompt("Hello", **ASKED)
        parts = [part async for part in response]
        assert "".join(parts) == engine.chat([user("Hello")], **OPTIONS).text
        assert (await response.usage()).output == 12
        with pytest.raises(llm.ModelError, match="temperature"):
            await model.prompt("Hello", temperature=-1, n_threads=1).text()

    asyncio.run(main())
    llm.get_model("lspec/tiny").prompt("Hello", **ASKED).text()
    assert len(llm_plugin._engines._loaded) == 1


@pytest.fixture
def run_llm(tmp_path: Path) -> Any:
    """Run the command line of llm; the plug-in is found by the entry point in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path / "installed" / "lspec_of_the_test-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lspec-of-the-test\nVersion: 1\n")
    lines = [f"{name} = {place}" for name, place in project["entry-points"]["llm"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[llm]", *lines]))
    path = os.pathsep.join([str(info.parent), str(ROOT)])

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "llm", *args],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_command_line_streams_the_answer_and_continues_the_conversation(
    run_llm: Any, engine: Engine, tmp_path: Path
) -> None:
    options = [x for name, value in ASKED.items() for x in ("-o", name, str(value))]
    done = run_llm("-m", "lspec/tiny", "Hello", *options)
    first = engine.chat([user("Hello")], **OPTIONS).text
    assert (done.returncode, done.stdout) == (0, first + "\n")
    assert "Pulling tiny" in done.stderr

    more = run_llm("-c", "More", *options, "--usage")
    turns = [user("Hello"), {"role": "assistant", "content": first}, user("More")]
    second = engine.chat(turns, **OPTIONS)
    assert (more.returncode, more.stdout) == (0, second.text + "\n")
    assert f"{second.stats.prompt_tokens} input, 12 output" in more.stderr

    log = json.loads(run_llm("logs", "--json").stdout)
    assert [(entry["model"], entry["output_tokens"]) for entry in log] == [("lspec/tiny", 12)] * 2

    wrong = run_llm("-m", "lspec/tiny", "Hello", "-o", "temperature", "-1")
    assert wrong.returncode == 1
    assert "temperature must be 0 or more" in wrong.stderr


def test_command_line_describes_the_options(run_llm: Any) -> None:
    done = run_llm("models", "--options", "-m", "lspec")
    assert done.stdout.startswith("LspecModel: lspec/tiny (aliases: lspec)")
    for name in llm_plugin.Options.model_fields:
        assert f"  {name}: " in done.stdout

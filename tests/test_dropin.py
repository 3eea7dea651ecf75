"""lspec.Llama against llama_cpp.Llama: the same script, the same keys and types."""

from __future__ import annotations

import fnmatch
import inspect
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
import tiny
from llama_cpp.llama_chat_format import (
    ChatFormatterResponse,
    LlamaChatCompletionHandlerRegistry,
    register_chat_format,
)
from llama_cpp.llama_grammar import LlamaGrammar

import lspec
from lspec import store
from lspec.dropin import replies
from lspec.dropin.arguments import cache_type, placement
from lspec.dropin.refusals import CHAT, COMPLETION, LOADING, PRETRAINED
from lspec.dropin.replies import Head, LogprobLists
from lspec.grammar import Grammars
from lspec.request import Answer, Chunk, check_request
from lspec.round import Round, Source, TokenLogprob
from lspec.stats import Tally

PROMPT = "The quick brown fox"
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
LONG = [{"role": "user", "content": "a" * 440}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = [
    *HELLO,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "5", "tool_call_id": "1"},
]
OWN_ARGUMENTS = {"draft_model_path", "pair", "gamma", "drafter", "exact", "force"}
OWN_ARGUMENTS |= {"draft_repo_id", "draft_filename"}

Script = Callable[[Any], Any]
SCRIPT: dict[str, Script] = {
    "completion": lambda m: m(PROMPT, max_tokens=20),
    "completion to the end of the window": lambda m: m([65] * 490, max_tokens=None),
    "0 tokens are as many as there is room for": lambda m: m([66] * 490, max_tokens=0),
    "token ids": lambda m: m.create_completion([65, 66, 67], max_tokens=20),
    "special tokens": lambda m: m("<|im_start|>user\nHi<|im_end|>", max_tokens=5),
    "stop list": lambda m: m(PROMPT, max_tokens=60, stop=["}", "z", "%"]),
    "stop text": lambda m: m(PROMPT, max_tokens=60, stop="{"),
    "no stop": lambda m: m(PROMPT, max_tokens=5, stop=None),
    "echo": lambda m: m(PROMPT, max_tokens=9, echo=True),
    "logprobs": lambda m: m(PROMPT, max_tokens=9, logprobs=3),
    "logprobs of the tokens alone": lambda m: m(PROMPT, max_tokens=9, logprobs=0),
    "another name": lambda m: m(PROMPT, max_tokens=2, model="mine"),
    "bias by text": lambda m: m(PROMPT, max_tokens=9, logit_bias={"113": 20.0}),
    "bias by id": lambda m: m(PROMPT, max_tokens=9, logit_bias={113: 20.0}),
    "stream": lambda m: m(PROMPT, max_tokens=20, stream=True),
    "stream with a stop list": lambda m: m(PROMPT, max_tokens=60, stop=["}", "z"], stream=True),
    "stream with logprobs": lambda m: m(PROMPT, max_tokens=9, logprobs=2, stream=True),
    "stream does not echo": lambda m: m(PROMPT, max_tokens=9, echo=True, stream=True),
    "chat": lambda m: m.create_chat_completion(HELLO, max_tokens=20),
    "chat to its end": lambda m: m.create_chat_completion(LONG),
    "chat with a stop": lambda m: m.create_chat_completion(HELLO, max_tokens=60, stop=["{"]),
    "chat with logprobs": lambda m: m.create_chat_completion(
        HELLO, max_tokens=5, logprobs=True, top_logprobs=2
    ),
    "chat as any text": lambda m: m.create_chat_completion(
        HELLO, max_tokens=5, response_format={"type": "text"}
    ),
    "chat without tools": lambda m: m.create_chat_completion(HELLO, max_tokens=5, tools=[]),
    "chat stream": lambda m: m.create_chat_completion(HELLO, max_tokens=20, stream=True),
    "chat stream with logprobs": lambda m: m.create_chat_completion(
        HELLO, max_tokens=5, stream=True, logprobs=True, top_logprobs=2
    ),
    "openai types": lambda m: m.create_chat_completion_openai_v1(HELLO, max_tokens=5),
    "openai types in a stream": lambda m: m.create_chat_completion_openai_v1(
        HELLO, max_tokens=5, stream=True
    ),
}


class Greedy:
    """A model whose every call has the temperature 0."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._model, name)
        return lambda *args, **kwargs: method(*args, temperature=0.0, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, temperature=0.0, **kwargs)


def played(script: Script, model: Any) -> Any:
    """The result of a script; a list for a stream."""
    result = script(Greedy(model))
    return list(result) if inspect.isgenerator(result) else result


def shape(value: Any) -> Any:
    """The keys of `value` in their order and the types of what is in it."""
    if hasattr(value, "model_dump"):
        return (type(value), shape(value.model_dump()))
    if isinstance(value, dict):
        return [(key, shape(item)) for key, item in value.items()]
    if isinstance(value, list):
        return [shape(item) for item in value]
    return float if isinstance(value, np.floating) else type(value)


def content(value: Any) -> Any:
    """What two runs have in common: neither identity, nor time, nor the last digits."""
    if hasattr(value, "model_dump"):
        return content(value.model_dump())
    if isinstance(value, dict):
        return {k: content(v) for k, v in value.items() if k not in ("id", "created")}
    if isinstance(value, list):
        return [content(item) for item in value]
    is_real = isinstance(value, float | np.floating)
    return pytest.approx(float(value), abs=0.02) if is_real else value


@pytest.fixture(scope="module")
def reference(chat_model: Path) -> llama_cpp.Llama:
    return llama_cpp.Llama(
        str(chat_model),
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        flash_attn=True,
        verbose=False,
    )


@pytest.fixture
def model(chat_model: Path, chat_draft: Path) -> Iterator[lspec.Llama]:
    with lspec.Llama(
        str(chat_model), draft_model_path=str(chat_draft), gamma=4, n_threads=1, seed=1
    ) as model:
        yield model


@pytest.mark.parametrize("name", SCRIPT)
def test_script_returns_the_same_keys_types_and_greedy_text(
    name: str, reference: llama_cpp.Llama, model: lspec.Llama
) -> None:
    expected, got = (played(SCRIPT[name], llama) for llama in (reference, model))
    assert shape(got) == shape(expected)
    assert content(got) == content(expected)


def test_the_comparison_sees_another_order_type_or_text() -> None:
    one = {"a": 1, "b": [{"c": "x"}]}
    assert shape(one) != shape({"b": [{"c": "x"}], "a": 1})
    assert shape(one) != shape({"a": 1.0, "b": [{"c": "x"}]})
    assert shape(one) != shape({"a": 1, "b": [{"c": None}]})
    assert shape(one) == shape({"a": 2, "b": [{"c": "y"}]})
    assert content(one) != content({"a": 1, "b": [{"c": "y"}]})


@pytest.mark.parametrize(
    "name",
    [
        "__init__",
        "__call__",
        "create_completion",
        "create_chat_completion",
        "create_chat_completion_openai_v1",
        "tokenize",
        "detokenize",
        "from_pretrained",
        *("n_ctx", "n_vocab", "token_eos", "token_bos", "token_nl", "set_seed", "reset", "close"),
    ],
)
def test_arguments_their_order_and_defaults_are_those_of_llama_cpp(name: str) -> None:
    def arguments(cls: type) -> list[tuple[str, object, object]]:
        parameters = inspect.signature(getattr(cls, name)).parameters.values()
        return [
            (p.name, p.kind, 0 if p.name == "n_gpu_layers" else p.default)
            for p in parameters
            if p.name not in OWN_ARGUMENTS
        ]

    expected = arguments(llama_cpp.Llama)
    if name == "__init__":
        model_path = ("model_path", inspect.Parameter.POSITIONAL_OR_KEYWORD, None)
        self, _, *options, unknown = expected
        assert unknown[0] == "kwargs", "what llama_cpp ignores, lspec refuses"
        expected = [self, model_path, *options]
    assert arguments(lspec.Llama) == expected


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    "text", [b"", b"Hello", "naïve 🙂".encode(), b"\xff\xfe", b"<|im_end|>hehe\n", b"a\0b"]
)
def test_tokens_and_texts_are_those_of_llama_cpp(
    text: bytes, special: bool, add_bos: bool, reference: llama_cpp.Llama, model: lspec.Llama
) -> None:
    ids = reference.tokenize(text, add_bos, special)
    assert model.tokenize(text, add_bos, special) == ids
    for shown in (True, False):
        bos = reference.token_bos()
        for tokens in (ids, [bos, *ids], [bos, *reference.tokenize(b" a", False)]):
            expected = reference.detokenize(tokens, special=shown)
            assert model.detokenize(tokens, special=shown) == expected


def test_what_the_model_says_of_itself_is_what_llama_cpp_says(
    reference: llama_cpp.Llama, model: lspec.Llama
) -> None:
    for name in ("n_ctx", "n_vocab", "token_eos", "token_bos", "token_nl"):
        assert getattr(model, name)() == getattr(reference, name)(), name
    for name in ("metadata", "model_path"):
        assert getattr(model, name) == getattr(reference, name), name


def test_metadata_longer_than_a_buffer_is_whole(models: Path) -> None:
    template = "{# " + "x" * 5000 + " #}" + tiny.CHATML
    path = tiny.write_chat_model(models / "long-template.gguf", template=template)
    with lspec.Llama(str(path), drafter="none", n_threads=1) as model:
        assert model.metadata["tokenizer.chat_template"] == template


def test_beginning_of_sequence_is_added_where_the_model_wants_it(models: Path) -> None:
    path = tiny.write_spm_model(models / "bos.gguf", add_bos=True)
    reference = llama_cpp.Llama(str(path), n_threads=1, verbose=False)
    with lspec.Llama(str(path), drafter="none", n_threads=1) as model:
        assert model.tokenize(b" hi") == reference.tokenize(b" hi")
        assert model.tokenize(b" hi")[0] == tiny.SPM_BOS == model.token_bos()
        assert model.detokenize(model.tokenize(b" hi")) == b"hi"
        for prompt in ("hi", [70, 71], ""):
            mine, theirs = (m(prompt, max_tokens=1) for m in (model, reference))
            assert mine["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]
    reference.close()


def test_window_0_is_what_the_model_was_trained_on(
    chat_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with lspec.Llama(str(chat_model), n_ctx=0, drafter="none", n_threads=1) as model:
        assert model.n_ctx() == 4096
    assert not caplog.records


def test_model_without_a_known_window_says_so(models: Path) -> None:
    path = models / "windowless.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("no_vocab")
    tiny._finish(writer, path)
    with pytest.raises(lspec.ModelLoadError, match=r"windowless\.gguf"):
        lspec.Llama(str(path), n_ctx=0)


def test_speculation_takes_fewer_rounds_than_tokens(model: lspec.Llama) -> None:
    rounds = [c.round for c in model.engine.stream(PROMPT, temperature=0.0, max_tokens=40)]
    assert sum(round is not None for round in rounds) < 40


# -- what cannot be honoured --


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("split_mode", 2),
        ("main_gpu", 1),
        ("vocab_only", True),
        ("kv_overrides", {"general.name": "x"}),
        ("rope_scaling_type", 1),
        ("pooling_type", 1),
        ("attention_type", 1),
        ("rope_freq_base", 1e6),
        ("rope_freq_scale", 0.5),
        ("yarn_ext_factor", 1.0),
        ("yarn_attn_factor", 2.0),
        ("yarn_beta_fast", 16.0),
        ("yarn_beta_slow", 2.0),
        ("yarn_orig_ctx", 2048),
        ("embedding", True),
        ("offload_kqv", False),
        ("lora_base", "base.gguf"),
        ("lora_path", "adapter.gguf"),
        ("chat_handler", print),
        ("draft_model", print),
        ("tokenizer", print),
        ("type_k", 8),
        ("type_v", 30),
        ("chat_format", "no such format"),
        ("chat_format", "functionary"),
        ("pair", "x"),
        ("gamma", 99),
    ],
)
def test_loading_refuses_what_it_cannot_honour_and_names_it(
    chat_model: Path, name: str, value: object
) -> None:
    with pytest.raises(lspec.RequestError, match=name.replace("_", "[_ ]")):
        lspec.Llama(str(chat_model), drafter="none", **{name: value})


def test_loading_takes_what_makes_no_difference_to_the_text(chat_model: Path) -> None:
    with lspec.Llama(
        str(chat_model),
        drafter="none",
        n_threads=1,
        use_mmap=False,
        use_mlock=True,
        n_batch=64,
        n_ubatch=32,
        n_threads_batch=2,
        rope_scaling_type=None,
        kv_overrides={},
        yarn_orig_ctx=0,
        logits_all=True,
        flash_attn=True,
        op_offload=True,
        swa_full=False,
        no_perf=True,
        lora_scale=0.5,
        numa=True,
        verbose=False,
    ) as model:
        assert model(PROMPT, max_tokens=1)["choices"]


def test_caches_may_be_quantized_if_both_are() -> None:
    assert cache_type(None, None) == {}, "exact mode chooses"
    assert cache_type(1, None) == cache_type(1, 1) == {"kv_type": "f16"}
    assert cache_type(8, 8) == {"kv_type": "q8_0"}
    assert cache_type(2, 2) == {"kv_type": "q4_0"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tfs_z", 0.5),
        ("mirostat_mode", 2),
        ("stopping_criteria", llama_cpp.StoppingCriteriaList([lambda ids, logits: True])),
        ("logits_processor", llama_cpp.LogitsProcessorList([lambda ids, logits: logits])),
        ("suffix", "return x"),
        ("temperature", -1.0),
        ("logprobs", 101),
        ("stop", [""]),
        ("logit_bias", {"a": 1}),
    ],
)
def test_completion_refuses_what_it_cannot_honour_and_names_it(
    model: lspec.Llama, name: str, value: object
) -> None:
    with pytest.raises(lspec.RequestError, match=name):
        model(PROMPT, **{"max_tokens": 1, name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_choice", TOOLS[0]),
        ("functions", [{"name": "f", "parameters": {}}]),
        ("tfs_z", 0.5),
        ("mirostat_mode", 1),
        ("logits_processor", llama_cpp.LogitsProcessorList([lambda ids, logits: logits])),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages", [{"role": "user", "content": [5]}]),
        ("messages", [{"role": "assistant", "content": None}]),
        ("messages", ["hello"]),
    ],
)
def test_chat_refuses_what_it_cannot_honour_and_names_it(
    model: lspec.Llama, name: str, value: object
) -> None:
    with pytest.raises(lspec.RequestError, match=name.removesuffix("s")):
        model.create_chat_completion(
            **{"messages": HELLO, "max_tokens": 1, "tools": TOOLS, name: value}
        )


def test_what_has_no_effect_in_llama_cpp_has_none_here(model: lspec.Llama) -> None:
    nothing = {"mirostat_tau": 1.0, "mirostat_eta": 0.5, "logits_processor": []}
    assert model(PROMPT, max_tokens=1, stopping_criteria=[], top_k=-1, **nothing)["choices"]
    chat = model.create_chat_completion(HELLO, max_tokens=1, tool_choice="auto", tools=None)
    assert chat["choices"]


def test_docs_have_a_place_for_every_argument_of_the_constructor() -> None:
    docs = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")

    def named(row: str) -> set[str]:
        (line,) = (line for line in docs.splitlines() if line.startswith(f"| {row}"))
        patterns = re.findall(r"`(\w+\*?)`", line)
        return {name for pattern in patterns for name in fnmatch.filter(arguments, pattern)}

    arguments = set(inspect.signature(llama_cpp.Llama).parameters) - {"kwargs"}
    honoured, accepted, refused = map(named, ("honoured", "accepted", "refused"))
    assert refused == set(LOADING)
    assert sorted([*honoured, *accepted, *refused]) == sorted(arguments)
    for name in OWN_ARGUMENTS | {*COMPLETION, *CHAT, *PRETRAINED}:
        assert f"`{name}`" in docs, name


def test_echo_with_logprobs_is_refused(model: lspec.Llama) -> None:
    with pytest.raises(lspec.RequestError, match="echo"):
        model(PROMPT, max_tokens=1, echo=True, logprobs=1)


def test_unknown_arguments_are_type_errors(chat_model: Path, model: lspec.Llama) -> None:
    with pytest.raises(TypeError, match="n_gqa"):
        lspec.Llama(str(chat_model), n_gqa=8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="temprature"):
        model(PROMPT, temprature=0)


def test_errors_are_value_errors_where_llama_cpp_raises_those(
    model: lspec.Llama, models: Path
) -> None:
    with pytest.raises(ValueError, match=r"600 tokens.* 512"):
        model([65] * 600)
    with pytest.raises(ValueError, match=r"600 tokens.* 512"):
        model([65] * 600, stream=True)
    with pytest.raises(ValueError, match="nowhere"):
        lspec.Llama(str(models / "nowhere.gguf"))
    with pytest.raises(ValueError, match="nothing to load"):
        lspec.Llama()


def test_token_outside_the_vocabulary_is_refused(model: lspec.Llama) -> None:
    for token in (-1, tiny.CHAT_SIZE):
        with pytest.raises(lspec.RequestError, match="vocabulary"):
            model.detokenize([token])


# -- formats and grammars --


@pytest.mark.parametrize("name", ["chatml", "llama-2", "zephyr", "chat_template.default"])
def test_named_chat_format_is_llama_cpps_own(chat_model: Path, name: str) -> None:
    options = {"n_threads": 1, "verbose": False, "chat_format": name}
    reference = llama_cpp.Llama(str(chat_model), **options)
    with lspec.Llama(str(chat_model), drafter="none", **options) as model:
        assert model.chat_format == name
        mine, theirs = (
            content(m.create_chat_completion(HELLO, max_tokens=8, temperature=0.0))
            for m in (model, reference)
        )
    reference.close()
    assert mine == theirs


def test_format_registered_with_llama_cpp_works_with_its_stop_strings(
    model: lspec.Llama, chat_model: Path
) -> None:
    whole = model("Hi", max_tokens=30, temperature=0.0)["choices"][0]["text"]
    form = ChatFormatterResponse(prompt="Hi", stop=whole[7:10])
    register_chat_format("of the test")(lambda messages, **_: form)
    try:
        with lspec.Llama(
            str(chat_model), drafter="none", n_threads=1, chat_format="of the test"
        ) as other:
            done = other.create_chat_completion(HELLO, max_tokens=30, temperature=0.0)
    finally:
        LlamaChatCompletionHandlerRegistry().unregister_chat_handler("of the test")
    (choice,) = done["choices"]
    assert choice["message"]["content"] == whole[: whole.find(whole[7:10])]
    assert choice["finish_reason"] == "stop"


def test_parts_of_a_message_are_joined(model: lspec.Llama) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    split = [HELLO[0], {"role": "user", "content": parts}]
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}
    mine, whole = (model.create_chat_completion(m, **options) for m in (split, HELLO))
    assert content(mine) == content(whole)


def test_tools_are_shown_to_the_model_as_llama_cpp_shows_them(models: Path) -> None:
    template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
        "{% for call in m.tool_calls %}{{ call | tojson }}{% endfor %}\n{% endfor %}"
    )
    path = str(tiny.write_chat_model(models / "tools.gguf", seed=3, template=template))
    reference = llama_cpp.Llama(path, n_threads=1, flash_attn=True, verbose=False)
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "auto", "temperature": 0.0}
    with lspec.Llama(path, drafter="none", n_threads=1) as model:
        mine, theirs = (
            content(m.create_chat_completion(CALLED, max_tokens=8, **options))
            for m in (model, reference)
        )
    reference.close()
    assert mine == theirs


def test_text_of_a_control_token_in_a_message_stays_text(model: lspec.Llama) -> None:
    message = [{"role": "user", "content": "<|im_end|>"}]
    done = model.create_chat_completion(message, max_tokens=1)
    short = model.create_chat_completion([{"role": "user", "content": ""}], max_tokens=1)
    longer = done["usage"]["prompt_tokens"] - short["usage"]["prompt_tokens"]
    assert longer == len("<|im_end|>")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        ),
        ({"response_format": {"type": "json_object"}}, {"type": "json_object"}),
        (
            {"grammar": LlamaGrammar.from_string('root ::= "a"')},
            {"type": "grammar", "grammar": 'root ::= "a"'},
        ),
    ],
)
def test_response_format_and_grammar_reach_the_engine(
    model: lspec.Llama,
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    seen = []
    monkeypatch.setattr(Grammars, "constraint", lambda self, wanted: seen.append(wanted))
    model.create_chat_completion(HELLO, max_tokens=1, **asked)
    assert seen == [expected]
    if "grammar" in asked:
        model(PROMPT, max_tokens=1, **asked)
        assert seen == [expected] * 2


@pytest.fixture(scope="session")
def fill_in_model(models: Path) -> Path:
    """A model with tokens for filling in: the bytes 1, 2 and 3."""
    path = models / "fill-in.gguf"
    writer = tiny._llama(path, 4096)
    tiny._add_chat_vocabulary(writer, padding=0, merged="he", template=None)
    for name, token in (("pre", 1), ("suf", 2), ("mid", 3)):
        writer.add_uint32(f"tokenizer.ggml.fim_{name}_token_id", token)
    tiny._add_llama_tensors(writer, tiny._Weights(3, 0.0), tiny._chat_bias(0.5), spread=2.0)
    return tiny._finish(writer, path)


@pytest.mark.parametrize("spm_infill", [False, True])
def test_suffix_fills_in_between(fill_in_model: Path, spm_infill: bool) -> None:
    with lspec.Llama(
        str(fill_in_model), drafter="none", n_threads=1, spm_infill=spm_infill
    ) as model:
        before, behind = [1, *b"def f"], [2, *b"<|im_end|>"]  # the names of tokens stay text
        parts = [*behind, *before] if spm_infill else [*before, *behind]
        by_hand = model([*parts, 3], max_tokens=9, temperature=0.0)
        asked = model("def f", suffix="<|im_end|>", max_tokens=9, temperature=0.0)
    assert content(asked) == content(by_hand)


# -- seeds, turns and the end --


def texts(model: lspec.Llama, n: int = 3, **options: Any) -> list[str]:
    def text() -> str:
        model.reset()
        done = model(PROMPT, max_tokens=20, temperature=1.0, **options)
        return str(done["choices"][0]["text"])

    return [text() for _ in range(n)]


def test_seed_of_the_constructor_makes_a_sequence_and_that_of_a_call_one_text(
    model: lspec.Llama,
) -> None:
    first = texts(model)
    assert len(set(first)) == 3
    model.set_seed(1)
    assert texts(model) == first
    model.set_seed(2)
    assert texts(model) != first
    assert len(set(texts(model, seed=5))) == 1


@pytest.mark.parametrize("seed", [-1, 0xFFFFFFFF])
def test_random_seeds(model: lspec.Llama, seed: int) -> None:
    model.set_seed(seed)
    assert len(set(texts(model))) == 3
    assert len(set(texts(model, seed=seed))) == 3


def test_reset_forgets_the_text(model: lspec.Llama) -> None:
    model(PROMPT, max_tokens=4)
    assert len(model.engine.target.tokens) > len(PROMPT) - 3
    model.reset()
    assert model.engine.target.tokens == []


def test_penalties_look_back_as_far_as_the_constructor_says(chat_model: Path) -> None:
    def text(size: int) -> str:
        with lspec.Llama(
            str(chat_model), drafter="none", n_threads=1, last_n_tokens_size=size
        ) as model:
            done = model(PROMPT, max_tokens=30, temperature=0.0, presence_penalty=5.0)
            return str(done["choices"][0]["text"])

    def repeats_within_two(text: str) -> bool:
        return any(text[i] in text[max(i - 2, 0) : i] for i in range(len(text)))

    assert repeats_within_two(text(0))
    assert not repeats_within_two(text(2))
    assert len(set(text(-1))) > len(set(text(2)))


def test_callers_in_other_threads_wait_also_for_the_end_of_a_stream(model: lspec.Llama) -> None:
    prompts = [f"Caller {i}" for i in range(6)]

    def call(i: int) -> str:
        options: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, "stream": i % 2 == 0}
        done = model(prompts[i], **options)
        parts = [done] if isinstance(done, dict) else done
        return "".join(part["choices"][0]["text"] for part in parts)

    alone = [call(i) for i in range(6)]
    together: dict[int, str] = {}
    threads = [threading.Thread(target=lambda i=i: together.update({i: call(i)})) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(6)] == alone


def test_stream_that_is_left_early_frees_the_model(model: lspec.Llama) -> None:
    for start in (
        lambda: model(PROMPT, stream=True),
        lambda: model.create_chat_completion(HELLO, stream=True),
    ):
        stream = start()
        next(stream)
        with pytest.raises(lspec.RequestError, match="middle of a stream"):
            model(PROMPT, max_tokens=1)
        del stream
        assert model(PROMPT, max_tokens=1)["choices"]


def test_closed_model_says_so(chat_model: Path) -> None:
    model = lspec.Llama(str(chat_model), drafter="none", n_threads=1)
    model.close()
    model.close()
    for call in (
        lambda: model(PROMPT),
        lambda: model.create_chat_completion(HELLO),
        lambda: model.tokenize(b"a"),
        lambda: model.detokenize([65]),
        lambda: model.token_eos(),
        lambda: model.reset(),
    ):
        with pytest.raises(lspec.RequestError, match="closed"):
            call()


# -- log-probabilities --


def test_chat_logprobs_without_a_number_are_those_of_the_tokens(model: lspec.Llama) -> None:
    done = model.create_chat_completion(HELLO, max_tokens=3, logprobs=True, temperature=0.0)
    tokens = done["choices"][0]["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == done["choices"][0]["message"]["content"]
    assert all(
        [top["token"] for top in token["top_logprobs"]] == [token["token"]] for token in tokens
    )


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_stop_string_have_no_logprobs_but_are_counted(
    model: lspec.Llama, stream: bool
) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0, "logprobs": 1}
    whole = model(PROMPT, **options)["choices"][0]["text"]
    stop = whole[6:9]
    cut = whole.find(stop)
    done = model(PROMPT, stop=[stop], stream=stream, **options)
    parts = list(done) if stream else [done]
    assert "".join(part["choices"][0]["text"] for part in parts) == whole[:cut]
    tokens = [
        token
        for part in parts
        for token in (part["choices"][0]["logprobs"] or {"tokens": []})["tokens"]
    ]
    assert "".join(tokens) == whole[:cut]
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    if not stream:
        assert done["usage"]["completion_tokens"] == cut + len(stop)


def told(pieces: list[bytes], stop: list[str], *, ended: bool) -> list[dict[str, Any]]:
    """Stream the tokens 0, 1, … whose bytes are `pieces`, one round each, with logprobs."""
    request = check_request(
        [0],
        {"stop": stop, "logprobs": 0, "max_tokens": len(pieces)},
        n_ctx=99,
        n_vocab=50,
        gamma=0,
        rule="rejection",
    )
    answer = Answer(request, lambda token: pieces[token])

    def chunks() -> Iterator[Chunk]:
        for token in range(len(pieces)):
            yield answer.add(
                Round(
                    tokens=(token,),
                    source=(Source.TARGET,),
                    proposed=(),
                    accepted=0,
                    rejected=False,
                    ended=ended and token == len(pieces) - 1,
                    width=1,
                    draft_steps=0,
                    draft_s=0.0,
                    target_s=0.0,
                    logprobs=(TokenLogprob(token, -float(token), ()),),
                )
            )
            if answer.complete:
                break
        yield answer.finish(Tally())

    piece = answer.piece
    lists = LogprobLists(piece, start=10)
    return list(replies.streamed(Head("m"), chunks(), lists, piece))


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        ([b"ab", b"c"], [], [("ab", 0, 10), ("c", 1, 12)]),
        # A character in three tokens is released with the last; places count whole characters.
        (["€".encode()[:1], "€".encode()[1:2], "€".encode()[2:], b"x"], [],
         [("", 0, 10), ("", 1, 10), ("€", 2, 10), ("x", 3, 11)]),
        # Held back as the beginning of a stop string that does not come.
        ([b"a", b"b", b"x"], ["abc"], [("", 0, 10), ("", 1, 11), ("abx", 2, 12)]),
        ([b"a", b"b"], ["abc"], [("", 0, 10), ("ab", 1, 11)]),
        # The stop string comes: its tokens are no part of the stream.
        ([b"x", b"a", b"bc"], ["abc"], [("x", 0, 10)]),
        ([b"xa", b"bc"], ["abc"], [("x", 0, 10)]),
        ([b"a", b"ab", b"c"], ["abc"], [("a", 0, 10)]),
        ([b"a", b"", b"bc"], ["abc"], []),
        # A token without text, at the end and before a text.
        ([b"", b"x", b""], [], [("x", 1, 10), ("", 2, 11)]),
    ],
)  # fmt: skip
def test_a_token_is_streamed_once_its_text_is_certain(
    pieces: list[bytes], stop: list[str], expected: list[tuple[str, int, int]]
) -> None:
    *parts, last = told(pieces, stop, ended=False)
    got = []
    for part in parts:
        (choice,) = part["choices"]
        lists = choice["logprobs"]
        got.append((choice["text"], -int(lists["token_logprobs"][0]), lists["text_offset"][0]))
    if pieces[0] == b"":
        expected = [("", 0, 10), *expected]
    assert got == expected
    assert last["choices"][0]["text"] == ""
    assert last["choices"][0]["finish_reason"] in ("stop", "length")


def test_text_that_is_released_at_the_end_has_no_token_of_its_own() -> None:
    parts = told([b"xa", b"b"], ["abc", "bc"], ended=False)
    assert [part["choices"][0]["text"] for part in parts] == ["x", "ab", ""]
    parts = told([b"xa"], ["abc"], ended=False)
    assert [part["choices"][0]["text"] for part in parts] == ["x", "a", ""]
    assert [part["choices"][0]["logprobs"] is None for part in parts] == [False, True, True]


# -- the real pair --


@pytest.mark.pair
def test_script_on_the_real_pair_gives_the_same_keys_types_and_text_up_to_ties(
    pair: store.PairFiles,
) -> None:
    target, draft = str(pair.target[0]), str(pair.draft[0])
    question = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    scripts: list[Script] = [
        lambda m: m("def fib(n):", max_tokens=16, logprobs=2),
        lambda m: m.create_chat_completion(
            question, max_tokens=16, logprobs=True, top_logprobs=2, stream=True
        ),
    ]
    reference = llama_cpp.Llama(target, n_ctx=256, logits_all=True, flash_attn=True, verbose=False)
    expected = [played(script, reference) for script in scripts]
    reference.close()
    with lspec.Llama(target, draft_model_path=draft, n_ctx=256, gamma=4) as model:
        for script, theirs in zip(scripts, expected, strict=True):
            mine = played(script, model)
            assert first_shapes(mine) == first_shapes(theirs)
            for a, b in zip(token_choices(mine), token_choices(theirs), strict=False):
                if a[0] != b[0]:
                    assert abs(b[1][a[0]] - b[1][b[0]]) < 0.5, "no tie"
                    break


def first_shapes(result: Any) -> Any:
    """The shape of a reply, or of the first and the last chunk of a stream."""
    return shape([result[0], result[-1]] if isinstance(result, list) else result["usage"])


def token_choices(result: Any) -> list[tuple[str, dict[str, float]]]:
    """Each token of a reply or a stream, with the likeliest at its place."""
    if isinstance(result, dict):
        lists = result["choices"][0]["logprobs"]
        return list(zip(lists["tokens"], lists["top_logprobs"], strict=True))
    entries = [
        entry
        for chunk in result
        if (logprobs := chunk["choices"][0]["logprobs"])
        for entry in logprobs["content"]
    ]
    return [
        (entry["token"], {top["token"]: top["logprob"] for top in entry["top_logprobs"]})
        for entry in entries
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((1, 0, None), {}),
        ((1, 0, np.array([3.0, 1.0])), {"tensor_split": (3.0, 1.0)}),
        ((0, 0, None), {"main_gpu": 0}),
        ((0, 1, None), {"main_gpu": 1}),
    ],
)
def test_gpus_are_chosen_as_llama_cpp_does(given: tuple[Any, ...], expected: object) -> None:
    assert placement(*given) == expected

from __future__ import annotations

import copy
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

import lspec
from lspec.machine import usable_cores
from lspec.wanted import MAX_THREADS, wanted

PROMPT = "The quick brown fox"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def engine(chat_model: Path, chat_draft: Path) -> Iterator[lspec.Engine]:
    with lspec.load(target=chat_model, draft=chat_draft, gamma=4, n_ctx=512) as engine:
        yield engine


@pytest.fixture(scope="session")
def endless(models: Path) -> tuple[Path, Path]:
    """A pair that never ends a text by itself."""
    target = tiny.write_chat_model(models / "endless.gguf", seed=5, end_bias=-20)
    return target, tiny.write_chat_model(
        models / "endless-draft.gguf", seed=5, blur=0.1, end_bias=-20
    )


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 7, 16])
def test_greedy_text_equals_plain_decoding(engine: lspec.Engine, gamma: int) -> None:
    plain = engine.generate(PROMPT, temperature=0.0, max_tokens=96, gamma=0)
    done = engine.generate(PROMPT, temperature=0.0, max_tokens=96, gamma=gamma)
    assert done.tokens == plain.tokens
    assert done.stats.rounds < plain.stats.rounds


def test_same_seed_same_tokens_streamed_or_not_and_in_another_engine(
    engine: lspec.Engine, chat_model: Path, chat_draft: Path
) -> None:
    first = engine.generate(PROMPT, seed=7, max_tokens=60)
    again = engine.generate(PROMPT, seed=7, max_tokens=60, reuse=False)
    *chunks, last = engine.stream(PROMPT, seed=7, max_tokens=60, reuse=False)
    with lspec.load(target=chat_model, draft=chat_draft, gamma=4, n_ctx=512) as other:
        elsewhere = other.generate(PROMPT, seed=7, max_tokens=60)
    assert last.completion is not None
    assert first.tokens == again.tokens == last.completion.tokens == elsewhere.tokens
    assert "".join(c.text for c in [*chunks, last]) == first.text
    assert engine.generate(PROMPT, seed=8, max_tokens=60, reuse=False).tokens != first.tokens


def test_seed_is_drawn_where_none_is_given_and_repeats_the_answer(engine: lspec.Engine) -> None:
    first = engine.generate(PROMPT, max_tokens=40)
    assert engine.generate(PROMPT, max_tokens=40, seed=first.seed, reuse=False).tokens == (
        first.tokens
    )


@pytest.mark.parametrize("gamma", [0, 8])
def test_stop_string_cuts_at_the_earliest_match_and_no_part_of_it_is_streamed(
    endless: tuple[Path, Path], gamma: int
) -> None:
    with lspec.load(target=endless[0], draft=endless[1], gamma=4) as engine:
        whole = engine.generate(PROMPT, temperature=0.0, max_tokens=60, gamma=0).text
        stops = [whole[30:34], whole[20:23], whole[21:25]]
        cut = min(whole.find(stop) for stop in stops)
        seen = ""
        for chunk in engine.stream(PROMPT, temperature=0.0, max_tokens=60, stop=stops, gamma=gamma):
            seen += chunk.text
            assert whole[:cut].startswith(seen)
    assert chunk.completion is not None
    assert seen == chunk.completion.text == whole[:cut]
    assert chunk.completion.finish_reason == "stop"
    assert chunk.completion.stats.generated_tokens == len(chunk.completion.tokens)


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3])
def test_never_more_than_max_tokens(endless: tuple[Path, Path], max_tokens: int) -> None:
    with lspec.load(target=endless[0], draft=endless[1], gamma=4) as engine:
        done = engine.generate(PROMPT, max_tokens=max_tokens, gamma=8)
    assert len(done.tokens) == done.stats.generated_tokens == max_tokens
    assert done.finish_reason == "length"


@pytest.mark.parametrize(("length", "left"), [(120, 8), (127, 1)])
def test_full_window_ends_with_length(endless: tuple[Path, Path], length: int, left: int) -> None:
    with lspec.load(target=endless[0], draft=endless[1], gamma=4, n_ctx=128) as engine:
        done = engine.generate([65] * length, gamma=8)
    assert (len(done.tokens), done.finish_reason) == (left, "length")


@pytest.mark.parametrize("length", [128, 129])
def test_prompt_that_fills_the_window_is_one_error_with_both_numbers(
    endless: tuple[Path, Path], length: int
) -> None:
    with (
        lspec.load(target=endless[0], draft=endless[1], gamma=4, n_ctx=128) as engine,
        pytest.raises(lspec.ContextOverflowError, match=rf"{length} tokens.* 128"),
    ):
        engine.generate([65] * length)


def test_full_draft_window_goes_on_plainly_with_one_notice(
    endless: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with lspec.load(
        target=endless[0], draft=endless[1], gamma=4, n_ctx=256, draft_n_ctx=64
    ) as engine:
        rounds = [
            chunk.round
            for chunk in engine.stream(PROMPT, temperature=0.0, max_tokens=150)
            if chunk.round
        ]
        plain = engine.generate(PROMPT, temperature=0.0, max_tokens=150, gamma=0)
    assert rounds[0].drafted > 0
    assert rounds[-1].drafted == 0
    assert tuple(t for r in rounds for t in r.tokens) == plain.tokens
    assert [r.message for r in caplog.records] == [
        "the draft model's window of 64 tokens is full: going on without it"
    ]


def test_what_cannot_be_meant_so_is_pointed_out(
    models: Path, chat_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    large = tiny.write_chat_model(models / "large.gguf", seed=3, padding=64, n_ctx=512)
    with lspec.load(target=chat_model, draft=large, gamma=4):
        pass
    with lspec.load(target=large, draft=chat_model, gamma=4, n_ctx=1024) as engine:
        assert engine.n_ctx == 512
    wanted(n_threads=MAX_THREADS)
    wanted(n_threads=1)
    cores = usable_cores()
    assert [r.message.partition(":")[0] for r in caplog.records] == [
        "the draft is larger than its target",
        "the window is 512 tokens",
        f"{MAX_THREADS} threads share {cores} core{'s'[: cores > 1]}",
    ]


def test_nothing_follows_an_end_token_inside_an_accepted_draft(models: Path) -> None:
    path = tiny.write_chat_model(models / "ends.gguf", seed=11, end_bias=4.0)
    with lspec.load(target=path, draft=path, gamma=4) as engine:
        rounds = [c.round for c in engine.stream(PROMPT, gamma=8, seed=1) if c.round]
        first = engine.chat(HELLO, gamma=8, seed=1)
        assert rounds[-1].ended
        assert rounds[-1].accepted == len(rounds[-1].tokens), "the end token was drafted"
        assert not any(r.ended for r in rounds[:-1])
        assert first.finish_reason == "stop"
        turns = [
            *HELLO,
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "And?"},
        ]
        # A cache with anything behind the end token would give other logits from here on.
        second = engine.chat(turns, gamma=8, temperature=0.0, max_tokens=30)
        fresh = engine.chat(turns, gamma=8, temperature=0.0, max_tokens=30, reuse=False)
    assert second.stats.reused_tokens > len(first.tokens)
    assert second.tokens == fresh.tokens


def test_second_turn_reuses_the_first_and_an_edited_history_is_trimmed(
    engine: lspec.Engine,
) -> None:
    first = engine.chat(HELLO, max_tokens=20, seed=1)
    answer = {"role": "assistant", "content": first.text}
    more = [*HELLO, answer, {"role": "user", "content": "More"}]
    second = engine.chat(more, max_tokens=20, seed=1)
    assert second.stats.reused_tokens > first.stats.prompt_tokens
    edited = engine.chat([{"role": "user", "content": "Help"}], max_tokens=20, seed=1)
    alone = engine.chat([{"role": "user", "content": "Help"}], max_tokens=20, seed=1, reuse=False)
    assert 0 < edited.stats.reused_tokens < first.stats.prompt_tokens
    assert alone.stats.reused_tokens == 0
    assert edited.tokens == alone.tokens


def test_padded_ids_are_never_drafted_nor_emitted(models: Path) -> None:
    target = tiny.write_chat_model(models / "padded.gguf", seed=3, padding=100)
    draft = tiny.write_chat_model(models / "padded-draft.gguf", seed=3, blur=0.1, padding=3)
    with lspec.load(target=target, draft=draft, gamma=4) as engine:
        done = engine.generate(PROMPT, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
    assert done.stats.accepted > 0
    assert max(done.tokens) < tiny.CHAT_SIZE


def test_mismatched_vocabularies_are_refused_naming_the_first_difference(
    models: Path, chat_model: Path
) -> None:
    draft = tiny.write_chat_model(models / "other.gguf", merged="th")
    with pytest.raises(lspec.IncompatiblePairError, match=r"token 256 is 'he' .* 'th'"):
        lspec.load(target=chat_model, draft=draft, gamma=4)


def test_stop_request_keeps_what_is_there_and_the_next_answer_is_right(
    engine: lspec.Engine,
) -> None:
    calls = iter(range(1000))
    cut = engine.generate(PROMPT, temperature=0.0, should_stop=lambda: next(calls) >= 25)
    whole = engine.generate(PROMPT, temperature=0.0, max_tokens=50, reuse=False)
    assert cut.finish_reason == "interrupted"
    assert 0 < len(cut.tokens) < len(whole.tokens)
    assert whole.tokens[: len(cut.tokens)] == cut.tokens
    assert engine.generate(PROMPT, temperature=0.0, max_tokens=50).tokens == whole.tokens


def test_stop_request_during_a_long_prompt_is_heard_between_chunks(engine: lspec.Engine) -> None:
    asked = 0

    def stop_at_second() -> bool:
        nonlocal asked
        asked += 1
        return asked == 2

    done = engine.generate([65] * 400, should_stop=stop_at_second)
    assert (done.finish_reason, done.tokens, asked) == ("interrupted", (), 2)
    assert engine.generate([65] * 400, max_tokens=2, temperature=0.0).stats.reused_tokens == 64


def test_callers_in_other_threads_wait_for_their_turn(engine: lspec.Engine) -> None:
    prompts = [f"Caller {i}" for i in range(6)]
    alone = [engine.generate(p, seed=1, max_tokens=20, reuse=False).tokens for p in prompts]
    together: dict[int, tuple[int, ...]] = {}

    def call(i: int) -> None:
        done = engine.generate(prompts[i], seed=1, max_tokens=20, reuse=False)
        together[i] = done.tokens

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(6)] == alone


def test_asking_in_the_middle_of_ones_own_stream_is_an_error_not_a_deadlock(
    engine: lspec.Engine,
) -> None:
    stream = engine.stream(PROMPT, max_tokens=50)
    next(stream)
    with pytest.raises(lspec.RequestError, match="middle of a stream"):
        engine.generate(PROMPT)
    stream.close()  # type: ignore[attr-defined]
    assert engine.generate(PROMPT, max_tokens=1).tokens


def test_recurrent_target_decodes_plainly_with_a_notice(
    mamba_model: Path, chat_draft: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with lspec.load(target=mamba_model, draft=chat_draft, gamma=4) as engine:
        first = engine.generate(PROMPT, temperature=0.0, max_tokens=30)
        again = engine.generate(PROMPT, temperature=0.0, max_tokens=30)
    assert first.stats.drafted == 0
    assert first.tokens == again.tokens
    assert "cannot take back drafted tokens" in caplog.text


@pytest.mark.parametrize("gamma", [1, 4, 16])
def test_hybrid_target_rolls_back_rightly(lfm2_model: Path, chat_draft: Path, gamma: int) -> None:
    with lspec.load(target=lfm2_model, draft=chat_draft, gamma=4) as engine:
        plain = engine.generate(PROMPT, temperature=0.0, max_tokens=60, gamma=0)
        done = engine.generate(PROMPT, temperature=0.0, max_tokens=60, gamma=gamma)
        again = engine.generate(PROMPT + "!", temperature=0.0, max_tokens=60, gamma=gamma)
        fresh = engine.generate(PROMPT + "!", temperature=0.0, max_tokens=60, reuse=False)
    assert done.stats.drafted > done.stats.accepted, "something had to be rolled back"
    assert done.tokens == plain.tokens
    assert again.tokens == fresh.tokens


@pytest.mark.parametrize(
    "text", ["", "\0", "a\0b", "\ufdd0\uffff", "שלום", " " * 300, "<|im_end|>", "🙂" * 20]
)
def test_any_text_can_be_asked(engine: lspec.Engine, text: str) -> None:
    done = engine.chat([{"role": "user", "content": text}], max_tokens=3, seed=1)
    assert done.finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "0.5"}, "temperature must be a number, not '0.5'"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"gamma": 17}, "gamma"),
        ({"gamma": -1}, "gamma"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": b"a"}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"gamma": 2.5}, "gamma"),
        ({"sampling": lspec.SamplingParams(), "top_k": 3}, "not both"),
    ],
)
def test_options_without_meaning_are_refused_before_a_model_runs(
    engine: lspec.Engine, options: dict[str, object], message: str
) -> None:
    with pytest.raises(lspec.RequestError, match=message):
        engine.stream(PROMPT, **options)  # type: ignore[arg-type]


def test_misspelt_option_is_a_type_error(engine: lspec.Engine) -> None:
    with pytest.raises(TypeError, match="temprature"):
        engine.generate(PROMPT, temprature=0)  # type: ignore[call-arg]


@pytest.mark.parametrize("prompt", ["", [], [-1], [10**6], b"def", [1.5], [None], None, 5])
def test_prompt_without_meaning_is_refused(engine: lspec.Engine, prompt: str | list[int]) -> None:
    with pytest.raises(lspec.RequestError):
        engine.generate(prompt)


@pytest.mark.parametrize(
    "messages",
    [[], ["Hello"], [{"role": "user"}], [{"role": "user", "content": 5}]],
)
def test_messages_without_meaning_are_refused(engine: lspec.Engine, messages: list[object]) -> None:
    with pytest.raises(lspec.RequestError):
        engine.chat(messages)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 99}, "gamma"),
        ({"drafter": "oracle"}, "oracle"),
        ({"exact": True, "rule": "rejection"}, "rule of its own"),
        ({"n_ctx": 0}, "n_ctx"),
        ({"n_threads": 0}, "n_threads"),
        ({"n_threads": 10**11}, "n_threads"),
        ({"pair": "x"}, "not both"),
        ({"drafter": "model", "draft": None}, "draft"),
        ({"target": None}, "target"),
        ({"chat_template": "{% if %}"}, "template"),
    ],
)
def test_load_options_without_meaning_are_refused(
    chat_model: Path, options: dict[str, object], message: str
) -> None:
    files = {"target": chat_model, "draft": chat_model}
    with pytest.raises(lspec.RequestError, match=message):
        lspec.load(**{**files, **options})  # type: ignore[arg-type]


def test_single_model_drafts_from_its_own_text(
    endless: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    repeated = "one two three four one two three four one two"
    with lspec.load(target=endless[0], gamma=4) as engine:
        done = engine.generate(repeated, temperature=0.0, max_tokens=60)
        plain = engine.generate(repeated, temperature=0.0, max_tokens=60, gamma=0)
    assert done.stats.drafted > 0
    assert done.tokens == plain.tokens
    assert "no draft model" in caplog.text


@pytest.mark.parametrize("drafter", ["auto", "model", "ngram", "none"])
@pytest.mark.parametrize("gamma", [4, "auto"])
def test_greedy_text_does_not_depend_on_who_drafts(
    chat_model: Path, chat_draft: Path, drafter: str, gamma: int | str
) -> None:
    with lspec.load(target=chat_model, draft=chat_draft, gamma=gamma, drafter=drafter) as engine:
        for prompt in (PROMPT, "abc abc abc ab"):
            plain = engine.generate(prompt, temperature=0.0, max_tokens=80, gamma=0)
            done = engine.generate(prompt, temperature=0.0, max_tokens=80)
            assert done.tokens == plain.tokens


def test_engine_shows_what_it_is(engine: lspec.Engine) -> None:
    assert repr(engine) == f"<lspec.Engine: {engine.description}>"


def test_closed_engine_says_so(chat_model: Path) -> None:
    engine = lspec.load(target=chat_model, drafter="none")
    engine.close()
    with pytest.raises(lspec.RequestError, match="closed"):
        engine.generate(PROMPT)
    with pytest.raises(lspec.RequestError, match="closed"), engine:
        pass


def test_model_without_template_cannot_chat_but_takes_one(models: Path) -> None:
    path = tiny.write_chat_model(models / "bare.gguf", template=None)
    with (
        lspec.load(target=path, drafter="none") as engine,
        pytest.raises(lspec.RequestError, match="no chat template"),
    ):
        engine.chat(HELLO)
    with lspec.load(target=path, drafter="none", chat_template=tiny.CHATML) as engine:
        assert engine.chat(HELLO, max_tokens=2, seed=1).stats.prompt_tokens > 5


def test_template_that_refuses_the_messages_is_a_request_error(chat_model: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with (
        lspec.load(target=chat_model, drafter="none", chat_template=template) as engine,
        pytest.raises(lspec.RequestError, match="roles must alternate"),
    ):
        engine.chat(HELLO)


def test_integers_of_any_type_and_messages_of_any_sequence_will_do(engine: lspec.Engine) -> None:
    ids = np.array(engine.tokenize(PROMPT))
    done = engine.generate(ids, max_tokens=np.int64(5), seed=np.int32(3), stop=None)  # type: ignore[arg-type]
    assert done.tokens == engine.generate(PROMPT, max_tokens=5, seed=3, reuse=False).tokens
    asked = engine.chat(HELLO, max_tokens=1).stats.prompt_tokens
    assert engine.chat(iter(HELLO), max_tokens=1).stats.prompt_tokens == asked  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", ["Hi", {"role": "user", "content": "Hi"}, 3])
def test_what_is_no_list_of_messages_is_told_what_one_looks_like(
    engine: lspec.Engine, messages: Any
) -> None:
    with pytest.raises(lspec.RequestError, match=r'messages are a list: \[\{"role": "user"'):
        engine.chat(messages)


@pytest.mark.parametrize("options", [{"stop": 5}, {"sampling": 3}, {"seed": "x"}])
def test_option_of_a_wrong_type_is_a_request_error(engine: lspec.Engine, options: Any) -> None:
    with pytest.raises(lspec.RequestError, match=next(iter(options))):
        engine.generate(PROMPT, **options)


def test_seed_of_minus_one_is_a_random_one(engine: lspec.Engine) -> None:
    seeds = {engine.generate(PROMPT, max_tokens=1, seed=-1).seed for _ in range(3)}
    assert len(seeds) == 3
    assert -1 not in seeds


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_engine_cannot_be_copied(engine: lspec.Engine, take: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="an engine cannot be copied or pickled"):
        take(engine)


def test_forked_process_is_told_to_load_its_own(engine: lspec.Engine) -> None:
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads of the tests
        child = os.fork()
    if child == 0:
        try:
            engine.generate(PROMPT, max_tokens=1)
        except lspec.RequestError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        assert said.read() == "this engine was loaded by another process"
    os.waitpid(child, 0)


@pytest.mark.parametrize("name", ["", ".", "a\0b", "a\ud800b"])
def test_what_is_no_file_name_is_a_request_error(name: str) -> None:
    with pytest.raises(lspec.RequestError, match="cannot have the file name"):
        lspec.load(target=name)


@pytest.mark.parametrize("n_ctx", [1, 2, 16])
@pytest.mark.parametrize("gamma", [4, "auto"])
def test_tiny_windows_do_not_upset_llama_cpp(
    chat_model: Path, chat_draft: Path, n_ctx: int, gamma: int | str
) -> None:
    with lspec.load(target=chat_model, draft=chat_draft, n_ctx=n_ctx, gamma=gamma) as engine:
        if n_ctx == 1:
            with pytest.raises(lspec.ContextOverflowError):
                engine.generate([65])
        else:
            assert len(engine.generate([65], temperature=0.0).tokens) <= n_ctx - 1


@pytest.mark.parametrize(
    "template", ["{{ 1/0 }}", "{% for i in range(10**9) %}{% endfor %}", "{{ messages[9].x.y }}"]
)
def test_template_that_fails_in_any_way_is_a_request_error(chat_model: Path, template: str) -> None:
    with (
        lspec.load(target=chat_model, drafter="none", chat_template=template) as engine,
        pytest.raises(lspec.RequestError, match="template refuses"),
    ):
        engine.chat(HELLO)

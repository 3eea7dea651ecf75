"""The binding to llama.cpp, on tiny models: it keeps what a LanguageModel promises."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny
from laws import P_MIN, fit, joint_law, truncated
from loop import GREEDY, PLAIN, Loop, joined
from wrong import AcceptAlways, RedrawFromTarget

import lspec
from lspec.errors import ModelLoadError, RequestError, RollbackError
from lspec.llama import LlamaModel, LoadOptions, read_vocabulary
from lspec.model import rolls_back
from lspec.params import SamplingParams

Load = Callable[..., LlamaModel]


@pytest.fixture
def load() -> Iterator[Load]:
    """Load models of one thread that are closed after the test."""
    loaded: list[LlamaModel] = []

    def load(*paths: Path, n_ctx: int = 256, max_rows: int = 9) -> LlamaModel:
        options = LoadOptions(n_ctx=n_ctx, max_rows=max_rows, n_threads=1)
        loaded.append(LlamaModel(paths, options))
        return loaded[-1]

    yield load
    for model in loaded:
        model.close()


def row_after(model: LlamaModel, text: Sequence[int]) -> np.ndarray:
    """Return the logits after `text`, evaluated afresh; leaves the cache empty."""
    model.truncate(0)
    if len(text) > 1:
        model.eval(text[:-1], rows=0)
    row = model.eval(text[-1:], rows=1)[0].copy()
    model.truncate(0)
    return row


def test_loading_can_be_stopped(chat_model: Path) -> None:
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    with pytest.raises(KeyboardInterrupt):
        LlamaModel([chat_model], LoadOptions(256, 9, n_threads=1), should_stop=stop)
    assert asked == 3

    def press() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LlamaModel([chat_model], LoadOptions(256, 9, n_threads=1), should_stop=press)


# -- passes --

# Keys and values are kept in 16 bits, so that a last bit of float32 may become more. One other
# token anywhere in the text moves the logits by a hundred times that.
NEAR = 2e-3

TEXT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100]


@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_rows_are_the_logits_after_the_last_tokens(load: Load, chat_model: Path, rows: int) -> None:
    model = load(chat_model)
    result = model.eval(TEXT, rows=rows).copy()
    assert result.shape == (rows, model.n_vocab)
    assert result.dtype == np.float32
    for i in range(rows):
        alone = row_after(model, TEXT[: len(TEXT) - rows + 1 + i])
        assert result[i] == pytest.approx(alone, abs=NEAR)


def test_a_pass_without_rows_returns_none(load: Load, chat_model: Path) -> None:
    model = load(chat_model)
    assert model.eval(TEXT, rows=0).shape == (0, model.n_vocab)
    assert model.n_past == len(TEXT)


def test_passes_continue_each_other(load: Load, chat_model: Path) -> None:
    model = load(chat_model)
    whole = model.eval(TEXT, rows=1)[0].copy()
    model.truncate(0)
    for i in range(0, len(TEXT), 3):
        last = model.eval(TEXT[i : i + 3], rows=1)[0]
        assert model.n_past == i + 3
    assert last == pytest.approx(whole, abs=NEAR)


def test_logits_depend_on_the_whole_text(load: Load, chat_model: Path) -> None:
    """So that the tests of caches on this model would notice a wrong cache."""
    model = load(chat_model)
    row = row_after(model, TEXT)
    for i in range(len(TEXT) - 1):
        other = [*TEXT[:i], TEXT[i] + 1, *TEXT[i + 1 :]]
        assert np.abs(row_after(model, other) - row).max() > 20 * NEAR


def test_longest_pass_is_n_batch(load: Load, chat_model: Path) -> None:
    model = load(chat_model)
    model.eval([65] * model.n_batch, rows=9)
    with pytest.raises(ValueError, match="pass"):
        model.eval([65] * (model.n_batch + 1), rows=1)


@pytest.mark.parametrize(("tokens", "rows"), [([], 0), ([], 1), ([65], 2), ([65] * 10, 10)])
def test_wrong_use_is_refused_before_llama_cpp_sees_it(
    load: Load, chat_model: Path, tokens: list[int], rows: int
) -> None:
    model = load(chat_model)
    with pytest.raises(ValueError, match="pass"):
        model.eval(tokens, rows=rows)
    assert model.n_past == 0


def test_truncate_goes_back_to_a_prefix(load: Load, chat_model: Path) -> None:
    model = load(chat_model)
    for keep in range(1, len(TEXT)):
        model.truncate(0)
        model.eval(TEXT, rows=1)
        model.truncate(keep)
        assert model.n_past == keep
        again = model.eval([66, 67], rows=1)[0].copy()
        assert again == pytest.approx(row_after(model, [*TEXT[:keep], 66, 67]), abs=NEAR)


def test_truncate_to_more_than_there_is_changes_nothing(load: Load, chat_model: Path) -> None:
    model = load(chat_model)
    model.eval(TEXT, rows=0)
    model.truncate(100)
    assert model.n_past == len(TEXT)


def test_window_is_the_one_asked_for(load: Load, chat_model: Path) -> None:
    assert load(chat_model, n_ctx=100).n_ctx == 100


@pytest.mark.parametrize("n_ctx_train", [64, 256, 512])
def test_window_is_one_that_llama_cpp_gives(load: Load, tmp_path: Path, n_ctx_train: int) -> None:
    """It cuts a window that is longer than the model was trained for, and says so in its log."""
    path = tiny.write_law_model(tmp_path / "short.gguf", seed=1, n_ctx=n_ctx_train)
    model = load(path, n_ctx=4096)
    while model.n_past < model.n_ctx:
        model.eval([1] * min(64, model.n_ctx - model.n_past), rows=1)
    assert model.n_past >= n_ctx_train


def test_closed_model_is_an_error_and_no_crash(load: Load, chat_model: Path) -> None:
    model = load(chat_model)
    model.close()
    model.close()
    with pytest.raises(RequestError, match="closed"):
        model.eval([65], rows=1)


def test_loading_and_evaluating_print_nothing(
    load: Load, chat_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load(chat_model).eval(TEXT, rows=1)
    read_vocabulary(chat_model)
    assert capfd.readouterr() == ("", "")


def test_a_fresh_process_prints_nothing_and_debug_shows_the_log(chat_model: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from lspec.llama import LlamaModel, LoadOptions;"
        "m = LlamaModel([Path(sys.argv[1])], LoadOptions(n_ctx=64, max_rows=1));"
        "m.eval([65], rows=1); m.close()"
    )

    def errors(**more: str) -> str:
        env = {k: v for k, v in os.environ.items() if k != "LSPEC_DEBUG"} | more
        command = [sys.executable, "-c", code, str(chat_model)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert done.stdout == ""
        return done.stderr

    assert errors() == ""
    assert "llama" in errors(LSPEC_DEBUG="1")


MEMORY = """
import os, sys
from pathlib import Path
from lspec.llama import LlamaModel, LoadOptions

def load(n_ctx=32_768):  # a cache of 8 MB beside the buffers
    return LlamaModel([Path(sys.argv[1])], LoadOptions(n_ctx=n_ctx, max_rows=9, n_threads=1))

def mapped():
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")

load().close()
before = mapped()
if sys.argv[2] == "keep":
    kept = [load() for _ in range(20)]
elif sys.argv[2] == "read":
    model = load(4096)
    while model.n_past < 4000:
        model.eval([1] * 50, rows=9)
else:
    for _ in range(10):
        load().close()
    for _ in range(10):
        load()  # freed with the object
print((mapped() - before) >> 20)
"""


def megabytes(model: Path, mode: str) -> int:
    command = [sys.executable, "-c", MEMORY, str(model), mode]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")


@needs_proc
def test_close_releases_the_memory(tmp_path: Path) -> None:
    path = tiny.write_law_model(tmp_path / "long.gguf", seed=1, n_ctx=32_768)
    assert megabytes(path, "keep") > 300
    assert megabytes(path, "close") < 100


@needs_proc
def test_logits_are_kept_for_the_rows_of_one_pass_only(tmp_path: Path) -> None:
    """Those of the whole window would be 4096 x 20,000 floats: 312 MB (trap 10)."""
    path = tiny.write_law_model(tmp_path / "wide.gguf", seed=1, n_vocab=20_000, n_ctx=4096)
    assert megabytes(path, "read") < 100


# -- files --


def test_split_model_equals_the_whole_one(load: Load, tmp_path: Path) -> None:
    parts = tiny.write_split_chat_model(tmp_path, seed=5)
    whole = tiny.write_chat_model(tmp_path / "whole.gguf", seed=5)
    assert len(parts) > 1
    assert (row_after(load(*parts), TEXT) == row_after(load(whole), TEXT)).all()


BROKEN = {
    "truncated": tiny.write_truncated,
    "empty": tiny.write_empty,
    "web page": tiny.write_web_page,
    "projector": tiny.write_projector,
    "missing": lambda path: path,
    "folder": lambda path: path.mkdir() or path,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_file_is_an_error_that_names_it(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = BROKEN[kind](tmp_path / "broken.gguf")
    with pytest.raises(ModelLoadError, match=r"broken\.gguf") as caught:
        LlamaModel([path], LoadOptions(n_ctx=64, max_rows=1))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("truncated", "corrupted|incomplete|bounds"), ("projector", "CLIP")],
)
def test_llama_cpps_reason_is_part_of_the_error(kind: str, reason: str, tmp_path: Path) -> None:
    path = BROKEN[kind](tmp_path / "broken.gguf")
    with pytest.raises(ModelLoadError, match=reason):
        LlamaModel([path], LoadOptions(n_ctx=64, max_rows=1))


def test_reading_the_vocabulary_of_a_broken_file_is_an_error(tmp_path: Path) -> None:
    for kind in ("empty", "web page", "missing"):
        with pytest.raises(ModelLoadError):
            read_vocabulary(BROKEN[kind](tmp_path / "broken.gguf"))


def test_a_good_file_loads_after_a_broken_one(load: Load, chat_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        load(tiny.write_truncated(tmp_path / "broken.gguf"))
    assert load(chat_model).n_past == 0


# -- text --

TEXTS = [
    "",
    "a",
    "Hello, world!\n\n",
    "  two  spaces  ",
    "naïve 漢字 🙂 e\u0301",
    "a\0b\0",
    "\r\n\t\x7f",
    "the hen: he she\u2581he",
    "x" * 300,
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["chat_model", "spm_model"])
@pytest.mark.parametrize("special", [False, True])
def test_text_round_trips(
    load: Load, request: pytest.FixtureRequest, name: str, text: str, special: bool
) -> None:
    vocab = load(request.getfixturevalue(name)).vocab
    ids = vocab.tokenize(text, bos=False, special=special)
    back = b"".join(map(vocab.piece, ids))
    if name == "spm_model":
        text = text.replace("\u2581", " ")  # SPM writes a space so
    assert back == text.encode()


def test_half_a_character_is_refused(load: Load, chat_model: Path) -> None:
    vocab = load(chat_model).vocab
    with pytest.raises(RequestError, match=r"a lone surrogate, U\+D800"):
        vocab.tokenize("a\ud800b", bos=False, special=False)


def test_every_token_but_control_tokens_has_a_piece(load: Load, chat_model: Path) -> None:
    vocab = load(chat_model).vocab
    assert [vocab.piece(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert vocab.piece(tiny.CHAT_MERGED) == b"he"
    assert {vocab.piece(i) for i in tiny.CHAT_CONTROLS} == {b""}


def test_long_pieces_are_whole(load: Load, tmp_path: Path) -> None:
    merged = "h" + "e" * 199
    vocab = load(tiny.write_chat_model(tmp_path / "long.gguf", merged=merged)).vocab
    assert vocab.piece(tiny.CHAT_MERGED) == merged.encode()


def test_control_tokens_are_read_only_when_asked_for(load: Load, chat_model: Path) -> None:
    vocab = load(chat_model).vocab
    text = "a<|im_end|>b"
    assert vocab.tokenize(text, bos=False, special=True) == [97, tiny.CHAT_IM_END, 98]
    plain = vocab.tokenize(text, bos=False, special=False)
    assert not set(plain) & set(tiny.CHAT_CONTROLS)
    assert b"".join(map(vocab.piece, plain)) == text.encode()
    assert set(vocab.control_texts) == set(tiny.CHAT_CONTROLS.values())


def test_bos_comes_once_where_the_model_wants_it(load: Load, tmp_path: Path) -> None:
    with_bos = load(tiny.write_spm_model(tmp_path / "bos.gguf", add_bos=True)).vocab
    without = load(tiny.write_spm_model(tmp_path / "no-bos.gguf")).vocab
    assert with_bos.adds_bos
    assert not without.adds_bos
    assert with_bos.tokenize("a", bos=True, special=True)[0] == tiny.SPM_BOS
    assert tiny.SPM_BOS not in with_bos.tokenize("a", bos=False, special=True)
    assert tiny.SPM_BOS not in without.tokenize("a", bos=True, special=True)
    assert (with_bos.bos_text, with_bos.eos_text) == ("<s>", "</s>")
    assert (with_bos.vocabulary.bos, without.vocabulary.bos) == (tiny.SPM_BOS, -1)


def test_end_of_generation_is_a_set(load: Load, chat_model: Path, spm_model: Path) -> None:
    assert load(chat_model).vocab.ends == {tiny.CHAT_IM_END, tiny.CHAT_ENDOFTEXT}
    assert load(spm_model).vocab.ends == {tiny.SPM_EOS}


def test_model_without_a_vocabulary_takes_ids_only(load: Load, law_target: Path) -> None:
    model = load(law_target)
    assert (model.n_vocab, model.vocab.kind, model.vocab.ends) == (8, "none", frozenset())
    assert model.vocab.piece(1) == b""
    assert model.vocab.text(1) == ""
    assert not model.vocab.adds_bos
    with pytest.raises(RequestError, match="vocabulary"):
        model.vocab.tokenize("a", bos=True, special=True)


def test_template_and_metadata_come_from_the_file(
    load: Load, chat_model: Path, law_target: Path
) -> None:
    model = load(chat_model)
    assert model.chat_template == tiny.CHATML
    assert load(law_target).chat_template is None
    assert model.metadata("general.architecture") == "llama"
    assert model.metadata("no.such.key") is None
    assert model.n_ctx_train == 4096


def test_vocabulary_can_be_read_without_the_model(load: Load, chat_model: Path) -> None:
    alone = read_vocabulary(chat_model)
    assert alone == load(chat_model).vocab.vocabulary
    assert (alone.kind, alone.size, len(alone.texts)) == ("BPE", tiny.CHAT_SIZE, tiny.CHAT_SIZE)
    assert alone.texts[tiny.CHAT_IM_END] == b"<|im_end|>"


# -- padding --


def test_padding_is_not_part_of_the_vocabulary(
    load: Load, tmp_path: Path, chat_model: Path
) -> None:
    padded = load(tiny.write_chat_model(tmp_path / "padded.gguf", seed=3, padding=16))
    assert padded.n_vocab == tiny.CHAT_SIZE
    assert padded.vocab.vocabulary.size == tiny.CHAT_SIZE + 16
    rows = padded.eval(TEXT, rows=3)
    assert rows.shape == (3, tiny.CHAT_SIZE)
    assert padded.vocab.vocabulary.texts == load(chat_model).vocab.vocabulary.texts


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_padding_is_neither_proposed_nor_emitted(
    load: Load, tmp_path: Path, temperature: float
) -> None:
    """Its logits are the largest of all in these models, on either side."""
    small = load(tiny.write_chat_model(tmp_path / "8.gguf", seed=3, padding=8))
    large = load(tiny.write_chat_model(tmp_path / "40.gguf", seed=3, blur=0.1, padding=40))
    params = SamplingParams(temperature=temperature, top_k=0, top_p=1, min_p=0)
    for target, draft in ((small, large), (large, small)):
        rounds = Loop(target, draft, params=params).rounds(TEXT, max_tokens=100)
        assert max(joined(rounds)) < tiny.CHAT_SIZE
        assert sum(round.accepted for round in rounds) > 20


# -- models that cannot roll back, or not far --


def test_recurrent_model_does_not_roll_back(load: Load, mamba_model: Path) -> None:
    model = load(mamba_model)
    assert model.is_recurrent
    assert not rolls_back(model, depth=1)
    model.eval(TEXT, rows=0)
    with pytest.raises(RollbackError):
        model.truncate(len(TEXT) - 1)
    with pytest.raises(RollbackError):
        model.truncate(1)


def test_recurrent_model_starts_anew_and_decodes_plainly(load: Load, mamba_model: Path) -> None:
    loop = Loop(load(mamba_model), params=GREEDY)
    text = loop.text(TEXT, max_tokens=20)
    assert loop.text(TEXT, max_tokens=20) == text
    assert loop.text([*TEXT, *text], max_tokens=5) == Loop(load(mamba_model), params=GREEDY).text(
        [*TEXT, *text], max_tokens=5
    )


@pytest.mark.parametrize("max_rows", [2, 5, 9, 17])
def test_hybrid_model_rolls_back_as_far_as_a_round_goes(
    load: Load, lfm2_model: Path, max_rows: int
) -> None:
    model = load(lfm2_model, max_rows=max_rows)
    assert model.is_recurrent
    for depth in range(1, max_rows):
        assert rolls_back(model, depth=depth)
    assert not rolls_back(model, depth=max_rows)


def test_hybrid_model_refuses_to_go_back_beyond_its_last_pass(load: Load, lfm2_model: Path) -> None:
    """llama.cpp says yes to that and keeps a wrong state."""
    model = load(lfm2_model)
    model.eval(TEXT[:6], rows=0)
    model.eval(TEXT[6:10], rows=4)
    for too_far in (1, 5, 6):
        with pytest.raises(RollbackError):
            model.truncate(too_far)
    model.truncate(7)
    after = model.eval([65], rows=1)[0].copy()
    assert after == pytest.approx(row_after(model, [*TEXT[:7], 65]), abs=NEAR)


@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_hybrid_target_with_a_draft_model_emits_its_own_greedy_text(
    load: Load, lfm2_model: Path, chat_draft: Path, gamma: int
) -> None:
    plain = Loop(load(lfm2_model), params=GREEDY).text(TEXT, max_tokens=60)
    loop = Loop(load(lfm2_model), load(chat_draft), gamma=gamma, params=GREEDY)
    assert loop.text(TEXT, max_tokens=60) == plain


def test_hybrid_draft_model_is_used_rightly_or_not_at_all(lfm2_model: Path, tmp_path: Path) -> None:
    """Its drafted tokens come one a pass, so that they cannot be taken back together."""
    draft = tiny.write_lfm2(tmp_path / "draft.gguf", seed=2)
    with lspec.load(target=lfm2_model, draft=draft, n_threads=1) as engine:
        assert len(engine.generate(TEXT, max_tokens=40, temperature=1.5, seed=1).tokens) > 5
        text = engine.generate(TEXT, max_tokens=40, temperature=0).tokens
        plain = engine.generate(TEXT, max_tokens=40, temperature=0, gamma=0).tokens
    assert text == plain


# -- the law, through llama.cpp --

PROMPT = [1, 2, 3, 4, 5]
WARM = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
TOP_K = SamplingParams(temperature=0.8, top_k=4, top_p=1.0, min_p=0.0)


def p_value(loop: Loop, *, samples: int) -> float:
    """Return how well the first two tokens fit the law computed from the target's own logits."""
    target = loop.target
    assert isinstance(target, LlamaModel)
    rows = {
        prefix: row_after(target, [*PROMPT, *prefix])
        for n in (0, 1)
        for prefix in itertools.product(range(8), repeat=n)
    }
    settings = {"temperature": loop.params.temperature, "top_k": loop.params.top_k}
    law = joint_law(lambda prefix: truncated(rows[prefix], **settings), 2)
    return fit(loop.sample(PROMPT, n=2, samples=samples), law)


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("params", [WARM, TOP_K], ids=["T=1", "T=.8, top-k 4"])
def test_law_of_the_first_two_tokens(
    load: Load, law_target: Path, law_draft: Path, gamma: int, params: SamplingParams
) -> None:
    loop = Loop(load(law_target), load(law_draft), gamma=gamma, params=params)
    assert p_value(loop, samples=20_000) > P_MIN


@pytest.mark.parametrize("rule", [AcceptAlways, RedrawFromTarget])
def test_law_of_wrong_verifiers_is_another(
    load: Load, law_target: Path, law_draft: Path, rule: type[AcceptAlways]
) -> None:
    loop = Loop(load(law_target), load(law_draft), make_rule=rule, params=PLAIN)
    assert p_value(loop, samples=3000) < P_MIN


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 7, 8])
def test_greedy_text_is_the_targets_own(
    load: Load, chat_model: Path, chat_draft: Path, gamma: int
) -> None:
    """Float32 models on one thread: no two logits are close enough for a width to matter."""
    plain = Loop(load(chat_model), params=GREEDY).text(TEXT, max_tokens=100)
    loop = Loop(load(chat_model), load(chat_draft), gamma=gamma, params=GREEDY)
    assert loop.text(TEXT, max_tokens=100) == plain

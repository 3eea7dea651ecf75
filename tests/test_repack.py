"""Repacked weights: 4-bit matrices that llama.cpp rearranges for the CPU while it loads them."""

from __future__ import annotations

import os
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

import lspec
from lspec.gguf import is_repackable, read_header
from lspec.llama import LlamaModel, LoadOptions, native
from lspec.selfcheck import survey
from lspec.widths import WIDTHS

TEXT = list(b"All work and no play")


def quantized(source: Path, ftype: int) -> Path:
    path = source.with_name(f"{source.stem}-{ftype}.gguf")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.pure = ftype, True, True
    assert not llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(path), params)
    return path


@pytest.fixture(scope="module")
def q4_0(chat_model: Path) -> Path:
    return quantized(chat_model, llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0)


def logits(path: Path, *, repack: bool) -> np.ndarray:
    model = LlamaModel([path], LoadOptions(256, 17, n_threads=1, repack=repack))
    try:
        return np.array(model.eval(TEXT[:17], rows=17))
    finally:
        model.close()


def test_four_bit_matrices_are_repacked_and_others_are_not(chat_model: Path, q4_0: Path) -> None:
    q5_0 = quantized(chat_model, llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_0)
    assert is_repackable([read_header(q4_0)])
    assert not is_repackable([read_header(q5_0)])
    assert not is_repackable([read_header(chat_model)])


def test_a_repacked_file_is_read_and_not_mapped(q4_0: Path, chat_model: Path) -> None:
    options = LoadOptions(256, 17, repack=True)
    assert native.repacks([q4_0], options)
    assert not native.repacks([chat_model], options)
    assert not native.repacks([q4_0], LoadOptions(256, 17))
    assert native.model_params(options, repack=True).load_mode == llama_cpp.LLAMA_LOAD_MODE_NONE
    assert not native.model_params(options).use_extra_bufts


def test_repacked_weights_are_the_same_weights(q4_0: Path) -> None:
    plain, repacked = logits(q4_0, repack=False), logits(q4_0, repack=True)
    assert np.abs(plain - repacked).max() < 0.05 * np.ptp(plain)


def test_models_are_repacked_unless_told_otherwise(q4_0: Path) -> None:
    for repack in (True, False):
        with lspec.load(target=q4_0, drafter="none", repack=repack) as engine:
            assert engine.target.model.options.repack is repack  # type: ignore[attr-defined]
    with lspec.load(target=q4_0, drafter="none") as engine:
        assert engine.target.model.options.repack  # type: ignore[attr-defined]


def test_exact_mode_also_looks_at_repacked_weights(
    q4_0: Path, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = LoadOptions(256, 17, n_threads=1, repack=True)
    found = survey([q4_0], options)
    assert found is not None
    assert [findings.repack for findings in found] == [*[False] * (len(found) - 1), True]
    assert {width for group in found[-1].widths.classes for width in group} == set(WIDTHS)  # type: ignore[union-attr]
    assert survey([q4_0], options) == found, "it is remembered"
    others = survey([chat_model], options)
    assert others is not None
    assert not any(findings.repack for findings in others)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_exact_text_does_not_depend_on_the_draft(
    q4_0: Path,
    chat_draft: Path,
    temperature: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = {"temperature": temperature, "max_tokens": 48, "seed": 3}
    with lspec.load(target=q4_0, draft=chat_draft, exact=True, n_ctx=512) as engine:
        texts = [
            engine.generate("The quick brown fox", gamma=gamma, **options).tokens  # type: ignore[arg-type]
            for gamma in (0, 1, 2, 7, "auto")
        ]
    assert texts == [texts[0]] * len(texts)

"""Tiny models, written once for a whole run of the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiny

from lspec import catalogue, store


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def chat_model(models: Path) -> Path:
    """The target of the tiny pair that chats."""
    return tiny.write_chat_model(models / "chat.gguf", seed=3)


@pytest.fixture(scope="session")
def chat_draft(models: Path) -> Path:
    """Its draft: right about 4 times out of 5."""
    return tiny.write_chat_model(models / "chat-draft.gguf", seed=3, blur=0.1)


@pytest.fixture(scope="session")
def spm_model(models: Path) -> Path:
    return tiny.write_spm_model(models / "spm.gguf")


@pytest.fixture(scope="session")
def law_target(models: Path) -> Path:
    """A model of 8 ids without text."""
    return tiny.write_law_model(models / "law.gguf", seed=1)


@pytest.fixture(scope="session")
def law_draft(models: Path) -> Path:
    return tiny.write_law_model(models / "law-draft.gguf", seed=2)


@pytest.fixture(scope="session")
def mamba_model(models: Path) -> Path:
    return tiny.write_mamba(models / "mamba.gguf")


@pytest.fixture(scope="session")
def lfm2_model(models: Path) -> Path:
    return tiny.write_lfm2(models / "lfm2.gguf")


@pytest.fixture(scope="session")
def pair() -> store.PairFiles:
    """The default pair; without it the test is skipped, or fails where it is required."""
    files = store.locate_pair(catalogue.load().pair("qwen2.5-coder-1.5b"))
    if files is None and os.environ.get("LSPEC_REQUIRE_PAIR") == "1":
        pytest.fail("LSPEC_REQUIRE_PAIR is set, but the default pair has not been pulled")
    if files is None:
        pytest.skip("the default pair has not been pulled: lspec pull")
    return files

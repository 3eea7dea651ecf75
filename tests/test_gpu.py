"""What only a GPU can show. Skipped where llama-cpp-python uses none."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_gpu_check import check

import lspec
from lspec.errors import RequestError
from lspec.llama import LlamaModel, LoadOptions, build, gpus

pytestmark = pytest.mark.gpu


def test_both_models_go_to_the_gpu_by_default(chat_model: Path, chat_draft: Path) -> None:
    with lspec.load(target=chat_model, draft=chat_draft, n_ctx=256, gamma=2) as engine:
        assert [model.device for model in engine._player.models] == ["on the GPU"] * 2
        assert engine.generate("Hello", max_tokens=20, temperature=0.0).tokens


def test_gpus_are_listed_with_their_memory() -> None:
    for gpu in gpus():
        assert gpu.description
        assert gpu.memory_total >= gpu.memory_free
        assert gpu.description in build()


@pytest.mark.parametrize(("n_layers", "device"), [(0, "on the CPU"), (1, "with 1 of 3 layers on")])
def test_fewer_layers(chat_model: Path, n_layers: int, device: str) -> None:
    model = LlamaModel([chat_model], LoadOptions(256, 9, n_gpu_layers=n_layers))
    assert model.device.startswith(device)
    assert model.eval([1, 2, 3], rows=1).shape == (1, model.n_vocab)
    model.close()


@pytest.mark.parametrize("options", [{"main_gpu": 0}, {"tensor_split": [1]}, {"flash_attn": "off"}])
def test_options_are_taken(chat_model: Path, options: dict[str, object]) -> None:
    with lspec.load(target=chat_model, drafter="ngram", n_ctx=256, **options) as engine:  # type: ignore[arg-type]
        assert engine.generate("Hello", max_tokens=8).tokens


def test_gpu_that_is_not_there_is_refused(chat_model: Path) -> None:
    with pytest.raises(RequestError, match="no GPU 15 here"):
        lspec.load(target=chat_model, drafter="none", main_gpu=15)


def test_small_models_pass_the_check() -> None:
    """Too small for their memory to show: everything else must be well."""
    done = check("--small")
    assert '"greedy"' in done.stdout
    assert '"equal": false' not in done.stdout.partition('"exact"')[2]

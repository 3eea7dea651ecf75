"""scripts/gpu_check.py: its own logic, with tiny models on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lspec.gguf import read_header
from lspec.llama import can_offload

SCRIPTS = Path(__file__).parent.parent / "scripts"


def check(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "gpu_check.py"), *args],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SCRIPTS.parent), "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu-check")


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    done = check("--small", "--cpu", "--folder", str(folder), "-o", str(folder / "result.json"))
    assert done.stdout == ""
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "result.json").read_text())


def test_all_is_well_on_the_cpu(result: dict[str, Any]) -> None:
    assert result["ok"]
    (pair,) = result["pairs"]
    assert pair["ok"]
    assert pair["offload"]["weights"] > 0
    assert len(pair["costs"]["target_ms"]) == 17
    assert [p["acceptance_rate"] for p in pair["predictions"]] == [0.6, 0.8, 0.9]
    assert pair["exact"]["widths"][0]["kv_type"] == "f16"
    assert pair["exact"]["equal"] is not False


def test_draft_guesses_what_the_target_says(result: dict[str, Any]) -> None:
    """The numbers are worth something only if drafted tokens are accepted, and not always."""
    (pair,) = result["pairs"]
    greedy, drawn = pair["speed"]
    assert pair["greedy"]["rounds"] < 40
    assert greedy["acceptance_rate"] > 0.9
    assert 0.3 < drawn["acceptance_rate"] < 1
    for speed in (greedy, drawn):
        assert speed["speedup"] > 0
        assert speed["predicted"] > 0


def test_models_are_of_the_shape_that_they_say(result: dict[str, Any], folder: Path) -> None:
    header = read_header(folder / "random-small.gguf")
    assert header.architecture == "qwen2"
    assert header.number("block_count") == 3
    assert header.number("embedding_length") == 256
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    assert shapes["blk.2.ffn_down.weight"] == (512, 256)
    assert shapes["blk.0.attn_k.weight"] == (256, 128)
    assert header.data_end == (folder / "random-small.gguf").stat().st_size


def test_models_that_are_there_are_not_written_again(result: dict[str, Any], folder: Path) -> None:
    before = (folder / "random-small.gguf").stat().st_mtime_ns
    done = check("--small", "--cpu", "--folder", str(folder))
    assert "writing" not in done.stderr
    assert json.loads(done.stdout)["ok"]
    assert (folder / "random-small.gguf").stat().st_mtime_ns == before


@pytest.mark.skipif(can_offload(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = check()
    assert done.returncode == 1
    assert "No GPU can be used" in done.stderr
    assert json.loads(done.stdout)["usable"] is False

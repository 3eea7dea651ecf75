"""`lspec doctor`: what it finds, what it never tells, and that it always ends."""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hub_server import Hub
from hub_world import BIG, SMALL, isolate, write_catalogue
from huggingface_hub import constants
from test_cli import run

from lspec import doctor as module
from lspec.cli import doctor as command
from lspec.devices import Gpu
from lspec.doctor import examine
from lspec.errors import DownloadError
from lspec.llama import Device
from lspec.offload import Offload
from lspec.pull import pull

CATALOGUE = """
default = "mine"
[pairs.mine]
title = "Mine"
target = "big"
draft = "small"
[models.big]
repo = "owner/big"
licence = "mit"
file = "big.gguf"
[models.small]
repo = "owner/small"
licence = "mit"
file = "small.gguf"
"""


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, and no hub."""
    isolate(monkeypatch, tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def pulled(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The pair `mine`, the default one, on the disk; the folder of the hub's cache."""
    write_catalogue(tmp_path, CATALOGUE)
    monkeypatch.setenv("HOME", str(tmp_path))
    from lspec import catalogue

    pull(catalogue.load().pair("mine"))
    return tmp_path / "hub"


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = command.doctor.main([*args], standalone_mode=False)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def mine(report: dict[str, Any]) -> dict[str, Any]:
    return next(pair for pair in report["pairs"] if pair["name"] == "mine")


# -- what it finds --


def test_report_names_versions_build_cpu_memory_and_folders(alone: Path) -> None:
    report = examine()
    assert report["versions"]["lspec"] == module.lspec.__version__
    assert report["versions"]["llama-cpp-python"]
    assert report["versions"]["python"].startswith(platform.python_version())
    assert report["llama_cpp"]["problem"] is None
    assert "CPU" in report["llama_cpp"]["backends"]
    assert report["cpu"]["threads"] >= 1
    assert report["memory"]["total"] > 0
    assert set(report["folders"]) == {"hub cache", "lspec cache", "settings"}
    assert all(folder["free"] > 0 for folder in report["folders"].values())
    json.dumps(report)


def test_default_pair_is_listed_also_where_nothing_is_pulled(alone: Path) -> None:
    (pair,) = examine()["pairs"]
    assert (pair["default"], pair["pulled"], pair["files"]) == (True, False, [])
    assert len(pair["missing"]) == 2


def test_pulled_files_are_compared_with_their_hashes(pulled: Path) -> None:
    told: list[tuple[str, int, int]] = []
    pair = mine(examine(progress=lambda *args: told.append(args)))
    assert (pair["default"], pair["pulled"], pair["missing"]) == (True, True, [])
    assert [file["state"] for file in pair["files"]] == ["good", "good"]
    assert all(len(file["sha256"]) == 64 for file in pair["files"])
    assert told == [("big.gguf", len(BIG), len(BIG)), ("small.gguf", len(SMALL), len(SMALL))]


def test_damaged_file_is_a_problem_and_exit_code_1(
    pulled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = pulled.rglob("small.gguf")
    path.resolve().write_bytes(SMALL[:-1] + b"?")
    code, out, _ = printed(capsys)
    assert code == 1
    assert "small.gguf is damaged: `lspec rm mine`, then `lspec pull mine`." in out
    assert "mine (default): not pulled" in out


def test_without_hashes_no_file_is_read(
    pulled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module.integrity, "hash_start", None)
    code, out, _ = printed(capsys, "--no-hash", "--json")
    assert code == 0
    assert [file["state"] for file in mine(json.loads(out))["files"]] == ["good", "good"]
    (path,) = pulled.rglob("small.gguf")
    os.utime(path.resolve(), ns=(1, 1))
    assert "not compared" in printed(capsys, "--no-hash")[1]


def test_file_that_two_pairs_share_is_read_once(pulled: Path, tmp_path: Path) -> None:
    two = CATALOGUE + '[pairs.other]\ntitle = "Other"\ntarget = "big"\ndraft = "big"\n'
    write_catalogue(tmp_path, two)
    told: list[str] = []
    report = examine(progress=lambda name, done, size: told.append(name))
    assert told == ["big.gguf", "small.gguf"]
    assert [pair["name"] for pair in report["pairs"]] == ["mine", "other"]


def test_pair_that_only_shares_a_file_is_left_out(pulled: Path, tmp_path: Path) -> None:
    half = '[pairs.half]\ntitle = "Half"\ntarget = "huge"\ndraft = "small"\n'
    huge = '[models.huge]\nrepo = "owner/huge"\nlicence = "mit"\nfile = "huge.gguf"\n'
    write_catalogue(tmp_path, CATALOGUE + half + huge)
    assert [pair["name"] for pair in examine()["pairs"]] == ["mine"]
    (path,) = pulled.rglob("big.gguf")
    os.utime(path.resolve(), ns=(1, 1))  # so that `mine` does not count as pulled
    pairs = {pair["name"]: pair for pair in examine()["pairs"]}
    assert pairs["half"]["missing"] == ["huge.gguf"]
    assert [file["state"] for file in pairs["mine"]["files"]] == ["good", "good"]
    assert not pairs["mine"]["pulled"]


def test_broken_build_is_a_problem_and_not_a_crash(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith(("lspec.llama", "lspec.offload"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    code, out, _ = printed(capsys)
    assert code == 1
    assert "Problem: llama-cpp-python cannot be loaded: ModuleNotFoundError" in out


def test_broken_catalogue_is_a_problem_and_not_a_crash(
    alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_catalogue(alone, "default = 1")
    code, out, _ = printed(capsys)
    assert code == 1
    assert "Problem: ~/config/lspec/models.toml" in out


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HF_HOME"])
def test_file_in_place_of_a_folder_is_a_problem_and_not_a_crash(
    alone: Path, variable: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    done = run("doctor", "--no-hash", env={variable: str(file), "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 1
    assert "cache cannot be written: change its permissions" in done.stdout


def test_folder_that_cannot_be_read_is_a_problem_and_not_a_crash(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module.store, "copies", refuse)
    code, out, _ = printed(capsys)
    assert code == 0
    assert "lspec cache" in out


def test_folder_that_cannot_be_written_is_a_problem() -> None:
    report = {
        "llama_cpp": {"problem": None},
        "catalogue_problem": None,
        "folders": {"hub cache": {"writable": False}},
        "pairs": [],
    }
    (problem,) = command.problems(report)
    assert "the folder of the hub cache cannot be written" in problem


# -- the hub --


def test_hub_that_answers(server: Hub, tmp_path: Path) -> None:
    write_catalogue(tmp_path, CATALOGUE)
    assert examine()["hub"] == {"offline": False, "token": False, "problem": None}


def test_hub_out_of_reach_is_told_without_its_address(
    alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = printed(capsys)
    assert code == 0
    assert "The hub at (address left out) cannot be reached" in out
    assert "127.0.0.1" not in out


def test_offline_mode_asks_nothing(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(module.hub, "describe", None)
    assert examine()["hub"] == {"offline": True, "token": False, "problem": None}


def test_hub_that_never_answers_does_not_hold_it_up(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forever = threading.Event()
    monkeypatch.setattr(module.hub, "describe", lambda *args, **kwargs: forever.wait())
    monkeypatch.setattr(module, "HUB_SECONDS", 0.01)
    assert "has not answered within" in examine()["hub"]["problem"]
    forever.set()


def test_any_fault_of_the_client_is_only_named(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def describe(*args: object, **kwargs: object) -> None:
        raise KeyError("something of the client's")

    monkeypatch.setattr(module.hub, "describe", describe)
    assert examine()["hub"]["problem"] == "KeyError"


# -- what it never tells --


def test_it_names_no_user_machine_token_address_or_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home" / "somebody"
    home.mkdir(parents=True)
    isolate(monkeypatch, home)
    elsewhere = tmp_path / "disk" / "somebody" / "thishost" / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(elsewhere))
    monkeypatch.setattr(platform, "node", lambda: "thishost")
    secrets = {
        "HOME": str(home),
        "USER": "somebody",
        "LSPEC_API_KEY": "sesame",
        "LSPEC_SYSTEM": "my secret plan",
        "HF_TOKEN": "hf_sesame",
        "https_proxy": "http://name:sesame@proxy.example:1",
    }
    for key, value in secrets.items():
        monkeypatch.setenv(key, value)

    def describe(*args: object, **kwargs: object) -> None:
        raise DownloadError("no proxy at http://name:sesame@proxy.example:1/x.")

    monkeypatch.setattr(module.hub, "describe", describe)
    texts = [printed(capsys)[1], printed(capsys, "--json")[1]]
    for text in texts:
        for word in ("somebody", "thishost", "sesame", "secret", "proxy.example"):
            assert word not in text
        for name in ("LSPEC_API_KEY", "LSPEC_SYSTEM", "HF_TOKEN", "https_proxy"):
            assert name in text
    assert "~/config" in texts[0]
    assert "/disk/…/…/hub" in texts[0]
    assert "no proxy at (address left out); " in texts[0]
    assert "a token is set" in texts[0]


# -- how it is shown --


def test_only_the_report_is_on_stdout_and_nothing_elsewhere(
    pulled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = printed(capsys)
    assert (code, err) == (0, "")
    assert out.startswith("lspec ")
    assert "mine (default): pulled" in out
    assert ": good\n" in out
    assert "Problem" not in out


def test_a_bar_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    bars = command._Bars()
    for done in (4, 10):
        bars.show("big.gguf", done, 10)
    assert "big.gguf" in screen.getvalue()
    assert bars._bar is None


def test_flags_of_the_processor_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "model name : EPYC\nflags : fpu avx2 avx512f amx_int8 rdtscp\n\nprocessor : 1\n"
    monkeypatch.setattr(Path, "read_text", lambda *args, **kwargs: text)
    found = module.cpu()
    assert (found["name"], found["flags"]) == ("EPYC", ["amx_int8", "avx2", "avx512f"])


def test_processor_of_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(*args: object, **kwargs: object) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", read_text)
    assert module.cpu()["flags"] == []


def test_gpu_that_is_not_used_comes_with_the_command(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Offload("0.3.36", ("CPU",), (), (Gpu("NVIDIA L4", "CUDA"),))
    monkeypatch.setattr("lspec.offload.survey", lambda: found)
    out = printed(capsys)[1]
    assert "NVIDIA L4, not used" in out
    assert "with the CUDA toolkit (nvcc): CMAKE_ARGS=" in out
    device = Device("CUDA0", "NVIDIA L4", "gpu", "CUDA", 24_000_000_000, 23_000_000_000)
    found = Offload("0.3.36", ("CUDA", "CPU"), (device,), ())
    assert "NVIDIA L4 (CUDA0), 24.00 GB, 23.00 GB free" in printed(capsys)[1]

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_server import Hub, running_hub
from hub_world import NOWHERE, all_files, isolate, write_catalogue
from huggingface_hub import constants

from lspec import store
from lspec.cli import main
from lspec.cli.memory import memory_lines, memory_sentence
from lspec.cli.models import pull_missing
from lspec.planning import Planner, default_options

CATALOGUE = """
default = "tiny"
[models.big]
repo = "owner/big"
licence = "big licence"
file = "big.gguf"
[models.small]
repo = "owner/small"
licence = "small licence"
file = "small.gguf"
[models.odd]
repo = "owner/odd"
licence = "odd licence"
file = "odd.gguf"
[pairs.tiny]
title = "Tiny pair"
note = "For tests."
target = "big"
draft = "small"
[pairs.mismatched]
target = "big"
draft = "odd"
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def server(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chat_model: Path,
    chat_draft: Path,
    spm_model: Path,
) -> Iterator[Hub]:
    with running_hub() as server:
        isolate(monkeypatch, tmp_path, server.endpoint)
        write_catalogue(tmp_path, CATALOGUE)
        server.add("owner/big", "big.gguf", chat_model.read_bytes())
        server.add("owner/small", "small.gguf", chat_draft.read_bytes())
        server.add("owner/odd", "odd.gguf", spm_model.read_bytes())
        yield server


@pytest.fixture
def lspec(server: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line; returns exit code, stdout and stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lspec", *args])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_pull_shows_sizes_and_licences_then_files_the_check_and_the_next_command(
    lspec: Run,
    server: Hub,
    chat_model: Path,
    chat_draft: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lspec.planning.free_memory", lambda: 8 * 10**9)
    outlook = Planner([chat_model], [chat_draft]).outlook(default_options())
    memory = [*memory_lines(outlook)]
    code, out, err = lspec("pull")
    sizes = {name: len(file.data) / 1e6 for (_, name), file in server.files.items()}
    assert code == 0
    assert out == ""
    lines = err.splitlines()
    assert [line for line in lines if line not in memory] == [
        "Pulling tiny: Tiny pair",
        f"   {sizes['big.gguf']:.2f} MB  big.gguf (hub)",
        f"   {sizes['small.gguf']:.2f} MB  small.gguf (hub)",
        f"   {sizes['big.gguf'] + sizes['small.gguf']:.2f} MB  in all",
        "Licence of the target: big licence",
        "Licence of the draft: small licence",
        f"big.gguf: {sizes['big.gguf']:.2f} MB fetched",
        f"small.gguf: {sizes['small.gguf']:.2f} MB fetched",
        "tiny: files checked, vocabularies match",
        "Next: lspec chat",
    ]
    assert lines[6] == memory_sentence(outlook)  # before anything is fetched
    assert lines[10:-1] == memory


def test_second_pull_fetches_nothing(lspec: Run, server: Hub) -> None:
    lspec("pull", "tiny")
    server.asked.clear()
    code, _, err = lspec("pull", "tiny")
    assert code == 0
    assert err.splitlines()[0] == "tiny is on the disk already."
    assert server.asked == []


def test_terminal_shows_one_bar_per_file(lspec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    assert lspec("pull")[0] == 0
    bars = [part for part in screen.getvalue().replace("\n", "\r").split("\r") if "100%" in part]
    assert {bar.split(":")[0] for bar in bars} == {"big.gguf", "small.gguf"}
    assert "fetched" not in screen.getvalue()


def test_mismatched_pair_is_refused_with_the_reason(lspec: Run) -> None:
    code, out, err = lspec("pull", "mismatched")
    assert (code, out) == (1, "")
    assert "error:" in err
    assert "vocabular" in err
    assert "Next:" not in err


def test_two_files_of_the_hub_become_a_pair_of_the_users_catalogue(
    lspec: Run, server: Hub, tmp_path: Path
) -> None:
    command = ("pull", "--target", "owner/big:big.gguf", "--draft", "owner/small:small.gguf")
    code, _, err = lspec(*command, "--name", "mine")
    assert code == 0, err
    assert "Next: lspec chat mine" in err
    _, out, _ = lspec("show", "mine", "--json")
    shown = json.loads(out)
    assert shown["target"]["licence"] == "mit"
    assert shown["target"]["files"][0]["sha256"] == server.files["owner/big", "big.gguf"].sha256
    assert shown["draft"]["files"][0]["path"]
    # The same command once more asks nothing and adds nothing.
    server.asked.clear()
    text = (tmp_path / "config" / "lspec" / "models.toml").read_text()
    assert lspec(*command, "--name", "mine")[0] == 0
    assert server.asked == []
    assert (tmp_path / "config" / "lspec" / "models.toml").read_text() == text


def test_files_of_ones_own_do_not_clash_with_the_environments_pair(
    lspec: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LSPEC_PAIR", "tiny")
    pair = ("--target", "owner/big:big.gguf", "--draft", "owner/small:small.gguf")
    assert lspec("pull", *pair, "--name", "mine")[0] == 0


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("tiny", "--target", "a/b:c.gguf"), "not both"),
        (("--target", "a/b:c.gguf"), "belong together"),
        (("--name", "x"), "belong together"),
        (("--target", "a/b", "--draft", "a/b:c.gguf", "--name", "x"), "must be OWNER/REPO:FILE"),
        (("--from", "elsewhere"), "elsewhere"),
        (
            ("--target", "a/b:c.gguf", "--draft", "a/b:c.gguf", "--name", "x", "--from", "index"),
            "have a mirror",
        ),
    ],
)
def test_wrong_usage_of_pull_exits_with_2(
    lspec: Run, args: tuple[str, ...], complaint: str
) -> None:
    code, out, err = lspec("pull", *args)
    assert (code, out) == (2, "")
    assert complaint in err


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("nobody",), "no pair named 'nobody'"),
        (("--target", "a/b:c.bin", "--draft", "a/b:c.gguf", "--name", "x"), "'c.bin' is not"),
        (("--target", "a/b:c.gguf", "--draft", "a/b:c.gguf", "--name", "a/b"), "cannot be the"),
        (("--target", "a/b:c.gguf", "--draft", "a/b:c.gguf", "--name", "tiny"), "already another"),
        (("--target", "a/b:c.gguf", "--draft", "a/b:c.gguf", "--name", "x"), "no repository a/b"),
        (("tiny", "--from", "index"), "has no mirror"),
    ],
)
def test_pull_that_cannot_work_says_why_and_exits_with_1(
    lspec: Run, args: tuple[str, ...], complaint: str
) -> None:
    code, out, err = lspec("pull", *args)
    assert (code, out) == (1, "")
    assert complaint in err
    assert "Traceback" not in err


@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_refusal_of_the_hub_exits_with_1_and_leaves_nothing(
    lspec: Run, server: Hub, tmp_path: Path, status: int
) -> None:
    server.files["owner/big", "big.gguf"].status = status
    code, _, err = lspec("pull")
    assert code == 1
    assert err.startswith("Pulling tiny: Tiny pair\nerror: ")
    assert len(err.splitlines()) == 3
    assert all_files(tmp_path / "hub") == []


def test_web_page_in_place_of_a_model_exits_with_1_and_leaves_nothing(
    lspec: Run, server: Hub, tmp_path: Path
) -> None:
    server.files["owner/big", "big.gguf"].sent = b"<!DOCTYPE html>"
    code, _, err = lspec("pull")
    assert code == 1
    assert "error: Instead of big.gguf a web page arrived." in err
    assert all_files(tmp_path / "hub") == []


def test_disk_that_is_too_small_exits_with_1_after_the_sizes(
    lspec: Run, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 9))
    code, _, err = lspec("pull")
    assert code == 1
    assert err.index("in all") < err.index("error: The disk is too small")
    assert server.ranges() == []


def test_without_a_network_the_pair_and_its_size_are_told(
    lspec: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    code, _, err = lspec("pull", "qwen3-8b")
    assert code == 1
    assert re.match(r"Pulling qwen3-8b: .*, \d\.\d\d GB\nerror: ", err)


def test_network_cut_with_the_pair_on_the_disk_changes_nothing(
    lspec: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lspec("pull")
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", NOWHERE)
    assert lspec("pull")[0] == 0


def test_file_that_another_program_has_fetched_is_checked_and_used(
    lspec: Run, server: Hub, tmp_path: Path
) -> None:
    lspec("pull")
    shutil.rmtree(tmp_path / "cache")
    server.asked.clear()
    code, _, err = lspec("pull")
    assert code == 0
    assert "Checking big.gguf, which is on the disk." in err
    assert server.asked == []


def test_command_that_needs_a_pair_pulls_it_once(
    server: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    pull_missing(None)
    assert "Pulling tiny" in capsys.readouterr().err
    pull_missing(None)
    assert capsys.readouterr() == ("", "")


def test_ls_lists_every_pair_and_what_is_on_the_disk(lspec: Run) -> None:
    code, out, err = lspec("ls")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) > 15
    (line,) = (line for line in out.splitlines() if line.startswith("tiny"))
    assert line.split() == ["tiny", "(default)", "-", "?", "big", "licence,", "small", "licence",
                            "Tiny", "pair"]  # fmt: skip
    lspec("pull")
    rows = {row["name"]: row for row in json.loads(lspec("ls", "--json")[1])}
    assert rows["tiny"]["on_disk"] is True
    assert rows["tiny"]["default"] is True
    assert rows["qwen2.5-coder-1.5b"]["on_disk"] is False
    assert rows["qwen2.5-coder-1.5b"]["size"] == 1_608_720_832


def test_show_tells_files_licences_and_where_they_are(lspec: Run) -> None:
    _, before, _ = lspec("show")
    assert before.splitlines()[:5] == [
        "tiny: Tiny pair",
        "For tests.",
        "",
        "target: big, licence big licence",
        "  owner/big: big.gguf",
    ]
    assert "on disk  no" in before
    lspec("pull")
    code, after, err = lspec("show", "tiny")
    assert (code, err) == (0, "")
    assert "on disk  /" in after


def test_rm_without_a_terminal_needs_yes(lspec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lspec("pull")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    code, _, err = lspec("rm", "tiny")
    assert code == 2
    assert "--yes" in err


def test_rm_asks_first_and_takes_no_for_an_answer(
    lspec: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lspec("pull")
    before = all_files(tmp_path / "hub")
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    code, _, err = lspec("rm", "tiny")
    assert code == 130
    assert "Delete?" in err
    assert all_files(tmp_path / "hub") == before
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert lspec("rm", "tiny")[0] == 0
    assert all_files(tmp_path / "hub") == []


def test_rm_keeps_what_another_pulled_pair_uses(lspec: Run) -> None:
    lspec("pull", "tiny")
    lspec("pull", "mismatched")
    code, out, err = lspec("rm", "tiny", "--yes")
    assert (code, out) == (0, "")
    assert "kept for mismatched: " in err
    from lspec import catalogue

    known = catalogue.load()
    assert store.locate_pair(known.pair("mismatched"))
    assert store.locate_pair(known.pair("tiny")) is None


def test_rm_of_a_pair_that_is_not_there_says_so(lspec: Run) -> None:
    code, _, err = lspec("rm", "tiny")
    assert (code, err) == (0, "No file of tiny to remove.\n")


def test_broken_catalogue_is_one_sentence_and_a_hint(lspec: Run, tmp_path: Path) -> None:
    path = write_catalogue(tmp_path, "default = ")
    code, _, err = lspec("ls")
    assert code == 1
    assert err.startswith(f"error: The catalogue {path} cannot be read: ")


def test_pull_says_what_will_not_fit_and_fetches_it_all_the_same(
    lspec: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lspec.planning.free_memory", lambda: 10**6)
    code, _, err = lspec("pull")
    assert code == 0
    assert len(re.findall(r"of memory \(1\.00 MB free\): it does not fit\.", err)) == 2


def test_pull_from_a_server_that_sends_no_parts_says_it_afterwards(lspec: Run, server: Hub) -> None:
    for served in server.files.values():
        served.ranges = False
    code, _, err = lspec("pull")
    assert code == 0
    assert err.index("files checked") < err.index("With a window of 4096 tokens it takes")

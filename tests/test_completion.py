"""Completion in shells, and `lspec` alone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from hub_world import isolate, write_catalogue
from test_cli import run
from test_imports import loaded_by

from lspec import catalogue, store
from lspec.cli import COMMANDS, cli, first_steps
from lspec.cli.completion import SHELLS


def completed(*args: str) -> list[str]:
    """Return what follows `args`, the last of which is not finished."""
    *before, incomplete = args
    shell = ShellComplete(cli, {}, "lspec", "_LSPEC_COMPLETE")
    return [item.value for item in shell.get_completions([*before], incomplete)]


@pytest.mark.parametrize("shell", SHELLS)
def test_script_is_one_that_the_shell_reads(shell: str) -> None:
    done = run("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert "_LSPEC_COMPLETE" in done.stdout
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=done.stdout, text=True, check=True)


def test_unknown_shell_is_wrong_usage() -> None:
    assert run("completion", "tcsh").returncode == 2
    assert run("completion").returncode == 2


def test_commands_complete() -> None:
    assert completed("") == list(COMMANDS)
    assert completed("ch") == ["chat", "check"]
    assert completed("zzz") == []
    assert completed("--v") == ["--version"]
    assert completed("no-such-command", "") == list(COMMANDS)


def test_completing_a_command_imports_none() -> None:
    code = (
        "from click.shell_completion import ShellComplete\n"
        "from lspec.cli import cli\n"
        "ShellComplete(cli, {}, 'lspec', '_LSPEC_COMPLETE').get_completions([], 'ch')"
    )
    assert not loaded_by(code) & {"lspec.cli.chat", "numpy", "llama_cpp"}


@pytest.mark.parametrize(
    "command", ["chat", "generate", "serve", "check", "bench", "pull", "show", "rm"]
)
def test_pairs_complete(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch, tmp_path)
    assert completed(command, "qwen2.5-coder-1") == [
        name for name in catalogue.load().pairs if name.startswith("qwen2.5-coder-1")
    ]
    assert "--json" in completed(command, "--j") or command in ("serve", "pull", "rm", "bench")


def test_options_and_their_values_complete() -> None:
    assert completed("chat", "--flash-attn", "o") == ["on", "off"]
    assert "--draft-gpu-layers" in completed("chat", "--draft")


def test_broken_catalogue_completes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolate(monkeypatch, tmp_path)
    write_catalogue(tmp_path, "[")
    assert completed("chat", "q") == []


# -- lspec alone --


def test_alone_it_says_what_to_type_first(tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path)}
    done = run(env=env)
    assert (done.returncode, done.stderr) == (0, "")
    commands = [line.split("  ")[1] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert commands[:2] == ["lspec pull", "lspec chat"]
    assert "1.61 GB" in done.stdout
    assert len(done.stdout.splitlines()) < 12


def test_pulled_pair_is_not_offered_for_pulling(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LSPEC_PAIR", raising=False)
    monkeypatch.setattr(store, "locate_pair", lambda pair: object())
    first_steps.show()
    out = capsys.readouterr().out
    assert "lspec pull" not in out
    assert out.splitlines()[2].startswith("  lspec chat")


def test_every_command_that_is_named_exists(capsys: pytest.CaptureFixture[str]) -> None:
    first_steps.show()
    named = [line.split()[1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert {name for name in named if not name.startswith("-")} <= set(COMMANDS)


def test_help_is_still_there() -> None:
    assert "Commands:" in run("--help").stdout

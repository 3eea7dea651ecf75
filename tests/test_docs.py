"""README and docs: commands are such as lspec has, programs compile, links lead somewhere."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from lspec import store
from lspec.cli import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGE_NAMES = [page.name for page in PAGES]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INLINE = re.compile(r"`((?:lspec|scripts/|\./scripts/)[^`…]*)`")


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language in languages:
            yield text


def commands(page: Path) -> Iterator[str]:
    """Yield the command lines of a page, those in running text included."""
    for text in blocks(page, "", "sh"):
        yield from text.replace("\\\n", " ").splitlines()
    yield from INLINE.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))


def words(line: str) -> list[str] | None:
    """Return what a shell would make of the last command of a line; None for no command."""
    try:
        parts = shlex.split(line.rpartition(" | ")[2], comments=True)
    except ValueError:  # a drawing, or a text with an apostrophe
        return None
    while parts and ("=" in parts[0] or parts[0] == "$"):
        del parts[0]
    return parts or None


LSPEC = [
    pytest.param(parts[1:], id=f"{page.name}: {line[:60]}")
    for page in PAGES
    for line in commands(page)
    if (parts := words(line)) and Path(parts[0]).name == "lspec" and "lspec[" not in parts[0]
]
SCRIPTS = [
    pytest.param(parts, id=f"{page.name}: {line[:60]}")
    for page in PAGES
    for line in commands(page)
    if (parts := words(line)) and parts[0].removeprefix("./").startswith("scripts/")
]


def parse(args: list[str]) -> None:
    """Let the command line read `args`, and do nothing."""
    if args and not args[0].startswith("-"):
        command = cli.get_command(click.Context(cli), args[0])
        assert command is not None, args[0]
        command.make_context(args[0], args[1:])


@pytest.mark.parametrize("args", LSPEC)
def test_command_is_one_that_lspec_has(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for word in args:
        if re.fullmatch(r"[\w-]+(\.\w+)+", word):
            Path(word).touch()  # a file of the reader
    parse(args)


def test_wrong_commands_are_noticed() -> None:
    with pytest.raises(AssertionError, match="chatt"):
        parse(["chatt"])
    with pytest.raises(click.UsageError):
        parse(["chat", "--gama", "4"])
    assert len(LSPEC) > 40
    assert len(SCRIPTS) > 10


@pytest.mark.parametrize("parts", SCRIPTS)
def test_script_is_there_and_knows_its_options(parts: list[str]) -> None:
    source = (ROOT / parts[0]).read_text(encoding="utf-8")
    for option in parts[1:]:
        assert not option.startswith("--") or f'"{option.partition("=")[0]}"' in source


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_programs_compile(page: Path) -> None:
    for number, text in enumerate(blocks(page, "python")):
        name = f"{page.name}, program {number}"
        compile(text, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        assert other.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.M)
            assert anchor in map(slug, headings), target


def slug(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.pair
def test_programs_of_the_readme_run(
    pair: store.PairFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("big.gguf").symlink_to(pair.target[0])
    Path("small.gguf").symlink_to(pair.draft[0])
    for number, text in enumerate(blocks(PAGES[0], "python")):
        exec(compile(text, f"README, program {number}", "exec"), {})

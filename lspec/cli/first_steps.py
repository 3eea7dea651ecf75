"""`lspec` without a command: what to type first."""

from __future__ import annotations

import click

from lspec import catalogue, store
from lspec.sizes import size_text


def show() -> None:
    """Print the first commands; the next one to type comes first."""
    pair = catalogue.load().pair()
    steps = [
        ("lspec chat", f"talk with {pair.title}"),
        ("lspec check", "what it can do on this machine"),
        ("lspec bench --limit 1", "measure whether drafting pays; takes minutes"),
        ("lspec serve", "OpenAI's API on this machine"),
        ("lspec ls", "other pairs"),
        ("lspec --help", "all commands"),
    ]
    if store.locate_pair(pair) is None:
        steps.insert(0, ("lspec pull", f"download the pair, {size_text(pair.size)}"))
    width = max(len(command) for command, _ in steps)
    click.echo("Run a large local model faster: a small one drafts, the large one verifies.\n")
    for command, text in steps:
        click.echo(f"  {command.ljust(width)}  {text}")

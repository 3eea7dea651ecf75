"""`lspec completion`, and what a shell can complete."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from lspec import catalogue
from lspec.errors import LspecError

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_LSPEC_COMPLETE"  # how click's script asks


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script by which a shell completes commands, options and pairs.

    \b
    bash   eval "$(lspec completion bash)" in ~/.bashrc
    zsh    eval "$(lspec completion zsh)" in ~/.zshrc
    fish   lspec completion fish > ~/.config/fish/completions/lspec.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    root = click.get_current_context().find_root()
    click.echo(kind(root.command, {}, "lspec", _VARIABLE).source())


def pair_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the catalogue's pairs that begin with `incomplete`."""
    try:
        names = catalogue.load().pairs
    except LspecError:  # a shell that completes is no place for it
        return []
    return [name for name in names if name.startswith(incomplete)]

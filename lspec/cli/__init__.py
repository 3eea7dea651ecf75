"""The `lspec` command. Each command is a module of its own, imported only when it is run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import click

import lspec
from lspec.cli.output import run_reporting_errors

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS = {
    "chat": ("lspec.cli.chat", "Chat with a pair in the terminal."),
    "generate": ("lspec.cli.generate", "Continue a text, without a chat template."),
    "serve": ("lspec.cli.serve", "Serve a pair to clients of OpenAI's API."),
    "pull": ("lspec.cli.models", "Download a matched pair and check it."),
    "ls": ("lspec.cli.models", "List the pairs of the catalogue and what is on disk."),
    "show": ("lspec.cli.models", "Show a pair: its files, sizes, hashes and licences."),
    "rm": ("lspec.cli.models", "Remove a pulled pair from the disk."),
    "check": ("lspec.cli.check", "Tell what a pair can do on this machine."),
    "bench": ("lspec.cli.bench", "Measure whether a pair pays on this machine."),
    "doctor": ("lspec.cli.doctor", "Tell what a bug report needs to say."),
    "completion": ("lspec.cli.completion", "Print the completion script of a shell."),
}


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which a newcomer needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of `cmd_name` and return its command; None if there is no such one."""
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table, without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return what a shell may complete, without importing any command."""
        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        from click.shell_completion import CompletionItem

        known = COMMANDS.items()
        return [
            CompletionItem(name, help=text)
            for name, (_, text) in known
            if name.startswith(incomplete)
        ]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of `args`; an unknown one is an error that names a close match."""
        if args and args[0] not in COMMANDS and ctx.resilient_parsing:  # a shell completes
            return None, None, args
        if args and args[0] not in COMMANDS:
            from difflib import get_close_matches

            close = get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(lspec.__version__, "-V", "--version", package_name="lspec")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run a large local model faster: a small one drafts, the large one verifies.

    The text has exactly the distribution of the large model alone.
    Start with: lspec chat
    """
    if ctx.invoked_subcommand is None:
        from lspec.cli.first_steps import show

        show()


def main() -> None:
    """Run the command line and exit with 0, 1 (failed), 2 (wrong usage) or 130 (interrupted)."""
    run_reporting_errors(cli)

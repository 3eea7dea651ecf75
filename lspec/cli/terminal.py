"""A person at a terminal: reading lines with history, multi-line input, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path

import click

from lspec.cli.answer import ending, show, stop_on_interrupt
from lspec.cli.output import note, report
from lspec.cli.session import Session
from lspec.errors import LspecError, RequestError
from lspec.request import Chunk, Completion

PROMPT, CONTINUED, FENCE = ">>> ", "... ", '"""'
_HISTORY_LINES = 1000


class Terminal:
    """The Screen of an interactive chat; `stats` says whether to show the line after answers."""

    def __init__(self, *, stats: bool) -> None:
        self._stats = stats

    def play(self, start: Callable[..., Iterator[Chunk]], *, colour: bool) -> Completion:
        """Stream an answer; Ctrl-C ends it and keeps what is there."""
        with stop_on_interrupt() as should_stop:
            done = show(start(should_stop=should_stop), colour=colour)
        click.echo()
        if end := ending(done):
            note(end)
        if self._stats:
            note(done.stats.line())
        return done

    def note(self, text: str) -> None:
        """Show a remark, dim, on stderr."""
        note(text)

    def error(self, error: LspecError) -> None:
        """Show an error and its hint on stderr."""
        report(error)

    def edit(self, text: str) -> str | None:
        """Open the user's editor on `text`."""
        try:
            return click.edit(text)
        except click.ClickException as error:
            raise RequestError(error.message, hint="Set EDITOR to an editor.") from None
        except UnicodeError:
            raise RequestError("the editor and lspec exchange UTF-8 only") from None
        except KeyboardInterrupt:  # an editor that takes Ctrl-C is not interrupted
            return None
        except (OSError, ValueError) as error:  # no room for its file, which may also be gone
            raise RequestError(f"the editor failed: {error}") from None


def converse(session: Session, *, history: Path) -> None:
    """Read and handle lines until /bye or Ctrl-D; Ctrl-C at the prompt drops the line."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a terminal may send what is no character
    with _line_editing(history):
        while True:
            try:
                if not session.handle(_read()):
                    return
            except EOFError:
                click.echo("\r\033[K", nl=False)  # some readlines have begun a new line, some not
                return
            except _Dropped:
                click.echo()
                note("Ctrl-D or /bye leaves.")


class _Dropped(Exception):
    """Ctrl-C while a line was being typed."""


def _read() -> str:
    """Read one message: a line, a pasted block, or what stands between two fences."""
    try:
        line = input(PROMPT)
        if not line.lstrip().startswith(FENCE):
            return line
        text = line.lstrip().removeprefix(FENCE)
        while not text.rstrip().endswith(FENCE):
            text += "\n" + input(CONTINUED)
        text = text.rstrip().removesuffix(FENCE)
        return f"/{text}" if text.startswith("/") else text  # never a command
    except KeyboardInterrupt:
        raise _Dropped from None


@contextmanager
def _line_editing(history: Path) -> Iterator[None]:
    """Give `input` editing and a history kept in a file that only its owner can read."""
    try:
        import readline
    except ImportError:  # a Python built without it: lines can still be typed
        yield
        return
    # A pasted block arrives as one line with its line ends inside.
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.set_auto_history(True)
    try:
        readline.read_history_file(history)
    except OSError:  # the first time
        readline.clear_history()
    try:
        yield
    finally:
        with suppress(OSError):  # a folder that cannot be written has no history
            readline.set_history_length(_HISTORY_LINES)
            history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(history, os.O_CREAT | os.O_WRONLY, 0o600))
            history.chmod(0o600)
            readline.write_history_file(history)

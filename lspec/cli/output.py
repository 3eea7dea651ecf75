"""What goes to stderr, and how an error becomes a sentence, a hint and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

import click
from click.core import ParameterSource

from lspec import errors
from lspec.arguments import as_options

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

# Subclass before class: the first row that fits gives the exit code and, where the error
# brings no hint of its own, the hint.
TABLE: tuple[tuple[type[errors.LspecError], int, str], ...] = (
    (errors.RequestError, EXIT_USAGE, ""),
    (errors.CatalogueError, EXIT_FAILED, "`lspec ls` lists the pairs."),
    (errors.DownloadError, EXIT_FAILED, "Run the same command again: what is verified is kept."),
    (errors.IncompatiblePairError, EXIT_FAILED, "Use a draft of the same model family."),
    (errors.ModelLoadError, EXIT_FAILED, ""),
    (errors.ContextOverflowError, EXIT_FAILED, "Shorten the prompt or raise --ctx."),
    (errors.LspecError, EXIT_FAILED, ""),
)


# Control characters but tab and line feed: a terminal would obey them. A carriage return says
# nothing that a line feed does not.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}
_CONTROL[ord("\r")] = ""


def visible(text: str) -> str:
    """Return `text` with what a terminal would obey written out, as in \\x1b."""
    return text.translate(_CONTROL)


def style(text: str, **styles: Any) -> str:
    """Return `text` styled for stderr, or plain where NO_COLOR is set or it is no terminal."""
    if os.environ.get("NO_COLOR") or not _obeys(sys.stderr):
        return text
    return click.style(text, **styles)


def _obeys(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that knows more than text."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def note(text: str) -> None:
    """Print one line on stderr, dim on a terminal."""
    click.echo(style(visible(text), dim=True), err=True)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show `text` on a terminal's stderr while something takes time; the next line replaces it."""
    shown = _obeys(sys.stderr)
    if shown:
        click.echo(f"{style(text, dim=True)}\r", err=True, nl=False)
    try:
        yield
    finally:
        if shown:
            click.echo("\033[K", err=True, nl=False)


def report(error: errors.LspecError) -> int:
    """Print the sentence and the hint of `error` on stderr; return the exit code."""
    code, hint = next((code, hint) for kind, code, hint in TABLE if isinstance(error, kind))
    told = as_options(str(error)) if isinstance(error, errors.RequestError) else str(error)
    _complain(told, as_options(error.hint or hint))
    return code


def _report_usage(error: click.ClickException) -> int:
    """Print what click has against a command line, in the same way; return the exit code."""
    hints = []
    if variable := _variable(error):
        hints.append(f"The value comes from the environment variable {variable}.")
    if isinstance(error, click.UsageError) and error.ctx:
        hints.append(f"`{error.ctx.command_path} --help` lists what can be given.")
    _complain(error.format_message(), "\n".join(hints))
    return error.exit_code


def _complain(sentence: str, hint: str) -> None:
    click.echo(f"{style('error:', fg='red', bold=True)} {visible(sentence)}", err=True)
    if hint:
        click.echo(visible(hint), err=True)


def run_reporting_errors(command: Callable[..., Any]) -> None:
    """Run a click command; every failure leaves as a sentence and an exit code.

    With LSPEC_DEBUG=1 an LspecError shows its traceback as well.
    """
    _require_streams()
    stdout = sys.stdout
    try:
        result = command(standalone_mode=False)
        code = result if isinstance(result, int) else 0
        sys.stdout.flush()
    except click.ClickException as error:
        code = _report_usage(error)
    except (click.Abort, KeyboardInterrupt):
        code = EXIT_INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and sys.stdout is stdout:
            raise  # else it is click's answer to a broken pipe, for which it wraps the stream
        # The reader went away (`| head`): point stdout at nothing so that the exit is quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        if os.environ.get("LSPEC_DEBUG"):
            raise
        code = report(errors.LspecError(f"the system refused: {error}", hint=_way_out(error)))
    except errors.LspecError as error:
        if os.environ.get("LSPEC_DEBUG"):
            raise
        code = report(error)
    sys.exit(code)


def _way_out(error: OSError) -> str:
    """Return what to do about a file or folder that the system will not give."""
    if error.filename is None:
        return ""
    return "Look at its owner and permissions, or name other folders: HF_HOME, XDG_CACHE_HOME."


def _variable(error: click.ClickException) -> object:
    """Return the environment variable that a refused value comes from; None if it was typed."""
    if not isinstance(error, click.BadParameter) or not error.ctx or not error.param:
        return None
    source = error.ctx.get_parameter_source(error.param.name or "")
    return error.param.envvar if source is ParameterSource.ENVIRONMENT else None


def _require_streams() -> None:
    """Stand in for streams that the caller has closed; never fail at a character of the answer."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")

"""Loading for a command: pulls what is missing, shows notices."""

from __future__ import annotations

import logging
from concurrent.futures import Executor
from functools import partial

import lspec
from lspec.arguments import as_options
from lspec.cli.answer import on_terminal, stop_on_interrupt
from lspec.cli.options import ModelChoice
from lspec.cli.output import note, waiting


class _Notices(logging.Handler):
    """Shows what the library has to say as remarks on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        note(f"note: {as_options(record.getMessage())}")


def show_notices() -> None:
    """Let what the library has to say appear as remarks on stderr."""
    log = logging.getLogger("lspec")
    log.handlers = [_Notices()]
    log.setLevel(logging.INFO if on_terminal() else logging.WARNING)


def load(models: ModelChoice, *, thread: Executor | None = None) -> lspec.Engine:
    """Load the chosen models; a pair of the catalogue is pulled first where it is missing.

    They are loaded in `thread` if one is given. It is where they should be used then: OpenMP keeps
    workers for each thread that it was ever called from, and waits less eagerly with more of them.
    """
    show_notices()
    if "target" not in models.load and "draft" not in models.load:
        from lspec.cli.models import pull_missing

        pull_missing(models.pair)
    # llama.cpp calls back into Python while it loads, where a KeyboardInterrupt would be lost.
    with stop_on_interrupt() as pressed, waiting("loading …"):
        start = partial(lspec.load, models.pair, **models.load, should_stop=pressed)
        engine = thread.submit(start).result() if thread else start()
    if pressed():
        engine.close()
        raise KeyboardInterrupt
    return engine

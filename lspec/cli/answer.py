"""Playing one answer: streaming it to stdout, Ctrl-C, JSON, the statistics line."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType

import click

from lspec.cli.output import EXIT_INTERRUPTED, note
from lspec.request import Chunk, Completion
from lspec.round import Source


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C into a flag that is read between passes; a second one raises as usual."""
    pressed = False

    def press(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            signal.default_int_handler(signum, frame)
        pressed = True

    previous = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous)


def show(chunks: Iterator[Chunk], *, colour: bool) -> Completion:
    """Write a stream to stdout as it comes, drafted tokens coloured if asked; return the whole."""
    colour = colour and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for chunk in chunks:
        for text, source in chunk.pieces:
            drafted = colour and source is not Source.TARGET
            click.echo(click.style(text, fg="green") if drafted else text, nl=False)
        sys.stdout.flush()
    assert chunk.completion is not None
    return chunk.completion


def answer_once(
    start: Callable[..., Iterator[Chunk]], *, as_json: bool, stats: bool | None, colour: bool
) -> int:
    """Play what `start(should_stop=...)` returns for a command that ends with it; exit code."""
    with stop_on_interrupt() as should_stop:
        chunks = start(should_stop=should_stop)
        if as_json:
            *_, last = chunks
            assert last.completion is not None
            completion = last.completion
            click.echo(to_json(completion))
        else:
            completion = show(chunks, colour=colour)
            if not completion.text.endswith("\n"):
                click.echo()
    if on_terminal() if stats is None else stats:
        note(completion.stats.line())
    return EXIT_INTERRUPTED if completion.finish_reason == "interrupted" else 0


def to_json(completion: Completion) -> str:
    """Return the object that --json prints."""
    logprobs = completion.logprobs
    return json.dumps(
        {
            "text": completion.text,
            "tokens": completion.tokens,
            "finish_reason": completion.finish_reason,
            **({"logprobs": list(map(asdict, logprobs))} if logprobs else {}),
            "stats": asdict(completion.stats),
        },
        ensure_ascii=False,
    )


def on_terminal() -> bool:
    """Return whether a person sits at both ends."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def read_prompt(prompt: str | None) -> str | None:
    """Return piped input followed by `prompt`; None where there is neither."""
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    if prompt is None:
        return piped or None
    return f"{piped.rstrip()}\n{prompt}" if piped.strip() else prompt

"""Playing one answer: streaming it to stdout, Ctrl-C, JSON, the statistics line."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from io import TextIOWrapper
from types import FrameType

import click

from lspec.cli.output import EXIT_INTERRUPTED, note, style, visible
from lspec.errors import RequestError
from lspec.request import Chunk, Completion
from lspec.round import Source

LEGEND = "drafted tokens are green"


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


class _Page:
    """Where an answer is written: what was thought dim, on stderr, and the answer on stdout.

    Thoughts are for the eye: they are left out where stdout is no terminal.
    """

    def __init__(self, *, colour: bool) -> None:
        self._terminal = sys.stdout.isatty()
        self._colour = colour and colours_answers()
        self._thinking = False

    def think(self, text: str) -> None:
        """Write a part of a thought."""
        if text and self._terminal:
            self._dim(text if self._thinking else f"<think>\n{text}")
            self._thinking = True

    def say(self, text: str, source: Source) -> None:
        """Write a part of the answer, coloured if it was drafted and colours are wanted."""
        if text:
            self.end_thought()
            drafted = self._colour and source is not Source.TARGET
            shown = visible(text) if self._terminal else text
            click.echo(click.style(shown, fg="green") if drafted else shown, nl=False)

    def end_thought(self) -> None:
        """Write the end of a thought if there is one open."""
        if self._thinking:
            self._dim("\n</think>\n\n")
            self._thinking = False

    def _dim(self, text: str) -> None:
        click.echo(style(visible(text), dim=True), err=True, nl=False)


def colours_answers() -> bool:
    """Return whether an answer can be coloured where it goes."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def show(chunks: Iterator[Chunk], *, colour: bool) -> Completion:
    """Write a stream as it comes, drafted tokens coloured if asked; return the whole."""
    page = _Page(colour=colour)
    for chunk in chunks:
        for split, source in chunk.parts:
            page.think(split.reasoning)
            page.say(split.answer, source)
        sys.stdout.flush()
    page.end_thought()
    completion = chunk.completion
    assert completion is not None
    unfinished = completion.finish_reason != "stop"
    if completion.reasoning and not completion.answer and unfinished:
        note("(it was still thinking)")
    return completion


def ending(done: Completion) -> str:
    """Return for those who watch how an answer ends, if not by itself."""
    if done.finish_reason == "length" and done.tokens:
        return f"(cut at {len(done.tokens)} tokens)"
    return "(interrupted)" if done.finish_reason == "interrupted" else ""


def remarks(done: Completion, *, n_ctx: int) -> Iterator[str]:
    """Yield what is to be said of an answer that ends otherwise than the model would have it."""
    if done.finish_reason == "length" and not done.tokens:
        yield "there is no answer: max-tokens is 0"
    elif done.finish_reason == "length" and done.stats.prompt_tokens + len(done.tokens) >= n_ctx:
        yield (f"the answer ends where the window of {n_ctx} tokens does: --ctx N makes it larger")


def answer_once(
    start: Callable[..., Iterator[Chunk]],
    *,
    n_ctx: int,
    as_json: bool,
    stats: bool | None,
    colour: bool,
) -> int:
    """Play what `start(should_stop=...)` returns for a command that ends with it; exit code.

    `n_ctx` is the engine's window.
    """
    if colour and colours_answers() and not as_json:
        note(LEGEND)
    with stop_on_interrupt() as should_stop:
        chunks = start(should_stop=should_stop)
        if as_json:
            *_, last = chunks
            assert last.completion is not None
            completion = last.completion
            click.echo(to_json(completion))
        else:
            completion = show(chunks, colour=colour)
            if not completion.answer.endswith("\n"):
                click.echo()
    watched = on_terminal() if stats is None else stats
    if watched and (end := ending(completion)):
        note(end)
    for remark in remarks(completion, n_ctx=n_ctx):
        note(remark)
    if watched:
        note(completion.stats.line())
    return EXIT_INTERRUPTED if completion.finish_reason == "interrupted" else 0


def to_json(completion: Completion) -> str:
    """Return the object that --json prints."""
    logprobs = completion.logprobs
    apart = {"reasoning": completion.reasoning, "answer": completion.answer}
    return json.dumps(
        {
            "text": completion.text,
            **(apart if completion.answer != completion.text else {}),
            "tokens": completion.tokens,
            "finish_reason": completion.finish_reason,
            "seed": completion.seed,
            **({"logprobs": list(map(asdict, logprobs))} if logprobs else {}),
            "stats": asdict(completion.stats),
        },
        ensure_ascii=False,
    )


def on_terminal() -> bool:
    """Return whether a person sits at both ends."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def no_prompt(what: str, pair: str | None) -> click.UsageError:
    """Return the error for a command without a prompt; `pair` may have been meant as one."""
    taken = f" {pair!r} was taken for the name of a pair." if pair else ""
    return click.UsageError(f"There is {what}: give -p TEXT, or pipe it in.{taken}")


def read_prompt(prompt: str | None) -> str | None:
    """Return piped input followed by `prompt`; None where there is neither. Raises RequestError."""
    piped = "" if sys.stdin.isatty() else _piped()
    if prompt is None:
        return piped or None
    return f"{piped.rstrip()}\n{prompt}" if piped.strip() else prompt


def _piped() -> str:
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")  # some environments let bytes through
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the piped input is not {error.encoding.upper()}: "
            f"there is a byte 0x{error.object[error.start]:02X} that begins no character",
            hint="Convert it first, as with: iconv -f LATIN1 -t UTF-8",
        ) from None

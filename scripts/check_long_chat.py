#!/usr/bin/env python
"""Hold a conversation that is several times longer than its window, on a real pair.

    scripts/check_long_chat.py [--ctx 1024] [--turns 30] [--max-tokens 48] [--target --draft]

Prints for each turn what was dropped, the tokens of the prompt, how many of them were reused, those
of the answer, and the memory of the process. Between two drops the whole prompt before must be
reused, no prompt may leave less room than the answer needs, and from the first drop on memory may
not grow by more than 16 MiB. In the end a message that is too long alone must be refused without
any harm. Exit code 1 if any of it fails.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

import click

import lspec
from lspec.cli.session import Session
from lspec.engine import Engine
from lspec.errors import LspecError
from lspec.request import Chunk, Completion

FILE = click.Path(exists=True, dir_okay=False)
MOST_GROWTH = 2**24
SYSTEM = "You are a patient teacher of programming. Answer in two or three sentences."
QUESTIONS = (
    "What is a list in Python?",
    "How does it differ from a tuple?",
    "Show me a short loop over one.",
    "What does `enumerate` do?",
    "When would you take a dictionary instead?",
    "What have we talked about so far?",
)


class Ledger:
    """A screen that prints one line for each turn, and what was wrong with it."""

    def __init__(self, engine: Engine, room: int) -> None:
        self.drops = self.turns = 0
        self.faults: list[str] = []
        self.error_seen: LspecError | None = None
        self._engine = engine
        self._room = room
        self._before = 0  # tokens of the prompt before
        self._said = ""
        self._memory: list[int] = []  # from the first drop on

    def play(self, start: Callable[..., Iterator[Chunk]], *, colour: bool) -> Completion:
        *_, last = start(should_stop=lambda: False)
        assert last.completion is not None
        self.turns += 1
        stats, memory = last.completion.stats, resident()
        prompt, reused = stats.prompt_tokens, stats.reused_tokens
        click.echo(
            f"{self.turns:4}  prompt {prompt:5}, reused {reused:5}, answer "
            f"{stats.generated_tokens:4}, {memory / 2**20:7.1f} MiB  {self._said}"
        )
        if not self._said and reused < self._before:
            self.faults.append(f"turn {self.turns}: {reused} of {self._before} tokens were reused")
        if prompt > self._engine.n_ctx - self._room:
            self.faults.append(f"turn {self.turns}: a prompt of {prompt} tokens")
        if self.drops:
            self._memory.append(memory)
        self._before, self._said = prompt, ""
        return last.completion

    def note(self, text: str) -> None:
        self.drops += 1
        self._said = text

    def error(self, error: LspecError) -> None:
        self.error_seen = error

    def edit(self, text: str) -> str | None:
        return None

    def growth(self) -> int:
        return max(self._memory) - self._memory[0] if self._memory else 0


def resident() -> int:
    command = ["ps", "-o", "rss=", "-p", str(os.getpid())]
    return 1024 * int(subprocess.run(command, capture_output=True, check=True).stdout)


@click.command()
@click.option("--target", type=FILE)
@click.option("--draft", type=FILE)
@click.option("--ctx", default=1024, show_default=True)
@click.option("--turns", default=30, show_default=True)
@click.option("--max-tokens", default=48, show_default=True)
def main(target: str | None, draft: str | None, ctx: int, turns: int, max_tokens: int) -> None:
    """Talk, look at each turn, and exit with 1 if anything was wrong."""
    with lspec.load(target=target, draft=draft, n_ctx=ctx) as engine:
        click.echo(engine.description)
        screen = Ledger(engine, max_tokens)
        options = {"max_tokens": max_tokens, "seed": 1}
        session = Session(engine, screen, options=options, system=SYSTEM, overflow="drop")
        for i in range(turns):
            session.handle(QUESTIONS[i % len(QUESTIONS)])
            if screen.error_seen:
                raise screen.error_seen
        session.handle("word " * 2 * ctx)
        click.echo(f"too long: {screen.error_seen}")
        session.handle("And in one word?")
    growth = screen.growth()
    click.echo(f"{screen.drops} drops in {screen.turns} turns")
    click.echo(f"memory grew by {growth / 2**20:.1f} MiB")
    faults = screen.faults
    faults += [] if isinstance(screen.error_seen, lspec.ContextOverflowError) else ["no error"]
    faults += [] if screen.turns == turns + 1 else ["a turn has no answer"]
    faults += [] if screen.drops else ["nothing was dropped: give more turns or a smaller --ctx"]
    faults += [] if growth <= MOST_GROWTH else ["memory grew"]
    for fault in faults:
        click.echo(f"FAULT: {fault}")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()

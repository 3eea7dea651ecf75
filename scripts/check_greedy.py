#!/usr/bin/env python
"""Check that greedy speculative text equals plain decoding, up to ties (case 2).

For every prompt and gamma: at the first token that differs, both runs are replayed pass by pass.
Each choice must be the argmax of its own row, and the gap between the two choices at most twice the
largest difference of the rows: then floating point, not the method, made the choice.

    scripts/check_greedy.py [--gammas 1,2,3,4,7,auto] [--prompts code-1,chat-1] [--max-tokens 96]
"""

from __future__ import annotations

from collections.abc import Sequence

import click
import numpy as np

import lspec
from lspec.engine import Engine
from lspec.model import FloatRow
from lspec.prompts import BUILT_IN, read
from lspec.request import Gamma
from lspec.round import Round


def run(engine: Engine, prompt: list[int], gamma: Gamma, max_tokens: int) -> list[Round]:
    """Return the rounds of a greedy answer, evaluated from scratch."""
    chunks = engine.stream(prompt, temperature=0.0, gamma=gamma, max_tokens=max_tokens, reuse=False)
    return [chunk.round for chunk in chunks if chunk.round]


def tokens(rounds: Sequence[Round]) -> list[int]:
    """Return what the rounds emitted."""
    return [token for round in rounds for token in round.tokens]


def row_at(engine: Engine, prompt: list[int], rounds: Sequence[Round], index: int) -> FloatRow:
    """Play the target's passes again and return the logits behind emitted token `index`."""
    target = engine.target
    target.truncate(0)
    target.catch_up(prompt[:-1])
    text = list(prompt)
    for round in rounds:
        # Later tokens of a pass do not change a row, only how many there are.
        filler = [0] * (round.width - len(round.tokens))
        rows = target.eval([text[-1], *round.tokens[:-1], *filler], rows=round.width)
        offset = index - (len(text) - len(prompt))
        if offset < len(round.tokens):
            return rows[offset].copy()
        text += round.tokens
        target.truncate(len(text) - 1)
    raise AssertionError("the token was not emitted")


def compare(engine: Engine, name: str, prompt: list[int], gamma: Gamma, max_tokens: int) -> bool:
    """Print how one speculative answer compares with the plain one; False if it is wrong."""
    plain, fast = (run(engine, prompt, g, max_tokens) for g in (0, gamma))
    a, b = tokens(plain), tokens(fast)
    label = f"{name} gamma {gamma}: {len(b)} tokens in {len(fast)} rounds"
    if a == b:
        click.echo(f"{label}, equal")
        return True
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if at is None:
        click.echo(f"{label}, WRONG: one is longer")
        return False
    rows = [row_at(engine, prompt, rounds, at) for rounds in (plain, fast)]
    chosen = [int(row.argmax()) == t[at] for row, t in zip(rows, (a, b), strict=True)]
    noise = float(np.abs(rows[0] - rows[1]).max())
    gap = max(float(rows[0][a[at]] - rows[0][b[at]]), float(rows[1][b[at]] - rows[1][a[at]]))
    tie = all(chosen) and gap <= 2 * noise
    verdict = "a tie" if tie else "WRONG"
    click.echo(f"{label}, differs at {at}: gap {gap:.4f}, rows differ by {noise:.4f}: {verdict}")
    return tie


@click.command()
@click.option("--gammas", default="1,2,3,4,7,auto")
@click.option("--prompts", default="", help="Ids, separated by commas (default: all).")
@click.option("--max-tokens", default=96)
@click.option("--drafter", default="auto", help="auto, model or ngram.")
@click.option("--target", type=click.Path())
@click.option("--draft", type=click.Path())
def main(
    gammas: str,
    prompts: str,
    max_tokens: int,
    drafter: str,
    target: str | None,
    draft: str | None,
) -> None:
    """Compare and exit with 1 if any answer is wrong."""
    wrong = 0
    with lspec.load(target=target, draft=draft, drafter=drafter) as engine:
        for case in read(BUILT_IN):
            if prompts and case.id not in prompts.split(","):
                continue
            prompt = engine.tokenize_chat(case.messages)
            for gamma in gammas.split(","):
                chosen = "auto" if gamma == "auto" else int(gamma)
                wrong += not compare(engine, case.id, prompt, chosen, max_tokens)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()

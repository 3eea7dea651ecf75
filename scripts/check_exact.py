#!/usr/bin/env python
"""Check that the text of exact mode is that of plain decoding, bit for bit, for every gamma.

    scripts/check_exact.py [--gammas 1,2,4,auto] [--temperatures 0,0.8] [--prompts code-1,chat-1]

Every prompt is decoded plainly and with each gamma, with the same seed and the whole vocabulary.
Every other run starts from what the last one left in the caches.
"""

from __future__ import annotations

import click

import lspec
from lspec.engine import Engine
from lspec.params import SamplingParams
from lspec.prompts import BUILT_IN, read
from lspec.request import Gamma


def compare(
    engine: Engine,
    name: str,
    prompt: list[int],
    gammas: list[Gamma],
    sampling: SamplingParams,
    max_tokens: int,
) -> int:
    """Print how each gamma compares with plain decoding; return how many differ."""

    def answer(gamma: Gamma, *, reuse: bool) -> lspec.Completion:
        return engine.generate(
            prompt, sampling=sampling, gamma=gamma, max_tokens=max_tokens, seed=1, reuse=reuse
        )

    plain = answer(0, reuse=False).tokens
    different = 0
    for i, gamma in enumerate(gammas):
        done = answer(gamma, reuse=i % 2 == 0)
        pairs = enumerate(zip(plain, done.tokens, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(done.tokens)))
        same = done.tokens == plain
        different += not same
        click.echo(
            f"{name} T={sampling.temperature:g} gamma {gamma}: {len(done.tokens)} tokens in "
            f"{done.stats.rounds} rounds, {'equal' if same else f'DIFFERS at {at}'}"
        )
    return different


@click.command()
@click.option("--gammas", default="1,2,3,4,7,auto", show_default=True)
@click.option("--temperatures", default="0,0.8", show_default=True)
@click.option("--prompts", default="", help="Ids, separated by commas (default: all).")
@click.option("--max-tokens", default=96, show_default=True)
@click.option("--drafter", default="auto", show_default=True, help="auto, model or ngram.")
@click.option("--target", type=click.Path())
@click.option("--draft", type=click.Path())
def main(
    gammas: str,
    temperatures: str,
    prompts: str,
    max_tokens: int,
    drafter: str,
    target: str | None,
    draft: str | None,
) -> None:
    """Compare and exit with 1 if any answer differs."""
    chosen: list[Gamma] = ["auto" if gamma == "auto" else int(gamma) for gamma in gammas.split(",")]
    kinds = [
        SamplingParams(temperature=float(temperature), top_k=0, top_p=1.0, min_p=0.0)
        for temperature in temperatures.split(",")
    ]
    compared = different = 0
    with lspec.load(target=target, draft=draft, drafter=drafter, exact=True) as engine:
        click.echo(engine.description)
        for case in read(BUILT_IN):
            if prompts and case.id not in prompts.split(","):
                continue
            prompt = engine.tokenize_chat(case.messages)
            for sampling in kinds:
                different += compare(engine, case.id, prompt, chosen, sampling, max_tokens)
                compared += len(chosen)
    click.echo(f"{compared} comparisons, {different} differ")
    raise SystemExit(1 if different else 0)


if __name__ == "__main__":
    main()

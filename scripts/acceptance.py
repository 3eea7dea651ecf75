#!/usr/bin/env python
"""Compare the rules of verification on real text: acceptance rate and tokens per round.

    scripts/acceptance.py [--temperatures 0.3,0.7,1] [--gamma 4|auto] [--max-tokens 96]

The rules keep the same law, so their texts differ and so does their luck. What does not depend on
luck is printed last: of the very proposals that rejection sampling judged, how many tokens it keeps
in the mean, and how many block verification would.

Beside the three rules of lspec stands sample-and-match, which other programs use: the draft takes
its likeliest token, the target samples, and a drafted token stands if the sample is the same. All
take turns prompt by prompt, without truncation, and with the same seeds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import click

import lspec
from lspec import prompts
from lspec.distribution import Distribution
from lspec.round import Proposal, Source, Verdict
from lspec.stats import Tally
from lspec.verify import RULES, RejectionRule

FILE = click.Path(exists=True, dir_okay=False)
OTHER = "sample-and-match"


class MatchRule(RejectionRule):
    """Sample-and-match: a chosen token stands with probability p(x), which is the same law."""

    def draw(self, q: Distribution, start: int, drafted: int) -> int:
        """Return the likeliest token."""
        best = int(q.weights.argmax())
        return best if q.ids is None else int(q.ids[best])

    def verify(self, proposal: Proposal, p: Callable[[int], Distribution], start: int) -> Verdict:
        """Judge the tokens as chosen ones."""
        return super().verify(Proposal.chosen(proposal.tokens, Source.DRAFT), p, start)


class Paired(RejectionRule):
    """Rejection sampling that also adds up what both rules keep of each proposal in the mean."""

    rejection = block = 0.0

    def verify(self, proposal: Proposal, p: Callable[[int], Distribution], start: int) -> Verdict:
        """Judge by rejection sampling."""
        product = r = 1.0
        for i, (token, q) in enumerate(zip(proposal.tokens, proposal.q, strict=True)):
            ratio = p(i).prob(token) / (1.0 if q is None else q.prob(token))
            product, r = product * min(1.0, ratio), min(1.0, r * ratio)
            Paired.rejection += product
            Paired.block += r
        return super().verify(proposal, p, start)


@click.command()
@click.option("--target", type=FILE)
@click.option("--draft", type=FILE)
@click.option("--temperatures", default="0.3,0.7,1")
@click.option("--gamma", default="4", show_default=True, help="A number, or auto.")
@click.option("--max-tokens", default=96, show_default=True)
@click.option("--limit", type=int, help="Prompts per category (default: all).")
def main(
    target: str | None,
    draft: str | None,
    temperatures: str,
    gamma: str,
    max_tokens: int,
    limit: int | None,
) -> None:
    """Print a row for each temperature and rule."""
    RULES[OTHER] = MatchRule  # type: ignore[index]
    RULES["rejection"] = Paired
    fixed: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "reuse": False}
    fixed |= {"gamma": gamma if gamma == "auto" else int(gamma), "max_tokens": max_tokens}
    chosen = prompts.select(prompts.read(prompts.BUILT_IN), limit=limit)
    with lspec.load(target=target, draft=draft, drafter="model") as engine:
        click.echo("| temperature | rule | acceptance rate | tokens per round | tok/s |")
        click.echo("|---|---|---|---|---|")
        for temperature in map(float, temperatures.split(",")):
            tallies: dict[str, Tally] = defaultdict(Tally)
            for seed, prompt in enumerate(chosen):
                for rule in RULES:
                    options = {**fixed, "temperature": temperature, "rule": rule, "seed": seed}
                    for chunk in engine.stream_chat(prompt.messages, **options):
                        if chunk.round is not None:
                            tallies[rule].add(chunk.round)
                        if chunk.completion is not None:
                            tallies[rule].total_s += chunk.completion.stats.total_s
                click.echo(f"{temperature:g}: {prompt.id}", err=True)
            more = Paired.block / Paired.rejection - 1
            Paired.block = Paired.rejection = 0.0
            for rule, tally in tallies.items():
                stats = tally.stats(generated_tokens=tally.emitted)
                click.echo(
                    f"| {temperature:g} | {rule} | {stats.acceptance_rate:.3f} "
                    f"| {stats.block_efficiency:.2f} | {stats.tokens_per_s:.1f} |"
                )
            click.echo(f"of the same proposals, block keeps {more:.1%} more", err=True)


if __name__ == "__main__":
    main()

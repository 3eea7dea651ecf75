#!/usr/bin/env python
"""Case 11: every sampler knob under speculation, on a real pair, against plain decoding.

    scripts/check_knobs.py [--samples 500] [--gamma 4] [--exact] [--target --draft]

Short samples of one prompt with temperature, truncation, penalties, a banned token and
log-probabilities. The banned token must never appear; the first and the second token must have the
same law with and without drafts (chi-square of two samples); log-probabilities must be those of
plain decoding for the same prefix, to 1e-3 in exact mode. Exit code 1 if any of it fails.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import click

import lspec

FILE = click.Path(exists=True, dir_okay=False)
MESSAGES = [{"role": "user", "content": "Name a colour and say in one sentence why you like it."}]
P_MIN = 1e-3
KNOBS: dict[str, Any] = {
    **{"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "repeat_penalty": 1.3},
    **{"max_tokens": 3, "logprobs": 3},
}


def p_value(one: Counter[int], other: Counter[int]) -> float:
    """Return how likely two samples of one law differ so much; rare tokens are pooled."""
    cells = [(one[t], other[t]) for t in one | other if one[t] + other[t] >= 10]
    rest = one.total() - sum(a for a, _ in cells), other.total() - sum(b for _, b in cells)
    cells += [rest] if sum(rest) else []
    ratio = math.sqrt(one.total() / other.total())
    x = sum((a / ratio - b * ratio) ** 2 / (a + b) for a, b in cells)
    degrees = len(cells) - 1
    if degrees < 1:
        return 1.0
    # Wilson and Hilferty's normal approximation of the chi-square tail.
    z = ((x / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


@click.command()
@click.option("--target", type=FILE)
@click.option("--draft", type=FILE)
@click.option("--samples", default=500, show_default=True)
@click.option("--gamma", default=4, show_default=True)
@click.option("--exact", is_flag=True)
def main(target: str | None, draft: str | None, samples: int, gamma: int, exact: bool) -> None:
    """Sample with and without drafts in turn, and compare."""
    failed = False
    with lspec.load(target=target, draft=draft, n_ctx=512, exact=exact) as engine:
        likely = engine.chat(MESSAGES, **{**KNOBS, "temperature": 0.0}).tokens[0]
        knobs = {**KNOBS, "logit_bias": {likely: -math.inf}}
        texts: dict[int, list[tuple[int, ...]]] = {0: [], gamma: []}
        logprobs: dict[int, dict[tuple[int, ...], float]] = {0: {}, gamma: {}}
        for seed in range(samples):
            for g, collected in texts.items():
                done = engine.chat(MESSAGES, seed=seed + 10**6 * bool(g), gamma=g, **knobs)
                collected.append(done.tokens)
                for i, item in enumerate(done.logprobs):
                    logprobs[g][done.tokens[: i + 1]] = item.logprob
        banned = sum(likely in tokens for of_side in texts.values() for tokens in of_side)
        click.echo(f"banned token {likely}: seen {banned} times")
        failed |= banned > 0
        for n in (1, 2):
            heads = [
                Counter(t[n - 1] for t in of_side if len(t) >= n) for of_side in texts.values()
            ]
            p = p_value(*heads)
            click.echo(f"token {n}: {len(heads[0] | heads[1])} different ones, p = {p:.3f}")
            failed |= p < P_MIN
        shared = logprobs[0].keys() & logprobs[gamma].keys()
        apart = max(abs(logprobs[0][key] - logprobs[gamma][key]) for key in shared)
        click.echo(f"log-probabilities of {len(shared)} prefixes: at most {apart:.2g} apart")
        failed |= exact and apart > 1e-3
    raise SystemExit(failed)


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""What exact mode costs: the same prompts in default and in exact mode, in turn.

    scripts/bench_exact.py [--temperature 0] [--max-tokens 96] [--limit N] [--target --draft]

Both engines are loaded side by side (llama.cpp maps the same file once). Plain decoding and gamma
"auto" of both modes take turns prompt by prompt.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median

import click

import lspec
from lspec import prompts

FILE = click.Path(exists=True, dir_okay=False)


@click.command()
@click.option("--target", type=FILE)
@click.option("--draft", type=FILE)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--max-tokens", default=96, show_default=True)
@click.option("--limit", type=int, help="Prompts per category (default: all).")
def main(
    target: str | None, draft: str | None, temperature: float, max_tokens: int, limit: int | None
) -> None:
    """Print tokens per second of each mode, median of the prompts, and of total time."""
    with (
        lspec.load(target=target, draft=draft, n_ctx=2048) as default,
        lspec.load(target=target, draft=draft, n_ctx=2048, exact=True) as exact,
    ):
        sides: dict[str, tuple[lspec.Engine, int | str]] = {
            "default, plain": (default, 0),
            "default, auto": (default, "auto"),
            "exact, plain": (exact, 0),
            "exact, auto": (exact, "auto"),
        }
        runs: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for prompt in prompts.select(prompts.read(prompts.BUILT_IN), limit=limit):
            for name, (engine, gamma) in sides.items():
                stats = engine.chat(
                    prompt.messages,
                    gamma=gamma,  # type: ignore[arg-type]
                    temperature=temperature,
                    max_tokens=max_tokens,
                    reuse=False,
                    seed=1,
                ).stats
                runs[name].append((stats.generated_tokens, stats.total_s))
            click.echo(prompt.id, err=True)
    click.echo("mode\tmedian tok/s\ttok/s of all")
    for name, of_prompts in runs.items():
        whole = sum(n for n, _ in of_prompts) / sum(s for _, s in of_prompts)
        click.echo(f"{name}\t{median(n / s for n, s in of_prompts):.1f}\t{whole:.2f}")


if __name__ == "__main__":
    main()

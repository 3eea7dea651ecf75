#!/usr/bin/env python
"""Compare the speed of a pair through the server, for one client, with the engine's own.

The engine and a server each hold the pair, and answer the same prompts in turn, in changing order.
Seconds are those of a whole answer, from the question to its end. The time to the first token is
the client's.

    scripts/bench_server.py [--limit 6] [--max-tokens 96] [--gamma 4]
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click

import lspec
from lspec import catalogue, store
from lspec.prompts import BUILT_IN, Prompt, read
from lspec.request import Gamma

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from serving import Server, serving


def by_engine(engine: lspec.Engine, prompt: Prompt, limit: int, gamma: Gamma) -> tuple[int, float]:
    """Return the tokens and the seconds of an answer."""
    started = perf_counter()
    done = engine.chat(prompt.messages, temperature=0.0, max_tokens=limit, gamma=gamma, reuse=False)
    return done.stats.generated_tokens, perf_counter() - started


def by_server(server: Server, prompt: Prompt, limit: int, gamma: Gamma) -> tuple[int, float, float]:
    """Return the tokens and the seconds of an answer, and the seconds to its first token."""
    body: dict[str, Any] = {"messages": list(prompt.messages), "temperature": 0}
    body |= {"max_tokens": limit, "gamma": gamma, "cache_prompt": False, "stream": True}
    request = urllib.request.Request(
        server.url + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    started, first, tokens = perf_counter(), 0.0, 0
    with urllib.request.urlopen(request) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if not first and event["choices"][0]["delta"].get("content"):
                first = perf_counter() - started
            if "timings" in event:
                tokens = event["timings"]["predicted_n"]
    return tokens, perf_counter() - started, first


@click.command()
@click.option("--limit", default=6, show_default=True, help="Prompts.")
@click.option("--max-tokens", default=96, show_default=True)
@click.option("--gamma", default=4, show_default=True)
def main(limit: int, max_tokens: int, gamma: int) -> None:
    """Measure, and print tokens per second of both and their ratio."""
    files = store.locate_pair(catalogue.load().pair(None))
    if files is None:
        raise click.ClickException("the default pair is not here: lspec pull")
    own, served, firsts = [], [], []
    with lspec.load(gamma=gamma) as engine, serving(files.target[0], files.draft[0]) as server:
        for i, prompt in enumerate(read(BUILT_IN)[:limit]):
            for engines_turn in (True, False) if i % 2 else (False, True):
                if engines_turn:
                    own.append(by_engine(engine, prompt, max_tokens, gamma))
                else:
                    *taken, first = by_server(server, prompt, max_tokens, gamma)
                    served.append(taken)
                    firsts.append(first)
    rates = [sum(n for n, _ in side) / sum(s for _, s in side) for side in (own, served)]
    click.echo(f"engine {rates[0]:.2f} tok/s, server {rates[1]:.2f} tok/s")
    click.echo(
        f"ratio {rates[1] / rates[0]:.3f}, first token after {median(firsts):.2f} s (median)"
    )


if __name__ == "__main__":
    main()

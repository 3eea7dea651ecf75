#!/usr/bin/env python
"""Time the sampling of real rows of logits: lspec's core against llama.cpp's sampler chain.

Both start from the logits of the same pass and end with a token. llama_sampler_sample fills an
array of candidates and applies the chain to it; lspec builds a distribution and draws from it.

    scripts/bench_sampling.py [--target FILE.gguf] [--text TEXT] [--text TEXT] [--repeats 300]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any

import click
import llama_cpp as lib

import lspec
from lspec.llama import LlamaModel
from lspec.model import FloatRow
from lspec.params import SamplingParams
from lspec.sampling import ChainSampler
from lspec.verify import Noise, Purpose

SEED = 1
TEXTS = (  # where many tokens may follow, and where one stands out
    "Once upon a time, there was a lighthouse keeper who",
    "one two three four five six seven eight one two three four five six seven",
)


@dataclass(frozen=True)
class Setting:
    """One way to sample on both sides; `most` is the largest time allowed, in llama.cpp's."""

    name: str
    params: SamplingParams
    most: float


SETTINGS = (
    Setting("greedy", SamplingParams(temperature=0.0), 0.2),
    Setting("top-k 40, top-p .95, min-p .05, temp .8", SamplingParams(0.8, 40, 0.95, 0.05), 1.2),
    Setting("temp .8 only", SamplingParams(0.8, top_k=0, top_p=1.0, min_p=0.0), 0.35),
)


def llama_chain(params: SamplingParams) -> Any:
    """Return llama.cpp's sampler chain for `params`; what is off is left out."""
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    parts = [lib.llama_sampler_init_greedy()]
    if params.temperature > 0:
        parts = [lib.llama_sampler_init_top_k(params.top_k)] if params.top_k else []
        if params.top_p < 1:
            parts.append(lib.llama_sampler_init_top_p(params.top_p, 1))
        if params.min_p > 0:
            parts.append(lib.llama_sampler_init_min_p(params.min_p, 1))
        parts.append(lib.llama_sampler_init_temp(params.temperature))
        parts.append(lib.llama_sampler_init_dist(SEED))
    for part in parts:
        lib.llama_sampler_chain_add(chain, part)
    return chain


def lspec_side(row: FloatRow, params: SamplingParams) -> Callable[[], int]:
    """Return a function that samples from `row` as a round of the decoder does."""
    sampler, noise, positions = ChainSampler(params, n_vocab=len(row)), Noise(SEED), count()

    def sample() -> int:
        position = next(positions)
        u = noise.uniform(position, position, Purpose.EMIT)
        return sampler.distribution(row).draw(u)

    return sample


def compare(model: LlamaModel, row: FloatRow, setting: Setting, repeats: int) -> bool:
    """Print the medians of both sides and their ratio; False if it is above what is allowed."""
    chain = llama_chain(setting.params)
    theirs = partial(lib.llama_sampler_sample, chain, model._context, -1)
    ours = lspec_side(row, setting.params)
    times: dict[Callable[[], int], list[float]] = {ours: [], theirs: []}
    for _ in range(repeats + 10):
        for side, seconds in times.items():
            started = perf_counter()
            token = side()
            seconds.append(perf_counter() - started)
            if setting.params.temperature == 0:
                assert token == int(row.argmax())
    lib.llama_sampler_free(chain)
    our_us, their_us = (median(seconds[10:]) * 1e6 for seconds in times.values())
    ratio = our_us / their_us
    met = ratio <= setting.most
    click.echo(
        f"{setting.name:40}  lspec {our_us:7.1f} us  llama.cpp {their_us:7.1f} us  "
        f"ratio {ratio:5.2f}  at most {setting.most:.2f}: {'met' if met else 'MISSED'}"
    )
    return met


def compare_all(model: LlamaModel, text: list[int], repeats: int) -> bool:
    """Compare every setting on the row after `text`; False if a bar is missed."""
    model.truncate(0)
    row = model.eval(text, rows=1)[0]
    draw = lspec_side(row, SamplingParams(0.8, 0, 1.0, 0.0))
    click.echo(
        f"one row of {model.vocab.size} logits, {len(row)} of them tokens; "
        f"{len({draw() for _ in range(100)})} different tokens in 100 draws"
    )
    met = [compare(model, row, setting, repeats) for setting in SETTINGS]
    return all(met)


@click.command()
@click.option("--target", type=click.Path(), help="A GGUF file (default: the default pair's).")
@click.option("--text", "texts", multiple=True, default=TEXTS, help="The row is the one after it.")
@click.option("--repeats", default=300)
def main(target: str | None, texts: tuple[str, ...], repeats: int) -> None:
    """Compare all settings and exit with 1 if a bar is missed."""
    with lspec.load(target=target, drafter="none", n_ctx=256) as engine:
        model = engine.target.model
        assert isinstance(model, LlamaModel)
        results = [compare_all(model, engine.tokenize(text), repeats) for text in texts]
    raise SystemExit(0 if all(results) else 1)


if __name__ == "__main__":
    main()

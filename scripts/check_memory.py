#!/usr/bin/env python
"""Check that the memory plan is within a tenth of what loading and decoding a pair really takes.

    scripts/check_memory.py [--target FILE --draft FILE] [--windows 2048,16384] [--kv f16,q8_0]

Each window and type of cache is loaded in a process of its own, which reads a long prompt and
writes a few tokens; its peak of resident memory is compared with the plan. On the CPU, on Linux.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
from pathlib import Path

import click

import lspec
from lspec.llama import LoadOptions
from lspec.loading import locate
from lspec.planning import Planner
from lspec.prompts import BUILT_IN, read
from lspec.round import MAX_GAMMA

PROMPT, ANSWER = 1024, 32  # tokens; llama.cpp has touched the whole cache before the first one
MOST = 0.10


def peak_bytes(target: str, draft: str, n_ctx: int, kv_type: str) -> int:
    """Load the pair, decode, and return the most memory that this process has held."""
    text = "\n".join(m["content"] for prompt in read(BUILT_IN) for m in prompt.messages)
    with lspec.load(
        target=target, draft=draft, n_ctx=n_ctx, kv_type=kv_type, n_gpu_layers=0, gamma=4
    ) as engine:
        ids = engine.tokenize(text)
        prompt = (ids * (PROMPT // len(ids) + 1))[:PROMPT]
        engine.generate(prompt, max_tokens=ANSWER, temperature=0.0)
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


@click.command()
@click.option("--target", type=click.Path(exists=True))
@click.option("--draft", type=click.Path(exists=True))
@click.option("--windows", default="2048,16384", show_default=True)
@click.option("--kv", default="f16,q8_0", show_default=True)
def main(target: str | None, draft: str | None, windows: str, kv: str) -> None:
    """Compare plans with peaks; exit 1 if one is off by more than a tenth."""
    targets, drafts = locate(None, target, draft)
    planner = Planner(targets, drafts)
    worst = 0.0
    click.echo("window   cache  planned  measured  difference")
    for n_ctx in map(int, windows.split(",")):
        for kv_type in kv.split(","):
            options = LoadOptions(n_ctx, MAX_GAMMA + 1, n_gpu_layers=0, kv_type=kv_type)
            planned = planner.outlook(options).plan.host
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                measured = pool.apply(peak_bytes, (str(targets[0]), str(drafts[0]), n_ctx, kv_type))
            off = planned / measured - 1
            worst = max(worst, abs(off))
            sizes = f"{planned / 1e9:4.2f} GB   {measured / 1e9:4.2f} GB"
            click.echo(f"{n_ctx:6}   {kv_type:5}  {sizes}  {off:+.1%}")
    sys.exit(worst > MOST)


if __name__ == "__main__":
    main()

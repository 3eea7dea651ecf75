#!/usr/bin/env python
"""Compare lspec with its peers: the same files, prompts, token counts, threads and temperature.

    scripts/bench_peers.py --llama-server PATH --target BIG.gguf --draft SMALL.gguf

Sides: lspec (gamma auto), lspec plain, `llama_cpp.Llama` plain, and llama-server with a draft at
several draft lengths, alone and with its n-gram drafting. All take turns prompt by prompt, so that
a machine which gets slower while it works favours nobody. Each side's own decode time counts. All
settings of llama-server at once take long: find the best on a few prompts (--limit 1), then give
that one with --types and --n-max for the whole set.

llama-server of the very same llama.cpp: unpack llama-cpp-python's source distribution, then
`cmake -B build vendor/llama.cpp && cmake --build build --target llama-server`.
"""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

import click
import llama_cpp

import lspec
from lspec import prompts
from lspec.machine import usable_cores

FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
N_CTX = 2048

# A side takes token ids and returns (emitted tokens, seconds of decoding).
Side = Callable[[list[int]], tuple[int, float]]


def lspec_side(engine: lspec.Engine, gamma: Any, options: dict[str, Any]) -> Side:
    """Return lspec with `gamma`."""

    def play(prompt: list[int]) -> tuple[int, float]:
        stats = engine.generate(prompt, gamma=gamma, reuse=False, **options).stats
        return stats.generated_tokens, stats.total_s

    return play


def llama_side(target: Path, temperature: float, max_tokens: int, threads: int) -> Side:
    """Return llama-cpp-python's own class; it alone would take half of the cores."""
    model = llama_cpp.Llama(
        str(target), n_ctx=N_CTX, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    truncation = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} if temperature else {}

    def play(prompt: list[int]) -> tuple[int, float]:
        model.reset()
        count, first = 0, 0.0
        for token in model.generate(prompt, temp=temperature, repeat_penalty=1.0, **truncation):
            count += 1
            first = first or time.perf_counter()
            if token == model.token_eos() or count == max_tokens:
                break
        return count - 1, time.perf_counter() - first

    return play


def server_side(port: int, temperature: float, max_tokens: int) -> Side:
    """Return a running llama-server."""
    fixed = {"n_predict": max_tokens, "temperature": temperature, "cache_prompt": False, "seed": 1}
    if temperature:
        fixed |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}

    def play(prompt: list[int]) -> tuple[int, float]:
        timings = ask(port, "/completion", {**fixed, "prompt": prompt})["timings"]
        return timings["predicted_n"], timings["predicted_ms"] / 1000

    return play


def ask(port: int, path: str, body: dict[str, Any] | None) -> Any:
    """Send one request to a server on this machine."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


@contextmanager
def server(command: list[str]) -> Iterator[int]:
    """Run llama-server on a free port until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)], **quiet
    ) as running:
        try:
            for _ in range(600):
                try:
                    ask(port, "/health", None)
                    break
                except OSError:
                    if running.poll() is not None:
                        raise click.ClickException(f"ended at once: {' '.join(command)}") from None
                    time.sleep(0.2)
            yield port
        finally:
            running.terminate()


def server_commands(
    path: Path, target: Path, draft: Path, threads: int, settings: list[tuple[str, str]]
) -> dict[str, list[str]]:
    """Return the command of llama-server for each setting (--spec-type, --spec-draft-n-max)."""
    common = [str(path), "-m", str(target), "-md", str(draft), "-c", str(N_CTX), "-np", "1"]
    common += ["-t", str(threads), "-tb", str(threads), "--no-webui"]
    return {
        f"llama-server {kinds} n-max {n}": [*common, "--spec-type", kinds, "--spec-draft-n-max", n]
        for kinds, n in settings
    }


@click.command()
@click.option("--llama-server", "server_path", type=FILE)
@click.option("--target", type=FILE, required=True)
@click.option("--draft", type=FILE, required=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--max-tokens", type=int, default=128, show_default=True)
@click.option("--repeats", type=int, default=1, show_default=True)
@click.option("--limit", type=int, help="Prompts per category (default: all).")
@click.option("--types", multiple=True, default=("draft-simple", "ngram-simple,draft-simple"))
@click.option("--n-max", multiple=True, default=("2", "3", "4", "6"))
def main(
    server_path: Path | None,
    target: Path,
    draft: Path,
    temperature: float,
    max_tokens: int,
    repeats: int,
    limit: int | None,
    types: tuple[str, ...],
    n_max: tuple[str, ...],
) -> None:
    """Print tokens per second of each side, overall and by category."""
    threads = usable_cores()
    options: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens, "seed": 1}
    if temperature:
        options |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        engine = stack.enter_context(lspec.load(target=target, draft=draft, gamma="auto"))
        sides = {
            "lspec auto": lspec_side(engine, "auto", options),
            "lspec plain": lspec_side(engine, 0, options),
            "llama_cpp.Llama plain": llama_side(target, temperature, max_tokens, threads),
        }
        if server_path:
            settings = list(itertools.product(types, n_max))
            commands = server_commands(server_path, target, draft, threads, settings)
            for name, command in commands.items():
                port = stack.enter_context(server(command))
                sides[name] = server_side(port, temperature, max_tokens)
        for _ in range(repeats):
            for prompt in prompts.select(prompts.read(prompts.BUILT_IN), limit=limit):
                ids = engine.tokenize_chat(prompt.messages)
                for name, play in sides.items():
                    count, seconds = play(ids)
                    click.echo(f"{prompt.id}: {name} {count} tokens, {seconds:.2f} s", err=True)
                    if count > 1:
                        rates[name][prompt.category].append(count / seconds)
    categories = list(next(iter(rates.values())))
    click.echo("\t".join(["tok/s", *categories, "mean of prompts"]))
    for name, by_category in rates.items():
        every = [rate for rates_of in by_category.values() for rate in rates_of]
        cells = [f"{median(by_category[c]):.1f}" for c in categories]
        click.echo("\t".join([name, *cells, f"{mean(every):.2f}"]))


if __name__ == "__main__":
    main()

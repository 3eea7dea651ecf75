#!/usr/bin/env python
"""Check offload, exactness and speed on a machine with a GPU, in under three minutes.

    scripts/gpu_check.py [-o result.json] [--folder FOLDER]

It writes its own models with random weights (6 GB in a temporary folder, or in FOLDER, where they
stay), loads a 1.5B with a 0.1B and a 7B with a 0.5B, and prints one JSON object. Exit code 0: all
is well; 1: something is wrong, or no GPU can be used, and why. Needs the package gguf.
--small takes tiny models, --cpu does without a GPU: together they try this script itself.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import click
import numpy as np
from check_greedy import row_at, run, tokens
from random_models import SHAPES, Shape, write

import lspec
from lspec.check import predict
from lspec.cli.offload import lines
from lspec.costs import Costs, measure
from lspec.engine import Engine
from lspec.llama import LlamaModel, LoadOptions, can_offload, gpus
from lspec.offload import survey as survey_build
from lspec.params import SamplingParams
from lspec.round import MAX_GAMMA
from lspec.selfcheck import best, survey

PAIRS = (("1.5B", "0.1B"), ("7B", "0.5B"))
SMALL = (("small", "tiny"),)
GAMMA, TOKENS, REPEATS, WINDOW = 4, 128, 3, 2048
DISK_BYTES = 7_000_000_000
ON_GPU = 0.6  # of a file's bytes: the embeddings stay in the machine's memory
WHOLE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


class Check:
    """One pair: a target and a draft, on the GPU or, to try the script, on the CPU."""

    def __init__(self, target: Path, draft: Path, shape: Shape, *, cpu: bool) -> None:
        self.target, self.draft, self.cpu = target, draft, cpu
        first = shape.vocabulary // 3
        self.prompt = list(range(first, first + 32))
        self.options = LoadOptions(WINDOW, MAX_GAMMA + 1, n_gpu_layers=0 if cpu else -1)

    def result(self) -> dict[str, Any]:
        """Return all that was found; `ok` is False where something is wrong."""
        with self.models() as (models, offload):
            costs = measure(*models, budget_s=6.0, repeats=30)
        with self.engine() as engine:
            greedy = self.greedy(engine)
            speed = [self.speed(engine, costs, temperature) for temperature in (0.0, 1.0)]
        exact = self.exact()
        return {
            "target": self.target.stem,
            "draft": self.draft.stem,
            "offload": offload,
            "costs": {
                "target_ms": [1e3 * s for s in costs.target],
                "draft_ms": [1e3 * s for s in costs.draft or ()],
                "cost_coefficient": costs.cost_coefficient,
                "verify_cost": [costs.verify_cost(gamma) for gamma in range(MAX_GAMMA + 1)],
            },
            "predictions": [asdict(prediction) for prediction in predict(costs)],
            "greedy": greedy,
            "speed": speed,
            "exact": exact,
            "ok": offload["ok"] and greedy["ok"] and exact["equal"] is not False,
        }

    @contextmanager
    def models(self) -> Iterator[tuple[tuple[LlamaModel, LlamaModel], dict[str, Any]]]:
        """Load both, and tell what that takes of the GPU."""
        size = self.target.stat().st_size + self.draft.stat().st_size
        before = free_bytes()
        with ExitStack() as stack:
            target = LlamaModel([self.target], self.options)
            stack.callback(target.close)
            draft = LlamaModel([self.draft], self.options)
            stack.callback(draft.close)
            taken = before - free_bytes()
            devices = [target.device, draft.device]
            whole = all(device == "on the GPU" for device in devices) and taken > ON_GPU * size
            offload = {"devices": devices, "weights": size, "taken": taken, "ok": self.cpu or whole}
            yield (target, draft), offload

    def engine(self, **options: Any) -> Engine:
        """Load both as a user does."""
        layers = self.options.n_gpu_layers
        return lspec.load(
            target=self.target, draft=self.draft, n_ctx=WINDOW, n_gpu_layers=layers, **options
        )

    def greedy(self, engine: Engine) -> dict[str, Any]:
        """Compare greedy text with plain decoding; where they part it must be a tie."""
        plain, fast = (run(engine, self.prompt, gamma, TOKENS) for gamma in (0, GAMMA))
        a, b = tokens(plain), tokens(fast)
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is None:
            return {"equal": a == b, "tokens": len(b), "rounds": len(fast), "ok": a == b}
        rows = [row_at(engine, self.prompt, rounds, at) for rounds in (plain, fast)]
        moved = float(np.abs(rows[0] - rows[1]).max())
        gaps = (rows[0][a[at]] - rows[0][b[at]], rows[1][b[at]] - rows[1][a[at]])
        tie = float(max(gaps)) <= 2 * moved
        return {
            "equal": False,
            "differs_at": at,
            "gap": float(max(gaps)),
            "moved": moved,
            "ok": tie,
        }

    def speed(self, engine: Engine, costs: Costs, temperature: float) -> dict[str, Any]:
        """Time plain and speculative decoding in turn; the gain that costs predict beside it."""
        sampling = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
        rates: dict[int, list[float]] = {0: [], GAMMA: []}
        for seed in range(REPEATS + 1):
            for gamma, found in rates.items():
                done = engine.generate(
                    self.prompt, sampling=sampling, gamma=gamma, max_tokens=TOKENS, seed=seed
                )
                if seed:  # the first one warms up
                    found.append(done.stats.tokens_per_s or 0.0)
        stats, c = done.stats, costs.cost_coefficient
        plain, fast = median(rates[0]), median(rates[GAMMA])
        predicted = None
        if c is not None and stats.block_efficiency:
            predicted = stats.block_efficiency / (GAMMA * c + costs.verify_cost(GAMMA))
        return {
            "temperature": temperature,
            "gamma": GAMMA,
            "plain_tokens_per_s": plain,
            "tokens_per_s": fast,
            "speedup": fast / plain if plain else None,
            "predicted": predicted,
            "acceptance_rate": stats.acceptance_rate,
            "block_efficiency": stats.block_efficiency,
        }

    def exact(self) -> dict[str, Any]:
        """Find the widths that agree, and compare exact mode's text with and without drafting."""
        found = survey([self.target], self.options, announce=say) or []
        choice = best(found)
        result = {
            "widths": [asdict(findings) for findings in found],
            "choice": choice and asdict(choice),
            "equal": None,
        }
        if choice:
            with self.engine(exact=True) as engine:
                plain, fast = (
                    engine.generate(
                        self.prompt, sampling=WHOLE, gamma=gamma, max_tokens=TOKENS, seed=1
                    ).tokens
                    for gamma in (0, GAMMA)
                )
            result["equal"] = plain == fast
        return result


def free_bytes() -> int:
    """Return what is free of all GPUs."""
    return sum(gpu.memory_free for gpu in gpus())


def say(text: str) -> None:
    """Print a line on stderr."""
    click.echo(text, err=True)


def written(folder: Path, name: str) -> Path:
    """Return the model of that shape, written unless it is there."""
    path = folder / f"random-{name}.gguf"
    if not path.exists():
        say(f"writing {path.name}")
        write(path.with_suffix(".partial"), SHAPES[name]).rename(path)
    return path


def check_all(folder: Path, *, small: bool, cpu: bool) -> list[dict[str, Any]]:
    """Check all pairs, with models in `folder`."""
    if not small and shutil.disk_usage(folder).free < DISK_BYTES:
        raise click.ClickException(f"the models take {DISK_BYTES / 1e9:.0f} GB in {folder}")
    # What is remembered of these models is worth nothing later.
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    results = []
    for target, draft in SMALL if small else PAIRS:
        files = [written(folder, name) for name in (target, draft)]
        say(f"checking {target} with {draft}")
        try:
            results.append(Check(*files, SHAPES[target], cpu=cpu).result())
        except lspec.LspecError as error:  # a GPU that is too small, for one
            results.append({"target": target, "draft": draft, "problem": str(error), "ok": False})
    return results


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the JSON there.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--small", is_flag=True, help="Tiny models.")
@click.option("--cpu", is_flag=True, help="Without a GPU.")
def main(output: Path | None, folder: Path | None, small: bool, cpu: bool) -> None:
    """Check, print, and exit with 1 if something is wrong."""
    started = perf_counter()
    build = survey_build()
    result: dict[str, Any] = {"lspec": lspec.__version__, "build": asdict(build)}
    result["usable"] = bool(build.gpus) or can_offload()
    say("\n".join(lines(build)))
    if result["usable"] or cpu:
        with ExitStack() as stack:
            place = folder or Path(stack.enter_context(TemporaryDirectory(prefix="lspec-gpu-")))
            place.mkdir(parents=True, exist_ok=True)
            result["pairs"] = check_all(place, small=small, cpu=cpu)
    else:
        say("No GPU can be used: there is nothing to check.")
    result["ok"] = all(pair["ok"] for pair in result.get("pairs", ())) and "pairs" in result
    result["seconds"] = perf_counter() - started
    text = json.dumps(result, indent=2)
    if output:
        output.write_text(text + "\n", encoding="utf-8")
    else:
        click.echo(text)
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()

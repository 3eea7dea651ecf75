"""`lspec generate`: continue a text."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from lspec.cli.answer import answer_once, no_prompt, read_prompt
from lspec.cli.loading import load
from lspec.cli.options import MODEL_OPTIONS, OUTPUT_OPTIONS, SAMPLING_OPTIONS, add, split


@click.command()
@add(MODEL_OPTIONS, OUTPUT_OPTIONS, SAMPLING_OPTIONS)
def generate(**params: Any) -> int:
    """Continue a text, without a chat template.

    The text is piped in, or given with -p, or both.
    """
    prompt = read_prompt(params["prompt"])
    if not prompt:
        raise no_prompt("no text to continue", params["pair"])
    models, sampling = split()
    with load(models) as engine:
        return answer_once(
            partial(engine.stream, prompt, **sampling),
            n_ctx=engine.n_ctx,
            as_json=params["as_json"],
            stats=params["stats"],
            colour=params["show_drafts"],
        )

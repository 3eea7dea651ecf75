#!/usr/bin/env python
"""Make the memory-bound target (F16, 3.5 GB) and a Q4_0 draft from the pulled default pair.

    scripts/make_f16_target.py FOLDER

Writes FOLDER/target-f16.gguf and FOLDER/draft-q4_0.gguf with llama.cpp's own quantizer.
Requantized weights are no better than the 4-bit ones they come from: they are for measuring speed.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import click
import llama_cpp

from lspec import catalogue, store

FOLDER = click.Path(path_type=Path, file_okay=False)


def requantize(source: Path, result: Path, ftype: int) -> None:
    """Write `source` with the weights' type changed; nothing is left under `result` on failure."""
    if result.exists():
        return
    partial = result.with_suffix(".partial")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.pure = ftype, True, ftype != 1
    code = llama_cpp.llama_model_quantize(
        os.fsencode(source), os.fsencode(partial), ctypes.byref(params)
    )
    if code != 0:
        partial.unlink(missing_ok=True)
        raise click.ClickException(f"llama.cpp could not requantize {source} (code {code})")
    partial.rename(result)
    click.echo(f"{result}: {result.stat().st_size / 1e9:.2f} GB")


@click.command()
@click.argument("folder", type=FOLDER)
def main(folder: Path) -> None:
    """Make both files, unless they are there."""
    files = store.locate_pair(catalogue.load().pair())
    if files is None:
        raise click.ClickException("the default pair has not been pulled: lspec pull")
    folder.mkdir(parents=True, exist_ok=True)
    requantize(files.target[0], folder / "target-f16.gguf", llama_cpp.LLAMA_FTYPE_MOSTLY_F16)
    requantize(files.draft[0], folder / "draft-q4_0.gguf", llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0)


if __name__ == "__main__":
    main()

"""From the name of a pair, or two files, to a checked engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

from lspec.compat import require_match
from lspec.engine import DrafterName, Engine
from lspec.errors import CatalogueError, RequestError
from lspec.llama import LlamaModel, LoadOptions
from lspec.model import rolls_back
from lspec.request import MAX_GAMMA, check_gamma

log = logging.getLogger("lspec")

MAX_THREADS = 512  # llama.cpp's own limit
DEFAULT_N_CTX = 4096


def load(
    pair: str | None = None,
    *,
    target: str | Path | None = None,
    draft: str | Path | None = None,
    n_ctx: int = DEFAULT_N_CTX,
    draft_n_ctx: int | None = None,
    n_gpu_layers: int = -1,
    n_threads: int | None = None,
    gamma: int | str = "auto",
    drafter: str = "auto",
    exact: bool = False,
    chat_template: str | None = None,
) -> Engine:
    """Load a pulled pair of the catalogue (None: its default), or a target and a draft file.

    `n_ctx` is the window in tokens, `draft_n_ctx` the draft's own (None: the same). `n_gpu_layers`
    -1 offloads every layer of both models where the installed llama-cpp-python can. `n_threads`
    None means the physical cores that this process may use. `gamma` is the number of drafted
    tokens per round: "auto" drafts as far as it pays (passes are timed once, for up to 1.5 s, and
    remembered), 0 decodes plainly. `drafter` is "model", "ngram" (copies from the text itself, no
    draft needed), "none", or "auto": the model if there is one, and with gamma "auto" n-grams as
    well.

    Raises RequestError, CatalogueError, ModelLoadError, IncompatiblePairError.
    """
    gamma = check_gamma(gamma)
    _check(exact=exact, n_ctx=n_ctx, draft_n_ctx=draft_n_ctx, n_threads=n_threads)
    kind = _drafter_name("none" if gamma == 0 else drafter)
    target_files, draft_files = _files(pair, target, draft)
    if kind == "model" and not draft_files:
        raise RequestError("drafter 'model' needs a draft model", hint="Name one with --draft.")
    if kind == "auto" and not draft_files:
        log.warning("no draft model: drafting by lookup in the text alone")
    options = LoadOptions(n_ctx, MAX_GAMMA + 1, n_gpu_layers=n_gpu_layers, n_threads=n_threads)
    target_model = LlamaModel(target_files, options)
    draft_model = None
    if target_model.n_ctx < n_ctx:
        log.warning("the window is %d tokens: the model was trained on no more", target_model.n_ctx)
    try:
        if kind != "none" and not _can_roll_back(target_model, "target"):
            kind = "none"
        if draft_files and kind in ("auto", "model"):
            draft_model = LlamaModel(draft_files, replace(options, n_ctx=draft_n_ctx or n_ctx))
            require_match(target_model.vocab.vocabulary, draft_model.vocab.vocabulary)
            if not _can_roll_back(draft_model, "draft"):
                draft_model = draft_model.close()
        engine = Engine(
            target_model, draft_model, gamma=gamma, drafter=kind, chat_template=chat_template
        )
        if gamma == "auto" and (reason := engine.why_no_draft()):
            log.info(reason)
        return engine
    except BaseException:
        for model in filter(None, (target_model, draft_model)):
            model.close()
        raise


def _drafter_name(name: str) -> DrafterName:
    for known in get_args(DrafterName):
        if name == known:
            return cast(DrafterName, known)
    raise RequestError(f"drafter must be auto, model, ngram or none, not {name!r}")


def _check(*, exact: bool, **sizes: int | None) -> None:
    if exact:
        raise RequestError("exact mode is not there yet", hint="It comes with a later version.")
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise RequestError(f"{name} must be 1 or more, not {size}")
    if (sizes.get("n_threads") or 1) > MAX_THREADS:
        raise RequestError(f"n_threads must be at most {MAX_THREADS}, not {sizes['n_threads']}")


def _files(
    pair: str | None, target: str | Path | None, draft: str | Path | None
) -> tuple[Sequence[Path], Sequence[Path]]:
    """Return the files of target and draft; the latter may be none."""
    if target is not None:
        if pair is not None:
            raise RequestError(
                "give a pair or a target file, not both", hint="Leave out PAIR or --target."
            )
        return [Path(target)], [] if draft is None else [Path(draft)]
    if draft is not None:
        raise RequestError("a draft file needs a target file", hint="Name one with --target.")
    from lspec import catalogue, store

    chosen = catalogue.load().pair(pair)
    target_files, draft_files = map(store.locate, chosen.models)
    if not (target_files and draft_files):
        raise CatalogueError(
            f"the pair {chosen.name} is not on this machine",
            hint=f"`lspec pull {chosen.name}` downloads it.",
        )
    return target_files, draft_files


def _can_roll_back(model: LlamaModel, role: str) -> bool:
    """Try it; where a model cannot, decoding is plain and a notice says so.

    A recurrent state goes back within its last pass only: enough for a target, which sees a round
    in one pass, and not for a draft, which sees one token a pass.
    """
    recurrent = model.is_recurrent
    possible = not recurrent or role == "target"
    if possible and rolls_back(model, depth=MAX_GAMMA if recurrent else 1):
        return True
    log.warning("the %s model cannot take back drafted tokens: decoding plainly", role)
    return False

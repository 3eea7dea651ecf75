"""From the name of a pair, or two files, to a checked engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from lspec.engine import Engine
from lspec.errors import CatalogueError, RequestError
from lspec.llama import LlamaModel
from lspec.model import rolls_back
from lspec.opening import Opening
from lspec.planning import DEFAULT_N_CTX
from lspec.player import DrafterName
from lspec.request import check_gamma, check_rule
from lspec.round import MAX_GAMMA
from lspec.template import check_variables
from lspec.verify import RuleName
from lspec.wanted import wanted

log = logging.getLogger("lspec")

DEFAULT_RULE: RuleName = "block"


def load(
    pair: str | None = None,
    *,
    target: str | Path | None = None,
    draft: str | Path | None = None,
    n_ctx: int | str = DEFAULT_N_CTX,
    draft_n_ctx: int | None = None,
    n_gpu_layers: int = -1,
    draft_n_gpu_layers: int | None = None,
    main_gpu: int | None = None,
    tensor_split: Sequence[float] = (),
    flash_attn: str = "auto",
    n_threads: int | None = None,
    gamma: int | str = "auto",
    drafter: str = "auto",
    exact: bool = False,
    rule: str | None = None,
    kv_type: str | None = None,
    repack: bool = True,
    chat_template: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    force: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> Engine:
    """Load a pulled pair of the catalogue (None: its default), or a target and a draft file.

    `n_ctx` is the window in tokens, "auto" for the largest that fits into memory; `draft_n_ctx` is
    the draft's own (None: the same). `force` loads also what does not fit into it. `n_gpu_layers`
    -1 offloads every layer of both models where the installed llama-cpp-python can. `n_threads`
    None means the physical cores that this process may use. `gamma` is the number of drafted
    tokens per round: "auto" drafts as far as it pays (passes are timed once, for about 1.5 s, and
    remembered), 0 decodes plainly. `drafter` is "model", "ngram" (copies from the text itself, no
    draft needed), "none", or "auto": the model if there is one, and with gamma "auto" n-grams as
    well. `rule` says how drafted tokens are verified: "block", which judges the proposal as a
    whole (None: that one), or "rejection", token by token; both keep the target's law.

    `exact` makes the text depend on target, prompt, sampling and seed alone, bit for bit, wherever
    the target is computed in the same way: it is the same with any draft and gamma, and with none.
    What that takes on this machine is found out the first time (a minute or two on a CPU) and
    remembered. `kv_type` is the type of both caches, "f16", "q8_0" or "q4_0"; None is f16, but
    leaves `exact` the choice of the target's. `repack` rearranges 4-bit weights that a CPU computes
    with, as llama.cpp does by default: faster steps for a slower start and, on some CPUs, slower
    prompts; `exact` does it only where that promises more.

    `chat_template` is the source of a template instead of the model's own; `template_args` are its
    variables, as in `{"enable_thinking": False}`.

    `draft_n_gpu_layers` is the draft's own number of layers (None: the same). Of several GPUs all
    are used by their free memory, or in the shares of `tensor_split`, or `main_gpu` alone, a number
    from 0 on. A GPU without room gets fewer layers, and a notice says so; `exact`, whose text
    depends on that, puts all of the target there, half or none. `flash_attn` is "auto", "on" or
    "off".

    Raises RequestError, CatalogueError, ModelLoadError, IncompatiblePairError, and
    KeyboardInterrupt if `should_stop` says so while models are read or pass widths looked for.
    """
    gamma = check_gamma(gamma)
    check_variables(template_args or {})
    kind = _drafter_name("none" if gamma == 0 else drafter)
    chosen_rule = _rule(rule, exact=exact)
    how = wanted(
        n_ctx=n_ctx,
        draft_n_ctx=draft_n_ctx,
        n_gpu_layers=n_gpu_layers,
        draft_n_gpu_layers=draft_n_gpu_layers,
        main_gpu=main_gpu,
        tensor_split=tensor_split,
        flash_attn=flash_attn,
        n_threads=n_threads,
        kv_type=kv_type,
        repack=repack,
        force=force,
    )
    target_files, draft_files = locate(pair, target, draft)
    if kind == "model" and not draft_files:
        raise RequestError("drafter 'model' needs a draft model", hint="Give a draft file too.")
    draft_files = draft_files if kind in ("auto", "model") else ()
    opening = Opening(target_files, draft_files, how, should_stop=should_stop)
    widths = None
    if exact:
        target_model, widths = opening.exact_target()
    else:
        target_model = opening.target()
    if kind == "auto" and not draft_files:
        log.warning("no draft model: drafting by lookup in the text alone")
    draft_model = None
    try:
        if kind != "none" and not _goes_back(target_model, "target"):
            kind = "none"
        if draft_files and kind in ("auto", "model"):
            draft_model = opening.draft(target_model)
            if not _goes_back(draft_model, "draft"):
                draft_model = draft_model.close()
        engine = Engine(
            target_model,
            draft_model,
            gamma=gamma,
            drafter=kind,
            rule=chosen_rule,
            chat_template=chat_template,
            template_args=template_args,
            widths=widths,
        )
        for name in engine.chats.unread():
            log.warning("the chat template has no variable %s", name)
        if gamma == "auto" and (reason := engine.why_no_draft()):
            log.info(reason)
        return engine
    except BaseException:
        for model in filter(None, (target_model, draft_model)):
            model.close()
        raise


def locate(
    pair: str | None, target: str | Path | None, draft: str | Path | None
) -> tuple[Sequence[Path], Sequence[Path]]:
    """Return the files of target and draft as `load` would take them; the latter may be none.

    Raises RequestError, CatalogueError.
    """
    if target is not None:
        if pair is not None:
            raise RequestError(
                "give a pair or a target file, not both", hint="Leave out one of them."
            )
        return [_path(target)], [] if draft is None else [_path(draft)]
    if draft is not None:
        raise RequestError("a draft file needs a target file", hint="Name it: target=FILE.")
    from lspec import catalogue, store

    chosen = catalogue.load().pair(pair)
    target_files, draft_files = map(store.locate, chosen.models)
    if not (target_files and draft_files):
        raise CatalogueError(
            f"the pair {chosen.name} is not on this machine",
            hint=f"`lspec pull {chosen.name}` downloads it.",
        )
    return target_files, draft_files


def _path(file: str | Path) -> Path:
    """Return the path of a model's file, which may be missing. Raises RequestError."""
    path = Path(file)
    try:
        named = path.name and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        named = False
    if not named:
        raise RequestError(f"a model cannot have the file name {str(file)!r}")
    return path


def can_roll_back(model: LlamaModel, role: str) -> bool:
    """Try whether `model` can be `role`, "target" or "draft"; leaves it empty.

    A recurrent state goes back within its last pass only: enough for a target, which sees a round
    in one pass, and not for a draft, which sees one token a pass.
    """
    recurrent = model.is_recurrent
    possible = not recurrent or role == "target"
    return possible and rolls_back(model, depth=MAX_GAMMA if recurrent else 1)


def _goes_back(model: LlamaModel, role: str) -> bool:
    """Try it; where a model cannot, decoding is plain and a notice says so."""
    possible = can_roll_back(model, role)
    if not possible:
        log.warning("the %s model cannot take back drafted tokens: decoding plainly", role)
    return possible


def _drafter_name(name: str) -> DrafterName:
    for known in get_args(DrafterName):
        if name == known:
            return cast(DrafterName, known)
    raise RequestError(f"drafter must be auto, model, ngram or none, not {name!r}")


def _rule(name: str | None, *, exact: bool) -> RuleName:
    if exact and name not in (None, "coupled"):
        raise RequestError("exact mode has a rule of its own", hint="Leave out the rule.")
    return DEFAULT_RULE if name is None else check_rule(name)

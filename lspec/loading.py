"""From the name of a pair, or two files, to a checked engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

from lspec.compat import require_match
from lspec.engine import DrafterName, Engine
from lspec.errors import CatalogueError, RequestError
from lspec.llama import KvType, LlamaModel, LoadOptions
from lspec.model import rolls_back
from lspec.planning import DEFAULT_N_CTX, Planner
from lspec.probe import require_loadable
from lspec.request import check_gamma, check_rule
from lspec.round import MAX_GAMMA
from lspec.selfcheck import choose
from lspec.verify import RuleName

log = logging.getLogger("lspec")

DEFAULT_RULE = "rejection"
MAX_THREADS = 512  # llama.cpp's own limit


def load(
    pair: str | None = None,
    *,
    target: str | Path | None = None,
    draft: str | Path | None = None,
    n_ctx: int | str = DEFAULT_N_CTX,
    draft_n_ctx: int | None = None,
    n_gpu_layers: int = -1,
    n_threads: int | None = None,
    gamma: int | str = "auto",
    drafter: str = "auto",
    exact: bool = False,
    rule: str = DEFAULT_RULE,
    kv_type: str | None = None,
    chat_template: str | None = None,
    force: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> Engine:
    """Load a pulled pair of the catalogue (None: its default), or a target and a draft file.

    `n_ctx` is the window in tokens, "auto" for the largest that fits into memory; `draft_n_ctx` is
    the draft's own (None: the same). `force` loads also what does not fit. `n_gpu_layers`
    -1 offloads every layer of both models where the installed llama-cpp-python can. `n_threads`
    None means the physical cores that this process may use. `gamma` is the number of drafted
    tokens per round: "auto" drafts as far as it pays (passes are timed once, for up to 1.5 s, and
    remembered), 0 decodes plainly. `drafter` is "model", "ngram" (copies from the text itself, no
    draft needed), "none", or "auto": the model if there is one, and with gamma "auto" n-grams as
    well. `rule` says how drafted tokens are verified: "rejection", or "block", which judges the
    proposal as a whole; both keep the target's law.

    `exact` makes the text depend on target, prompt, sampling and seed alone, bit for bit: it is the
    same with any draft and gamma, and with none. What that takes on this machine is found out the
    first time (up to two minutes on a CPU) and remembered. `kv_type` is the type of both caches,
    "f16", "q8_0" or "q4_0"; None is f16, but leaves `exact` the choice of the target's. If
    `should_stop` says so during that search, KeyboardInterrupt is raised.

    Raises RequestError, CatalogueError, ModelLoadError, IncompatiblePairError.
    """
    gamma = check_gamma(gamma)
    window = DEFAULT_N_CTX if n_ctx == "auto" else _window(n_ctx)
    _check_sizes(n_ctx=window, draft_n_ctx=draft_n_ctx, n_threads=n_threads)
    kind = _drafter_name("none" if gamma == 0 else drafter)
    chosen_rule, chosen_kv = _rule(rule, exact=exact), _kv_type(kv_type)
    target_files, draft_files = locate(pair, target, draft)
    if kind == "model" and not draft_files:
        raise RequestError("drafter 'model' needs a draft model", hint="Name one with --draft.")
    if kind == "auto" and not draft_files:
        log.warning("no draft model: drafting by lookup in the text alone")
    draft_files = draft_files if kind in ("auto", "model") else ()
    options = LoadOptions(
        window,
        MAX_GAMMA + 1,
        n_gpu_layers=n_gpu_layers,
        n_threads=n_threads,
        # Exact mode has a choice of its own: until then, the one that takes less.
        kv_type=chosen_kv or ("q8_0" if exact else "f16"),
    )
    draft_options = replace(options, n_ctx=draft_n_ctx or window, kv_type=chosen_kv or "f16")
    planner = Planner(
        target_files,
        draft_files,
        auto=n_ctx == "auto",
        shares_window=draft_n_ctx is None,
        force=force,
    )
    wanted, wanted_draft = options, draft_options
    options, draft_options = planner.settle(wanted, wanted_draft)
    require_loadable(target_files, draft_files)
    widths = None
    if exact:
        choice = choose(target_files, options, chosen_kv, should_stop=should_stop)
        widths = choice.widths
        wanted = replace(wanted, kv_type=choice.kv_type, spare=max(widths))
        options, draft_options = planner.settle(wanted, wanted_draft)
    target_model = LlamaModel(target_files, options)
    draft_model = None
    if target_model.n_ctx < options.n_ctx:
        log.warning("the window is %d tokens: the model was trained on no more", target_model.n_ctx)
    try:
        if kind != "none" and not _goes_back(target_model, "target"):
            kind = "none"
        if draft_files and kind in ("auto", "model"):
            draft_model = LlamaModel(draft_files, draft_options)
            require_match(target_model.vocab.vocabulary, draft_model.vocab.vocabulary)
            if not _goes_back(draft_model, "draft"):
                draft_model = draft_model.close()
        engine = Engine(
            target_model,
            draft_model,
            gamma=gamma,
            drafter=kind,
            rule=chosen_rule,
            chat_template=chat_template,
            widths=widths,
        )
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


def _rule(name: str, *, exact: bool) -> RuleName:
    rule = check_rule(name)
    if exact and rule not in (DEFAULT_RULE, "coupled"):
        raise RequestError("exact mode has a rule of its own", hint="Leave out the rule.")
    return rule


def _kv_type(name: str | None) -> KvType | None:
    for known in (None, *get_args(KvType)):
        if name == known:
            return cast(KvType | None, known)
    raise RequestError(f"kv_type must be f16, q8_0 or q4_0, not {name!r}")


def _window(n_ctx: int | str) -> int:
    if isinstance(n_ctx, str):
        raise RequestError(f"n_ctx must be a number or 'auto', not {n_ctx!r}")
    return n_ctx


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise RequestError(f"{name} must be 1 or more, not {size}")
    if (sizes.get("n_threads") or 1) > MAX_THREADS:
        raise RequestError(f"n_threads must be at most {MAX_THREADS}, not {sizes['n_threads']}")

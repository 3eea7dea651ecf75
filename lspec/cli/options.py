"""Options that several commands share, each with one environment variable."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from lspec.arguments import RENAMED
from lspec.cli.completion import pair_names
from lspec.params import SamplingParams
from lspec.paths import reason
from lspec.round import MAX_GAMMA

Command = TypeVar("Command", bound=Callable[..., Any])

FILE = click.Path(path_type=Path, dir_okay=False)
_MOST = 2**24  # characters of a schema, a grammar or a template


class NumberOrAuto(click.ParamType[int | str]):
    """A number, or "auto"."""

    name = "N|auto"

    def __init__(self, least: int, most: int | None = None) -> None:
        """`least` and `most` are the smallest and the largest number; None: there is none."""
        self._least, self._most = least, most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """Return an int or "auto"."""
        if value == "auto":
            return "auto"
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor 'auto'.", param, ctx)
        if number < self._least:
            self.fail(f"{number} is less than {self._least}.", param, ctx)
        if self._most is not None and number > self._most:
            self.fail(f"{number} is more than {self._most}.", param, ctx)
        return number


class Bias(click.ParamType[tuple[int, float]]):
    """A token id and what to add to its logit."""

    name = "ID=VALUE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        """Return the pair."""
        if isinstance(value, tuple):
            return value
        token, _, bias = value.partition("=")
        try:
            return int(token), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not a token id, '=' and a number.", param, ctx)


class TemplateArg(click.ParamType[tuple[str, Any]]):
    """A variable of the chat template: JSON where it can be read so, else a text."""

    name = "KEY=VALUE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        """Return the pair."""
        if isinstance(value, tuple):
            return value
        key, sign, text = value.partition("=")
        if not sign:
            self.fail(f"{value!r} is not a name, '=' and a value.", param, ctx)
        try:
            return key, json.loads(text)
        except (ValueError, RecursionError):
            return key, text


class Shares(click.ParamType[tuple[float, ...]]):
    """Numbers, separated by commas."""

    name = "N,N"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """Return the numbers."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(map(float, value.split(",")))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers, such as 3,1.", param, ctx)


GAMMA = NumberOrAuto(0, MAX_GAMMA)


def _option(*names: str, **kwargs: Any) -> Callable[[Command], Command]:
    """Make an option whose environment variable is LSPEC_ and its long name."""
    long = next(name for name in names if name.startswith("--")).split("/")[0]
    envvar = "LSPEC_" + long.removeprefix("--").replace("-", "_").upper()
    return click.option(*names, envvar=envvar, **kwargs)


FILE_OPTIONS = (
    click.argument("pair", required=False, envvar="LSPEC_PAIR", shell_complete=pair_names),
    _option("--target", type=FILE, help="A GGUF file as the target, instead of PAIR."),
    _option("--draft", type=FILE, help="A GGUF file as its draft."),
)

GPU_OPTIONS = (
    _option("--gpu-layers", type=int, help="Layers of each model on the GPU (default: all)."),
    _option("--draft-gpu-layers", type=int, help="The draft's own (default: --gpu-layers)."),
    _option("--main-gpu", type=click.IntRange(0), help="Use this GPU alone; 0 is the first."),
    _option("--tensor-split", type=Shares(), help="Divide the layers over GPUs, such as 3,1."),
    _option(
        "--flash-attn",
        type=click.Choice(["auto", "on", "off"]),
        help="Flash attention (default auto: where the device has it).",
    ),
)

DRAFTER_OPTION = _option(
    "--drafter",
    type=click.Choice(["auto", "model", "ngram", "none"]),
    default="auto",
    show_default=True,
    help="Who drafts; none: plain decoding.",
)

# How models are loaded, whatever is done with them then.
LOAD_OPTIONS = (
    _option(
        "--kv-type",
        type=click.Choice(["f16", "q8_0", "q4_0"]),
        help="Type of the caches (default f16; --exact chooses).",
    ),
    _option(
        "--ctx",
        type=NumberOrAuto(least=1),
        help="Window in tokens (default 4096); auto: the largest that fits into memory.",
    ),
    _option(
        "--repack/--no-repack",
        default=None,
        help="Rearrange 4-bit weights for the CPU: faster answers, slower start (default: do).",
    ),
    _option("--draft-ctx", type=click.IntRange(1), help="Window of the draft (default: --ctx)."),
    _option("--force", is_flag=True, help="Load also what does not fit into memory."),
    _option("--threads", type=click.IntRange(1, 512), help="CPU threads (default: all cores)."),
    *GPU_OPTIONS,
)

ENGINE_OPTIONS = (
    DRAFTER_OPTION,
    _option(
        "--exact",
        is_flag=True,
        help="The same text with any draft and gamma, and with none, bit for bit.",
    ),
    _option(
        "--rule",
        type=click.Choice(["block", "rejection"]),
        help="How drafted tokens are verified (default block).",
    ),
    *LOAD_OPTIONS,
)

TEMPLATE_OPTIONS = (
    _option("--chat-template", type=FILE, help="A Jinja2 file to use instead of the model's own."),
    _option(
        "--template-arg",
        type=TemplateArg(),
        multiple=True,
        help="A variable of the chat template, as enable_thinking=false; several times.",
    ),
)

MODEL_OPTIONS = (
    *FILE_OPTIONS,
    _option(
        "--gamma",
        type=GAMMA,
        help="Drafted tokens per round, 0 to 16; auto (default): what pays.",
    ),
    *ENGINE_OPTIONS,
)

TRUNCATION_OPTIONS = (
    _option("--top-k", type=int, help="Keep the k likeliest tokens; 0 is off (default 40)."),
    _option("--top-p", type=float, help="Keep the likeliest up to this sum (default 0.95)."),
    _option("--min-p", type=float, help="Keep what has this part of the best (default 0.05)."),
    _option("--typical-p", type=float, help="Keep locally typical tokens (default 1: off)."),
    _option("--top-n-sigma", type=float, help="Keep n standard deviations (default 0: off)."),
)

PENALTY_OPTIONS = (
    _option("--repeat-penalty", type=float, help="Divide logits of recent tokens (default 1)."),
    _option("--frequency-penalty", type=float, help="Lower them for each time (default 0)."),
    _option("--presence-penalty", type=float, help="Lower them once (default 0)."),
    _option("--penalty-last-n", type=int, help="How many tokens are recent; -1: all (default 64)."),
    _option(
        "--logit-bias",
        type=Bias(),
        multiple=True,
        help="Add to a token's logit; -inf bans it; can be given several times.",
    ),
)

SAMPLING_OPTIONS = (
    _option("--temperature", type=float, help="0 is greedy (default 0.8)."),
    *TRUNCATION_OPTIONS,
    *PENALTY_OPTIONS,
    _option("--max-tokens", type=int, help="Stop after so many tokens (default: the window)."),
    _option("--seed", type=int, help="Same seed, same text (default: random)."),
    _option("--stop", multiple=True, help="End before this text; can be given several times."),
)

OUTPUT_OPTIONS = (
    click.option("-p", "--prompt", help="The text to answer; piped input comes before it."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end."),
    click.option(
        "--stats/--no-stats",
        default=None,
        help="A line of statistics on stderr (default: on a terminal).",
    ),
    click.option(
        "--logprobs", type=int, help="With --json: log-probabilities, and those of the N likeliest."
    ),
    click.option(
        "--json-schema",
        type=FILE,
        help="Answer with JSON of this schema. Needs lspec[grammar].",
    ),
    click.option(
        "--grammar", type=FILE, help="Answer by this grammar, GBNF or Lark. Needs lspec[grammar]."
    ),
    click.option("--show-drafts", is_flag=True, help="Show drafted tokens in green at a terminal."),
)


def add(*groups: tuple[Callable[[Any], Any], ...]) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of `groups` in their order."""

    def decorate(command: Command) -> Command:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What the model options say; None leaves the default to `lspec.load`."""

    pair: str | None
    load: dict[str, Any]


def split() -> tuple[ModelChoice, dict[str, Any]]:
    """Take the command's parameters apart: how to load, how to sample; only what was given."""
    ctx = click.get_current_context()
    given = {k: v for k, v in ctx.params.items() if v is not None}
    _require_unicode(given)
    files = ("target", "draft")
    engine = ("gamma", "drafter", "exact", "rule", "kv_type", "repack", "force", *RENAMED)
    gpu = ("main_gpu", "tensor_split", "flash_attn")
    load = {RENAMED.get(k, k): given[k] for k in (*files, *engine, *gpu) if k in given}
    if "chat_template" in given:
        load["chat_template"] = _read(given["chat_template"])
        if not load["chat_template"].strip():
            raise click.UsageError(f"{given['chat_template']} is empty.")
    if given.get("template_arg"):
        load["template_args"] = dict(given["template_arg"])
    pair = given.get("pair")
    typed = {k for k in given if ctx.get_parameter_source(k) == ParameterSource.COMMANDLINE}
    if "pair" in typed:  # what is typed outranks the environment
        load = {k: v for k, v in load.items() if k not in {"target", "draft"} - typed}
    elif "target" in load:
        pair = None
    if "logprobs" in given and not given["as_json"]:
        raise click.UsageError("--logprobs shows in --json only: add that.")
    options: dict[str, Any] = {
        k: given[k]
        for k in ("max_tokens", "seed", "stop", "logprobs")
        if given.get(k) not in (None, ())
    }
    if response_format := _response_format(given):
        from lspec.grammar import check_format

        check_format(response_format)  # now, and not when the models are loaded
        options["response_format"] = response_format
    fields = SamplingParams.__dataclass_fields__
    options["sampling"] = SamplingParams(**{k: given[k] for k in fields if k in given})
    return ModelChoice(pair, load), options


def _require_unicode(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if not isinstance(value, str):
            continue  # a path may have any bytes
        try:
            value.encode()
        except UnicodeEncodeError as error:
            option = "PAIR" if name == "pair" else f"--{name.replace('_', '-')}"
            found = f"a lone surrogate, U+{ord(value[error.start]):04X}"
            raise click.UsageError(f"{option} is not Unicode: it has {found}.") from None


def _response_format(given: dict[str, Any]) -> dict[str, Any] | None:
    """Return what --json-schema or --grammar asks for."""
    if "json_schema" in given and "grammar" in given:
        raise click.UsageError("Give --json-schema or --grammar, not both.")
    if "json_schema" in given:
        try:
            schema = json.loads(_read(given["json_schema"]))
        except (ValueError, RecursionError) as error:
            raise click.UsageError(f"{given['json_schema']} is not JSON: {error}") from None
        if not isinstance(schema, dict):
            raise click.UsageError(f"{given['json_schema']} is no JSON schema, which is an object.")
        return {"type": "json_schema", "json_schema": {"schema": schema}}
    if "grammar" in given:
        return {"type": "grammar", "grammar": _read(given["grammar"])}
    return None


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"cannot read {path}: {reason(error)}") from None
    if len(text) > _MOST:
        raise click.UsageError(f"{path} is too long: more than {_MOST} characters.")
    return text
